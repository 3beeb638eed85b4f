"""Pairs of the files of translators: TMX, XLIFF, PO, MO, and subtitles beside each other."""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import TypeAlias

from heedful import extras
from heedful.data import tmx_units, xliff_units
from heedful.data.cues import STYLE, Cue, aligned_by_time, read_cues
from heedful.data.inline import tagged
from heedful.data.language_tags import is_same_language
from heedful.data.po_entries import (
    Entry,
    PluralRule,
    charset_of,
    header_fields,
    plural_rule,
    read_entries,
)
from heedful.data.text_files import read_bytes, without_compression
from heedful.data.unit_blocks import FileRow
from heedful.data.xml_inline import pieces_of
from heedful.data.xml_nodes import Node, NodeReader
from heedful.errors import UserError, format_names
from heedful.files import is_charset, line_of_byte

Languages: TypeAlias = tuple[str | None, str | None]  # of sources and targets
PAIR_FORMATS = ("tmx", "xliff", "po", "mo")
BY_MACHINE = "machine translations"  # that no person has confirmed: why they are no rows
LARGEST_CATALOGUE = 1 << 28  # bytes; catalogues and subtitles are read whole


def pair_units(format: str, path: Path, languages: Mapping[str, str]) -> Iterator[FileRow]:
    """The pairs of a TMX, XLIFF, PO or MO file.

    Args:
        format: one of `PAIR_FORMATS`.
        languages: of `src` and `tgt`; the one that is missing is the file's, if it says it.

    Raises:
        UserError: a broken file; other languages than these, with those that it has.
    """
    read = {"tmx": _tmx, "xliff": _xliff, "po": _po, "mo": _mo}[format]
    return read(path, languages.get("src"), languages.get("tgt"))


class _Parts:
    """The bytes of a file in parts; `num_bytes` are those of the file since it was last taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for data, num_bytes in read_bytes(self._path):
            self._num_bytes += num_bytes
            yield data

    def take_bytes(self) -> int:
        """The bytes of the file that were read since the last call."""
        count, self._num_bytes = self._num_bytes, 0
        return count


def _tmx(path: Path, src: str | None, tgt: str | None) -> Iterator[FileRow]:
    parts, reader = _Parts(path), NodeReader(str(path), {"tu", "header"})
    found: Counter[str] = Counter()
    num_pairs = 0
    header = None
    for node, _ in reader.read(parts):
        if node.name == "header":
            header = node.attributes.get("srclang")
            continue
        if src is None or tgt is None:
            src, tgt = _tmx_languages(path, node, src, tgt, header)
        found.update([tuv.language or "?" for tuv in node.children if tuv.name == "tuv"])
        found_sides = (tmx_units.variant(node, language) for language in (src, tgt))
        sides = [side for side in found_sides if side is not None]
        segments = [side.child("seg") for side in sides]
        if len(sides) < 2 or sides[0] is sides[1] or None in segments:
            yield FileRow(node.line, (), f"without {src} and {tgt}", parts.take_bytes())
            continue
        num_pairs += 1
        if tmx_units.is_by_machine(node, sides):
            yield FileRow(node.line, (), BY_MACHINE, parts.take_bytes())
            continue
        texts = _texts(*(segment for segment in segments if segment is not None))
        yield FileRow(node.line, texts, "", parts.take_bytes())
    root = reader.root.name if reader.root else ""
    if root != "tmx":
        raise UserError(f"{path} is not TMX: its root is {root}; name another file")
    if not num_pairs and found:
        listed = format_names([tag for tag, _ in found.most_common()], str)
        raise UserError(
            f"{path} has no unit in {src} and {tgt}, it has {listed}; set data.src_language and"
            " data.tgt_language to two of them"
        )


def _tmx_languages(
    path: Path, node: Node, src: str | None, tgt: str | None, header: str | None
) -> tuple[str, str]:
    """The languages of a memory that has two: those of its first unit, the header's first."""
    tags = [child.language for child in node.children if child.name == "tuv" and child.language]
    first = src or (header if header != "*all*" else None)
    if src is None and tgt is not None and len(tags) == 2:
        first = next((tag for tag in tags if not is_same_language(tag, tgt)), first)
    others = [tag for tag in tags if first and not is_same_language(tag, first)]
    if first is None or len(tags) != 2 or (tgt is None and len(others) != 1):
        raise UserError(
            f"{path} has units in {format_names(tags, str)}; set data.src_language and"
            " data.tgt_language to two of them"
        )
    return first, tgt or others[0]


