"""What was read and encoded, what was left out, and what the tokenizers did not know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SIDES = {"src": "source", "tgt": "target"}
_SHOWN = 10  # names that a line lists


@dataclass(frozen=True)
class Counts:
    """How large a text is by each measure that a loss is told in.

    Characters (code points), bytes (UTF-8) and words (between whitespace) are those of the text
    as it was read, before the tokenizer normalised it. With L the sum of the loss in nats, bits
    per character are L / ln 2 / characters, so per byte; word perplexity is exp(L / words).
    """

    characters: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0  # of the text alone, without special tokens
    unknown: int = 0


@dataclass(frozen=True)
class Report:
    """The account of some rows, from reading to encoding.

    Args:
        noun: what a row is called.
        empty: by column, how often it was the cause that a row was left out.
        counts: by stored column, of the rows that were kept.
    """

    num_lines: int
    num_kept: int
    num_empty: int = 0  # rows left out because a column was empty or wholly unknown
    num_dropped: int = 0  # over-long
    num_truncated: int = 0  # over-long
    noun: str = "texts"
    empty: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, Counts] = field(default_factory=dict)

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.num_lines:,} lines read, {self.num_kept:,} {self.noun} kept"]
        if self.num_empty:
            sides = [f"{_SIDES[c]} {n:,}" for c, n in self.empty.items() if c in _SIDES]
            told = f" ({', '.join(sides)})" if sides else ""
            parts.append(f"{self.num_empty:,} dropped as empty{told}")
        if self.num_dropped:
            parts.append(f"{self.num_dropped:,} dropped as too long")
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to the longest allowed")
        if any(counts.tokens for counts in self.counts.values()):
            shares = [
                f"{_SIDES[c] + ' ' if c in _SIDES else ''}{n.unknown:,}"
                f" ({n.unknown / max(n.tokens, 1):.2%})"
                for c, n in self.counts.items()
            ]
            parts.append(f"unknown tokens: {', '.join(shares)}")
        return "; ".join(parts)


def listed(names: Sequence[str]) -> str:
    """Some names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
