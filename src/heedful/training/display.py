"""A listener that displays a run: a live progress bar in a terminal, plain lines elsewhere."""

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
    describe_criterion,
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
    """Displays steps as a progress bar, and evaluations as lines above it ("*": the best so far).

    If `console` is not a terminal, a line without control codes is printed every `line_seconds` of
    training instead.
    """

    def __init__(self, console: Console | None = None, *, line_seconds: float = 15.0) -> None:
        super().__init__(console, line_seconds=line_seconds)
        self._task = TaskID(0)
        self._total: int | None = None
        self._origin: tuple[int, float] | None = None  # step and seconds of the first event
        self._shown_at = -line_seconds
        self._recipe: Mapping[str, Any] = {}

    def on(self, event: Event) -> None:
        """Display the event; checkpoints, which come with every evaluation, are not displayed."""
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, StepDone):
            self._step(event)
        elif isinstance(event, Evaluated):
            of_tokens = {"perplexity": event.perplexity, "token_accuracy": event.token_accuracy}
            scores = event.scores if event.is_of_labels else of_tokens | event.scores
            self.print_line(
                f"{'*' if event.is_best else ' '} step {self._progress_text(event.step)}"
                f"  held-out loss {event.loss:.3f}{_format_scores(scores)}"
                f"  {clock(event.seconds)}"
            )
        elif isinstance(event, RunFinished):
            self.close()
            after = f"after step {event.step:,} and {clock(event.seconds)}"
            best = f"; best{_format_scores(event.best)}" if event.best else ""
            self.print_line(f"{REASONS[event.reason]} {after}{best}")

    def _start(self, event: RunStarted) -> None:
        self.close()
        self._total, self._recipe = event.total_steps, event.recipe
        self._origin = None
        resumed = (
            "" if event.resumed_from is None else f", resumed from step {event.resumed_from:,}"
        )
        self.print_line(
            f"{event.num_parameters:,} parameters on {event.device};"
            f" {event.num_train:,} training and {event.num_valid:,} held-out {event.unit}{resumed}"
        )
        for change in event.changes:
            self.print_line(f"changed from here on: {change}")
        if self._console.is_terminal:
            completed = event.resumed_from or 0
            self._task = self._open().add_task(
                "", total=event.total_steps, completed=completed, name="step"
            )

    def _step(self, event: StepDone) -> None:
        left = self._seconds_left(event)
        facts = (
            f"loss {event.loss:.3f}{self._criterion_note(event.loss, event.nll)}"
            f"  lr {event.learning_rate:.2e}"
            f"  {event.tokens_per_second:,.0f} tokens/s"
            f"{f'  {event.num_skipped} skipped (fp16 overflow)' if event.num_skipped else ''}"
            f"{'' if left is None else f'  {clock(left)} left'}"
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=event.step, description=facts)
        elif event.seconds - self._shown_at >= self._line_seconds:
            self._shown_at = event.seconds
            self.print_line(f"step {self._progress_text(event.step)}  {facts}")

    def _seconds_left(self, event: StepDone) -> float | None:
        """Estimated time left by the mean step time of this session; None before a second event."""
        if self._origin is None:
            self._origin = (event.step, event.seconds)
        steps, seconds = event.step - self._origin[0], event.seconds - self._origin[1]
        if self._total is None or steps <= 0:
            return None
        return max(0, self._total - event.step) * seconds / steps

    def _criterion_note(self, loss: float, nll: float) -> str:
        """A note behind a loss of training that differs from the negative log-likelihood, or ""."""
        if math.isclose(loss, nll, rel_tol=1e-4):
            return ""
        return f" ({describe_criterion(self._recipe) or 'not the likelihood alone'})"

    def _progress_text(self, step: int) -> str:
        return f"{step:,}" if self._total is None else f"{step:,}/{self._total:,}"


def _format_scores(scores: Mapping[str, float]) -> str:
    return "".join(f"  {score_label(name)} {format_score(name, n)}" for name, n in scores.items())
