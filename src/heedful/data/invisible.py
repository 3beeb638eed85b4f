"""Characters that are not displayed, and texts that have no others."""

import re

# Control characters that are no whitespace, and Default_Ignorable_Code_Point of Unicode (soft
# hyphens, joiners, zero-width spaces, byte order marks, variation selectors, fillers, tags), as
# the inside of a regular expression's brackets.
INVISIBLE = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
    "\u00ad\u034f\u061c\u115f-\u1160\u17b4-\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
INVISIBLE_CHARACTER = re.compile(f"[{INVISIBLE}]")
_BLANK = re.compile(rf"[\s{INVISIBLE}]*")


def is_blank(text: str) -> bool:
    """True if nothing of a text is displayed: it has only whitespace and invisible characters."""
    return _BLANK.fullmatch(text) is not None


def without_invisible(text: str) -> str:
    """The text without its invisible characters."""
    return INVISIBLE_CHARACTER.sub("", text)
