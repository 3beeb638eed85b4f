"""`heedful translate -i app.po`: documents in, the same documents with translations out."""

import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful.cli.guard import error_text, one_line, print_traceback
from heedful.cli.help import IN_OUT
from heedful.cli.lines import InputOutput, bars_on_stderr, report_unknown, show_bytes
from heedful.cli.review import ReviewTable
from heedful.cli.shared import note
from heedful.errors import UserError, format_names

if TYPE_CHECKING:
    from heedful.documents import Document
    from heedful.pipelines import ModelMetadata, Translator

_PANEL = "Documents"
_BINARY = (".docx", ".docm", ".dotx", ".dotm")


@dataclass(frozen=True)
class DocumentFlags:
    """Flags of `translate` for documents, and for the tables and notes on translations."""

    review: Path | None = typer.Option(
        None,
        "--review",
        metavar="FILE",
        help="Write a table with tabs, the worst translations first: line, estimated quality from "
        "0 to 100, reasons for a review, source and translation.",
        rich_help_panel=IN_OUT,
    )
    memory: Path | None = typer.Option(
        None,
        "--memory",
        metavar="FILE",
        help="Take the translation of FILE (.tmx, .po, .tsv, .jsonl, ...) for a segment that is "
        "one of its sources.",
        rich_help_panel=_PANEL,
    )
    overwrite_targets: bool = typer.Option(
        False,
        "--overwrite-targets",
        help="Replace all translations that the file has. Without, finished ones are kept; those "
        "marked as unfinished (fuzzy in PO, state new or needs-translation in XLIFF) are replaced.",
        rich_help_panel=_PANEL,
    )
    only_empty: bool = typer.Option(
        False,
        "--only-empty",
        help="Keep unfinished translations too: translate only what has none.",
        rich_help_panel=_PANEL,
    )
    quality: bool = typer.Option(
        False,
        "--quality",
        help="Write an estimated quality from 0 to 100 beside each translation (a comment in PO, a "
        "note in XLIFF and TMX).",
        rich_help_panel=_PANEL,
    )
    split_sentences: bool = typer.Option(
        True,
        "--split-sentences/--no-split-sentences",
        help="Translate the sentences of a document one by one, and those of a line that is too "
        "long for the model; without, only those of a segment that is too long.",
        show_default="on",
        rich_help_panel=_PANEL,
    )

    def table(self, in_out: InputOutput) -> ReviewTable | None:
        """The table of `--review`; None: it is not wanted."""
        if self.review is None:
            return None
        return ReviewTable(self.review, [in_out.input, in_out.output])

    def check(self, in_out: InputOutput) -> None:
        """Raise UserError for flags that contradict, or have no effect without a document."""
        if self.overwrite_targets and self.only_empty:
            raise UserError("give --overwrite-targets or --only-empty, not both")
        if is_document(in_out):
            return
        given = {
            "--memory": self.memory,
            "--overwrite-targets": self.overwrite_targets,
            "--only-empty": self.only_empty,
            "--quality": self.quality,
        }
        for flag, value in given.items():
            if value:
                more = "; for lines there is --review" if flag == "--quality" else ""
                raise UserError(
                    f"{flag} is for documents: give one as --input, such as app.po{more}"
                )


def is_document(in_out: InputOutput) -> bool:
    """True for a document by its name, and for a folder of them; lines of text are none.

    Raises UserError for a file of another format that is not lines of text, by its name.
    """
    from heedful.documents.formats import NO_LINES, document_format

    path = in_out.input
    if path is None:
        return False
    if path.suffix.lower() in NO_LINES and not path.is_dir():
        raise UserError(
            f"{path} is not lines of text, by its name: its keys and marks would be translated; "
            "convert it to .po or .xliff, save its texts as .txt, or rename it so if it is text"
        )
    return path.is_dir() or document_format(path) not in (None, ".txt")


