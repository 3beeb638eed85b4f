"""Checks before any command begins: that its outputs can be written, and the name of its device."""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from heedful.cli.flags import set_signature
from heedful.cli.guard import keep_running_without_stdout, show_tracebacks
from heedful.cli.help import GENERAL, Command
from heedful.errors import UserError
from heedful.files import check_writable

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?")
_INPUT_OPTIONS = {"input", "src", "tgt", "ref"}  # options whose files are read
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=GENERAL),
]


def add_command(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    group: str | None = None,
    *,
    hidden: bool = False,
) -> None:
    """Add a command, with the checks of this module and the flag `--debug`.

    Its help is the function's docstring: paragraphs are wrapped, and lines of examples are not.

    Args:
        hidden: `--help` of the group does not list it, because it is another name of a command.
    """

    @wraps(function)
    def run(*, debug: bool = False, **values: Any) -> None:
        if debug:
            show_tracebacks()
        _check(values)
        if values.keys() & {
            "out",
            "to",
            "folder",
        }:  # the folder is the result; stdout only reports it
            keep_running_without_stdout()
        function(**values)

    only = inspect.Parameter.KEYWORD_ONLY
    parameters = [*inspect.signature(function).parameters.values()]
    parameters.append(inspect.Parameter("debug", only, default=False, annotation=Debug))
    set_signature(run, [parameter.replace(kind=only) for parameter in parameters])
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    # By click's mark for it, a paragraph of examples is kept line by line.
    text = "\n\n".join(
        f"\b\n{text}" if text.startswith("Example: ") else text.replace("\n", " ")
        for text in paragraphs
    )
    app.command(name, help=text, cls=Command, rich_help_panel=group, hidden=hidden)(run)


def _check(values: dict[str, Any]) -> None:
    for _, value in _each_value(values):
        text = str(value) if isinstance(value, str | Path) else ""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{text}: not UTF-8; convert it")
    for name in _INPUT_OPTIONS & values.keys():
        if values[name] is not None and not _exists(values[name]):
            text = "; a text is an argument: MODEL TEXT" if "texts" in values else ""
            raise UserError(f"--{name} {values[name]}: No such file{text}")
    output, device = values.get("output"), values.get("device")
    if device is not None and not _DEVICE.fullmatch(device):
        raise UserError(f"no device {device}; use auto, cpu, cuda, cuda:1 or mps")
    if output is None:
        return
    is_of_folder = isinstance(source := values.get("input"), Path) and source.is_dir()
    if not (is_of_folder and output.is_dir()):  # the files of a folder are written to another one
        check_writable(output)
    for name, value in _each_value(values):
        if name == "output" or not isinstance(value, Path) or not value.exists():
            continue
        if output.exists() and os.path.samefile(value, output):
            raise UserError(f"{output} is read and cannot be written too; give another --output")
        if value.is_dir() and output.resolve().is_relative_to(value.resolve()):
            raise UserError(f"{output} is inside {value}, which is read; give another --output")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a name, or with a null
        return False


def _each_value(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each value with its name, those of repeated options one by one."""
    for name, value in values.items():
        yield from ((name, item) for item in (value if isinstance(value, list) else [value]))
