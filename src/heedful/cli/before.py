"""What is looked at before a verb begins, whatever the verb: places to write, files, the device."""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from heedful.cli.guard import runs_on
from heedful.errors import UserError
from heedful.files import check_writable

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?")


def add_verb(app: typer.Typer, name: str, verb: Callable[..., None]) -> None:
    """A command that is told before it begins what could only fail at its end.

    The paragraphs of its help are one line each: the terminal breaks them where it must.
    """

    @wraps(verb)
    def run(**given: Any) -> None:
        _check(given)
        if given.keys() & {"out", "to"}:  # what counts is the folder; stdout only tells of it
            runs_on()
        verb(**given)

    paragraphs = (inspect.getdoc(verb) or "").split("\n\n")
    app.command(name, help="\n\n".join(text.replace("\n", " ") for text in paragraphs))(run)


def _check(given: dict[str, Any]) -> None:
    for name, value in _single(given):
        text = str(value) if isinstance(value, str | Path) else ""
        if any("\ud800" <= each <= "\udfff" for each in text):
            raise UserError(f"--{name} {value}: not UTF-8; convert it")
    output, device = given.get("output"), given.get("device")
    if device is not None and not _DEVICE.fullmatch(device):
        raise UserError(f"no device {device}; use auto, cpu, cuda, cuda:1 or mps")
    if output is None:
        return
    check_writable(output)
    for name, value in _single(given):
        if name == "output" or not isinstance(value, Path) or not value.exists():
            continue
        if output.exists() and os.path.samefile(value, output):
            raise UserError(f"{output} is read and cannot be written too; give another --output")
        if value.is_dir() and output.resolve().is_relative_to(value.resolve()):
            raise UserError(f"{output} is inside {value}, which is read; give another --output")


def _single(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each value with its name, those of repeated options one by one."""
    for name, value in given.items():
        yield from ((name, each) for each in (value if isinstance(value, list) else [value]))
