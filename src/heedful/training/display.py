"""A listener that shows a run as it goes: a live bar in a terminal, plain lines elsewhere."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import TaskID

from heedful.terminal import ProgressBars, clock
from heedful.training.events import (
    Evaluated,
    Event,
    RunFinished,
    RunStarted,
    StepDone,
    criterion,
    format_score,
    score_label,
)

REASONS = {
    "max_steps": "all steps done",
    "max_epochs": "all epochs done",
    "early_stopping": "stopped early: no more improvement",
    "time_limit": "stopped at the time limit",
    "interrupted": "interrupted",
}


class RunDisplay(ProgressBars):
    """Shows steps in a live bar, with each evaluation as a line above it ("*" marks the best).

    Where `console` is no terminal, a step's line is printed every `line_seconds` of training
    instead, without control codes.
    """

    def __init__(self, console: Console | None = None, *, line_seconds: float = 15.0) -> None:
        super().__init__(console, line_seconds=line_seconds)
        self._task = TaskID(0)
        self._total: int | None = None
        self._origin: tuple[int, float] | None = None  # step and seconds of the session's first
        self._shown_at = -line_seconds
        self._recipe: Mapping[str, Any] = {}

    def on(self, event: Event) -> None:
        """Shows the event; checkpoints are not shown, as they come with every evaluation."""
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Evaluated):
            own = {"perplexity": event.perplexity, "token_accuracy": event.token_accuracy}
            scores = event.scores if event.is_of_labels else own | event.scores
            beside = self._beside(event.loss, event.nll, held_out=True)
            self.print_line(
                f"{'*' if event.is_best else ' '} step {self._of(event.step)}"
                f"  held-out loss {event.loss:.3f}{beside}{_listed(scores)}  {clock(event.seconds)}"
            )
        elif isinstance(event, RunFinished):
            self.close()
            after = f"after step {event.step:,} and {clock(event.seconds)}"
            best = f"; best{_listed(event.best)}" if event.best else ""
            self.print_line(f"{REASONS[event.reason]} {after}{best}")

    def _start(self, event: RunStarted) -> None:
        self.close()
        self._total, self._recipe = event.total_steps, event.recipe
        self._origin = None
        again = "" if event.resumed_from is None else f", resumed from step {event.resumed_from:,}"
        self.print_line(
            f"{event.num_parameters:,} parameters on {event.device};"
            f" {event.num_train:,} training and {event.num_valid:,} held-out {event.unit}{again}"
        )
        for change in event.changes:
            self.print_line(f"changed from here on: {change}")
        if self._console.is_terminal:
            done = event.resumed_from or 0
            self._task = self._open().add_task(
                "", total=event.total_steps, completed=done, name="step"
            )

    def _step(self, event: StepDone) -> None:
        left = self._seconds_left(event)
        facts = (
            f"loss {event.loss:.3f}{self._beside(event.loss, event.nll)}"
            f"  rate {event.learning_rate:.2e}"
            f"  {event.tokens_per_second:,.0f} tokens/s"
            f"{f'  {event.num_skipped} skipped (fp16 overflow)' if event.num_skipped else ''}"
            f"{'' if left is None else f'  {clock(left)} left'}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=event.step, description=facts)
        elif event.seconds - self._shown_at >= self._line_seconds:
            self._shown_at = event.seconds
            self.print_line(f"step {self._of(event.step)}  {facts}")

    def _seconds_left(self, event: StepDone) -> float | None:
        """From the mean time of a step in this session; none before two events are known."""
        if self._origin is None:
            self._origin = (event.step, event.seconds)
        steps, seconds = event.step - self._origin[0], event.seconds - self._origin[1]
        if self._total is None or steps <= 0:
            return None
        return max(0, self._total - event.step) * seconds / steps

    def _beside(self, loss: float, nll: float, *, held_out: bool = False) -> str:
        """What is said of a loss that is not the likelihood alone, which the perplexity follows."""
        if math.isclose(loss, nll, rel_tol=1e-4):
            return ""
        return f" ({criterion(self._recipe, held_out=held_out) or 'not the likelihood alone'})"

    def _of(self, step: int) -> str:
        return f"{step:,}" if self._total is None else f"{step:,}/{self._total:,}"


def _listed(scores: Mapping[str, float]) -> str:
    return "".join(f"  {score_label(name)} {format_score(name, n)}" for name, n in scores.items())
