"""Counts and examples of the training rows that filters dropped."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int64
from pydantic import TypeAdapter

from heedful.errors import UserError

MAX_EXAMPLES = 10  # of each filter


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