def _xliff(path: Path, src: str | None, tgt: str | None) -> Iterator[FileRow]:
    parts, reader = _Parts(path), NodeReader(str(path), {"trans-unit", "segment"})
    is_swapped: dict[Languages, bool | None] = {}  # by languages: a file may hold several
    for node, around in reader.read(parts):
        own = _xliff_languages(around)
        if own not in is_swapped:
            is_swapped[own] = _is_swapped(own, (src, tgt))
            if is_swapped[own] is not None:  # a language that is not given is that of the first
                first, second = own[::-1] if is_swapped[own] else own
                src, tgt = src or first, tgt or second
        num_bytes = parts.take_bytes()
        source, target = node.child("source"), node.child("target")
        if is_swapped[own] is None:
            yield FileRow(node.line, (), "in other languages", num_bytes)
            continue
        if source is None or target is None or not target.text.strip():
            yield FileRow(node.line, (), "without a translation", num_bytes)
            continue
        is_unfinished = xliff_units.is_unfinished(node, target)
        pairs = [] if is_unfinished else xliff_units.segment_pairs(node, source, target)
        if not pairs:
            yield FileRow(node.line, (), "unfinished", num_bytes)
        for segment, translation in pairs:
            if translation is None or not translation.text.strip():
                yield FileRow(node.line, (), "without a translation", num_bytes)
            elif xliff_units.is_by_machine(node, target, segment):
                yield FileRow(node.line, (), BY_MACHINE, num_bytes)
            else:
                texts = _texts(segment, translation)
                yield FileRow(node.line, texts[::-1] if is_swapped[own] else texts, "", num_bytes)
            num_bytes = 0
    if reader.root is None or reader.root.name != "xliff":
        root = reader.root.name if reader.root else ""
        raise UserError(f"{path} is not XLIFF: its root is {root}; name another file")
    if is_swapped and all(value is None for value in is_swapped.values()):
        raise _other_languages(path, next(iter(is_swapped)), (src, tgt))


def _xliff_languages(around: Sequence[Node]) -> Languages:
    attributes = {name: value for node in around for name, value in node.attributes.items()}
    source = attributes.get("srcLang") or attributes.get("source-language")
    return source, attributes.get("trgLang") or attributes.get("target-language")


def _is_swapped(own: Languages, wanted: Languages) -> bool | None:
    """True for texts from the target into the source language; None: they are of others."""

    def fits(wanted: Languages) -> bool:
        pairs = zip(own, wanted, strict=True)
        return all(a is None or b is None or is_same_language(a, b) for a, b in pairs)

    return False if fits(wanted) else True if fits(wanted[::-1]) else None


def _is_catalogue_swapped(path: Path, language: str | None, wanted: Languages) -> bool:
    """`_is_swapped` for a catalogue, which names the language of its translations alone.

    Raises:
        UserError: its languages are others.
    """
    own = None, language or None
    is_swapped = _is_swapped(own, wanted)
    if is_swapped is None:
        raise _other_languages(path, own, wanted)
    return is_swapped


def _other_languages(path: Path, own: Languages, wanted: Languages) -> UserError:
    listed = f"{own[0] or 'an unnamed language'} to {own[1] or 'an unnamed language'}"
    return UserError(
        f"{path} is from {listed}, not from {wanted[0]} to {wanted[1]}; leave it out, or set"
        " data.src_language and data.tgt_language to its languages"
    )


def _texts(source: Node, target: Node) -> tuple[str, str]:
    """The texts of a segment and of its translation, with equal tags for equal codes."""
    tagged_source = tagged(pieces_of(source))
    return tagged_source.text, tagged(pieces_of(target), tagged_source).text


def _whole(path: Path) -> bytes:
    data = bytearray()
    for part, _ in read_bytes(path):
        data += part
        if len(data) > LARGEST_CATALOGUE:
            raise UserError(f"{path} is larger than {LARGEST_CATALOGUE >> 20} MiB; split it")
    return bytes(data)


