"""Word documents and templates: their paragraphs; all other parts of the file are kept.

Source: ECMA-376, part 1, WordprocessingML (`w:p`, `w:r`, `w:rPr`, `w:t`).
"""

import io
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TypeAlias

from heedful.data.inline import InlinePiece
from heedful.data.xml_nodes import Node
from heedful.documents.segments import Document, Segment
from heedful.documents.xml_source import XmlSource, segment_codes, xml_text
from heedful.errors import UserError

MAX_UNPACKED = 1 << 29  # bytes of all parts together
MAX_RATIO = 200  # of a part to its packed size
_LARGE = 1 << 20  # bytes from which the ratio counts
_MAIN = re.compile(r"word/document\d*\.xml")
_PARTS = re.compile(_MAIN.pattern + r"|word/(header\d*|footer\d*|footnotes|endnotes)\.xml")
_OTHERS = re.compile(r"word/(comments|charts/chart\d*|diagrams/data\d*)\.xml")
# Marks without a text that a translated paragraph no longer needs.
_DROPPED = {"proofErr", "lastRenderedPageBreak"}
_AROUND = {"hyperlink", "ins", "moveTo", "dir", "bdo", "smartTag", "customXml", "fldSimple"}
_AROUND |= {"sdt", "sdtContent"}
_FIELD = re.compile(r"fldCharType\s*=\s*[\"'](begin|separate|end)")
_MOST_PIECES = 1_000  # of a field before its result
# Marks of both ends of a range, outside of runs, with the same `w:id`.
_RANGE = re.compile(
    r"<(?:\w+:)?(commentRange|bookmark|perm)(Start|End)\b[^>]*?\bid\s*=\s*[\"']([^\"']*)"
)
# Elements of a run that are text, with the text of those without content.
_TEXTS = {"t": "", "noBreakHyphen": "-"}
_IN_RUN = {"rPr", "lastRenderedPageBreak", "softHyphen"}
_Codes: TypeAlias = "InlinePiece | list[_Codes]"  # a code, or several that are one


class _Text:
    """The text of a paragraph, or of a part of one beside a text box.

    Args:
        parts: elements of the paragraph, one after the other.

    Attributes:
        start, end: of what is replaced.
        length: of the text in its runs.
        main: the properties of the runs without codes.
    """

    def __init__(self, xml: XmlSource, parts: list[Node], prefix: str) -> None:
        self.xml, self._prefix = xml, prefix
        pieces = [*_pieces(xml, parts, prefix)]
        self.length = sum(len(piece.raw) for piece in pieces if piece.kind == "text")
        self._pieces = [*map(_of_range, _with_fields(pieces, prefix))]
        sizes: dict[str, int] = {}
        for piece in self._pieces:
            if piece.kind == "text":
                sizes[piece.pair] = sizes.get(piece.pair, 0) + len(piece.raw)
        self.main = max(sizes, key=lambda key: sizes[key], default="")
        self.start, self.end = parts[0].start, parts[-1].end
        self.codes, self._before, self._after = segment_codes(
            [*_with_formats(self._pieces, self.main)]
        )

    def written(self, text: str) -> str:
        """The runs of a translation."""
        pieces = [*self._before, *self.codes.restored(text), *self._after]
        formats = [self.main]
        parts: list[str] = []
        for piece in pieces:
            is_format = piece.pair.startswith("format ")
            if piece.kind == "text":
                if piece.raw:
                    parts.append(_run(piece.raw, formats[-1], self._prefix))
            elif not is_format:
                parts.append(piece.raw)
            elif piece.kind == "open":
                formats.append(piece.raw)
            else:
                formats.pop()
        return "".join(parts)


