"""`heedful translate --alignments`: the alignment of each output, written in Pharaoh's format."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful.cli.help import IN_OUT
from heedful.cli.lines import line_writer
from heedful.errors import UserError
from heedful.options import Options

if TYPE_CHECKING:
    from heedful.pipelines import Translator
    from heedful.pipelines.generations import Generation

_BATCH = 64  # outputs that are aligned in one pass


@dataclass
class AlignmentWriter:
    """Aligns outputs with their sources and writes a line for each, in order.

    Args:
        unit: as in `heedful.insight.alignments`.
        options: with which the sources are encoded.
    """

    model: "Translator"
    unit: Any
    options: Options
    write: Callable[[str], None]
    _sources: deque[str] = field(default_factory=deque, init=False)
    _pairs: list[tuple[str, "Generation | None"]] = field(default_factory=list, init=False)

    def remember(self, chunks: Iterator[list[str]]) -> Iterator[list[str]]:
        """The chunks of sources, whose texts are kept until their outputs come."""
        for chunk in chunks:
            self._sources.extend(chunk)
            yield chunk

    def add(self, outputs: "list[Generation]", num_lines: int) -> None:
        """The outputs of the next source; lines without an output are blank."""
        text = self._sources.popleft()
        written = [output if output.ids else None for output in outputs]
        self._pairs += [(text, output) for output in written]
        self._pairs += [(text, None)] * (num_lines - len(written))
        if len(self._pairs) >= _BATCH:
            self.flush()

    def flush(self) -> None:
        """Align and write the outputs that wait."""
        from heedful.insight.alignment import align_outputs

        given = [(text, output) for text, output in self._pairs if output is not None]
        texts, outputs = [text for text, _ in given], [output for _, output in given]
        aligned = iter(align_outputs(self.model, texts, outputs, self.options, unit=self.unit))
        for _, output in self._pairs:
            self.write("" if output is None else next(aligned).pharaoh())
        self._pairs.clear()


@dataclass(frozen=True)
class AlignmentFlags:
    """Flags of a command that writes alignments."""

    alignments: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Write word alignments to this file: for each output a line of pairs such as 0-0 1-2, "
        "source index and target index, from cross-attention.",
        show_default="none",
        rich_help_panel=IN_OUT,
    )
    alignment_unit: str | None = typer.Option(
        None,
        metavar="words|tokens",
        help="Align words between spaces, or the tokens of the model.",
        show_default="words",
        rich_help_panel=IN_OUT,
    )

    def check(self) -> None:
        """Raises UserError for a unit without a file."""
        if self.alignment_unit and self.alignments is None:
            raise UserError("--alignment-unit is the unit of --alignments; give both, or neither")

    @contextmanager
    def writer(self, model: "Translator", options: Options) -> Iterator[AlignmentWriter | None]:
        """A writer of the file; None: alignments are not wanted.

        Raises:
            UserError: a model without cross-attention; an unknown unit; an unwritable file.
        """
        if self.alignments is None:
            yield None
            return
        from heedful.insight.alignment import align, expect_translator

        unit: Any = self.alignment_unit or "words"
        align(expect_translator(model), [], [], unit=unit)
        with line_writer(self.alignments) as write:
            writer = AlignmentWriter(model, unit, options, write)
            yield writer
            writer.flush()
