"""Words of training text split anew for each epoch: BPE-dropout, sampling from a unigram model."""

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

# Splits that are drawn of one word and epoch: its occurrences share them, so that an epoch costs
# draws for the different words of a corpus and not for all.
_MOST_SPLITS = 16


class BpeDropout:
    """Byte-pair encoding that leaves out each possible merge with probability `p`.

    Provilkov et al. 2020, "BPE-Dropout: Simple and Effective Subword Regularization", algorithm 1:
    which of the possible merges are left out is drawn at every step, and the first learnt of the
    others is made, until there is none.

    Args:
        merges: pairs of ids and what they become, in the order in which they were learnt.
    """

    def __init__(self, merges: dict[tuple[int, int], int], p: float) -> None:
        self.p = p
        self._merges = {pair: (rank, made) for rank, (pair, made) in enumerate(merges.items())}
        self._parts = {made: pair for pair, made in reversed(merges.items())}

    def __call__(self, word: tuple[int, ...], count: int, draw: random.Random) -> list[list[int]]:
        """`count` splits of a word; one that the library cuts before it merges stays as it is."""
        symbols = [*self._symbols(word)]
        if self._merged(symbols, 0.0, draw) != [*word]:
            return [[*word]] * count
        return [self._merged(symbols, self.p, draw) for _ in range(count)]

    def _symbols(self, ids: Sequence[int]) -> Iterator[int]:
        """What merges begin with: characters or bytes, and specials."""
        for one in ids:
            if one in self._parts:
                yield from self._symbols(self._parts[one])
            else:
                yield one

    def _merged(self, symbols: Sequence[int], p: float, draw: random.Random) -> list[int]:
        ids, merge_of = [*symbols], self._merges.get
        merges = [merge_of(pair) for pair in pairwise(ids)]
        while True:
            kept = [(merge, i) for i, merge in enumerate(merges) if merge and draw.random() >= p]
            if not kept:
                return ids
            (_, made), i = min(kept)
            ids[i : i + 2] = [made]
            del merges[i]
            if i < len(merges):
                merges[i] = merge_of((made, ids[i + 1]))
            if i:
                merges[i - 1] = merge_of((ids[i - 1], made))


class UnigramSampling:
    """Splits drawn in proportion to the product of their pieces' probabilities, to the power α.

    Kudo 2018, "Subword Regularization", sec. 3.2, over all splits (l = ∞): sums over the lattice
    of a word, then a walk backwards through it.

    Args:
        pieces: log-probability and id of each piece, by its text.
    """

    def __init__(self, pieces: Mapping[str, tuple[float, int]], alpha: float) -> None:
        self._pieces = {text: (alpha * score, i) for text, (score, i) in pieces.items()}
        self._texts = {i: text for text, (_, i) in pieces.items()}
        self._longest = max(map(len, pieces))

    def __call__(self, word: tuple[int, ...], count: int, draw: random.Random) -> list[list[int]]:
        """`count` splits of a word; one with a special or an unknown piece stays as it is."""
        if not all(i in self._texts for i in word):
            return [[*word]] * count
        text = "".join(self._texts[i] for i in word)
        sums = [0.0]  # by place in the text, the log of the sum over all splits up to there
        lattice: list[list[tuple[int, float, int]]] = [[]]  # and the pieces that end there
        for end in range(1, len(text) + 1):
            ways = []
            for start in range(max(0, end - self._longest), end):
                piece = self._pieces.get(text[start:end])
                if piece is not None and sums[start] > -math.inf:
                    ways.append((start, sums[start] + piece[0], piece[1]))
            lattice.append(ways)
            sums.append(float(np.logaddexp.reduce([score for _, score, _ in ways])))
        return [self._walk(lattice, draw) for _ in range(count)]

    def _walk(self, lattice: list[list[tuple[int, float, int]]], draw: random.Random) -> list[int]:
        ids: list[int] = []
        end = len(lattice) - 1
        while end:
            ways = lattice[end]
            highest = max(score for _, score, _ in ways)
            weights = [math.exp(score - highest) for _, score, _ in ways]
            end, _, one = draw.choices(ways, weights)[0]
            ids.append(one)
        return ids[::-1]


Split: TypeAlias = BpeDropout | UnigramSampling


