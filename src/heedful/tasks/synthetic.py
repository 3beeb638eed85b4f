"""The copy, reverse and sort tasks: pairs of symbol sequences as text, unseen ones kept unseen."""

import itertools
import random
from collections.abc import Callable, Collection
from typing import Literal

from heedful.errors import UserError
from heedful.tasks.inputs import SPLITS
from heedful.tasks.translation import MadePairs

SyntheticName = Literal["copy", "reverse", "sort"]
RULES: dict[SyntheticName, Callable[["Source"], "Source"]] = {
    "copy": lambda source: source,
    "reverse": lambda source: source[::-1],
    "sort": lambda source: tuple(sorted(source)),
}
Pair = tuple[str, str]
Source = tuple[int, ...]


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
    exclude: Collection[str] = (),
) -> list[Pair]:
    """`count` pairs (source, target) such as ("3 0 2", "2 0 3"), the same for the same arguments.

    Symbols are the numbers 0 to `num_symbols - 1`, written as words with one space between; lengths
    count symbols. A length is drawn uniformly from `min_length` to `max_length`, then each symbol
    uniformly; a source that was drawn before, or is in `exclude`, is drawn again. The sources are
    therefore distinct, and a set made with `exclude` = the training sources is truly unseen.

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
    taken = _sources_in(exclude, num_symbols, lengths)
    total = sum(num_symbols**length for length in lengths)
    if count > total - len(taken):
        raise UserError(
            f"{name}: {count} unseen sequences asked for, but {num_symbols} symbols at lengths"
            f" {min_length} to {max_length} make {total}, of which {len(taken)} are excluded;"
            " ask for fewer, or raise num_symbols or max_length"
        )
    # Drawing again stalls when nearly all of the space is wanted: list it instead.
    crowded = 2 * (count + len(taken)) > total
    draw = _draw_from_list if crowded else _draw_again
    sources = draw(random.Random(seed), count, num_symbols, lengths, taken)
    return [(_text(source), _text(RULES[name](source))) for source in sources]


def _text(source: Source) -> str:
    return " ".join(map(str, source))


def _draw_again(
    rng: random.Random, count: int, num_symbols: int, lengths: range, taken: set[Source]
) -> list[Source]:
    """Draws, with a uniform length, until `count` sources that are not taken are found."""
    # A dict keeps the order of drawing.
    sources: dict[Source, None] = {}
    while len(sources) < count:
        source = tuple(rng.choices(range(num_symbols), k=rng.choice(lengths)))
        if source not in taken:
            sources[source] = None
    return list(sources)


def _draw_from_list(
    rng: random.Random, count: int, num_symbols: int, lengths: range, taken: set[Source]
) -> list[Source]:
    """A uniform sample, without replacement, of all sequences that are not taken."""
    space = itertools.chain.from_iterable(
        itertools.product(range(num_symbols), repeat=length) for length in lengths
    )
    return rng.sample([source for source in space if source not in taken], count)


def _sources_in(texts: Collection[str], num_symbols: int, lengths: range) -> set[Source]:
    """Those of the texts that could be drawn, as sequences."""
    symbols = {str(symbol): symbol for symbol in range(num_symbols)}
    all_words = (text.split() for text in texts)
    return {
        tuple(symbols[word] for word in words)
        for words in all_words
        if len(words) in lengths and symbols.keys() >= set(words)
    }
