"""Choices of texts in a segment, as ICU's MessageFormat has them: {n, plural, one {a file} …}.

Each text is translated within its sentence. The translation chooses between whole sentences, and
has the plural categories of its language (CLDR, "Language Plural Rules").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from heedful.data.language_tags import standard_tag
from heedful.fidelity.pieces import find_pieces, is_choice

_HEAD = re.compile(r"\{\s*(\w+)\s*,\s*(plural|select)\s*,\s*")
_BRANCH = re.compile(r"(=\d+|[^\W=][\w-]*)\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*")
_QUOTE = re.compile(r"'(?=[{}#])")  # begins literal text
_CATEGORIES = ("zero", "one", "two", "few", "many", "other")


@dataclass(frozen=True)
class Choice:
    """A text with one choice.

    Attributes:
        text: the whole text.
        name: of the argument that chooses.
        is_plural: it is a number, for which `#` stands in the texts.
        branches: by selector the whole text, with one of its texts in place of the choice.
    """

    text: str
    name: str
    is_plural: bool
    branches: Mapping[str, str]

    def joined(self, translations: Mapping[str, str]) -> str | None:
        """The choice between the translations of branches, by selector.

        None for a translation whose braces are not in pairs.
        """
        if all(self.branches.get(key) == text for key, text in translations.items()):
            return self.text
        kind = "plural" if self.is_plural else "select"
        parts = []
        for key, text in translations.items():
            if not _has_pairs(text):
                return None
            text = _QUOTE.sub("''", text)
            if self.is_plural:
                text = text.replace("#", "'#'").replace(f"{{{self.name}}}", "#")
            parts.append(f"{key} {{{text}}}")
        return f"{{{self.name}, {kind}, {' '.join(parts)}}}"

    def of_language(self, language: str | None) -> dict[str, str]:
        """The branches whose translations a language needs; all without one that is known."""
        categories = None if language is None else _categories(language)
        if not self.is_plural or categories is None:
            return dict(self.branches)
        exact = {key: text for key, text in self.branches.items() if key[0] == "="}
        other = self.branches["other"]
        return exact | {name: self.branches.get(name, other) for name in categories}


def choice_of(text: str) -> Choice | None:
    """The choice of a text with a single one; None for others.

    Others are those with ordinal numbers, with a choice in a choice, an offset or quoted syntax.
    """
    found = [piece for piece in find_pieces(text) if is_choice(piece.text)]
    if len(found) != 1 or _QUOTE.search(text):
        return None
    [piece] = found
    before, after = text[: piece.start], text[piece.end :]
    head = _HEAD.match(piece.text)
    if head is None or "#" in before + after or not (_has_pairs(before) and _has_pairs(after)):
        return None
    name, is_plural = head[1], head[2] == "plural"
    branches: dict[str, str] = {}
    place = head.end()
    while match := _BRANCH.match(piece.text, place):
        own = match[2]
        if any(is_choice(inner.text) for inner in find_pieces(own)):
            return None
        if is_plural:
            own = own.replace("#", f"{{{name}}}")
        branches[match[1]] = before + own + after
        place = match.end()
    if piece.text[place:] != "}" or "other" not in branches:
        return None
    return Choice(text, name, is_plural, branches)


def _has_pairs(text: str) -> bool:
    depth = 0
    for character in re.findall(r"[{}]", text):
        depth += 1 if character == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _categories(language: str) -> list[str] | None:
    """The plural categories of a language, `other` last; None for an unknown one."""
    from babel import Locale, UnknownLocaleError

    try:
        rule = Locale.parse(standard_tag(language).replace("-", "_")).plural_form
    except (UnknownLocaleError, ValueError):
        return None
    return [name for name in _CATEGORIES if name in rule.tags or name == "other"]