def make_splitter(tokenizer: Tokenizer, strength: float) -> Split:
    """How words are split anew; `strength` is BPE's share of merges left out, or unigram's α.

    Raises:
        UserError: the tokenizer splits each word in one way.
    """
    content = tokenizer.content()
    model: dict[str, Any] = content["tokenizer"]["model"]
    if model["type"] == "Unigram":
        ids = content.get("piece_ids") or {text: i for i, (text, _) in enumerate(model["vocab"])}
        pieces = {text: (score, ids[text]) for text, score in model["vocab"] if text in ids}
        known = {
            text: one
            for text, one in pieces.items()
            if one[1] not in tokenizer.special_ids and not BYTE.fullmatch(text)
        }
        return UnigramSampling(known, strength)
    if model["type"] == "BPE" and model["merges"] and "piece_ids" not in content:
        prefix, vocab = model["continuing_subword_prefix"] or "", model["vocab"]
        pairs = ((a, b, a + b.removeprefix(prefix)) for a, b in model["merges"])
        merges = {(vocab[a], vocab[b]): vocab[made] for a, b, made in pairs}
        return BpeDropout(merges, strength)
    raise UserError(
        f"training.subword_sampling: a tokenizer of kind {tokenizer.kind} splits each word in one "
        "way; take one of kind bpe, byte_bpe or unigram, or leave subword_sampling out"
    )


class SubwordSampler:
    """Columns with their words split anew for an epoch: a pure function of seed and epoch.

    Of each word as many splits are drawn as it occurs, up to some; further occurrences take these
    in turn. Specials stay what they are.

    Args:
        tokenizers: of the columns of sequences.
        strength: as of `make_splitter`.
        max_length: a row stays as it is stored where one of its columns would become longer.
        max_tokens: or all of them together. Either is no limit where stored rows are longer.

    Raises:
        UserError: a tokenizer splits each word in one way.
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
        """What is read in an epoch."""
        drawn = {
            name: words.drawn(random.Random(f"{self.seed} {epoch} {name}"))
            for name, words in self._words.items()
        }
        lengths = np.stack([lengths for _, _, lengths in drawn.values()])
        fits = (lengths.max(0) <= self._max_length) & (lengths.sum(0) <= self._max_tokens)
        found = dict(self.columns.columns)
        for name, words in self._words.items():
            splits, chosen, _ = drawn[name]
            parts = splits.take(np.where(fits[words.rows], chosen, words.words))
            borders = np.searchsorted(words.rows, np.arange(len(words.stored) + 1))
            found[name] = sequences = Sequences(parts.ids, parts.offsets[borders])
            if (second := f"{name}.second") in self.columns:
                before = words.stored.offsets[:-1] + self.columns.numbers(second)
                after = parts.offsets[np.searchsorted(words.starts, before)]
                found[second] = after - sequences.offsets[:-1]
        return Columns(found, self.columns.report, self.columns.info)


def _limit(most: int | None, stored: Int64[np.ndarray, "..."]) -> float:
    return np.inf if most is None or stored.max(initial=0) > most else float(most)


class _Words:
    """A column of sequences as words: the different ones, and which of them stand where.

    Words begin at specials, after them, and where the tokenizer says.

    Attributes:
        words: (W), which of `different` each is.
        rows: (W), which sequence each stands in.
        starts: (W), where each begins among the ids of the column.
    """

    def __init__(self, stored: Sequences, tokenizer: Tokenizer, split: Split) -> None:
        special = np.zeros(tokenizer.vocab_size, np.bool_)
        special[[*tokenizer.special_ids]] = True
        # Whether a piece begins a word hangs on the piece alone: it is asked for beside itself.
        begins = special | [tokenizer.word_starts([i, i])[1] for i in range(tokenizer.vocab_size)]
        ids = np.asarray(stored.ids)
        first = begins[ids]
        first[1:] |= special[ids[:-1]]
        first[stored.offsets[:-1][stored.lengths > 0]] = True
        self.stored, self._split, self._vocab_size = stored, split, tokenizer.vocab_size
        self.starts = np.flatnonzero(first)
        self.rows = np.searchsorted(stored.offsets, self.starts, side="right") - 1
        numbers: dict[bytes, int] = {}
        spans = pairwise([*self.starts.tolist(), len(ids)])
        self.words = np.array(
            [numbers.setdefault(ids[a:b].tobytes(), len(numbers)) for a, b in spans], np.int64
        )
        self._different = [tuple(np.frombuffer(word, ids.dtype).tolist()) for word in numbers]
        order = np.argsort(self.words, kind="stable")
        in_order = self.words[order]
        self._copies = np.empty_like(order)  # how often each stood before
        self._copies[order] = np.arange(len(order)) - np.searchsorted(in_order, in_order)

    def drawn(
        self, draw: random.Random
    ) -> tuple[Sequences, Int64[np.ndarray, " W"], Float64[np.ndarray, " N"]]:
        """All words as they are stored and then splits of them, one of these for each place, and
        the lengths of the sequences that they make."""
        counts = np.minimum(np.bincount(self.words), _MOST_SPLITS)
        splits: list[Sequence[int]] = [*self._different]
        for word, count in zip(self._different, counts.tolist(), strict=True):
            splits += self._split(word, count, draw)
        first = len(counts) + offsets_from_lengths(counts)[self.words]
        chosen = first + self._copies % counts[self.words]
        packed = pack_ids(splits, self._vocab_size)
        return packed, chosen, np.bincount(self.rows, packed.lengths[chosen], len(self.stored))
