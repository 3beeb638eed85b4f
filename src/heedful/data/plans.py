"""The rows of each batch: pure functions of lengths, seed and epoch."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, Integer

from heedful.data.columns import offsets_from_lengths
from heedful.errors import UserError

_BAND = 2  # source lengths that are mixed, in tokens
EVALUATION_BATCH_TOKENS = 8_192  # padded, of a batch without training
_NO_LIMIT = 2**62


def plan_batches(
    lengths: Integer[np.ndarray, " N"],
    tgt_lengths: Integer[np.ndarray, " N"] | None = None,
    *,
    max_tokens: int | None,
    max_sentences: int | None,
    seed: int,
    epoch: int,
    shuffle: bool = True,
) -> list[Int64[np.ndarray, " n"]]:
    """Which rows make each batch of an epoch: arrays of indices, every index in one of them.

    A pure function of its arguments. Rows of similar lengths go together: bands of lengths, and
    inside a band by target length, up in one band and down in the next so that no step is large.
    With `shuffle` the bands' borders, the order of equal lengths and the order of the batches are
    drawn from (seed, epoch); without it the longest batch comes first.

    Args:
        lengths, tgt_lengths: in tokens as they are stored, of the one side or of both.
        max_tokens: a batch of n rows has n x (longest source + longest target) at most, padding
            counted.
        max_sentences: rows in a batch at most. Either of the two may be `None`, no limit.

    Raises:
        UserError: a row that alone is above `max_tokens`.
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
            f"{'sequence' if tgt_lengths is None else 'pair'} {longest + 1} alone takes"
            f" {src[longest] + tgt[longest]} tokens ({'padded' if tgt_lengths is None else sides}),"
            f" more than training.batch_tokens {max_tokens}; raise it or lower data.max_length"
        )
    rng = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    ties = rng.random(num_rows) if shuffle else np.arange(num_rows)
    phase = int(rng.integers(_BAND)) if shuffle else 0
    band = -((src + phase) // _BAND)
    order = np.lexsort((ties, np.where(band % 2 == 0, -tgt, tgt), band))
    batches = _cut(order, src[order], tgt[order], max_tokens, max_sentences)
    return [batches[i] for i in rng.permutation(len(batches))] if shuffle else batches


def plan_evaluation_batches(
    *lengths: Integer[np.ndarray, " N"], max_tokens: int = EVALUATION_BATCH_TOKENS
) -> list[Int64[np.ndarray, " n"]]:
    """Batches of texts or pairs of similar length, the longest first.

    A batch has at most `max_tokens` padded tokens, or as many as the longest text or pair has.
    """
    budget = max(max_tokens, int(np.sum(lengths, axis=0).max(initial=1)))
    return plan_batches(
        *lengths, max_tokens=budget, max_sentences=None, seed=0, epoch=0, shuffle=False
    )


def pack_rows(lengths: Integer[np.ndarray, " N"], max_length: int) -> Int64[np.ndarray, " G1"]:
    """Consecutive whole texts in groups of up to `max_length` tokens.

    Each group takes texts, in their order, while they fit (FULL-SENTENCES of Liu et al. 2019,
    section 4.2, but that no text is ever cut).

    Returns:
        Borders b: group g holds texts b[g] to b[g + 1], the last not included. So
        `Sequences(s.ids, s.offsets[b])` are the groups, on the same ids.
    """
    assert lengths.max(initial=0) <= max_length, "encode_rows leaves no text that is longer"
    ends = offsets_from_lengths(lengths.astype(np.int64))
    borders = [0]
    while borders[-1] < len(lengths):
        full = ends[borders[-1]] + max_length
        borders.append(int(np.searchsorted(ends, full, side="right")) - 1)
    return np.array(borders, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one batch, each of some inputs of a stream and the token after the last of them.

    The stream is the texts that are not empty, laid end to end in some order. The targets are the
    tokens one place later; those from `first_scored` on count.
    """

    order: Int64[np.ndarray, " N"]  # which text stands where in the stream
    offsets: Int64[np.ndarray, " N1"]  # where each begins in it, and where the last ends
    starts: Int64[np.ndarray, " B"]  # where each window begins in the stream
    sizes: Int64[np.ndarray, " B"]  # inputs
    first_scored: Int64[np.ndarray, " B"]  # from the start of the window; 1: all targets

    def select(self, rows: Int64[np.ndarray, " b"] | slice) -> "Windows":
        """Some of them, in that order."""
        columns = (self.starts[rows], self.sizes[rows], self.first_scored[rows])
        return Windows(self.order, self.offsets, *columns)

    def batches(self, batch_size: int) -> "list[Windows]":
        """In this order, `batch_size` at a time; the last batch has what is left."""
        starts = range(0, len(self.starts), batch_size)
        return [self.select(slice(first, first + batch_size)) for first in starts]


def plan_windows(
    lengths: Integer[np.ndarray, " N"], *, context: int, batch_size: int, seed: int, epoch: int
) -> list[Windows]:
    """Which windows make each batch of an epoch. A pure function of its arguments.

    The texts, in an order drawn from (seed, epoch), are one stream of M tokens. From a phase p,
    drawn below `context`, it is cut into as many windows as fit: window k has the inputs
    p + k x context and on, `context` of them, and as targets the tokens one place later. So every
    token after the p + 1 first is a target exactly once, up to those at the end, fewer than
    `context`, that fill no window. The phase moves the borders from epoch to epoch, also those of
    a single long text, and what one epoch leaves out at the ends another takes in. The windows are
    then dealt to batches in an order that is drawn too.

    Args:
        lengths: of the texts, in tokens.
        context: inputs in a window.

    Raises:
        UserError: fewer tokens than one window needs.
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, epoch]))
    order, offsets = _stream(lengths, rng.permutation(len(lengths)))
    spare = int(offsets[-1]) - 1 - context  # tokens beyond what one window needs
    if spare < 0:
        raise UserError(
            f"the text has {spare + 1 + context} tokens, but a window of context {context} needs"
            f" {context + 1}; lower context, or give more text"
        )
    phase = int(rng.integers(min(context, spare + 1)))
    starts = rng.permutation(phase + context * np.arange(1 + (spare - phase) // context))
    sizes, first_scored = np.full_like(starts, context), np.ones_like(starts)
    return Windows(order, offsets, starts, sizes, first_scored).batches(batch_size)


def plan_evaluation_windows(
    lengths: Integer[np.ndarray, " N"],
    *,
    context: int,
    stride: int,
    max_tokens: int = EVALUATION_BATCH_TOKENS,
) -> list[Windows]:
    """Windows that score each token of each text but its first exactly once, long ones first.

    Window k of a text has up to `context` inputs from its token k x `stride` on. The first scores
    all its targets, a later one those that none before it did: `stride` of them at most, each with
    `context - stride + 1` tokens before it at least. With `stride` 1 every token is told from as
    many tokens as there are, or as fit; with `stride` equal to `context` no token is an input
    twice. A text that begins with BOS has BOS for the first token, which is context alone. To
    score a corpus as one text, its texts running on into each other, plan for the one length.
    Batches are bounded as those of `plan_evaluation_batches`.

    Raises:
        UserError: `stride` is not from 1 to `context`.
    """
    if not 1 <= stride <= context:
        raise UserError(f"stride {stride} must be from 1 to context {context}; change one of them")
    order, offsets = _stream(lengths, np.arange(len(lengths)))
    sizes = np.diff(offsets)
    beyond_first = np.maximum(sizes - 1 - context, 0)  # targets that the first window leaves
    counts = np.where(sizes > 1, 1 - (-beyond_first // stride), 0)
    texts = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(texts)) - offsets_from_lengths(counts)[texts]  # of a window in its text
    inside = number * stride
    windows = Windows(
        order,
        offsets,
        starts=offsets[texts] + inside,
        sizes=np.minimum(context, sizes[texts] - 1 - inside),
        first_scored=np.where(number == 0, 1, context + 1 - stride),
    )
    order = np.argsort(-windows.sizes, kind="stable")
    longest_first, budget = windows.sizes[order], max(max_tokens, int(windows.sizes.max(initial=1)))
    batches = _cut(order, longest_first, np.zeros_like(longest_first), budget, len(order))
    return [windows.select(rows) for rows in batches]


def _stream(
    lengths: Integer[np.ndarray, " N"], order: Int64[np.ndarray, " N"]
) -> tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K1"]]:
    """The order and the offsets of a stream of texts of these lengths."""
    order = order[lengths[order] > 0]
    return order, offsets_from_lengths(lengths[order].astype(np.int64))


def _cut(
    order: Int64[np.ndarray, " N"],
    src: Int64[np.ndarray, " N"],
    tgt: Int64[np.ndarray, " N"],
    max_tokens: int,
    max_sentences: int,
) -> list[Int64[np.ndarray, " n"]]:
    """Cut rows that stand in order, each batch as long as the limits let it be."""
    batches = []
    start = 0
    while start < len(order):
        # The first row alone bounds the number, so only that many need a look.
        most = min(max_sentences, max_tokens // max(1, int(src[start] + tgt[start])))
        window = slice(start, start + most)
        width = np.maximum.accumulate(src[window]) + np.maximum.accumulate(tgt[window])
        tokens = width * np.arange(1, len(width) + 1)
        size = int(np.searchsorted(tokens, max_tokens, side="right"))
        batches.append(order[start : start + size])
        start += size
    return batches
