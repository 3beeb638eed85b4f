"""Teacher forcing: log-probabilities of targets given sources, and of texts."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64, Int64

from heedful.backends.base import ScoringBackend
from heedful.backends.torch.cached_net import checked_start_ids
from heedful.data.collate import Batch, collate_pairs, collate_windows
from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import (
    EVALUATION_BATCH_TOKENS,
    plan_evaluation_batches,
    plan_evaluation_windows,
)
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError, describe
from heedful.evaluation.likelihood import token_metrics
from heedful.evaluation.metrics import perplexity
from heedful.fidelity.masking import mask_pair
from heedful.option_ranges import plain_number
from heedful.options import TooLong
from heedful.parts.losses import LossSum
from heedful.pipelines.base import Texts
from heedful.pipelines.inputs import check_batch_tokens, check_strings
from heedful.pipelines.text_generation import Generator


@dataclass(frozen=True)
class TextScore:
    """The sum of a text's natural log-probabilities over its targets, and their number.

    Attributes:
        first: characters of the text before its first target: those of its first token, which a
            model without BOS does not predict.
    """

    log_prob: float
    num_tokens: int
    first: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the negative mean log-probability of a token; inf if it overflows, NaN without
        tokens."""
        return perplexity(-self.log_prob, self.num_tokens) if self.num_tokens else math.nan

    def bits_per_character(self, text: str) -> float:
        """The negative log-probability in bits per character of the tokens that are predicted.

        NaN without any.
        """
        return self._bits_per(len(text[self.first :]))

    def bits_per_byte(self, text: str) -> float:
        """`bits_per_character`, but per byte in UTF-8."""
        return self._bits_per(len(text[self.first :].encode()))

    def _bits_per(self, size: int) -> float:
        return -self.log_prob / math.log(2) / size if self.num_tokens and size else math.nan


PairTags: TypeAlias = tuple[Sequence[int], Sequence[int]]  # ids before sources, before targets


class TextSums(NamedTuple):
    """Sums over the targets of each of N texts.

    Attributes:
        log_probs: natural log-probabilities; 0 for a text without targets.
        tokens: number of targets.
        correct: number of targets that were the most likely token.
    """

    log_probs: Float64[np.ndarray, " N"]
    tokens: Int64[np.ndarray, " N"]
    correct: Int64[np.ndarray, " N"]

    def scores(self, first: Sequence[int] | None = None) -> list[TextScore]:
        """One for each text; `first`: the `TextScore.first` of each, default: 0."""
        columns = self.log_probs.tolist(), self.tokens.tolist(), first or [0] * len(self.tokens)
        return [TextScore(*row) for row in zip(*columns, strict=True)]

    def total(self) -> LossSum:
        """Sums over all texts."""
        loss = torch.tensor(-self.log_probs.sum())
        correct = torch.tensor(self.correct.sum())
        return LossSum(loss, loss, correct, int(self.tokens.sum()))


