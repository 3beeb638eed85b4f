"""Styles of dates in five languages, from templates of CLDR and of everyday use.

A style is a template, such as "the {nth} of {month} {year}", in a spelling variant (capitals,
missing accents, double spaces). Its texts are precomputed, so that rendering is a few look-ups.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from heedful import extras

Language = Literal["en", "de", "fr", "es", "zh"]

LANGUAGES: tuple[Language, ...] = get_args(Language)
YEARS = range(1900, 2100)


class Table(NamedTuple):
    """The texts of one part of a date: `part` 0 year, 1 month, 2 day of the month, 3 weekday."""

    part: int
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Style:
    """A format of dates: fixed texts, and tables that are indexed by a part of the date."""

    name: str
    language: Language
    held_out: bool
    pieces: tuple[str | Table, ...]

    def render(self, day: date) -> str:
        """The date `day`, of a year in `YEARS`, in this style."""
        indices = _indices(day)
        return "".join([p if isinstance(p, str) else p.texts[indices[p.part]] for p in self.pieces])

    def matches(self, text: str, day: date) -> bool:
        """`text == self.render(day)`, which ends at the first piece that differs."""
        indices, end = _indices(day), 0
        for p in self.pieces:
            piece = p if isinstance(p, str) else p.texts[indices[p.part]]
            if not text.startswith(piece, end):
                return False
            end += len(piece)
        return end == len(text)


@lru_cache(maxsize=1)  # one date is compared with all styles
def _indices(day: date) -> tuple[int, int, int, int]:
    """The index of the date in the tables of each part."""
    assert day.year in YEARS, day
    return day.year - YEARS.start, day.month - 1, day.day - 1, day.weekday()


def build_styles() -> tuple[Style, ...]:
    """All styles, without duplicates within a language.

    Of equal styles the held-out one is kept. Raises UserError without the package babel.
    """
    extras.require("demo", "the task dates")
    styles: list[Style] = []
    for language in LANGUAGES:
        templates = list(_templates_of(language))
        variants = [style for template in templates for style in _variants(language, *template)]
        unique: dict[tuple[str | Table, ...], Style] = {}
        for style in sorted(variants, key=lambda style: not style.held_out):
            unique.setdefault(style.pieces, style)
        styles.extend(unique.values())
    return tuple(styles)


def _templates_of(language: Language) -> Iterator[tuple[str, str, str, dict[str, Table]]]:
    """Name, template, held-out spelling and fields of CLDR's templates and of heedful's."""
    from babel import Locale

    for identifier in _TABLES["locales"][language]:
        locale = Locale.parse(identifier)
        for name, template in _cldr_templates(locale):
            yield f"{identifier} {name}", template, "", _fields(locale)
    fields = _fields(Locale.parse(_TABLES["locales"][language][0]))
    numeric = _TABLES["numeric"] if language != "zh" else []
    for row in [*numeric, *_TABLES[language]]:
        template, _, held_out = row.partition(" ! ")
        yield f"{language} {template}", template, held_out, fields


def _cldr_templates(locale: Any) -> Iterator[tuple[str, str]]:
    """Name and template of each pattern of the locale for a complete, unambiguous date.

    Years have all digits (CLDR's `y`), without era. Patterns with a numeric month are in the order
    day-month-year or year-month-day.
    """
    from babel.dates import tokenize_pattern

    field_names = _TABLES["cldr"]
    for name, pattern in [*locale.date_formats.items(), *locale.datetime_skeletons.items()]:
        tokens: Any = tokenize_pattern(pattern.pattern)
        parts = [(k, value if k == "chars" else value[0] * value[1]) for k, value in tokens]
        fields = [part for kind, part in parts if kind == "field"]
        order = "".join(field[0] for field in fields).replace("E", "")
        is_date = field_names.keys() >= {*fields} and sorted(order) == ["M", "d", "y"]
        if is_date and ("MMM" in "".join(fields) or order in ("dMy", "yMd")):
            pieces = (
                part if kind == "chars" else f"{{{field_names[part]}}}" for kind, part in parts
            )
            yield name, "".join(pieces)


def _fields(locale: Any) -> dict[str, Table]:
    """The table of each field of templates, in the language of the locale."""
    language, months, widths = locale.language, locale.months, ("wide", "abbreviated")
    numbers, days = range(1, 13), range(1, 32)
    month, mon = ([months["format"][width][i] for i in numbers] for width in widths)
    mon3 = [months["stand-alone"]["abbreviated"][i].rstrip(".") for i in numbers]
    weekday, wd = ([locale.days["format"][width][i] for i in range(7)] for width in widths)
    other = {"Samstag": "Sonnabend", "星期日": "星期天"}
    weekday2 = [other.get(name, name) for name in weekday]
    cyear = [str(year).translate(_CHINESE_DIGITS) for year in YEARS]
    tables: dict[str, tuple[int, Iterable[str]]] = {
        "year": (0, map(str, YEARS)),
        "cyear": (0, cyear),
        "cyear0": (0, (year.replace("〇", "零") for year in cyear)),
        "month": (1, month),
        "mon": (1, mon),
        "mon3": (1, mon3),
        # A month without abbreviation has no full stop.
        "mon.": (1, (a if a == b else f"{a}." for a, b in zip(mon3, month, strict=True))),
        "m": (1, map(str, numbers)),
        "mm": (1, (f"{i:02}" for i in numbers)),
        "cm": (1, map(_chinese, numbers)),
        "d": (2, map(str, days)),
        "dd": (2, (f"{day:02}" for day in days)),
        "cd": (2, map(_chinese, days)),
        "nth": (2, (_ordinal(day, language) for day in days)),
        "weekday": (3, weekday),
        "weekday2": (3, weekday2),
        "weekday3": (3, (name.replace("星期", "礼拜") for name in weekday2)),
        "wd": (3, wd),
        "wd3": (3, (name.rstrip(".") for name in wd)),
    }
    return {field: Table(part, tuple(texts)) for field, (part, texts) in tables.items()}


_CHINESE_DIGITS = str.maketrans("0123456789", "〇一二三四五六七八九")


def _chinese(number: int) -> str:
    """1 to 31 in Chinese numerals: 三, 十, 十四, 二十, 三十一."""
    tens, units = divmod(number, 10)
    ten = "" if tens == 0 else "十" if tens == 1 else f"{tens}十"
    return (ten + (str(units) if units else "")).translate(_CHINESE_DIGITS)


def _ordinal(day: int, language: str) -> str:
    """The day as the language writes it: 14th in English; 1er, 14 in French; 1º, 14 in Spanish."""
    if language == "en":
        ending = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        return f"{day}{ending}"
    return str(day) + ({"fr": "er", "es": "º"}.get(language, "") if day == 1 else "")


def _variants(
    language: Language, name: str, template: str, held_out: str, fields: dict[str, Table]
) -> Iterator[Style]:
    """The template in each spelling of the language; templates of numbers have only one."""
    has_words = any(letter.isalpha() for letter in re.sub(_NUMBERS, "", template))
    for spelling in _TABLES["spellings"][language] if has_words else ("",):
        write = _SPELLINGS[spelling]
        pieces: list[str | Table] = []
        for text, field in re.findall(r"([^{]+)|\{([^}]+)\}", template):
            if text:
                pieces.append(write(text, False))
            else:
                part, names = fields[field]
                is_name = part in (1, 3)
                pieces.append(Table(part, tuple(write(name, is_name) for name in names)))
        yield Style(
            name=f"{name} {spelling}".rstrip(),
            language=language,
            held_out=held_out == "all" or (spelling != "" and spelling == held_out),
            pieces=tuple(pieces),
        )


_NUMBERS = re.compile(r"\{(year|m|mm|d|dd)\}")


# Spellings are functions of a text and of whether it is the name of a month or weekday.


def _unaccented(text: str) -> str:
    letters = unicodedata.normalize("NFD", text)
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


_SPELLINGS: dict[str, Callable[[str, bool], str]] = {
    "": lambda text, is_name: text,
    "lower": lambda text, is_name: text.lower(),
    "upper": lambda text, is_name: text.upper(),
    "capital": lambda text, is_name: text.capitalize() if is_name else text,
    "umlautless": lambda text, is_name: text.replace("ä", "ae"),
    "unaccented": lambda text, is_name: _unaccented(text),
    "unaccented-upper": lambda text, is_name: _unaccented(text).upper(),
    "spaced": lambda text, is_name: text if is_name else text.replace(" ", "  "),
}

_TABLES: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "date_templates.yaml").read_text(encoding="utf-8")
)
