"""Words of texts, each of which is split once: encoded by a cache, counted for trainers."""

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, TypeAlias, cast

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from heedful.data.workers import map_in_order

Separation: TypeAlias = Literal["spaces", "borders"]

_TYPE = "I"  # of the ids in arrays
_MAX_CHARACTERS = 1 << 20  # of the words in a cache, which then takes about 40 MB
# Python's whitespace includes that of the `tokenizers` library.
_BORDER = re.compile(r"(?<=\S)(?= \S)")
# The functions that return the words of a text; both raise TypeError for anything else.
SPLIT: Mapping[Separation, Callable[[str], list[str]]] = {
    "spaces": lambda text: str.split(text, " "),
    "borders": _BORDER.split,
}
_SEPARATOR = "\n"  # no piece of a tokenizer with words has whitespace
_PIECES = 128  # of a text for a trainer
_BATCH_BYTES = 1 << 23  # of the texts that are sent to a worker at once
_WORKER_CHARACTERS = 1 << 25  # of the texts for a worker; fewer are counted sooner than it starts


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
        self._split = SPLIT[separation]
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


def count_words(lines: Sequence[str], separation: Separation, num_workers: int = 1) -> Counter[str]:
    """The words of texts, as in `WordCache`, with their numbers of occurrences.

    They have the order of their first occurrences, for any number of workers.

    Args:
        num_workers: maximum number of processes that count.
    """
    size = sum(map(len, lines))
    count = min(num_workers, max(1, size // _WORKER_CHARACTERS))
    if count == 1:
        return Counter(chain.from_iterable(map(SPLIT[separation], lines)))
    words: Counter[str] = Counter()
    for counted in map_in_order(partial(_count_encoded, separation), _batches(lines), count):
        words.update(counted)
    return words


def _count_encoded(separation: Separation, batch: list[bytes]) -> Counter[str]:
    """The words of some texts of `_batches`, in a worker process."""
    return count_words([text.decode("utf-8", "surrogatepass") for text in batch], separation)


def _batches(lines: Sequence[str]) -> Iterator[list[bytes]]:
    """The texts in batches of about `_BATCH_BYTES`, in UTF-8.

    A string that is pickled keeps its UTF-8 in memory afterwards.
    """
    batch, size = list[bytes](), 0
    for line in lines:
        batch.append(line.encode("utf-8", "surrogatepass"))
        size += len(batch[-1])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def train_on_words(backend: Backend, words: Mapping[str, int], trainer: Any) -> None:
    """Train the model of a tokenizer as on the texts with these words.

    The trainers take texts, which they normalize and split, and count the pieces. Here each
    distinct word is normalized and split once. The trainer is given the pieces as often as they
    occur, in texts that are cheap to split.
    """
    normalizer, split = backend.normalizer, backend.pre_tokenizer.pre_tokenize_str
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        normal = word if normalizer is None else normalizer.normalize_str(word)
        for piece, _ in split(normal):
            pieces[piece] += count
    trained = Backend(backend.model)
    trained.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(_SEPARATOR)
    trained.train_from_iterator(_repeated(pieces), trainer=trainer)
    backend.model = trained.model


def _repeated(pieces: Mapping[str, int]) -> Iterator[str]:
    """Texts with each piece as often as it occurs."""
    waiting: list[str] = []
    for piece, count in pieces.items():
        num_texts, num_left = divmod(count, _PIECES)
        yield from repeat(_SEPARATOR.join([piece] * _PIECES), num_texts)
        waiting += [piece] * num_left
        if len(waiting) >= _PIECES:
            yield _SEPARATOR.join(waiting)
            waiting = []
    yield _SEPARATOR.join(waiting)
