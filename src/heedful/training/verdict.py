"""Is my run right? What its events say of that, in sentences.

Bands of the loss are of a recipe with the data that it names. What holds for any data: the training
loss falls, and the held-out loss is below the entropy of the targets' frequencies.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.config import Expectation
from heedful.training.events import Evaluated, Event, RunStarted, StepDone, criterion

QUESTION = "is it right?"
# A fall counts where it is this many standard errors of the difference of the two means.
_ERRORS = 3.0
# By which the median of second differences of normal noise is larger than its standard deviation.
_OF_SECOND_DIFFERENCES = 0.6745 * math.sqrt(6)
_ENOUGH = 8  # of them, to tell scatter from a bend


@dataclass(frozen=True)
class Verdict:
    """One sentence; `good` is None where it is a hint."""

    good: bool | None
    text: str

    def __str__(self) -> str:
        return f"{QUESTION} {self.text}"


class ExpectationListener:
    """A listener that says, at the steps that a recipe names, whether the loss is as it should be.

    The bands are of the recipe as it is shipped, with the data that it names; a run with other
    settings may rightly leave them, and one whose settings changed on its way is not compared.
    """

    def __init__(self, expected: Sequence[Expectation], print_line: Callable[[str], None]) -> None:
        self._by_step = {one.step: one for one in expected}
        self._print_line = print_line
        self._kind = ""

    def on(self, event: Event) -> None:
        """Compare a held-out loss with its band."""
        if isinstance(event, RunStarted):
            self._kind = criterion(event.recipe, held_out=True)
            if event.changes:
                self._by_step = {}
        if isinstance(event, Evaluated) and event.step in self._by_step:
            self._print_line(str(_in_band(self._by_step[event.step], event, self._kind)))

    def close(self) -> None:
        """Nothing is held open."""


def verdicts(events: Sequence[Event], folder: Path) -> list[Verdict]:
    """All that can be said of a run in `folder`: its bands, then what holds for any data."""
    starts = [event for event in events if isinstance(event, RunStarted)]
    recipe = starts[-1].recipe if starts else {}
    is_of_one_recipe = not any(start.changes for start in starts)
    expected = recipe.get("expect", []) if is_of_one_recipe else []
    bands = {one["step"]: Expectation(**one) for one in expected}
    found = [
        _in_band(bands[event.step], event, criterion(recipe, held_out=True))
        for event in events
        if isinstance(event, Evaluated) and event.step in bands
    ]
    return found + general_verdicts(events, folder)


def general_verdicts(events: Sequence[Event], folder: Path) -> list[Verdict]:
    """What can be said of a run whatever its data are, and how to look further."""
    steps = [event for event in events if isinstance(event, StepDone)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    entropies = [event.unigram_entropy for event in events if isinstance(event, RunStarted)]
    found = [_falling([event.nll for event in steps])] if len(steps) > 1 else []
    if evaluations and entropies and entropies[-1] is not None:
        best = min(evaluations, key=lambda event: event.perplexity)
        found.append(_above_frequencies(best, entropies[-1]))
    if found:
        command = f"`heedful verify {shlex.quote(str(folder))}`"
        hint = (
            "tells whether a copy of the model overfits one batch, and checks masks and gradients"
        )
        found.append(Verdict(None, f"{command} {hint}"))
    return found


def _in_band(expected: Expectation, event: Evaluated, kind: str) -> Verdict:
    band = f"{expected.low:g} to {expected.high:g}"
    loss = f"step {event.step}: {f'{kind} ' if kind else ''}loss {event.loss:.3f}"
    if expected.low <= event.loss <= expected.high:
        return Verdict(True, f"{loss} is within {band}")
    side = "below" if event.loss < expected.low else "above"
    return Verdict(
        False,
        f"{loss} is {side} {band}, where the recipe as shipped is; other settings may rightly be "
        "elsewhere, else `heedful verify` looks for what is wrong",
    )


def _falling(losses: Sequence[float]) -> Verdict:
    """Whether the mean of the first tenth is clearly above that of the last.

    How much losses scatter is read from second differences, to which a steady fall adds nothing. Of
    a few losses nothing can be said of it, and any fall counts.
    """
    count = max(1, len(losses) // 10)
    first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
    bends = [abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    scatter = statistics.median(bends) / _OF_SECOND_DIFFERENCES if len(bends) >= _ENOUGH else 0.0
    numbers = f"{first:.3f} at first, {last:.3f} at last"
    if first - last > _ERRORS * scatter * math.sqrt(2 / count):
        return Verdict(True, f"the training loss falls: {numbers}")
    return Verdict(
        False,
        f"the training loss does not fall: {numbers}; try another training.schedule.learning_rate, "
        "and see whether each target belongs to its text",
    )


def _above_frequencies(best: Evaluated, entropy: float) -> Verdict:
    what = f"the held-out loss at step {best.step:,}, {best.nll:.3f} nats a target,"
    bound = f"{entropy:.3f}, that of knowing how frequent each target is and no more"
    if best.nll < entropy:
        return Verdict(True, f"{what} is below {bound}")
    return Verdict(
        False,
        f"{what} is not below {bound}; train longer, or see whether the held-out text is of the "
        "same kind as the training text",
    )