class DocxDocument(Document):
    """A document of Word. Where a paragraph changes, its formats go to the same words as codes."""

    def __init__(
        self, data: bytes, name: str, languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        super().__init__(name, languages)
        self._data = data
        self._sources: dict[str, XmlSource] = {}
        self._texts: list[tuple[Segment, _Text]] = []
        number = 0
        contents = _parts(data, name)
        for part in [part for part in contents if _OTHERS.fullmatch(part)]:
            del contents[part]
            self.skip("comments, charts and diagrams")
        for part, content in contents.items():
            xml = XmlSource(content, f"{name}: {part}", {"p"})
            self._sources[part] = xml
            for paragraph in (one for node, _ in xml.found for one in node.walk()):
                if paragraph.name == "p":
                    number += 1
                    self._add(xml, paragraph, number)

    def _add(self, xml: XmlSource, paragraph: Node, number: int) -> None:
        """Add the texts of a paragraph: one, or those before and behind each text box in it."""
        prefix = f"{paragraph.prefix}:" if paragraph.prefix else ""
        parts = [node for node in paragraph.children if node.name != "pPr"]
        for has_box, group in groupby(parts, _has_paragraph):
            nodes = [*group]
            shown = "".join(_shown(node, paragraph.prefix) for node in nodes)
            if not any(map(str.isalnum, shown)):
                continue
            text = None if has_box else _Text(xml, nodes, prefix)
            if text is None or text.length < len(shown):
                self.skip("texts within ruby, or in one run with a text box")
            if text is not None and any(map(str.isalnum, text.codes.text)):
                segment = self.add(Segment(text.codes.text, number, codes=text.codes))
                self._texts.append((segment, text))

    def to_bytes(self) -> bytes:
        """See `Document.to_bytes`; parts of the file without a change are as they were."""
        changed: set[str] = set()
        names = {id(xml): part for part, xml in self._sources.items()}
        for segment, text in self._texts:
            result = segment.result
            if result is None or result.text == segment.text:
                continue
            text.xml.replace(text.start, text.end, text.written(result.text))
            changed.add(names[id(text.xml)])
        if not changed:
            return self._data
        out = io.BytesIO()
        with (
            _opened(self._data, self.name) as old,
            zipfile.ZipFile(out, "w") as new,
        ):
            new.comment = old.comment
            for info in old.infolist():
                is_changed = info.filename in changed
                content = self._sources[info.filename].to_bytes() if is_changed else old.read(info)
                new.writestr(info, content)
        return out.getvalue()


def _parts(data: bytes, name: str) -> dict[str, bytes]:
    """The parts with text, the main one first.

    Raises:
        UserError: a file that is no document, or unpacks too large.
    """
    with _opened(data, name) as file:
        infos = file.infolist()
        total = sum(info.file_size for info in infos)
        for info in infos:
            packed = max(info.compress_size, 1)
            if info.file_size > _LARGE and info.file_size > MAX_RATIO * packed:
                raise UserError(
                    f"{name}: its part {info.filename[:80]} unpacks to {info.file_size:,} bytes"
                    f" from {packed:,}, as no document does; it is not read"
                )
        if total > MAX_UNPACKED:
            raise UserError(
                f"{name} unpacks to {total:,} bytes, more than {MAX_UNPACKED:,}; split it"
            )
        names = [info.filename for info in infos]
        if len({*names}) < len(names):
            raise UserError(f"{name} holds a part twice; save it again in Word")
        if not any(map(_MAIN.fullmatch, names)):
            raise UserError(f"{name} is not a Word document; name a .docx file")
        chosen = sorted(name for name in names if _PARTS.fullmatch(name) or _OTHERS.fullmatch(name))
        chosen.sort(key=lambda part: _MAIN.fullmatch(part) is None)
        return {part: file.read(part) for part in chosen}


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[zipfile.ZipFile]:
    """A ZIP file; errors of reading it are UserErrors."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{name} is not a Word document, or damaged: {reason}") from None


def _has_paragraph(node: Node) -> bool:
    """True for an element with paragraphs in it, those of a text box."""
    return any(inner.name == "p" for inner in node.walk())


def _shown(node: Node, prefix: str) -> str:
    """The text of an element, without text boxes and text that was moved elsewhere."""
    if node.name == "t" and node.prefix == prefix:
        return node.text
    if node.name in ("p", "moveFrom"):
        return ""
    return "".join(_shown(child, prefix) for child in node.children)


def _pieces(xml: XmlSource, nodes: list[Node], prefix: str) -> Iterator[InlinePiece]:
    """The texts, with the properties of their run as `pair`, and codes of nodes of a paragraph."""
    for node in nodes:
        if node.name in _DROPPED:
            continue
        if node.name == "r":
            yield from _of_run(xml, node, prefix)
        elif node.name in _AROUND and not node.is_empty_tag and node.children:
            inner = [child for child in node.children if not child.name.endswith("Pr")]
            if not inner:
                yield InlinePiece("alone", xml.raw(node.start, node.end))
                continue
            first, last = inner[0], inner[-1]
            yield InlinePiece("open", xml.raw(node.start, first.start), f"element {node.start}")
            yield from _pieces(xml, inner, prefix)
            yield InlinePiece("close", xml.raw(last.end, node.end), f"element {node.start}")
        else:
            yield InlinePiece("alone", xml.raw(node.start, node.end))


def _of_run(xml: XmlSource, run: Node, prefix: str) -> Iterator[InlinePiece]:
    """The pieces of a run; what is no text, such as a break, is a run of its own."""
    properties = run.child("rPr")
    raw = "" if properties is None else xml.raw(properties.start, properties.end)
    for part in run.children:
        if part.name in _TEXTS:
            yield InlinePiece("text", _TEXTS[part.name] or part.text, raw)
        elif part.name not in _IN_RUN:
            inner = xml.raw(part.start, part.end)
            yield InlinePiece("alone", f"<{prefix}r>{raw}{inner}</{prefix}r>")


def _run(text: str, properties: str, prefix: str) -> str:
    shown = f'<{prefix}t xml:space="preserve">{xml_text(text)}</{prefix}t>'
    return f"<{prefix}r>{properties}{shown}</{prefix}r>"


def _with_fields(pieces: Iterable[InlinePiece], prefix: str) -> list[InlinePiece]:
    """The pieces with the marks of each field, such as a number of a page, as a pair around its
    result, or one code if it has none: they are in this order in any translation.

    What is before its result is a part of the first mark, also the result of another field.
    """
    found: list[_Codes] = []
    begun: list[tuple[int, str]] = []  # of each field that has not ended: where, and its pair
    for piece in pieces:
        match = _FIELD.search(piece.raw) if piece.kind == "alone" else None
        mark = match[1] if match else ""
        found.append(piece)
        if mark == "begin":
            begun.append((len(found) - 1, ""))
            continue
        if not begun or mark not in ("separate", "end"):
            continue
        first, pair = begun[-1]
        if mark == "end":
            begun.pop()
        if mark == "end" and pair:
            found[-1] = InlinePiece("close", piece.raw, pair)
        elif not pair and _has_whole_pairs(found[first : first + _MOST_PIECES + 1]):
            codes = [_as_code(part, prefix) for part in found[first:]]
            if mark == "separate":
                begun[-1] = first, f"field {first}"
                codes = [InlinePiece("open", "".join(_raws(codes)), f"field {first}")]
            found[first:] = codes if mark == "separate" else [codes]
    return [
        InlinePiece("alone", "".join(_raws(part))) if isinstance(part, list) else part
        for part in found
    ]


def _as_code(part: _Codes, prefix: str) -> _Codes:
    """A piece; a text as its run."""
    if isinstance(part, InlinePiece) and part.kind == "text":
        return InlinePiece("alone", _run(part.raw, part.pair, prefix))
    return part


def _has_whole_pairs(parts: list[_Codes]) -> bool:
    """True if no pair begins before the parts, or ends behind them; False for more than fields
    have, which would be read again and again."""
    if len(parts) > _MOST_PIECES:
        return False
    opened: set[str] = set()
    for part in parts:
        if isinstance(part, InlinePiece) and part.kind == "open":
            opened.add(part.pair)
        elif isinstance(part, InlinePiece) and part.kind == "close":
            if part.pair not in opened:
                return False
            opened.remove(part.pair)
    return not opened


def _of_range(piece: InlinePiece) -> InlinePiece:
    """A mark of an end of a range, such as that of a comment, as half of a pair; else the piece."""
    match = _RANGE.match(piece.raw) if piece.kind == "alone" else None
    if match is None:
        return piece
    return InlinePiece(
        "open" if match[2] == "Start" else "close", piece.raw, f"{match[1]} {match[3]}"
    )


def _raws(codes: _Codes) -> Iterator[str]:
    """The source of codes, of which some are lists of others; they may be nested deep."""
    waiting = [codes]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += reversed(part)
        else:
            yield part.raw


def _with_formats(pieces: list[InlinePiece], main: str) -> Iterator[InlinePiece]:
    """The pieces with codes around texts of another format than the main one."""
    number, current = 0, main
    for piece in pieces:
        wanted = piece.pair if piece.kind == "text" else main
        if wanted != current and current != main:
            yield InlinePiece("close", current, f"format {number}")
            current = main
        if wanted != current:
            number, current = number + 1, wanted
            yield InlinePiece("open", wanted, f"format {number}")
        yield InlinePiece("text", piece.raw) if piece.kind == "text" else piece
    if current != main:
        yield InlinePiece("close", current, f"format {number}")
