"""Lines in and out for commands that map texts."""

import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import typer

from heedful import pipelines
from heedful.cli.flags import Output, Truncate, flag_of
from heedful.cli.help import IN_OUT
from heedful.cli.shared import note, to_json
from heedful.errors import UserError
from heedful.options import SAMPLING_OPTIONS, Options, TooLong
from heedful.progress import Advance, ProgressBars, track, use_display

CHUNK = 1_024
_FAILURES = {
    "dead_end": "outputs that end where the constraints allow no token",
    "without_phrase": "outputs without all required phrases",
}
_BLOCK = 1 << 20
_RARE_BREAKS = re.compile(r"[\x85\u2028\u2029]")  # the others are escaped by the library
_LONGEST = 1_000_000  # characters of a line for a model


@dataclass(frozen=True)
class InputOutput:
    """Input and output of a command that maps texts to lines."""

    texts: list[str] | None = typer.Argument(
        None, metavar="TEXT", help="Texts.", show_default="lines of --input or stdin"
    )
    input: Path | None = typer.Option(
        None,
        "--input",
        "-i",
        metavar="FILE",
        help="Read one text per line from this file.",
        show_default="stdin",
        rich_help_panel=IN_OUT,
    )
    output: Output = None
    truncate: Truncate = False
    strict: bool = typer.Option(
        False,
        "--strict",
        help="Stop at the first line that cannot be used, with exit code 2. Without, its output is "
        "blank, stderr names it, and the exit code is 0 unless no line can be used.",
        rich_help_panel=IN_OUT,
    )

    @property
    def too_long(self) -> TooLong:
        """Treatment of texts that are too long; with a single one there is no other to keep."""
        stops = self.strict or len(self.texts or ()) == 1
        return "truncate" if self.truncate else "error" if stops else "leave_out"

    @property
    def ahead(self) -> int:
        """Batches read before one is answered: none for a user who types lines."""
        return 0 if self.input is None else 1

    @property
    def is_piped(self) -> bool:
        """The texts are lines of a file or of a program, not given or typed one by one."""
        return not self.texts and (self.input is not None or not _is_typed())

    def chunks(self, invitation: str = "") -> Iterator[list[str]]:
        """The texts, in lists. `invitation` is printed if lines are typed in a terminal.

        Raises UserError: a missing file, texts and a file together.
        """
        if self.texts:
            if self.input is not None:
                raise UserError("give texts or --input, not both")
            for text in self.texts:
                if len(self.texts) == 1 and _is_file(text):
                    note(f"{text} is read as a text; to read the file: --input {text}")
            return _check_line_lengths(iter([self.texts]))
        if invitation and self.input is None and _is_typed():
            typer.echo(invitation, err=True)
        return input_chunks(self.input)

    def progress(self, what: str) -> AbstractContextManager[Advance]:
        """A progress bar where stdout is not the output."""
        return progress_bar(what, shown=self.output is not None)


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null
        return False


def settle(model: "pipelines.Generator", options: dict[str, Any]) -> Options:
    """The options of the command line with the model's defaults; notes those without effect.

    A glossary is read once: `options` then has its terms.
    """
    settled = model.options(**options)
    if settled.glossary is not None:
        options["glossary"] = settled.glossary
    note_unused(options, settled, model)
    return settled


def note_unused(
    options: Mapping[str, Any], settled: Options, model: "pipelines.SavedModel"
) -> None:
    """Note options of the command line that have no effect beside the others.

    Args:
        options: those that are given.
        settled: all, with the model's defaults.
    """
    reasons: dict[str, str] = {}
    if not settled.samples:
        unused = ("seed", *SAMPLING_OPTIONS[1:])
        reasons |= dict.fromkeys(unused, "nothing is sampled; give a --temperature above 0")
    if settled.draft is None:
        reasons["num_draft_tokens"] = "there is no --draft"
    if not settled.by_beams:
        reasons["stop_rule"] = "there is a single beam; give a --beam-size above 1"
        of_scores = "on outputs, only on scores: there is a single beam"
        reasons |= dict.fromkeys(("length_penalty", "normalization"), of_scores)
    elif settled.require and settled.stop_rule != "optimal":
        reasons["stop_rule"] = "a search with --require ends by the rule optimal"
    if model.shortlist is None:
        reasons["shortlist"] = "the model has no shortlist (heedful optimize --shortlist)"
    if settled.num_groups > 1 and not settled.diversity_penalty:
        reasons["num_groups"] = "on outputs but a smaller beam: give a --diversity-penalty above 0"
    for name, reason in reasons.items():
        if options.get(name) is not None:
            flag = flag_of(name)
            if options[name] is False:
                flag = f"--no-{flag[2:]}"
            note(f"{flag} has no effect{' ' if reason.startswith('on ') else ': '}{reason}")


