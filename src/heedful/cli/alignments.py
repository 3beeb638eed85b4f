"""`heedful translate --alignments`: the alignment of each output, written in Pharaoh's format."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.cli.lines import line_writer
from heedful.options import Options

if TYPE_CHECKING:
    from heedful.pipelines import Translator

_BATCH = 64  # outputs that are aligned in one pass


@dataclass
class AlignmentWriter:
    """Aligns outputs with their sources and writes a line for each, in order.

    Args:
        unit: as of `heedful.insight.alignments`.
        options: with which the sources are encoded.
    """

    model: "Translator"
    unit: Any
    options: Options
    write: Callable[[str], None]
    _sources: deque[str] = field(default_factory=deque, init=False)
    _pairs: list[tuple[list[int], list[int]]] = field(default_factory=list, init=False)

    def remember(self, chunks: Iterator[list[str]]) -> Iterator[list[str]]:
        """The chunks of sources, whose texts are kept until their outputs come."""
        for chunk in chunks:
            self._sources.extend(chunk)
            yield chunk

    def add(self, outputs: list[Any], num_lines: int) -> None:
        """The outputs of the next source; lines without an output are blank."""
        text, row = self._sources.popleft(), list[int]()
        if any(output.ids for output in outputs):
            counts = self.model.num_truncated, self.model.num_left_out
            [row] = self.model.prompt_ids([text], self.options)
            # The source was counted when it was translated.
            self.model.num_truncated, self.model.num_left_out = counts
        rows = [output.ids for output in outputs]
        self._pairs += [(row, ids) for ids in [*rows, *[[]] * (num_lines - len(rows))]]
        if len(self._pairs) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Align and write the outputs that wait."""
        from heedful.insight.alignment import align

        if self._pairs:
            sources, targets = zip(*self._pairs, strict=True)
            for alignment in align(self.model, sources, targets, unit=self.unit):
                self.write(alignment.pharaoh())
            self._pairs.clear()


@contextmanager
def alignment_writer(
    model: "Translator", path: Path | None, unit: str, options: Options
) -> Iterator[AlignmentWriter | None]:
    """A writer for the file `path`; None: alignments are not wanted.

    Raises:
        UserError: a model without cross-attention; an unknown unit; an unwritable file.
    """
    if path is None:
        yield None
        return
    from heedful.insight.alignment import align, expect_translator

    align(expect_translator(model), [], [], unit=unit)  # type: ignore[arg-type]
    with line_writer(path) as write:
        writer = AlignmentWriter(model, unit, options, write)
        yield writer
        writer.flush()
