"""Filters of training rows: the rows of a chunk that are kept."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from heedful.config import Filters
from heedful.data.languages import (
    LETTERS,
    NO_LANGUAGE,
    SCRIPT_LETTERS,
    CharacterClass,
    identify,
    known_macrolanguage,
    letters_of,
    probability_of,
    scripts_of,
)
from heedful.data.reports import Example, FilterCount, FilterReport
from heedful.data.rows import CORPUS, Rows
from heedful.errors import UserError
from heedful.extras import require

_MAX_CHARACTERS = 300  # of a text in an example

Kept: TypeAlias = Bool[np.ndarray, " N"]


def make_filters(
    settings: Filters,
    columns: Sequence[str],
    languages: Mapping[str, tuple[str | None, str | None]],
) -> list["Filter"]:
    """The filters of a recipe in the order in which they are applied: duplicates come last.

    Args:
        columns: names of the texts in a row: `src` and `tgt`, or `text`.
        languages: by the name of the corpus (or one by any name), the language of its sources or
            texts and that of its targets.

    Raises:
        UserError: a column that the rows lack; a script or language that is not known.
    """
    filters: list[Filter] = [
        LengthLimit(f"{bound}_{unit}", columns, size_of, limit, bound == "max")
        for unit, size_of in (("characters", num_characters), ("words", num_words))
        for bound in ("min", "max")
        if (limit := getattr(settings, f"{bound}_{unit}")) is not None
    ]
    if settings.max_ratio is not None:
        filters.append(LengthRatio(settings.max_ratio))
    if settings.different_sides:
        filters.append(DifferentSides())
    if settings.min_letters is not None:
        filters.append(LetterShare(columns, settings.min_letters))
    if settings.min_script is not None:
        filters.append(
            _by_corpus({n: _script_share(settings, columns, *of) for n, of in languages.items()})
        )
    if settings.language:
        require("langid", "data.filters.language")
        filters.append(
            _by_corpus({n: _language(settings, columns, n, *of) for n, of in languages.items()})
        )
    for compared in settings.unique:
        if compared != "row" and compared not in columns:
            known = " or ".join(["row", *columns])
            raise UserError(f"data.filters.unique: rows have no {compared}; use {known}")
        filters.append(Unique(compared))
    return filters


def _script_share(
    settings: Filters, columns: Sequence[str], src: str | None, tgt: str | None
) -> "Filter":
    """The filter `min_script` for two languages."""
    assert settings.min_script is not None
    src_scripts = scripts_of(src, settings.src_script, "src_script")
    scripts = {column: src_scripts for column in columns if column != "tgt"}
    if "tgt" in columns:
        scripts["tgt"] = scripts_of(tgt, settings.tgt_script, "tgt_script")
    return ScriptShare(scripts, settings.min_script)


def _language(
    settings: Filters, columns: Sequence[str], corpus: str, src: str | None, tgt: str | None
) -> "Filter":
    """The filter `language` for two languages; `corpus`: its name, or ""."""
    expected = {}
    for column in columns:
        key = "tgt_language" if column == "tgt" else "src_language"
        keys = f"data.{key}" + (f" or data.corpora.{corpus}.{key}" if corpus else "")
        expected[column] = known_macrolanguage(tgt if column == "tgt" else src, keys)
    return IdentifiedLanguage(expected, settings.language_probability)


def _by_corpus(filters: Mapping[str, "Filter"]) -> "Filter":
    """A filter with settings by corpus; the filter itself if there is one corpus."""
    return next(iter(filters.values())) if len(filters) == 1 else ByCorpus(filters)


class Filter(ABC):
    """A condition on rows.

    Attributes:
        name: its key in `data.filters`.
        setting: the key's value, as text.
    """

    name: str
    setting: str

    @abstractmethod
    def keep(self, rows: Rows) -> Kept:
        """True for each row of a chunk that is kept; chunks come in the order of the data."""


class LengthLimit(Filter):
    """A limit of the length of each text.

    Args:
        size_of: length of a text, in characters or words.
        is_maximum: the limit is the largest allowed length, else the smallest.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        size_of: Callable[[str], int],
        limit: int,
        is_maximum: bool,
    ) -> None:
        self.name, self.columns, self.size_of = name, columns, size_of
        self.limit, self.is_maximum, self.setting = limit, is_maximum, str(limit)

    def keep(self, rows: Rows) -> Kept:
        """True if all texts of the row are within the limit."""
        is_kept = np.ones(len(rows), dtype=bool)
        for column in self.columns:
            sizes = np.fromiter(map(self.size_of, rows[column]), np.int64, len(rows))
            is_kept &= sizes <= self.limit if self.is_maximum else sizes >= self.limit
        return is_kept


