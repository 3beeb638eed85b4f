"""A document: its segments, which are translated, and the file with their translations."""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from heedful.data.inline import InlinePiece, TagError, TaggedText, tagged
from heedful.data.language_tags import is_same_language
from heedful.errors import UserError
from heedful.fidelity import Reason
from heedful.fidelity.pieces import find_pieces
from heedful.files import is_charset, line_of_byte

LONGEST_SEGMENT = 1_000_000  # characters
DEEPEST = 200  # pairs of tags around a place of a segment; pages have fewer than 20
MAX_BYTES = 1 << 28  # of a document, which is in memory
_BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}

_ELEMENT = re.compile(r"<(/?)([\w:.-]+)")

Origin = Literal["model", "memory", "source"]


@dataclass(frozen=True)
class Result:
    """A translation of a segment.

    Attributes:
        reasons: why a person should review it; writers store them where the format has a place.
        origin: a model, an exact match of a translation memory, or the source itself, of a text
            without words.
        quality: from 0 to 100 (`heedful.fidelity.quality`); None: it was not asked for, or the
            translation is not a model's.
    """

    text: str
    reasons: tuple[str, ...] = ()
    origin: Origin = field(kw_only=True)
    quality: float | None = field(default=None, kw_only=True)

    @property
    def notes(self) -> list[str]:
        """Notes on the translation for the file: reasons for a review, and the quality."""
        notes = [f"needs review: {reason}" for reason in self.reasons]
        return notes if self.quality is None else [*notes, f"quality: {self.quality:.0f}"]


@dataclass
class Segment:
    """A text of a document.

    Attributes:
        text: what is translated; codes in it are tags (`heedful.data.inline`).
        line: of the file, from 1; of a .docx its paragraph.
        target: the translation that the file has; "": none.
        is_finished: the file does not mark this translation as unfinished.
        codes: the codes of the tags.
        is_of_forms: other plural forms of its message have the same text, and other translations.
        result: the translation to write; None: what the file has is kept.
        is_blank: its translation came out blank, so what the file has is kept.
    """

    text: str
    line: int
    target: str = ""
    is_finished: bool = True
    codes: TaggedText | None = None
    is_of_forms: bool = False
    result: Result | None = None
    is_blank: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a person should review it."""
        if self.is_blank:
            return (Reason("blank"),)
        return () if self.result is None else self.result.reasons

    @property
    def depth(self) -> int:
        """The largest number of pairs of tags around a place of the text."""
        codes = {} if self.codes is None else self.codes.codes
        steps = {"open": 1, "close": -1}
        return max(accumulate(steps.get(code.kind, 0) for code in codes.values()), default=0)

    def tag_problem(self, text: str) -> str | None:
        """The error in the tags of a translation; None: it has the tags of the text."""
        if self.codes is None or not self.codes.codes:
            return None
        try:
            self.codes.restored(text)
        except TagError as error:
            return str(error)
        return None


def with_text_tags(segment: Segment) -> Segment:
    """A segment in which the tags of its text, such as `<b>` in a catalogue, are codes; itself
    without any, with codes of its own, or with tags that are nested too deep."""
    if segment.codes is not None and segment.codes.codes:
        return segment
    pieces, end = list[InlinePiece](), 0
    for piece in find_pieces(segment.text):
        if piece.kind == "tag":
            pieces += [InlinePiece("text", segment.text[end : piece.start]), _code_of(piece.text)]
            end = piece.end
    if not pieces:
        return segment
    codes = tagged([*pieces, InlinePiece("text", segment.text[end:])])
    read = replace(segment, text=codes.text, codes=codes)
    return segment if read.depth > DEEPEST else read


def _code_of(tag: str) -> InlinePiece:
    """The code of a tag; without its other half it is one that stands alone."""
    name = _ELEMENT.match(tag)
    if name is None or tag.endswith("/>"):  # a comment, or an empty element
        return InlinePiece("alone", tag)
    return InlinePiece("close" if name[1] else "open", tag, name[2])


@dataclass
class Document(ABC):
    """A file that was read.

    Attributes:
        name: for messages.
        segments: in the order of the file.
        languages: of source and target, where the file or the caller names them.
        keeps_targets: the format has a place for translations beside the sources.
        skipped: what is not translated, with the number of its occurrences, such as obsolete
            entries.
        notes: what a person should know of how the file was read.
    """

    name: str
    languages: tuple[str | None, str | None] = (None, None)
    segments: list[Segment] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    keeps_targets = False

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The file with the results of the segments; all else is as it was, byte for byte.

        Raises:
            UserError: the file's encoding has no code for a character.
        """

    def settle_languages(self, own: tuple[str | None, str | None]) -> None:
        """Complete `languages` by those that the file declares.

        Raises:
            UserError: it declares others.
        """
        for given, declared in zip(self.languages, own, strict=True):
            if given and declared and not is_same_language(given, declared):
                listed = " to ".join(tag or "an unnamed language" for tag in own)
                wanted = " to ".join(tag or "any language" for tag in self.languages)
                raise UserError(
                    f"{self.name} is from {listed}, not from {wanted}; take another model, or"
                    " correct the languages in the file"
                )
        (source, target), (own_source, own_target) = self.languages, own
        self.languages = source or own_source, target or own_target

    def skip(self, what: str, count: int = 1) -> None:
        """Count parts that are not translated."""
        if count:
            self.skipped[what] = self.skipped.get(what, 0) + count

    def add(self, segment: Segment) -> Segment:
        """Append a segment; raises UserError for one that no model reads."""
        if len(segment.text) > LONGEST_SEGMENT:
            raise UserError(
                f"{self.name}, line {segment.line}: a segment has {len(segment.text):,} characters,"
                f" more than {LONGEST_SEGMENT:,}; break it up"
            )
        if segment.depth > DEEPEST:
            raise UserError(
                f"{self.name}, line {segment.line}: a text has tags that are nested more than"
                f" {DEEPEST} deep; correct it there"
            )
        self.segments.append(segment)
        return segment


