"""Middleware of all routes: a request's id, its key, limits of its size and of its time."""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote

from heedful.errors import UserError
from heedful.serve.connections import MAX_HEADERS, too_many_headers
from heedful.serve.errors import LIBRETRANSLATE, HttpError, shutting_down, timed_out
from heedful.serve.hosts import AllowedHosts
from heedful.serve.keys import HIDDEN, Keys, tenant_of
from heedful.serve.metrics import Metrics
from heedful.serve.multipart import MEDIA_TYPE, fields_of
from heedful.serve.page import FILES
from heedful.serve.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PUBLIC = {
    "/health",
    "/health/live",
    "/health/ready",
    "/frontend/settings",
    "/languages",  # for which clients of LibreTranslate send no key
    *FILES,
}  # routes that need no key, also while draining
DOWNLOADS = "/download_file/"  # likewise: its addresses cannot be guessed
_INFO = "heedful.request"
_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_FORM = "application/x-www-form-urlencoded"
_TYPED = {"alternatives", "scores", "quality", "stream"}  # fields of forms that are no texts
# Fields of bodies that are not logged; clients of other servers send theirs by mistake.
_SECRETS = {"api_key", "apikey", "key", "authorization", "token", "password", "secret"}
_GRACE = 1.0  # seconds for a stream to report that its time limit is reached
_log = logging.getLogger("heedful.serve")


@dataclass
class RequestInfo:
    """Facts of one request, for its log line and metrics.

    Attributes:
        deadline: of the event loop's clock.
        role: `admin`, `user`, or "" without a keys file.
        tenant: a name for its key, which does not tell it; "" without a keys file.
        model: that answers; "" for routes without one.
        num_prompt, num_new: tokens read and generated.
        resources: what the request holds, such as slots of a queue; freed at its end.
    """

    id: str
    deadline: float
    role: str = ""
    tenant: str = ""
    model: str = ""
    num_prompt: int = 0
    num_new: int = 0
    status: int = 0
    started: float = field(default_factory=time.perf_counter)
    resources: ExitStack = field(default_factory=ExitStack)


def info_of(scope: MutableMapping[str, Any]) -> RequestInfo:
    """The facts of the request of an ASGI scope."""
    info: RequestInfo = scope[_INFO]
    return info


def log_failure(info: RequestInfo, error: Exception) -> None:
    """Log the defect that ends a request under its id; errors of the input are none."""
    cause = error.__cause__ if isinstance(error, HttpError) else error
    if cause is not None and not isinstance(cause, HttpError | UserError):
        _log.error("request %s failed", info.id, exc_info=cause)


