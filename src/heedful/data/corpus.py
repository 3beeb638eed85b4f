"""Pairs of sentences in: from two files or one, with an account of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from heedful.data.lines import read_lines, read_objects, text_of
from heedful.errors import UserError

Pair: TypeAlias = tuple[str, str]  # source, target


@dataclass(frozen=True)
class PairSource:
    """Where pairs come from: two line-parallel files, or one file of both sides.

    Give `src` and `tgt`; or `file` as TSV (two columns, no header) or JSONL (one object a line,
    its keys in `src_field` and `tgt_field`). Without `format` the file must be named `.tsv` or
    `.jsonl`, with or without `.gz`.

    Raises:
        UserError: neither or both are given, or the format is not known.
    """

    src: Path | None = None
    tgt: Path | None = None
    file: Path | None = None
    format: Literal["tsv", "jsonl"] | None = None
    src_field: str = "src"
    tgt_field: str = "tgt"

    def __post_init__(self) -> None:
        sides = (self.src is not None) + (self.tgt is not None)
        if sides != (2 if self.file is None else 0):
            raise UserError("a corpus is either src and tgt, or file: give the two or the one")
        if self.file is not None:
            self.file_format()

    def file_format(self) -> Literal["tsv", "jsonl"]:
        """The format of `file`: as set, or by its name."""
        assert self.file is not None
        if self.format is not None:
            return self.format
        name = self.file.name.removesuffix(".gz")
        if name.endswith(".tsv"):
            return "tsv"
        if name.endswith(".jsonl"):
            return "jsonl"
        raise UserError(
            f"{self.file} is not named .tsv or .jsonl; write it as one of them, and name it so"
        )

    def __str__(self) -> str:
        return str(self.file) if self.file is not None else f"{self.src} and {self.tgt}"


@dataclass(frozen=True)
class CorpusReport:
    """What was read, what was left out, and what the tokenizers did not know.

    A line of a parallel corpus is one line of each file. `read_pairs` counts up to the empty
    ones, `encode_pairs` the rest. `origins` holds, for each source, its name and the line numbers
    of the pairs that were kept.
    """

    num_lines: int
    num_kept: int
    num_empty: int = 0  # dropped: one side or both
    num_empty_src: int = 0
    num_empty_tgt: int = 0
    num_dropped: int = 0  # over-long
    num_truncated: int = 0  # over-long
    num_src_tokens: int = 0
    num_tgt_tokens: int = 0
    num_src_unknown: int = 0
    num_tgt_unknown: int = 0
    origins: tuple[tuple[str, np.ndarray], ...] = field(default=(), repr=False, compare=False)

    def place(self, index: int) -> str:
        """Where pair `index`, counted from 0 over the kept ones, was read."""
        for name, lines in self.origins:
            if index < len(lines):
                return f"{name}, line {lines[index]}"
            index -= len(lines)
        return f"pair {index + 1}"

    def origins_of(self, indices: Sequence[int]) -> tuple[tuple[str, np.ndarray], ...]:
        """`origins` of some of the kept pairs, given in rising order."""
        chosen, start, found = np.asarray(indices, dtype=np.int64), 0, []
        for name, lines in self.origins:
            inside = chosen[(chosen >= start) & (chosen < start + len(lines))]
            found.append((name, lines[inside - start]))
            start += len(lines)
        return tuple(found)

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.num_lines:,} lines read, {self.num_kept:,} pairs kept"]
        if self.num_empty:
            sides = f"source {self.num_empty_src:,}, target {self.num_empty_tgt:,}"
            parts.append(f"{self.num_empty:,} dropped as empty ({sides})")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped as too long")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to the longest allowed")
        if self.num_src_tokens or self.num_tgt_tokens:
            src = share(self.num_src_unknown, self.num_src_tokens)
            tgt = share(self.num_tgt_unknown, self.num_tgt_tokens)
            parts.append(f"unknown tokens: source {src}, target {tgt}")
        return "; ".join(parts)


def read_pairs(source: PairSource | Sequence[PairSource]) -> tuple[list[Pair], CorpusReport]:
    """All pairs of a source, or of several one after the other, with an account of them.

    A pair with an empty side (nothing but whitespace) is left out and counted.

    Raises:
        UserError: a file cannot be read, the two files differ in length, a line is not a pair
            (with its number), or nothing is left.
    """
    sources = [source] if isinstance(source, PairSource) else list(source)
    pairs: list[Pair] = []
    origins: list[tuple[str, np.ndarray]] = []
    num_lines = num_empty = num_empty_src = num_empty_tgt = 0
    for one in sources:
        kept: list[int] = []
        for number, (src, tgt) in enumerate(_pairs_of(one), 1):
            num_lines += 1
            no_src, no_tgt = not src.strip(), not tgt.strip()
            num_empty_src += no_src
            num_empty_tgt += no_tgt
            if no_src or no_tgt:
                num_empty += 1
            else:
                pairs.append((src, tgt))
                kept.append(number)
        origins.append((str(one), np.array(kept, dtype=np.int64)))
    if not pairs:
        names = "; ".join(name for name, _ in origins)
        raise UserError(
            f"the corpus is empty: no pair with text on both sides in {num_lines} lines of {names}"
        )
    return pairs, CorpusReport(
        num_lines=num_lines,
        num_kept=len(pairs),
        num_empty=num_empty,
        num_empty_src=num_empty_src,
        num_empty_tgt=num_empty_tgt,
        origins=tuple(origins),
    )


def share(count: int, total: int) -> str:
    """A count, and what part of a total it is."""
    return f"{count:,} ({count / max(total, 1):.2%})"


def _pairs_of(source: PairSource) -> Iterator[Pair]:
    if source.src is not None and source.tgt is not None:
        return _parallel(source.src, source.tgt)
    assert source.file is not None
    return _tsv(source.file) if source.file_format() == "tsv" else _jsonl(source)


def _parallel(src_path: Path, tgt_path: Path) -> Iterator[Pair]:
    for src, tgt in zip_longest(read_lines(src_path), read_lines(tgt_path)):
        if src is None or tgt is None:
            num_src, num_tgt = (sum(1 for _ in read_lines(p)) for p in (src_path, tgt_path))
            raise UserError(
                f"{src_path} has {num_src} lines but {tgt_path} has {num_tgt};"
                " line n of one must translate line n of the other"
            )
        yield src, tgt


def _tsv(path: Path) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t") if line.strip() else ["", ""]
        if len(columns) != 2:
            raise UserError(
                f"{path}, line {number}: {len(columns)} columns where source and target are two;"
                " keep one tab in a line"
            )
        yield columns[0], columns[1]


def _jsonl(source: PairSource) -> Iterator[Pair]:
    assert source.file is not None
    for number, entry in read_objects(source.file):
        place = f"{source.file}, line {number}"
        if entry is None:
            yield "", ""
        else:
            yield text_of(entry, source.src_field, place), text_of(entry, source.tgt_field, place)
