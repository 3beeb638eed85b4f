"""`heedful translate -i app.po`: documents in, the same documents with translations out."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful.cli.lines import InputOutput, bars_on_stderr
from heedful.errors import UserError

if TYPE_CHECKING:
    from heedful.documents import Document
    from heedful.pipelines import ModelMetadata, Translator

_PANEL = "Documents"
_BINARY = (".docx",)


@dataclass(frozen=True)
class DocumentFlags:
    """What is translated in a document, and with what."""

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
    split_sentences: bool = typer.Option(
        True,
        "--split-sentences/--no-split-sentences",
        help="Translate the sentences of a document one by one, and those of a line that is too "
        "long for the model; without, only those of a segment that is too long.",
        show_default="on",
        rich_help_panel=_PANEL,
    )

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
        }
        for flag, value in given.items():
            if value:
                raise UserError(f"{flag} is for documents: give one as --input, such as app.po")


def is_document(in_out: InputOutput) -> bool:
    """True if the input is a document by its name; lines of text are none."""
    from heedful.documents import document_format

    return in_out.input is not None and document_format(in_out.input) not in (None, ".txt")


def translate_file(
    translator: "Translator",
    in_out: InputOutput,
    flags: DocumentFlags,
    options: dict[str, Any],
    *,
    refused: dict[str, Any],
) -> None:
    """Translate the document of `--input`, and write it to `--output`, whole or not at all.

    Args:
        options: of the command line.
        refused: flags that are for lines, and their values.
    """
    from heedful.documents import Policy, open_document, translate_document
    from heedful.files import check_writable

    path, output = in_out.input, in_out.output
    assert path is not None
    if in_out.texts:
        raise UserError("give texts or --input, not both")
    for flag, value in {**refused, "--num-return": options.get("num_return", 1) > 1}.items():
        if value:
            raise UserError(f"{flag} is for lines of text, not for documents; leave it out")
    if output is None and path.suffix.lower() in _BINARY:
        raise UserError(f"{path} is not text: name the translated file with --output")
    if output is not None:
        check_writable(output)
    metadata = translator.metadata
    languages = options.get("src_language"), options.get("tgt_language")
    known = metadata.src_language, metadata.tgt_language
    document = open_document(path, _either(languages, known))
    _check_output_format(path, output)
    options = _with_languages(options, metadata, document)
    with bars_on_stderr(shown=output is not None):
        counts = translate_document(
            translator,
            document,
            policy=Policy(flags.overwrite_targets, flags.only_empty),
            memory=_memory(flags.memory, document) if flags.memory else None,
            by_sentence=flags.split_sentences,
            **options,
        )
    _write(document, output)
    typer.echo(counts.summary(), err=True)


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


def _memory(path: Path, document: "Document") -> dict[str, str]:
    """The pairs of a file as a translation memory."""
    from heedful.data.row_files import open_rows
    from heedful.data.rows import collect
    from heedful.documents import memory_of

    source, target = document.languages
    named = {"src": source, "tgt": target}
    languages = {side: code for side, code in named.items() if code is not None}
    rows = collect(open_rows([path], {"src": None, "tgt": None}, languages=languages))
    return memory_of(zip(rows["src"], rows["tgt"], strict=True))


def _write(document: "Document", output: Path | None) -> None:
    from heedful.files import atomic_open

    data = document.to_bytes()
    if output is None:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        return
    with atomic_open(output) as file:
        file.write(data)
