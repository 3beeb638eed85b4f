"""Files of translators and writers: segments in, the same file with translations out.

One module a format: `po`, `xliff`, `tmx`, `subtitles`, `html`, `markdown`, `docx`, `plain`.
"""

from heedful.documents.counts import Counts
from heedful.documents.foreign import language_review
from heedful.documents.formats import FORMATS, document_format, open_document, read_document
from heedful.documents.segments import Document, Result, Segment
from heedful.documents.translating import Policy, memory_of, translate_document

__all__ = [
    "FORMATS",
    "Counts",
    "Document",
    "Policy",
    "Result",
    "Segment",
    "document_format",
    "language_review",
    "memory_of",
    "open_document",
    "read_document",
    "translate_document",
]
