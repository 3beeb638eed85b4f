"""How likely given texts are: targets given their sources, and running text, by teacher forcing."""

from collections.abc import Iterator, Sequence

import torch

from heedful.data.collate import Batch, collate_pairs, collate_windows
from heedful.data.columns import Sequences, pack_ids
from heedful.data.plans import plan_evaluation, plan_held_out
from heedful.errors import UserError
from heedful.evaluation.likelihood import averages, batch_loss, target_states, total
from heedful.inference.generator import TextScore
from heedful.inference.language_model import LanguageModel
from heedful.inference.model import Texts
from heedful.inference.translator import Translator
from heedful.options import TooLong
from heedful.parts.losses import LossSum


@torch.inference_mode()
def score_pairs(
    model: Translator, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
) -> list[TextScore]:
    """Log-probability of each target given its source, EOS included."""
    pairs = _encode_pairs(model, sources, targets, too_long)
    scores = [TextScore(0.0, 0)] * len(pairs[0])
    model.net.eval()
    for batch in _held_out(model, pairs):
        log_probs = model.net.head(target_states(model.net, batch)).log_softmax(-1)
        told = log_probs.gather(-1, batch.targets[:, None]).squeeze(-1)
        lengths = pairs[1].lengths[batch.indices].tolist()
        for row, part in zip(batch.indices.tolist(), told.split(lengths), strict=True):
            scores[row] = TextScore(float(part.sum()), len(part))
    return scores


@torch.inference_mode()
def teacher_forced(
    model: Translator, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
) -> dict[str, float]:
    """Perplexity and token accuracy of the targets given their sources."""
    model.net.eval()
    batches = _held_out(model, _encode_pairs(model, sources, targets, too_long))
    found = total([batch_loss(model.net, batch, count_correct=True) for batch in batches])
    mean = averages(found)
    return {name: mean[name] for name in ("perplexity", "token_accuracy")}


def score_texts(model: LanguageModel, texts: Texts, stride: int | None) -> list[TextScore]:
    """Log-probability of each text; see `LanguageModel.score`."""
    context = model.config.max_length
    scores = []
    for row in model.prompt_ids(texts):
        if len(row) < 2:
            scores.append(TextScore(0.0, 0))
            continue
        text = pack_ids([row], model.config.vocab_size)
        found = window_sums(model, text, context=context, stride=stride or context // 2 or 1)
        scores.append(TextScore(-float(found.nll), found.tokens))
    return scores


@torch.inference_mode()
def window_sums(model: LanguageModel, texts: Sequences, *, context: int, stride: int) -> LossSum:
    """Loss and correct tokens over all of some texts, by windows that overlap."""
    model.net.eval()
    plan = plan_evaluation(texts.lengths, context=context, stride=stride, batch_size=32)
    batches = (collate_windows(texts, item, isolate=False, pad_id=0) for item in plan)
    moved = (batch.to(model.device) for batch in batches)
    return total([batch_loss(model.net, batch, count_correct=True) for batch in moved])


def _held_out(model: Translator, pairs: tuple[Sequences, Sequences]) -> Iterator[Batch]:
    # What the decoder reads first: BOS, or what an imported model was trained with.
    start, pad_id = model.ids.start[-1], model.tgt_tokenizer.pad_id
    for rows in plan_held_out(*(side.lengths for side in pairs)):
        yield collate_pairs(*pairs, rows, bos_id=start, pad_id=pad_id).to(model.device)


def _encode_pairs(
    model: Translator, sources: Sequence[str], targets: Sequence[str], too_long: TooLong
) -> tuple[Sequences, Sequences]:
    if len(sources) != len(targets):
        raise UserError(f"{len(sources)} sources but {len(targets)} targets")
    if not sources:
        raise UserError("there are no pairs to score")
    sides = []
    for what, tokenizer, texts in (
        ("source line", model.src_tokenizer, sources),
        ("target line", model.tgt_tokenizer, targets),
    ):
        ids = [tokenizer.encode_target(line) for line in tokenizer.encode_batch(list(texts))]
        model.check_lengths(ids, what, too_long)
        sides.append(pack_ids(ids, tokenizer.vocab_size))
    return sides[0], sides[1]
