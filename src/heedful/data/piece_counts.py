"""Texts for the trainers of the `tokenizers` library, each distinct word of which is split once."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from heedful.data.word_cache import Separation, splitter

_SEPARATOR = "\n"  # no piece of a tokenizer with words has whitespace
_PIECES = 128  # of a text for a trainer


def count_words(lines: Iterable[str], separation: Separation) -> Counter[str]:
    """The words of texts, as in `WordCache`, with their numbers of occurrences."""
    return Counter(chain.from_iterable(map(splitter(separation), lines)))


def train_on_words(backend: Backend, words: Mapping[str, int], trainer: Any) -> None:
    """Train the model of a tokenizer as on the texts with these words.

    The trainers take texts, which they normalize and split, and count the pieces. Here each
    distinct word is normalized and split once. The trainer is given the pieces as often as they
    occur, in texts that are cheap to split.
    """
    normalizer, split = backend.normalizer, backend.pre_tokenizer.pre_tokenize_str
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        normal = word if normalizer is None else normalizer.normalize_str(word)
        for piece, _ in split(normal):
            pieces[piece] += count
    trained = Backend(backend.model)
    trained.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(_SEPARATOR)
    trained.train_from_iterator(_repeated(pieces), trainer=trainer)
    backend.model = trained.model


def _repeated(pieces: Mapping[str, int]) -> Iterator[str]:
    """Texts with each piece as often as it occurs."""
    waiting: list[str] = []
    for piece, count in pieces.items():
        num_texts, num_left = divmod(count, _PIECES)
        yield from repeat(_SEPARATOR.join([piece] * _PIECES), num_texts)
        waiting += [piece] * num_left
        if len(waiting) >= _PIECES:
            yield _SEPARATOR.join(waiting)
            waiting = []
    yield _SEPARATOR.join(waiting)
