"""Listeners that write the events of a run to files: JSON lines and TensorBoard."""

import json
import textwrap
from pathlib import Path
from typing import TextIO

from heedful import extras
from heedful.errors import UserError
from heedful.files import user_errors, write_text
from heedful.training.events import (
    Evaluated,
    Event,
    RunFinished,
    RunStarted,
    StepDone,
    from_json,
    to_json,
)


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
