"""Subtitles (.srt, .vtt): the text of cues; times, numbers, styles and notes are kept."""

import re
from bisect import bisect_left
from html import escape, unescape
from itertools import accumulate

from heedful.data.cues import STYLE, read_cues
from heedful.data.inline import InlinePiece
from heedful.documents.spans import Span, SpanDocument
from heedful.errors import UserError

_DIALOGUE = re.compile(r"\s*[-–—‐]")
_SENTENCE_END = re.compile(r"[.!?…。！？:][\"'”’»)\]]*\s*\Z")
_LINE_BREAK = re.compile(r"(?<!\s)\s*\r?\n\s*")  # with all blanks around it
_BREAK = re.compile(r"(?<=[^\s\0]) (?=\S)|(?<=[，。、；：！？…])(?=[^\s\1，。、；：！？…”’」』）])")


class SubtitleDocument(SpanDocument):
    """Cues. Lines of one sentence are translated together, and the result has as many lines."""

    @property
    def _has_entities(self) -> bool:
        """WebVTT writes `&` and `<` of a text as in HTML."""
        return self.name.lower().endswith(".vtt")

    def _find(self) -> None:
        cues, broken = read_cues(self.text, self.name)
        if broken:
            raise UserError(
                f"{self.name}, line {broken[0]}: the times of a cue cannot be read; write them as "
                "00:00:01,000 --> 00:00:02,000"
            )
        for cue in cues:
            start = cue.start
            for group in _sentences(self.text[cue.start : cue.stop].split("\n")):
                whole = "\n".join(group)
                pieces, sizes = _pieces(whole.removesuffix("\r"))
                if self._has_entities:
                    pieces = [
                        p._replace(raw=unescape(p.raw)) if p.kind == "text" else p for p in pieces
                    ]
                self._add_pieces(pieces, start, sizes)
                start += len(whole) + 1

    def _written(self, text: str) -> str:
        return escape(text, quote=False) if self._has_entities else text

    def _rendered(self, span: Span, text: str) -> str:
        """The translation, in as many lines as the source."""
        rendered = super()._rendered(span, text.replace("-->", "->"))
        source = self.text[span.start : span.end]
        end = "\r\n" if "\r\n" in source else "\n"
        # A blank line would end the cue, and so would an arrow.
        rendered = re.sub(r"[ \t\r\n]+", " ", rendered).strip(" ")
        return end.join(_wrapped(rendered, source.count("\n") + 1))


def _sentences(lines: list[str]) -> list[list[str]]:
    """Groups of lines that are one text: not those of two speakers, nor two sentences.

    A line of blanks is a group.
    """
    groups: list[list[str]] = []
    for line in lines:
        plain = STYLE.sub("", line)
        is_new = not groups or not plain.strip() or not groups[-1][-1].strip()
        is_new |= _DIALOGUE.match(plain) is not None
        if is_new or _SENTENCE_END.search(STYLE.sub("", groups[-1][-1])):
            groups.append([line])
        else:
            groups[-1].append(line)
    return groups


def _pieces(text: str) -> tuple[list[InlinePiece], list[int]]:
    pieces, sizes, place = [], [], 0
    closes_voice = "</v" in text

    def add_text(end: int) -> None:
        if end > place:
            raw = text[place:end]
            pieces.append(InlinePiece("text", _LINE_BREAK.sub(" ", raw)))
            sizes.append(len(raw))

    for match in STYLE.finditer(text):
        add_text(match.start())
        name = match[2]
        is_alone = name is None or (name == "v" and not closes_voice)
        kind = "alone" if is_alone else "close" if match[1] else "open"
        pieces.append(InlinePiece(kind, match[0], name or ""))  # type: ignore[arg-type]
        sizes.append(len(match[0]))
        place = match.end()
    add_text(len(text))
    return pieces, sizes


def _wrapped(text: str, num_lines: int) -> list[str]:
    """A text in lines of similar length as shown, broken at blanks, or behind the marks of a text
    without blanks; none ends in a tag, or directly behind one that opens."""
    bare = STYLE.sub(_hidden, text)
    shown = [0, *accumulate(character not in "\0\1" for character in bare)]
    places = [match.start() for match in _BREAK.finditer(bare)]
    widths = [shown[place] for place in places]
    lines, start, first = [], 0, 0
    for left in range(num_lines, 1, -1):
        if first == len(places):
            break
        wanted = shown[start] + (shown[-1] - shown[start]) / left
        last = min(bisect_left(widths, wanted, first), len(places) - 1)
        near = range(max(first, last - 1), last + 1)
        best = min((abs(widths[index] - wanted), index) for index in near)[1]
        lines.append(text[start : places[best]])
        start, first = places[best] + text.startswith(" ", places[best]), best + 1
    return [*lines, text[start:]]


def _hidden(tag: re.Match[str]) -> str:
    """Signs in place of a tag, which have another meaning for one that closes."""
    return ("\1" if tag[1] else "\0") * len(tag[0])
