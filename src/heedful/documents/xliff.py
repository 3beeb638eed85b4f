"""XLIFF 1.2 (also of Trados, memoQ, Phrase) and 2.x: source and target of units, with their state.

Sources: OASIS XLIFF 1.2 (states of `target`, `state-qualifier`), XLIFF 2.1 (`state`, `subState`).
"""

from dataclasses import dataclass
from xml.sax.saxutils import quoteattr

from heedful.data.language_tags import is_same_language
from heedful.data.xliff_units import (
    is_locked,
    is_partial,
    is_unfinished,
    marked_segments,
    segment_definitions,
    segments_by_id,
    segments_of,
    target_text,
    text_between,
)
from heedful.data.xml_nodes import Node
from heedful.documents.segments import Document, Result, Segment
from heedful.documents.xml_source import XmlSource, segment_codes, xml_of, xml_text
from heedful.errors import UserError

_PREVIOUS = "previous translation"
_NOTES = ("needs review: ", "quality: ")
# Of a unit whose segments have several origins the first one counts.
_QUALIFIERS = {"model": "leveraged-mt", "memory": "exact-match", "source": None}
_ORIGINS = {"model": "mt", "memory": "tm", "source": "source"}  # of Trados


_Languages = tuple[str | None, str | None]


def _languages_of(file: Node) -> _Languages:
    """The languages of a file of XLIFF 1.2."""
    return file.attributes.get("source-language"), file.attributes.get("target-language")


def _agree(languages: _Languages, others: _Languages) -> bool:
    """True if two pairs of languages are not different ones, as far as they are known."""
    pairs = zip(languages, others, strict=True)
    return all(not a or not b or is_same_language(a, b) for a, b in pairs)


def _is_plural(node: Node) -> bool:
    """A group of the plural forms of a message of gettext, as Weblate and po2xliff write it."""
    return node.name == "group" and node.attributes.get("restype") == "x-gettext-plurals"


@dataclass
class XliffText:
    """A text of a unit: all of it, or a marked segment.

    Attributes:
        source: the `source`, or the mark in `seg-source`.
        target: the `target`, or the mark in it; None: it is missing.
        segment: None: it is locked, or has no text.
        is_locked: its translation stays as it is, or empty.
        before, after: the codes around the text of the segment.
    """

    source: Node
    target: Node | None
    segment: Segment | None = None
    is_locked: bool = False
    before: str = ""
    after: str = ""

    @property
    def result(self) -> Result | None:
        """The translation to write."""
        return None if self.segment is None else self.segment.result

    @property
    def is_translated(self) -> bool:
        """The written file has a translation of it, or it has no text."""
        has_no_text = self.segment is None and not self.is_locked
        return has_no_text or self.result is not None or bool(target_text(self.target))