def report_counts(model: "pipelines.SavedModel", what: str, total: int) -> None:
    """Report on stderr how many texts were truncated, have unknown characters or no output, or miss
    a constraint.

    Called before the output is complete, so that no file is left without an output.

    Args:
        what: the texts, in the plural.
        total: their number.

    Raises:
        UserError: none of them has an output.
    """
    if model.num_truncated:
        typer.echo(f"truncated {what}: {model.num_truncated:,}", err=True)
    report_unknown(model)
    if model.num_left_out:
        typer.echo(f"{what} left out, whose outputs are blank: {model.num_left_out:,}", err=True)
    for failure, text in _FAILURES.items():
        if count := model.failures.get(failure):
            typer.echo(f"{text}: {count:,}", err=True)
    if total and model.num_left_out >= total:
        raise UserError(f"no {what.removesuffix('s')} can be used; the reasons are above")


def report_unknown(model: "pipelines.SavedModel") -> None:
    """Report on stderr how many texts, or parts of them, have characters that are not read."""
    if model.num_unknown:
        problem = "texts with characters that the vocabulary lacks, which the model did not read"
        typer.echo(f"{problem}: {model.num_unknown:,}", err=True)


def input_chunks(path: Path | None) -> Iterator[list[str]]:
    """Lists of the lines that can be read without waiting: a typed line comes alone.

    Raises UserError: a missing file, a directory or a table, at the call; invalid UTF-8, with its
    line number.
    """
    if path is None:
        return _check_line_lengths(_chunks_so_far(sys.stdin.fileno()))
    check_plain(path)
    chunks = _check_line_lengths(_file_chunks(path))
    first = next(chunks, [])
    return chain([first], chunks)


def check_plain(path: Path) -> None:
    """Raise UserError for a file that is not plain text by its name: a table, JSON or the like.

    A .tsv file is accepted: its lines may be pairs of texts.
    """
    from heedful.data.row_files import format_of

    if path.is_file() and format_of(path) not in ("text", "tsv"):
        raise UserError(
            f"{path} is not plain text, by its name: its keys and marks would be read as text; "
            "save its texts as .txt, or rename it so if it is text"
        )


def _check_line_lengths(chunks: Iterator[list[str]]) -> Iterator[list[str]]:
    """The chunks; raises UserError for a line that no model reads, before it is tokenized."""
    first = 1
    for chunk in chunks:
        for number, line in enumerate(chunk, first):
            if len(line) > _LONGEST:
                raise UserError(f"line {number} has {len(line):,} characters; break it into lines")
        first += len(chunk)
        yield chunk


def read_parallel(first: Path, second: Path) -> tuple[list[str], list[str]]:
    """The lines of two parallel files; raises UserError if their numbers differ."""
    from heedful.data.row_files import read_rows

    rows = read_rows({"first": [first], "second": [second]}, keep_empty=True)
    for name in ("first", "second"):
        list(_check_line_lengths(iter([rows[name]])))
    return rows["first"], rows["second"]


def read_whole(path: Path | None) -> str:
    """The text of a file or of stdin; raises UserError if it cannot be read or is not UTF-8."""
    from heedful.data.text_files import decode_lines, read_lines

    if path is not None:
        return "".join(read_lines(path, keep_ends=True))
    return "".join(decode_lines(sys.stdin.buffer, "stdin", keep_ends=True))


