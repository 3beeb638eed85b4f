"""Strings that end an output."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from heedful.data.decoding import GrowingText, TextDecoder
from heedful.errors import UserError


@dataclass(eq=False)
class _Reading:
    """The text of one output so far.

    Attributes:
        end: of its text, in which the beginning of a string can be.
    """

    text: GrowingText
    ids: list[int] = field(default_factory=list)
    end: str = ""
    is_ended: bool = False


@dataclass(frozen=True)
class StopStrings:
    """A `stop` function: an output ends when its text contains one of the strings.

    The text then still contains the string and the rest of the last token; `cut` removes both.
    Each token is decoded once while the outputs of a sentence get longer.
    """

    decoder: TextDecoder
    strings: Sequence[str]
    _readings: dict[int, list[_Reading]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_stop_strings(self.strings)

    def __call__(self, sentence: int, ids: list[int]) -> bool:
        readings = self._readings.setdefault(sentence, [])
        known = [one for one in readings if one.ids == ids[: len(one.ids)]]
        if known:
            reading = max(known, key=lambda one: len(one.ids))
        else:  # another sample
            reading = _Reading(GrowingText(self.decoder))
            readings.append(reading)
        reading.end += reading.text.add(ids[len(reading.ids) :])
        reading.ids = ids
        reading.is_ended = reading.is_ended or first_stop(reading.end, self.strings) is not None
        longest = max(map(len, self.strings), default=0)
        reading.end = reading.end[max(0, len(reading.end) - longest + 1) :]
        return reading.is_ended


def check_stop_strings(strings: Sequence[str]) -> None:
    """Raises UserError for anything but a list of strings that are not empty."""
    if isinstance(strings, str):
        raise UserError(f"stop strings must be a list of strings, not the string {strings!r}")
    if "" in strings:
        raise UserError("a stop string is empty: every text contains it")


def first_stop(text: str, strings: Sequence[str]) -> int | None:
    """The index of the first occurrence of any of the strings; None: there is none."""
    return min((at for at in map(text.find, strings) if at >= 0), default=None)


def cut(text: str, strings: Sequence[str]) -> str:
    """The text before the first occurrence of any of the strings, or all of it."""
    check_stop_strings(strings)
    return text[: first_stop(text, strings)]
