"""Blocks of units: rows of files that are not read line by line, some thousands at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from heedful.data.rows import Chunk, Rows

_UNITS = 4_096
_CHARACTERS = 1 << 20
HEADER = "names of columns"  # why a first line is no row


class Unit(NamedTuple):
    """A row of a file.

    Attributes:
        line: where it is, from 1.
        texts: of each column.
        left_out: why it is no row; "": it is one.
        num_bytes: of the file, read since the unit before, about.
    """

    line: int
    texts: tuple[str, ...]
    left_out: str = ""
    num_bytes: int = 0


@dataclass(frozen=True)
class UnitBlock:
    """Consecutive units of a file."""

    name: str
    columns: tuple[str, ...]
    units: tuple[Unit, ...]

    @property
    def num_rows(self) -> int:
        """The number of units, with those that are left out."""
        return len(self.units)

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, about."""
        return sum(unit.num_bytes for unit in self.units)

    @property
    def first(self) -> int:
        """The line of the first unit."""
        return self.units[0].line if self.units else 1

    def slice(self, start: int, stop: int) -> "UnitBlock":
        """The units from `start` to before `stop`."""
        return replace(self, units=self.units[start:stop])

    def rows(self) -> Rows:
        """The rows, with counts of the units that are left out."""
        kept = [unit for unit in self.units if not unit.left_out]
        texts = {name: [unit.texts[i] for unit in kept] for i, name in enumerate(self.columns)}
        left_out: dict[str, int] = {}
        for unit in self.units:
            if unit.left_out:
                left_out[unit.left_out] = left_out.get(unit.left_out, 0) + 1
        lines = np.array([unit.line for unit in kept], np.int64)
        rows = Rows(texts, None, (self.name,), np.stack([np.zeros_like(lines), lines]))
        rows.report = replace(
            rows.report,
            num_lines=len(self.units),
            num_headers=left_out.pop(HEADER, 0),
            left_out=left_out,
        )
        return rows


def unit_chunks(path: Path | str, columns: Sequence[str], units: Iterable[Unit]) -> Iterator[Chunk]:
    """The units of a file in chunks, at least one."""
    waiting: list[Unit] = []
    size = number = 0
    for unit in units:
        waiting.append(unit)
        size += sum(map(len, unit.texts))
        if len(waiting) == _UNITS or size >= _CHARACTERS:
            yield Chunk(UnitBlock(str(path), tuple(columns), tuple(waiting)), UnitBlock.rows)
            waiting, size, number = [], 0, number + 1
    if waiting or not number:
        yield Chunk(UnitBlock(str(path), tuple(columns), tuple(waiting)), UnitBlock.rows)
