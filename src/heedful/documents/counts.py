"""Counts of the segments of a document by the origin of their translations."""

from dataclasses import dataclass, field


@dataclass
class Counts:
    """The numbers of segments of a translated document.

    Attributes:
        translated: by the model.
        from_memory: exact matches of the memory.
        replaced: of both, those in place of a translation that the file had.
        kept: with a translation that the file has.
        without_words: not translated, as they have no letter or digit.
        to_review: with a reason for a review.
        blank: whose translation came out blank; they are left as they are.
        skipped: parts that are not translated, by kind.
    """

    segments: int = 0
    translated: int = 0
    from_memory: int = 0
    replaced: int = 0
    kept: int = 0
    without_words: int = 0
    to_review: int = 0
    blank: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def summary(self) -> str:
        """The counts above 0 as one line."""
        named = [
            (self.translated, "translated"),
            (self.from_memory, "from the memory"),
            (self.replaced, "in place of other translations"),
            (self.kept, "kept"),
            (self.without_words, "without words"),
            (self.to_review, "to review"),
            (self.blank, "without a translation"),
        ]
        parts = [f"{self.segments:,} segment{'' if self.segments == 1 else 's'}"]
        parts += [f"{count:,} {what}" for count, what in named if count]
        if self.skipped:
            listed = ", ".join(f"{what} {count:,}" for what, count in self.skipped.items())
            parts.append(f"not translated: {listed}")
        return "; ".join(parts)
