"""XLIFF 1.2 and 2.x (.xliff, .xlf): source and target of units, with their state.

Sources: OASIS XLIFF 1.2 (states of `target`, `state-qualifier`), XLIFF 2.1 (`state`, `subState`).
"""

from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from heedful.data.language_tags import is_same_language
from heedful.data.xliff_units import is_partial, is_prepared, is_unfinished
from heedful.data.xml_nodes import Node
from heedful.documents.segments import Document, Result, Segment
from heedful.documents.xml_source import XmlSource, segment_codes, xml_of, xml_text
from heedful.errors import UserError

_PREVIOUS = "previous translation"
_NOTES = ("needs review: ", "quality: ")
_QUALIFIERS = {"model": "leveraged-mt", "memory": "exact-match", "source": None}


_Languages = tuple[str | None, str | None]


def _languages_of(file: Node) -> _Languages:
    """The languages of a file of XLIFF 1.2."""
    return file.attributes.get("source-language"), file.attributes.get("target-language")


def _agree(languages: _Languages, others: _Languages) -> bool:
    """True if two pairs of languages are not different ones, as far as they are known."""
    pairs = zip(languages, others, strict=True)
    return all(not a or not b or is_same_language(a, b) for a, b in pairs)


@dataclass
class XliffUnit:
    """A segment with its elements.

    Attributes:
        holder: the `trans-unit`, or of XLIFF 2 the `segment`.
        unit: the `trans-unit`, or of XLIFF 2 the `unit`.
    """

    segment: Segment
    holder: Node
    unit: Node
    before: str
    after: str