class LengthRatio(Filter):
    """The ratio of the longer side of a pair to the shorter one, in characters."""

    name = "max_ratio"

    def __init__(self, limit: float) -> None:
        self.limit, self.setting = limit, f"{limit:g}"

    def keep(self, rows: Rows) -> Kept:
        """True if the ratio is at most the limit."""
        src, tgt = (np.fromiter(map(num_characters, rows[c]), np.int64) for c in ("src", "tgt"))
        # A quotient is rounded to the limit where it is equal, a product with the limit is not.
        return np.asarray(np.maximum(src, tgt) / np.maximum(np.minimum(src, tgt), 1) <= self.limit)


class DifferentSides(Filter):
    """The sides of a pair must differ, spaces at their ends aside."""

    name, setting = "different_sides", ""

    def keep(self, rows: Rows) -> Kept:
        """True if the sides differ."""
        sides = zip(rows["src"], rows["tgt"], strict=True)
        return np.fromiter((src.strip() != tgt.strip() for src, tgt in sides), bool, len(rows))


class LetterShare(Filter):
    """The share of letters among the characters that are not whitespace."""

    name = "min_letters"

    def __init__(self, columns: Sequence[str], limit: float) -> None:
        self.columns, self.limit, self.setting = columns, limit, f"{limit:g}"
        self._letters, self._visible = CharacterClass(LETTERS), CharacterClass(r"\S")

    def keep(self, rows: Rows) -> Kept:
        """True if each text has the share; a blank text has none."""
        is_kept = np.ones(len(rows), dtype=bool)
        for column in self.columns:
            letters, visible = (
                self._letters.counts(rows[column]),
                self._visible.counts(rows[column]),
            )
            is_kept &= letters / np.maximum(visible, 1) >= self.limit
        return is_kept


class ScriptShare(Filter):
    """The share of the expected scripts among the letters; texts without letters are kept.

    Args:
        scripts: the expected scripts by column, in the names of Unicode.
    """

    name = "min_script"

    def __init__(self, scripts: Mapping[str, Sequence[str]], limit: float) -> None:
        self.limit, self.setting = limit, f"{limit:g}"
        self._letters = CharacterClass(SCRIPT_LETTERS)
        self._expected = {
            column: CharacterClass(letters_of(names)) for column, names in scripts.items()
        }

    def keep(self, rows: Rows) -> Kept:
        """True if each text has the share."""
        is_kept = np.ones(len(rows), dtype=bool)
        for column, expected in self._expected.items():
            letters = self._letters.counts(rows[column])
            share = expected.counts(rows[column]) / np.maximum(letters, 1)
            is_kept &= (share >= self.limit) | (letters == 0)
        return is_kept


class IdentifiedLanguage(Filter):
    """No text may be identified as another language than the expected one.

    Languages of one macrolanguage are not distinguished, and texts without a language are kept.

    Args:
        expected: the macrolanguage of each column.
        min_probability: of the other language, to drop a text.
    """

    name = "language"

    def __init__(self, expected: Mapping[str, str], min_probability: float) -> None:
        self.expected, self.min_probability = expected, min_probability
        self.setting = f"{min_probability:g}"

    def keep(self, rows: Rows) -> Kept:
        """True if no text of the row is in another language."""
        is_kept = np.ones(len(rows), dtype=bool)
        for column, expected in self.expected.items():
            for index in np.flatnonzero(is_kept).tolist():
                is_kept[index] = not self._is_other(rows[column][index], expected)
        return is_kept

    def _is_other(self, text: str, expected: str) -> bool:
        identified = identify(text)
        if identified in (expected, NO_LANGUAGE):
            return False
        return probability_of(text, identified) >= self.min_probability


