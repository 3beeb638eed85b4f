"""Translation memories (.tmx 1.4): units of which a translation is missing."""

from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from heedful.data.language_tags import standard_tag
from heedful.data.tmx_units import MACHINE, ORIGIN, is_origin, variant
from heedful.data.xml_nodes import Node
from heedful.documents.segments import Document, Segment
from heedful.documents.xml_source import XmlSource, segment_codes, xml_of, xml_text
from heedful.errors import UserError, format_names

_NOTES = ("needs review: ", "quality: ")


@dataclass
class TmxUnit:
    """A segment with the elements of its languages."""

    segment: Segment
    source: Node
    target: Node | None
    before: str
    after: str


class TmxDocument(Document):
    """A memory whose units are translated from one of its languages into another one."""

    keeps_targets = True

    def __init__(
        self, data: bytes, name: str, languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        super().__init__(name)
        self._xml = XmlSource(data, name, {"tu", "header"})
        if self._xml.root.name != "tmx":
            raise UserError(f"{name} is not TMX: its root is {self._xml.root.name}")
        source, target = languages
        nodes = [node for node, _ in self._xml.found]
        header = next((node for node in nodes if node.name == "header"), None)
        if source is None and header is not None:
            source = header.attributes.get("srclang")
            source = None if source == "*all*" else source
        if source is None or target is None:
            side = "source_language" if source is None else "target_language"
            raise UserError(f"{name} has units of several languages; give {side}=CODE")
        self.languages = source, target
        self._units: list[TmxUnit] = []
        for node in nodes:
            if node.name == "tu":
                self._add(node, source, target)
        if not self._units and len(nodes) > 1:
            tags = {tuv.language or "?" for node in nodes for tuv in node.children}
            raise UserError(
                f"{name} has no unit in {source}; it has {format_names(sorted(tags), str)}"
            )

    def _add(self, unit: Node, source: str, target: str) -> None:
        first = variant(unit, source)
        segment = None if first is None else first.child("seg")
        if first is None or segment is None:
            self.skip("units without the source language")
            return
        other = variant(unit, target)
        if other is first:  # of two varieties of a language the unit has one
            other = None
        existing = other.child("seg") if other is not None else None
        codes, before, after = segment_codes(self._xml.pieces(segment))
        if not codes.text.strip():
            self.skip("units without text")
            return
        text = ""
        if existing is not None:  # codes alone are a translation too
            text = existing.text.strip() or ("-" if existing.children else "")
        added = self.add(Segment(codes.text, segment.line, text, codes=codes))
        self._units.append(TmxUnit(added, first, other, xml_of(before), xml_of(after)))

    def to_bytes(self) -> bytes:
        """See `Document.to_bytes`."""
        for unit in self._units:
            result, codes = unit.segment.result, unit.segment.codes
            if result is None:
                continue
            source = unit.source.child("seg")
            assert source is not None
            assert codes is not None
            if result.text == unit.segment.text:
                content = self._xml.inner(source)
            else:
                content = f"{unit.before}{xml_of(codes.restored(result.text))}{unit.after}"
            notes = "".join(f"<note>{xml_text(line)}</note>" for line in result.notes)
            origin = f'<prop type="{ORIGIN}">{MACHINE}</prop>'
            marks = origin if result.origin == "model" else ""
            self._write(unit, f"{notes}{marks}", content)
        return self._xml.to_bytes()

    def _write(self, unit: TmxUnit, marks: str, content: str) -> None:
        segment = unit.target.child("seg") if unit.target is not None else None
        if unit.target is None:
            tag = quoteattr(standard_tag(self.languages[1] or ""))
            new = f"<tuv xml:lang={tag}>{marks}<seg>{content}</seg></tuv>"
            indent = self._xml.indent_of(unit.source)
            self._xml.replace(unit.source.end, unit.source.end, f"{indent}{new}")
        elif segment is None:
            self._xml.set_inner(unit.target, f"{marks}<seg>{content}</seg>")
        else:
            for node in filter(_is_mark, unit.target.children):
                self._xml.remove(node)
            if marks:
                self._xml.replace(segment.start, segment.start, marks)
            self._xml.set_inner(segment, content)


def _is_mark(node: Node) -> bool:
    """An element about the translation that is replaced: its origin, reasons for a review."""
    return is_origin(node) or (node.name == "note" and node.text.startswith(_NOTES))
