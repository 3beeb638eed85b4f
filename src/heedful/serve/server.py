"""The server's process: its socket, its signals, and the order of start and end."""

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import uvicorn

from heedful.errors import UserError
from heedful.serve.app import create_app
from heedful.serve.connections import MAX_HEADERS, report_loop_errors, timed_protocol
from heedful.serve.guard import Guard
from heedful.serve.hosts import AllowedHosts
from heedful.serve.keys import Keys
from heedful.serve.metrics import Metrics
from heedful.serve.models import Registry
from heedful.serve.settings import Settings

MAX_CONNECTIONS = 1_024
# Seconds for which a thread may keep Python's lock. A net releases it in each of its operations,
# and would wait 5 ms (Python's default) to continue while the event loop reads requests.
_SWITCH_INTERVAL = 0.00005
_log = logging.getLogger("heedful.serve")


def serve(
    directories: Mapping[str, Path],
    host: str,
    port: int,
    settings: Settings,
    on_ready: Callable[[str, Registry], None] = lambda url, registry: None,
) -> None:
    """Serve models until SIGTERM or SIGINT, after which requests in progress are answered.

    SIGHUP opens all models and the keys again. The socket is open while models are loaded; requests
    are answered 503 until then.

    Args:
        port: 0: any free one.
        on_ready: called with the server's address and models when all of them are open.

    Raises:
        UserError: keys or a model that cannot be read; an address that cannot be listened to; an
            allowed host that is no name.
    """
    keys = Keys(settings.keys)
    AllowedHosts(settings.allowed_hosts)
    settings = replace(settings, allowed_hosts=(*settings.allowed_hosts, host))
    listener = listen(host, port)
    with listener:
        address, number = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        server = Server(directories, settings, keys)
        sys.setswitchinterval(_SWITCH_INTERVAL)
        asyncio.run(
            server.run(listener, lambda: on_ready(f"http://{shown}:{number}", server.registry))
        )


def check_models(directories: Mapping[str, Path], settings: Settings) -> list[str]:
    """Open the keys, models and glossaries without a socket, and describe each model; errors as in
    `serve`."""
    Keys(settings.keys)
    AllowedHosts(settings.allowed_hosts)
    registry = Registry(directories, settings, Metrics())
    lines = []
    for name in directories:
        model, _ = registry.load(name)
        lines.append(f"{name}: {model!r}")
    return lines


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises UserError if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2_048)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot listen to {host} port {port}: {reason}; choose another --host or --port"
        ) from None
    return listener


class Server:
    """One server in an event loop.

    Attributes:
        registry: its models.
        guard: the middleware that every request passes.
    """

    def __init__(self, directories: Mapping[str, Path], settings: Settings, keys: Keys) -> None:
        self.registry = Registry(directories, settings, Metrics())
        self.keys = keys
        app = create_app(self.registry, keys)
        self.guard: Guard = app if isinstance(app, Guard) else app.app
        config = uvicorn.Config(
            app,
            http=timed_protocol(settings.read_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEADERS,
            timeout_keep_alive=max(1, int(settings.read_timeout)),
            timeout_graceful_shutdown=max(1, int(settings.drain_timeout)),
        )
        self.server = _Server(config)
        self._reloading: asyncio.Task[None] | None = None
        self._reload_waits = False

    async def run(
        self, listener: socket.socket, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until `stop`; raises UserError if a model cannot be opened at the start.

        In the main thread signals are handled.

        Args:
            on_ready: called when all models are open.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report_loop_errors())
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        running = asyncio.ensure_future(self.server.serve([listener]))
        opening = asyncio.ensure_future(self.registry.open_all())
        try:
            await asyncio.wait({running, opening}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done() and (error := opening.exception()) is not None:
                self.stop()
                await running
                raise error
            if opening.done():
                on_ready()
            await running
        finally:
            opening.cancel()
            self.registry.close()

    def stop(self) -> None:
        """Refuse new requests and answer those in progress; a second signal does not wait."""
        if self.guard.is_draining:
            self.server.force_exit = True
        self.guard.is_draining = self.server.should_exit = True

    def reload(self) -> None:
        """Open all models and the keys again, in the background; after that in progress, if any."""
        self._reload_waits = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self._reload())

    async def _reload(self) -> None:
        while self._reload_waits:
            self._reload_waits = False
            await self._open_again()

    async def _open_again(self) -> None:
        """Keys and models, each also where the other cannot be read."""
        try:
            self.keys.reload()
        except UserError as error:
            _log.error("the keys stay as they were: %s", error)
        else:
            if self.keys:
                _log.info("keys read again: %s", self.keys.path)
        try:
            await self.registry.replace([*self.registry.directories])
        except UserError as error:
            _log.error("not replaced: %s", error)
        except Exception as error:
            _log.error("not replaced", exc_info=error)
        else:
            _log.info("opened again: %s", ", ".join(self.registry.models))


class _Server(uvicorn.Server):
    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """No signal handlers of uvicorn in place of the server's own."""
        return nullcontext()
