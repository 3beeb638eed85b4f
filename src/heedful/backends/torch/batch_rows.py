"""The caches of a continuous batch: its rows, whose slots follow the lengths of their outputs, and
keys and values of ended outputs for prompts that begin like them.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from heedful.parts.cache import Cache, LayerShape, capacity_for
from heedful.parts.joined_cache import JoinedCache

LEAST = 64  # slots of the shortest rows: fewer groups of rows are faster than fewer slots
MIN_TOKENS = 16  # shortest prefix that is faster to copy than to compute
Item = TypeVar("Item")


@dataclass(eq=False)
class _Group(Generic[Item]):
    """Rows of one cache, whose texts are these rows and empty ones behind them.

    Attributes:
        lengths: tokens of each row in the cache.
        view: the rows alone, in the same tensors; None: to be made.
    """

    cache: Cache
    items: list[Item] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    view: Cache | None = None

    def append(self, items: Sequence[Item], lengths: Sequence[int], rows: Cache) -> None:
        """Add rows behind the others."""
        count = len(self.items)
        if count + len(items) > self.cache.num_texts:
            num_texts = 1 << (count + len(items) - 1).bit_length()
            self.cache = self.cache.with_texts(num_texts, 1)
        indices = torch.arange(count, count + len(items), device=rows.device)
        self.cache.write_rows(indices, rows)
        self.view = None
        self.items += items
        self.lengths += lengths

    def begin(self) -> Cache:
        """The cache of a step, with a slot for a new token of each row, which is counted."""
        if self.cache.reserve(1, drops_hidden=True) or self.view is None:
            self.view = self.cache.first(len(self.items))
        for group, whole in zip(self.view.groups, self.cache.groups, strict=True):
            group.num_read = whole.num_read
        self.lengths = [length + 1 for length in self.lengths]
        return self.view

    def copy_of(self, indices: Sequence[int]) -> Cache:
        """A copy of some rows as a cache without free slots."""
        rows = self.cache.select(torch.tensor(indices, device=self.cache.device))
        _limit(rows, max(self.lengths[index] for index in indices))
        return rows.with_texts(len(indices), 0)

    def remove(self, indices: Sequence[int]) -> None:
        """Take rows out; the last ones take their places."""
        for index in sorted(indices, reverse=True):
            last = len(self.items) - 1
            if index != last:
                where = torch.tensor([index], device=self.cache.device)
                self.cache.write_rows(where, self.cache.select(where.new_tensor([last])))
                self.items[index], self.lengths[index] = self.items[last], self.lengths[last]
            del self.items[last], self.lengths[last]
        self.view = None
        count = len(self.items)
        if not count:
            return
        _limit(self.cache, max(self.lengths))
        if 4 * count <= self.cache.num_texts:
            num_texts = 1 << (count - 1).bit_length()
            self.cache = self.cache.with_texts(num_texts, 1)


class BatchRows(Generic[Item]):
    """Rows with any number of tokens each, in groups of one cache whose capacities are powers of 2.

    A row is moved to the next group when its slots are full. So the slots are at most eight times
    the tokens (or `LEAST`): twice by the capacity, and four times by rows that have left.

    Args:
        layers: of the net.

    Attributes:
        window: tokens that a row keeps at most; None: all.
    """

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        windows = [layer.window for layer in layers]
        self.window = None if None in windows else max(w for w in windows if w is not None)
        self._groups: dict[int, _Group[Item]] = {}

    def __len__(self) -> int:
        return sum(len(group.items) for group in self._groups.values())

    @property
    def items(self) -> list[Item]:
        """The items of all rows, in the order of the rows of a step."""
        return [item for group in self._groups.values() for item in group.items]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that have been read."""
        return [length for group in self._groups.values() for length in group.lengths]

    def num_cached(self, length: int) -> int:
        """Tokens of a row of this length that are in its cache."""
        return length if self.window is None else min(length, self.window)

    def append(self, items: Sequence[Item], lengths: Sequence[int], rows: Cache) -> None:
        """Add rows.

        Args:
            lengths: tokens of each row that have been read.
            rows: their cache.
        """
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            groups.setdefault(self._capacity(length), []).append(index)
        for capacity, indices in groups.items():
            part = rows
            if len(groups) > 1:
                part = rows.select(torch.tensor(indices, device=rows.device))
            own = [lengths[index] for index in indices]
            _limit(part, max(own))
            chosen = [items[index] for index in indices]
            part = part.with_texts(len(indices), 1)
            if capacity in self._groups:
                self._groups[capacity].append(chosen, own, part)
            else:
                self._groups[capacity] = _Group(part, chosen, own)

    def begin(self) -> Cache | JoinedCache:
        """The cache of a step, with a slot for a new token of each row, which is counted."""
        for capacity, group in list(self._groups.items()):
            full = [i for i, n in enumerate(group.lengths) if self._capacity(n) > capacity]
            if full:
                items = [group.items[index] for index in full]
                lengths, rows = [group.lengths[index] for index in full], group.copy_of(full)
                self._remove(capacity, full)
                self.append(items, lengths, rows)
        caches = [group.begin() for group in self._groups.values()]
        return caches[0] if len(caches) == 1 else JoinedCache(caches)

    def remove(self, items: Sequence[Item]) -> None:
        """Take rows out."""
        gone = set(map(id, items))
        for capacity, group in list(self._groups.items()):
            indices = [index for index, item in enumerate(group.items) if id(item) in gone]
            if indices:
                self._remove(capacity, indices)

    def copy_of(self, item: Item, length: int) -> Cache:
        """The first tokens of a row, in a cache of their own."""
        for group in self._groups.values():
            if item in group.items:
                row = group.copy_of([group.items.index(item)])
                row.rewind(length)
                return row.with_texts(1, 0)
        raise KeyError(item)

    def _remove(self, capacity: int, indices: Sequence[int]) -> None:
        self._groups[capacity].remove(indices)
        if not self._groups[capacity].items:
            del self._groups[capacity]

    def _capacity(self, length: int) -> int:
        """Slots of the group that a row with `length` tokens and a new one belongs to."""
        return max(LEAST, capacity_for(self.num_cached(length) + 1))


def _limit(cache: Cache, length: int) -> None:
    """Lower the number of slots that attention reads to those of rows of this length."""
    for group in cache.groups:
        group.num_read = min(group.num_read or 0, length)


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
