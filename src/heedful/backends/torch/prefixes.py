"""Keys and values of ended outputs, kept for prompts that begin like them."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from heedful.parts.cache import Cache

MIN_TOKENS = 16  # shortest prefix that is faster to copy than to compute


class PrefixStore:
    """Caches of single rows by tenant and tokens; the least recently used are removed.

    A tenant finds its own rows alone, so that nobody learns from the speed of an answer what
    another one has asked.

    Args:
        max_tokens: of all rows together; 0: no row is stored.
        min_tokens: length of the shortest prefix to return.
    """

    def __init__(self, max_tokens: int, min_tokens: int = MIN_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self._rows: OrderedDict[tuple[str, tuple[int, ...]], Cache] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, tokens: Sequence[int], copy: Callable[[], Cache], tenant: str = "") -> None:
        """Store a row; it replaces stored rows of the tenant that are prefixes of it."""
        if not self.min_tokens <= len(tokens) <= self.max_tokens:
            return
        row, total = tuple(tokens), 0
        for owner, other in list(self._rows):
            if owner == tenant and row[: len(other)] == other:
                del self._rows[owner, other]
        self._rows[tenant, row] = copy()
        for key in reversed(list(self._rows)):
            total += len(key[1])
            if total > self.max_tokens:
                del self._rows[key]

    def find(
        self, tokens: Sequence[int], tenant: str = ""
    ) -> tuple[int, Callable[[], Cache] | None]:
        """The length of the longest stored prefix, and a function that copies it.

        The last of `tokens` is never part of the prefix.
        """
        best, length = None, self.min_tokens - 1
        for owner, other in self._rows:
            if owner == tenant:
                common = min(common_length(tokens, other), len(tokens) - 1)
                if common > length:
                    best, length = (owner, other), common
        if best is None:
            return 0, None
        self._rows.move_to_end(best)
        row = self._rows[best]

        def copy() -> Cache:
            """The prefix alone."""
            prefix = row.select(torch.tensor([0], device=row.device))
            prefix.rewind(length)
            return prefix

        return length, copy


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
