"""Dates: equal to Babel's formatter, unambiguous, and held out from training as declared."""

import random
from collections import Counter
from datetime import date, timedelta

import pytest
from babel import Locale
from babel.dates import format_date, format_skeleton

from heedful.errors import UserError
from heedful.examples import dates
from heedful.examples.date_styles import LANGUAGES, YEARS
from heedful.examples.dates import (
    EXAMPLES_FOR_PEOPLE,
    HELD_OUT_GROUPS,
    HELD_OUT_YEARS,
    STYLES,
    DateExample,
    generate,
)

HELD_OUT_STYLES = {style.name for style in STYLES if style.held_out}
# A leap year, a common one, and a fortieth of the days of the 26 years with the other calendars.
DAYS = [date(2000, 1, 1) + timedelta(days=i) for i in [*range(2 * 365 + 1), *range(731, 10227, 40)]]


@pytest.fixture(scope="module")
def train() -> list[DateExample]:
    return generate(15_000, seed=0, split="train")


@pytest.fixture(scope="module")
def held_out() -> dict[str, list[DateExample]]:
    return {
        "valid": generate(1_500, seed=0, split="valid"),
        "test": generate(1_500, seed=0, split="test"),
    }


@pytest.fixture(scope="module")
def readings() -> list[tuple[date, list[str]]]:
    """Each day in every style."""
    return [(day, [style.render(day) for style in STYLES]) for day in DAYS]


# What CLDR gives that says day, month and full year, apart from month-first numbers. Written out,
# so that a fault in our reading of patterns shows.
CLDR = {
    "en": "full long medium yMMMEd yMMMd",
    "en_GB": "full long medium yMEd yMMMEd yMMMEEEEd yMMMMEEEEd yMMMd yMd",
    "de": "full long medium yMEd yMMMEd yMMMd yMMdd yMd",
    "de_AT": "full long medium yMEd yMMMEd yMMMd yMd",
    "fr": "full long medium yMEd yMMMEd yMMMd yMd",
    "fr_CA": "full long medium yMMMEd yMMMd yMd",
    "es": "full long medium yMEd yMMMEd yMMMMEd yMMMMd yMMMd yMd",
    "es_MX": "full long medium yMEd yMMMEd yMMMMEd yMMMMd yMMMd yMd",
    "zh": "full long medium short yMEd yMMMEd yMMMd yMd",
    "zh_Hant": "full long medium short yMEd yMMMEd yMMMd yMd",
}


@pytest.mark.parametrize("identifier", CLDR)
def test_each_pattern_of_cldr_is_a_style_with_the_same_output_as_babel(identifier: str) -> None:
    locale = Locale.parse(identifier)
    rng = random.Random(0)
    days = [date(1900, 1, 1) + timedelta(days=rng.randrange(73_049)) for _ in range(200)]
    written = {
        tuple(style.render(day) for day in days)
        for style in STYLES
        if style.language == locale.language
    }
    for name in CLDR[identifier].split():
        is_format = name in ("full", "long", "medium", "short")
        if not is_format and name not in locale.datetime_skeletons:
            continue  # older CLDR
        by_babel = tuple(
            format_date(day, name, locale)
            if is_format
            else format_skeleton(name, day, None, True, locale)
            for day in days
        )
        assert by_babel in written, f"{identifier} {name}: {by_babel[0]}"


@pytest.mark.parametrize(
    ("style", "day", "expected"),
    [
        ("en the {nth} of {month} {year}", "1987-03-14", "the 14th of March 1987"),
        ("en {mon.} {nth}, {year} upper", "2011-05-22", "MAY 22ND, 2011"),
        ("en {month} {nth}, {year} spaced", "2011-06-13", "June  13th,  2011"),
        ("de den {d}. {month} {year}", "1987-03-14", "den 14. März 1987"),
        ("de den {d}. {month} {year} umlautless", "1987-03-14", "den 14. Maerz 1987"),
        ("de {weekday2}, den {d}. {month} {year}", "1987-03-14", "Sonnabend, den 14. März 1987"),
        ("de {d}. {mon.} {year}", "2003-06-01", "1. Jun. 2003"),
        ("de_AT long", "2003-01-01", "1. Jänner 2003"),
        ("fr le {nth} {month} {year}", "1987-03-01", "le 1er mars 1987"),
        ("fr le {nth} {month} {year} unaccented", "1987-08-02", "le 2 aout 1987"),
        ("fr {wd3} {d} {mon3} {year}", "1987-12-14", "lun 14 déc 1987"),
        ("es long", "1987-03-14", "14 de marzo de 1987"),
        ("es {nth} de {month} de {year}", "1987-03-01", "1º de marzo de 1987"),
        ("es full unaccented-upper", "1987-03-14", "SABADO, 14 DE MARZO DE 1987"),
        ("zh {cyear}年{cm}月{cd}日{weekday}", "2007-03-14", "二〇〇七年三月十四日星期三"),
        ("zh {cyear0}年{cm}月{cd}号", "2007-12-31", "二零零七年十二月三十一号"),
        ("zh {cyear}年{cm}月{cd}日{weekday2}", "2020-10-20", "二〇二〇年十月二十日星期二"),
        ("zh {year}年{m}月{d}日{weekday3}", "2007-03-18", "2007年3月18日礼拜天"),
    ],
)
def test_styles_of_daily_use(style: str, day: str, expected: str) -> None:
    (actual,) = [s for s in STYLES if s.name == style]
    assert actual.render(date.fromisoformat(day)) == expected