def translate_documents(
    translator: "Translator",
    in_out: InputOutput,
    flags: DocumentFlags,
    options: dict[str, Any],
    *,
    refused: dict[str, Any],
    review: ReviewTable | None,
) -> None:
    """Translate the document of `--input` to `--output`, or all documents of a folder.

    Args:
        options: of the command line.
        refused: flags that are for lines, and their values.
        review: gets the translations; None: no table is wanted.
    """
    path, output = in_out.input, in_out.output
    assert path is not None
    if in_out.texts:
        raise UserError("give texts or --input, not both")
    for flag, value in {**refused, "--num-return": options.get("num_return", 1) > 1}.items():
        if value:
            raise UserError(f"{flag} is for lines of text, not for documents; leave it out")
    try:
        if path.is_dir():
            _translate_folder(translator, path, in_out, flags, options, review)
        else:
            if output is None and path.suffix.lower() in _BINARY:
                raise UserError(f"{path} is not text: name the translated file with --output")
            typer.echo(_translate_file(translator, path, output, flags, options, review), err=True)
    except BaseException:  # also of Ctrl-C: the files of a folder that are written are kept
        if review:
            review.write()
        raise
    report_unknown(translator)
    if review is not None:
        review.write()


def _translate_folder(
    translator: "Translator",
    folder: Path,
    in_out: InputOutput,
    flags: DocumentFlags,
    options: dict[str, Any],
    review: ReviewTable | None,
) -> None:
    """Translate the documents below a folder to the same names below `--output`.

    A translated file that is there already is kept, so that the same command continues.

    Raises:
        UserError: no output; no document, or none that can be translated; with `--strict` the
            first one that cannot. A fault of heedful in one of them, after the others.
    """
    output = in_out.output
    if output is None or (output.exists() and not output.is_dir()):
        raise UserError(f"{folder} is a folder: name a folder for its translations with --output")
    documents, others = _documents_in(folder)
    if not documents:
        raise UserError(f"{folder} has no documents; name one with files such as app.po")
    done = [path for path in documents if (output / path).exists()]
    if done and review is not None:
        review.check_new()
    failed = 0
    faults: list[str] = []
    for path in documents:
        if path in done:
            continue
        try:
            places = folder / path, output / path
            summary = _translate_file(translator, *places, flags, options, review, path.as_posix())
        except Exception as error:  # a fault in one file must not cost the others
            if review is not None:
                review.forget(path.as_posix())
            if in_out.strict:
                raise
            failed += 1
            reason = error_text(error)
            if reason is None:
                faults.append(str(path))
                reason = f"a fault of heedful, {type(error).__name__}: {error}"
            print_traceback()
            typer.echo(one_line(f"{path}: left out: {reason}"), err=True)
        else:
            typer.echo(f"{path}: {summary}", err=True)
    translated = len(documents) - len(done) - failed
    counts = {"already there": len(done), "left out": failed, "no documents": others}
    listed = "".join(f"; {what}: {count:,}" for what, count in counts.items() if count)
    typer.echo(f"files translated: {translated:,}{listed}", err=True)
    if faults:
        raise UserError(
            f"faults of heedful in {format_names(faults, str)}; report them with the traceback that"
            " --debug shows"
        )
    if failed and not (translated or done):
        raise UserError("no file can be translated; the reasons are above")


def _documents_in(folder: Path) -> tuple[list[Path], int]:
    """The documents below a folder, relative to it, and the number of its other files.

    Names with a point at their start and links to folders are left out.
    """
    from heedful.documents import document_format

    found, others = [], 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            if document_format(name) is None:
                others += 1
            else:
                found.append(Path(place, name).relative_to(folder))
    return found, others


