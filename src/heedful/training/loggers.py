"""Listeners that write a run's events down: JSON lines, TensorBoard."""

import json
import textwrap
from pathlib import Path
from typing import TextIO

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
    """Writes one JSON object a line, each line flushed as it happens.

    With `resume_step` the log goes on from that step: events of later steps are dropped, as they
    will happen again, and so are the ends of earlier sessions and a last line torn by a kill. The
    shortened log replaces the old one in one move, so that no crash leaves half a log. Events of
    `resume_step` itself stay: save a step's checkpoint after its evaluation. Without
    `resume_step` the log starts empty.

    Raises `UserError` when the file cannot be read or written, or a line of it is broken.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self.path = path
        kept: list[Event] = []
        if resume_step is not None and path.exists():
            kept = [event for event in read_log(path) if _is_before(event, resume_step)]
        write_text(path, "".join(to_json(event) + "\n" for event in kept))
        with user_errors("write", path):
            self._file: TextIO = path.open("a", encoding="utf-8")

    def on(self, event: Event) -> None:
        """Appends the event."""
        with user_errors("write", self.path):
            self._file.write(to_json(event) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_log(path: Path) -> list[Event]:
    """The events of a log, oldest first. A last line without its newline is a torn one: left out.

    Raises `UserError` when the file cannot be read or another line is broken, with its number.
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
    """Writes scalars for TensorBoard into `directory`; on resume later steps are purged from view.

    Raises `UserError` when the optional package is missing.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "tensorboard: the package is not installed;"
                " pip install heedful[tensorboard], or switch this log off"
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        with user_errors("write", directory):
            self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def on(self, event: Event) -> None:
        """Writes the event's numbers, and of the start the recipe."""
        if isinstance(event, RunStarted):
            recipe = json.dumps(event.recipe, indent=2, ensure_ascii=False)
            step = event.resumed_from or 0
            # Markdown's indented block: TensorBoard would else fold the lines.
            self._writer.add_text("recipe", textwrap.indent(recipe, "    "), step)
        for name, value in _scalars(event).items():
            assert isinstance(event, StepDone | Evaluated)
            self._writer.add_scalar(name, value, event.step)

    def close(self) -> None:
        """Flushes and closes the files."""
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
    """Whether the event still holds for a run that goes on from `resume_step`."""
    if isinstance(event, RunFinished):
        return False
    if isinstance(event, RunStarted):
        return event.resumed_from is None or event.resumed_from < resume_step
    return event.step <= resume_step
