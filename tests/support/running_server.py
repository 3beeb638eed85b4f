"""A server of tiny models in a thread of the tests, on a port of its own."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend_models import TEXTS, VOCAB, model_of
from chat_formats import chat_model
from heedful.data.tokenizer import train_tokenizer

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from heedful.serve.keys import Keys
from heedful.serve.server import Server, listen
from heedful.serve.settings import Settings


class RunningServer:
    """The address of a server, its parts, and the models by name."""

    def __init__(
        self, models: Mapping[str, Any], keys: Path | None, address: str, **settings: Any
    ) -> None:
        self.models = models
        self.loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._listener = listen(address, 0)
        self.host, self.port = self._listener.getsockname()
        self.url = f"http://{self.host}:{self.port}"
        self.server: Any = None
        self._arguments = Settings(keys=keys, **settings), Keys(keys)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def stop(self) -> None:
        """Drain and end."""
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(20)
        assert not self._thread.is_alive(), self._unfinished()

    def _unfinished(self) -> str:
        """The places where the server's thread and its tasks are."""
        frames = [sys._current_frames()[self._thread.ident or 0]]
        frames += [frame for task in asyncio.all_tasks(self.loop) for frame in task.get_stack()]
        places = "\n".join("".join(traceback.format_stack(frame)[-4:]) for frame in frames)
        return f"{len(self.server.server.server_state.connections)} connections\n{places}"

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self.server = Server({}, *self._arguments)
        for name, model in self.models.items():
            self.server.registry.add(name, model)
        self._ready.set()
        await self.server.run(self._listener)


@contextmanager
def running(
    models: Mapping[str, Any],
    keys: Path | None = None,
    *,
    address: str = "127.0.0.1",
    **settings: Any,
) -> Iterator[Any]:
    """A server that ends with the context."""
    server = RunningServer(models, keys, address, **settings)
    try:
        yield server
    finally:
        server.stop()


def wait_for_free_slots(server: RunningServer) -> None:
    """Until no request holds a slot, also of clients that went."""
    end = time.monotonic() + 10
    while any(model.num_texts for model in server.server.registry.models.values()):
        assert time.monotonic() < end, "a slot was not freed"
        time.sleep(0.002)


def tiny_models() -> dict[str, Any]:
    """One of each kind, in double precision, so that rounding never decides between two tokens."""
    models = {
        "gpt": model_of("gpt2"),
        "chat": chat_model(),
        "de-en": model_of("vaswani2017"),
        "bert": model_of("bert"),
        "sentiment": model_of("bert", head="classify"),
    }
    masked = models["bert"]
    masked._src_tokenizer = masked._tgt_tokenizer = train_tokenizer(
        TEXTS, vocab_size=VOCAB, template="both", extra_specials=("<mask>",)
    )
    for model in models.values():
        model.net.double()
    translator = models["de-en"]
    translator.metadata = replace(translator.metadata, src_language="de", tgt_language="en")
    return models
