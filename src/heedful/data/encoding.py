"""One loop from rows of text to columns of ids: encode, cut or leave out, count, report."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Int64

from heedful.data.columns import Column, Columns, Sequences, joined, pack_ids
from heedful.data.report import Counts, Report
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError

Truncation: TypeAlias = Literal["drop", "truncate", "error"]

_Texts: TypeAlias = dict[str, list[list[int]]]  # by column, the ids of its one or two texts

_CHUNK_ROWS = 8192
_CHUNK_CHARACTERS = 2**21  # unless one row is longer


@dataclass(frozen=True)
class TextColumn:
    """How a column of ids is made of a row: of which texts, and with which special tokens.

    Args:
        texts: one column of text, or the two that become one sequence.
        special_tokens: "text" for what the model expects around a text or a pair of texts
            (`Tokenizer.add_special_tokens`), "target" to end in EOS besides
            (`Tokenizer.encode_target`), "document" for BOS and EOS whatever the model expects,
            "none" for the bare ids.
    """

    tokenizer: Tokenizer
    texts: tuple[str, ...]
    special_tokens: Literal["text", "target", "document", "none"] = "text"

    def finished(self, ids: list[int], second: list[int] | None = None) -> list[int]:
        """The sequence that is stored."""
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
        """How many tokens a sequence has besides those of its texts."""
        return len(self.finished([], [] if len(self.texts) > 1 else None))


def encode_rows(
    rows: Rows,
    columns: Mapping[str, TextColumn],
    *,
    max_length: int | None = None,
    truncation: Truncation = "drop",
    drop_unknown: bool = False,
    numbers: Mapping[str, Int64[np.ndarray, " N"]] | None = None,
    info: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Columns:
    """Tokenise rows into columns of ids, in memory (16 bits an id where the vocabulary fits).

    Of a column of two texts there is besides `NAME.second`, where in its sequence the second text
    begins. Rows become ids some at a time; a text is tokenised whole, because no cut of it is sure
    to be one between tokens.

    Args:
        max_length: tokens of any sequence at most, special tokens counted.
        truncation: what becomes of a row with a longer one: an error, left out, or its text cut
            at the end inside the special tokens. Of two texts the longer is cut, then both alike
            (Devlin et al. 2018's `run_classifier`).
        drop_unknown: leave out rows with a sequence of nothing but special and unknown tokens.
        numbers: plain columns of the rows, such as ids of labels, to be kept beside.
        info: JSON to be kept with the columns.
        progress: is given the number of rows that are done, some at a time.

    Raises:
        UserError: an over-long row under "error" (with its line); no room between the special
            tokens; nothing left, or no token at all.
    """
    for column in columns.values():
        if max_length is not None and max_length < column.num_special + len(column.texts):
            raise UserError(
                f"max_length {max_length} leaves no room for text beside {column.num_special}"
                " special tokens; raise it"
            )
    encoder = _Encoder(columns, max_length, truncation, drop_unknown)
    for start, stop in _chunks(rows, columns):
        encoder.encode(rows, start, stop)
        if progress is not None:
            progress(stop - start)
    report = encoder.report(rows)
    kept = np.array(encoder.kept, dtype=np.int64)
    found: dict[str, Column] = {name: joined(parts) for name, parts in encoder.parts.items()}
    found |= {f"{name}.second": np.array(places) for name, places in encoder.seconds.items()}
    found |= {name: column[kept] for name, column in (numbers or {}).items()}
    return Columns(found, report, info or {})


def cut_pair(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """What is left of both when the longer one always gives way, of equals the second."""
    size = min(len(first), max(room - len(second), (room + 1) // 2))
    return first[:size], second[: room - size]


@dataclass
class _Encoder:
    """The loop's state: sequences that are kept, and what is counted."""

    columns: Mapping[str, TextColumn]
    max_length: int | None
    truncation: Truncation
    drop_unknown: bool
    kept: list[int] = field(default_factory=list)
    num_over: int = 0
    num_bare: int = 0

    def __post_init__(self) -> None:
        self.parts: dict[str, list[Sequences]] = {name: [] for name in self.columns}
        pairs = [name for name, column in self.columns.items() if len(column.texts) > 1]
        self.seconds: dict[str, list[int]] = {name: [] for name in pairs}
        self.unknown = dict.fromkeys(self.columns, 0)

    def encode(self, rows: Rows, start: int, stop: int) -> None:
        """Take in the rows from `start` to `stop`."""
        stored: dict[str, list[list[int]]] = {name: [] for name in self.columns}
        encoded = {
            name: [column.tokenizer.encode_batch(rows[text][start:stop]) for text in column.texts]
            for name, column in self.columns.items()
        }
        for index in range(start, stop):
            row = {name: [ids[index - start] for ids in texts] for name, texts in encoded.items()}
            fitted = self._fitted(rows, index, row)
            if fitted is None:
                continue
            self.kept.append(index)
            for name, texts in fitted.items():
                column = self.columns[name]
                self.unknown[name] += sum(ids.count(column.tokenizer.unk_id) for ids in texts)
                sequence = column.finished(*texts)
                stored[name].append(sequence)
                if name in self.seconds:
                    after = len(texts[1]) + len(column.tokenizer.suffix_ids)
                    self.seconds[name].append(len(sequence) - after)
        for name, sequences in stored.items():
            vocab_size = self.columns[name].tokenizer.vocab_size
            self.parts[name].append(pack_ids(sequences, vocab_size))

    def report(self, rows: Rows) -> Report:
        """The account of the rows. Raises UserError where nothing is left."""
        noun, num_kept = rows.report.noun, len(self.kept)
        if not num_kept:
            raise UserError(
                f"none of {len(rows)} {noun} is left: {self.num_over} are longer than max_length"
                f" {self.max_length} and {self.num_bare} hold nothing that the tokenizer knows;"
                " raise max_length, set truncation to truncate, or give other text"
            )
        counts = {name: self._counts(rows, name) for name in self.columns}
        if not all(count.tokens for count in counts.values()):
            raise UserError("the tokenizer makes no token of the text; give other text")
        return replace(
            rows.report,
            num_kept=num_kept,
            num_empty=rows.report.num_empty + self.num_bare,
            num_dropped=self.num_over if self.truncation == "drop" else 0,
            num_truncated=self.num_over if self.truncation == "truncate" else 0,
            counts=counts,
        )

    def _fitted(self, rows: Rows, index: int, row: _Texts) -> _Texts | None:
        """The ids of a row as they are to be stored, cut where needed; `None` to leave it out."""
        lengths = {
            name: self.columns[name].num_special + sum(map(len, texts))
            for name, texts in row.items()
        }
        if self.max_length is not None and max(lengths.values()) > self.max_length:
            self.num_over += 1
            if self.truncation == "error":
                told = " and ".join(f"{size} {name}" for name, size in lengths.items())
                raise UserError(
                    f"{rows.place(index)}: {told} tokens (special ones counted), more than"
                    f" max_length {self.max_length}; raise it, or set truncation to drop or"
                    " truncate"
                )
            if self.truncation == "drop":
                return None
            for name, texts in row.items():
                room = self.max_length - self.columns[name].num_special
                texts[:] = (
                    cut_pair(texts[0], texts[1], room) if len(texts) > 1 else [texts[0][:room]]
                )
        for name, texts in row.items():
            specials = self.columns[name].tokenizer.special_ids
            if self.drop_unknown and all(map(specials.issuperset, texts)):
                self.num_bare += 1
                return None
        return row

    def _counts(self, rows: Rows, name: str) -> Counts:
        column, parts = self.columns[name], self.parts[name]
        texts = [rows[text][index] for text in column.texts for index in self.kept]
        return Counts(
            characters=sum(map(len, texts)),
            bytes=sum(len(text.encode()) for text in texts),
            words=sum(len(text.split()) for text in texts),
            tokens=sum(len(part.ids) for part in parts) - column.num_special * len(self.kept),
            unknown=self.unknown[name],
        )


def _chunks(rows: Rows, columns: Mapping[str, TextColumn]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are tokenised at a time."""
    texts = [rows[text] for column in columns.values() for text in column.texts]
    start = size = 0
    for index in range(len(rows)):
        length = sum(len(column[index]) for column in texts)
        if index > start and (size + length > _CHUNK_CHARACTERS or index - start == _CHUNK_ROWS):
            yield start, index
            start, size = index, 0
        size += length
    yield start, len(rows)
