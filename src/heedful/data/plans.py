"""Plans of batches: which rows or windows form each batch, as functions of lengths, seed, epoch.

An epoch larger than memory reads its rows in random blocks, planned one shuffle buffer at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar, overload

import numpy as np
from jaxtyping import Int64, Integer

from heedful.data.columns import COPY, offsets_from_lengths
from heedful.errors import UserError

Item = TypeVar("Item")
RowsOf: TypeAlias = Callable[[int, int], Int64[np.ndarray, " n"]]

BLOCK_ROWS = 1 << 17  # of an epoch larger than memory, whose blocks are in a random order
BUFFER_BLOCKS = 8  # blocks whose rows are planned together, at most
_BAND = 2  # source lengths that are treated as equal, in tokens
EVALUATION_BATCH_TOKENS = 8_192  # with padding, in a batch of an evaluation
_NO_LIMIT = 2**62


def plan_batches(
    lengths: Integer[np.ndarray, " N"],
    tgt_lengths: Integer[np.ndarray, " N"] | None = None,
    *,
    max_tokens: int | None,
    max_sentences: int | None,
    seed: int,
    epoch: int,
    buffer: int = 0,
    rows: Int64[np.ndarray, " N"] | None = None,
    shuffle: bool = True,
) -> list[Int64[np.ndarray, " n"]]:
    """Batches of rows of similar length: arrays of indices, with every row in exactly one of them.

    Rows are sorted by bands of source lengths, and within a band by target length, ascending and
    descending in turn, so that neighbors differ little; then cut into batches as large as the
    limits allow. With `shuffle` the borders of the bands, the order of rows of equal lengths and
    the order of the batches are random, determined by (seed, epoch); without it the longest batch
    comes first.

    Args:
        lengths: length of each text, or of each source of a pair, in tokens.
        tgt_lengths: length of each target; None for single texts.
        max_tokens: maximum of (longest source + longest target) x rows of a batch; None: no limit.
        max_sentences: maximum number of rows in a batch; None: no limit.
        buffer: the number of the shuffle buffer of the epoch that has these rows.
        rows: (N,), the index of each row among all, by which batches have it; None: they are all.

    Raises:
        UserError: a single row has more than `max_tokens` tokens.
    """
    src = lengths.astype(np.int64)
    tgt = np.zeros_like(src) if tgt_lengths is None else tgt_lengths.astype(np.int64)
    num_rows = len(src)
    if num_rows == 0:
        return []
    max_tokens, max_sentences = max_tokens or _NO_LIMIT, max_sentences or num_rows
    longest = int((src + tgt).argmax())
    if src[longest] + tgt[longest] > max_tokens:
        sides = f"{src[longest]} source + {tgt[longest]} target, padded"
        raise UserError(
            f"{'sequence' if tgt_lengths is None else 'pair'} "
            f"{(longest if rows is None else rows[longest] % COPY) + 1} alone takes"
            f" {src[longest] + tgt[longest]} tokens ({'padded' if tgt_lengths is None else sides}),"
            f" more than training.batch_tokens {max_tokens}; raise it or lower data.max_length"
        )
    rng = _epoch_rng(seed, epoch, buffer)
    ties = rng.random(num_rows) if shuffle else np.arange(num_rows)
    phase = int(rng.integers(_BAND)) if shuffle else 0
    band = -((src + phase) // _BAND)
    order = np.lexsort((ties, np.where(band % 2 == 0, -tgt, tgt), band))
    indices = order if rows is None else rows[order]
    batches = _cut(indices, src[order], tgt[order], max_tokens, max_sentences)
    return [batches[i] for i in rng.permutation(len(batches))] if shuffle else batches


def plan_evaluation_batches(
    *lengths: Integer[np.ndarray, " N"], max_tokens: int = EVALUATION_BATCH_TOKENS
) -> list[Int64[np.ndarray, " n"]]:
    """`plan_batches` without randomness: the longest texts or pairs first.

    A batch has at most `max_tokens` tokens with padding, or one row if that row is longer.
    """
    max_tokens = max(max_tokens, int(np.sum(lengths, axis=0).max(initial=1)))
    return plan_batches(
        *lengths, max_tokens=max_tokens, max_sentences=None, seed=0, epoch=0, shuffle=False
    )


def pack_rows(lengths: Integer[np.ndarray, " N"], max_length: int) -> Int64[np.ndarray, " G1"]:
    """Fill rows with consecutive whole texts, in order, up to `max_length` tokens.

    This is FULL-SENTENCES of Liu et al. 2019, section 4.2, except that texts are never cut.

    Returns:
        Borders b (G + 1,): row g holds the texts b[g] to b[g + 1] - 1, so that `s.joined(b)` are
        the packed rows of the sequences `s`.
    """
    assert lengths.max(initial=0) <= max_length, "encode_rows drops or cuts longer texts"
    ends = offsets_from_lengths(lengths.astype(np.int64))
    borders = [0]
    while borders[-1] < len(lengths):
        full = ends[borders[-1]] + max_length
        borders.append(int(np.searchsorted(ends, full, side="right")) - 1)
    return np.array(borders, dtype=np.int64)


def plan_packed_rows(
    lengths: Integer[np.ndarray, " N"],
    *,
    max_length: int,
    batch_size: int,
    seed: int,
    epoch: int,
    buffer: int = 0,
    rows: Int64[np.ndarray, " N"] | None = None,
) -> list[list[Int64[np.ndarray, " n"]]]:
    """Training batches of packed rows: the indices of the texts of each row, for each batch.

    The texts are in a random order, determined by (seed, epoch), each in exactly one row; rows are
    filled up to `max_length` tokens (`pack_rows`).

    Args:
        batch_size: rows in a batch; the last batch may have fewer.
        buffer: the number of the shuffle buffer of the epoch that has these texts.
        rows: (N,), the index of each text in the data; None: `lengths` are of all texts.
    """
    order = _epoch_rng(seed, epoch, buffer).permutation(len(lengths))
    borders = pack_rows(lengths[order], max_length)[1:-1]
    packed = np.split(order if rows is None else rows[order], borders)
    return [packed[first : first + batch_size] for first in range(0, len(packed), batch_size)]


@dataclass(frozen=True, eq=False)
class Windows:
    """A batch of windows of a token stream, which is the non-empty texts, concatenated.

    A window has `sizes` inputs; its targets are the tokens one position later.

    Args:
        order: (N,), the index of the text at each position of the concatenation.
        offsets: (N + 1,), the index in the stream at which each text begins, and the stream's end.
        starts: (B,), the index in the stream at which each window begins.
        sizes: (B,), the number of inputs of each window.
        first_scored: (B,), the first target that counts in the loss; 1 is the first target.
    """

    order: Int64[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " N1"]
    starts: Int64[np.ndarray, " B"]
    sizes: Int64[np.ndarray, " B"]
    first_scored: Int64[np.ndarray, " B"]

    def select(self, rows: Int64[np.ndarray, " b"] | slice) -> "Windows":
        """The windows at the indices `rows`, in that order."""
        columns = (self.starts[rows], self.sizes[rows], self.first_scored[rows])
        return Windows(self.order, self.offsets, *columns)


def plan_windows(
    lengths: Integer[np.ndarray, " N"],
    *,
    context: int,
    batch_size: int,
    seed: int,
    epoch: int,
    buffer: int = 0,
    rows: Int64[np.ndarray, " n"] | None = None,
) -> list[Windows]:
    """Training batches of windows of `context` inputs, in random order.

    The texts are concatenated in a random order to a stream. Window k has the `context` inputs that
    begin at p + k x context, for a random phase p < `context`. Each token of the stream is
    a target exactly once, except the first p + 1 tokens and fewer than `context` at the end. The
    phase differs between epochs, so that the borders of windows differ too, even in a single text.
    All randomness is determined by (seed, epoch).

    Args:
        lengths: length of each text, in tokens.
        batch_size: windows in a batch; the last batch may have fewer.
        buffer: the number of the shuffle buffer of the epoch that has these texts.
        rows: (N,), the index of each text in the data; None: `lengths` are of all texts.

    Raises:
        UserError: fewer than `context` + 1 tokens.
    """
    rng = _epoch_rng(seed, epoch, buffer)
    order, offsets = _stream(lengths, rng.permutation(len(lengths)))
    order = order if rows is None else rows[order]
    spare = int(offsets[-1]) - 1 - context  # tokens beyond what one window needs
    if spare < 0:
        raise UserError(
            f"the text has {spare + 1 + context} tokens, but a window of context {context} needs"
            f" {context + 1}; lower context, or give more text"
        )
    phase = int(rng.integers(min(context, spare + 1)))
    starts = rng.permutation(phase + context * np.arange(1 + (spare - phase) // context))
    sizes, first_scored = np.full_like(starts, context), np.ones_like(starts)
    windows = Windows(order, offsets, starts, sizes, first_scored)
    firsts = range(0, len(starts), batch_size)
    return [windows.select(slice(first, first + batch_size)) for first in firsts]


def plan_evaluation_windows(
    lengths: Integer[np.ndarray, " N"],
    *,
    context: int,
    stride: int,
    max_tokens: int = EVALUATION_BATCH_TOKENS,
) -> list[Windows]:
    """Batches of overlapping windows that score each token but the first of each text exactly once.

    Window k of a text has up to `context` inputs, from token k x `stride` on. The first window
    scores all its targets; later windows score at most `stride` targets, those that no earlier
    window scored, each with at least `context - stride + 1` tokens of context. With `stride` 1 each
    token has the longest possible context; with `stride` equal to `context` windows do not overlap.
    The first token of a text (BOS if there is one) is context only. To score a corpus as one text,
    pass its total length as the only length. The longest windows come first, and batches are
    limited as in `plan_evaluation_batches`.

    Raises:
        UserError: `stride` is not from 1 to `context`.
    """
    if not 1 <= stride <= context:
        raise UserError(f"stride {stride} must be from 1 to context {context}; change one of them")
    order, offsets = _stream(lengths, np.arange(len(lengths)))
    sizes = np.diff(offsets)
    beyond_first = np.maximum(sizes - 1 - context, 0)  # targets after the first window
    counts = np.where(sizes > 1, 1 - (-beyond_first // stride), 0)
    texts = np.repeat(np.arange(len(sizes)), counts)
    # The index of each window in its text, and of its first token.
    window_indices = np.arange(len(texts)) - offsets_from_lengths(counts)[texts]
    first_tokens = window_indices * stride
    windows = Windows(
        order,
        offsets,
        starts=offsets[texts] + first_tokens,
        sizes=np.minimum(context, sizes[texts] - 1 - first_tokens),
        first_scored=np.where(window_indices == 0, 1, context + 1 - stride),
    )
    order = np.argsort(-windows.sizes, kind="stable")
    sorted_sizes = windows.sizes[order]
    max_tokens = max(max_tokens, int(sorted_sizes.max(initial=1)))
    batches = _cut(order, sorted_sizes, np.zeros_like(sorted_sizes), max_tokens, len(order))
    return [windows.select(rows) for rows in batches]


def _epoch_rng(seed: int, epoch: int, buffer: int) -> np.random.Generator:
    # Trailing zeros of a seed sequence are ignored: buffer 0 is as an epoch of one buffer.
    return np.random.default_rng(np.random.SeedSequence([seed, epoch, buffer]))


def _stream(
    lengths: Integer[np.ndarray, " N"], order: Int64[np.ndarray, " N"]
) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K1"]]:
    """`Windows.order` and `Windows.offsets` of the texts in this order, without empty texts."""
    order = order[lengths[order] > 0]
    return order, offsets_from_lengths(lengths[order].astype(np.int64))


def _cut(
    order: Int64[np.ndarray, " N"],
    src: Int64[np.ndarray, " N"],
    tgt: Int64[np.ndarray, " N"],
    max_tokens: int,
    max_sentences: int,
) -> list[Int64[np.ndarray, " n"]]:
    """Cut the sorted rows into batches, each as large as the limits allow.

    `order` are the indices of the rows; `src` and `tgt` their lengths in the same order.
    """
    batches = []
    start = 0
    while start < len(order):
        # The length of the first row is an upper bound of the number of rows.
        bound = min(max_sentences, max_tokens // max(1, int(src[start] + tgt[start])))
        rows = slice(start, start + bound)
        width = np.maximum.accumulate(src[rows]) + np.maximum.accumulate(tgt[rows])
        tokens = width * np.arange(1, len(width) + 1)
        size = int(np.searchsorted(tokens, max_tokens, side="right"))
        batches.append(order[start : start + size])
        start += size
    return batches


def plan_by_buffers(
    num_rows: int,
    plan: Callable[[int, Int64[np.ndarray, " n"]], Sequence[Item]],
    *,
    seed: int,
    epoch: int,
    rows_of: RowsOf = np.arange,
) -> Sequence[Item]:
    """The batches of an epoch, planned for the rows of one shuffle buffer at a time.

    Rows are divided into blocks of `BLOCK_ROWS`; the blocks, in a random order determined by
    (seed, epoch), are divided evenly into buffers of at most `BUFFER_BLOCKS`. Only the numbers of
    the blocks are in memory. If one buffer has all rows, they are in their order. Of several
    buffers only the batches of one are in memory; all are planned once more, to count their
    batches, before the first batch is read.

    Args:
        num_rows: rows that the epoch reads.
        plan: returns the batches of a buffer, by its number and the indices of its rows.
        rows_of: returns the rows from a start up to an end; default: each row is read once.
    """
    num_blocks = -(-num_rows // BLOCK_ROWS)
    num_buffers = -(-num_blocks // BUFFER_BLOCKS)
    if num_buffers <= 1:
        return plan(0, rows_of(0, num_rows))
    # A spawn key: plans within a buffer are by the seed sequence (seed, epoch, buffer).
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    buffers = np.array_split(rng.permutation(num_blocks), num_buffers)

    def plan_buffer(number: int) -> Sequence[Item]:
        starts = (buffers[number] * BLOCK_ROWS).tolist()
        blocks = [rows_of(start, min(start + BLOCK_ROWS, num_rows)) for start in starts]
        return plan(number, np.concatenate(blocks))

    return _BufferedPlan(num_buffers, plan_buffer)


class _BufferedPlan(Sequence[Item], Generic[Item]):
    """A sequence of batches that are planned when they are read."""

    def __init__(self, num_buffers: int, plan: Callable[[int], Sequence[Item]]) -> None:
        self._num_buffers, self._plan = num_buffers, plan
        self._current: tuple[int, Sequence[Item]] = (-1, [])

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._buffer(number)[index - self._starts[number]]

    def __iter__(self) -> Iterator[Item]:
        for number in range(self._num_buffers):
            yield from self._buffer(number)

    def _buffer(self, number: int) -> Sequence[Item]:
        """The batches of a buffer; those of the last one are kept."""
        current, batches = self._current
        if current != number:
            batches = self._plan(number)
            self._current = (number, batches)
        return batches

    @cached_property
    def _starts(self) -> list[int]:
        """The index of the first batch of each buffer, and the number of all."""
        counts = (len(self._plan(number)) for number in range(self._num_buffers))
        return [*accumulate(counts, initial=0)]