def _translate_file(
    translator: "Translator",
    path: Path,
    output: Path | None,
    flags: DocumentFlags,
    options: dict[str, Any],
    review: ReviewTable | None,
    name: str = "",
) -> str:
    """Translate a document and write it, whole or not at all; returns the counts as a line.

    Args:
        name: of a file of a folder, for the table of translations.
    """
    from heedful.documents import Policy, language_review, open_document, translate_document
    from heedful.files import check_writable

    if output is not None:
        check_writable(output)
    metadata = translator.metadata
    named, target = options.get("src_language"), options.get("tgt_language")
    known = metadata.src_language, metadata.tgt_language
    document = open_document(path, _either((named, target), known))
    for line in document.notes:
        note(line)
    _check_output_format(path, output)
    if flags.quality and not document.keeps_targets:
        note(f"--quality has no place in a {path.suffix} file; --review has it")
    options = _with_languages(options, metadata, document)
    with bars_on_stderr(shown=output is not None):
        counts = translate_document(
            translator,
            document,
            policy=Policy(flags.overwrite_targets, flags.only_empty),
            memory=_memory(flags.memory, *document.languages) if flags.memory else None,
            review=language_review(options.get("src_language") or named or metadata.src_language),
            by_sentence=flags.split_sentences,
            with_quality=flags.quality or review is not None,
            **options,
        )
    if review is not None:
        review.add_document(document, name)
        if not flags.quality:
            _without_quality(document)
    _write(document, output)
    return counts.summary()


def _without_quality(document: "Document") -> None:
    """Leave the qualities of its translations out of a document."""
    for segment in document.segments:
        if segment.result is not None:
            segment.result = replace(segment.result, quality=None)


def _with_languages(
    options: dict[str, Any], metadata: "ModelMetadata", document: "Document"
) -> dict[str, Any]:
    """The options with the languages of a document, where the model chooses by them."""
    of_document = dict(zip(("src_language", "tgt_language"), document.languages, strict=True))
    chosen = {
        "src_language": bool(metadata.language_codes),
        "tgt_language": bool(metadata.language_codes or metadata.language_tags),
    }
    more = {name: code for name, code in of_document.items() if chosen[name] and code}
    if not chosen["src_language"]:  # of the document alone
        options = {name: options[name] for name in options.keys() - {"src_language"}}
    return more | options


def _either(
    first: tuple[str | None, str | None], second: tuple[str | None, str | None]
) -> tuple[str | None, str | None]:
    return first[0] or second[0], first[1] or second[1]


def _check_output_format(path: Path, output: Path | None) -> None:
    """Raise UserError for an output whose name says another format."""
    from heedful.documents import document_format

    if output is None or output.suffix.lower() == path.suffix.lower():
        return
    one = {".pot": ".po", ".xlf": ".xliff", ".htm": ".html", ".xhtml": ".html"}
    formats = [document_format(name) for name in (path, output)]
    same = {one.get(name or "", name) for name in formats}
    if len(same) > 1 and output.suffix and not output.is_char_device():
        raise UserError(
            f"--output {output}: a translated {path.suffix} file is {path.suffix} again; name it so"
        )


@lru_cache(maxsize=1)  # the documents of a folder share it
def _memory(path: Path, source: str | None, target: str | None) -> dict[str, str]:
    """The pairs of a file as a translation memory."""
    from heedful.data.row_files import open_rows
    from heedful.data.rows import collect
    from heedful.data.tsv import ColumnOrderError
    from heedful.documents import memory_of

    named = {"src": source, "tgt": target}
    languages = {side: code for side, code in named.items() if code is not None}
    try:
        rows = collect(open_rows([path], {"src": None, "tgt": None}, languages=languages))
    except ColumnOrderError as error:
        raise UserError(f"--memory: {error.problem}; exchange the columns") from None
    if len(rows) < rows.report.num_lines:
        note(f"--memory {path}: {rows.report.summary()}")
    return memory_of(zip(rows["src"], rows["tgt"], strict=True))


def _write(document: "Document", output: Path | None) -> None:
    from heedful.files import atomic_open

    data = document.to_bytes()
    if output is None:
        show_bytes(data)
        return
    with atomic_open(output) as file:
        file.write(data)
