"""Filters: each against its definition on all short texts, chunks, counts, examples and scripts."""

import unicodedata
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product

import numpy as np
import pytest

from heedful.config import Filters
from heedful.data.filters import HashSet, apply_filters, make_filters
from heedful.data.language_tags import macrolanguage_of
from heedful.data.languages import (
    LETTERS,
    SCRIPTS,
    CharacterClass,
    language_probabilities,
    letters_of,
    probability_of,
    scripts_of,
)
from heedful.data.reports import MAX_EXAMPLES, FilterReport
from heedful.data.rows import CORPUS, Rows
from heedful.errors import UserError

TEXTS = [
    "a",
    " a ",
    "a b",
    "a  b c",
    "abcdef",
    "a1!",
    "1 2",
    "жя",
    "aж",
    "жяaж",
    "日本ー",
    "?",
    "é",
]
PAIRS = [*product(TEXTS, TEXTS)]
NAMES = {"a": "LATIN", "ж": "CYRILLIC"}


def pairs(rows: Sequence[tuple[str, str]]) -> Rows:
    src, tgt = ([*side] for side in zip(*rows, strict=True))
    return Rows({"src": src, "tgt": tgt})


def apply(settings: dict, chunks: Sequence[Rows], **options) -> tuple[list, FilterReport]:
    languages = options.get("languages", ("en", "ru"))
    columns = [*chunks[0].columns]
    filters = make_filters(Filters(**settings), columns, {"": languages})
    kept, _, reports = zip(*(apply_filters(filters, chunk) for chunk in chunks), strict=True)
    rows = [row for chunk in kept for row in zip(*chunk.columns.values(), strict=True)]
    return rows, reduce(FilterReport.plus, reports)


def script_of(character: str) -> str:
    return unicodedata.name(character).split()[0]


def is_script(text: str, name: str, share: float) -> bool:
    letters = [c for c in text if unicodedata.category(c)[0] == "L" and c != "ー"]
    return sum(script_of(c) == name for c in letters) >= share * len(letters)


def letter_share(text: str) -> float:
    visible = [c for c in text if not c.isspace()]
    return sum(unicodedata.category(c)[0] in "LM" for c in visible) / len(visible)


