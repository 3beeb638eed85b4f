"""The parts of a text that are translated one by one: sentences of lines, or of HTML's texts."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from heedful.data.invisible import is_blank
from heedful.documents.sentences import Fits, SplitText
from heedful.serve.errors import HttpError

Languages = tuple[str | None, str | None]

_LINE_END = re.compile(r"\r?\n")
_DOCUMENT = re.compile(r"\s*<(!doctype|html)\b", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_UNTRANSLATED = {"script", "style", "code", "kbd", "samp", "var", "svg", "math"}
_LINES = {"pre", "textarea"}  # whose line breaks are shown


class Parts:
    """A text whose parts are translated, between others that are kept.

    A model is trained on sentences, and its tokenizer takes a line break for a space: the parts are
    the sentences of each line; a line with one sentence is a part with the blanks around it. Long
    sentences are cut in clauses.

    Args:
        languages: of the text and of its translation, as far as they are known.
        fits: True for a text that the model reads.

    Attributes:
        rows: the parts to translate.
        num_unfit: words that are too long for the model; they are kept.
    """

    def __init__(
        self, text: str, languages: Languages = (None, None), fits: Fits = lambda text: True
    ) -> None:
        lines = _LINE_END.split(text)
        self._languages = languages
        self._lines = [_line(line, languages[0], fits, keeps=len(lines) > 1) for line in lines]
        self.rows = [row for line in self._lines for row in _rows(line)]
        self.num_unfit = sum(line.num_unfit for line in self._lines if isinstance(line, SplitText))

    def joined(self, translations: Iterable[str]) -> str:
        """The text with other parts in place of `rows`."""
        rest = iter(translations)
        return "\n".join(self._joined_line(line, rest) for line in self._lines)

    def _joined_line(self, line: "_Line", rest: Iterator[str]) -> str:
        texts = [next(rest) for _ in _rows(line)]
        if isinstance(line, SplitText):
            return line.joined(texts, *self._languages)
        text, is_translated = line
        return texts[0] if is_translated else text


_Line = SplitText | tuple[str, bool]  # its sentences; or a text, and True if it is translated


def _line(line: str, language: str | None, fits: Fits, *, keeps: bool) -> _Line:
    """A line; `keeps`: a blank one is not translated."""
    split = SplitText(line, fits, language)
    if len(split.rows) > 1 or not fits(line):
        return split
    return line, not (keeps and is_blank(line))


def _rows(line: _Line) -> list[str]:
    if isinstance(line, SplitText):
        return line.rows
    return [line[0]] if line[1] else []


class HtmlParts:
    """HTML whose text nodes are translated; see `Parts`.

    Tags and their attributes, comments, scripts, styles, code and elements with `translate="no"`
    or the class `notranslate` are kept, and so are blanks around a text. Within a text, blanks and
    line breaks are a space, except in `pre` and `textarea`.

    Raises:
        HttpError: elements that are nested too deeply.
    """

    def __init__(
        self, text: str, languages: Languages = (None, None), fits: Fits = lambda text: True
    ) -> None:
        self._source = text
        self._root, self._is_document = _parsed(text)
        self._nodes = [_Node(*place, languages, fits) for place in _places(self._root)]
        self.rows = [row for node in self._nodes for row in node.parts.rows]
        self.num_unfit = sum(node.parts.num_unfit for node in self._nodes)

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


def parts_of(
    text: str, form: Format, languages: Languages, fits: Fits = lambda text: True
) -> Parts | HtmlParts:
    """The parts of a text in a format; arguments and errors as in `Parts` and `HtmlParts`.

    A text of nothing but words that are too long is a whole, for which the model has an error.
    """
    kind = Parts if form == "text" else HtmlParts
    parts = kind(text, languages, fits)
    return parts if parts.rows or not parts.num_unfit else kind(text, languages)


class _Node:
    """The text of an element, or behind it (`tail`)."""

    def __init__(
        self,
        element: Any,
        name: Literal["text", "tail"],
        keeps_lines: bool,
        languages: Languages,
        fits: Fits,
    ) -> None:
        self._element, self._name = element, name
        text = getattr(element, name)
        core = text.strip()
        start = text.index(core)
        self._around = text[:start], text[start + len(core) :]
        self.parts = Parts(core if keeps_lines else " ".join(core.split()), languages, fits)

    def replace(self, rows: list[str]) -> None:
        """Replace the text by that of other rows."""
        before, after = self._around
        text = _CONTROL.sub("", self.parts.joined(rows))
        setattr(self._element, self._name, f"{before}{text}{after}")


def _parsed(text: str) -> tuple[Any, bool]:
    """The root element, a `div` around a fragment; and True for a whole document."""
    from lxml import etree, html

    parser = html.HTMLParser(encoding="utf-8", huge_tree=True)
    is_document = _DOCUMENT.match(text) is not None
    # Characters of control are no text of XML, whose types the library has.
    data = _CONTROL.sub("", text).encode()
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

    line_elements = kept_elements = 0
    for event, element in etree.iterwalk(root, events=("start", "end", "comment", "pi")):
        is_element = isinstance(element.tag, str)
        if event == "start":
            line_elements += element.tag in _LINES
            kept_elements += _is_kept(element)
            if not kept_elements and _has_words(element.text):
                yield element, "text", line_elements > 0
            continue
        line_elements -= is_element and element.tag in _LINES
        kept_elements -= is_element and _is_kept(element)
        if element is not root and not kept_elements and _has_words(element.tail):
            yield element, "tail", line_elements > 0


def _is_kept(element: Any) -> bool:
    """True for an element whose texts are not translated."""
    return (
        element.tag in _UNTRANSLATED
        or element.get("translate", "").strip().lower() == "no"
        or "notranslate" in element.get("class", "").split()
    )


def _has_words(text: str | None) -> bool:
    return text is not None and any(map(str.isalnum, text))


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