def test_no_source_has_two_readings(readings: list[tuple[date, list[str]]]) -> None:
    actual: dict[str, date] = {}
    for day, sources in readings:
        for source, style in zip(sources, STYLES, strict=True):
            assert actual.setdefault(source, day) == day, f"{style.name}: {source}"
    assert len(actual) > 200 * len(DAYS)


def test_a_style_matches_a_text_that_it_renders_and_no_other() -> None:
    for day in DAYS[:3]:
        sources = [style.render(day) for style in STYLES]
        for style, source in zip(STYLES, sources, strict=True):
            for text in (*sources[::20], source, source + "0", source[:-1]):
                assert style.matches(text, day) == (text == source), f"{style.name}: {text}"


def test_every_source_contains_the_full_year() -> None:
    chinese = str.maketrans("〇零一二三四五六七八九", "00123456789")
    for style in STYLES:
        for year in YEARS:
            assert str(year) in style.render(date(year, 5, 6)).translate(chinese)


def test_no_two_styles_of_a_language_are_the_same() -> None:
    assert len({style.name for style in STYLES}) == len(STYLES)
    days = DAYS[::3]
    written = {(style.language, *map(style.render, days)) for style in STYLES}
    assert len(written) == len(STYLES)


def test_training_holds_no_held_out_year_or_style(train: list[DateExample]) -> None:
    assert len(HELD_OUT_YEARS) == 30
    for start in range(1900, 2100, 20):
        assert len([year for year in HELD_OUT_YEARS if start <= year < start + 20]) == 3
    for example in train:
        assert example.group == "train"
        assert int(example.tgt[:4]) not in HELD_OUT_YEARS
        assert example.style not in HELD_OUT_STYLES
    assert {example.style for example in train} == {s.name for s in STYLES} - HELD_OUT_STYLES
    assert len({example.tgt[:4] for example in train}) == 170
    num_by_language = Counter(example.language for example in train)
    assert all(abs(num_by_language[language] - 3_000) < 300 for language in LANGUAGES)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_examples_match_their_group(
    split: str, held_out: dict[str, list[DateExample]]
) -> None:
    familiar = [style for style in STYLES if style.name not in HELD_OUT_STYLES]
    for example in held_out[split]:
        day = date.fromisoformat(example.tgt)
        is_new_style = "styles" in example.group
        assert (day.year in HELD_OUT_YEARS) == ("years" in example.group)
        assert (example.style in HELD_OUT_STYLES) == is_new_style
        if is_new_style:
            assert all(style.render(day) != example.src for style in familiar)
    assert {int(item.tgt[:4]) for item in held_out[split]} >= HELD_OUT_YEARS
    kinds = Counter((example.language, example.group) for example in held_out[split])
    assert kinds == {(lang, group): 100 for lang in LANGUAGES for group in HELD_OUT_GROUPS}


def test_no_source_is_in_two_splits(
    train: list[DateExample], held_out: dict[str, list[DateExample]]
) -> None:
    valid, test = ({example.src for example in held_out[split]} for split in ("valid", "test"))
    assert len(valid) == len(test) == 1_500
    assert valid.isdisjoint(test)
    assert valid.isdisjoint(example.src for example in generate(1_500, seed=1, split="test"))
    assert (valid | test).isdisjoint(example.src for example in train)


def test_splits_of_a_few_days_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Independent samples of so few days would overlap."""
    few = {held_out: dates._days(held_out)[:5] for held_out in (False, True)}
    monkeypatch.setattr(dates, "_days", few.get)
    valid, test = ({e.src for e in generate(100, seed=0, split=s)} for s in ("valid", "test"))
    assert valid.isdisjoint(test)


def test_all_parts_of_a_held_out_style_occur_in_training_styles_of_its_language() -> None:
    for style in (s for s in STYLES if s.name in HELD_OUT_STYLES):
        others = [s for s in STYLES if s.language == style.language and not s.held_out]
        parts = {piece for other in others for piece in other.pieces}
        assert parts.issuperset(style.pieces), style.name
    for language in LANGUAGES:
        styles = [style for style in STYLES if style.language == language]
        num_held_out = sum(style.held_out for style in styles)
        assert 0.1 < num_held_out / len(styles) < 0.25


def test_a_held_out_style_differs_from_all_of_training_on_many_dates() -> None:
    days = random.Random(0).sample(DAYS, 150)
    familiar = {s.render(day) for s in STYLES if s.name not in HELD_OUT_STYLES for day in days}
    for style in (s for s in STYLES if s.name in HELD_OUT_STYLES):
        num_new = sum(style.render(day) not in familiar for day in days)
        assert num_new > 15, style.name


def test_the_same_seed_gives_the_same_examples() -> None:
    for split in ("train", "valid", "test"):
        first = generate(200, seed=5, split=split)
        assert first == generate(200, seed=5, split=split)
        assert first[:100] == generate(100, seed=5, split=split)
        assert first != generate(200, seed=6, split=split)


def test_examples_for_people_are_unseen_and_in_every_language() -> None:
    assert {example.language for example in EXAMPLES_FOR_PEOPLE} == set(LANGUAGES)
    for example in EXAMPLES_FOR_PEOPLE:
        year = int(example.tgt[:4])
        new_year = "new years and styles" if year in HELD_OUT_YEARS else "new styles"
        assert example.group == new_year
        assert example.style in HELD_OUT_STYLES
        assert not dates._is_familiar(example)
        (style,) = [s for s in STYLES if s.name == example.style]
        assert style.render(date.fromisoformat(example.tgt)) == example.src


def test_a_count_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="cannot make -1"):
        generate(-1, seed=0, split="train")
    with pytest.raises(UserError, match="at most 50000"):
        generate(50_001, seed=0, split="test")
