"""Rows that an epoch reads of each corpus: whole passes and a part of one, by weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Int64

from heedful.data.columns import CorpusRange
from heedful.errors import UserError


@dataclass(frozen=True)
class CorpusShare:
    """A corpus and the passes over its rows in an epoch.

    Attributes:
        passes: (first epoch, passes in each epoch from it on), ascending, the first epoch is 0.
    """

    corpus: CorpusRange
    passes: Sequence[tuple[int, Fraction]]

    def passes_before(self, epoch: int) -> Fraction:
        """The passes in all epochs before `epoch`."""
        total = Fraction(0)
        ends = [first for first, _ in self.passes[1:]] + [epoch]
        for (first, passes), end in zip(self.passes, ends, strict=True):
            total += passes * max(0, min(end, epoch) - min(first, epoch))
        return total


def draw_rows(shares: Sequence[CorpusShare], *, seed: int, epoch: int) -> Int64[np.ndarray, " n"]:
    """The indices of the rows that an epoch reads, a row as often as it is read.

    The rows of a corpus are read in passes; a pass has each row once. Epoch e reads passes W(e) to
    W(e + 1), where W(e) is the sum of its weights in all epochs before e: whole passes are all
    rows, and a part of a pass is a part of a permutation, which the next epochs continue. So each
    row of a corpus is read ⌊W⌋ or ⌈W⌉ times after W passes, whatever the weights. The permutation
    of pass p of corpus c is determined by (seed, c, p). With one corpus of weight 1 these are all
    rows in their order.

    Raises:
        UserError: an epoch without rows.
    """
    parts = []
    for number, share in enumerate(shares):
        size = share.corpus.size
        first, last = (int(share.passes_before(e) * size) for e in (epoch, epoch + 1))
        for number_of_pass in range(first // size, -(-last // size)):
            begin = max(first - number_of_pass * size, 0)
            end = min(last - number_of_pass * size, size)
            rows = np.arange(size)
            if end - begin < size:
                key = (number, number_of_pass)
                rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
                rows = np.sort(rng.permutation(size)[begin:end])
            parts.append(share.corpus.start + rows)
    if not sum(map(len, parts)):
        raise UserError(f"epoch {epoch} reads no row, by the weights of data.corpora; raise them")
    return np.concatenate(parts)
