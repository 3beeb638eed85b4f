"""Encode rows of text as columns of token ids: truncate or drop long rows, and count."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool, Int64, UInt32

from heedful.data.columns import Column, Columns, Sequences, ids_dtype, offsets_from_lengths
from heedful.data.labels import ProblemType, label_columns
from heedful.data.reports import Counts, DataReport
from heedful.data.rows import CORPUS, Chunk, Rows
from heedful.data.splits import KnownRows, Split
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError

Item = TypeVar("Item")
_TEXT = -1  # no id: stands for a text among special tokens
Truncation: TypeAlias = Literal["drop", "truncate", "error"]


class RowError(UserError):
    """A row that cannot be encoded; `index` is its index among the rows of the call."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class TextColumn:
    """A column of token ids to be made of one or two columns of text.

    Args:
        texts: the name of one column of text, or of the two that form one sequence.
        special_tokens: "text" adds those of the tokenizer's template
            (`Tokenizer.add_special_tokens`), "target" those and a final EOS
            (`Tokenizer.encode_target`), "document" BOS and EOS, "none" adds none.
        tags: by corpus, the ids that are put before a text, within its special tokens.
    """

    tokenizer: Tokenizer
    texts: tuple[str, ...]
    special_tokens: Literal["text", "target", "document", "none"] = "text"
    tags: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def id_limit(self) -> int:
        """An upper bound of the stored ids, which are below it."""
        return self.tokenizer.vocab_size

    def encode_batch(self, cells: Sequence[list[str]]) -> Sequence[list[Sequence[int]]]:
        """For each of `texts` the ids of its rows, without special tokens.

        Args:
            cells: for each of `texts`, the texts of some rows.

        Raises:
            RowError: a row that cannot be encoded.
        """
        return [[*self.tokenizer.encode_rows(texts)] for texts in cells]

    def count_unknown(self, ids: UInt32[np.ndarray, " T"]) -> int:
        """The number of unknown tokens."""
        return int(np.count_nonzero(ids == self.tokenizer.unk_id))

    def has_targets(self, ids: Sequence[Sequence[int]]) -> bool:
        """False if the loss of a row has no targets."""
        return True

    def with_special_tokens(
        self, ids: Sequence[int], second: Sequence[int] | None = None
    ) -> list[int]:
        """The ids of a row as they are stored, with special tokens."""
        tokenizer = self.tokenizer
        if self.special_tokens == "text":
            return tokenizer.add_special_tokens(ids, second)
        assert second is None, self.special_tokens
        if self.special_tokens == "target":
            return tokenizer.encode_target(ids)
        if self.special_tokens == "document":
            return [tokenizer.bos_id, *ids, tokenizer.eos_id]
        return list(ids)

    def frame(self, rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after one text, if all rows of ids have the same.

        A target that already ends in EOS gets no other one; that of an empty text may end in it.
        """
        if self.special_tokens == "target":
            eos_id = self.tokenizer.eos_id
            if not all(row and row[-1] != eos_id for row in rows):
                return None
        framed = self.with_special_tokens([_TEXT])
        index = framed.index(_TEXT)
        return framed[:index], framed[index + 1 :]

    @cached_property
    def num_special(self) -> int:
        """The number of special tokens in a sequence."""
        return len(self.with_special_tokens([], [] if len(self.texts) > 1 else None))

    def truncate(self, ids: list[Sequence[int]], max_length: int) -> list[Sequence[int]]:
        """The ids of one or two texts, cut so that they fit with their special tokens."""
        size = max_length - self.num_special
        return [ids[0][:size]] if len(ids) == 1 else list(truncate_pair(ids[0], ids[1], size))

    def is_unknown(self, ids: Sequence[Sequence[int]]) -> bool:
        """True if all tokens are special or unknown."""
        return all(map(self.tokenizer.special_ids.issuperset, ids))


@dataclass(frozen=True)
class Encoder:
    """Makes columns of ids from rows of text; it can be sent to another process.

    A column of two texts comes with a column of numbers `NAME.second`: the index in each sequence
    at which the second text begins.

    Args:
        max_length: maximum length of a sequence in tokens, with special tokens; None: no limit.
        truncation: for rows with a longer sequence: "error" raises, "drop" leaves the row out,
            "truncate" cuts the end of the text but keeps the special tokens, and leaves the row
            out if no target of the loss is left. Of two texts the longer one is cut until both
            have the same length, then both (`_truncate_seq_pair` of Devlin et al. 2018's
            `run_classifier.py`).
        drop_unknown: leave out rows with a sequence of only special and unknown tokens.
        labels: names of the labels of the rows, or of the values of a regression, which become
            columns (`label_columns`); empty: the rows have no labels.
        problem: the kind of the labels.
        prepare: changes rows before they are tokenized.

    Raises:
        UserError: `max_length` is smaller than the number of special tokens and one token per text.
    """

    columns: Mapping[str, TextColumn]
    max_length: int | None = None
    truncation: Truncation = "drop"
    drop_unknown: bool = False
    labels: Sequence[str] = ()
    problem: ProblemType = "single_label"
    prepare: Callable[[Rows], Rows] | None = None

    def __post_init__(self) -> None:
        for column in self.columns.values():
            num_special = column.num_special + max(map(len, column.tags.values()), default=0)
            if self.max_length is not None and self.max_length < num_special + len(column.texts):
                raise UserError(
                    f"max_length {self.max_length} leaves no tokens for text beside {num_special}"
                    " special tokens; raise it"
                )

    @property
    def info(self) -> dict[str, Any]:
        """`Columns.info` of the result, without `corpora`."""
        if not self.labels:
            return {}
        problem = {} if self.problem == "single_label" else {"problem": self.problem}
        return {"labels": [*self.labels], **problem}

    def __call__(self, rows: Rows) -> Columns:
        """The rows that are left, in order, which may be none.

        Texts are tokenized whole: cut anywhere, they could give other tokens at the cut.

        Raises:
            UserError: a row that is too long under "error", that a column cannot encode, or that
                has an unknown label (with its line).
        """
        rows = rows if self.prepare is None else self.prepare(rows)
        encoded = self._tokenize(rows)
        corpora = rows[CORPUS] if CORPUS in rows else [""] * len(rows)
        is_long = self._is_long(rows, encoded, corpora)
        is_dropped = (
            is_long
            if self.truncation == "drop"
            else ~self._truncate(encoded, corpora, np.flatnonzero(is_long))
        )
        is_unknown = np.zeros(len(rows), bool)
        for name, column in self.columns.items() if self.drop_unknown else ():
            ids_of_rows = zip(*encoded[name], strict=True)
            is_unknown |= np.fromiter(map(column.is_unknown, ids_of_rows), bool, len(rows))
        is_unknown &= ~is_dropped
        kept_rows = np.flatnonzero(~(is_dropped | is_unknown))
        result: dict[str, Column] = {}
        counts = {}
        for name, column in self.columns.items():
            texts = [_choose(rows[text], kept_rows) for text in column.texts]
            tags = [column.tags.get(corpora[index], ()) for index in kept_rows.tolist()]
            sides = [_choose(side, kept_rows) for side in encoded[name]]
            arrays, counts[name] = _column(name, column, texts, sides, tags)
            result |= arrays
        if self.labels:
            for name, labels in label_columns(rows, self.labels, self.problem).items():
                if isinstance(labels, Sequences):
                    result[name] = labels.take(kept_rows)
                else:
                    result[name] = labels[kept_rows]
        report = replace(
            rows.report,
            num_kept=len(kept_rows),
            num_empty=rows.report.num_empty + int(is_unknown.sum()),
            num_dropped=int(is_dropped.sum()),
            num_truncated=int((is_long & ~is_dropped & ~is_unknown).sum()),
            counts=counts,
        )
        info = self.info
        if CORPUS in rows:
            info["corpora"] = _ranges(_choose(corpora, kept_rows))
        return Columns(result, report, info)

    def check(self, report: DataReport, num_rows: int) -> None:
        """Check the report of all encoded rows, of which there were `num_rows`.

        Raises:
            UserError: no row is left; there are no tokens at all.
        """
        if not report.num_kept:
            num_unknown = num_rows - report.num_dropped
            raise UserError(
                f"none of {num_rows} {report.noun} is left: {report.num_dropped} are longer than"
                f" max_length {self.max_length} and {num_unknown} hold only unknown tokens; raise"
                " max_length, set truncation to truncate, or give other text"
            )
        if not all(counts.tokens for counts in report.counts.values()):
            raise UserError("the text has no tokens for this tokenizer; give other text")

    def _tokenize(self, rows: Rows) -> dict[str, Sequence[list[Sequence[int]]]]:
        """For each column, and each of its texts, the ids of all rows."""
        try:
            return {
                name: column.encode_batch([rows[text] for text in column.texts])
                for name, column in self.columns.items()
            }
        except RowError as error:
            raise UserError(f"{rows.location(error.index)}: {error}") from None

    def _is_long(
        self,
        rows: Rows,
        encoded: Mapping[str, Sequence[list[Sequence[int]]]],
        corpora: Sequence[str],
    ) -> Bool[np.ndarray, " N"]:
        """(N,), True for each row with a sequence longer than `max_length`."""
        if self.max_length is None:
            return np.zeros(len(rows), bool)
        sizes = {}
        for name, texts in encoded.items():
            column = self.columns[name]
            lengths = [np.fromiter(map(len, ids), np.int64, len(rows)) for ids in texts]
            sizes[name] = column.num_special + np.sum(lengths, axis=0)
            if column.tags:
                sizes[name] += [len(column.tags.get(corpus, ())) for corpus in corpora]
        is_long = np.stack([*sizes.values()]).max(axis=0) > self.max_length
        if self.truncation == "error" and is_long.any():
            index = int(is_long.argmax())
            counts = " and ".join(f"{size[index]} {name}" for name, size in sizes.items())
            raise UserError(
                f"{rows.location(index)}: {counts} tokens (with special tokens), more than"
                f" max_length {self.max_length}; raise it, or set truncation to drop or truncate"
            )
        return np.asarray(is_long)

    def _truncate(
        self,
        encoded: Mapping[str, Sequence[list[Sequence[int]]]],
        corpora: Sequence[str],
        indices: Int64[np.ndarray, " n"],
    ) -> Bool[np.ndarray, " N"]:
        """Cut the rows at `indices`; (N,), False for those whose loss has no targets left."""
        has_targets = np.ones(len(corpora), bool)
        for index in indices.tolist():
            for name, column in self.columns.items():
                assert self.max_length is not None
                size = self.max_length - len(column.tags.get(corpora[index], ()))
                cut = column.truncate([ids[index] for ids in encoded[name]], size)
                has_targets[index] &= column.has_targets(cut)
                for ids, shorter in zip(encoded[name], cut, strict=True):
                    ids[index] = shorter
        return has_targets


@dataclass(frozen=True)
class ChunkEncoder:
    """Encodes the training rows of a chunk; it can be sent to another process.

    Attributes:
        known: the held-out rows, whose sources are left out.
    """

    encoder: Encoder
    split: Split
    known: KnownRows

    def __call__(self, chunk: Chunk) -> Columns:
        """The columns of a chunk; errors as in `Encoder`."""
        rows = self.split.take_from(chunk, held_out=False)
        return self.encoder(self.known.drop_from(rows))


def encode_rows(rows: Rows, columns: Mapping[str, TextColumn], **options: Any) -> Columns:
    """Encode rows in memory; options: those of `Encoder`.

    Raises:
        UserError: as `Encoder`, its call and its `check`.
    """
    encoder = Encoder(columns, **options)
    result = encoder(rows)
    encoder.check(result.report, len(rows))
    return result


def truncate_pair(
    first: Sequence[int], second: Sequence[int], size: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Both texts cut to `size` tokens in all, always from the longer one (if equal, the second)."""
    first_size = min(len(first), max(size - len(second), (size + 1) // 2))
    return first[:first_size], second[: size - first_size]


def _choose(items: Sequence[Item], indices: Int64[np.ndarray, " n"]) -> list[Item]:
    return [items[index] for index in indices.tolist()]


def _ranges(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """The corpora of rows in the order of the corpora: name, first row and end of each."""
    ends = {name: end for end, name in enumerate(names, 1)}
    starts = [0, *ends.values()]
    return [(name, start, end) for start, (name, end) in zip(starts, ends.items(), strict=False)]


def _column(
    name: str,
    column: TextColumn,
    texts: Sequence[list[str]],
    ids: Sequence[list[Sequence[int]]],
    tags: Sequence[tuple[int, ...]],
) -> tuple[dict[str, Column], Counts]:
    """The arrays of a column, and its size.

    Args:
        texts: for each of the column's one or two texts, those of all rows, as they were read.
        ids: the same in ids, without special tokens.
        tags: the ids before each row.
    """
    sides = [_flat(side) for side in ids]
    frame = column.frame(ids[0]) if len(sides) == 1 and not column.tags else None
    if frame is not None:
        lengths, flat = _surrounded(*sides[0], *frame)
    else:
        rows: Iterable[Sequence[Sequence[int]]] = zip(*ids, strict=True)
        if column.tags:
            rows = (([*tag, *row[0]], *row[1:]) for tag, row in zip(tags, rows, strict=True))
        lengths, flat = _flat([column.with_special_tokens(*row) for row in rows])
    assert flat.max(initial=0) < column.id_limit, column.id_limit
    stored = Sequences(flat.astype(ids_dtype(column.id_limit)), offsets_from_lengths(lengths))
    arrays: dict[str, Column] = {name: stored}
    if len(ids) > 1:
        arrays[f"{name}.second"] = lengths - sides[1][0] - len(column.tokenizer.suffix_ids)
    counts = Counts(
        characters=sum(len(text) for side in texts for text in side),
        bytes=sum(len("".join(side).encode()) for side in texts),
        tokens=sum(len(ids) for _, ids in sides),
        unknown=sum(column.count_unknown(ids) for _, ids in sides),
    )
    return arrays, counts


def _flat(
    rows: Sequence[Sequence[int]],
) -> tuple[Int64[np.ndarray, " N"], UInt32[np.ndarray, " T"]]:
    """The lengths of rows of ids, and the ids of all rows, one after the other."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    arrays = [row for row in rows if isinstance(row, array)]
    if len(arrays) == len(rows):
        return lengths, np.frombuffer(b"".join(arrays), np.uint32)
    return lengths, np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))


def _surrounded(
    lengths: Int64[np.ndarray, " N"],
    flat: UInt32[np.ndarray, " T"],
    before: Sequence[int],
    after: Sequence[int],
) -> tuple[Int64[np.ndarray, " N"], UInt32[np.ndarray, " S"]]:
    """Rows as `_flat` returns them, with the ids `before` and `after` around each."""
    longer = lengths + len(before) + len(after)
    ends = np.cumsum(longer)
    result = np.empty(int(longer.sum()), np.uint32)
    is_text = np.ones(len(result), bool)
    for indices, special_id in (
        *((ends - longer + shift, special_id) for shift, special_id in enumerate(before)),
        *((ends - len(after) + shift, special_id) for shift, special_id in enumerate(after)),
    ):
        result[indices] = special_id
        is_text[indices] = False
    result[is_text] = flat
    return longer, result
