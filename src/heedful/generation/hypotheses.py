"""What a search returns, and how it scores: the sum of log-probabilities, normalised by length."""

import math
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

from heedful.errors import UserError

Normalization = Literal["average", "gnmt", "none"]
_NORMALIZATIONS = get_args(Normalization)


@dataclass(slots=True)
class Hypothesis:
    """One result of a search or of sampling.

    `ids` are the new tokens only: without the start, with EOS where it was reached. Its length,
    EOS included, is the length in the score. `score` is what hypotheses are ranked by, `log_prob`
    the plain sum of `token_log_probs`, in nats. `finished` is False where the length limit (or a
    dead end: no continuation of probability above zero) cut the hypothesis off.
    """

    ids: list[int]
    score: float
    finished: bool
    log_prob: float
    token_log_probs: list[float]


@dataclass(frozen=True)
class LengthScore:
    """A hypothesis's score from its log-probability and its length (new tokens, EOS included).

    `average`: log p / length^penalty. `gnmt`: log p / ((5 + length) / 6)^penalty (Wu et al. 2016,
    "Google's Neural Machine Translation System", equation 14, whose coverage term is in
    `heedful.backends.torch.coverage`). `none`: log p. The penalty may be any number: 0 scores as
    `none` does, below 0 favours short hypotheses.
    """

    normalization: Normalization | str = "average"
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.normalization not in _NORMALIZATIONS:
            names = ", ".join(_NORMALIZATIONS)
            raise UserError(f"normalization must be one of {names}, not {self.normalization!r}")
        if not math.isfinite(self.length_penalty):
            raise UserError(f"length_penalty must be a finite number, not {self.length_penalty}")

    def __call__(self, log_prob: Any, length: int) -> Any:
        """The score of hypotheses of one length, in any shape. A length of 0 counts as 1."""
        return log_prob / self.divisor(length)

    def divisor(self, length: int) -> float:
        """What a log-probability is divided by; for a fixed one the score is monotone in it."""
        if self.normalization == "none":
            return 1.0
        base = max(1, length) if self.normalization == "average" else (5 + max(1, length)) / 6
        try:
            return max(float(base**self.length_penalty), sys.float_info.min)
        except OverflowError:
            return math.inf

    def hypothesis(self, ids: list[int], parts: list[float], finished: bool) -> Hypothesis:
        """A result; its log-probabilities are added up in order, as on the device."""
        log_prob = 0.0
        for part in parts:
            log_prob += part
        return Hypothesis(ids, log_prob / self.divisor(len(ids)), finished, log_prob, parts)
