"""Markdown (.md): paragraphs, headings, items of lists and cells of tables, by markdown-it-py.

Code, front matter, HTML blocks, definitions of links and lists of attributes are kept.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from heedful import extras
from heedful.data.inline import InlinePiece
from heedful.documents.emphasis import MARKS, with_emphasis
from heedful.documents.markdown_blocks import FRONT_MATTER, HEAD, LINE_END, blocks_of_extensions
from heedful.documents.markdown_inline import ATTRIBUTES, BREAK, OWN_ATTRIBUTES, inline_pieces
from heedful.documents.spans import Span, SpanDocument

# At the end of a text, and of a heading or a cell: only there with a colon (`{:s}` is a
# placeholder), behind closing marks of the heading, or behind a letter.
_TEXT_ATTRIBUTES = re.compile(rf"(?:\A|(?<=\S)[ \t]+){OWN_ATTRIBUTES}\Z")
_LINE_ATTRIBUTES = re.compile(
    rf"(?:\A|(?<=\S)[ \t]+(?:#+[ \t]+)?|(?<=[^\W_])){ATTRIBUTES.pattern}\Z"
)
_ITEM_ATTRIBUTES = re.compile(r"\{:[^{}\n]*\}[ \t]+")  # at the beginning of an item (kramdown)
# Marks around a text, with the character behind them.
_LAST_MARKS, _FIRST_MARKS = re.compile(r"[^*_~]?[*_~]*\Z"), re.compile(r"\A[*_~]*[^*_~]?")
_EDGE = 12  # characters around a text that are read for its marks
# Of HTML without a text: what begins it, the whole of it, and tags.
_HIDDEN_START = re.compile(r"<!--|<(?:script|style)\b", re.IGNORECASE)
_HIDDEN = re.compile(r"<!--.*?-->|<(script|style)\b.*?</\1>", re.DOTALL | re.IGNORECASE)
_ANY_TAG = re.compile(r"<[^<>]*>")
_ALTERNATIVE = re.compile(r"!\[[^\[\]]*\w")  # of an image, with words
# Before the bar is the page (Obsidian) or its label (GitHub).
_WIKI_LABEL = re.compile(r"!?\[\[[^\[\]|]*\|")
# What would begin a block other than a paragraph.
_BLOCK_START = re.compile(
    r"(?=[-+*](?:\s|\Z)|#{1,6}(?:\s|\Z)|>|=+\s*\Z|(?:[-*_]\s*){3,}\Z|:|~~~|```|\|)"
    r"|(?=\d{1,9}[.)](?:\s|\Z))"
)
_DEEPEST = 20  # indented blocks within each other
_TABLE_CELL = ("th_open", "td_open")
# Lines of extensions: of admonitions and directives, of formulas, of templates, of attributes, of
# tables of contents, of names of places in MyST, of abbreviations, and of code in MDX. They are
# kept. A tag of a template may end on another line.
_APART = re.compile(
    rf"{HEAD}"
    r"|:::|\$\$[^$]*+(?:\$\$)?\s*\Z"
    r"|(?:(?:\{\{[^{}]*\}\}|\{%(?:(?!%\}).)*%\})\s*)+\Z|\{%(?!.*%\})"
    rf"|(?:{ATTRIBUTES.pattern}\s*)+\Z"
    r"|(?i:\[TOC\]|\[\[_?TOC_?\]\]|\([^\s()]+\)=)\s*\Z|\*\[[^\[\]]+\]:"
    r"|import\s+(?:[\w*{},\s]+?\s+from\s+)?[\"'][^\"']+[\"'];?\s*\Z"
    r"|export\s+(?:const|let)\s+\w+\s*=|export\s+(?:default\s+)?function\b[\w\s]*\("
)
# The first line of an alert (GitHub) or a callout (Obsidian), which may have a title behind it.
_ALERT = re.compile(r"\[!\w[^\[\]]*\][+-]?(?:[ \t]+|\Z)")
_TEXT_START = re.compile(r"\[\^[^\[\]\s]+\]:|: ")  # of a footnote, or of a definition
_DEFINITION = re.compile(r":[ \t]+(?=\S)")


class MarkdownDocument(SpanDocument):
    """A page. A paragraph is written as one line, where its translation is another text."""

    def _find(self) -> None:
        extras.require("documents", "Markdown")
        from markdown_it import MarkdownIt

        self._cells: set[int] = set()  # where the texts of cells start
        front = FRONT_MATTER.match(self.text)
        ends = (end.end() for end in LINE_END.finditer(self.text))
        self._line_starts = [0, *ends]  # as the parser counts lines
        first_line = self._line(front.end()) - 1 if front else 0
        body = self.text[front.end() if front else 0 :]
        parser = MarkdownIt("commonmark").enable("table")
        # `parse` is for blocks alone here: their content is in `content` of inline tokens.
        parser.core.ruler.disable("inline")
        self._add_lines(LINE_END.split(body), first_line, parser, {})
        self._spans.sort(key=lambda span: span.start)
        self.segments = [span.segment for span in self._spans]

    def _add_lines(
        self, lines: list[str], first_line: int, parser: Any, env: dict[str, Any], depth: int = 0
    ) -> None:
        """Add the texts of lines, and those of the indented blocks in them.

        Args:
            first_line: the number of the first one in the file, from 0.
            env: of the parser, with the definitions of links found so far.
            depth: of the blocks around the lines.
        """
        blocks = blocks_of_extensions(lines) if depth < _DEEPEST else []
        outer = [*lines]
        for block in blocks:
            outer[block.start : block.stop] = [""] * (block.stop - block.start)
        self._add_blocks(parser.parse("\n".join(outer), env), env, first_line)
        for block in blocks:
            self._add_lines(block.lines, first_line + block.start, parser, env, depth + 1)

    def _add_blocks(self, tokens: Sequence[Any], env: dict[str, Any], first_line: int) -> None:
        """Add the texts of the parser's tokens."""
        row: tuple[int, int] | None = None
        in_cell, place = False, 0
        around = "", ""  # the types of the last two tokens
        self._labels = frozenset(env.get("references", {}))
        for token in tokens:
            if token.type == "tr_open" and token.map:
                row = token.map[0], token.map[1]
                place = self._line_starts[first_line + row[0]]
            if token.type == "html_block" and _has_text(token.content):
                self.skip("blocks of HTML")
            in_cell = token.type in _TABLE_CELL or (in_cell and token.type == "inline")
            outer, parent = around
            around = parent, token.type
            if token.type != "inline" or not token.content.strip():
                continue
            if in_cell and row is not None:
                place = self._add_cell(token.content, place, first_line + row[0])
            elif token.map is not None:
                self._add_block(token.content, first_line + token.map[0], outer, parent)

    def _add_cell(self, content: str, place: int, line: int) -> int:
        """Add the content of a cell; returns where the next one is searched."""
        starts = self._line_starts
        end = starts[line + 1] if line + 1 < len(starts) else len(self.text)
        content = re.sub(r"(?<!\\)\|", r"\\|", content)  # the parser leaves out the escapes of bars
        found = self.text.find(content, place, end)
        if found < 0:
            self.skip("cells of tables whose place is not known")
            return place
        num_before = len(self._spans)
        self._add_range(found, found + len(content), _LINE_ATTRIBUTES)
        self._cells.update(span.start for span in self._spans[num_before:])
        return found + len(content)

    def _add_block(self, content: str, line: int, outer: str, parent: str) -> None:
        """Add a block whose lines, without the marks of its list or quote, are known.

        Args:
            outer, parent: the types of the two tokens before it.
        """
        lines = content.split("\n")
        if line + len(lines) > len(self._line_starts):
            self.skip("blocks whose place is not known")
            return
        places = []
        for number, text in enumerate(lines, line):
            start = self._line_starts[number]
            end = self._line_starts[number + 1] if number + 1 < len(self._line_starts) else None
            found = self.text.find(text.strip(), start, end)
            if found < 0 or not text.strip():
                self.skip("blocks whose place is not known")
                return
            places.append((found, found + len(text.strip())))
        if alert := _ALERT.match(self.text[slice(*places[0])]):
            self.skip("lines of extensions of Markdown")
            start, end = places.pop(0)
            self._add_range(start + alert.end(), end)
        elif outer == "list_item_open":
            start, end = places[0]
            own = _ITEM_ATTRIBUTES.match(self.text[start:end])
            places[0] = start + (own.end() if own else 0), end
        attributes = _LINE_ATTRIBUTES if parent == "heading_open" else _TEXT_ATTRIBUTES
        for first, last in self._texts(places):
            self._add_range(places[first][0], places[last][1], attributes)

    def _texts(self, places: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The first and the last line of each text of a block: lines of extensions end one."""
        first: int | None = None
        in_formula = False
        for number, (start, end) in enumerate(places):
            line = self.text[start:end]
            is_apart = in_formula or _APART.match(line) is not None
            in_formula ^= is_apart and line.count("$$") % 2 == 1
            if first is not None and (is_apart or _TEXT_START.match(line)):
                yield first, number - 1
                first = None
            if is_apart:
                self.skip("lines of extensions of Markdown")
            elif first is None:
                first = number
        if first is not None:
            yield first, len(places) - 1

    def _add_range(
        self, start: int, end: int, attributes: "re.Pattern[str]" = _TEXT_ATTRIBUTES
    ) -> None:
        """Add a text, without the mark of a definition before it and the attributes at its end."""
        mark = _DEFINITION.match(self.text, start, end)
        start = mark.end() if mark else start
        text = self.text[start:end]
        if found := attributes.search(text):
            text = text[: found.start()]
        pieces, sizes = inline_pieces(text, self._labels)
        for piece in pieces:
            if piece.kind == "alone" and _ALTERNATIVE.match(piece.raw):
                self.skip("alternative texts of images")
            if piece.kind == "alone" and _WIKI_LABEL.match(piece.raw):
                self.skip("labels of links between pages of a wiki")
        self._add_pieces(pieces, start, sizes)

    def _rendered(self, span: Span, text: str) -> str:
        """The translation, with escapes where its text would be Markdown."""
        rendered = super()._rendered(span, text)
        if span.start in self._cells:
            return re.sub(r"(?<!\\)\|", r"\\|", rendered)
        rendered = re.sub(r"(?<=\s)(?=#+\Z)", r"\\", rendered)  # it would end a heading
        source = self.text[span.start : span.end]
        if _BLOCK_START.match(rendered) and not _BLOCK_START.match(source):
            number = re.match(r"\d+", rendered)
            at = number.end() if number else 0
            return f"{rendered[:at]}\\{rendered[at:]}"
        return rendered

    def _joined(self, pieces: Sequence[InlinePiece], span: Span) -> str:
        """The pieces together; code beside code has a blank between, or both would be one, and a
        link behind `!` would be an image."""
        before = _found(_LAST_MARKS, self.text[max(0, span.start - _EDGE) : span.start])
        behind = _found(_FIRST_MARKS, self.text[span.end : span.end + _EDGE])
        joined = [before]
        inside = [*_split_attributes(_without_edge_breaks(pieces))]
        for part in [*with_emphasis(inside, before, behind), behind]:
            is_code = part.startswith("`") and joined[-1].endswith("`")
            if part.startswith("[") and joined[-1].endswith("!"):
                joined[-1] = joined[-1][:-1] + "\\!"
            joined += [" ", part] if is_code else [part] if part else []
        whole = "".join(joined)
        return whole[len(before) : len(whole) - len(behind)]

    def _written(self, text: str) -> str:
        return re.sub(r"([\\`*_\[\]<])", _escaped, LINE_END.sub(" ", text))


def _found(pattern: "re.Pattern[str]", text: str) -> str:
    """The first text that a pattern matches."""
    match = pattern.search(text)
    return match[0] if match else ""


def _escaped(match: "re.Match[str]") -> str:
    """The escape of a character that may be Markdown; within words `_` is none."""
    text, place = match.string, match.start()
    around = text[place - 1 : place] + text[place + 1 : place + 2]
    if match[0] == "_" and len(around) == 2 and around.isalnum():
        return "_"
    return f"\\{match[0]}"


def _without_edge_breaks(pieces: Sequence[InlinePiece]) -> list[InlinePiece]:
    """The pieces without breaks of lines at the edges of a paragraph, where they are none."""
    inside = [*pieces]
    while inside and _is_break(inside[-1]):
        inside.pop()
        if inside and inside[-1].kind == "text":
            inside[-1] = inside[-1]._replace(raw=inside[-1].raw.rstrip(" "))
    start = next((i for i, piece in enumerate(inside) if not _is_break(piece)), len(inside))
    return inside[start:]


def _split_attributes(pieces: Sequence[InlinePiece]) -> Iterator[InlinePiece]:
    """The pieces, with attributes behind marks of emphasis as a piece of their own."""
    for piece in pieces:
        size = len(piece.pair)
        if piece.pair in MARKS and len(piece.raw) > size:
            yield piece._replace(raw=piece.raw[:size])
            yield InlinePiece("alone", piece.raw[size:])
        else:
            yield piece


def _is_break(piece: InlinePiece) -> bool:
    return piece.kind == "alone" and re.fullmatch(BREAK, piece.raw) is not None


def _has_text(html: str) -> bool:
    """True for words beside tags, comments, scripts and styles."""
    place, without_end = 0, set[str]()
    while True:
        start = html.find("<", place)
        if re.search(r"\w", html[place : start if start >= 0 else len(html)]):
            return True
        if start < 0:
            return False
        match = None
        opening = _HIDDEN_START.match(html, start)
        if opening and opening[0].lower() not in without_end:
            match = _HIDDEN.match(html, start)
            if match is None:  # no later one ends either
                without_end.add(opening[0].lower())
        match = match or _ANY_TAG.match(html, start)
        place = match.end() if match else start + 1
