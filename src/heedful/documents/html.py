"""HTML (.html, .htm, .xhtml): the text of blocks, with tags inside lines as codes."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from html import escape, unescape
from typing import NamedTuple

from heedful.data.inline import InlinePiece
from heedful.data.language_tags import is_right_to_left, is_same_language, standard_tag
from heedful.documents.html_elements import BLOCKS, KEPT, VOID, KeptElement
from heedful.documents.spans import SpanDocument
from heedful.documents.unclosed_tags import with_other_halves
from heedful.errors import UserError

_FOREIGN = frozenset(["svg", "math"])  # which may end as XML does: `<svg/>`
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_LABELS = {
    label: encoding
    for encoding, labels in {
        "cp1252": "ascii us-ascii iso-8859-1 iso8859-1 iso88591 latin1 latin-1 l1 windows-1252"
        " x-cp1252 x-user-defined",
        "gb18030": "gb2312 gb_2312-80 gbk x-gbk chinese",
        "cp932": "shift_jis shift-jis sjis x-sjis ms_kanji",
        "cp949": "euc-kr ks_c_5601-1987 korean",
        "cp1254": "iso-8859-9 latin5",
        "cp874": "iso-8859-11 tis-620",
        "big5-hkscs": "big5",
    }.items()
    for label in labels.split()
}
_FREE = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_IS_XML = re.compile(r"\s*(?:<\?xml\s|(?:<![^>]*+>\s*+)*+<html\s[^>]*?xmlns)", re.IGNORECASE)
_XML = re.compile(rb"<\?xml[^>]*?encoding\s*=\s*[\"']([\w.:-]+)[\"']")
# As HTML's tokenizer reads them (WHATWG HTML, section 13.2.5): quotes have a meaning behind `=`; a
# tag or comment without an end goes to the end. No part of a page is scanned twice.
_TOKEN = re.compile(
    r"(?P<comment><!--.*?(?:-->|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z)|<\?[^>]*+(?:>|\Z))"
    r"|<(?P<slash>/?)(?P<name>[a-zA-Z][^\s/>]*+)"
    r"(?:[^>=]++|=\s*+(?:\"[^\"]*+\"|'[^']*+'|(?![\"'])[^\s>]*+))*+(?:>|.*\Z)"
    r"|<[!/][^>]*+(?:>|\Z)",
    re.DOTALL,
)
_END_TAG = re.compile(r"</(?=([^\s/>]+)[\s/>])")
_RAW = frozenset(["script", "style", "textarea", "title", "iframe", "xmp", "noembed", "noframes"])
_ATTRIBUTE = re.compile(
    r"(?P<name>[^\s/>=][^\s/>=]*+)(?:\s*+=\s*+(?P<value>\"[^\"]*\"|'[^']*'|[^\s>]*+))?"
)
# Shown, or read out.
_SHOWN = frozenset(["alt", "title", "placeholder", "label", "aria-label", "aria-description"])
_BUTTONS = ("submit", "button", "reset")
_DESCRIBES = re.compile(r"description|(?:og|twitter):(?:title|description|site_name)")  # of meta
_BLANKS = re.compile(r"[ \t\n\r\f]+")
_EDGES = re.compile(r"(?:\s|&nbsp;|&#160;|&#[xX][aA]0;)++")


class HtmlDocument(SpanDocument):
    """A page. Attributes but its language and direction are kept, and comments, scripts, styles and
    code."""

    _errors = "xmlcharrefreplace"

    def __init__(
        self, data: bytes, name: str, languages: tuple[str | None, str | None] = (None, None)
    ) -> None:
        declared = _declared(data)
        super().__init__(data, name, languages, declared or _guessed(data))
        if declared is None and self._file.encoding != "utf-8" and not self._file.bom:
            self.notes.append(
                f"{name} declares no charset and is not UTF-8: it is read as windows-1252"
            )

    def _find(self) -> None:
        is_xml = self.name.lower().endswith(".xhtml") or _IS_XML.match(self.text) is not None
        events = [*_events(self.text, is_xml)]
        ends = [place for place, _, _ in events[1:]] + [len(self.text)]
        found = _Runs(is_xml)
        self._root: tuple[int, int] | None = None  # the range of the tag <html>
        for (place, kind, tag), end in zip(events, ends, strict=False):
            raw = self.text[place:end]
            if tag == "html" and kind == "start" and self._root is None:
                self._root = place, end
            found.end_kept_before(kind, tag)
            if tag and found.kept is None:
                shown = sum(any(map(str.isalnum, value)) for value in _shown(tag, raw))
                self.skip("attributes that are shown, such as alt and title", shown)
            found.add(place, kind, tag, raw)
        if (kept := found.kept) is not None:
            if not kept.ends_with_page:
                line = self._line(kept.place)
                raise UserError(f"{self.name}, line {line}: <{kept.name}> is not closed; close it")
            found.end_kept()
        found.end(len(self.text))
        for pieces, start, sizes in found.runs:
            self._add_pieces(pieces, start, sizes)

    def _language_edits(self) -> list[tuple[int, int, str]]:
        """The language of the page, if it is the source's, becomes the target's; likewise the
        direction in which it is written, where they differ in that."""
        source, target = self.languages
        if self._root is None or target is None:
            return []
        first, end = self._root
        attributes = [*_attributes(self.text[first:end])]
        own = [
            one
            for one in attributes
            if one.name in ("lang", "xml:lang")
            and one.value
            and (source is None or is_same_language(one.value, source))
        ]
        if not own:
            return []
        edits = [(one.start, one.start + len(one.value), standard_tag(target)) for one in own]
        before, after = map(_direction, (own[0].value, target))
        known = next((one for one in attributes if one.name == "dir"), None)
        if known is not None and before != after and known.value.lower() == before:
            edits.append((known.start, known.start + len(known.value), after))
        elif known is None and before != after == "rtl":
            edits.append((own[0].end, own[0].end, ' dir="rtl"'))
        return [(first + start, first + stop, new) for start, stop, new in edits]

    def _written(self, text: str) -> str:
        return escape(text, quote=False)


def _direction(language: str) -> str:
    """The value of `dir` for a language."""
    return "rtl" if is_right_to_left(language) else "ltr"


def _declared(data: bytes) -> str | None:
    """The encoding that a page declares, as Python names it; a byte order mark goes before it.

    As browsers read labels (WHATWG Encoding, section 4.2): most old ones mean a larger encoding,
    and one that an ASCII declaration cannot be written in means UTF-8.
    """
    head = re.sub(rb"<!--.*?(?:-->|\Z)", b"", data[:4_096], flags=re.DOTALL)
    found = _XML.match(head) or _CHARSET.search(head)
    if found is None:
        return None
    label = found[1].decode().lower()
    if label.startswith(("utf-16", "utf-32", "utf16")):
        return "utf-8"
    encoding = _LABELS.get(label, label)
    return _windows_1252(data) if encoding == "cp1252" else encoding


def _guessed(data: bytes) -> str:
    """The encoding of a page that declares none: UTF-8, or what browsers take by default."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return _windows_1252(data)
    return "utf-8"


