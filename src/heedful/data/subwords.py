"""Subword regularization: new random splits of words in each epoch (BPE-dropout, unigram)."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float64, Int64

from heedful.data.columns import Columns, Sequences, offsets_from_lengths, pack_ids
from heedful.data.pieces import BYTE
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError

# Samples per distinct word and epoch. Further occurrences of a word reuse them, so that the cost of
# an epoch depends on the number of distinct words.
_MAX_SPLITS = 16


class BpeDropout:
    """BPE-dropout: byte-pair encoding that skips each possible merge with probability `p`.

    Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization", algorithm 1:
    at each step every possible merge is dropped with probability `p`, and of the remaining ones the
    one of highest rank is applied, until none remains.

    Args:
        merges: the id of each merged pair of ids, in the order of their ranks.
    """

    def __init__(self, merges: dict[tuple[int, int], int], p: float) -> None:
        self.p = p
        self._merges = {pair: (rank, merged) for rank, (pair, merged) in enumerate(merges.items())}
        self._parts = {merged: pair for pair, merged in reversed(merges.items())}

    def __call__(self, word: tuple[int, ...], count: int, rng: random.Random) -> list[list[int]]:
        """`count` random splits of a word.

        Words that are not the result of these merges alone are returned unchanged.
        """
        symbols = [*self._symbols(word)]
        if self._merge(symbols, 0.0, rng) != [*word]:
            return [[*word]] * count
        return [self._merge(symbols, self.p, rng) for _ in range(count)]

    def _symbols(self, ids: Sequence[int]) -> Iterator[int]:
        """The ids with all merges undone: characters or bytes, and special tokens."""
        for token in ids:
            if token in self._parts:
                yield from self._symbols(self._parts[token])
            else:
                yield token

    def _merge(self, symbols: Sequence[int], p: float, rng: random.Random) -> list[int]:
        ids, merge_of = [*symbols], self._merges.get
        merges = [merge_of(pair) for pair in pairwise(ids)]
        while True:
            possible = [(merge, i) for i, merge in enumerate(merges) if merge and rng.random() >= p]
            if not possible:
                return ids
            (_, merged), i = min(possible)
            ids[i : i + 2] = [merged]
            del merges[i]
            if i < len(merges):
                merges[i] = merge_of((merged, ids[i + 1]))
            if i:
                merges[i - 1] = merge_of((ids[i - 1], merged))


class UnigramSampling:
    """Samples splits of a word with probability proportional to (product of piece probabilities)^α.

    Kudo 2018, "Subword Regularization", sec. 3.2, over all splits (l = ∞): forward filtering of the
    word's lattice, then backward sampling.

    Args:
        pieces: log-probability and id of each piece, by its text.
        alpha: the exponent α.
    """

    def __init__(self, pieces: Mapping[str, tuple[float, int]], alpha: float) -> None:
        self._pieces = {text: (alpha * score, i) for text, (score, i) in pieces.items()}
        self._texts = {i: text for text, (_, i) in pieces.items()}
        self._longest = max(map(len, pieces))

    def __call__(self, word: tuple[int, ...], count: int, rng: random.Random) -> list[list[int]]:
        """`count` random splits of a word.

        Words with a special or unknown token are returned unchanged.
        """
        if not all(i in self._texts for i in word):
            return [[*word]] * count
        text = "".join(self._texts[i] for i in word)
        sums = [0.0]  # sums[i]: log of the sum over all splits of text[:i]
        # lattice[i]: for each piece that ends at i its start, log-sum of splits up to i, and id
        lattice: list[list[tuple[int, float, int]]] = [[]]
        for end in range(1, len(text) + 1):
            edges = []
            for start in range(max(0, end - self._longest), end):
                piece = self._pieces.get(text[start:end])
                if piece is not None and sums[start] > -math.inf:
                    edges.append((start, sums[start] + piece[0], piece[1]))
            lattice.append(edges)
            sums.append(float(np.logaddexp.reduce([score for _, score, _ in edges])))
        return [self._sample(lattice, rng) for _ in range(count)]

    def _sample(self, lattice: list[list[tuple[int, float, int]]], rng: random.Random) -> list[int]:
        """Sample pieces from the end of the word to its start."""
        ids: list[int] = []
        end = len(lattice) - 1
        while end:
            edges = lattice[end]
            highest = max(score for _, score, _ in edges)
            weights = [math.exp(score - highest) for _, score, _ in edges]
            end, _, token = rng.choices(edges, weights)[0]
            ids.append(token)
        return ids[::-1]


Splitter: TypeAlias = BpeDropout | UnigramSampling


def make_splitter(tokenizer: Tokenizer, strength: float) -> Splitter:
    """The subword regularization of a tokenizer's kind.

    Args:
        strength: dropout probability of `BpeDropout`, or α of `UnigramSampling`.

    Raises:
        UserError: the tokenizer's kind has only one split for each word.
    """
    content = tokenizer.content()
    model: dict[str, Any] = content["tokenizer"]["model"]
    if model["type"] == "Unigram":
        ids = content.get("piece_ids") or {text: i for i, (text, _) in enumerate(model["vocab"])}
        pieces = {text: (score, ids[text]) for text, score in model["vocab"] if text in ids}
        ordinary = {
            text: piece
            for text, piece in pieces.items()
            if piece[1] not in tokenizer.special_ids and not BYTE.fullmatch(text)
        }
        return UnigramSampling(ordinary, strength)
    if model["type"] == "BPE" and model["merges"] and "piece_ids" not in content:
        prefix, vocab = model["continuing_subword_prefix"] or "", model["vocab"]
        pairs = ((a, b, a + b.removeprefix(prefix)) for a, b in model["merges"])
        merges = {(vocab[a], vocab[b]): vocab[merged] for a, b, merged in pairs}
        return BpeDropout(merges, strength)
    raise UserError(
        f"training.subword_sampling: a tokenizer of kind {tokenizer.kind} has only one split for "
        "each word; use kind bpe, byte_bpe or unigram, or leave subword_sampling out"
    )


class SubwordSampler:
    """Resamples the splits of all words for each epoch; determined by seed and epoch.

    A limited number of splits is sampled for each distinct word, and its occurrences use them in
    turn. Special tokens are unchanged.

    Args:
        tokenizers: the tokenizer of each column of sequences to resample.
        strength: as in `make_splitter`.
        max_length: rows in which a column would get longer keep their stored ids. No limit if a
            stored sequence is longer.
        max_tokens: the same for the total length of a row.

    Raises:
        UserError: a tokenizer's kind has only one split for each word.
    """

    def __init__(
        self,
        columns: Columns,
        tokenizers: Mapping[str, Tokenizer],
        strength: float,
        *,
        seed: int,
        max_length: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.columns, self.seed = columns, seed
        self._words = {
            name: _Words(columns.sequences(name), tokenizer, make_splitter(tokenizer, strength))
            for name, tokenizer in tokenizers.items()
        }
        lengths = np.stack([words.stored.lengths for words in self._words.values()])
        self._max_length = _limit(max_length, lengths)
        self._max_tokens = _limit(max_tokens, lengths.sum(0))

    def epoch(self, epoch: int) -> Columns:
        """The columns of an epoch."""
        samples = {
            name: words.sample(random.Random(f"{self.seed} {epoch} {name}"))
            for name, words in self._words.items()
        }
        lengths = np.stack([lengths for _, _, lengths in samples.values()])
        fits = (lengths.max(0) <= self._max_length) & (lengths.sum(0) <= self._max_tokens)
        columns = dict(self.columns.columns)
        for name, words in self._words.items():
            splits, indices, _ = samples[name]
            parts = splits.take(np.where(fits[words.rows], indices, words.words))
            borders = np.searchsorted(words.rows, np.arange(len(words.stored) + 1))
            columns[name] = sequences = Sequences(parts.ids, parts.offsets[borders])
            if (second := f"{name}.second") in self.columns:
                stored = words.stored.offsets[:-1] + self.columns.numbers(second)
                resampled = parts.offsets[np.searchsorted(words.starts, stored)]
                columns[second] = resampled - sequences.offsets[:-1]
        return Columns(columns, self.columns.report, self.columns.info)


def _limit(limit: int | None, stored: Int64[np.ndarray, "..."]) -> float:
    return np.inf if limit is None or stored.max(initial=0) > limit else float(limit)


class _Words:
    """A column of sequences, split into W words.

    Words begin at special tokens, after them, and as in `Tokenizer.word_starts`.

    Attributes:
        words: (W,), the index of each word among the distinct words.
        rows: (W,), the index of its sequence.
        starts: (W,), the index of its first token in the ids of the column.
    """

    def __init__(self, stored: Sequences, tokenizer: Tokenizer, splitter: Splitter) -> None:
        special = np.zeros(tokenizer.vocab_size, np.bool_)
        special[[*tokenizer.special_ids]] = True
        # A piece begins a word whatever piece is before it: here it is the piece itself.
        begins = special | [tokenizer.word_starts([i, i])[1] for i in range(tokenizer.vocab_size)]
        ids = np.asarray(stored.ids)
        first = begins[ids]
        first[1:] |= special[ids[:-1]]
        first[stored.offsets[:-1][stored.lengths > 0]] = True
        self.stored, self._split, self._vocab_size = stored, splitter, tokenizer.vocab_size
        self.starts = np.flatnonzero(first)
        self.rows = np.searchsorted(stored.offsets, self.starts, side="right") - 1
        numbers: dict[bytes, int] = {}
        spans = pairwise([*self.starts.tolist(), len(ids)])
        self.words = np.array(
            [numbers.setdefault(ids[a:b].tobytes(), len(numbers)) for a, b in spans], np.int64
        )
        self._distinct = [tuple(np.frombuffer(word, ids.dtype).tolist()) for word in numbers]
        order = np.argsort(self.words, kind="stable")
        in_order = self.words[order]
        self._occurrence = np.empty_like(order)  # the number of earlier occurrences of the word
        self._occurrence[order] = np.arange(len(order)) - np.searchsorted(in_order, in_order)

    def sample(
        self, rng: random.Random
    ) -> tuple[Sequences, Int64[np.ndarray, " W"], Float64[np.ndarray, " N"]]:
        """Sample splits for all words.

        Returns:
            The distinct words as stored, followed by splits of them; (W,), the index among these of
            each word's split; (N,), the resulting length of each sequence.
        """
        counts = np.minimum(np.bincount(self.words), _MAX_SPLITS)
        splits: list[Sequence[int]] = [*self._distinct]
        for word, count in zip(self._distinct, counts.tolist(), strict=True):
            splits += self._split(word, count, rng)
        first = len(counts) + offsets_from_lengths(counts)[self.words]
        indices = first + self._occurrence % counts[self.words]
        packed = pack_ids(splits, self._vocab_size)
        return packed, indices, np.bincount(self.rows, packed.lengths[indices], len(self.stored))
