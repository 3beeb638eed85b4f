"""Glossaries of files, which are tables with tabs or TBX (ISO 30042), and of mappings."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from heedful.data.language_tags import is_same_language, matching_tag
from heedful.data.xml_nodes import Node, NodeReader
from heedful.errors import UserError, describe
from heedful.fidelity.terms import Glossary, Term, term_of
from heedful.files import read_text

Languages = tuple[str | None, str | None]
_ENTRIES = {"termEntry", "conceptEntry"}  # of TBX 2 and 3
_LANGUAGES = {"langSet", "langSec"}
_STATUS = {"administrativeStatus", "normativeAuthorization"}
_LEFT_OUT = re.compile(r"deprecated|superseded", re.IGNORECASE)  # of `preferredTerm-admn-sts`, ...


class NoTermsError(UserError):
    """A glossary without a term in the languages that are asked for."""


class GlossaryFile:
    """A glossary that was read: a table with tabs, or TBX, of which languages choose the terms.

    Attributes:
        languages: of TBX; none of a table.

    Raises:
        UserError: a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._text = path, read_text(path)
        self._entries: list[Node] | None = None
        self.languages: list[str] = []
        if self._text.lstrip("\ufeff \t\r\n").startswith("<"):
            reader = NodeReader(str(path), _ENTRIES, "utf-8")
            self._entries = [entry for entry, _ in reader.read([self._text.encode()])]
            tags = [str(part.language) for entry in self._entries for part in _sections(entry)]
            self.languages = [*dict.fromkeys(tags)]

    def glossary(self, languages: Languages) -> Glossary:
        """The terms from a language into another one; errors as in `as_glossary`."""
        path, entries = self._path, self._entries
        if entries is None:
            terms = [*_table(self._text, path, languages)]
            problem = f"{path} has no terms; write one a line, with a tab: TERM<tab>TRANSLATION"
        else:
            terms = [*_tbx(entries, path, languages)]
            problem = (
                f"{path} has no term in both {languages[0]} and {languages[1]}; give a glossary "
                "that has, or leave it out"
            )
        if not terms:
            raise NoTermsError(problem)
        return Glossary(terms, str(path))


def as_glossary(value: object, languages: Languages = (None, None)) -> Glossary:
    """The glossary of a file, or of a mapping from terms to their translations.

    Args:
        languages: of source and target; a TBX file needs them, and a header must not contradict
            them.

    Raises:
        UserError: a file that is no glossary; an entry without a side, or that contradicts another
            one, with its line.
    """
    if isinstance(value, Glossary):
        return value
    if isinstance(value, str | Path):
        value = GlossaryFile(Path(value))
    if isinstance(value, GlossaryFile):
        return value.glossary(languages)
    if not isinstance(value, Mapping):
        raise UserError(
            "glossary must be a file, or a mapping from terms to translations, not "
            f"{describe(value)}"
        )
    terms = []
    for line, (source, target) in enumerate(value.items(), 1):
        if not isinstance(source, str) or not isinstance(target, str):
            raise UserError(f"glossary, entry {line}: term and translation must be texts")
        terms.append(term_of(source, target, line, "glossary"))
    return Glossary(terms)


def _table(text: str, path: Path, languages: Languages) -> Iterator[Term]:
    """The rows of a table; its first line may name the columns."""
    from heedful.data.tsv import ColumnOrderError, has_names  # which import NumPy

    lines = text.removeprefix("\ufeff").split("\n")
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, 1) if line.strip()]
    for number, cells in rows:
        if len(cells) != 2:
            raise UserError(
                f"{path}, line {number}: a glossary has 2 columns, TERM<tab>TRANSLATION; this line "
                f"has {len(cells)}"
            )
    known = {side: tag for side, tag in zip(("src", "tgt"), languages, strict=True) if tag}
    try:
        is_header = has_names(path, [cells for _, cells in rows], {"src": None, "tgt": None}, known)
    except ColumnOrderError as error:
        raise UserError(f"{error.problem}; exchange the columns") from None
    for number, (source, target) in rows[is_header:]:
        yield term_of(source, target, number, str(path))


def _tbx(entries: Sequence[Node], path: Path, languages: Languages) -> Iterator[Term]:
    """The entries that have both languages; all terms of a language are alternatives.

    A source term of several entries, with several meanings, has the translations of all of them.
    """
    source, target = languages
    if source is None or target is None:
        side = "source" if source is None else "target"
        raise UserError(
            f"{path} is TBX, with several languages, and the {side} language of the model is not "
            "known; give src_language=CODE and tgt_language=CODE to a model for many languages, or "
            "convert it to a table with tabs: TERM<tab>TRANSLATION"
        )
    translations: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for entry in entries:
        sources, targets = (_terms_of(entry, language) for language in (source, target))
        for form in sources if targets else ():
            lines.setdefault(form, entry.line)
            translations.setdefault(form, []).extend(targets)
    forms: dict[tuple[int, str], list[str]] = {}  # with the same translations, of an entry
    for form, targets in translations.items():
        forms.setdefault((lines[form], "|".join(targets)), []).append(form)
    for (line, joined), own in forms.items():
        yield term_of("|".join(own), joined, line, str(path))


def _terms_of(entry: Node, language: str) -> list[str]:
    """The terms of an entry in a language, or else in varieties of it and relatives."""
    sections = _sections(entry)
    match = matching_tag(language, {str(part.language) for part in sections})

    def is_chosen(tag: str) -> bool:
        """True for the language itself, or without it for a relative."""
        return tag == match if match is not None else is_same_language(tag, language)

    found = [
        _term_of(unit)
        for part in sections
        if is_chosen(str(part.language))
        for unit in part.walk()
        if unit.child("term") is not None
    ]
    usable = [(text, status) for text, status in found if not _LEFT_OUT.search(status)]
    return [text for text, _ in sorted(usable, key=lambda term: "preferred" not in term[1].lower())]


def _term_of(unit: Node) -> tuple[str, str]:
    """The term of an element, and its status: that of a note beside it, or beside its group."""
    term = unit.child("term")
    assert term is not None
    status = (
        node.text
        for node in unit.walk()
        if node.name in _STATUS or node.attributes.get("type") in _STATUS
    )
    return " ".join(term.text.split()), " ".join(status)


def _sections(entry: Node) -> list[Node]:
    """The parts of an entry, each of a language."""
    return [part for part in entry.walk() if part.name in _LANGUAGES and part.language]
