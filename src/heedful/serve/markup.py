"""The parts of a text that are translated one by one: sentences of lines, or of HTML's texts."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from heedful.data.rows import is_blank
from heedful.documents.html import HtmlDocument
from heedful.documents.parts import Placed
from heedful.documents.segments import Result
from heedful.documents.sentences import Fits, SplitText
from heedful.documents.split_segments import SplitSegment
from heedful.documents.word_links import TokenAlignment
from heedful.errors import UserError
from heedful.serve.errors import HttpError

Languages = tuple[str | None, str | None]

_LINE_END = re.compile(r"\r?\n")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


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

    cut_rows: Sequence[str] = ()  # of `HtmlParts`

    def __init__(
        self, text: str, languages: Languages = (None, None), fits: Fits = lambda text: True
    ) -> None:
        lines = _LINE_END.split(text)
        self._languages = languages
        self._lines = [_line(line, languages[0], fits, keeps=len(lines) > 1) for line in lines]
        self.rows = [row for line in self._lines for row in _rows(line)]
        self.num_unfit = sum(line.num_unfit for line in self._lines if isinstance(line, SplitText))

    def joined(
        self, translations: Iterable[str], alignments: Mapping[str, TokenAlignment | None] = {}
    ) -> Placed:
        """The text with other parts in place of `rows`; it has no tags, which need alignments."""
        rest = iter(translations)
        return Placed("\n".join(self._joined_line(line, rest) for line in self._lines))

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
    """HTML whose texts are translated as those of a document (`heedful.documents.html`).

    Tags, comments, scripts, styles, code and elements with `translate="no"` or the class
    `notranslate` are kept. Within a text, blanks and line breaks are a space, except in `pre`.

    Args:
        languages, fits: as of `Parts`.
        keeps_words: as of `heedful.documents.removed_tags.without_tags`.

    Attributes:
        rows, num_unfit: as of `Parts`.
        cut_rows: rows with tags between their words, whose alignments are needed.

    Raises:
        HttpError: an element whose content is kept is not closed; elements in a line are nested too
            deeply.
    """

    def __init__(
        self,
        text: str,
        languages: Languages = (None, None),
        fits: Fits = lambda text: True,
        *,
        keeps_words: bool = False,
    ) -> None:
        self._source = text
        data = BOM_UTF8 + _CONTROL.sub("", text).encode()  # whatever charset it declares
        try:
            self._document = HtmlDocument(data, "q", languages)
        except UserError as error:
            raise HttpError(400, str(error), parameter="q") from None
        self._segments = [
            (segment, SplitSegment(segment, fits, languages, keeps_words=keeps_words))
            for segment in self._document.segments
        ]
        self.rows = [row for _, split in self._segments for row in split.rows]
        self.cut_rows = [row for _, split in self._segments for row in split.cut_rows]
        self.num_unfit = sum(split.num_unfit for _, split in self._segments)

    def joined(
        self, translations: Iterable[str], alignments: Mapping[str, TokenAlignment | None] = {}
    ) -> Placed:
        """The HTML with other texts in place of `rows`.

        Args:
            alignments: of `cut_rows` with their translations.
        """
        if not self.rows:
            return Placed(self._source)
        rest = iter(translations)
        unsure: list[str] = []
        for segment, split in self._segments:
            texts = [_CONTROL.sub("", next(rest)) for _ in split.rows]
            placed = split.joined(texts, alignments)
            if segment.tag_problem(placed.text):  # more tags that are words than there are masks
                placed = Placed(segment.text, (segment.text,))
            unsure += placed.unsure
            segment.result = Result(placed.text, origin="model")
        return Placed(self._document.to_bytes().decode("utf-8-sig"), tuple(unsure))


Format = Literal["text", "html"]


def parts_of(
    text: str,
    form: Format,
    languages: Languages,
    fits: Fits = lambda text: True,
    *,
    keeps_words: bool = False,
) -> Parts | HtmlParts:
    """The parts of a text in a format; arguments and errors as in `Parts` and `HtmlParts`.

    A text of nothing but words that are too long is a whole, for which the model has an error.
    """
    kind = Parts if form == "text" else partial(HtmlParts, keeps_words=keeps_words)
    parts = kind(text, languages, fits)
    return parts if parts.rows or not parts.num_unfit else kind(text, languages)