def _decoded(path: Path, data: bytes, encoding: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    if not is_charset(encoding):
        raise UserError(f"{path} declares the charset {encoding[:40]}, which is unknown")
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        line = line_of_byte(data, getattr(error, "start", 0), encoding)
        raise UserError(
            f"{path}, line {line}: not {encoding}; correct its charset, or convert it to UTF-8"
        ) from None


def _po(path: Path, src: str | None, tgt: str | None) -> Iterator[FileRow]:
    data = _whole(path)
    text = _decoded(path, data, charset_of(data, str(path)) or "utf-8")
    entries, num_obsolete = read_entries(text.split("\n"), str(path))
    header = next((entry.texts["msgstr"] for entry in entries if entry.is_header), "")
    fields = dict(header_fields(header))
    is_swapped = _is_catalogue_swapped(path, fields.get("Language"), (src, tgt))
    rule, num_bytes = plural_rule(fields), len(data) // max(len(entries), 1)
    for entry in entries:
        if not entry.is_header:
            yield from _entry_units(entry, rule, is_swapped, num_bytes)
    for _ in range(num_obsolete):
        yield FileRow(1, (), "obsolete")


def _entry_units(
    entry: Entry, rule: PluralRule, is_swapped: bool, num_bytes: int
) -> Iterator[FileRow]:
    line = entry.lines["msgid"][0] + 1
    for form, target in sorted(entry.translations().items()):
        source = entry.source_of(form, rule)
        reason = "without a translation" if not target else "fuzzy" if entry.is_fuzzy else ""
        texts = (target, source) if is_swapped else (source, target)
        yield FileRow(line, () if reason else texts, reason, num_bytes)
        num_bytes = 0


def _mo(path: Path, src: str | None, tgt: str | None) -> Iterator[FileRow]:
    extras.require("documents", f"{path}, a compiled catalogue,")
    import polib

    if path != without_compression(path):
        raise UserError(f"{path} is a packed .mo file; unpack it")
    try:
        catalogue = polib.mofile(str(path))
    except (OSError, ValueError, IndexError, LookupError, struct.error, MemoryError) as error:
        reason = str(error).replace("\n", " ") or type(error).__name__
        raise UserError(f"{path} is not a compiled catalogue, or damaged: {reason}") from None
    language = catalogue.metadata.get("Language")
    is_swapped = _is_catalogue_swapped(path, language, (src, tgt))
    rule = plural_rule(catalogue.metadata)
    size = path.stat().st_size // max(len(catalogue), 1)
    for number, entry in enumerate(catalogue, 1):
        plural = entry.msgid_plural
        forms = entry.msgstr_plural if plural else {0: entry.msgstr}
        for form, target in sorted(forms.items()):
            source = rule.source_of(form, entry.msgid, plural) if plural else entry.msgid
            reason = "" if target else "without a translation"
            texts = (target, source) if is_swapped else (source, target)
            yield FileRow(number, () if reason else texts, reason, size)


def subtitle_units(paths: Sequence[Path]) -> Iterator[FileRow]:
    """The pairs of two files of subtitles: cues that are shown at the same time."""
    texts = [_decoded(path, _whole(path), "utf-8") for path in paths]
    files = [read_cues(text, str(path)) for text, path in zip(texts, paths, strict=True)]
    sides = [cues for cues, _ in files]
    for cues in sides:
        cues.sort(key=lambda cue: (cue.begin, cue.end))
    groups = aligned_by_time(*sides)
    size = sum(path.stat().st_size for path in paths) // max(len(groups), 1)
    for ranges in groups:
        found = [
            " ".join(_cue_text(text, cues[index], path) for index in indices)
            for text, cues, indices, path in zip(texts, sides, ranges, paths, strict=True)
        ]
        yield FileRow(sides[0][ranges[0][0]].line, tuple(found), "", size)
    for side, cues in enumerate(sides):
        used = sum(len(group[side]) for group in groups)
        for _ in range(len(cues) - used):
            yield FileRow(1, (), "cues without a partner")
    for _, broken in files:
        for line in broken:
            yield FileRow(line, (), "cues with broken times")


def _cue_text(text: str, cue: Cue, path: Path) -> str:
    """The text of a cue in one line, without styles; WebVTT has entities as HTML."""
    plain = STYLE.sub("", text[cue.start : cue.stop])
    return " ".join((unescape(plain) if path.name.lower().endswith(".vtt") else plain).split())
