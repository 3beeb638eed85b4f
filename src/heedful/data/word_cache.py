"""Batches of texts encoded word by word, so that a frequent word is tokenized once."""

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

Separation: TypeAlias = Literal["spaces", "borders"]

_TYPE = "I"  # of the ids in arrays
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
        self._ids: dict[str, bytes] = {}  # of arrays of unsigned ints
        self._num_characters = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text; raises TypeError unless `texts` is a list of strings."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list["array[int]"]:
        """The ids of `encode_batch` as arrays of unsigned ints, without a Python object per id."""
        if not isinstance(texts, list | tuple):
            raise TypeError
        ids = self._ids  # another thread may replace the attribute
        rows: list[array[int] | None] = []
        # Text by text: its words are freed before those of the next one are made.
        for text in texts:
            try:
                rows.append(_joined(ids, self._split(text)))
            except KeyError:
                rows.append(None)
        if missing := [index for index, row in enumerate(rows) if row is None]:
            ids = self._with_words([self._split(texts[index]) for index in missing])
            for index in missing:
                rows[index] = _joined(ids, self._split(texts[index]))
        return cast("list[array[int]]", rows)

    def _with_words(self, rows: Sequence[list[str]]) -> dict[str, bytes]:
        """The ids of the words of some texts, with those of other words."""
        words = set[str]().union(*rows)
        ids = self._ids
        new = words.difference(ids)
        size = self._num_characters + sum(map(len, new))
        if size > _MAX_CHARACTERS:
            ids, new, size = {}, words, sum(map(len, words))
        encoded = (array(_TYPE, word).tobytes() for word in self._encode([*new]))
        ids.update(zip(new, encoded, strict=True))
        is_small = size <= _MAX_CHARACTERS
        self._ids, self._num_characters = (ids, size) if is_small else ({}, 0)
        return ids


def _joined(ids: Mapping[str, bytes], words: list[str]) -> "array[int]":
    """The ids of some words, one after the other; raises KeyError for a word without ids."""
    return array(_TYPE, b"".join(map(ids.__getitem__, words)))


def splitter(separation: Separation) -> Callable[[str], list[str]]:
    """The function that returns the words of a text."""
    return _split_at_spaces if separation == "spaces" else _BORDER.split


def _split_at_spaces(text: str) -> list[str]:
    return str.split(text, " ")
