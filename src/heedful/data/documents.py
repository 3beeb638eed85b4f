"""Files that are no text: word processor documents, spreadsheets, PDF."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

from heedful.errors import UserError
from heedful.files import user_errors

_TEXT = "save it as plain text (.txt, UTF-8)"
_TABLE = "save its table as tab-separated text (.tsv, UTF-8)"
_PDF = "extract its text, for example by `pdftotext FILE.pdf FILE.txt`"
# The first bytes of formats, with their name and what to do.
_MAGIC = {
    b"%PDF-": ("a PDF", _PDF),
    b"\xd0\xcf\x11\xe0\xa1\xb1": ("a document of an old Office program (.doc, .xls)", _TEXT),
    b"{\\rtf": ("a document (.rtf)", _TEXT),
}
_ZIP = b"PK\x03\x04"
# A member of the ZIP file that is a document.
_MEMBERS: Mapping[str, tuple[str, str]] = {
    "word/document.xml": ("a Word document (.docx)", _TEXT),
    "xl/workbook.xml": ("an Excel spreadsheet (.xlsx)", _TABLE),
    "ppt/presentation.xml": ("a PowerPoint presentation (.pptx)", _TEXT),
}
_OPEN_DOCUMENTS: Mapping[bytes, tuple[str, str]] = {
    b"application/vnd.oasis.opendocument.text": ("an OpenDocument text (.odt)", _TEXT),
    b"application/vnd.oasis.opendocument.spreadsheet": ("a spreadsheet (.ods)", _TABLE),
    b"application/epub+zip": ("a book (.epub)", _TEXT),
}
_OTHER_ZIP = ("a ZIP file", "unpack it, and name the text file in it")


def check_no_document(path: Path) -> None:
    """Raise UserError for a file that is a document by its content, with the way to its text."""
    if not path.is_file():
        return
    with user_errors("read", path), path.open("rb") as file:
        start = file.read(8)
    found = next((entry for magic, entry in _MAGIC.items() if start.startswith(magic)), None)
    if start.startswith(_ZIP):
        found = _in_zip(path)
    if found is not None:
        raise UserError(f"{path} is {found[0]}, not text; {found[1]}")


def _in_zip(path: Path) -> tuple[str, str]:
    try:
        with zipfile.ZipFile(path) as file:
            names = {*file.namelist()}
            kind = file.read("mimetype") if "mimetype" in names else b""
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError):
        return _OTHER_ZIP
    for member, entry in _MEMBERS.items():
        if member in names:
            return entry
    return _OPEN_DOCUMENTS.get(kind.strip(), _OTHER_ZIP)
