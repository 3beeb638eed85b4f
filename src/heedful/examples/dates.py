"""The dates task: translate dates in five languages to ISO 8601 (YYYY-MM-DD).

All dates are unambiguous: years have four digits, and numeric dates are in the order
year-month-day if the year comes first, else day-month-year, with any separator. Month-first dates
(3/14/2007) do not occur.

Some years, in all styles, and some styles, in all years, are held out from training. Every part of
a held-out style (names, numbers, separators) occurs in other styles of its language.
"""

import random
import zlib
from collections.abc import Sequence
from datetime import date
from functools import cache
from typing import Literal, NamedTuple, TypeVar

from heedful import plugins
from heedful.errors import UserError
from heedful.examples.date_styles import LANGUAGES, YEARS, Language, Style, build_styles
from heedful.tasks.translation import GeneratedPairs

Split = Literal["train", "valid", "test"]
Group = Literal["train", "new years", "new styles", "new years and styles"]

Item = TypeVar("Item")

HELD_OUT_GROUPS: tuple[Group, ...] = ("new years", "new styles", "new years and styles")
# Three of every twenty years, chosen at random.
HELD_OUT_YEARS: frozenset[int] = frozenset(
    (
        *(1902, 1904, 1918, 1923, 1928, 1935, 1952, 1954, 1955, 1963),
        *(1966, 1975, 1980, 1992, 1993, 2000, 2014, 2019, 2023, 2027),
        *(2028, 2040, 2050, 2058, 2060, 2077, 2079, 2086, 2092, 2093),
    )
)
STYLES: tuple[Style, ...] = build_styles()
MAX_HELD_OUT_COUNT = 50_000


class DateExample(NamedTuple):
    """A pair, its language, the name of its style, and the property that is held out."""

    src: str
    tgt: str
    language: Language
    style: str
    group: Group


@plugins.task("dates")
class Dates(GeneratedPairs):
    """The dates task. Its held-out examples are not in the training data of any seed."""

    recipe_keys = GeneratedPairs.recipe_keys.plus("data.generated.seed")

    def generate_pairs(self, split: str, count: int, unseen: set[str]) -> list[tuple[str, str]]:
        seed = self.recipe.data.generated.seed
        examples = generate(count, seed=seed, split=split)  # type: ignore[arg-type]
        return [(example.src, example.tgt) for example in examples]


def generate(count: int, *, seed: int, split: Split) -> list[DateExample]:
    """`count` examples, determined by the arguments and the version of Babel.

    For "train", languages are sampled uniformly, then a style of the language, then a date. "valid"
    and "test" have no source in common with "train" or each other, no duplicate sources, and
    each language with each of the `HELD_OUT_GROUPS` equally often, in turn.

    Raises:
        UserError: a negative count, or more than `MAX_HELD_OUT_COUNT` held-out examples.
    """
    if count < 0 or (split != "train" and count > MAX_HELD_OUT_COUNT):
        raise UserError(
            f"dates: cannot make {count} examples for {split}; ask for 0 or more"
            + ("" if split == "train" else f", at most {MAX_HELD_OUT_COUNT}")
        )
    rng = random.Random(f"{split} {seed}")
    if split == "train":
        return [_draw(rng, _pick(rng, LANGUAGES), "train") for _ in range(count)]
    kinds = [(language, group) for language in LANGUAGES for group in HELD_OUT_GROUPS]
    examples: dict[str, DateExample] = {}
    while len(examples) < count:
        example = _draw(rng, *kinds[len(examples) % len(kinds)])
        # A hash of the text determines its split, so that splits are disjoint for all seeds.
        is_odd = zlib.crc32(example.src.encode()) % 2 == 1
        if is_odd != (split == "test") or (example.group != "new years" and _is_familiar(example)):
            continue
        examples.setdefault(example.src, example)
    return list(examples.values())


def _draw(rng: random.Random, language: Language, group: Group) -> DateExample:
    style = _pick(rng, _styles_of(language, group in ("new styles", "new years and styles")))
    day = _pick(rng, _days(group in ("new years", "new years and styles")))
    return _example(style, day, group)


def _example(style: Style, day: date, group: Group) -> DateExample:
    return DateExample(style.render(day), day.isoformat(), style.language, style.name, group)


def _pick(rng: random.Random, items: Sequence[Item]) -> Item:
    # Only random() is guaranteed to return the same numbers in all versions of Python.
    return items[int(rng.random() * len(items))]


@cache
def _days(new_years: bool) -> tuple[date, ...]:
    """All days of the held-out years, or of the others."""
    span = range(date(YEARS.start, 1, 1).toordinal(), date(YEARS.stop, 1, 1).toordinal())
    days = map(date.fromordinal, span)
    return tuple(day for day in days if (day.year in HELD_OUT_YEARS) == new_years)


@cache
def _styles_of(language: Language, held_out: bool) -> tuple[Style, ...]:
    return tuple(
        style for style in STYLES if style.language == language and style.held_out == held_out
    )


def _is_familiar(example: DateExample) -> bool:
    """True if a training style of any language renders this date as the same text.

    Styles may agree for some dates: "4 May" has the long and the short name of the month.
    """
    day = date.fromisoformat(example.tgt)
    return any(style.matches(example.src, day) for style in STYLES if not style.held_out)


_FOR_PEOPLE: tuple[tuple[str, str, Group], ...] = (
    ("en the {nth} of {month}, {year}", "2028-02-29", "new years and styles"),
    ("en {mon.} {nth}, {year}", "1969-07-20", "new styles"),
    ("de {weekday} den {d}. {month} {year}", "1954-07-04", "new years and styles"),
    ("fr le {weekday} {nth} {month} {year}", "1918-11-11", "new years and styles"),
    ("es {weekday} {d} de {month} de {year}", "1992-07-25", "new years and styles"),
    ("zh {weekday}，{cyear}年{cm}月{cd}日", "2040-10-01", "new years and styles"),
)
_BY_NAME = {style.name: style for style in STYLES}
EXAMPLES_FOR_PEOPLE: tuple[DateExample, ...] = tuple(
    _example(_BY_NAME[name], date.fromisoformat(day), group) for name, day, group in _FOR_PEOPLE
)
