"""Texts for the trainers of the `tokenizers` library, each distinct word of which is split once."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from heedful.data.word_cache import Separation, splitter
from heedful.data.workers import map_in_order

_SEPARATOR = "\n"  # no piece of a tokenizer with words has whitespace
_PIECES = 128  # of a text for a trainer
_PART_BYTES = 1 << 23  # of the texts that are sent to a worker at once
_WORKER_CHARACTERS = 1 << 25  # of the texts for a worker; fewer are counted sooner than it starts


def count_words(lines: Sequence[str], separation: Separation, num_workers: int = 1) -> Counter[str]:
    """The words of texts, as in `WordCache`, with their numbers of occurrences.

    They have the order of their first occurrences, for any number of workers.

    Args:
        num_workers: maximum number of processes that count.
    """
    size = sum(map(len, lines))
    count = min(num_workers, max(1, size // _WORKER_CHARACTERS))
    if count == 1:
        return _count(separation, lines)
    words: Counter[str] = Counter()
    for part in map_in_order(partial(_count_encoded, separation), _parts(lines), count):
        words.update(part)
    return words


def _count(separation: Separation, lines: Iterable[str]) -> Counter[str]:
    return Counter(chain.from_iterable(map(splitter(separation), lines)))


def _count_encoded(separation: Separation, part: list[bytes]) -> Counter[str]:
    """The words of some texts of `_parts`, in a worker process."""
    return _count(separation, (text.decode("utf-8", "surrogatepass") for text in part))


def _parts(lines: Sequence[str]) -> Iterator[list[bytes]]:
    """The texts in parts of about `_PART_BYTES`, in UTF-8.

    A string that is pickled keeps its UTF-8 in memory afterwards.
    """
    part, size = list[bytes](), 0
    for line in lines:
        part.append(line.encode("utf-8", "surrogatepass"))
        size += len(part[-1])
        if size >= _PART_BYTES:
            yield part
            part, size = [], 0
    yield part


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