class Unique(Filter):
    """The row, or one of its texts, must not repeat an earlier one that reached this filter.

    Texts are compared by hashes of 64 bits, 8 bytes of memory each: of 100 million rows one is
    expected to be dropped by mistake with a probability of 0.0003.

    Args:
        compared: "row", or the column that is compared.
    """

    name = "unique"

    def __init__(self, compared: str) -> None:
        self.compared = self.setting = compared
        self._seen = HashSet()

    def keep(self, rows: Rows) -> Kept:
        """True at the first row with its content."""
        return self.keep_hashes(self.hashes(rows))

    def hashes(self, rows: Rows) -> UInt64[np.ndarray, " N"]:
        """The hash of each row, which is independent of other rows."""
        return rows.hashes(None if self.compared == "row" else [self.compared])

    def keep_hashes(self, hashes: UInt64[np.ndarray, " N"]) -> Kept:
        """`keep` for rows with these hashes."""
        return self._seen.add(hashes)


class HashSet:
    """A set of 64-bit hashes in sorted arrays, each at most half as long as the one before."""

    def __init__(self) -> None:
        self._runs: list[UInt64[np.ndarray, " n"]] = []

    def add(self, hashes: UInt64[np.ndarray, " N"]) -> Kept:
        """Add hashes; True (N,) for each that is new, at its first occurrence."""
        distinct, first = np.unique(hashes, return_index=True)
        new = np.ones(len(distinct), dtype=bool)
        for run in self._runs:
            index = np.minimum(np.searchsorted(run, distinct), len(run) - 1)
            new &= run[index] != distinct
        if new.any():
            self._runs.append(distinct[new])
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort()
            self._runs.append(merged)
        is_first = np.zeros(len(hashes), dtype=bool)
        is_first[first[new]] = True
        return is_first


class ByCorpus(Filter):
    """A filter that has other settings for each corpus.

    Args:
        filters: by the name of the corpus.
    """

    def __init__(self, filters: Mapping[str, Filter]) -> None:
        self._filters = filters
        first = next(iter(filters.values()))
        self.name, self.setting = first.name, first.setting

    def keep(self, rows: Rows) -> Kept:
        """True for each row that the filter of its corpus keeps."""
        corpora, is_kept = np.array(rows[CORPUS]), np.ones(len(rows), dtype=bool)
        for corpus, filter in self._filters.items():
            indices = np.flatnonzero(corpora == corpus)
            if len(indices):
                is_kept[indices] = filter.keep(rows.select(indices))
        return is_kept


def apply_filters(
    filters: Sequence[Filter], rows: Rows
) -> tuple[Rows, Int64[np.ndarray, " n"], FilterReport]:
    """The rows of a chunk that all filters keep, their indices in the chunk, and the others."""
    indices, counts = np.arange(len(rows)), [FilterCount(f.name, f.setting) for f in filters]
    for filter, count in zip(filters, counts, strict=True):
        if not len(rows):
            break
        is_kept = filter.keep(rows)
        dropped = np.flatnonzero(~is_kept)
        example_indices = count.add(len(rows), dropped)
        count.examples += [_example(rows, index) for index in example_indices]
        if len(dropped):
            indices = indices[is_kept]
            rows = rows.filtered(np.flatnonzero(is_kept))
    return rows, indices, FilterReport(counts)


def keep_unique(
    filters: Sequence[Unique],
    counts: Sequence[FilterCount],
    hashes: Sequence[UInt64[np.ndarray, " N"]],
    rows: Callable[[], Rows],
) -> Kept:
    """True for each row of a chunk that all filters `unique` keep, by the hashes of the rows.

    Args:
        counts: of these filters; the rows are counted there.
        hashes: for each filter those of the rows.
        rows: returns the rows; called for examples alone.
    """
    is_kept = np.ones(len(hashes[0]), bool)
    for filter, count, values in zip(filters, counts, hashes, strict=True):
        indices = np.flatnonzero(is_kept)
        dropped = indices[~filter.keep_hashes(values[indices])]
        if example_indices := count.add(len(indices), dropped):
            texts = rows()
            count.examples += [_example(texts, index) for index in example_indices]
        is_kept[dropped] = False
    return is_kept


def num_characters(text: str) -> int:
    """The number of characters, without whitespace at the ends."""
    return len(text.strip())


def num_words(text: str) -> int:
    """The number of words, separated by whitespace."""
    return len(text.split())


def _example(rows: Rows, index: int) -> Example:
    texts = {name: column[index] for name, column in rows.columns.items()}
    return Example(rows.location(index), {n: text[:_MAX_CHARACTERS] for n, text in texts.items()})