def json_line(**content: Any) -> str:
    """A line of JSON, as `to_json`, with escapes for line breaks."""
    return _RARE_BREAKS.sub(lambda match: f"\\u{ord(match[0]):04x}", to_json(content))


def show(text: str, end: str = "\n") -> None:
    """Write a line, or a part of one, to stdout at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def show_bytes(data: bytes) -> None:
    """Write bytes to stdout at once."""
    stdout: Any = sys.stdout
    if hasattr(stdout, "write_bytes"):  # of `heedful.cli.guard`
        stdout.write_bytes(data)
    else:
        stdout.buffer.write(data)
        stdout.flush()


class LineWriter:
    """Writes lines, each with a space in place of a line break inside it.

    Args:
        write: writes text.
        keeps_breaks: write line breaks as they are.
    """

    def __init__(self, write: Callable[[str], object], *, keeps_breaks: bool) -> None:
        self._write, self._keeps_breaks = write, keeps_breaks
        self._has_break = False
        self.num_lines = self.num_broken = 0

    def __call__(self, line: str) -> None:
        """Write a line, or the end of the one that was begun."""
        self.part(line, end="\n")
        self.num_lines += 1
        self.num_broken += self._has_break
        self._has_break = False

    def part(self, text: str, end: str = "") -> None:
        """Write a part of a line."""
        from heedful.files import one_line

        written = text if self._keeps_breaks else one_line(text)
        self._has_break |= written != text
        self._write(written + end)


@contextmanager
def line_writer(path: Path | None, *, keeps_breaks: bool = False) -> Iterator[LineWriter]:
    """A writer of lines: to a file whole or not at all, to stdout at once.

    The lines before an interruption are kept (`heedful.files.atomic_open`). At the end a note
    tells how many lines had a line break.
    """
    from heedful.files import atomic_open, partial_of

    if path is None:
        writer = LineWriter(lambda text: show(text, end=""), keeps_breaks=keeps_breaks)
        yield writer
    else:
        try:
            with atomic_open(path) as file:
                writer = LineWriter(
                    lambda text: file.write(text.encode()), keeps_breaks=keeps_breaks
                )
                yield writer
        except (KeyboardInterrupt, SystemExit):
            if writer.num_lines:
                count = writer.num_lines
                sys.stderr.write(f"interrupted; lines in {partial_of(path)}: {count:,}\n")
            raise
    note_breaks(writer.num_broken)


def note_breaks(count: int) -> None:
    """Note how many outputs had a line break, in whose place a space was written."""
    if count:
        note(f"outputs with line breaks, each written as a space: {count:,}")


@contextmanager
def progress_bar(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[Advance]:
    """A function that reports items done; displayed as by `bars_on_stderr`."""
    with bars_on_stderr(shown=shown), track(what, total) as advance:
        yield advance


@contextmanager
def bars_on_stderr(*, shown: bool = True) -> Iterator[None]:
    """Display the progress of the block on stderr, if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    with use_display(ProgressBars(console).track if shown and console.is_terminal else None):
        yield


def _file_chunks(path: Path) -> Iterator[list[str]]:
    from heedful.data.text_files import read_lines

    lines = read_lines(path)
    while chunk := list(islice(lines, CHUNK)):
        yield chunk


def _chunks_so_far(handle: int) -> Iterator[list[str]]:
    """The lines that a pipe or a terminal holds so far, without waiting for more."""
    from heedful.data.text_files import LONGEST_LINE, decode_lines

    rest, number, data = b"", 0, b"?"
    while data:
        rest += (data := _read(handle))
        # A writer that is not waiting for answers sends more at once: take it together.
        while data and len(rest) < _BLOCK and select.select([handle], [], [], 0.01)[0]:
            rest += (data := _read(handle))
        *lines, rest = rest.split(b"\n")
        if rest and (not data or len(rest) > LONGEST_LINE):
            lines.append(rest)
        for start in range(0, len(lines), CHUNK):
            part = lines[start : start + CHUNK]
            yield list(decode_lines(part, "stdin", first=number + 1))
            number += len(part)


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, _BLOCK)
    except OSError as error:
        raise UserError(f"cannot read stdin: {error.strerror}") from None