class Guard:
    """ASGI middleware around all routes.

    A request whose client has gone, or whose time is over, is cancelled; the work that it waits
    for is then dropped by the model's worker before its next batch or step.

    Attributes:
        is_draining: new requests are refused with 503.

    Raises:
        UserError: as `AllowedHosts`.
    """

    def __init__(self, app: App, settings: Settings, keys: Keys, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.keys = keys
        self.metrics = metrics
        self.is_draining = False
        self.hosts = AllowedHosts(settings.allowed_hosts, settings.cors)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Run the app for one request, or answer an error."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        now = asyncio.get_running_loop().time()
        info = RequestInfo(self._request_id(scope), now + self.settings.request_timeout)
        scope[_INFO] = info
        response = _Response(send, info)
        self.metrics.begin()
        try:
            await self._answer(scope, receive, response)
        except HttpError as error:
            await response.error(scope["path"], error)
        except Exception as error:
            log_failure(info, error)
            failure = HttpError(500, "the server failed; its log has the reason")
            await response.error(scope["path"], failure)
        finally:
            info.resources.close()
            self._record(scope, info)

    async def _answer(
        self, scope: MutableMapping[str, Any], receive: Receive, response: "_Response"
    ) -> None:
        path = scope["path"]
        _check_headers(scope)
        headers = _headers_of(scope)
        self._check_host_and_origin(headers)
        is_public = path in PUBLIC or path.startswith(DOWNLOADS)
        if self.is_draining and not is_public:
            raise shutting_down()
        key = _key_of(headers)
        if self.keys and not is_public and key is None and path not in LIBRETRANSLATE:
            raise HttpError(401, "give an API key: the header `Authorization: Bearer KEY`")
        body = await self._read_body(headers, receive)
        if path in LIBRETRANSLATE:
            body = _form_as_json(scope, headers, body)
        if self.keys and not is_public:
            key = key or _key_in(body)
            role = self.keys.role(key)
            if key is None or role is None:
                raise HttpError(401, "the API key is missing or unknown")
            scope[_INFO].role, scope[_INFO].tenant = role, tenant_of(key)
        if self.settings.log_texts and body:
            text = self.keys.hide(_without_secrets(body), key or "")[:10_000]
            _log.info("request %s body %s", scope[_INFO].id, text)
        await self._run(scope, body, receive, response)

    async def _run(
        self,
        scope: MutableMapping[str, Any],
        body: bytes,
        receive: Receive,
        response: "_Response",
    ) -> None:
        """Run the app until it ends, its client goes, or its time is over."""
        gone = asyncio.ensure_future(_disconnected(receive))
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            """The body, and then the end of the connection."""
            if messages:
                return messages.pop()
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        app = asyncio.ensure_future(self.app(scope, replay, response))
        info: RequestInfo = scope[_INFO]
        seconds = info.deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait({app, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not app.done() and not gone.done() and response.is_stream:
                await asyncio.wait({app, gone}, timeout=_GRACE, return_when="FIRST_COMPLETED")
            if app.done():
                app.result()
            elif gone.done():
                info.status = info.status or 499
            else:
                limit = self.settings.request_timeout
                raise timed_out(f"no answer within {limit:g} seconds", limit)
        finally:
            for task in (app, gone):
                task.cancel()
            await asyncio.gather(app, gone, return_exceptions=True)

    async def _read_body(self, headers: dict[bytes, str], receive: Receive) -> bytes:
        """The whole body, within the limits of its size and time."""
        if headers.get(b"content-encoding", "identity").lower() != "identity":
            raise HttpError(415, "compressed bodies are not read; send the body as it is")
        most, seconds = self.settings.max_body, self.settings.read_timeout
        too_large = HttpError(
            413, f"the body may have {most:,} bytes", code="body_too_large", values={"limit": most}
        )
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(400, "the connection ended within the body")
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise HttpError(408, f"the body took longer than {seconds:g} seconds") from None

    def _check_host_and_origin(self, headers: dict[bytes, str]) -> None:
        """Refuse pages of other sites: browsers send some of their requests without asking.

        (HTTP/1.0 has no header Host; browsers always send it.)
        """
        host = headers.get(b"host")
        if host is not None and host not in self.hosts:
            raise HttpError(
                403, f"this server does not answer to {host[:100]!r} (--allowed-host NAME)"
            )
        origin, allowed = headers.get(b"origin"), self.settings.cors
        if origin is None or origin in allowed or "*" in allowed:
            return
        if origin.partition("://")[2] != host:
            raise HttpError(403, "pages of this origin are not allowed (--cors ORIGIN)")

    def _request_id(self, scope: MutableMapping[str, Any]) -> str:
        """The client's own id, if it is a plain one and has no key, or a new one."""
        headers = _headers_of(scope)
        number = headers.get(b"x-request-id", "")
        if _ID.fullmatch(number) and self.keys.hide(number, _key_of(headers) or "") == number:
            return number
        return secrets.token_hex(8)

    def _record(self, scope: MutableMapping[str, Any], info: RequestInfo) -> None:
        """Count and log a request that has ended."""
        seconds = time.perf_counter() - info.started
        route = getattr(scope.get("route"), "path", "other")
        self.metrics.end(route, info.model, info.status, seconds)
        if route == "other":
            shown = self.keys.hide(scope["path"], _key_of(_headers_of(scope)) or "")
            path = quote(shown, safe="/*", errors="replace")[:100]
        else:
            path = route
        model = f" model={info.model}" if info.model else ""
        if info.num_prompt:
            self.metrics.tokens(info.model, info.num_prompt, info.num_new)
            model += f" prompt={info.num_prompt} new={info.num_new}"
        # Of a proxy's header, which may have spaces.
        client = quote((scope.get("client") or ["-"])[0], safe=":")[:100]
        line = f"{info.id} {client} {scope['method']} {path} {info.status}{model}"
        _log.info("%s %.1f ms", line, 1_000 * seconds)


class _Response:
    """The `send` of a request: it adds the id, and keeps the status."""

    def __init__(self, send: Send, info: RequestInfo) -> None:
        self._send = send
        self._info = info
        self.is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._info.status = message["status"]
            headers = list(message.get("headers", []))
            self.is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in headers
            )
            message = {**message, "headers": [*headers, (b"x-request-id", self._info.id.encode())]}
        elif not message.get("more_body", False):
            # Before the client can read the end: its next request finds the place of this one free.
            self._info.resources.close()
        await self._send(message)

    async def error(self, path: str, error: HttpError) -> None:
        """Answer an error, unless an answer has begun; the connection is then cut."""
        if self._info.status:
            if error.status >= 500:
                raise RuntimeError(error.message)
            return
        body = json.dumps(error.body(path)).encode()
        headers = {**error.headers, "content-type": "application/json", "connection": "close"}
        headers["content-length"] = str(len(body))
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": error.status, "headers": encoded}
        await self(start)
        await self({"type": "http.response.body", "body": body})


def _check_headers(scope: MutableMapping[str, Any]) -> None:
    """Refuse long addresses and headers, which h11 limits only while they are incomplete."""
    parts = [scope["raw_path"], scope["query_string"]]
    parts += [part for header in scope["headers"] for part in header]
    if sum(map(len, parts)) > MAX_HEADERS:
        raise too_many_headers()


def _headers_of(scope: MutableMapping[str, Any]) -> dict[bytes, str]:
    """The headers by their names in lower case."""
    return {name: value.decode("latin-1") for name, value in scope["headers"]}


def _key_of(headers: dict[bytes, str]) -> str | None:
    scheme, _, key = headers.get(b"authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key")


def _key_in(body: bytes) -> str | None:
    """The key that LibreTranslate's clients have in the body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    key = content.get("api_key") if isinstance(content, dict) else None
    return key if isinstance(key, str) else None


def _without_secrets(body: bytes) -> str:
    """A JSON body as ASCII for the log, without fields of keys; of another one only its size."""

    def hide(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The fields of an object."""
        return {
            name: value
            if isinstance(value, dict) or name.lower().replace("-", "_") not in _SECRETS
            else HIDDEN
            for name, value in pairs
        }

    try:
        return json.dumps(json.loads(body, object_pairs_hook=hide))
    except (ValueError, RecursionError):
        return f"of {len(body)} bytes, not JSON"


def _form_as_json(scope: MutableMapping[str, Any], headers: dict[bytes, str], body: bytes) -> bytes:
    """The body of a form as JSON; other bodies are unchanged.

    Raises:
        HttpError: 400 for a form that is not UTF-8, or with too many fields.
    """
    content_type = headers.get(b"content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == MEDIA_TYPE:
        pairs = fields_of(content_type, body)
    elif media_type != _FORM:
        return body
    else:
        try:
            pairs = parse_qsl(
                body.decode(), keep_blank_values=True, errors="strict", max_num_fields=1_000
            )
        except ValueError:
            raise HttpError(400, "the form is not UTF-8, or has too many fields") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields and name not in _TYPED:
            known = fields[name]
            fields[name] = [*(known if isinstance(known, list) else [known]), value]
        else:
            fields[name] = value
    return _as_json(scope, fields)


def _typed(name: str, value: Any) -> Any:
    """The value of a form's field: a number, truth value or object where JSON has one."""
    if name == "glossary":
        with suppress(ValueError, RecursionError, TypeError):
            terms = json.loads(value)
            if isinstance(terms, dict) and all(isinstance(term, str) for term in terms.values()):
                return terms
    if name == "alternatives" and str(value).isdecimal() and len(value) < 9:
        return int(value)
    return value == "true" if name in _TYPED and value in ("true", "false") else value


def _as_json(scope: MutableMapping[str, Any], fields: dict[str, Any]) -> bytes:
    """The fields of a form as a JSON body, whose type is set in the headers."""
    others = [(n, v) for n, v in scope["headers"] if n not in (b"content-type", b"content-length")]
    scope["headers"] = [*others, (b"content-type", b"application/json")]
    return json.dumps({name: _typed(name, value) for name, value in fields.items()}).encode()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
