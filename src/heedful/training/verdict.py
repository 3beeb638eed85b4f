"""Checks of a run by its events; each result is a sentence.

A recipe can give bands for the held-out loss on its data. Two checks are for any data: the training
loss falls, and the held-out loss is below the unigram entropy of the targets.
"""

import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.config import Expectation
from heedful.training.events import Evaluated, Event, RunStarted, StepDone

PREFIX = "check:"
_STANDARD_ERRORS = 3.0  # least fall of the loss, in standard errors of a difference of two means
# Median of the absolute second differences of normal noise, for a standard deviation of 1.
_MEDIAN_SECOND_DIFFERENCE = 0.6745 * math.sqrt(6)
_MIN_SECOND_DIFFERENCES = 8  # needed to estimate the noise


@dataclass(frozen=True)
class Verdict:
    """The result of a check as a sentence; `good` is None for a hint."""

    good: bool | None
    text: str

    def __str__(self) -> str:
        return f"{PREFIX} {self.text}"


class ExpectationListener:
    """A listener that compares the held-out loss with a recipe's bands, at their steps.

    The bands hold for the recipe's settings and data. A run whose settings changed between its
    sessions is not compared.
    """

    def __init__(self, expected: Sequence[Expectation], print_line: Callable[[str], None]) -> None:
        self._by_step = {band.step: band for band in expected}
        self._print_line = print_line

    def on(self, event: Event) -> None:
        """Compare a held-out loss with its band."""
        if isinstance(event, RunStarted) and event.changes:
            self._by_step = {}
        if isinstance(event, Evaluated) and event.step in self._by_step:
            self._print_line(str(_check_band(self._by_step[event.step], event)))


def verdicts(events: Sequence[Event], folder: Path) -> list[Verdict]:
    """All checks of the run in `folder`: its recipe's bands, then those for any data."""
    starts = [event for event in events if isinstance(event, RunStarted)]
    recipe = starts[-1].recipe if starts else {}
    is_of_one_recipe = not any(start.changes for start in starts)
    expected = recipe.get("expect", []) if is_of_one_recipe else []
    bands = {band["step"]: Expectation(**band) for band in expected}
    results = [
        _check_band(bands[event.step], event)
        for event in events
        if isinstance(event, Evaluated) and event.step in bands
    ]
    return results + general_verdicts(events, folder)


def general_verdicts(events: Sequence[Event], folder: Path | None) -> list[Verdict]:
    """The checks of a run that hold for any data, and a hint at `heedful verify`.

    Args:
        folder: of the run; None: a temporary one, which the hint does not name.
    """
    steps = [event for event in events if isinstance(event, StepDone)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    entropies = [event.unigram_entropy for event in events if isinstance(event, RunStarted)]
    results = [_check_falling_loss([event.nll for event in steps])] if len(steps) > 1 else []
    if evaluations and entropies and entropies[-1] is not None:
        best = min(evaluations, key=lambda event: event.loss)
        results.append(_check_unigram_entropy(best, entropies[-1]))
    if results:
        command = "`heedful.verify(run.model.net)`"
        if folder is not None:
            command = f"`heedful verify {shlex.quote(str(folder))}`"
        hint = "checks masks and gradients, and that a copy of the model overfits one batch"
        results.append(Verdict(None, f"{command} {hint}"))
    return results


def _check_band(expected: Expectation, event: Evaluated) -> Verdict:
    band = f"{expected.low:g} to {expected.high:g}"
    is_smoothed = event.smoothed_loss is not None
    value = event.loss if event.smoothed_loss is None else event.smoothed_loss
    loss = f"step {event.step}: {'smoothed ' if is_smoothed else ''}loss {value:.3f}"
    if expected.low <= value <= expected.high:
        return Verdict(True, f"{loss} is within {band}")
    side = "below" if value < expected.low else "above"
    return Verdict(
        False,
        f"{loss} is {side} {band}, the band of the recipe as shipped; this is expected with other "
        "settings, and otherwise `heedful verify` searches for the error",
    )


def _check_falling_loss(losses: Sequence[float]) -> Verdict:
    """Check that the mean of the first tenth of the losses is clearly above that of the last.

    The noise is estimated by second differences, which a linear fall does not affect. For too few
    losses it is taken as 0, so that any fall counts.
    """
    count = max(1, len(losses) // 10)
    first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
    second_differences = [
        abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)
    ]
    noise = 0.0
    if len(second_differences) >= _MIN_SECOND_DIFFERENCES:
        noise = statistics.median(second_differences) / _MEDIAN_SECOND_DIFFERENCE
    numbers = f"{first:.3f} at first, {last:.3f} at last"
    if first - last > _STANDARD_ERRORS * noise * math.sqrt(2 / count):
        return Verdict(True, f"the training loss falls: {numbers}")
    return Verdict(
        False,
        f"the training loss does not fall: {numbers}; try another training.schedule.learning_rate, "
        "and check that each target belongs to its text",
    )


def _check_unigram_entropy(best: Evaluated, entropy: float) -> Verdict:
    loss = f"the held-out loss at step {best.step:,}, {best.loss:.3f} nats per target,"
    bound = f"{entropy:.3f}, the unigram entropy of the targets"
    if best.loss < entropy:
        return Verdict(True, f"{loss} is below {bound}")
    return Verdict(
        False,
        f"{loss} is not below {bound}; train longer, or check that the held-out text is of "
        "the same kind as the training text",
    )