def text_sums(model: Generator, batches: Iterable[Batch], num_texts: int) -> TextSums:
    """Sums over the targets of batches; `Batch.indices` are the texts of a batch's rows."""
    scorer: ScoringBackend = model.backend_with("target_scores")
    sums = TextSums(np.zeros(num_texts), *(np.zeros(num_texts, np.int64) for _ in range(2)))
    for batch in batches:
        scores = scorer.target_scores(batch)
        texts = batch.indices[batch.target_positions.numpy() // batch.tokens.ids.size(1)]
        np.add.at(sums.log_probs, texts, scores.log_probs.cpu().double().numpy())
        np.add.at(sums.tokens, texts, 1)
        np.add.at(sums.correct, texts, scores.correct.cpu().numpy())
    return sums


def score_pairs(
    model: Generator,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    too_long: TooLong,
    batch_tokens: int | None = None,
    tags: PairTags = ((), ()),
) -> TextSums:
    """Sums over the tokens of each target given its source, EOS included."""
    sides = encode_pairs(model, sources, targets, too_long, tags)
    sizes = model.src_tokenizer.vocab_size, model.tgt_tokenizer.vocab_size
    pairs = pack_ids(sides[0], sizes[0]), pack_ids(sides[1], sizes[1])
    check_batch_tokens(batch_tokens)
    batches = _pair_batches(model, pairs, batch_tokens or EVALUATION_BATCH_TOKENS)
    return text_sums(model, batches, len(sources))


def teacher_forced(
    model: Generator,
    sources: Sequence[str],
    targets: Sequence[str],
    too_long: TooLong,
    batch_tokens: int | None = None,
    tags: PairTags = ((), ()),
) -> dict[str, float]:
    """Perplexity and token accuracy of the targets given their sources."""
    if not sources:
        raise UserError("there are no pairs to score; give at least one")
    sums = score_pairs(
        model, sources, targets, too_long=too_long, batch_tokens=batch_tokens, tags=tags
    )
    total = sums.total()
    if not total.tokens:
        raise UserError("all pairs were left out: each has a side longer than the model allows")
    mean = token_metrics(total)
    return {name: mean[name] for name in ("perplexity", "token_accuracy")}


def score_texts(
    model: Generator, texts: Texts, stride: int | None, batch_tokens: int | None = None
) -> list[TextScore]:
    """Log-probability of each text; see `LanguageModel.score`."""
    context = model.config.max_length
    stride = max(1, context // 2) if stride is None else plain_number(stride)
    if not isinstance(stride, int):
        raise UserError(f"stride must be a whole number, not {describe(stride)}")
    rows = model.prompt_ids(texts)
    packed = pack_ids(rows, model.config.vocab_size)
    first = [unpredicted(model, text, row) for text, row in zip(texts, rows, strict=True)]
    return _window_sums(model, packed, context, stride, batch_tokens).scores(first)


def unpredicted(model: Generator, text: object, row: Sequence[int]) -> int:
    """Characters of a text in its first token, which nothing precedes; 0 after BOS.

    All characters of a string without tokens, as one of invisible characters.

    Args:
        text: as a string, or in ids.
        row: its ids, with special tokens.
    """
    if not model.has_tokenizer:
        return 0
    if not row:
        return len(text) if isinstance(text, str) else 0
    tokenizer = model.src_tokenizer
    if row[0] in tokenizer.special_ids and row[0] != tokenizer.unk_id:
        return 0
    return (
        tokenizer.spelling.first_end(text)
        if isinstance(text, str)
        else len(tokenizer.decode(row[:1]))
    )


def window_sums(
    model: Generator,
    texts: Sequences,
    *,
    context: int,
    stride: int,
    part: slice = slice(None),
) -> LossSum:
    """Loss and correct tokens summed over texts, in overlapping windows of `context` tokens.

    Args:
        part: the batches of windows to sum over; default: all.
    """
    return _window_sums(model, texts, context, stride, part=part).total()


def _window_sums(
    model: Generator,
    texts: Sequences,
    context: int,
    stride: int,
    batch_tokens: int | None = None,
    *,
    part: slice = slice(None),
) -> TextSums:
    check_batch_tokens(batch_tokens)
    max_tokens = batch_tokens or EVALUATION_BATCH_TOKENS
    plan = plan_evaluation_windows(
        texts.lengths, context=context, stride=stride, max_tokens=max_tokens
    )
    batches = (collate_windows(texts, item, isolate=False, pad_id=0) for item in plan[part])
    return text_sums(model, batches, len(texts))


def _pair_batches(
    model: Generator, pairs: tuple[Sequences, Sequences], max_tokens: int
) -> Iterator[Batch]:
    """Batches of the pairs in which neither side was left out."""
    lengths = [side.lengths for side in pairs]
    nonempty = np.flatnonzero(np.minimum(*lengths))
    for rows in plan_evaluation_batches(
        *(side[nonempty] for side in lengths), max_tokens=max_tokens
    ):
        yield collate_pairs(
            *pairs,
            nonempty[rows],
            start_ids=checked_start_ids(model.ids.decoder_start_ids),
            pad_id=model.tgt_tokenizer.pad_id,
        )


def encode_pairs(
    model: Generator,
    sources: Sequence[str],
    targets: Sequence[str],
    too_long: TooLong,
    tags: PairTags,
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids of sources and of targets, each after its `tags`; see `Translator.pair_ids`."""
    check_strings(sources, "sources")
    check_strings(targets, "targets")
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} sources but {len(targets)} targets")
    if (keep := model.metadata.keep) is not None:  # as in training
        pairs = [mask_pair(*pair, keep.patterns) for pair in zip(sources, targets, strict=True)]
        sources, targets = [src for src, _ in pairs], [tgt for _, tgt in pairs]
    start, longest = checked_start_ids(model.ids.decoder_start_ids), model.config.max_length
    # The decoder reads its start ids and the target without its last token.
    options = longest, too_long, tags[0]
    src = _encode_side(model, "source line", model.src_tokenizer, sources, *options)
    longest += 1 - len(start)
    is_left_out = [not row for row in src]  # which counts once, whatever its target's length
    options = longest, too_long, tags[1]
    tgt = _encode_side(
        model, "target line", model.tgt_tokenizer, targets, *options, skip=is_left_out
    )
    return src, tgt


def _encode_side(
    model: Generator,
    noun: str,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    longest: int,
    too_long: TooLong,
    tags: Sequence[int] = (),
    skip: Sequence[bool] = (),
) -> list[list[int]]:
    """The ids of one side of pairs; none for those that `skip` marks."""
    encoded = tokenizer.encode_batch(list(texts))
    rows = [tokenizer.encode_target([*tags, *ids]) for ids in encoded]
    rows = [[] if is_left_out else row for row, is_left_out in zip_longest(rows, skip)]
    model.check_lengths(rows, noun, too_long, longest=longest, tokenizer=tokenizer)
    return rows
