"""One loop from rows of text to columns of ids: encode, cut or leave out, count, report."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heedful.data.columns import Column, Columns, Counts, Packer
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.progress import track

Truncation: TypeAlias = Literal["drop", "truncate", "error"]

_CHUNK_ROWS = 128  # encoded at a time: enough for all cores, and few where they are books


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

    def with_special_tokens(self, ids: list[int], second: list[int] | None = None) -> list[int]:
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
        return len(self.with_special_tokens([], [] if len(self.texts) > 1 else None))

    def cut(self, ids: list[list[int]], max_length: int) -> list[list[int]]:
        """What is left of the ids of one or two texts with their special tokens."""
        room = max_length - self.num_special
        return [ids[0][:room]] if len(ids) == 1 else list(cut_pair(ids[0], ids[1], room))

    def is_bare(self, ids: list[list[int]]) -> bool:
        """Whether there is nothing but special and unknown tokens."""
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
        numbers: plain columns (N) of the rows, such as ids of labels, to be kept beside.
        info: JSON to be kept with the columns.

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
    growing = {name: _Growing(column) for name, column in columns.items()}
    kept: list[int] = []
    num_over = num_bare = 0
    for index, row in enumerate(_encoded(rows, columns)):
        sizes = {name: columns[name].num_special + sum(map(len, ids)) for name, ids in row.items()}
        if max_length is not None and max(sizes.values()) > max_length:
            num_over += 1
            if truncation == "error":
                told = " and ".join(f"{size} {name}" for name, size in sizes.items())
                raise UserError(
                    f"{rows.location(index)}: {told} tokens (special ones counted), more than"
                    f" max_length {max_length}; raise it, or set truncation to drop or truncate"
                )
            if truncation == "drop":
                continue
            row = {name: columns[name].cut(ids, max_length) for name, ids in row.items()}
        if drop_unknown and any(columns[name].is_bare(ids) for name, ids in row.items()):
            num_bare += 1
            continue
        kept.append(index)
        for name, ids in row.items():
            growing[name].add([rows[text][index] for text in columns[name].texts], ids)
    if not kept:
        raise UserError(
            f"none of {len(rows)} {rows.report.noun} is left: {num_over} are longer than max_length"
            f" {max_length} and {num_bare} hold nothing that the tokenizer knows; raise max_length,"
            " set truncation to truncate, or give other text"
        )
    if not all(column.counts["tokens"] for column in growing.values()):
        raise UserError("the tokenizer makes no token of the text; give other text")
    report = replace(
        rows.report,
        num_kept=len(kept),
        num_empty=rows.report.num_empty + num_bare,
        num_dropped=num_over if truncation == "drop" else 0,
        num_truncated=num_over if truncation == "truncate" else 0,
        counts={name: Counts(**column.counts) for name, column in growing.items()},
    )
    found: dict[str, Column] = {name: column.packer.packed() for name, column in growing.items()}
    found |= {f"{name}.second": np.array(c.seconds) for name, c in growing.items() if c.seconds}
    found |= {name: column[np.array(kept)] for name, column in (numbers or {}).items()}
    return Columns(found, report, info or {})


def cut_pair(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """What is left of both when the longer one always gives way, of equals the second."""
    size = min(len(first), max(room - len(second), (room + 1) // 2))
    return first[:size], second[: room - size]


class _Growing:
    """A column of ids to which rows are added, and its counts by the names of `Counts`."""

    def __init__(self, column: TextColumn) -> None:
        self.column = column
        self.packer = Packer(column.tokenizer.vocab_size)
        self.seconds: list[int] = []
        self.counts = Counter[str]()

    def add(self, texts: Sequence[str], ids: list[list[int]]) -> None:
        """One row: its texts as they were read, and their ids as they are stored."""
        tokenizer = self.column.tokenizer
        sequence = self.column.with_special_tokens(*ids)
        self.packer.add(sequence)
        if len(ids) > 1:
            self.seconds.append(len(sequence) - len(ids[1]) - len(tokenizer.suffix_ids))
        for text, of_text in zip(texts, ids, strict=True):
            self.counts.update(
                characters=len(text),
                bytes=len(text.encode()),
                tokens=len(of_text),
                unknown=of_text.count(tokenizer.unk_id),
            )


def _encoded(rows: Rows, columns: Mapping[str, TextColumn]) -> Iterator[dict[str, list[list[int]]]]:
    """By column, the ids of each row's one or two texts."""
    with track("tokenising", len(rows)) as advance:
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = slice(start, min(start + _CHUNK_ROWS, len(rows)))
            found = {
                name: [column.tokenizer.encode_batch(rows[text][chunk]) for text in column.texts]
                for name, column in columns.items()
            }
            for place in range(chunk.stop - start):
                yield {name: [ids[place] for ids in texts] for name, texts in found.items()}
            advance(chunk.stop - start)
