"""Cues of subtitles (SubRip .srt, WebVTT .vtt): times and text, with their places.

WebVTT: W3C, "WebVTT: The Web Video Text Tracks Format".
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from heedful.errors import UserError

_CLOCK = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})(?:[,.](\d{1,3}))?"
_TIMES = re.compile(rf"[ \t]*{_CLOCK}[ \t]*-->[ \t]*{_CLOCK}[^\n]*")
_BROKEN_TIMES = re.compile(r"\s*\d[^\n]*-->|\s*\d+:\d+[^\n]*->")
_LINE = re.compile(r"[^\n]*(?:\n|\Z)")
# `<i>`, `<c.yellow>`, `<v Ann>`, `<00:00:01.000>`; `{\\an8}` of SubStation Alpha, also in .srt.
STYLE = re.compile(r"<(/?)([a-zA-Z][\w-]*+)([^<>\n]*)>|<[\d:.]+>|\{\\[^{}\n]*\}")
# Of WebVTT, up to a blank line; `NOTES` and `REGION1` are names of cues.
_BLOCK = re.compile(r"(?:NOTE|STYLE|REGION)(?:[ \t]|\Z)")


class Cue(NamedTuple):
    """A text and when it is shown.

    Attributes:
        begin, end: in milliseconds.
        start, stop: the range of its lines in the text of the file, without the last line end.
        line: of its text, from 1.
    """

    begin: int
    end: int
    start: int
    stop: int
    line: int


def read_cues(text: str, name: str) -> tuple[list[Cue], list[int]]:
    """The cues of a file of subtitles; raises UserError if there is none.

    In SubRip a text may have blank lines, as players (FFmpeg) read it: what is behind one is a
    further cue of the same time. The number of a cue needs no blank line before it there. In WebVTT
    a line of spaces does not end a text.

    Returns:
        the cues, and the lines of times that cannot be read, whose texts are in no cue.
    """
    cues, broken = list[Cue](), list[int]()
    is_vtt = text.removeprefix("\ufeff").startswith("WEBVTT")
    place, number, is_block = 0, 0, False
    begin: tuple[int, int] | None = None
    shown: tuple[int, int] | None = None  # the last times
    start = stop = first = 0
    while place < len(text):
        match = _LINE.match(text, place)
        assert match is not None
        line, number = match[0].rstrip("\r\n"), number + 1
        times = None if is_block else _TIMES.fullmatch(line)
        is_number = line.strip().isdigit()
        is_name = not is_vtt and (is_number or begin is None) and _TIMES.match(text, match.end())
        is_blank = not (line if is_vtt else line.strip()) or bool(is_name)
        if begin is not None and (is_blank or times):
            cues.append(Cue(*begin, start, max(start, stop), first))
            begin = None
        if times is not None:
            groups = times.groups()
            begin = shown = _milliseconds(groups[:4]), _milliseconds(groups[4:])
            start = stop = match.end()
            first = number + 1
        elif begin is not None:
            stop = place + len(line)
        elif not is_block and _BROKEN_TIMES.match(line):
            broken.append(number)
            shown = None
        elif not (is_vtt or is_blank or is_number):
            begin, start, stop, first = shown, place, place + len(line), number
        is_begun = begin is None and is_vtt and _BLOCK.match(line) is not None
        is_block = not is_blank and (is_block or is_begun)
        place = match.end()
    if begin is not None:
        cues.append(Cue(*begin, start, max(start, stop), first))
    if not cues:
        raise UserError(
            f"{name} has no cues (00:00:01,000 --> 00:00:02,000); name a file of subtitles"
        )
    return cues, broken


def _milliseconds(groups: Sequence[str | None]) -> int:
    hours, minutes, seconds, fraction = (group or "0" for group in groups)
    whole = (int(hours) * 60 + int(minutes)) * 60 + int(seconds)
    return whole * 1_000 + int(fraction.ljust(3, "0"))


def aligned_by_time(first: Sequence[Cue], second: Sequence[Cue]) -> list[tuple[range, range]]:
    """The groups of cues that are shown at the same time: indices of both sides.

    Two cues belong together if they overlap for more than half of the shorter one. Groups hold at
    most three cues of a side; cues of larger groups, and cues without a partner, are in none.
    """
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(first) and j < len(second):
        if not _is_together(first[i], second[j]):
            # The one that ends first has no partner.
            if (first[i].end, first[i].begin) <= (second[j].end, second[j].begin):
                i += 1
            else:
                j += 1
            continue
        end_i, end_j = i + 1, j + 1
        while True:
            if end_i < len(first) and _is_together(first[end_i], second[end_j - 1]):
                end_i += 1
            elif end_j < len(second) and _is_together(first[end_i - 1], second[end_j]):
                end_j += 1
            else:
                break
        if end_i - i <= 3 and end_j - j <= 3:
            groups.append((range(i, end_i), range(j, end_j)))
        i, j = end_i, end_j
    return groups


def _is_together(a: Cue, b: Cue) -> bool:
    overlap = min(a.end, b.end) - max(a.begin, b.begin)
    shorter = min(a.end - a.begin, b.end - b.begin)
    return overlap > 0 and 2 * overlap > shorter
