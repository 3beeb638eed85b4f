"""Teacher forcing: log-probabilities of targets given sources, and of texts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

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
from heedful.errors import UserError
from heedful.evaluation.likelihood import token_metrics
from heedful.options import TooLong
from heedful.parts.losses import LossSum
from heedful.pipelines.base import Texts
from heedful.pipelines.text_generation import Generator, TextScore


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

    def scores(self) -> list[TextScore]:
        """One for each text."""
        columns = self.log_probs.tolist(), self.tokens.tolist()
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
) -> TextSums:
    """Sums over the tokens of each target given its source, EOS included."""
    pairs = _encode_pairs(model, sources, targets, too_long)
    batches = _pair_batches(model, pairs, _max_batch_tokens(batch_tokens))
    return text_sums(model, batches, len(sources))


def teacher_forced(
    model: Generator, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
) -> dict[str, float]:
    """Perplexity and token accuracy of the targets given their sources."""
    total = score_pairs(model, sources, targets, too_long=too_long).total()
    if not total.tokens:
        raise UserError("all pairs were left out: each has a side longer than the model allows")
    mean = token_metrics(total)
    return {name: mean[name] for name in ("perplexity", "token_accuracy")}


def score_texts(
    model: Generator, texts: Texts, stride: int | None, batch_tokens: int | None = None
) -> list[TextScore]:
    """Log-probability of each text; see `LanguageModel.score`."""
    context = model.config.max_length
    stride = max(1, context // 2) if stride is None else stride
    packed = pack_ids(model.prompt_ids(texts), model.config.vocab_size)
    return _window_sums(model, packed, context, stride, batch_tokens).scores()


def window_sums(model: Generator, texts: Sequences, *, context: int, stride: int) -> LossSum:
    """Loss and correct tokens summed over texts, in overlapping windows of `context` tokens."""
    return _window_sums(model, texts, context, stride).total()


def _window_sums(
    model: Generator,
    texts: Sequences,
    context: int,
    stride: int,
    batch_tokens: int | None = None,
) -> TextSums:
    max_tokens = _max_batch_tokens(batch_tokens)
    plan = plan_evaluation_windows(
        texts.lengths, context=context, stride=stride, max_tokens=max_tokens
    )
    batches = (collate_windows(texts, item, isolate=False, pad_id=0) for item in plan)
    return text_sums(model, batches, len(texts))


def _max_batch_tokens(batch_tokens: int | None) -> int:
    """The padded tokens of a batch; raises UserError below 1."""
    if batch_tokens is not None and batch_tokens < 1:
        raise UserError(f"batch_tokens must be at least 1, not {batch_tokens}")
    return batch_tokens or EVALUATION_BATCH_TOKENS


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


def _encode_pairs(
    model: Generator, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
) -> tuple[Sequences, Sequences]:
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} sources but {len(targets)} targets")
    if not sources:
        raise UserError("there are no pairs to score")
    sides, longest = [], model.config.max_length
    # The decoder reads its start ids and the target without its last token.
    for what, tokenizer, texts, most in (
        ("source line", model.src_tokenizer, sources, longest),
        (
            "target line",
            model.tgt_tokenizer,
            targets,
            longest + 1 - len(checked_start_ids(model.ids.decoder_start_ids)),
        ),
    ):
        ids = [tokenizer.encode_target(line) for line in tokenizer.encode_batch(list(texts))]
        model.check_lengths(ids, what, too_long, longest=most, tokenizer=tokenizer)
        sides.append(pack_ids(ids, tokenizer.vocab_size))
    return sides[0], sides[1]
