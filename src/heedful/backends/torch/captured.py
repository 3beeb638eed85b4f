"""A decoding step of fixed shapes, which CUDA records once and then replays.

A small step is bound by the host, which launches some hundred kernels for it. A CUDA graph launches
them all at once, on the same memory each time; for that no shape may depend on the step, every
tensor must stay where it is, and nothing may be read by the host. All of it holds on every device
and is tested on the CPU; only `record_on_cuda` needs CUDA.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.parts.cache import Cache
from heedful.parts.experts import Experts
from heedful.parts.helpers import has_hooks
from heedful.parts.tokens import Tokens

Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records the operations of a function without inputs: a function that runs them again, and the
tensor that they write their result to."""

STEPS_BEFORE_RECORDING = 4


class FixedStep:
    """One new token for each beam of a cache, by the same operations on the same memory each time.

    It reads all slots of the cache, not only those in use. The first steps run as they are: a
    recording costs as much as some steps, and caches that change soon are not worth one. The next
    is recorded, and replayed from then on.

    Args:
        cache: its tensors must stay in place while the step is used, see `Cache.reserve`.
        record: how operations are recorded.
    """

    def __init__(self, net: Any, cache: Cache, record: Recorder) -> None:
        ids = torch.zeros(
            cache.num_texts * cache.branches, 1, dtype=torch.long, device=cache.device
        )
        self._net, self._cache = net, cache.with_all_slots()
        self._tokens = Tokens(ids, torch.zeros_like(ids))
        self._record = record
        self._steps_before = STEPS_BEFORE_RECORDING
        self._replay: Callable[[], None] | None = None
        self._states: Tensor | None = None

    def __call__(self, tokens: Tokens) -> Float[Tensor, "N 1 D"]:
        """States of the tokens; the next step writes to the same memory."""
        self._tokens.ids.copy_(tokens.ids)
        self._tokens.positions.copy_(tokens.positions)
        if self._steps_before > 0:
            self._steps_before -= 1
            return self._run()
        if self._replay is None or self._states is None:
            self._replay, self._states = self._record(self._run)
        self._replay()
        return self._states

    def _run(self) -> Float[Tensor, "N 1 D"]:
        states: Tensor = self._net.decode(self._tokens, self._cache)
        return states


def recorder_for(net: Any, device: torch.device) -> Recorder | None:
    """The recorder of a net's steps; None: steps run unrecorded.

    Only CUDA records. Left out are nets whose modules have hooks, which a replay would not call,
    and nets with experts, whose numbers of tokens the host reads.
    """
    if device.type != "cuda":
        return None
    is_left_out = any(has_hooks(m) or isinstance(m, Experts) for m in net.modules())
    return None if is_left_out else record_on_cuda


def record_on_cuda(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Record in a CUDA graph, which does not run the operations yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        states = run()
    return graph.replay, states
