"""Span corruption, T5's noise: spans become sentinels, and the target spells the spans out.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", sec. 3.1.4 and 3.3.4; numbers that the paper leaves open are those of the authors'
`random_spans_noise_mask`.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int64, Integer

from heedful.errors import UserError


def span_counts(length: int, *, density: float, mean_length: float) -> tuple[int, int]:
    """How many of `length` tokens are noise, and in how many spans.

    Noise is round(length x density), at least 1 and never the whole text; the spans are
    round(noise / `mean_length`), at least 1 and not more than there are tokens to part them.
    Without density, or with a text of one token, there is no noise. Halves round to even, in
    double precision as in the authors' `random_spans_helper`; their mask computes in single
    precision and thus disagrees with it at a few halves, the first at 190 tokens.
    """
    assert 0 <= density < 1 <= mean_length, (density, mean_length)
    if density == 0 or length < 2:
        return 0, 0
    num_noise = min(max(round(length * density), 1), length - 1)
    return num_noise, min(max(round(num_noise / mean_length), 1), length - num_noise)


def span_mask(
    length: int,
    *,
    rng: np.random.Generator,
    density: float,
    mean_length: float,
    random_roll: bool,
) -> Bool[np.ndarray, " length"]:
    """Which tokens are noise: `span_counts` of them, all such masks equally likely.

    Kept and dropped spans alternate; the text begins with a kept one and ends with a dropped one.
    A text with a single span (below 31 tokens at T5's numbers) thus always loses its end.

    Args:
        random_roll: move the mask around by a random number of places, so that every token is as
            likely as any other to be noise. A span that is cut at the end goes on at the
            beginning, as one span more.
    """
    num_noise, num_spans = span_counts(length, density=density, mean_length=mean_length)
    if num_spans == 0:
        return np.zeros(length, dtype=np.bool_)
    dropped = _cut(num_noise, num_spans, rng)
    kept = _cut(length - num_noise, num_spans, rng)
    mask = np.repeat(np.tile([False, True], num_spans), np.stack([kept, dropped], axis=1).ravel())
    return np.roll(mask, rng.integers(length)) if random_roll else mask


def mark_spans(
    ids: Integer[np.ndarray, " n"],
    mask: Bool[np.ndarray, " n"],
    *,
    sentinel_ids: Sequence[int],
    eos_id: int,
    final_sentinel: bool = True,
) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
    """Inputs with each run of the mask replaced by a sentinel, and the runs behind theirs.

    Both end in EOS. Sentinels are used in the order of `sentinel_ids`.

    Args:
        final_sentinel: close the targets with one sentinel more, as the paper says. The authors'
            code has it only where kept text follows the last span, so never on a mask that is not
            rolled; `random_spans_helper` does not count it.

    Raises:
        UserError: the text has more spans than there are sentinels.
    """
    starts = mask.copy()
    starts[1:] &= ~mask[:-1]
    num_spans = int(starts.sum())
    needed = num_spans + final_sentinel
    if needed > len(sentinel_ids):
        raise UserError(
            f"a text of {len(ids)} tokens has {num_spans} spans and needs {needed} sentinels, but"
            f" the vocabulary has {len(sentinel_ids)}; add sentinels, cut the text into shorter"
            " ones, or raise mean_span_length"
        )
    sentinels = np.array(sentinel_ids[:needed], dtype=np.int64)
    inputs = ids.astype(np.int64)
    inputs[starts] = sentinels[:num_spans]
    spans = np.insert(
        ids[mask].astype(np.int64), np.flatnonzero(starts[mask]), sentinels[:num_spans]
    )
    eos = np.array([eos_id], dtype=np.int64)
    return (
        np.concatenate([inputs[starts | ~mask], eos]),
        np.concatenate([spans, sentinels[num_spans:], eos]),
    )


def _cut(total: int, num_parts: int, rng: np.random.Generator) -> Int64[np.ndarray, " num_parts"]:
    """Lengths of `num_parts` parts of at least 1 that make `total`, all ways equally likely."""
    cuts = np.sort(rng.choice(total - 1, num_parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