@dataclass(frozen=True)
class Encoded:
    """The text of a file, and how it is written back.

    Attributes:
        bom: the byte order mark.
    """

    text: str
    encoding: str = "utf-8"
    bom: bytes = b""

    @classmethod
    def of(cls, data: bytes, name: str, encoding: str | None = None) -> "Encoded":
        """The text of bytes.

        Args:
            encoding: that the file declares; a byte order mark goes before it; None: UTF-8.

        Raises:
            UserError: an unknown encoding; bytes that it does not have, with their line.
        """
        bom = next((mark for mark in _BOMS if data.startswith(mark)), b"")
        encoding = _BOMS.get(bom, encoding or "utf-8")
        body = data[len(bom) :]
        if not is_charset(encoding):
            raise UserError(
                f"{name} declares the encoding {encoding[:40]!r}, which is unknown; correct it, or"
                " convert the file to UTF-8"
            )
        try:
            text = body.decode(encoding)
            is_same = text.encode(encoding) == body
        except UnicodeError as error:
            start = getattr(error, "start", 0)
            line = line_of_byte(body, start, encoding)
            raise UserError(
                f"{name}, line {line}: not {encoding} at byte {len(bom) + start + 1} of the file;"
                " correct its declaration, or convert it to UTF-8"
            ) from None
        if not is_same:
            raise UserError(
                f"{name} cannot be written back in {encoding} as it was; convert it to UTF-8"
            )
        return cls(text, encoding, bom)

    def encode(self, text: str, name: str, errors: str = "strict") -> bytes:
        """The bytes of another text; raises UserError for a character that has no code."""
        try:
            return self.bom + text.encode(self.encoding, errors)
        except UnicodeEncodeError as error:
            character = text[error.start]
            raise UserError(
                f"{name}: {self.encoding} has no code for {character!r} (U+{ord(character):04X}) of"
                " a translation; convert the file to UTF-8 first"
            ) from None


def splice(text: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """A text with other text in the ranges of edits, which do not overlap."""
    parts, place = [], 0
    for start, end, new in sorted(edits, key=lambda edit: edit[:2]):
        assert place <= start <= end
        parts += [text[place:start], new]
        place = end
    return "".join([*parts, text[place:]])


def line_starts(text: str) -> Sequence[int]:
    r"""The index of the first character of each line; only "\n" ends a line."""
    starts = [0]
    place = text.find("\n")
    while place >= 0:
        starts.append(place + 1)
        place = text.find("\n", place + 1)
    return starts
