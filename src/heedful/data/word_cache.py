"""Batches of texts encoded word by word, so that a frequent word is tokenized once."""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal, TypeAlias, cast

Separation: TypeAlias = Literal["spaces", "borders"]

_MAX_CHARACTERS = 1 << 20  # of the words in a cache, which then takes about 40 MB
# Python's whitespace includes that of the `tokenizers` library.
_BORDER = re.compile(r"(?<=\S)(?= \S)")


class WordCache:
    """Encodes texts by the ids of their words, some of which it remembers.

    The ids of a text must be those of its words, one after the other. By "spaces" a word ends at
    each space, which is part of no word: for tokenizers that collapse whitespace and put a space
    before each text. By "borders" a word begins at each space between two characters that are not
    whitespace: for the pre-tokenizer of GPT-2, no match of which crosses or looks across such a
    border.

    Args:
        encode: returns the ids of each of some words.
    """

    def __init__(
        self, encode: Callable[[list[str]], Iterable[Sequence[int]]], separation: Separation
    ) -> None:
        self._encode = encode
        self._split = splitter(separation)
        self._ids: dict[str, tuple[int, ...]] = {}
        self._num_characters = 0
        # One object for each id: those of all words would not fit the caches of a processor.
        self._objects: dict[int, int] = {}

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; raises TypeError unless `texts` is a list of strings."""
        if not isinstance(texts, list | tuple):
            raise TypeError
        ids = self._ids  # another thread may replace the attribute
        rows: list[list[int] | None] = []
        # Text by text: its words are freed before those of the next one are made.
        for text in texts:
            try:
                rows.append(list(chain.from_iterable(map(ids.__getitem__, self._split(text)))))
            except KeyError:
                rows.append(None)
        if missing := [index for index, row in enumerate(rows) if row is None]:
            ids = self._with_words([self._split(texts[index]) for index in missing])
            for index in missing:
                words = self._split(texts[index])
                rows[index] = list(chain.from_iterable(map(ids.__getitem__, words)))
        return cast("list[list[int]]", rows)

    def _with_words(self, rows: Sequence[list[str]]) -> dict[str, tuple[int, ...]]:
        """The ids of the words of some texts, with those of other words."""
        words = set[str]().union(*rows)
        ids = self._ids
        new = words.difference(ids)
        size = self._num_characters + sum(map(len, new))
        if size > _MAX_CHARACTERS:
            ids, new, size = {}, words, sum(map(len, words))
        object_of = self._objects.setdefault
        encoded = (tuple([object_of(i, i) for i in word]) for word in self._encode([*new]))
        ids.update(zip(new, encoded, strict=True))
        is_small = size <= _MAX_CHARACTERS
        self._ids, self._num_characters = (ids, size) if is_small else ({}, 0)
        return ids


def splitter(separation: Separation) -> Callable[[str], list[str]]:
    """The function that returns the words of a text."""
    return _split_at_spaces if separation == "spaces" else _BORDER.split


def _split_at_spaces(text: str) -> list[str]:
    return str.split(text, " ")
