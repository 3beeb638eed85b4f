"""The text that each token of a vocabulary adds to a decoded text."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


@dataclass(frozen=True, eq=False)
class TokenTexts:
    """What each token adds to a text, in UTF-8; nothing for special tokens.

    Attributes:
        first: at the beginning of a text, where most decoders drop a space.
        later: after other tokens.
    """

    first: list[bytes]
    later: list[bytes]

    @classmethod
    def read(
        cls, pieces: Sequence[bytes | None], specials: Iterable[int], decode: Decode
    ) -> "TokenTexts":
        """From the bytes of each token; None: they depend on the token before it (WordPiece).

        Args:
            decode: returns the texts of lists of ids.
        """
        special = set(specials)
        ids = [token for token in range(len(pieces)) if token not in special]
        first, later = ([b""] * len(pieces) for _ in range(2))
        alone = decode([[token] for token in ids])
        # The text of a pair begins with that of its first token, whichever follows.
        anchor, before = next(zip(ids, alone, strict=True), (0, ""))
        missing = [token for token in ids if pieces[token] is None]
        pairs = dict(zip(missing, decode([[anchor, token] for token in missing]), strict=True))
        for token, text in zip(ids, alone, strict=True):
            piece = pieces[token]
            later[token] = pairs[token][len(before) :].encode() if piece is None else piece
            # A part of a character is decoded as U+FFFD.
            first[token] = later[token] if _REPLACEMENT in text else text.encode()
        return cls(first, later)

    def containing(self, texts: Sequence[bytes], *, at_start: bool) -> list[int]:
        """The tokens that add one of some texts as a whole."""
        added = self.first if at_start else self.later
        return [token for token, text in enumerate(added) if any(part in text for part in texts)]

    def beginning_with(self, prefix: bytes) -> list[int]:
        """The tokens that add a text with this beginning after other tokens."""
        tokens, first = [], bisect_left(self._sorted, (prefix, -1))
        for text, token in self._sorted[first:]:
            if not text.startswith(prefix):
                break
            tokens.append(token)
        return tokens

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((text, token) for token, text in enumerate(self.later) if text)