def _windows_1252(data: bytes) -> str:
    """Python's name of windows-1252; with one of its five free bytes only Latin-1 reads it."""
    return "latin-1" if _FREE.search(data) else "cp1252"


def _events(source: str, is_xml: bool) -> Iterator[tuple[int, str, str]]:
    """The place, kind and name of the tags, comments and texts of a page, in its order."""
    place = 0
    ends = _Ends(source)
    # Not by `finditer`: what looks like a tag in a script may go on beyond the script's end.
    while match := _TOKEN.search(source, place):
        if match.start() > place:
            yield place, "text", ""
        place = match.end()
        name = (match["name"] or "").lower()
        if not name:
            yield match.start(), "comment" if match["comment"] else "block", ""
        elif match["slash"]:
            yield match.start(), "end", name
        else:
            kind = _kind(match[0], name, is_xml)
            has_slash = match[0].endswith("/>")
            if has_slash and (kind == "kept" or name in _RAW) and ends.of(name, place) < 0:
                kind = "empty"  # as its author means it
            yield match.start(), kind, name
            if name in _RAW and kind != "empty":
                end = ends.of(name, place)
                end = len(source) if end < 0 else end
                if end > place:
                    yield place, "text", ""
                    place = end
    if place < len(source):
        yield place, "text", ""


class _Ends:
    """The places of end tags; a page is searched once for all names."""

    def __init__(self, source: str) -> None:
        self._source = source

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """The places of the end tags of each name, in order."""
        places: dict[str, list[int]] = {}
        for match in _END_TAG.finditer(self._source):
            places.setdefault(match[1].lower(), []).append(match.start())
        return places

    def of(self, name: str, place: int) -> int:
        """The first end tag of a name from a place; -1: there is none."""
        places = self._places.get(name, [])
        index = bisect_left(places, place)
        return places[index] if index < len(places) else -1


class _Attribute(NamedTuple):
    """An attribute of a tag.

    Attributes:
        name: in lower case.
        value: without quotes.
        start: of the value, in the tag.
        end: of the value and its quotes.
    """

    name: str
    value: str
    start: int
    end: int


def _attributes(tag: str) -> Iterator[_Attribute]:
    """The attributes of a start tag that have values."""
    if "=" not in tag:
        return
    name = re.match(r"<[^\s/>]*", tag)
    assert name is not None
    for match in _ATTRIBUTE.finditer(tag, name.end()):
        if (value := match["value"]) is not None:
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            inner = value[1:-1] if is_quoted else value
            start = match.start("value") + is_quoted
            yield _Attribute(match["name"].lower(), inner, start, match.end())


