"""Statistics of data: rows that were read and kept, and training rows that filters dropped."""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Int64
from pydantic import TypeAdapter

from heedful.errors import UserError

MAX_EXAMPLES = 10  # of each filter
_SIDES = {"src": "source", "tgt": "target"}


@dataclass(frozen=True)
class Counts:
    """The size of a text in the units by which a loss may be divided.

    Characters (code points) and bytes (UTF-8) are counted before the tokenizer normalizes the text.
    A total loss of L nats over all of them is L / (ln 2 · characters) bits per character, and
    likewise per byte.
    """

    characters: int = 0
    bytes: int = 0
    tokens: int = 0  # without special tokens
    unknown: int = 0  # unknown tokens

    def plus(self, other: "Counts") -> "Counts":
        """The sums of two counts."""
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class DataReport:
    """Statistics of a data set: rows that were read, kept, dropped and truncated.

    Args:
        num_lines: lines that were read.
        num_kept: rows that remain.
        num_empty: rows dropped because a column was empty or held only unknown tokens.
        num_dropped: rows dropped because a sequence was too long.
        num_truncated: rows with a truncated sequence.
        num_filtered: training rows dropped by filters.
        num_also_held_out: training rows dropped because their source is in a held-out set too.
        num_headers: first lines of files, with names of columns, that are no rows.
        left_out: units of translators' files that are no rows, by reason, such as "fuzzy".
        noun: the word for a row in messages: "texts" or "pairs".
        empty: for each column of text, the number of rows dropped because it was empty.
        counts: for each column of ids, the size of the rows that remain.
    """

    num_lines: int
    num_kept: int
    num_empty: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    num_also_held_out: int = 0
    num_filtered: int = 0
    num_headers: int = 0
    noun: str = "texts"
    empty: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Counts] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def plus(self, other: "DataReport") -> "DataReport":
        """The sums of two reports on rows of the same columns."""
        numbers = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
            if field.name.startswith("num_")
        }
        empty = {name: self.empty.get(name, 0) + n for name, n in other.empty.items()}
        counts = {name: n.plus(self.counts.get(name, Counts())) for name, n in other.counts.items()}
        left_out = dict(self.left_out)
        for reason, count in other.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
        return replace(self, **numbers, empty=empty, counts=counts, left_out=left_out)

    def summary(self) -> str:
        """The statistics as one line of text."""
        parts = [f"{self.num_lines:,} lines read, {self.num_kept:,} {self.noun} kept"]
        if self.num_headers:
            named = f"{self.num_headers} with names of columns left out"
            parts.append(f"{named} (header=false keeps it)")
        parts += [f"{count:,} left out as {reason}" for reason, count in self.left_out.items()]
        if self.num_empty:
            sides = [f"{_SIDES[c]} {n:,}" for c, n in self.empty.items() if c in _SIDES]
            by_side = f" ({', '.join(sides)})" if sides else ""
            parts.append(f"{self.num_empty:,} dropped as empty{by_side}")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped as too long")
        if self.num_filtered:
            parts.append(f"{self.num_filtered:,} dropped by filters")
        if self.num_also_held_out:
            parts.append(f"{self.num_also_held_out:,} dropped as also held out")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} truncated to the maximum length")
        if any(counts.tokens for counts in self.counts.values()):
            shares = [
                f"{_SIDES[c] + ' ' if c in _SIDES else ''}{n.unknown:,}"
                f" ({n.unknown / max(n.tokens, 1):.2%})"
                for c, n in self.counts.items()
            ]
            parts.append(f"unknown tokens: {', '.join(shares)}")
        return "; ".join(parts)


@dataclass(frozen=True)
class Example:
    """A row that a filter dropped: the file and line that it is from, and its texts by column."""

    location: str
    texts: Mapping[str, str]


@dataclass
class FilterCount:
    """The rows that one filter dropped.

    Attributes:
        num_seen: rows that reached the filter, which earlier filters kept.
        examples: the first rows that were dropped.
    """

    name: str
    setting: str
    num_seen: int = 0
    num_dropped: int = 0
    examples: list[Example] = field(default_factory=list)

    def plus(self, other: "FilterCount") -> "FilterCount":
        """The count of the same filter on the rows of both counts, in this order."""
        return replace(
            self,
            num_seen=self.num_seen + other.num_seen,
            num_dropped=self.num_dropped + other.num_dropped,
            examples=[*self.examples, *other.examples][:MAX_EXAMPLES],
        )

    def add(self, num_seen: int, dropped: Int64[np.ndarray, " d"]) -> list[int]:
        """Count rows of a chunk; returns those of the indices `dropped` that become examples."""
        self.num_seen += num_seen
        self.num_dropped += len(dropped)
        return list(dropped[: MAX_EXAMPLES - len(self.examples)].tolist())

    @property
    def label(self) -> str:
        """The recipe key with its value."""
        return f"{self.name} {self.setting}".rstrip()


@dataclass
class FilterReport:
    """The rows that filters dropped, in the order in which they are applied."""

    filters: list[FilterCount] = field(default_factory=list)

    @property
    def num_dropped(self) -> int:
        """The number of rows that any filter dropped."""
        return sum(count.num_dropped for count in self.filters)

    def summary(self, noun: str) -> str:
        """One line of text; `noun`: the word for a row."""
        num_seen = self.filters[0].num_seen if self.filters else 0
        parts = [f"{count.label}: {count.num_dropped:,}" for count in self.filters]
        share = f" ({self.num_dropped / max(num_seen, 1):.1%})"
        return f"{self.num_dropped:,} of {num_seen:,} {noun} dropped{share}; {', '.join(parts)}"

    def plus(self, other: "FilterReport") -> "FilterReport":
        """The report of the same filters on the rows of both reports, in this order."""
        pairs = zip(self.filters, other.filters, strict=True)
        return FilterReport([first.plus(second) for first, second in pairs])

    def check(self) -> None:
        """Raise UserError, after the last chunk, for a filter that dropped all rows it saw."""
        for count in self.filters:
            if count.num_seen and count.num_dropped == count.num_seen:
                first = count.examples[0]
                raise UserError(
                    f"data.filters.{count.name}: {count.setting} drops all {count.num_seen:,} rows "
                    f"that reach it (the first: {first.location}); change it or leave it out"
                )

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> "FilterReport":
        """The report that `to_json` made."""
        return TypeAdapter(cls).validate_python(content)
