"""Choices of texts in a segment, as ICU's MessageFormat has them: {n, plural, one {a file} …}.

Each text is translated within its sentence. The translation chooses between whole sentences, and
has the plural categories of its language (CLDR, "Language Plural Rules").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from heedful.data.inline import TAG, InlinePiece, TagError, TaggedText
from heedful.data.language_tags import standard_tag
from heedful.fidelity.pieces import find_pieces, is_choice

if TYPE_CHECKING:
    from babel.plural import PluralRule

_HEAD = re.compile(r"\{\s*(\w+)\s*,\s*(plural|select)\s*,\s*")
_BRANCH = re.compile(r"(=\d+|[^\W=][\w-]*)\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*")
_QUOTE = re.compile(r"'(?=[{}#])")  # begins literal text
_CATEGORIES = ("zero", "one", "two", "few", "many", "other")


@dataclass(frozen=True)
class IcuChoice:
    """A text with one choice: a `plural` or `select` argument of MessageFormat.

    Attributes:
        text: the whole text.
        name: of the argument that chooses.
        is_plural: it is a number, for which `#` stands in the texts.
        branches: by selector the whole text, with one of its texts in place of the choice.
        codes: of the tags of the text, each of which is in one branch.
    """

    text: str
    name: str
    is_plural: bool
    branches: Mapping[str, str]
    codes: Mapping[str, InlinePiece] = field(default_factory=dict)

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

    def lacks(self, language: str | None) -> list[str]:
        """The plural categories of a language that it has no text for."""
        rule = _plural_rule(language) if self.is_plural and language else None
        return [] if rule is None else [name for name in _names(rule) if self._lacks(name, rule)]

    def _lacks(self, name: str, rule: "PluralRule") -> bool:
        """True without a text for a category, or for each of its numbers."""
        numbers = (number for number in range(200) if rule(number) == name)
        return name not in self.branches and any(f"={n}" not in self.branches for n in numbers)

    def of_language(self, language: str | None) -> dict[str, str]:
        """The branches whose translations a language needs; all where it is not known, and of a
        text with codes, as each code is there once."""
        rule = None if language is None else _plural_rule(language)
        if not self.is_plural or rule is None or self.codes:
            return dict(self.branches)
        exact = {key: text for key, text in self.branches.items() if key[0] == "="}
        other = self.branches["other"]
        return exact | {name: self.branches.get(name, other) for name in _names(rule)}

    def codes_of(self, text: str) -> TaggedText:
        """A branch with those of the codes that it has."""
        found = (match[0] for match in TAG.finditer(text))
        return TaggedText(text, {tag: self.codes[tag] for tag in found if tag in self.codes})


def choice_of(text: str, codes: TaggedText | None = None) -> IcuChoice | None:
    """The choice of a text with a single one; None for others.

    Others are those with ordinal numbers, with a choice in a choice, an offset or quoted syntax.

    Args:
        codes: of the text; None for a text without. One beside the choice would be in each branch,
            so such a choice is one of the others, too.
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
    choice = IcuChoice(text, name, is_plural, branches, codes.codes if codes else {})
    return choice if _has_codes_once(choice) else None


def _has_codes_once(choice: IcuChoice) -> bool:
    """True if each code is in one branch, and the halves of a pair are in the same one."""
    num_codes = 0
    for text in choice.branches.values():
        own = choice.codes_of(text)
        num_codes += len(own.codes)
        try:
            own.restored(text)
        except TagError:
            return False
    return num_codes == len(choice.codes)


def choice_with_codes(text: str, codes: TaggedText | None) -> str | None:
    """The first choice of a text with a code in it; None without one."""
    own = codes.codes if codes else {}
    choices = (piece.text for piece in find_pieces(text) if own and is_choice(piece.text))
    return next(
        (one for one in choices if any(match[0] in own for match in TAG.finditer(one))), None
    )


def _has_pairs(text: str) -> bool:
    depth = 0
    for character in re.findall(r"[{}]", text):
        depth += 1 if character == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _plural_rule(language: str) -> "PluralRule | None":
    """The rule for the plural categories of a language; None for an unknown one."""
    from babel import Locale, UnknownLocaleError

    try:
        return Locale.parse(standard_tag(language).replace("-", "_")).plural_form
    except (UnknownLocaleError, ValueError):
        return None


def _names(rule: "PluralRule") -> list[str]:
    """The plural categories of a rule, `other` last."""
    return [name for name in _CATEGORIES if name in rule.tags or name == "other"]
