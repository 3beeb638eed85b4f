"""Inline Markdown: texts and codes (CommonMark, chapter 6, and what other programs add)."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from heedful.data.inline import InlinePiece

BREAK = r"(?:\\|(?<! ) {2,}+)\r?\n[ \t>]*"  # of a line, within a paragraph
# Lists of attributes (Pandoc, Python-Markdown, kramdown): ids, classes, keys with values, formats,
# and `-` for a heading without a number.
_ATTRIBUTE = (
    r"(?:-|[#.][^\s{}#.\"'`=<>][^\s{}#\"'`=<>]*|=[a-z]\w*"
    r"|[a-zA-Z_][\w:.-]*=(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s{}\"'<>]+))"
)
OWN_ATTRIBUTES = rf"\{{[ \t]*{_ATTRIBUTE}(?:[ \t]+{_ATTRIBUTE})*[ \t]*\}}"
ATTRIBUTES = re.compile(rf"(?:{OWN_ATTRIBUTES}|\{{:[^{{}}\n]*\}})")
_ESCAPE = re.compile(r"(?P<escape>\\[!-/:-@\[-`{-~])")
_IN_TEX = re.compile(r"\\[a-zA-Z]|[\^=]|_\w")
# Of inline Markdown (CommonMark, chapter 6), in the order in which they bind; also roles of MyST
# before code, footnotes and boxes of tasks (GitHub), and formulas (as in Pandoc).
_CODE = re.compile(
    r"(?P<code>(?:\{[\w:.+-]+\})?(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    # Of Hugo, Jinja and MDX; a name alone (`{{ name }}`) is a placeholder of the text.
    r"|(?P<template>\{\{(?=[<%]|[^{}]*[\\`*\[\]<])[^{}]*\}\}|\{/\*[^{}]*\*/\})"
    r"|(?P<auto><[a-zA-Z][\w+.-]*:[^<>\s]*>|<[^<>\s@]+@[^<>\s]+>|\bhttps?://[^\s<>()\[\]]+)"
    r"|(?P<tag></?[a-zA-Z][^<>]*>|\{%[^%]*%\})|(?P<comment><!--)"
    r"|(?P<image>!\[[^\[\]]*\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^\[\]]+\])"
    r"|!\[(?P<alt>[^\[\]]+)\](?:\[\])?(?![(\[]))"
    r"|(?P<emoji>(?<![\w:/]):(?:[a-z][\w+-]*|[+-]1):(?![\w:]))"  # of GitHub and MkDocs
    r"|(?P<note>\[\^[^\[\]\s]+\]:?|\A\[[ xX]\](?=\s)"
    r"|\[![a-zA-Z-]+ ?\[[^\[\]]*\]\([^()\s]*\)\])"  # what DocFX includes
    r"|(?P<wiki>!?\[\[[^\[\]\n]+\]\](?![(\[]))"
    rf"|(?P<attributes>{ATTRIBUTES.pattern})"
    # A `$` beside a letter is of a variable ($A/$B) or an amount (US$5), but `$n$th` is a formula.
    r"|(?P<formula>\$\$[^$]+\$\$|(?<![a-zA-Z0-9_$])\$(?![\s$])[^$\n]*(?<!\s)\$"
    r"(?=(?:st|nd|rd|th|s)\b|[^a-zA-Z0-9_${]|\Z))"
    # Escapes of brackets and parentheses, or formulas (TeX) if something is written as in these.
    r"|(?P<tex>\\\[(?:(?!\\\]).){1,2000}?\\\]|\\\((?:(?!\\\)).){1,2000}?\\\))"
    # Python-Markdown reads a label behind a blank or a line end as that of the text before it.
    r"|(?P<short>\[(?P<label>[^\[\]]+)(?<!\\)\](?:\[\])?(?![(\[])"
    r"(?=(?:(?:[ \t]|\r?\n[ \t>]*)\[(?P<behind>[^\[\]]+)\](?![(\[:]))?))"
    # Brackets in code, and those with a backslash, do not end a link. Its text has 2,000 characters
    # at most: every `[` without an end would be read to the end of the paragraph.
    r"|(?P<open>\[(?=(?:(?<!`)(?:`[^`]+`|``(?!`).+?(?<!`)``)(?!`)|\\[\[\]\\]|[^\[\]]"
    r"|\[[^\[\]]*\]){0,2000}+\][(\[]))"
    r"|(?P<close>\](?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\[[^\[\]]*\]))"
    r"|(?P<marks>\*\*\*|___|\*\*|__|~~|\*|(?<!\w)_|_(?!\w))"
    rf"|{_ESCAPE.pattern}"
    rf"|(?P<break>{BREAK})",
    re.DOTALL,
)
_WRAP = re.compile(r"(?:(?<![ \t])[ \t]++)?\r?\n[ \t>]*")  # with the marks of a quote
_MARK_END = re.compile(r"(?<![\s*])\*{1,3}|(?<![\s_])_{1,3}|(?<![\s~])~~")
_COMMENT = re.compile(r"(?P<comment><!--.*?-->)", re.DOTALL)
_TAG_NAME = re.compile(r"<(/?)([a-zA-Z][\w-]*)")


def _matches(raw: str, labels: Collection[str]) -> Iterator["re.Match[str]"]:
    """The codes of inline Markdown.

    Texts in brackets are links if they have a definition, and spans if they have attributes. These
    are directly behind another code.
    """
    place, end, comments_end = 0, -1, True
    while found := _CODE.search(raw, place):
        match: re.Match[str] | None = found
        if found.lastgroup == "comment":
            match = _COMMENT.match(raw, found.start()) if comments_end else None
            comments_end = match is not None  # else no later one ends either
        elif found.lastgroup == "tex" and not _IN_TEX.search(found[0]):
            match = _ESCAPE.match(raw, found.start())
        elif found["alt"] is not None:
            match = found if _has_definition(found["alt"], labels) else None
        elif found["label"] is not None and not _has_definition(found["label"], labels):
            is_link = _has_label_behind(found, labels) or ATTRIBUTES.match(raw, found.end())
            match = found if is_link else None
        elif found.lastgroup == "attributes":
            match = found if found.start() == end and not raw[end - 1].isspace() else None
        place = found.start() + 1 if match is None else _end_of(match, labels)
        if match is not None:
            end = place
            yield match


def _has_label_behind(short: "re.Match[str]", labels: Collection[str]) -> bool:
    """True for a text in brackets with a label of a link behind it, which is no label itself."""
    label, behind = short["label"], short["behind"]
    is_label = behind is not None and _has_definition(behind, labels)
    return is_label and not _has_definition(label, labels)


def _end_of(match: "re.Match[str]", labels: Collection[str]) -> int:
    """Where a code ends, including the label behind a text in brackets."""
    is_longer = match.lastgroup == "short" and _has_label_behind(match, labels)
    return match.end("behind") + 1 if is_longer else match.end()


def _has_definition(label: str, labels: Collection[str]) -> bool:
    from markdown_it.common.utils import normalizeReference

    return normalizeReference(label) in labels


def inline_pieces(raw: str, labels: Collection[str]) -> tuple[list[InlinePiece], list[int]]:
    """The texts and codes of inline Markdown, and their sizes in the source.

    Args:
        labels: of links that have a definition.
    """
    pieces: list[InlinePiece] = []
    sizes: list[int] = []
    place, opened = 0, list[str]()
    links, ends = 0, _last_ends(raw)

    def add(kind: str, text: str, size: int, pair: str = "") -> None:
        if pieces and (kind == "attributes" or kind == pieces[-1].kind == "text"):
            pieces[-1] = pieces[-1]._replace(raw=pieces[-1].raw + text)
            sizes[-1] += size
        elif size:
            pieces.append(InlinePiece(kind, text, pair))  # type: ignore[arg-type]
            sizes.append(size)

    for match in _matches(raw, labels):
        before = raw[place : match.start()]
        add("text", _unwrapped(before), len(before))
        kind, place = match.lastgroup or "", _end_of(match, labels)
        found = raw[match.start() : place]
        size = len(found)
        if kind == "escape":
            add("text", found[1], size)
        elif kind == "marks":
            for mark in _single_marks(found, place, opened, ends):
                if mark in opened:
                    opened.remove(mark)
                    add("close", mark, len(mark), mark)
                elif raw[place : place + 1].strip() and place < ends.get(mark, 0):
                    opened.append(mark)
                    add("open", mark, len(mark), mark)
                else:
                    add("text", mark, len(mark))
        elif kind == "short":  # its definition is still that of the source
            label = match["label"]
            inner = zip(*inline_pieces(label, ()), strict=True)
            add("open", "[", 1, "link")
            for piece, own_size in inner:
                add(piece.kind, piece.raw, own_size, piece.pair)
            end = f"][{label}]" if _has_definition(label, labels) else found[1 + len(label) :]
            add("close", end, size - 1 - len(label), "link")
        elif kind == "attributes":  # of the code before
            add("text" if pieces[-1].kind == "open" else kind, found, size)
        elif kind == "open":
            links += 1
            add("open", found, size, "link")
        elif kind == "close":
            add("close" if links else "alone", found, size, "link")
            links -= links > 0
        elif kind == "tag" and (tag := _TAG_NAME.match(found)) and not found.endswith("/>"):
            add("close" if tag[1] else "open", found, size, tag[2].lower())
        else:
            add("alone", found, size)
    rest = raw[place:]
    add("text", _unwrapped(rest), len(rest))
    return pieces, sizes


def _last_ends(raw: str) -> dict[str, int]:
    """For each mark of emphasis its last place behind a word or another mark."""
    ends: dict[str, int] = {}
    for match in _MARK_END.finditer(raw):
        run = match[0]
        for mark in (run, run[:1], run[:2]) if len(run) == 3 else (run,):
            ends[mark] = match.start()
    return ends


def _single_marks(
    run: str, place: int, opened: Sequence[str], ends: Mapping[str, int]
) -> Sequence[str]:
    """Three marks together as one or as two, in the order in which these are nested.

    Args:
        place: behind them.
        opened: the marks that are not closed yet.
    """
    if len(run) < 3 or run in opened:
        return [run]
    both = [run[:1], run[:2]]
    if closing := [mark for mark in reversed(opened) if mark in both]:
        return closing if len(closing) == 2 else sorted(both, key=lambda mark: mark != closing[0])
    return [run] if place < ends.get(run, 0) else sorted(both, key=lambda mark: -ends.get(mark, 0))


def _unwrapped(text: str) -> str:
    """A text with a blank for a line end and the marks of quotes and lists behind it."""
    return _WRAP.sub(" ", text)
