"""Accelerators: marks before the letter that selects an entry of a menu (~File, _File, &File)."""

import re

from heedful.data.inline import TAG

_MARKED = re.compile(r"(?<![\w~&])[~_&](?=\w)|(?<=[^\W_])~(?=\w)")


def accelerator_of(text: str) -> str | None:
    """The mark of a text; None without one, or with several marks."""
    if not any(mark in text for mark in "~_&"):
        return None
    marks = _MARKED.findall(text)
    return marks[0] if len(marks) == 1 else None


def with_accelerator(source: str, target: str) -> str:
    """The target with one mark if the source has one, and with none if it has none.

    A missing mark is put before the letter that it marks in the source, if a word of the target
    begins with that, or else before its first letter.
    """
    mark = accelerator_of(source)
    if mark is None:
        return target
    places = [match.start() for match in _MARKED.finditer(target) if match[0] == mark]
    if len(places) == 1:
        return target
    if places:
        head, tail = target[: places[0] + 1], target[places[0] + 1 :]
        return head + re.sub(rf"{re.escape(mark)}(?=\w)", "", tail)
    letter = source[source.index(mark) + 1]
    bare = TAG.sub(lambda tag: " " * len(tag[0]), target)
    match = re.search(rf"\b{re.escape(letter)}", bare, re.IGNORECASE) or re.search(
        r"[^\W\d_]", bare
    )
    return target if match is None else target[: match.start()] + mark + target[match.start() :]