def _shown(name: str, tag: str) -> Iterator[str]:
    """The values of attributes that are shown, also of buttons and in results of a search."""
    values = {one.name: one.value for one in _attributes(tag)}
    yield from (value for key, value in values.items() if key in _SHOWN)
    if name == "input" and values.get("type", "").lower() in _BUTTONS:
        yield values.get("value", "")
    kind = values.get("name") or values.get("property", "")
    if name == "meta" and _DESCRIBES.fullmatch(kind.lower()):
        yield values.get("content", "")


def _kind(tag: str, name: str, is_xml: bool) -> str:
    """The kind of a start tag: `empty` has no end tag, `kept` begins text that stays as it is.

    In HTML a slash at the end of a tag has no meaning, but in SVG and MathML.
    """
    attributes = [*_attributes(tag)]
    if name in VOID:
        return "empty"
    if tag.endswith("/>") and (is_xml or name in _FOREIGN):
        last = attributes[-1] if attributes else None  # whose value, without quotes, may have it
        if last is None or last.start + len(last.value) < len(tag) - 1:
            return "empty"
    is_kept = name in KEPT or any(
        (one.name == "translate" and one.value.lower() == "no")
        or (one.name == "class" and "notranslate" in one.value.split())
        for one in attributes
    )
    return "kept" if is_kept else "start"


class _Runs:
    """Collects runs of events between block tags.

    Attributes:
        runs: the pieces of each run, where it begins, and their sizes.
        kept: the element that is kept, and has not ended.
    """

    def __init__(self, is_xml: bool) -> None:
        self.runs: list[tuple[list[InlinePiece], int, list[int]]] = []
        self.kept: KeptElement | None = None
        self._is_xml = is_xml
        self._raws: list[str] = []  # of the element that is kept
        self._start = 0
        self._pieces: list[InlinePiece] = []
        self._sizes: list[int] = []
        self._left_open: Counter[str] = Counter()  # tags without an end, by name
        self._num_lined = 0  # elements around, whose line breaks are shown

    def add(self, place: int, kind: str, name: str, raw: str) -> None:
        """Add an event with its source."""
        if not self._pieces:
            self._start = place
        if self.kept is not None:
            self.kept.add(kind, name)
            self._raws.append(raw)
            if self.kept.has_ended:
                self.end_kept()
        elif kind == "kept":
            self.kept, self._raws = KeptElement(name, place, self._is_xml), [raw]
            if name in BLOCKS:
                self.end(place)
            self._append(InlinePiece("alone", raw), raw)
        elif kind == "text":
            self._add_text(raw)
        elif kind != "block" and name not in BLOCKS:
            pair = "alone" if name in VOID else {"start": "open", "end": "close"}.get(kind)
            self._append(InlinePiece(pair or "alone", raw, name), raw)  # type: ignore[arg-type]
        else:
            self.end(place + len(raw))
            if name == "pre":
                self._num_lined = max(0, self._num_lined + {"start": 1, "end": -1}.get(kind, 0))

    def end_kept_before(self, kind: str, name: str) -> None:
        """End the element that is kept, if an event implies its end."""
        if self.kept is not None and self.kept.ends_before(kind, name):
            self.end_kept()

    def end_kept(self) -> None:
        """End the element that is kept."""
        whole = "".join(self._raws)
        self._pieces[-1], self._sizes[-1] = InlinePiece("alone", whole), len(whole)
        self.kept = None

    def end(self, place: int) -> None:
        """End a run; the next one begins at a place."""
        while self._pieces and self._pieces[-1].kind == "text" and self._pieces[-1].raw.isspace():
            self._pieces.pop()
            self._sizes.pop()
        if self._pieces:
            pieces, sizes = with_other_halves(self._pieces, self._sizes, self._left_open)
            self.runs.append((pieces, self._start, sizes))
        self._pieces, self._sizes, self._start = [], [], place

    def _append(self, piece: InlinePiece, raw: str) -> None:
        self._pieces.append(piece)
        self._sizes.append(len(raw))

    def _add_text(self, raw: str) -> None:
        """Append text; a piece's text has one blank for several, except in `pre`.

        Blanks around it are pieces of their own, which are kept at the edges of a run.
        """
        blanks = [*_EDGES.finditer(raw)]
        first = blanks[0].end() if blanks and blanks[0].start() == 0 else 0
        stop = blanks[-1].start() if blanks and blanks[-1].end() == len(raw) > first else len(raw)
        if not self._pieces:
            self._start += first
            raw, first, stop = raw[first:], 0, stop - first
        for part in (raw[:first], raw[first:stop], raw[stop:]):
            if part:
                text = unescape(part)
                text = text if self._num_lined else _BLANKS.sub(" ", text)
                self._append(InlinePiece("text", text), part)
