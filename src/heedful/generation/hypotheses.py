"""Hypotheses of a beam search as tensors, the best of them, and the largest entries of rows.

A step extends the `w` open hypotheses of each of `R` beams to `P` entries: first the `w` that stay
open, then those that end. A reference to a hypothesis is the index of its step times `P`, plus the
index of its entry.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


class Extensions(NamedTuple):
    """Open hypotheses extended by one token: `X` extensions of each beam.

    Attributes:
        parent: index of the extended hypothesis in its beam, from 0 to w - 1.
        token_log_prob: log-probability of the token.
        log_prob: log-probability of all new tokens.
    """

    parent: Int[Tensor, "R X"]
    token: Int[Tensor, "R X"]
    token_log_prob: Float[Tensor, "R X"]
    log_prob: Float[Tensor, "R X"]

    def take(self, indices: Int[Tensor, "R Y"]) -> "Extensions":
        """The extensions at these indices of each beam."""
        return Extensions(*(values.gather(1, indices) for values in self))


@dataclass
class BackPointers:
    """Parents, tokens and their log-probabilities of all steps.

    A step appends its tensors without an operation on them; they are joined when they are read.
    """

    num_entries: int
    _joined: list[Shaped[Tensor, "steps R P"]] = field(default_factory=list)
    _open: list[Extensions] = field(default_factory=list)  # of the steps that are not joined
    _endings: list[Extensions] = field(default_factory=list)

    def append(self, open_: Extensions, endings: Extensions) -> None:
        """Add the entries of a step."""
        self._open.append(open_)
        self._endings.append(endings)

    def select(self, beams: Int[Tensor, "M"]) -> "BackPointers":
        """The back-pointers of these beams."""
        return BackPointers(self.num_entries, [values[:, beams] for values in self._join()])

    def paths(self, refs: Iterable[Iterable[int]]) -> Iterator[list[tuple[list[int], list[float]]]]:
        """For each beam the tokens and token log-probabilities of the hypotheses at `refs`.

        A negative reference is the empty hypothesis.
        """
        parents, tokens, log_probs = (values.tolist() for values in self._join())
        for beam, beam_refs in enumerate(refs):
            paths = []
            for ref in beam_refs:
                step, entry = divmod(ref, self.num_entries)
                path: list[tuple[int, float]] = []
                while step >= 0:
                    path.append((tokens[step][beam][entry], log_probs[step][beam][entry]))
                    step, entry = step - 1, parents[step][beam][entry]
                path.reverse()
                paths.append(([token for token, _ in path], [value for _, value in path]))
            yield paths

    def _join(self) -> list[Shaped[Tensor, "steps R P"]]:
        """Parents, tokens and token log-probabilities."""
        if self._open:
            halves = ([*zip(*steps, strict=True)][:3] for steps in (self._open, self._endings))
            steps = [
                torch.cat([torch.stack(open_), torch.stack(endings)], dim=2)
                for open_, endings in zip(*halves, strict=True)
            ]
            if self._joined:
                steps = [torch.cat(pair) for pair in zip(self._joined, steps, strict=True)]
            self._joined, self._open, self._endings = steps, [], []
        return self._joined


class BestFinished(NamedTuple):
    """The `K` best finished hypotheses of each beam, best first, with their references.

    A score of -inf is a free entry.
    """

    score: Float[Tensor, "R K"]
    ref: Int[Tensor, "R K"]

    def add(
        self, scores: Float[Tensor, "R X"], first_ref: int, *, keep_earlier: bool
    ) -> "BestFinished":
        """The `K` best of these and of `X` more, whose references count up from `first_ref`.

        Of equal scores the earlier one is better.

        Args:
            keep_earlier: hypotheses that are here stay, also where new ones have better scores.
        """
        capacity, num_new = self.score.shape[1], scores.shape[1]
        refs = torch.arange(first_ref, first_ref + num_new, device=scores.device)
        refs = torch.cat([self.ref, refs.expand(len(scores), -1)], dim=1)
        ranks = merged = torch.cat([self.score, scores], dim=1)
        if capacity == 1 and not keep_earlier:
            score, first = merged.max(dim=1, keepdim=True)  # documented to be the first
            return BestFinished(score, refs.gather(1, first))
        if keep_earlier:
            earlier = self.score.masked_fill(self.score > -torch.inf, torch.inf)
            ranks = torch.cat([earlier, scores], dim=1)
        best = ranks.sort(dim=1, descending=True, stable=True).indices[:, :capacity]
        return BestFinished(merged.gather(1, best), refs.gather(1, best))

    def select(self, beams: Int[Tensor, "M"]) -> "BestFinished":
        """The finished hypotheses of these beams."""
        return BestFinished(self.score[beams], self.ref[beams])


# --- The largest entries of rows ----------------------------------------------------------------


_BLOCK = 64  # entries, of which the maximum is computed first


def top_k(
    rows: Float[Tensor, "N V"], k: int, *, exact: bool = True
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"], Bool[Tensor, ""]]:
    """Values and indices of the `min(k, V)` largest entries of each row, in order of index.

    Of equal entries those with the lower indices are returned, unlike by `torch.topk`; entries of
    -inf may be any. NaN counts as largest.

    Args:
        exact: False: of equal entries any may be returned. The third result is then True if a row
            has a tie between an entry that is returned and one that is not.
    """
    if exact and k < rows.shape[1]:
        rows = rows.masked_fill(~in_top_k(rows, k) & ~rows.isnan(), -torch.inf)
    values, indices = _largest(rows, min(k + 1, rows.shape[1]))
    if exact or values.shape[1] <= k:
        tied = torch.zeros((), dtype=torch.bool, device=rows.device)
    else:
        tied = (values[:, k - 1] - values[:, k] == 0).any()  # -inf - -inf is NaN
    indices = indices[:, :k].sort(dim=1).values
    return rows.gather(1, indices), indices, tied


def _largest(rows: Float[Tensor, "N V"], k: int) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """`rows.topk(k)`, computed on a CPU from the k blocks with the largest maxima.

    A maximum reads each entry once, while `torch.topk` sorts.
    """
    num_blocks = rows.shape[1] // _BLOCK
    if num_blocks < 2 * k or len(rows) < 16 or rows.device.type != "cpu":
        return rows.topk(k, dim=1)
    whole = num_blocks * _BLOCK
    blocks = rows[:, :whole].unflatten(1, (num_blocks, _BLOCK))
    best = blocks.amax(dim=2).topk(k, dim=1).indices
    columns = (best[:, :, None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    rest = torch.arange(whole, rows.shape[1]).expand(len(rows), -1)
    columns = torch.cat([columns, rest], dim=1)
    values, indices = rows.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, indices)


def first_largest(
    rows: Float[Tensor, "N V"],
) -> tuple[Float[Tensor, "N 1"], Int[Tensor, "N 1"]]:
    """The largest entry of each row and its first index; NaN counts as largest."""
    num_blocks = rows.shape[1] // _BLOCK
    if num_blocks < 4 or rows.device.type != "cpu":
        values, indices = rows.max(dim=1, keepdim=True)  # documented to return the first
        return values, indices
    whole = num_blocks * _BLOCK
    blocks = rows[:, :whole].unflatten(1, (num_blocks, _BLOCK))
    block = blocks.amax(dim=2).argmax(dim=1, keepdim=True)
    values, indices = blocks[torch.arange(len(rows)), block[:, 0]].max(dim=1, keepdim=True)
    indices += block * _BLOCK
    if whole == rows.shape[1]:
        return values, indices
    rest = rows[:, whole:].max(dim=1, keepdim=True)
    best = torch.cat([values, rest.values], dim=1).max(dim=1, keepdim=True)
    return best.values, torch.cat([indices, rest.indices + whole], dim=1).gather(1, best.indices)


def in_top_k(rows: Float[Tensor, "N V"], k: int) -> Bool[Tensor, "N V"]:
    """True for the `k` largest entries of each row; of equal entries, for the first ones."""
    edge = _largest(rows, k)[0][:, -1:]
    is_above, is_equal = rows > edge, rows == edge
    remaining = k - is_above.sum(dim=1, keepdim=True)
    return is_above | (is_equal & (is_equal.cumsum(dim=1) <= remaining))


def sum_dtype(device: torch.device) -> torch.dtype:
    """The dtype of sums of (log-)probabilities: double precision if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
