"""Types of the next-token function and of its state, and checks of log-probabilities."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError

NextLogProbs = Callable[..., Float[Tensor, "N V"]]
"""`f(prefixes (N, t)) -> (N, V)`, or `f(prefixes, state) -> (N, V)` for a search with a state.

With a state the search may overwrite the tensor that it returns.
"""

ROUNDING = 1e-3  # how far above 0 a log-probability may lie by rounding in 16-bit formats
LOG_SOFTMAX = "log-probabilities are at most 0, so use log_softmax of the logits"


@runtime_checkable
class State(Protocol):
    """Data that a next-token function keeps between calls, for example a cache.

    Each of `B` sentences has equally many rows, which are adjacent: one at the first call, then
    one for each of its `W` beams or samples.
    """

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Row w of sentence b continues the row `parents[b, w]` of that sentence."""

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Keep only these sentences, in this order."""


def check_largest(
    largest: float, step: int, source: str = "next_log_probs", advice: str = LOG_SOFTMAX
) -> None:
    """Raise UserError if the largest value of a step, which NaN is, is no log-probability."""
    if largest != largest:
        raise UserError(f"{source} gave NaN at step {step}: look for an overflow in the model")
    if largest > ROUNDING:
        raise UserError(f"{source} gave {largest:.4g} at step {step}: {advice}")


def sentences_to_keep(is_open: Sequence[bool], at_once: bool = False) -> list[int] | None:
    """The indices of the open sentences if others should leave the batch now, else None.

    Removing sentences copies the state of the others, so they stay until an eighth is done.

    Args:
        at_once: do not wait for an eighth.
    """
    num_done = len(is_open) - sum(is_open)
    if num_done < (1 if at_once else max(1, len(is_open) // 8)):
        return None
    return [sentence for sentence, open_ in enumerate(is_open) if open_]


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums of (log-)probabilities: double precision if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
