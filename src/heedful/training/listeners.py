"""The listeners of a run: its log, TensorBoard, and a display of its progress."""

import json
import math
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json as dump
from rich.console import Console
from rich.progress import TaskID

from heedful import extras
from heedful.errors import UserError
from heedful.files import user_errors, write_text
from heedful.progress import ProgressBars, clock
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
_READER: TypeAdapter[Event] = TypeAdapter(Event)


class JsonlLog:
    """Writes each event as a line of JSON, and flushes it.

    Args:
        resume_step: the step that the run resumes from. Events of later steps, which will be
            repeated, ends of earlier sessions and an incomplete last line are removed from an
            existing log, which is replaced atomically. Events of `resume_step` itself stay, as its
            checkpoint was saved after its evaluation. Default: the log starts empty.

    Raises:
        UserError: the file cannot be read or written, or has a damaged line.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        events: list[Event] = []
        if resume_step is not None and path.exists():
            events = [event for event in read_log(path) if _is_before(event, resume_step)]
        write_text(path, "".join(to_json(event) + "\n" for event in events))
        with user_errors("write", path):
            self._file: TextIO = path.open("a", encoding="utf-8")

    def on(self, event: Event) -> None:
        """Append the event."""
        with user_errors("write", self.path):
            self._file.write(to_json(event) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[Event]:
    """The events of a log, oldest first; an incomplete last line is ignored.

    Raises:
        UserError: the file cannot be read; another line is damaged (with its number).
    """
    with user_errors("read", path):
        data = path.read_bytes()
    events = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            events.append(from_json(line))
        except UserError as error:
            raise UserError(
                f"{path}, line {number}: not an event of a run ({error}); remove the line"
            ) from error
    return events


def to_json(event: Event) -> str:
    """The event as one line of strict JSON, with its kind under "event".

    NaN and infinities, which JSON lacks, become the strings "NaN", "Infinity" and "-Infinity".
    """
    return dump(event, inf_nan_mode="strings").decode()


def from_json(line: bytes | str) -> Event:
    """Parse a line written by `to_json`.

    Raises:
        UserError: the line is not JSON, names no known kind of event, or lacks a field.
    """
    try:
        return _READER.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("event", *first["loc"])))
        raise UserError(f"{where}: {first['msg']}") from error


class TensorBoardLog:
    """Writes scalars for TensorBoard into a folder.

    Args:
        resume_step: the step that the run resumes from; events of later steps are hidden.

    Raises:
        UserError: the package tensorboard is not installed.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        extras.require("tensorboard", "training.tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        with user_errors("write", directory):
            self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def on(self, event: Event) -> None:
        """Write the scalars of the event; of `RunStarted`, the recipe as text."""
        if isinstance(event, RunStarted):
            recipe = json.dumps(event.recipe, indent=2, ensure_ascii=False)
            step = event.resumed_from or 0
            # An indented block of Markdown, in which TensorBoard keeps the line breaks.
            self._writer.add_text("recipe", textwrap.indent(recipe, "    "), step)
        for name, value in _scalars(event).items():
            assert isinstance(event, StepDone | Evaluated)
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()


def _scalars(event: Event) -> dict[str, float]:
    if isinstance(event, StepDone):
        steps = ("loss", "nll", "grad_norm", "learning_rate", "tokens_per_second")
        return {f"train/{name}": getattr(event, name) for name in steps}
    if isinstance(event, Evaluated):
        names = ("loss",) if event.is_of_labels else ("loss", "perplexity", "token_accuracy")
        values = {name: getattr(event, name) for name in names} | event.scores
        return {f"valid/{name}": value for name, value in values.items()}
    return {}


def _is_before(event: Event, resume_step: int) -> bool:
    """True for an event that stays in the log of a run resumed from `resume_step`."""
    if isinstance(event, RunFinished):
        return False
    if isinstance(event, RunStarted):
        return event.resumed_from is None or event.resumed_from < resume_step
    return event.step <= resume_step


def session_starts(log: Path) -> list[RunStarted]:
    """The `RunStarted` events of a log; empty if there is no log yet."""
    events = read_log(log) if log.is_file() else []
    return [event for event in events if isinstance(event, RunStarted)]


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
