"""Encode rows of text as columns of token ids: truncate or drop long rows, and count."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heedful.data.columns import Column, Columns, CorpusRange, Counts, SequencesBuilder
from heedful.data.rows import CORPUS, Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.progress import track

Truncation: TypeAlias = Literal["drop", "truncate", "error"]

_CHUNK_ROWS = 128  # rows tokenized at a time: enough to use all cores, and little memory for books


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

    def encode_batch(self, cells: Sequence[list[str]]) -> Sequence[list[list[int]]]:
        """For each of `texts` the ids of its rows, without special tokens.

        Args:
            cells: for each of `texts`, the texts of some rows.

        Raises:
            RowError: a row that cannot be encoded.
        """
        return [self.tokenizer.encode_batch(texts) for texts in cells]

    def count_unknown(self, ids: list[int]) -> int:
        """The number of unknown tokens."""
        return ids.count(self.tokenizer.unk_id)

    def has_targets(self, ids: list[list[int]]) -> bool:
        """False if the loss of a row has no targets."""
        return True

    def with_special_tokens(self, ids: list[int], second: list[int] | None = None) -> list[int]:
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

    @cached_property
    def num_special(self) -> int:
        """The number of special tokens in a sequence."""
        return len(self.with_special_tokens([], [] if len(self.texts) > 1 else None))

    def size(self, ids: list[list[int]], tags: Sequence[int]) -> int:
        """The length of a sequence with special tokens and tags, in tokens."""
        return self.num_special + len(tags) + sum(map(len, ids))

    def truncate(self, ids: list[list[int]], max_length: int) -> list[list[int]]:
        """The ids of one or two texts, cut so that they fit with their special tokens."""
        size = max_length - self.num_special
        return [ids[0][:size]] if len(ids) == 1 else list(truncate_pair(ids[0], ids[1], size))

    def is_unknown(self, ids: list[list[int]]) -> bool:
        """True if all tokens are special or unknown."""
        return all(map(self.tokenizer.special_ids.issuperset, ids))


def encode_rows(
    rows: Rows,
    columns: Mapping[str, TextColumn],
    *,
    max_length: int | None = None,
    truncation: Truncation = "drop",
    drop_unknown: bool = False,
    numbers: Mapping[str, NDArray[np.int64]] | None = None,
    info: Mapping[str, Any] | None = None,
) -> Columns:
    """Tokenize rows into columns of ids, in memory (16 bits per id if the vocabulary fits).

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
        numbers: columns of numbers (N,) of the rows, such as ids of labels, to add to the result.
        info: JSON to store with the columns.

    Raises:
        UserError: a row that is too long under "error", or that a column cannot encode (with its
            line); `max_length` smaller than
            the number of special tokens and one token per text; no row left; no tokens at all.
    """
    _check_limit(columns.values(), max_length)
    names = rows[CORPUS] if CORPUS in rows else [""] * len(rows)
    builders = {name: _ColumnBuilder(column) for name, column in columns.items()}
    kept_indices: list[int] = []
    num_too_long = num_dropped = num_truncated = num_unknown = 0
    for index, row in enumerate(_tokenize(rows, columns)):
        tags = {name: column.tags.get(names[index], ()) for name, column in columns.items()}
        sizes = {name: columns[name].size(ids, tags[name]) for name, ids in row.items()}
        if max_length is not None and max(sizes.values()) > max_length:
            num_too_long += 1
            if truncation == "error":
                counts = " and ".join(f"{size} {name}" for name, size in sizes.items())
                raise UserError(
                    f"{rows.location(index)}: {counts} tokens (with special tokens), more than"
                    f" max_length {max_length}; raise it, or set truncation to drop or truncate"
                )
            if truncation == "drop":
                num_dropped += 1
                continue
            row = {n: columns[n].truncate(ids, max_length - len(tags[n])) for n, ids in row.items()}
            if not all(columns[name].has_targets(ids) for name, ids in row.items()):
                num_dropped += 1
                continue
            num_truncated += 1
        if drop_unknown and any(columns[name].is_unknown(ids) for name, ids in row.items()):
            num_unknown += 1
            continue
        kept_indices.append(index)
        for name, ids in row.items():
            builders[name].add(rows, index, ids, tags[name])
    if not kept_indices:
        raise UserError(
            f"none of {len(rows)} {rows.report.noun} is left: {num_too_long} are longer than"
            f" max_length {max_length} and {num_unknown} hold only unknown tokens; raise"
            " max_length, set truncation to truncate, or give other text"
        )
    _check_tokens(builders.values())
    report = replace(
        rows.report,
        num_kept=len(kept_indices),
        num_empty=rows.report.num_empty + num_unknown,
        num_dropped=num_dropped,
        num_truncated=num_truncated,
        counts={name: Counts(**builder.counts) for name, builder in builders.items()},
    )
    result: dict[str, Column] = {name: b.sequences.build() for name, b in builders.items()}
    result |= {f"{name}.second": np.array(b.seconds) for name, b in builders.items() if b.seconds}
    result |= {name: column[np.array(kept_indices)] for name, column in (numbers or {}).items()}
    corpora = _ranges([names[index] for index in kept_indices]) if CORPUS in rows else {}
    return Columns(result, report, {**(info or {}), **corpora})


def _check_tokens(builders: Iterable["_ColumnBuilder"]) -> None:
    """Raise UserError for a column without tokens."""
    if not all(builder.counts["tokens"] for builder in builders):
        raise UserError("the text has no tokens for this tokenizer; give other text")


def _ranges(names: Sequence[str]) -> dict[str, Any]:
    """The entry "corpora" of `Columns.info` for rows with these corpora, each contiguous."""
    ends = {name: end for end, name in enumerate(names, 1)}
    starts = [0, *ends.values()]
    ranges = zip(ends, starts, ends.values(), strict=False)
    return {"corpora": [CorpusRange(*entry) for entry in ranges]}


def _check_limit(columns: Iterable[TextColumn], max_length: int | None) -> None:
    """Raise UserError unless there is room for one token of each text."""
    for column in columns:
        num_special = column.num_special + max(map(len, column.tags.values()), default=0)
        if max_length is not None and max_length < num_special + len(column.texts):
            raise UserError(
                f"max_length {max_length} leaves no tokens for text beside {num_special}"
                " special tokens; raise it"
            )


def truncate_pair(first: list[int], second: list[int], size: int) -> tuple[list[int], list[int]]:
    """Both texts cut to `size` tokens in all, always from the longer one (if equal, the second)."""
    first_size = min(len(first), max(size - len(second), (size + 1) // 2))
    return first[:first_size], second[: size - first_size]


class _ColumnBuilder:
    """A column of ids under construction, and its counts by the field names of `Counts`."""

    def __init__(self, column: TextColumn) -> None:
        self.column = column
        self.sequences = SequencesBuilder(column.id_limit)
        self.seconds: list[int] = []
        self.counts = {"characters": 0, "bytes": 0, "tokens": 0, "unknown": 0}

    def add(self, rows: Rows, index: int, ids: list[list[int]], tags: Sequence[int]) -> None:
        """Append row `index`, whose texts have these ids without special tokens."""
        texts = [rows[name][index] for name in self.column.texts]
        tokenizer, counts = self.column.tokenizer, self.counts
        sequence = self.column.with_special_tokens([*tags, *ids[0]], *ids[1:])
        self.sequences.add(sequence)
        if len(ids) > 1:
            self.seconds.append(len(sequence) - len(ids[1]) - len(tokenizer.suffix_ids))
        for text, text_ids in zip(texts, ids, strict=True):
            counts["characters"] += len(text)
            counts["bytes"] += len(text.encode())
            counts["tokens"] += len(text_ids)
            counts["unknown"] += self.column.count_unknown(text_ids)


def _tokenize(
    rows: Rows, columns: Mapping[str, TextColumn]
) -> Iterator[dict[str, list[list[int]]]]:
    """For each row, by column, the ids of its one or two texts.

    A text is tokenized whole: cut anywhere, it could give other tokens at the cut.
    """
    with track("tokenizing", len(rows)) as advance:
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = slice(start, min(start + _CHUNK_ROWS, len(rows)))
            try:
                encoded = {
                    name: column.encode_batch([rows[text][chunk] for text in column.texts])
                    for name, column in columns.items()
                }
            except RowError as error:
                raise UserError(f"{rows.location(start + error.index)}: {error}") from None
            for index in range(chunk.stop - start):
                yield {name: [ids[index] for ids in texts] for name, texts in encoded.items()}
            advance(chunk.stop - start)
