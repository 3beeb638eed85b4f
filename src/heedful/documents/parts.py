"""The parts of a text without tags, and its translation with tags."""

from dataclasses import dataclass

from heedful.documents.word_links import TokenAlignment
from heedful.fidelity import Reason
from heedful.fidelity.reasons import tags_reason


@dataclass(frozen=True)
class Part:
    """A part of a text without tags, and its translation; blanks between sentences are parts too.

    Attributes:
        alignment: of the tokens of both, without blanks around them; None: unknown.
    """

    source: str
    target: str
    alignment: TokenAlignment | None = None

    @property
    def is_copied(self) -> bool:
        """The part is its own translation, but for blanks around it."""
        return self.source.strip() == self.target.strip()


@dataclass(frozen=True)
class Placed:
    """A translation with tags.

    Attributes:
        unsure: texts between tags that no word of the translation attends to most.
        has_removed: the model wrote names of tags, which are left out.
        num_blank: rows whose translation is blank; they are as in the text.
    """

    text: str
    unsure: tuple[str, ...] = ()
    has_removed: bool = False
    num_blank: int = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons for a review."""
        removed = (Reason("unknown_removed"),) if self.has_removed else ()
        return (*removed, *map(tags_reason, self.unsure))