@dataclass
class XliffUnit:
    """The texts of a unit with its elements.

    Attributes:
        holder: the `trans-unit`, or of XLIFF 2 the `segment`.
        unit: the `trans-unit`, or of XLIFF 2 the `unit`.
        marked: the element whose marks of segments get the translations; None: it is one text.
    """

    texts: list[XliffText]
    holder: Node
    unit: Node
    marked: Node | None

    @property
    def results(self) -> list[Result]:
        """The translations to write."""
        return [text.result for text in self.texts if text.result is not None]

    @property
    def is_replaced(self) -> bool:
        """All translations are new."""
        return all(text.segment is None or text.result is not None for text in self.texts)


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
        forms: dict[tuple[int, str], list[Segment]] = {}  # of plural messages, by their texts
        for unit, around in self._xml.found:
            if not self._is_2 and not any(node.start in self._files for node in around):
                self.skip("units of files in other languages")
                continue
            flags = [node.attributes.get("translate") for node in [*around, unit]]
            if next((flag for flag in reversed(flags) if flag), "yes") == "no":
                self.skip("units with translate=no")
                continue
            if is_locked(unit):
                self.skip("locked segments")
                continue
            before = len(self.segments)
            for holder in [unit] if not self._is_2 else unit.children:
                if holder.name in ("trans-unit", "segment"):
                    self._add(holder, unit)
            for node in filter(_is_plural, around):
                for segment in self.segments[before:]:
                    forms.setdefault((node.start, segment.text), []).append(segment)
        for segments in forms.values():
            for segment in segments:
                segment.is_of_forms = len(segments) > 1

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
        marks = marked_segments(holder, target)
        has_marks = any(translation is not None for _, translation in marks.values())
        # A target without these marks is the translation of all segments together.
        lacks_some = target is not None and is_partial(holder, target)
        is_finished = target is None or not (
            is_unfinished(holder, target) or (lacks_some and not has_marks)
        )
        translations = [one for _, one in marks.values()] if has_marks else [target]
        # Segments that are empty in a finished target are translated in others.
        has_all = is_finished and not lacks_some and any(map(target_text, translations))
        locked = {mid for mid, node in segment_definitions(holder).items() if is_locked(node)}
        texts = []
        for mid, (mark, translation) in (marks or {"": (source, target)}).items():
            text = XliffText(mark, translation, is_locked=mid in locked or is_locked(mark))
            texts.append(text)
            codes, before, after = segment_codes(self._xml.pieces(mark))
            if text.is_locked or not codes.text.strip():
                continue
            known = target_text(translation if has_marks else target)
            known = known or ("-" if has_all else "")
            text.segment = self.add(Segment(codes.text, mark.line, known, is_finished, codes))
            text.before, text.after = xml_of(before), xml_of(after)
        self.skip("locked segments", sum(text.is_locked for text in texts))
        between = text_between(holder.child("seg-source")) if marks else ""
        self.skip("texts between segments", any(map(str.isalnum, between)))
        if not any(text.segment or text.is_locked for text in texts):
            self.skip("units without text")
            return
        marked = holder.child("seg-source") if marks else None
        if target is not None and has_marks and None not in translations:
            is_moved = [*segments_by_id(target)] != [*marks]
            marked = target if is_moved or text_between(target).strip() else marked
        self._units.append(XliffUnit(texts, holder, unit, marked))

    def to_bytes(self) -> bytes:
        """See `Document.to_bytes`."""
        for unit in self._units:
            if unit.results:
                self._write(unit)
        kept = {unit.unit.start for unit in self._units if not unit.is_replaced}
        for node, prefix, lines in self._notes.values():
            self._write_unit_notes(node, prefix, lines, replaces=node.start not in kept)
        self._notes.clear()
        target = self.languages[1]
        if target is not None and any(unit.results for unit in self._units):
            holders = [self._xml.root] if self._is_2 else [*self._files.values()]
            name = "trgLang" if self._is_2 else "target-language"
            for node in holders:
                if name not in node.attributes:
                    self._xml.set_attributes(node, {name: target})
        return self._xml.to_bytes()

    def _write(self, unit: XliffUnit) -> None:
        source = unit.holder.child("source")
        assert source is not None
        prefix, indent = f"{source.prefix}:" if source.prefix else "", self._xml.indent_of(source)
        notes = [note for result in unit.results for note in result.notes]
        marks: dict[str, str | None] = {}
        if self._is_2:
            origin = unit.results[0].origin
            self._xml.set_attributes(
                unit.holder, {"state": "translated", "subState": f"heedful:{origin}"}
            )
        else:
            marks = self._new_state(unit)
            notes = self._new_notes(unit, notes)
        content = self._content(unit)
        end = self._write_target(unit, prefix, content, marks)
        draft = self._draft(unit, content)
        if self._is_2:
            notes += [f"{_PREVIOUS}: {draft.text.strip()}"] if draft else []
            self._notes.setdefault(unit.unit.start, (unit.unit, prefix, []))[2].extend(notes)
            return
        opened, closed = f'{indent}<{prefix}note from="heedful">', f"</{prefix}note>"
        self._xml.replace(end, end, "".join(f"{opened}{xml_text(n)}{closed}" for n in notes))
        if draft:
            old = f"<{prefix}target>{self._xml.inner(draft)}</{prefix}target>"
            new = f'<{prefix}alt-trans alttranstype="previous-version">{old}</{prefix}alt-trans>'
            self._xml.replace(end, end, f"{indent}{new}")

    def _new_state(self, unit: XliffUnit) -> dict[str, str | None]:
        """The attributes of a new target of XLIFF 1.2; the unit is not approved any more.

        Trados reads the states of segments in their definitions.
        """
        definitions = segment_definitions(unit.holder)
        for text in unit.texts:
            node = definitions.get(text.source.attributes.get("mid", ""))
            if node is not None and text.result is not None:
                origin = _ORIGINS[text.result.origin]
                state = {"conf": "Draft", "origin": origin, "origin-system": "heedful"}
                self._xml.set_attributes(node, {**state, "percent": None})
        if unit.holder.attributes.get("approved") == "yes":
            self._xml.set_attributes(unit.holder, {"approved": "no"})
        if not all(text.is_translated for text in unit.texts):
            return {"state": None, "state-qualifier": None}
        origins = {result.origin for result in unit.results}
        qualifier = next(name for origin, name in _QUALIFIERS.items() if origin in origins)
        return {"state": "needs-review-translation", "state-qualifier": qualifier}

    def _new_notes(self, unit: XliffUnit, notes: list[str]) -> list[str]:
        """The notes of XLIFF 1.2 that the unit does not have; those of translations that are
        replaced are removed."""
        old = [node for node in unit.holder.children if node.name == "note"]
        old = [node for node in old if node.attributes.get("from") == "heedful"]
        if not unit.is_replaced:
            known = {node.text for node in old}
            return [note for note in notes if note not in known]
        for node in old:
            self._xml.remove(node)
        return notes

    def _content(self, unit: XliffUnit) -> str:
        """The content of a new target."""
        if unit.marked is None:
            return self._translation(unit.texts[0])
        texts = {text.source.attributes["mid"]: text for text in unit.texts}
        parts, place = [], unit.marked.inner
        for mark in segments_of(unit.marked):
            text = texts[mark.attributes["mid"]]
            own = text.target or text.source
            if text.result is None and target_text(text.target):
                new = self._xml.raw(own.start, own.end)
            else:
                new = self._xml.element(own, self._translation(text) if text.is_translated else "")
            parts += [self._xml.raw(place, mark.start), new]
            place = mark.end
        return "".join([*parts, self._xml.raw(place, unit.marked.inner_end)])

    def _translation(self, text: XliffText) -> str:
        """The content of the translation of a text; of one without words it is the source."""
        if text.segment is None or text.result is None or text.result.text == text.segment.text:
            return self._xml.inner(text.source)
        assert text.segment.codes is not None
        restored = xml_of(text.segment.codes.restored(text.result.text))
        return f"{text.before}{restored}{text.after}"

    def _write_target(
        self, unit: XliffUnit, prefix: str, content: str, marks: dict[str, str | None]
    ) -> int:
        """Write a target with attributes; its end, or that of the element before a new one."""
        source, target = unit.holder.child("source"), unit.holder.child("target")
        assert source is not None
        if target is not None:
            self._xml.replace(target.start, target.end, self._xml.element(target, content, marks))
            return target.end
        given = {name: value for name, value in marks.items() if value is not None}
        shown = "".join(f" {name}={quoteattr(value)}" for name, value in given.items())
        new = f"<{prefix}target{shown}>{content}</{prefix}target>"
        previous = unit.holder.child("seg-source") or source
        self._xml.replace(previous.end, previous.end, f"{self._xml.indent_of(source)}{new}")
        return previous.end

    def _draft(self, unit: XliffUnit, content: str) -> Node | None:
        """The unfinished target that is replaced by other text, which may be a person's work."""
        source, target = unit.holder.child("source"), unit.holder.child("target")
        is_replaced = any(
            text.segment and text.result and text.segment.target and not text.segment.is_finished
            for text in unit.texts
        )
        if not is_replaced or target is None or source is None or not target.text.strip():
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
