"""The copy, reverse and sort tasks: generated pairs of symbol sequences, as text."""

import itertools
import random
from collections.abc import Callable

from heedful import task_keys
from heedful.errors import UserError
from heedful.tasks.corpora import SPLITS
from heedful.tasks.translation import GeneratedPairs

Pair = tuple[str, str]
Source = tuple[str, ...]
RULES: dict[str, Callable[[Source], Source]] = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: tuple(sorted(source, key=int)),
}


class Synthetic(GeneratedPairs):
    """Pairs of symbol sequences; the recipe's task names the rule."""

    recipe_keys = task_keys.SYMBOLS

    def generate_pairs(self, split: str, count: int, unseen: set[str]) -> list[Pair]:
        """`count` pairs (source, target) such as ("3 0 2", "2 0 3"), the same for the same recipe.

        Symbols are the numbers 0 to `num_symbols - 1`, written as words separated by a space;
        lengths count symbols. A length is sampled uniformly from `min_length` to `max_length`, then
        each symbol uniformly; duplicates, and sources in `unseen`, are sampled again. The sources
        are therefore distinct, and no source is in two splits.

        Raises:
            UserError: `min_length` above `max_length`; fewer than `count` distinct sequences.
        """
        name, sizes = self.recipe.task, self.recipe.data.generated
        num_symbols, shortest, longest = sizes.num_symbols, sizes.min_length, sizes.max_length
        if shortest > longest:
            raise UserError(
                f"{name}: min_length {shortest} is above max_length {longest}; "
                "need min_length <= max_length"
            )
        lengths = range(shortest, longest + 1)
        total = sum(num_symbols**length for length in lengths)
        if count > total - len(unseen):
            raise UserError(
                f"{name}: {count} unseen sequences requested, but {num_symbols} symbols at lengths"
                f" {shortest} to {longest} make {total}, of which {len(unseen)} are excluded;"
                " ask for fewer, or raise num_symbols or max_length"
            )
        rng = random.Random(sizes.seed + SPLITS.index(split))
        symbols = [str(symbol) for symbol in range(num_symbols)]
        sources: dict[Source, str] = {}
        if 2 * (count + len(unseen)) > total:  # rejection sampling would be slow: list all
            candidates = itertools.chain(
                *(itertools.product(symbols, repeat=size) for size in lengths)
            )
            unused = [source for source in candidates if " ".join(source) not in unseen]
            sources = {source: " ".join(source) for source in rng.sample(unused, count)}
        while len(sources) < count:
            source = tuple(rng.choices(symbols, k=rng.choice(lengths)))
            if (text := " ".join(source)) not in unseen:
                sources[source] = text
        return [(text, " ".join(RULES[name](source))) for source, text in sources.items()]