class XliffDocument(Document):
    """An XLIFF file. Translations are marked as those of a machine, to be reviewed.

    An unfinished translation that is replaced becomes an `alt-trans`, in XLIFF 2 a note.
    """

    keeps_targets = True

    def __init__(
        self, data: bytes, name: str, languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        super().__init__(name, languages)
        self._xml = XmlSource(data, name, {"trans-unit", "unit"})
        root = self._xml.root
        if root.name != "xliff":
            raise UserError(f"{name} is not XLIFF: its root is {root.name}; name another file")
        self._is_2 = root.attributes.get("version", "1.2").startswith("2")
        self._units: list[XliffUnit] = []
        self._files: dict[int, Node] = {}
        self._notes: dict[int, tuple[Node, str, list[str]]] = {}  # of the units of XLIFF 2
        self._settle()
        for unit, around in self._xml.found:
            if not self._is_2 and not any(node.start in self._files for node in around):
                self.skip("units of files in other languages")
                continue
            flags = [node.attributes.get("translate") for node in [*around, unit]]
            if next((flag for flag in reversed(flags) if flag), "yes") == "no":
                self.skip("units with translate=no")
                continue
            for holder in [unit] if not self._is_2 else unit.children:
                if holder.name in ("trans-unit", "segment"):
                    self._add(holder, unit)

    def _settle(self) -> None:
        """Settle the languages: of XLIFF 1.2 those of the first file that has the given ones; its
        other files are left out if they have others."""
        if self._is_2:
            attributes = self._xml.root.attributes
            self.settle_languages((attributes.get("srcLang"), attributes.get("trgLang")))
            return
        files = [node for _, around in self._xml.found for node in around if node.name == "file"]
        pairs = {node.start: (node, _languages_of(node)) for node in files}
        for _, own in pairs.values():
            if _agree(self.languages, own):
                self.settle_languages(own)
                break
        else:
            self.settle_languages(next(iter(pairs.values()))[1] if pairs else (None, None))
        self._files = {
            start: node for start, (node, own) in pairs.items() if _agree(self.languages, own)
        }

    def _add(self, holder: Node, unit: Node) -> None:
        source, target = holder.child("source"), holder.child("target")
        if source is None:
            raise UserError(
                f"{self.name}, line {holder.line}: a {holder.name} without source; correct it"
            )
        codes, before, after = segment_codes(self._xml.pieces(source))
        if not codes.text.strip():
            self.skip("units without text")
            return
        text, is_finished = "", True
        if target is not None:
            if not is_prepared(target):  # codes alone are a translation too
                text = target.text.strip() or ("-" if target.children else "")
            is_finished = not is_unfinished(holder, target) and not is_partial(holder, target)
        segment = Segment(codes.text, source.line, text, is_finished, codes)
        self._units.append(
            XliffUnit(self.add(segment), holder, unit, xml_of(before), xml_of(after))
        )

    def to_bytes(self) -> bytes:
        """See `Document.to_bytes`."""
        for unit in self._units:
            if unit.segment.result is not None:
                self._write(unit, unit.segment.result)
        kept = {unit.unit.start for unit in self._units if unit.segment.result is None}
        for node, prefix, lines in self._notes.values():
            self._write_unit_notes(node, prefix, lines, replaces=node.start not in kept)
        self._notes.clear()
        target = self.languages[1]
        if target is not None and any(unit.segment.result for unit in self._units):
            holders = [self._xml.root] if self._is_2 else [*self._files.values()]
            name = "trgLang" if self._is_2 else "target-language"
            for node in holders:
                if name not in node.attributes:
                    self._xml.set_attributes(node, {name: target})
        return self._xml.to_bytes()

    def _write(self, unit: XliffUnit, result: Result) -> None:
        holder, segment = unit.holder, unit.segment
        source, target = holder.child("source"), holder.child("target")
        assert source is not None
        assert segment.codes is not None
        if result.text == segment.text:
            content = self._xml.inner(source)
        else:
            restored = xml_of(segment.codes.restored(result.text))
            content = f"{unit.before}{restored}{unit.after}"
        prefix = f"{source.prefix}:" if source.prefix else ""
        marks: dict[str, str | None] = {}
        if not self._is_2:
            marks = {
                "state": "needs-review-translation",
                "state-qualifier": _QUALIFIERS[result.origin],
            }
            for note in holder.children:  # of an earlier translation
                if note.name == "note" and note.attributes.get("from") == "heedful":
                    self._xml.remove(note)
            if holder.attributes.get("approved") == "yes":
                self._xml.set_attributes(holder, {"approved": "no"})
        else:
            self._xml.set_attributes(
                holder, {"state": "translated", "subState": f"heedful:{result.origin}"}
            )
        if target is None:
            given = {name: value for name, value in marks.items() if value is not None}
            shown = "".join(f" {name}={quoteattr(value)}" for name, value in given.items())
            new = f"<{prefix}target{shown}>{content}</{prefix}target>"
            previous = holder.child("seg-source") or source
            self._xml.replace(previous.end, previous.end, f"{self._xml.indent_of(source)}{new}")
            end = previous.end
        else:
            tag = self._xml.start_tag(target, marks)
            tag = tag.removesuffix("/>").rstrip() + ">" if target.is_empty_tag else tag
            new = f"{tag}{content}</{prefix}target>"
            self._xml.replace(target.start, target.end, new)
            end = target.end
        draft = self._draft(unit, content)
        previous_notes = [f"{_PREVIOUS}: {draft.text.strip()}"] if draft and self._is_2 else []
        notes = [*result.notes, *previous_notes]
        if self._is_2:
            self._notes.setdefault(unit.unit.start, (unit.unit, prefix, []))[2].extend(notes)
        else:
            indent = self._xml.indent_of(source)
            opened, closed = f'{indent}<{prefix}note from="heedful">', f"</{prefix}note>"
            self._xml.replace(end, end, "".join(f"{opened}{xml_text(n)}{closed}" for n in notes))
        if draft and not self._is_2:
            old = f"<{prefix}target>{self._xml.inner(draft)}</{prefix}target>"
            new = f'<{prefix}alt-trans alttranstype="previous-version">{old}</{prefix}alt-trans>'
            self._xml.replace(end, end, f"{self._xml.indent_of(source)}{new}")

    def _draft(self, unit: XliffUnit, content: str) -> Node | None:
        """The unfinished target that is replaced by other text, which may be a person's work."""
        source, target = unit.holder.child("source"), unit.holder.child("target")
        if unit.segment.is_finished or target is None or source is None or not target.text.strip():
            return None
        others = [node.child("target") for node in unit.holder.children if node.name == "alt-trans"]
        others += [source, unit.holder.child("seg-source")]
        known = {self._xml.inner(other).strip() for other in others if other is not None}
        known.add(content.strip())
        return None if self._xml.inner(target).strip() in known else target

    def _write_unit_notes(
        self, unit: Node, prefix: str, lines: list[str], *, replaces: bool
    ) -> None:
        """Write notes on the translations of a unit of XLIFF 2, which has one element of notes.

        Args:
            replaces: all of its translations are new: earlier notes on them are left out.
        """
        known = unit.child("notes")
        before = [] if known is None else known.children
        old: list[Node] = []
        for note in before:
            if note.attributes.get("category") != "heedful":
                continue
            if note.text in lines:
                lines.remove(note.text)  # it stays where it is
            elif replaces and note.text.startswith(_NOTES):
                old.append(note)
        notes = "".join(
            f'<{prefix}note category="heedful" appliesTo="target">{xml_text(line)}</{prefix}note>'
            for line in lines
        )
        if known is not None and not notes and len(old) == len(before) > 0:
            self._xml.remove(known)  # it may not be empty
            return
        for note in old:
            self._xml.remove(note)
        if not notes:
            return
        if known is not None and known.is_empty_tag:
            self._xml.set_inner(known, notes)
            return
        if known is not None:
            self._xml.replace(known.inner_end, known.inner_end, notes)
            return
        # In a unit the notes are before the data of codes and the segments.
        names = ("originalData", "segment", "ignorable")
        first = next(node for node in unit.children if node.name in names)
        block = f"<{prefix}notes>{notes}</{prefix}notes>"
        self._xml.replace(first.start, first.start, f"{block}{self._xml.indent_of(first)}")
