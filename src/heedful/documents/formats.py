"""The format of a document by the ending of its name."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from heedful.documents.segments import MAX_BYTES, Document
from heedful.errors import UserError, format_names
from heedful.files import open_bytes, user_errors

Languages = tuple[str | None, str | None]

# The module and class that reads each ending.
_CLASSES: Mapping[str, tuple[str, str]] = {
    ".po": ("po", "PoDocument"),
    ".pot": ("po", "PoDocument"),
    ".xliff": ("xliff", "XliffDocument"),
    ".xlf": ("xliff", "XliffDocument"),
    ".sdlxliff": ("xliff", "XliffDocument"),  # Trados
    ".mqxliff": ("xliff", "XliffDocument"),  # memoQ
    ".mxliff": ("xliff", "XliffDocument"),  # Phrase
    ".tmx": ("tmx", "TmxDocument"),
    ".srt": ("subtitles", "SubtitleDocument"),
    ".vtt": ("subtitles", "SubtitleDocument"),
    ".html": ("html", "HtmlDocument"),
    ".htm": ("html", "HtmlDocument"),
    ".xhtml": ("html", "HtmlDocument"),
    ".md": ("markdown", "MarkdownDocument"),
    ".markdown": ("markdown", "MarkdownDocument"),
    ".docx": ("docx", "DocxDocument"),
    ".docm": ("docx", "DocxDocument"),
    ".dotx": ("docx", "DocxDocument"),
    ".dotm": ("docx", "DocxDocument"),
    ".txt": ("plain", "PlainDocument"),
}
# Endings of formats with texts between keys or marks, which are not read.
NO_LINES = frozenset(
    [
        *(".adoc", ".arb", ".ass", ".csv", ".dfxp", ".dita", ".doc", ".dtd"),
        *(".epub", ".ftl", ".idml", ".ini", ".ipynb", ".json", ".json5", ".jsonl", ".mdx", ".mo"),
        *(".odp", ".ods", ".odt", ".pdf", ".php", ".pptx", ".properties", ".qmd", ".resw", ".resx"),
        *(".rst", ".rtf", ".sbv", ".ssa", ".strings", ".stringsdict", ".sub", ".svg", ".tbx"),
        *(".tex", ".toml", ".ts", ".tsv", ".ttml", ".vue", ".xcstrings", ".xls", ".xlsx", ".xml"),
        *(".yaml", ".yml"),
    ]
)
_GZIP = b"\x1f\x8b"
FORMATS = tuple(_CLASSES)


def document_format(name: str | Path) -> str | None:
    """The ending of a document's name; None: it is of no known format."""
    suffix = Path(name).suffix.lower()
    return suffix if suffix in _CLASSES else None


def open_document(path: Path, languages: Languages = (None, None)) -> Document:
    """The document of a file; arguments and errors as in `read_document`."""
    with user_errors("read", path), open_bytes(path) as file:
        data = file.read(MAX_BYTES + 1)
    return read_document(data, str(path), languages)


def read_document(data: bytes, name: str, languages: Languages = (None, None)) -> Document:
    """The document of bytes.

    Args:
        name: of the file, whose ending says the format.
        languages: of source and target; they go before those that the file names.

    Raises:
        UserError: an unknown format; a file that is too large, broken, or has no segments.
    """
    suffix = document_format(name)
    if suffix is None:
        raise UserError(
            f"{name} has no ending of a document; those that are read: "
            f"{format_names(FORMATS, str, most=len(FORMATS))}"
        )
    if len(data) > MAX_BYTES:
        raise UserError(f"{name} is larger than {MAX_BYTES >> 20} MiB; split it")
    if data.startswith(_GZIP):
        raise UserError(f"{name} is packed by gzip; unpack it, by gunzip")
    module, class_name = _CLASSES[suffix]
    reader: Callable[..., Any] = getattr(import_module(f"heedful.documents.{module}"), class_name)
    document: Document = reader(data, name, languages)
    return document
