"""Subword regularization: random splits of a word (BPE-dropout, unigram sampling)."""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from heedful.data.decoding import BYTE
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError


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
