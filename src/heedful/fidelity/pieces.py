"""Pieces of a text that a translation must keep: placeholders, tags, addresses and numbers.

The patterns are one table, from the most to the least specific. Where two patterns match at one
position, the first one counts.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html.entities import html5
from typing import Literal

from heedful.fidelity.reasons import Reason

Kind = Literal["tag", "placeholder", "number"]

# Elements whose names alone mark a tag. Others (`<Name>`, `<None>`) are often text that is
# translated, so they are tags only with attributes, with a slash, or with a closing tag.
_NAMES = (
    "a abbr b bdo big blockquote body br bx caption center cite code dd del dfn div dl dt em "
    "emph ex font g h1 h2 h3 h4 h5 h6 head hr html i img input ins it kbd label li ol option "
    "p ph pre q s samp select small span strike strong sub sup table tbody td tfoot th thead "
    "title tr tt u ul var x"
)
_ELEMENTS = frozenset(_NAMES.split())
_FILE_TYPES = (
    "7z|bat|bin|conf|cpp|css|csv|deb|dll|docx?|exe|gif|gz|html?|ini|iso|jar|jpe?g|js|json|log|md|"
    "mp[34]|msi|od[bfgpst]|pdf|php|png|pptx?|py|rar|rpm|rtf|sh|so|sql|svg|tar|toml|txt|xcu|xhtml|"
    "xlf|xlsx?|xliff|xml|ya?ml|zip"
)
_SCHEMES = r"(?:https?|ftp|file|mailto|vnd\.[\w.]{1,200})"
_ENDS = r"\s<>\"'”“。，、；：！？）】》」"  # what ends an address
_ADDRESS = rf"[^{_ENDS}]*[^{_ENDS}.,;:!?)\]]"
_NOT_IN_A_WORD = r"(?<![A-Za-zÀ-ɏ0-9_])"  # but behind one of a language without spaces
_FOLDER = r"/[A-Za-z0-9_.@+-]*[A-Za-z0-9_+-]"
_PRE_RELEASE = (
    r"(?:[-+.~]?(?i:alpha|beta|dev|final|nightly|post|pre|preview|rc|snapshot)\d*(?:\.\d+)*)"
)
_DIGITS = r"\d+(?:[.,]\d+)*"
# The percent sign of a text for printf belongs to its number or placeholder, and moves with it.
_PERCENT = r"(?:[ \u00a0\u202f]?%%)?"
# What follows a placeholder of printf directly: no letter, but a unit (%dpx) or a sign (%dx%d).
_BEHIND = (
    r"(?![A-Za-z])|(?<=[dfgisu])(?=(?:[kKMGT]?i?[Bb](?:its?|ps|ytes?)?|[kKMGT]|px|pt|dpi|ms|min"
    r"|x|[ckm]m|st|nd|rd|th)(?![A-Za-z]))|(?<=[dfgiu])(?=[hms](?![A-Za-z]))"
)
# What is in a placeholder of printf is read once (`*+`): flags may be digits, as is the width.
_WIDTH = r"(?:\d++|\*(?:\d++\$)?)"
# The beginning of a choice of texts of ICU's MessageFormat, as by a number.
_CHOICE = r"\{\s*\w+\s*,\s*(?:plural|selectordinal|select)\s*,"
_IN_BRACES = r"[^{}]*+"
for _ in range(6):  # pairs of braces within each other
    _IN_BRACES = r"(?:[^{}]|\{" + _IN_BRACES + r"\})*+"
PATTERNS: Mapping[str, tuple[Kind, str]] = {
    "comment": ("tag", r"<!--.{0,2000}?-->"),
    "tag": ("tag", r"</?[A-Za-z][\w:.-]*(?:\s[^<>]*)?/?>"),
    "field": ("placeholder", r"<\?>|<%(?:\d+\$)?[a-z]>"),
    "template": (
        "placeholder",
        r"<%.{0,1000}?%>|<\?\w.{0,1000}?\?>|\{%[^{}]*%\}|\{#[^{}]*#\}",
    ),
    "URL": ("placeholder", rf"{_NOT_IN_A_WORD}(?:{_SCHEMES}:|www\.){_ADDRESS}"),
    "e-mail address": ("placeholder", r"\b[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+\b"),
    "host": (
        "placeholder",
        rf"{_NOT_IN_A_WORD}(?:[A-Za-z0-9-]{{1,63}}\.){{1,8}}(?:com|edu|gov|net|org)(?![A-Za-z0-9_-])"
        rf"(?:/{_ADDRESS})?",
    ),
    "entity": ("placeholder", r"&(?:[A-Za-z]\w*|#\d+|#x[0-9A-Fa-f]+);"),
    "shell variable": (
        "placeholder",
        r"\$(?:\([\w.]+\)|\{[^{}\s]+\}|\[[^\[\]\s]+\]|[A-Za-z_][A-Za-z0-9_]*\$?|[1-9](?![.,]?\d))",
    ),
    "named variable": (
        "placeholder",
        r"%(?:\([\w.-]+\)[#0 +-]*+[\d.]*+[A-Za-z]|\{\w+\}|\[\w+\])"
        r"|%(?!I(?:32|64)[diouxX])[A-Z][A-Z0-9_]{2,}%?"
        r"|(?<!\d)%[a-z][a-z\d_]{2,}%(?![A-Za-z\d(%])"
        r"|%(?:\d+\$)?#@\w+@",  # of Apple's plural forms
    ),
    "percent sign": ("placeholder", r"%%"),  # of a text for printf
    "printf": (
        "placeholder",
        rf"(?:(?<![A-Za-z0-9_])0[xX])?%(?:\d++\$)?[#0+-]*+{_WIDTH}?(?:\.{_WIDTH})?"
        rf"(?:<PRI\w+>|(?:hh?|ll?|[Lqjzt]|I32|I64)?[diouxXeEfFgGcspn@](?:{_BEHIND})){_PERCENT}"
        r"|%(?:\d++\$)?[,'][#0+-]*+[\d.]*+l{0,2}[dfgiu](?![A-Za-z])"  # with separators of groups
        r"|%\d+\$t?[A-Za-z](?![A-Za-z])|%L?\d{1,2}(?!\d)"  # also of Java, and of Qt
        r"|(?<!\d)%[EO^_-]?[A-Za-z](?![A-Za-z])",  # of strftime, and the error of a system
    ),
    "choice of texts": (  # whose texts may have placeholders
        "placeholder",
        _CHOICE + _IN_BRACES + r"\}",
    ),
    "braces": ("placeholder", r"\{\{[^{}]+\}\}|\{(?:\w+(?:[.:,!\[][^{}]*)?| ?\w+(?:-\w+)* ?)?\}"),
    "marker": ("placeholder", r"#[A-Z][A-Z0-9_]+#|\[X\d+X\]"),  # the second of Weblate
    "path": (
        "placeholder",
        rf"(?<![A-Za-zÀ-ɏ0-9_/<>.)\]}}:~-])(?:(?:~|\.{{1,2}})(?:{_FOLDER})+|(?:{_FOLDER}){{2,}})/?"
        rf"|{_NOT_IN_A_WORD}[A-Za-z]:\\(?:[^{_ENDS}|*?]*[^{_ENDS}|*?.,;:!)\]])?"
        r"|\\\\[\w.-]+(?:\\[\w.$-]*[\w$-])+",
    ),
    "file name": (
        "placeholder",
        rf"(?<!\w)\*\.\w+|\b(?:[\w.-]{{1,100}}/){{0,20}}[\w-]{{1,100}}(?:\.[\w-]{{1,20}}){{0,3}}"
        rf"\.(?i:{_FILE_TYPES})(?![A-Za-z0-9_])",
    ),
    "option": (
        "placeholder",
        r"(?<![\w-])--[a-z][a-z\d]*(?:-[a-z\d]+)*(?![\w-])"
        r"|(?<![^\s(\[\"'`|,=“„‘])(?<!\w\()-[A-Za-z](?![\w-])",
    ),
    "code": (
        "placeholder",
        rf"{_NOT_IN_A_WORD}(?:"
        r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"  # UUID
        r"|[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5}"  # of a network device
        rf"|v\d+(?:\.\d+)*{_PRE_RELEASE}*|\d+(?:\.\d+)+{_PRE_RELEASE}+"
        r"|[A-Z][A-Z\d]*(?:_[A-Z\d]+)+|[a-z][a-z\d]+(?:_[a-z\d]{2,})+|[a-z]{2,3}_[A-Z]{2}"  # names
        r"|[A-Z]{1,12}[-_]?\d[A-Z\d]*(?:[-_.](?=[A-Z]*\d)[A-Z\d]+)*"
        r")(?![A-Za-zÀ-ɏ0-9_])|#[0-9A-Fa-f]{6}(?![A-Za-z0-9_])",
    ),
    "number": (
        "number",
        r"(?:(?<![A-Za-zÀ-ɏ0-9_)\]}%.,;:/+−-])[-+−±](?=\d))?(?:"
        r"0[xX][0-9A-Fa-f]+(?![A-Za-z0-9_])"
        r"|\d+(?:-\d+){2,}(?:T\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"  # a date
        rf"|{_DIGITS}(?:[:/]{_DIGITS})+"  # a time, a date, a ratio
        rf"|\d*[¼-¾⅐-⅞]|{_DIGITS}(?:[eE][+-]?\d+(?![A-Za-z0-9_]))?{_PERCENT})",
    ),
}
# One separator, or groups; the last group has three digits, others two in India.
_GROUPED = r"\d{{1,3}}(?:{0}\d{{2,3}})*{0}\d{{3}}(?:{1}\d+)?"
_WITH_SEPARATORS = re.compile(
    rf"[-+−±]?(?:\d+[.,]\d+|{_GROUPED.format(',', '[.]')}|{_GROUPED.format('[.]', ',')})"
    rf"(?:[eE][+-]?\d+)?{_PERCENT}"
)
# Signs that a translation keeps, wherever they stand.
_LOOSE = re.compile(r"[%％٪{}<>€£¥°]")
# A number whose groups are separated by blanks or apostrophes, as in French or in Switzerland.
_SPACED = re.compile(
    r"(?<![\d.,])\d{1,3}(?:([ \u00a0\u2009\u202f'’])\d{3})(?:\1\d{3})*(?:[.,]\d+)?(?!\d)"
)
# A percentage as in Turkish, which is also a placeholder of Qt.
_PERCENT_FIRST = re.compile(r"(?<![\d%])%(\d{1,2})(?!\d)")
_SIGN_BEHIND = re.compile(r"[ \u00a0\u202f]?%")
# Text in angle brackets, such as the name of a key, which a translation may write otherwise.
_BRACKETED = re.compile(r"<[^\s<>](?:[^<>]{0,78}[^\s<>])?>")
_BLANK = re.compile(r"[ \u00a0\u202f](?=%%$)")
# Each pattern matches one of these signs (a point or colon before a space is none): most texts have
# none, and are not searched for patterns.
_SIGNS = re.compile(r"[\d<$%{&#@*\[.:/](?:(?<![.:/])|(?=\S))|--?[A-Za-z]|\w_\w|[\\¼-¾⅐-⅞]")


@dataclass(frozen=True)
class Piece:
    """A piece of a text.

    Attributes:
        start, end: its first character, and that after its last one.
        kind: a number may be written as the target language does.
    """

    start: int
    end: int
    text: str
    kind: Kind


@lru_cache
def _matcher(extra: tuple[str, ...]) -> re.Pattern[str]:
    """All patterns as one expression with a group each; those of a caller come first."""
    groups = [f"(?P<x{index}>{pattern})" for index, pattern in enumerate(extra)]
    groups += [f"(?P<p{index}>{pattern})" for index, (_, pattern) in enumerate(PATTERNS.values())]
    return re.compile("|".join(groups), re.DOTALL)


def find_pieces(text: str, extra: tuple[str, ...] = ()) -> Iterator[Piece]:
    """The pieces of a text, in order; they do not overlap.

    Args:
        extra: further regular expressions, for placeholders.
    """
    if not extra and _SIGNS.search(text) is None:
        return
    kinds = [kind for kind, _ in PATTERNS.values()]
    names = list(PATTERNS)
    start, matcher = 0, _matcher(extra)
    while match := matcher.search(text, start):
        group = match.lastgroup or ""
        index, is_extra = int(group[1:]), group[0] == "x"
        start = match.end()
        if match.end() == match.start():
            start += 1
        elif is_extra or _is_piece(names[index], match[0], text):
            kind: Kind = "placeholder" if is_extra else kinds[index]
            yield Piece(match.start(), match.end(), match[0], kind)
        else:
            start = match.start() + 1  # what is in the brackets may hold pieces


def _is_piece(name: str, matched: str, text: str) -> bool:
    """False for text in angle brackets, and for what only looks like an entity (`AT&T;`)."""
    if name == "entity" and "#" not in matched:
        return matched[1:] in html5
    if name != "tag":
        return True
    element = re.match(r"</?([\w:.-]+)", matched)
    assert element is not None
    if element[1].lower() in _ELEMENTS or matched.endswith("/>") or "=" in matched:
        return True
    return element[1] in _closed_elements(text)


@lru_cache(maxsize=1)
def _closed_elements(text: str) -> frozenset[str]:
    """Names of the elements that end in a text."""
    return frozenset(re.findall(r"</([\w:.-]+)>", text))


def is_choice(piece: str) -> bool:
    """True for a choice of texts, such as `{n, plural, one {a file} other {# files}}`."""
    return re.match(_CHOICE, piece) is not None


def localized(number: str) -> str | None:
    """A number with its points and commas exchanged: 1,000.5 and 1.000,5.

    None without one, and for what is not the number of an amount, such as 192.168.0.1 and 1,2,3.
    """
    if _WITH_SEPARATORS.fullmatch(number) is None:
        return None
    return number.translate({ord("."): ",", ord(","): "."})


def counts(text: str, extra: tuple[str, ...] = ()) -> Counter[str]:
    """The number of occurrences of each piece.

    A number and the one with points and commas exchanged are equal: the formats of two languages.
    """
    return Counter(map(_key, find_pieces(text, extra)))


def _key(piece: Piece) -> str:
    """Equal for pieces that stand for each other: also a minus sign and a hyphen, and a percent
    sign of printf with and without a blank before it, and digits of another script."""
    text = _BLANK.sub("", piece.text)
    if piece.kind != "number":
        return text
    text = text.replace("−", "-")
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(c, c)) for c in text)
    return _of_formats(text)


def _of_formats(number: str) -> str:
    """Equal for a number and the one with points and commas exchanged."""
    return min(number, localized(number) or number)


def _with_separators(text: str, others: Sequence[Piece]) -> str:
    """A text whose numbers with blanks are written as an equal one of the other side is."""
    if _SPACED.search(text) is None:
        return text
    known = {_key(piece).lstrip("-+±") for piece in others}

    def written(match: re.Match[str]) -> str:
        """The number with points or commas, or without separators."""
        separator = "." if "," in match[0] else ","
        forms = (match[0].replace(match[1], sign) for sign in (separator, ""))
        return next((form for form in forms if _of_formats(form) in known), match[0])

    return _SPACED.sub(written, text)


def _with_percentages(text: str, source: str, pieces: Sequence[Piece]) -> str:
    """A translation whose percentages are written as in the source: %5, of 5%, as 5%."""
    if not _PERCENT_FIRST.search(text):
        return text
    known = {p.text for p in pieces if p.kind == "number" and _SIGN_BEHIND.match(source, p.end)}
    known -= {piece.text[1:] for piece in pieces if piece.text[0] == "%"}
    return _PERCENT_FIRST.sub(lambda m: f"{m[1]}%" if m[1] in known else m[0], text)


def _loose_signs(text: str, pieces: Sequence[Piece]) -> Counter[str]:
    """The signs of a text that are in no piece."""
    if _LOOSE.search(text) is None:
        return Counter()
    inside = {place for piece in pieces for place in range(piece.start, piece.end)}
    found = (match for match in _LOOSE.finditer(text) if match.start() not in inside)
    return Counter("%" if match[0] in "％٪" else match[0] for match in found)


def differences(
    source: str,
    target: str,
    extra: tuple[str, ...] = (),
    pieces: Sequence[Piece] | None = None,
) -> list[str]:
    """The pieces of a source that a translation lacks, and those that it has beyond them; likewise
    signs beside pieces, such as that of 5% and the braces of a placeholder that is not closed.

    Args:
        extra: as of `find_pieces`.
        pieces: of the source, where they are known.
    """
    ours = [*find_pieces(source, extra)] if pieces is None else pieces
    theirs = [*find_pieces(target, extra)]
    written = _with_percentages(_with_separators(target, ours), source, ours)
    if written != target:
        target, theirs = written, [*find_pieces(written, extra)]
    if (written := _with_separators(source, theirs)) != source:
        source, ours = written, [*find_pieces(written, extra)]
    signs, their_signs = _loose_signs(source, ours), _loose_signs(target, theirs)
    if not (ours or theirs or signs or their_signs):
        return []
    names = {_key(piece): piece.text for piece in [*theirs, *ours]}  # as in the source, if there
    names |= {sign: sign for sign in signs | their_signs}
    src, tgt = (Counter(map(_key, pieces)) for pieces in (ours, theirs))
    src, tgt = src + signs, tgt + their_signs
    texts = _bracketed(source, ours), _bracketed(target, theirs)
    reasons: list[str] = []
    for code, found, brackets in (
        ("missing", src - tgt, texts[0] - texts[1]),
        ("added", tgt - src, texts[1] - texts[0]),
    ):
        if found:
            listed = _with_bracketed([names[key] for key in found.elements()], brackets)
            reasons.append(Reason(code, {"pieces": ", ".join(listed)}))
    return reasons


def _bracketed(text: str, pieces: Sequence[Piece]) -> Counter[str]:
    """The texts in angle brackets that are no pieces."""
    starts = {piece.start for piece in pieces}
    return Counter(m[0] for m in _BRACKETED.finditer(text) if m.start() not in starts)


def _with_bracketed(listed: list[str], texts: Counter[str]) -> list[str]:
    """Names of pieces and signs, with texts in angle brackets in place of pairs of these signs.

    Where there are fewer pairs than texts, any of these may be the one.
    """
    number = min(listed.count("<"), listed.count(">"))
    if not number or texts.total() < number:
        return listed
    for sign in "<>" * number:
        listed.remove(sign)
    if texts.total() == number:
        return [*listed, *texts.elements()]
    return [*listed, *[" or ".join(texts)] * number]
