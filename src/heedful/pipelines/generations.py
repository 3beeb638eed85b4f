"""Outputs of generation with their texts, whole or in pieces while they are decoded."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from heedful.data.decoding import GrowingText, TextDecoder
from heedful.fidelity import Masked
from heedful.fidelity.quality import quality
from heedful.generation.outputs import Failure, Hypothesis, check_stop_strings, cut, first_stop

FAILURES: Mapping[Failure, str] = {
    "dead_end": "the constraints allow no token that continues the output, which ends there",
    "without_phrase": "no output with all required phrases was found",
}


@dataclass(frozen=True)
class Generation:
    """One output.

    Attributes:
        ids: new tokens, with EOS where it was reached.
        score: outputs are ranked by it (`LengthScore`); NaN without `Options.scores`.
        log_prob: sum of the tokens' natural log-probabilities; NaN without `Options.scores`.
        finished: False where the length limit cut the output off, or with a `failure`.
        failure: the constraints that the output could not meet; None: it meets them.
        reasons: why a person should review a translation: pieces of the source that were put right
            by their position (`Options.keep`), and terms that it lacks (`Options.glossary`).
        masked: the source as the net read it, of a translation with `Options.keep` or
            `Options.glossary`; `ids` have its masks. None: the source itself.
    """

    text: str
    ids: list[int]
    score: float
    log_prob: float
    finished: bool
    failure: Failure | None = None
    reasons: tuple[str, ...] = ()
    masked: Masked | None = field(default=None, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The attributes in the lines of `--json`: all but `masked`."""
        return {name: value for name, value in asdict(self).items() if name != "masked"}

    @property
    def is_cut(self) -> bool:
        """It was cut off by the length limit."""
        return not self.finished and self.failure is None

    @property
    def probability(self) -> float:
        """The geometric mean of the tokens' probabilities; NaN without `Options.scores`."""
        return math.exp(self.log_prob / max(1, len(self.ids)))

    @property
    def quality(self) -> float:
        """An estimate from 0 to 100 (`heedful.fidelity.quality`), 0 for a blank output; NaN without
        `Options.scores`."""
        if not self.text.strip():
            return 0.0
        return quality(self.probability, has_reasons=bool(self.reasons))


def to_generation(
    hypothesis: Hypothesis,
    decode: Callable[[Sequence[int]], str] | None,
    stop: Sequence[str] | None,
) -> Generation:
    """A hypothesis with its text before a stop text; without a decoder the text is empty."""
    text = "" if decode is None else decode(hypothesis.ids)
    return Generation(
        cut(text, stop) if stop else text,
        hypothesis.ids,
        hypothesis.score,
        hypothesis.log_prob,
        hypothesis.finished,
        hypothesis.failure,
    )


def best_of(
    results: list[list[Generation]], num_return: int, name: Literal["text", "ids"]
) -> list[Any]:
    """The text or ids of each prompt's output, or with `num_return` above 1 a list of them."""
    values = [[getattr(output, name) for output in outputs] for outputs in results]
    return [best for best, *_ in values] if num_return == 1 else values


class TextPieces:
    """Text of tokens that later ones cannot change; the pieces join to the final text.

    Incomplete characters and possible beginnings of a stop text are held back.

    Args:
        stop: texts before which an output ends; None: none.
        before: ids that the text continues.

    Attributes:
        ids: all tokens so far.
    """

    def __init__(
        self, decoder: TextDecoder, stop: Sequence[str] | None = None, before: Sequence[int] = ()
    ) -> None:
        self._growing = GrowingText(decoder, before)
        self._stop = stop or ()
        check_stop_strings(self._stop)
        self._held = ""
        self._is_cut = False
        self._pieces: list[str] = []
        self.ids: list[int] = []

    @property
    def text(self) -> str:
        """The pieces so far."""
        return "".join(self._pieces)

    def add(self, ids: Sequence[int], ended: bool) -> str:
        """The new piece of text that later tokens cannot change; "" if no more text is final.

        Args:
            ended: no token follows.
        """
        self.ids += ids
        new = self._growing.add(ids) + (self._growing.end() if ended else "")
        if self._is_cut:
            return ""
        self._held += new
        end = first_stop(self._held, self._stop)
        begun = len(self._held) if ended else _first_beginning(self._held, self._stop)
        self._is_cut = end is not None and end <= begun
        final = min(begun, len(self._held) if end is None else end)
        piece, self._held = self._held[:final], self._held[final:]
        if piece:
            self._pieces.append(piece)
        return piece


def _first_beginning(text: str, stop: Sequence[str]) -> int:
    """The index from which the rest of a text is the beginning of a stop text, or its length."""
    longest = max(map(len, stop), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(string.startswith(text[start:]) for string in stop):
            return start
    return len(text)
