"""The five noises of BART (Lewis et al. 2020, sec. 2.2), each a function from a text to a text.

A text is an array of ids without BOS and EOS; what comes back is new. Shares are exact: of n
tokens, round(share x n), halves to even, so a share of 0 changes nothing.
"""

from collections.abc import Set

import numpy as np
from jaxtyping import Int64, Integer


def mask_tokens(
    ids: Integer[np.ndarray, " n"], rng: np.random.Generator, *, share: float, mask_id: int
) -> Int64[np.ndarray, " n"]:
    """Token masking: a share of the tokens, drawn uniformly, becomes the mask."""
    masked = ids.astype(np.int64)
    masked[_draw_places(len(ids), share, rng)] = mask_id
    return masked


def delete_tokens(
    ids: Integer[np.ndarray, " n"], rng: np.random.Generator, *, share: float
) -> Int64[np.ndarray, " m"]:
    """Token deletion: a share of the tokens, drawn uniformly, is gone without a trace."""
    return np.delete(ids.astype(np.int64), _draw_places(len(ids), share, rng))


def infill_spans(
    ids: Integer[np.ndarray, " n"],
    rng: np.random.Generator,
    *,
    share: float,
    mean_length: float,
    mask_id: int,
) -> Int64[np.ndarray, " m"]:
    """Text infilling: spans that make a share of the tokens become one mask each.

    Span lengths are those of `draw_span_lengths`; a span of no tokens inserts a mask. The order
    of kept tokens and spans is uniform over all orders, so two spans may touch.
    """
    lengths = draw_span_lengths(round(share * len(ids)), rng, mean_length=mean_length)
    num_slots = len(ids) - int(lengths.sum()) + len(lengths)
    slots = np.sort(rng.choice(num_slots, len(lengths), replace=False))
    # Before span i stand slots[i] - i kept tokens and the tokens of the spans before it.
    starts = slots - np.arange(len(lengths)) + np.cumsum(lengths) - lengths
    kept = np.ones(len(ids), dtype=np.bool_)
    for start, length in zip(starts, lengths, strict=True):
        kept[start : start + length] = False
    filled = np.full(num_slots, mask_id, dtype=np.int64)
    is_kept = np.ones(num_slots, dtype=np.bool_)
    is_kept[slots] = False
    filled[is_kept] = ids[kept]
    return filled


def draw_span_lengths(
    total: int, rng: np.random.Generator, *, mean_length: float
) -> Int64[np.ndarray, " spans"]:
    """Lengths from Poisson(`mean_length`) until they make `total`; the last is cut to fit."""
    assert mean_length >= 1, mean_length
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < total:
        lengths = np.concatenate([lengths, rng.poisson(mean_length, size=total)])
    sums = np.cumsum(lengths)
    num_spans = int(np.searchsorted(sums, total)) + 1 if total else 0
    lengths = lengths[:num_spans]
    if num_spans:
        lengths[-1] -= sums[num_spans - 1] - total
    return lengths


def permute_sentences(
    ids: Integer[np.ndarray, " n"],
    rng: np.random.Generator,
    *,
    sentence_ends: Integer[np.ndarray, " sentences"],
) -> Int64[np.ndarray, " n"]:
    """Sentence permutation: the sentences in a random order, all orders equally likely.

    `sentence_ends` are positions behind a sentence's last token, in any order; what follows the
    last of them is a sentence too.
    """
    ends = np.unique(sentence_ends)
    assert not len(ends) or (ends[0] >= 0 and ends[-1] <= len(ids)), (ends, len(ids))
    inner = ends[(ends > 0) & (ends < len(ids))]
    sentences = np.split(ids.astype(np.int64), inner)
    return np.concatenate([sentences[i] for i in rng.permutation(len(sentences))])


def find_sentence_ends(
    ids: Integer[np.ndarray, " n"], full_stop_ids: Set[int]
) -> Int64[np.ndarray, " sentences"]:
    """Positions behind each run of full stops, so that "?!" and "..." end one sentence."""
    stops = np.isin(ids, sorted(full_stop_ids))
    last = stops.copy()
    last[:-1] &= ~stops[1:]
    return np.flatnonzero(last) + 1


def rotate(ids: Integer[np.ndarray, " n"], rng: np.random.Generator) -> Int64[np.ndarray, " n"]:
    """Document rotation: the text begins with a token drawn uniformly, and its head follows."""
    if not len(ids):
        return ids.astype(np.int64)
    return np.roll(ids.astype(np.int64), -rng.integers(len(ids)))


def _draw_places(
    length: int, share: float, rng: np.random.Generator
) -> Int64[np.ndarray, " places"]:
    return rng.choice(length, round(share * length), replace=False)
