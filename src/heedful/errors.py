"""Errors that users can mend: one line, then exit code 2."""

from collections.abc import Callable, Sequence


class UserError(ValueError):
    """Bad input. The message is one line: what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2. It is a `ValueError`,
    so that a program which calls the library may catch it as one.
    """


def format_names(names: Sequence[str], show: Callable[[str], str] = repr, most: int = 10) -> str:
    """Some names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(show, names[:most])) + more
