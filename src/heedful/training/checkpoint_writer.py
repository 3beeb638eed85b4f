"""Checkpoints that a thread writes while the run continues to train."""

from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from heedful.training.checkpoint import Checkpoints
from heedful.training.events import CheckpointSaved


class CheckpointWriter:
    """Saves checkpoints, one at a time: at once, or in a thread from a copy in host memory.

    Args:
        is_asynchronous: copy the tensors, and write them in a thread.
    """

    def __init__(self, checkpoints: Checkpoints, *, is_asynchronous: bool) -> None:
        self._checkpoints, self._is_asynchronous = checkpoints, is_asynchronous
        # Those of the last checkpoint are kept: copies to memory that is already mapped are faster.
        self._copies: dict[str, Tensor] = {}
        self._pending: Future[CheckpointSaved] | None = None

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        interim: bool,
        is_sharded: bool,
        is_urgent: bool = False,
    ) -> None:
        """Begin a checkpoint of the state at this moment; the last one must have been waited for.

        Args:
            weights, tensors, state, interim, is_sharded: as in `Checkpoints.save`.
            is_urgent: write it before this returns.
        """
        assert self._pending is None, "one checkpoint at a time"
        self._pending = pending = Future[CheckpointSaved]()
        own = weights if self._checkpoints.processes.is_main else {}
        if self._is_asynchronous and not is_urgent:
            own, tensors = self._copy("weights", own), self._copy("tensors", tensors)

        def write() -> None:
            try:
                path = self._checkpoints.save(
                    step, own, tensors, state, interim=interim, is_sharded=is_sharded
                )
                kind = "interim" if interim else "regular"
                pending.set_result(CheckpointSaved(step, str(path), kind))
            except BaseException as error:  # raised again in the main thread
                pending.set_exception(error)

        if self._is_asynchronous and not is_urgent:
            # A daemon: a second Ctrl-C ends the program at once.
            Thread(target=write, name="checkpoint", daemon=True).start()
        else:
            write()

    def finished(
        self, *, wait: bool = False, timeout: float | None = None
    ) -> CheckpointSaved | None:
        """The event of a checkpoint that is complete since the last call.

        Args:
            wait: wait for a checkpoint that is being written.
            timeout: most seconds to wait; None: no limit.

        Raises:
            UserError: it could not be written; other errors of the thread.
            TimeoutError: it takes longer.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result(timeout)

    @torch.no_grad()
    def _copy(self, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors, or of the shards of this process, in host memory."""
        copies = {}
        for name, tensor in tensors.items():
            kept = self._copies.get(f"{prefix}.{name}")
            if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                kept.copy_(tensor)
            else:
                kept = tensor.detach().to("cpu", copy=True)
            copies[name] = self._copies[f"{prefix}.{name}"] = kept
        return copies
