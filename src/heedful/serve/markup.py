"""The parts of a text that are translated one by one: lines of plain text, text nodes of HTML."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from heedful.data.invisible import is_blank
from heedful.serve.errors import HttpError

_LINE_END = re.compile(r"\r?\n")
_DOCUMENT = re.compile(r"\s*<(!doctype|html)\b", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_UNTRANSLATED = {"script", "style"}
_LINES = {"pre", "textarea"}  # whose line breaks are shown


class Parts:
    """A text whose parts are translated, between others that are kept.

    A model is trained on lines, and its tokenizer takes a line break for a space.

    Attributes:
        rows: the parts to translate.
    """

    def __init__(self, text: str) -> None:
        lines = _LINE_END.split(text)
        self._pieces = [(line, len(lines) == 1 or not is_blank(line)) for line in lines]
        self.rows = [line for line, is_translated in self._pieces if is_translated]

    def joined(self, translations: Iterable[str]) -> str:
        """The text with other parts in place of `rows`."""
        rest = iter(translations)
        return "\n".join(next(rest) if translated else line for line, translated in self._pieces)


class HtmlParts:
    """HTML whose text nodes are translated; see `Parts`.

    Tags and their attributes, comments, scripts and styles are kept, and so are blanks around a
    text. Within a text, blanks and line breaks are a space, except in `pre` and `textarea`.

    Raises:
        HttpError: elements that are nested too deeply.
    """

    def __init__(self, text: str) -> None:
        self._source = text
        self._root, self._is_document = _parsed(text)
        self._nodes = [_Node(*place) for place in _places(self._root)]
        self.rows = [row for node in self._nodes for row in node.parts.rows]

    def joined(self, translations: Iterable[str]) -> str:
        """The HTML with other texts in place of `rows`."""
        from lxml import etree

        if not self.rows:
            return self._source
        rest = iter(translations)
        for node in self._nodes:
            node.replace([next(rest) for _ in node.parts.rows])
        if self._is_document:
            return str(etree.tostring(self._root.getroottree(), encoding="unicode", method="html"))
        inner = [etree.tostring(child, encoding="unicode", method="html") for child in self._root]
        return "".join([_escaped(self._root.text or ""), *inner])


Format = Literal["text", "html"]


def parts_of(text: str, form: Format) -> Parts | HtmlParts:
    """The parts of a text in a format; raises HttpError as in `HtmlParts`."""
    return Parts(text) if form == "text" else HtmlParts(text)


class _Node:
    """The text of an element, or behind it (`tail`)."""

    def __init__(self, element: Any, name: Literal["text", "tail"], keeps_lines: bool) -> None:
        self._element, self._name = element, name
        text = getattr(element, name)
        core = text.strip()
        start = text.index(core)
        self._around = text[:start], text[start + len(core) :]
        self.parts = Parts(core if keeps_lines else " ".join(core.split()))

    def replace(self, rows: list[str]) -> None:
        """Replace the text by that of other rows."""
        before, after = self._around
        # Characters of control are no text of XML, whose types the library has.
        text = _CONTROL.sub("", self.parts.joined(rows))
        setattr(self._element, self._name, f"{before}{text}{after}")


def _parsed(text: str) -> tuple[Any, bool]:
    """The root element, a `div` around a fragment; and True for a whole document."""
    from lxml import etree, html

    parser = html.HTMLParser(encoding="utf-8", huge_tree=True)
    is_document = _DOCUMENT.match(text) is not None
    data = text.encode()
    try:
        if is_document:
            root = html.document_fromstring(data, parser=parser)
        else:
            root = html.fragment_fromstring(data, create_parent="div", parser=parser)
    except etree.ParserError:  # a document without any element
        root = etree.Element("div")
    if any("depth" in entry.message for entry in parser.error_log):
        raise HttpError(400, "q: elements of the HTML are nested too deeply", parameter="q")
    return root, is_document


def _places(root: Any) -> Iterator[tuple[Any, Literal["text", "tail"], bool]]:
    """The element of each text with words, whether it is behind it, and if lines count."""
    from lxml import etree

    line_elements = 0
    for event, element in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        is_element = isinstance(element.tag, str)
        if event == "start":
            line_elements += element.tag in _LINES
            if element.tag not in _UNTRANSLATED and _has_words(element.text):
                yield element, "text", line_elements > 0
            continue
        line_elements -= is_element and element.tag in _LINES
        if element is not root and _has_words(element.tail):
            yield element, "tail", line_elements > 0


def _has_words(text: str | None) -> bool:
    return text is not None and any(map(str.isalnum, text))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
