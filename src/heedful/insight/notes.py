"""Notes of an inspection page: keys of `page_texts.json`, which has them in both languages."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Note(NamedTuple):
    """A note of what a page leaves out.

    Attributes:
        key: of its sentence in `page_texts.json`.
        values: that replace {0}, {1}, … in it.
    """

    key: str
    values: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        """The note in English, for the terminal."""
        text: str = page_texts()["en"][self.key]
        return text.format(*self.values)


@cache
def page_texts() -> dict[str, dict[str, Any]]:
    """The texts of the page by language (`en`, `zh`) and key."""
    content = files("heedful.insight").joinpath("page_texts.json").read_text(encoding="utf-8")
    texts: dict[str, dict[str, Any]] = json.loads(content)
    return texts