DEFINITIONS = {
    "min_characters": (2, lambda a, b: min(len(a.strip()), len(b.strip())) >= 2),
    "max_characters": (3, lambda a, b: max(len(a.strip()), len(b.strip())) <= 3),
    "min_words": (2, lambda a, b: min(len(a.split()), len(b.split())) >= 2),
    "max_words": (1, lambda a, b: max(len(a.split()), len(b.split())) <= 1),
    "max_ratio": (
        2.0,
        lambda a, b: max(len(a.strip()) / len(b.strip()), len(b.strip()) / len(a.strip())) <= 2,
    ),
    "different_sides": (True, lambda a, b: a.strip() != b.strip()),
    "min_letters": (0.5, lambda a, b: min(letter_share(a), letter_share(b)) >= 0.5),
    "min_script": (
        0.5,
        lambda a, b: is_script(a, "LATIN", 0.5) and is_script(b, "CYRILLIC", 0.5),
    ),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_filter_keeps_what_its_definition_keeps(name: str) -> None:
    value, is_kept = DEFINITIONS[name]
    expected = [pair for pair in PAIRS if is_kept(*pair)]
    actual, report = apply({name: value}, [pairs(PAIRS)])
    assert 0 < len(expected) < len(PAIRS)
    assert actual == expected
    [count] = report.filters
    assert (count.num_seen, count.num_dropped) == (len(PAIRS), len(PAIRS) - len(expected))
    dropped = [pair for pair in PAIRS if not is_kept(*pair)][:MAX_EXAMPLES]
    assert [tuple(example.texts.values()) for example in count.examples] == dropped


@pytest.mark.parametrize(
    ("setting", "row"),
    [
        ({"max_ratio": 1.4}, ("a" * 63, "a" * 45)),
        ({"max_ratio": 2.3}, ("a" * 50, "a" * 115)),
        ({"min_letters": 0.55}, ("a" * 55 + "1" * 45, "a")),
        ({"min_script": 0.55}, ("a" * 55 + "ж" * 45, "ж")),
    ],
)
def test_a_row_at_the_limit_is_kept(setting: dict, row: tuple[str, str]) -> None:
    """Of a decimal limit whose product with a length is rounded to the other side."""
    beyond = (row[0] + "ж1", row[1] + "1" * 90)
    assert apply(setting, [pairs([row, beyond])])[0] == [row]


@pytest.mark.parametrize(("part", "of"), [("row", (0, 1)), ("src", (0,)), ("tgt", (1,))])
def test_repeated_rows_are_dropped_across_chunks(part: str, of: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    rows = [(f"{a}", f"{b}") for a, b in rng.integers(0, 30, (2_000, 2))]
    seen: set[tuple[str, ...]] = set()
    expected = []
    for row in rows:
        key = tuple(row[i] for i in of)
        if key not in seen:
            expected.append(row)
        seen.add(key)
    for size in (7, 500, 2_000):
        chunks = [pairs(rows[start : start + size]) for start in range(0, len(rows), size)]
        assert apply({"unique": [part]}, chunks)[0] == expected


def test_results_and_reports_do_not_depend_on_the_chunks() -> None:
    settings = {"max_words": 3, "min_letters": 0.4, "unique": ["row", "tgt"], "max_ratio": 3}
    rows = [*PAIRS, *PAIRS[::-1]]
    whole, report = apply(settings, [pairs(rows)])
    some = [pairs(rows[start : start + 11]) for start in range(0, len(rows), 11)]
    parts, parts_report = apply(settings, some)
    assert whole == parts

    def counts(report: FilterReport) -> Iterator[tuple]:
        for count in report.filters:
            yield count.label, count.num_seen, count.num_dropped, [e.texts for e in count.examples]

    assert [*counts(report)] == [*counts(parts_report)]
    # A filter sees what earlier ones keep, in the order of the keys; duplicates come last.
    labels = [count.label for count in report.filters]
    assert labels == ["max_words 3", "max_ratio 3", "min_letters 0.4", "unique row", "unique tgt"]
    seen = [count.num_seen for count in report.filters]
    dropped = [count.num_dropped for count in report.filters]
    assert seen[1:] == [a - b for a, b in zip(seen, dropped, strict=True)][:-1]
    assert seen[-1] - dropped[-1] == len(whole)
    assert FilterReport.from_json(report.to_json()) == report
    assert report.num_dropped == len(rows) - len(whole)


def test_the_report_of_the_rows_counts_what_was_dropped() -> None:
    rows = pairs([("a", "b"), ("a b", "b"), ("c", "d")])
    filters = make_filters(Filters(max_words=1), ["src", "tgt"], {"": (None, None)})
    kept, indices, report = apply_filters(filters, rows)
    assert indices.tolist() == [0, 2]
    assert (kept.report.num_lines, kept.report.num_kept, kept.report.num_filtered) == (3, 2, 1)
    assert kept.report.summary() == "3 lines read, 2 pairs kept; 1 dropped by filters"
    assert report.summary("pairs") == "1 of 3 pairs dropped (33.3%); max_words 1: 1"
    report.check()


TEXTS_BY_LANGUAGE = {
    "en": [
        "Two young men are outside near many bushes.",
        "He has been old enough to understand it for years.",
    ],
    "de": [
        "Zwei junge Männer sind im Freien in der Nähe vieler Büsche.",
        "Er ist schon seit Jahren alt genug, um das zu verstehen.",
    ],
    "zh": ["他已经到了能理解这件事的年纪。", "我们明天上午十点在图书馆门口见面。"],
}


@pytest.mark.parametrize(("src", "tgt"), [("en", "de"), ("zh", "en"), ("de-AT", "ZH_tw")])
def test_pairs_with_a_side_in_another_language_are_dropped(src: str, tgt: str) -> None:
    texts = TEXTS_BY_LANGUAGE
    rows = [
        (a, b) for own, other in product(texts, texts) for a in texts[own] for b in texts[other]
    ]
    kept, report = apply({"language": True}, [pairs(rows)], languages=(src, tgt))
    expected = [
        row for row in rows if row[0] in texts[src[:2]] and row[1] in texts[tgt[:2].lower()]
    ]
    assert kept == expected
    [count] = report.filters
    assert (count.label, count.num_dropped) == ("language 0.5", len(rows) - 4)
    assert len(count.examples) == MAX_EXAMPLES


def test_a_text_is_dropped_by_the_probability_of_its_language() -> None:
    german = TEXTS_BY_LANGUAGE["de"][0]
    probability = language_probabilities(german)["de"]
    texts = [german, german[:6], "", "1 2 3", "?"]
    for limit, num_kept in ((probability - 1e-4, 4), (min(1, probability + 1e-4), 5)):
        settings = Filters(language=True, language_probability=limit)
        filters = make_filters(settings, ["text"], {"": ("en", None)})
        assert len(apply_filters(filters, Rows({"text": [*texts]}))[0]) == num_kept


def test_members_of_a_macrolanguage_are_one_language() -> None:
    croatian = "Danas je lijep dan i djeca se igraju u parku ispred kuće."
    for language, is_kept in (("sr", True), ("bs", True), ("sl", False)):
        filters = make_filters(Filters(language=True), ["text"], {"": (language, None)})
        assert filters[0].keep(Rows({"text": [croatian]})).tolist() == [is_kept]
    probabilities = language_probabilities(croatian)
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    members = probabilities["sr"] + probabilities["hr"] + probabilities["bs"]
    assert probability_of(croatian, macrolanguage_of("hr-HR")) == pytest.approx(members)


def test_the_language_of_each_corpus_counts() -> None:
    texts = [text for language in ("en", "de") for text in TEXTS_BY_LANGUAGE[language]]
    [filter] = make_filters(
        Filters(language=True), ["text"], {"a": ("en", None), "b": ("de", None)}
    )
    for corpus, expected in (("a", [1, 1, 0, 0]), ("b", [0, 0, 1, 1])):
        rows = Rows({"text": texts, CORPUS: [corpus] * 4})
        assert filter.keep(rows).tolist() == expected


@pytest.mark.parametrize(
    ("languages", "message"),
    [
        ({"": ("en", None)}, r"language: no language; set data\.tgt_language$"),
        ({"": ("tlh", "en")}, r"py3langid does not know the language tlh; change data\.src_lang"),
        (
            {"a": ("en", "de"), "b": (None, "de")},
            r"no language; set data\.src_language or data\.corpora\.b\.src_language$",
        ),
    ],
)
def test_a_language_that_cannot_be_identified_is_refused(languages: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_filters(Filters(language=True), ["src", "tgt"], languages)


def test_a_filter_that_drops_everything_is_named() -> None:
    _, report = apply({"min_characters": 1, "min_words": 9}, [pairs(PAIRS[:3]), pairs(PAIRS[3:9])])
    with pytest.raises(UserError, match=r"^data\.filters\.min_words: 9 drops all 9 rows"):
        report.check()


def test_a_hash_set_is_a_set() -> None:
    rng = np.random.default_rng(1)
    known: set[int] = set()
    hashes = HashSet()
    for _ in range(60):
        batch = rng.integers(0, 900, rng.integers(0, 60)).astype(np.uint64)
        expected = []
        for value in batch.tolist():
            expected.append(value not in known)
            known.add(value)
        assert hashes.add(batch).tolist() == expected


def test_classes_of_characters_are_those_of_the_unicode_database() -> None:
    """All code points of the library's Unicode version; the standard library has no scripts."""
    points = [*range(0x3000), *range(0x4E00, 0x9FFF, 7), *range(0xAC00, 0xD7A0, 11)]
    texts = [chr(point) for point in points if unicodedata.category(chr(point)) != "Cn"]
    letters = [unicodedata.category(text)[0] in "LM" for text in texts]
    assert CharacterClass(LETTERS).counts(texts).tolist() == letters
    named = ("LATIN", "CYRILLIC", "GREEK", "HEBREW", "THAI", "HANGUL", "HIRAGANA", "TAMIL")
    first_words = [unicodedata.name(text, "-").split()[0] for text in texts]
    for name in named:
        members = CharacterClass(letters_of([name.title()])).counts(texts)
        for text, word, is_member in zip(texts, first_words, members.tolist(), strict=True):
            if word in named and unicodedata.category(text) in ("Lu", "Ll", "Lo"):
                assert is_member == (word == name), text


def test_texts_with_half_of_a_surrogate_pair_are_counted_as_other_characters() -> None:
    assert CharacterClass(LETTERS).counts(["a\ud800b", "", "\udfff"]).tolist() == [2, 0, 0]


def test_scripts_are_those_of_the_language_or_given() -> None:
    assert scripts_of("ja", None, "src_script") == ["Han", "Hiragana", "Katakana"]
    assert scripts_of("pt-BR", None, "src_script") == scripts_of("PT_br", [], "src_script")
    assert scripts_of("en", "Greek", "src_script") == ["Greek"]
    for names in SCRIPTS:  # the library knows them all
        assert CharacterClass(letters_of([names])).counts(["1"]) == [0]
    for arguments, message in (
        (("tlh", None, "src_script"), "the language tlh has no known script; set data.filters.src"),
        ((None, None, "tgt_script"), "no language; set data.filters.tgt_script"),
        (("en", "Latn", "src_script"), "unknown script Latn; did you mean Latin?"),
    ):
        with pytest.raises(UserError, match=message):
            scripts_of(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_words": 5, "max_words": 4}, "min_words 5 is more than max_words 4"),
        ({"src_script": "Latin"}, "have no effect without min_script"),
        ({"language_probability": 0.9}, "has no effect without language"),
    ],
)
def test_contradictory_filters_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Filters(**settings)


def test_a_column_that_rows_lack_is_refused() -> None:
    with pytest.raises(UserError, match="rows have no src; use row or text"):
        make_filters(Filters(unique=["src"]), ["text"], {"": (None, None)})
