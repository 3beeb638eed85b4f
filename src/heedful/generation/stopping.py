"""Strings that end an output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heedful.errors import UserError


@dataclass(frozen=True)
class StopStrings:
    """A `stop` function: an output ends when its text contains one of the strings.

    The text then still contains the string and the rest of the last token; `cut` removes both.
    """

    decode: Callable[[list[int]], str]
    strings: Sequence[str]

    def __post_init__(self) -> None:
        cut("", self.strings)  # checks the strings

    def __call__(self, sentence: int, ids: list[int]) -> bool:
        text = self.decode(ids)
        return cut(text, self.strings) != text


def cut(text: str, strings: Sequence[str]) -> str:
    """The text before the first occurrence of any of the strings, or all of it."""
    if isinstance(strings, str):
        raise UserError(f"stop strings must be a list of strings, not the string {strings!r}")
    if "" in strings:
        raise UserError("a stop string is empty: every text contains it")
    return text[: min((at for at in map(text.find, strings) if at >= 0), default=len(text))]
