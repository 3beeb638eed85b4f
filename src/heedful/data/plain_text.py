"""Rows of plain text that are longer than a line: paragraphs, and whole files."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from heedful.data.reports import DataReport
from heedful.data.rows import Chunk, Rows, TextUnit, is_blank, same_rows
from heedful.data.text_files import BLOCK_BYTES, BLOCK_LINES, read_lines


def text_chunks(column: str, path: Path, unit: TextUnit) -> Iterator[Chunk]:
    """Rows of one paragraph or of the whole file; only reading it as a whole can separate them."""
    units: list[tuple[int, int, str]] = []
    size, is_first = 0, True
    read = {"paragraph": _paragraphs, "file": _whole_file}[unit]
    for first, num_lines, text in read(path):
        units.append((first, num_lines, text))
        size += len(text)
        if size >= BLOCK_BYTES or len(units) >= BLOCK_LINES:
            yield Chunk(_rows_of(column, path, units), same_rows)
            units, size, is_first = [], 0, False
    if units or is_first:
        yield Chunk(_rows_of(column, path, units), same_rows)


def _rows_of(column: str, path: Path, units: Sequence[tuple[int, int, str]]) -> Rows:
    """The rows of some units: first line, number of lines, and text, which is empty if blank."""
    texts = [text for _, _, text in units if text]
    lines = np.array([first for first, _, text in units if text], np.int64)
    report = DataReport(sum(num_lines for _, num_lines, _ in units), len(texts))
    locations = np.stack([np.zeros_like(lines), lines])
    return Rows({column: texts}, report, (str(path),), locations)


def _paragraphs(path: Path) -> Iterator[tuple[int, int, str]]:
    numbered = enumerate(read_lines(path), 1)
    for has_text, group in groupby(numbered, key=lambda pair: not is_blank(pair[1])):
        numbers, lines = zip(*group, strict=True)
        yield numbers[0], len(lines), "\n".join(lines) if has_text else ""


def _whole_file(path: Path) -> Iterator[tuple[int, int, str]]:
    lines = list(read_lines(path, keep_ends=True))
    text = "".join(lines)
    yield 1, len(lines), "" if is_blank(text) else text
