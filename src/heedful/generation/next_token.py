"""The function that a search asks for its next token: its type, its state, and how it is called."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError

NextLogProbs = Callable[..., Float[Tensor, "N V"]]
"""`f(prefixes (N, t)) -> (N, V)`, or `f(prefixes, state) -> (N, V)` for a search with a state."""

ROUNDING = 1e-3  # how far above 0 a log-probability may lie by rounding in 16-bit formats


@runtime_checkable
class State(Protocol):
    """What a next-token function remembers of each row between calls, for example a cache."""

    def reorder(self, rows: Int[Tensor, "M"]) -> None:
        """Make row i the former row `rows[i]`. `M` may be larger or smaller than before."""


def ask(
    next_log_probs: NextLogProbs,
    tokens: Int[Tensor, "N t"],
    state: State | None,
    known_ids: Sequence[int],
) -> Float[Tensor, "N V"]:
    """The log-probabilities after each row of `tokens`; `known_ids` must be in the vocabulary."""
    arguments = (tokens,) if state is None else (tokens, state)
    log_probs = next_log_probs(*arguments)
    if log_probs.ndim != 2 or len(log_probs) != len(tokens):
        raise UserError(
            f"next_log_probs gave shape {tuple(log_probs.shape)} for {len(tokens)} prefixes: "
            f"it must give ({len(tokens)}, vocabulary size)"
        )
    largest = max(known_ids)
    if largest >= log_probs.shape[1]:
        raise UserError(
            f"token id {largest} (EOS or forced) is outside the vocabulary: "
            f"next_log_probs gives {log_probs.shape[1]} log-probabilities"
        )
    return log_probs


def check(
    largest: Float[Tensor, "N"],
    step: int,
    source: str = "next_log_probs",
    advice: str = "log-probabilities are at most 0, so take log_softmax of the logits",
) -> None:
    """Refuse what is no log-probability; NaN shows as the largest entry of its row."""
    if largest.isnan().any():
        raise UserError(f"{source} gave NaN at step {step}: look for an overflow in the model")
    if (largest > ROUNDING).any():
        raise UserError(f"{source} gave {largest.max().item():.4g} at step {step}: {advice}")


def moves(rows: Int[Tensor, "M"], before: int) -> bool:
    """Whether taking `rows` of a state with `before` rows changes anything."""
    return len(rows) != before or not torch.equal(rows, torch.arange(before, device=rows.device))


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums of (log-)probabilities are kept in: double precision where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
