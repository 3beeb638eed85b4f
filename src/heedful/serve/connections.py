"""Connections: a time limit for a request's headers, requests that are not HTTP, and open files."""

import asyncio
import errno
import json
import logging
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from heedful.serve.errors import HttpError

MAX_HEADERS = 16_384  # bytes of a request's address and headers
_SECONDS = 10.0  # between two lines about a lack of open files
_log = logging.getLogger("heedful.serve")


def timed_protocol(read_timeout: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with a time limit for the headers of a request.

    (uvicorn's own limit, `timeout_keep_alive`, ends with the first byte.)
    """

    class TimedProtocol(H11Protocol):
        """A connection that is closed if the headers of a request take too long."""

        _timer: asyncio.TimerHandle | None = None

        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.conn = _Connection(h11.SERVER, MAX_HEADERS)

        def connection_made(self, transport: Any) -> None:
            """Begin to wait for the first headers."""
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            """Stop waiting when the headers are complete, and begin again for the next ones."""
            super().data_received(data)
            waits = self.cycle is None or self.cycle.response_complete
            if not waits:
                self._stop_timer()
            elif self._timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop waiting."""
            self._stop_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """Answer a request that is not HTTP; called while h11's error is handled."""
            for event in _answer_to(sys.exc_info()[1]):
                self.transport.write(self.conn.send(event))
            self.transport.close()

        def _unsupported_upgrade_warning(self) -> None:
            """Log nothing: a request to change the protocol is answered in HTTP/1.1."""

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(read_timeout, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedProtocol


class _Connection(h11.Connection):
    """A connection that accepts one length of a body.

    A proxy that reads the other one takes the end of a body for the next request, or the reverse
    (request smuggling). A server may refuse both together (RFC 9112, section 6.3), and
    Transfer-Encoding is wrong in HTTP/1.0 (section 6.1).
    """

    def next_event(self) -> Any:
        """The next event of h11; raises RemoteProtocolError for a request with two lengths."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names:
                if b"content-length" in names:
                    raise h11.RemoteProtocolError("it has Content-Length and Transfer-Encoding")
                if event.http_version == b"1.0":
                    raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")
        return event


def _answer_to(cause: BaseException | None) -> list[Any]:
    """The events of an answer to what h11 cannot read."""
    answer = too_many_headers()
    if getattr(cause, "error_status_hint", 400) != answer.status:
        problem = str(cause).partition(": bytearray")[0]
        answer = HttpError(400, f"the request is not HTTP/1.1: {problem}")
    body = json.dumps(answer.body("")).encode()
    headers = {"content-type": "application/json", "connection": "close"}
    headers["content-length"] = str(len(body))
    response = h11.Response(
        status_code=answer.status,
        headers=[(name.encode(), value.encode()) for name, value in headers.items()],
        reason=HTTPStatus(answer.status).phrase.encode(),
    )
    return [response, h11.Data(data=body), h11.EndOfMessage()]


def too_many_headers() -> HttpError:
    """The error of a request whose address and headers are too long."""
    return HttpError(431, f"the address and headers may have {MAX_HEADERS:,} bytes")


def report_loop_errors() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of the event loop's errors: a lack of open files is one line now and then.

    (asyncio would log a traceback for each connection that waits, thousands a second.)
    """
    last = -_SECONDS

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log one error."""
        nonlocal last
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - last >= _SECONDS:
            last = loop.time()
            _log.error("new connections wait: %s; raise the limit (ulimit -n)", error.strerror)

    return report
