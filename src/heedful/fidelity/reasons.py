"""Reasons why a person should review a translation: texts, with a code for programs."""

from collections.abc import Mapping
from typing import Any

TEXTS: Mapping[str, str] = {
    "missing": "missing: {pieces}",
    "added": "not in the source: {pieces}",
    "unknown_removed": "an unknown piece was removed",
    "repeated": "{piece} was repeated",
    "placed": "{piece} was missing and is placed by its position",
    "numbers_joined": "numbers were joined and are separated",
    "pieces_joined": "pieces were joined with words and are separated",
    "choice": "a choice of texts that is not translated: {piece}",
    "forms": "plural forms that the choice of texts lacks: {forms}",
    "term": "the term {term} is not always translated by {translations}",
    "term_left_out": "the term {term} is not required: the model cannot write {translations}",
    "blank": "it has no translation",
    "parts_blank": "parts without a translation: {count}",
    "unknown": "not read, as the model's vocabulary lacks it: {pieces}",
    "words_too_long": "words that are too long for the model: {count}",
    "cut": "cut off by the length limit",
    "language": "language: the text is in {found}, not in {expected}",
    "tags": "the place of tags is uncertain: {text}",
}
"""By code: the text, with the names of the reason's values."""

_SHOWN = 80  # characters of a text in a reason


class Reason(str):
    """The text of a reason, as a person reads it.

    Attributes:
        code: a key of `TEXTS`.
        values: those of the code.
    """

    code: str
    values: Mapping[str, Any]

    def __new__(cls, code: str, values: Mapping[str, Any] | None = None) -> "Reason":
        """The reason of a code."""
        reason = super().__new__(cls, TEXTS[code].format_map(values or {}))
        reason.code, reason.values = code, dict(values or {})
        return reason

    def __getnewargs__(self) -> tuple[str, Mapping[str, Any]]:  # type: ignore[override]
        return self.code, self.values  # with which copies and other processes make it again


def tags_reason(text: str) -> Reason:
    """The reason of tags whose place in the translation of a text is uncertain."""
    return Reason("tags", {"text": text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"})


def code_of(reason: str) -> dict[str, Any]:
    """A reason for programs: its `code`, None for one without, and the code's `values`."""
    if isinstance(reason, Reason):
        return {"code": reason.code, "values": reason.values}
    return {"code": None, "values": {}}
