"""Split rows into training and held-out rows, and remove rows whose source is in both."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import floor
from typing import Annotated, Any, NamedTuple
from unicodedata import normalize
from zlib import crc32

import numpy as np
from jaxtyping import Bool, Int64, UInt32, UInt64
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from heedful.data.rows import (
    CORPUS,
    LABEL,
    MESSAGES,
    Chunk,
    Rows,
    TextUnit,
    hash_cells,
    without_invisible,
)
from heedful.errors import UserError

_TARGET = "tgt"  # the column of the targets of pairs

# Arrays as JSON: lists.
_LIST = PlainSerializer(lambda array: array.tolist())
RowIndices = Annotated[
    Int64[np.ndarray, " n"], PlainValidator(partial(np.array, dtype=np.int64)), _LIST
]
Digests = Annotated[
    UInt64[np.ndarray, " n"], PlainValidator(partial(np.array, dtype=np.uint64)), _LIST
]
Checksums = Annotated[
    UInt32[np.ndarray, " n"], PlainValidator(partial(np.array, dtype=np.uint32)), _LIST
]


class Tail(NamedTuple):
    """Rows that are held out because they are the last ones of a corpus, by their indices.

    Attributes:
        start, end: the rows from `start` up to `end` are held out.
        cut: the number of characters of row `start - 1` that are for training, where that row is
            divided: the rest is held out; None: it is not divided.
    """

    start: int
    end: int
    cut: int | None = None


@dataclass(frozen=True)
class Split:
    """The choice of the training rows among all rows that are read, by their indices from 0.

    Attributes:
        held_out: (H,), ascending indices of rows that are held out.
        tails: further rows that are held out.
    """

    held_out: RowIndices = field(default_factory=lambda: np.zeros(0, np.int64))
    tails: tuple[Tail, ...] = ()

    @property
    def num_valid(self) -> int:
        """The number of rows that are held out whole."""
        return len(self.held_out) + sum(tail.end - tail.start for tail in self.tails)

    def holds_out_some(self, start: int, end: int) -> bool:
        """True if a row from `start` up to `end` is held out, or a part of one."""
        first, last = np.searchsorted(self.held_out, [start, end])
        return bool(first < last) or any(
            tail.start - (tail.cut is not None) < end and start < tail.end for tail in self.tails
        )

    def take_from(self, chunk: Chunk, *, held_out: bool) -> Rows:
        """`take` for the rows of a chunk of the source that are kept."""
        rows = chunk.parse()
        return self.take(rows, np.arange(chunk.first, chunk.first + len(rows)), held_out=held_out)

    def take(self, rows: Rows, indices: Int64[np.ndarray, " N"], *, held_out: bool) -> Rows:
        """The held-out rows, or the training rows, of some rows of the source.

        Of a divided row each side has its part.

        Args:
            indices: of `rows` among all rows of the source.
        """
        if not held_out and not len(self.held_out) and not self.tails:
            return rows
        is_held_out = np.isin(indices, self.held_out, assume_unique=True)
        for tail in self.tails:
            is_held_out |= (indices >= tail.start) & (indices < tail.end)
        is_chosen = is_held_out if held_out else ~is_held_out
        parts: dict[int, str] = {}
        for tail in self.tails:
            for index in np.flatnonzero(indices == tail.start - 1).tolist() if tail.cut else ():
                text = rows["text"][index]
                parts[index] = text[tail.cut :] if held_out else text[: tail.cut]
                is_chosen[index] = True
        chosen = rows.select(np.flatnonzero(is_chosen))
        for index, part in parts.items():
            chosen["text"][int(is_chosen[:index].sum())] = part
        return chosen


def normalized(text: str) -> str:
    """The text as sources are compared: in NFKC, without characters that are not displayed, and
    with one space for each run of whitespace."""
    if not (text.isascii() and text.isprintable()):
        text = without_invisible(normalize("NFKC", text))
    return " ".join(text.split())


def source_columns(rows: Rows) -> list[list[str]]:
    """The normalized columns of the input of each row, without targets, labels and corpora.

    Of a chat it is the part before the first answer, so that rows with the first turns of one
    conversation have equal inputs; a chat without a question before its first answer is used whole.
    """
    if MESSAGES in rows:
        return [[normalized(_opening(json.loads(chat))) for chat in rows[MESSAGES]]]
    names = [name for name in rows.columns if name not in (_TARGET, LABEL, CORPUS)]
    return [[*map(normalized, rows[name])] for name in names]


def _opening(chat: Sequence[Mapping[str, Any]]) -> str:
    roles = [message["role"] for message in chat]
    end = roles.index("assistant")
    if all(role == "system" for role in roles[:end]):
        end = len(chat)
    return "\n".join(f"{message['role']}: {message['content']}" for message in chat[:end])


def split_by_source(
    source_hashes: UInt64[np.ndarray, " N"], size: int | float | None, noun: str
) -> Split:
    """Held-out rows chosen at random: all rows of a source, or none.

    Sources are taken in the order of their hashes, each if all of its rows fit; so a few rows less
    than `size` may be held out where sources have several.

    Args:
        source_hashes: (N,), the hash of the source of each row.
        size: number of held-out rows, or below 1 their fraction of all rows, rounded down to at
            least one row; None: `DEFAULT_VALID_ROWS`, or a tenth of the rows if
            that is fewer.
        noun: the word for a row in messages.

    Raises:
        UserError: there would be fewer training rows than held-out rows.
    """
    num_rows = len(source_hashes)
    if size is None:
        from heedful.config import DEFAULT_VALID_ROWS  # whose schema a translation needs not

        size = min(DEFAULT_VALID_ROWS, max(1, num_rows // 10))
    count = int(size) if size >= 1 else max(1, floor(num_rows * Fraction(str(size))))
    if num_rows < 2 * count:
        raise UserError(
            f"data.valid_size {size} of {num_rows} {noun} would leave too few to train"
            " on; lower it, or give data.valid"
        )
    ordered = np.sort(source_hashes)
    firsts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    sizes = np.diff(firsts, append=num_rows)
    chosen = _choose_groups(sizes, count)
    if 2 * int(sizes[chosen].sum()) > num_rows:
        raise UserError(
            f"data.valid_size: {num_rows} {noun} have {len(sizes)} different sources, too few to"
            " hold out all rows of some; give data.valid"
        )
    return Split(np.flatnonzero(_is_in(np.sort(ordered[firsts[chosen]]), source_hashes)))


def _choose_groups(sizes: Int64[np.ndarray, " g"], count: int) -> Int64[np.ndarray, " c"]:
    """The groups, in order, that fit into `count` rows; a smallest one if none fits."""
    chosen, left = [np.zeros(0, np.int64)], np.arange(len(sizes))
    while len(left := left[sizes[left] <= count]):
        num_taken = int(np.searchsorted(np.cumsum(sizes[left]), count, side="right"))
        chosen.append(left[:num_taken])
        count -= int(sizes[left[:num_taken]].sum())
        left = left[num_taken:]
    groups = np.concatenate(chosen)
    return groups if len(groups) else np.array([sizes.argmin()])


def split_tail(
    num_rows: Sequence[int],
    num_characters: Sequence[int],
    lengths_of: Callable[[int], Sequence[int]],
    size: int | float,
    unit: TextUnit,
    *,
    first: int = 0,
) -> Tail:
    """The last texts of a corpus are held out.

    With a fraction f of n characters the first floor(n x (1 - f)) characters are for training, with
    f as a decimal number; tiny Shakespeare is split 90/10 like this by convention. A text across
    the border is cut if `unit` is "file"; otherwise it is assigned whole to the side with the
    larger part of it (training if they are equal).

    Args:
        num_rows, num_characters: of each chunk of texts.
        lengths_of: returns the characters of each text of a chunk, by its number from 0.
        size: number of held-out texts, or a fraction (float) of all CHARACTERS.
        first: the index of the first text among all rows.

    Raises:
        UserError: one side would be empty.
    """
    ends = np.cumsum([0, *num_rows], dtype=np.int64)
    total = int(ends[-1])
    split, cut = max(total - int(size), 0), None
    if not isinstance(size, int):
        borders = np.cumsum([0, *num_characters], dtype=np.int64)
        border = floor(int(borders[-1]) * (1 - Fraction(str(size))))
        chunk = int(np.searchsorted(borders, border, side="right")) - 1
        lengths = lengths_of(chunk)
        starts = int(borders[chunk]) + np.cumsum([0, *lengths], dtype=np.int64)
        index = int(np.searchsorted(starts, border, side="right")) - 1  # the text of the border
        inside = border - int(starts[index])
        if inside > 0 and unit == "file":
            cut = inside
        split = int(ends[chunk]) + index
        split += cut is not None or (inside > 0 and 2 * inside >= lengths[index])
    if not split or split - (cut is not None) == total:
        side = "hold out" if split else "train on"
        raise UserError(
            f"data.valid_size {size} of {total} texts leaves none to {side};"
            " change it, or give more text"
        )
    return Tail(first + split, first + total, cut)


@dataclass(frozen=True)
class KnownRows:
    """Hashes of the held-out rows, to find training rows with their sources (`source_columns`).

    A row takes 12 bytes, with `both_directions` 24. Digests have 64 bits: of 100 million training
    rows one is dropped by mistake with a probability below 0.000001 for each 100,000 held-out rows.

    Attributes:
        digests: (n,), of the source of each row, and of exchanged pairs, ascending.
        checksums: (n,), of the first column of these, ascending; a row with another checksum
            needs no digest.
        both_directions: a training pair is also found where it is a held-out pair with the sides
            exchanged.
    """

    digests: Digests = field(default_factory=lambda: np.zeros(0, np.uint64))
    checksums: Checksums = field(default_factory=lambda: np.zeros(0, np.uint32))
    both_directions: bool = False

    @classmethod
    def from_rows(cls, groups: Iterable[Rows], *, both_directions: bool = False) -> "KnownRows":
        """The hashes of some rows, of which one group at a time is in memory."""
        digests, checksums = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint32)]
        for rows in groups:
            sources = source_columns(rows)
            kinds = [sources]
            if both_directions and _TARGET in rows:
                kinds.append([[*map(normalized, rows[_TARGET])], sources[0]])
            digests += map(hash_cells, kinds)
            checksums += [_checksums(columns[0]) for columns in kinds]
        arrays = np.sort(np.concatenate(digests)), np.sort(np.concatenate(checksums))
        return cls(*arrays, both_directions)

    def drop_from(self, rows: Rows) -> Rows:
        """The rows that are not known; the report counts the others."""
        if not len(self.digests):
            return rows
        sources = source_columns(rows)
        candidates = np.flatnonzero(_is_in(self.checksums, _checksums(sources[0])))
        if not len(candidates):
            return rows
        columns = [[column[index] for index in candidates.tolist()] for column in sources]
        is_known = _is_in(self.digests, hash_cells(columns))
        if self.both_directions and _TARGET in rows:
            targets = [normalized(rows[_TARGET][index]) for index in candidates.tolist()]
            is_known |= _is_in(self.digests, hash_cells([columns[0], targets]))
        known = candidates[is_known]
        if not len(known):
            return rows
        is_new = np.ones(len(rows), bool)
        is_new[known] = False
        remaining = rows.select(np.flatnonzero(is_new))
        num_kept = len(remaining)
        remaining.report = replace(rows.report, num_kept=num_kept, num_also_held_out=len(known))
        return remaining


def _checksums(texts: Sequence[str]) -> UInt32[np.ndarray, " N"]:
    checksums = (crc32(text.encode("utf-8", "surrogatepass")) for text in texts)
    return np.fromiter(checksums, np.uint32, len(texts))


def _is_in(
    ascending: NDArray[np.unsignedinteger], values: NDArray[np.unsignedinteger]
) -> Bool[np.ndarray, " n"]:
    """True for each value that is an element of an array that is not empty."""
    index = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return np.asarray(ascending[index] == values)
