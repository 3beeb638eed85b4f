"""Outputs of a search: hypotheses, their score, and strings that end a text.

The score is the sum of log-probabilities, normalized by the length.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from heedful.data.decoding import GrowingText, TextDecoder
from heedful.errors import UserError
from heedful.options import Normalization

Failure = Literal["dead_end", "without_phrase"]
"""Why an output does not meet its constraints: no token of probability above zero continues it, or
no output with all required phrases was found."""
Counts = Mapping[tuple[int, ...], int]
"""Groups of tokens, and how many tokens of each an output has; no token is in two groups."""
_NORMALIZATIONS = get_args(Normalization)


@dataclass(slots=True)
class Hypothesis:
    """One result of a search or of sampling.

    Attributes:
        ids: the new tokens, without the start, and with EOS if it was reached.
        score: the value that hypotheses are ranked by.
        finished: False at the length limit or at a dead end (no next token of probability above
            zero).
        log_prob: the sum of `token_log_probs`, in nats.
        failure: not finished for another reason than the length limit; None: there is none.
    """

    ids: list[int]
    score: float
    finished: bool
    log_prob: float
    token_log_probs: list[float]
    failure: Failure | None = None


@dataclass(frozen=True)
class LengthScore:
    """The score of a hypothesis, from its log-probability and length (new tokens, with EOS).

    `average`: log p / length^penalty. `gnmt`: log p / ((5 + length) / 6)^penalty (Wu et al. 2016,
    "Google's Neural Machine Translation System", equation 14, whose coverage term is in
    `heedful.backends.torch.coverage`). `none`: log p. The penalty can be any number: 0 is the same
    as `none`, and numbers below 0 favor short hypotheses.
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
        """The number that a log-probability is divided by; it is monotone in the length."""
        if self.normalization == "none":
            return 1.0
        base = max(1, length) if self.normalization == "average" else (5 + max(1, length)) / 6
        try:
            return max(float(base**self.length_penalty), sys.float_info.min)
        except OverflowError:
            return math.inf

    def hypothesis(
        self,
        ids: list[int],
        token_log_probs: list[float],
        finished: bool,
        failure: Failure | None = None,
    ) -> Hypothesis:
        """A result with its score; log-probabilities are summed in order, as on the device."""
        log_prob = 0.0
        for value in token_log_probs:
            log_prob += value
        score = log_prob / self.divisor(len(ids))
        return Hypothesis(ids, score, finished, log_prob, token_log_probs, failure)


# --- Strings that end an output -----------------------------------------------------------------


@dataclass(eq=False)
class _Reading:
    """The text of one output so far.

    Attributes:
        end: of its text, in which the beginning of a string can be.
    """

    text: GrowingText
    ids: list[int] = field(default_factory=list)
    end: str = ""
    is_ended: bool = False


@dataclass(frozen=True)
class StopStrings:
    """A `stop` function: an output ends when its text contains one of the strings.

    The text then still contains the string and the rest of the last token; `cut` removes both.
    Each token is decoded once while the outputs of a sentence get longer.
    """

    decoder: TextDecoder
    strings: Sequence[str]
    _readings: dict[int, list[_Reading]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_stop_strings(self.strings)

    def __call__(self, sentence: int, ids: list[int]) -> bool:
        readings = self._readings.setdefault(sentence, [])
        known = [one for one in readings if one.ids == ids[: len(one.ids)]]
        if known:
            reading = max(known, key=lambda one: len(one.ids))
        else:  # another sample
            reading = _Reading(GrowingText(self.decoder))
            readings.append(reading)
        reading.end += reading.text.add(ids[len(reading.ids) :])
        reading.ids = ids
        reading.is_ended = reading.is_ended or first_stop(reading.end, self.strings) is not None
        longest = max(map(len, self.strings), default=0)
        reading.end = reading.end[max(0, len(reading.end) - longest + 1) :]
        return reading.is_ended


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raises UserError for anything but a list of strings that are not empty."""
    if isinstance(strings, str):
        raise UserError(f"stop strings must be a list of strings, not the string {strings!r}")
    if "" in strings:
        raise UserError("a stop string is empty: every text contains it")


def first_stop(text: str, strings: Sequence[str]) -> int | None:
    """The index of the first occurrence of any of the strings; None: there is none."""
    return min((at for at in map(text.find, strings) if at >= 0), default=None)


def cut(text: str, strings: Sequence[str]) -> str:
    """The text before the first occurrence of any of the strings, or all of it."""
    check_stop_strings(strings)
    return text[: first_stop(text, strings)]
