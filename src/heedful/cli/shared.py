"""Shared by commands: the console, and the start of a run."""

import json
import math
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from heedful.config import Recipe
    from heedful.run import TrainingRun


def make_console(*, quiet: bool = False) -> "Console":
    """A console that prints texts unchanged, with brackets and names such as `:key:`."""
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_json(content: Any) -> None:
    """Print indented JSON, as `to_json`."""
    typer.echo(to_json(content, indent=2))


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON without escapes for letters that are not ASCII; null for NaN and infinities."""
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(content), ensure_ascii=False, indent=indent)


def _finite(content: Any) -> Any:
    """The content with None in place of NaN and infinities."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(item) for item in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def note(text: str) -> None:
    """Print a note on stderr, of the command or of the library, as one line."""
    from heedful.cli.flags import with_flags
    from heedful.cli.guard import one_line

    typer.echo(f"note: {one_line(with_flags(text))}", err=True)


def run_recipe(
    recipe: "Recipe",
    folder: Path,
    console: "Console",
    *,
    resume: bool = False,
    changes: Sequence[str] = (),
    again: str = "",
) -> "TrainingRun":
    """Train into a folder, with a progress bar unless the console is quiet.

    An interrupted run ends the command with code 130; `again` is the advice how to continue it.
    """
    from heedful.processes import current
    from heedful.progress import use_display
    from heedful.run import train
    from heedful.training.listeners import RunDisplay

    bar = RunDisplay(console)
    with closing(bar), use_display(None if console.quiet else bar.track):
        result = train(
            recipe,
            folder,
            resume=resume,
            changes=changes,
            on_event=None if console.quiet else bar.on,
            print_line=console.print,
            progress=False,
            command=shlex.join(["heedful", *sys.argv[1:]]),
            tunes_threads=True,
        )
    if result.reason == "interrupted":
        again = again or "continue with: " + shlex.join(
            ["heedful", "train", str(folder), "--resume"]
        )
        if current().is_main:
            typer.echo(f"stopped and saved; {again}", err=True)
        raise SystemExit(130)  # no error that other processes are informed of
    return result


def report_result(result: "TrainingRun", console: "Console") -> None:
    """Print the scores of a run, its files, and a command that runs its model."""
    for name, entry in (result.scores.by_name if result.scores else {}).items():
        score = entry if isinstance(entry, dict) else {"score": entry}
        console.print(f"{name:<18} {score['score']:.4g}   {score.get('signature', '')}".rstrip())
    folder = result.directory
    console.print(f"model        {folder}")
    if (folder / "report.html").is_file():
        console.print(f"report       {folder / 'report.html'}")
    command, text = USE.get(result.task, USE["translation"])
    console.print(f"use it       heedful {command} {shlex.quote(str(folder))} '{text}'")


def print_result(result: "TrainingRun") -> None:
    """Print a run's folder, its task, the reason of its end and its scores as JSON."""
    scores = result.scores.by_name if result.scores else {}
    facts = {"directory": str(result.directory), "task": result.task, "reason": result.reason}
    print_json({**facts, "scores": scores})


USE = {  # the command that runs a model of a task, and a text for it
    "language_modeling": ("generate", "your text"),
    "sft": ("chat", "your question"),
    "masked_lm": ("fill", "one <mask> is hidden"),
    "classification": ("classify", "your text"),
    "denoising": ("generate", "your text"),
    "translation": ("translate", "your text"),
}
