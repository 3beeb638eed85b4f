"""The function that is searched: its type, the memory it may have, and checks."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError

NextLogProbs = Callable[..., Float[Tensor, "N V"]]
"""`f(prefixes (N, t)) -> (N, V)`, or `f(prefixes, state) -> (N, V)` for a search with a state.

With a state the result is the search's own, which writes to it.
"""

ROUNDING = 1e-3  # how far above 0 a log-probability may lie by rounding in 16-bit formats
LOG_SOFTMAX = "log-probabilities are at most 0, so take log_softmax of the logits"


@runtime_checkable
class State(Protocol):
    """What a next-token function remembers between calls, for example a cache.

    Each of `B` sentences has equally many rows, which are adjacent: one at the first call, then
    one for each of its `W` beams or samples.
    """

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Row w of sentence b goes on from its former row `parents[b, w]`, counted within b."""

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Only these sentences go on, in this order."""


def check_largest(
    largest: float, step: int, source: str = "next_log_probs", advice: str = LOG_SOFTMAX
) -> None:
    """Refuse what is no log-probability by the largest of a step; NaN counts as largest."""
    if largest != largest:
        raise UserError(f"{source} gave NaN at step {step}: look for an overflow in the model")
    if largest > ROUNDING:
        raise UserError(f"{source} gave {largest:.4g} at step {step}: {advice}")


def sentences_to_keep(is_open: Sequence[bool], at_once: bool = False) -> list[int] | None:
    """Which sentences go on, where enough of them are done to be worth the move; else None.

    Leaving copies the state of those that stay, so it waits until an eighth is done.
    """
    num_done = len(is_open) - sum(is_open)
    if num_done < (1 if at_once else max(1, len(is_open) // 8)):
        return None
    return [sentence for sentence, open_ in enumerate(is_open) if open_]


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums of (log-)probabilities are kept in: double precision where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
