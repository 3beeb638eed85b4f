"""Outputs of generation with their texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heedful.generation.outputs import Failure, Hypothesis, cut

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
    """

    text: str
    ids: list[int]
    score: float
    log_prob: float
    finished: bool
    failure: Failure | None = None


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


def texts_of(results: list[list[Generation]], num_return: int) -> list[Any]:
    """The text of each prompt's output, or with `num_return` above 1 the list of its texts."""
    texts = [[output.text for output in outputs] for outputs in results]
    return [best for best, *_ in texts] if num_return == 1 else texts
