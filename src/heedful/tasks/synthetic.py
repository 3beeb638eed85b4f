"""The copy, reverse and sort tasks: pairs of symbol sequences as text, unseen ones kept unseen."""

import itertools
import random
from collections.abc import Callable, Collection
from typing import Literal

from heedful.errors import UserError
from heedful.tasks.inputs import SPLITS
from heedful.tasks.translation import MadePairs

SyntheticName = Literal["copy", "reverse", "sort"]
Pair = tuple[str, str]
Source = tuple[str, ...]
RULES: dict[SyntheticName, Callable[[Source], Source]] = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: tuple(sorted(source, key=int)),
}


class Synthetic(MadePairs):
    """Pairs of symbol sequences; the recipe's task says by which rule."""

    def make(self, split: str, count: int, unseen: set[str]) -> list[Pair]:
        sizes = self.recipe.data.generated
        return generate(
            self.recipe.task,  # type: ignore[arg-type]
            count,
            num_symbols=sizes.num_symbols,
            min_length=sizes.min_length,
            max_length=sizes.max_length,
            seed=sizes.seed + SPLITS.index(split),
            exclude=unseen,
        )


def generate(
    name: SyntheticName,
    count: int,
    *,
    num_symbols: int = 10,
    min_length: int = 10,
    max_length: int = 10,
    seed: int,
    exclude: Collection[str] = frozenset(),
) -> list[Pair]:
    """`count` pairs (source, target) such as ("3 0 2", "2 0 3"), the same for the same arguments.

    Symbols are the numbers 0 to `num_symbols - 1`, written as words with one space between; lengths
    count symbols. A length is drawn uniformly from `min_length` to `max_length`, then each symbol
    uniformly; a source that was drawn before, or is in `exclude`, is drawn again. The sources are
    therefore distinct, and a set made with `exclude` = training sources of the same sizes is truly
    unseen.

    Raises `UserError` for sizes that make no sequence, and when fewer than
    `count` distinct sequences are left.
    """
    if count < 0 or num_symbols < 1 or not 1 <= min_length <= max_length:
        raise UserError(
            f"{name}: sizes make no sequence (count {count}, num_symbols {num_symbols}, min_length"
            f" {min_length}, max_length {max_length}); need count >= 0, num_symbols >= 1 and"
            " 1 <= min_length <= max_length"
        )
    lengths = range(min_length, max_length + 1)
    total = sum(num_symbols**length for length in lengths)
    if count > total - len(exclude):
        raise UserError(
            f"{name}: {count} unseen sequences asked for, but {num_symbols} symbols at lengths"
            f" {min_length} to {max_length} make {total}, of which {len(exclude)} are excluded;"
            " ask for fewer, or raise num_symbols or max_length"
        )
    rng, symbols = random.Random(seed), [str(symbol) for symbol in range(num_symbols)]
    sources: dict[Source, str] = {}  # in the order of drawing
    if 2 * (count + len(exclude)) > total:  # drawing again would stall: list the space instead
        space = itertools.chain(*(itertools.product(symbols, repeat=size) for size in lengths))
        left = [source for source in space if " ".join(source) not in exclude]
        sources = {source: " ".join(source) for source in rng.sample(left, count)}
    while len(sources) < count:
        source = tuple(rng.choices(symbols, k=rng.choice(lengths)))
        if (text := " ".join(source)) not in exclude:
            sources[source] = text
    return [(text, " ".join(RULES[name](source))) for source, text in sources.items()]
