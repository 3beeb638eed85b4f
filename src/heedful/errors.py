"""Errors that users can correct: one line, then exit code 2."""

import copyreg
import reprlib
from collections.abc import Callable, Sequence
from typing import Any


class UserError(ValueError):
    """Bad input; the message is one line that says the problem, the place and the remedy.

    The command line prints it without a traceback and exits with code 2. It is a `ValueError`,
    so that programs can catch it as one.

    A message names arguments as a Python caller writes them, `overwrite=True` or `out=FOLDER`, and
    keys of a recipe as `training.max_steps=100`; the command line shows the flags in their place
    (`heedful.cli.flags.with_flags`).

    >>> import heedful
    >>> try:
    ...     heedful.load_recipe("copy", {"training.max_step": 5})
    ... except heedful.UserError as error:
    ...     print(error)
    overrides: unknown key training.max_step; did you mean max_steps?
    """

    def __reduce__(self) -> Any:
        """For another process: without a call of the class, whose arguments may be others."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class DamagedError(UserError):
    """Files of a model or backend that fail when they are used: no fault of the input."""


def describe(value: object) -> str:
    """A value of a wrong type for a message: its beginning, and its type."""
    text = " ".join(reprlib.repr(value).split())
    return text if value is None else f"{text} ({type(value).__name__})"


def error_line(error: Exception) -> str:
    """An error in one line, for a message; of one that is no `UserError` with its class."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def format_names(names: Sequence[str], show: Callable[[str], str] = repr, most: int = 10) -> str:
    """The first names of a list for a message, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(show, names[:most])) + more
