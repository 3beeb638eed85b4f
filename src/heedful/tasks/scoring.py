"""Loss sums on held-out data, evaluations, and the scores of a final model."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from heedful.config import OWN_METRICS, Recipe
from heedful.data.collate import Batch
from heedful.data.columns import CorpusRange
from heedful.data.plans import plan_evaluation_batches
from heedful.evaluation.likelihood import sum_losses, token_metrics
from heedful.evaluation.sharing import current_shares
from heedful.files import write_json
from heedful.parts.losses import LossSum
from heedful.plugins import metric
from heedful.tasks.run_data import RunData
from heedful.training.events import EvaluationResult, Sample


@dataclass(frozen=True)
class FinalScores:
    """The scores of a run's final model.

    Attributes:
        by_name: by metric a number, or a mapping with "score" and details.
        labels: the class names of a classifier.
        confusion: the number of texts of label i (row) that were classified as label j (column).
    """

    by_name: dict[str, Any]
    labels: Sequence[str] = ()
    confusion: Sequence[Sequence[int]] = ()

    def values(self) -> dict[str, float]:
        """The scores as numbers, by metric."""
        return {
            name: float(entry["score"] if isinstance(entry, Mapping) else entry)
            for name, entry in self.by_name.items()
        }

    def to_json(self) -> dict[str, Any]:
        """The fields as a report has them."""
        confusion = [[*row] for row in self.confusion]
        return {"scores": self.by_name, "labels": [*self.labels], "confusion": confusion}


@torch.inference_mode()
def held_out_loss(
    net: Any,
    loss: Callable[..., LossSum],
    collate: Callable[[Int64[np.ndarray, " B"]], Batch],
    *lengths: Int64[np.ndarray, " N"],
    label_smoothing: float,
    corpora: Sequence[CorpusRange] = (),
) -> tuple[LossSum, dict[str, float]]:
    """The loss sums over N held-out rows, of the net in eval mode, and the loss of each corpus.

    The processes that share an evaluation divide its batches.

    Args:
        loss: as `Task.loss`.
        collate: returns the batch of the rows with the given indices.
        lengths: the lengths of the rows, or of both sides of pairs.
        corpora: the ranges of the corpora that all rows are of; empty: a single one.
    """
    net.eval()
    device = next(net.parameters()).device
    options = {"label_smoothing": label_smoothing, "count_correct": True}
    own = current_shares().part

    def sums_of(start: int, end: int) -> LossSum:
        plan = plan_evaluation_batches(*(side[start:end] for side in lengths))
        batches = (collate(start + indices).to(device) for indices in plan[own])
        return sum_losses([loss(net, batch, **options) for batch in batches])

    return sums_by_corpus(corpora, len(lengths[0]), sums_of)


def sums_by_corpus(
    corpora: Sequence[CorpusRange], num_rows: int, sums_of: Callable[[int, int], LossSum]
) -> tuple[LossSum, dict[str, float]]:
    """Loss sums over all rows, and the negative log-likelihood per target of each corpus.

    Args:
        sums_of: the loss sums of the rows from a first one up to an end, over the batches of this
            process (`current_shares`).
    """
    ranges = [(corpus.start, corpus.end) for corpus in corpora] or [(0, num_rows)]
    by_process = current_shares().gather([sums_of(*limits) for limits in ranges])
    parts = [sum_losses(sums) for sums in zip(*by_process, strict=True)]
    by_corpus = {
        corpus.name: float(part.nll) / part.tokens
        for corpus, part in zip(corpora, parts, strict=False)
    }
    return sum_losses(parts), by_corpus


def corpus_losses(by_corpus: Mapping[str, float]) -> dict[str, float]:
    """The loss of each corpus among final scores, as `loss/NAME`."""
    return {f"loss/{name}": loss for name, loss in by_corpus.items()}


def make_evaluation(
    recipe: Recipe,
    sums: LossSum,
    samples: list[Sample],
    scores: dict[str, float] | None = None,
    *,
    corpora: Mapping[str, float] | None = None,
) -> EvaluationResult:
    """The evaluation of held-out sums and scores; its value is by the recipe's metric.

    Args:
        corpora: the loss of each corpus, by `sums_by_corpus`; None: there is one corpus.
    """
    scores = scores or {}
    values = token_metrics(sums)
    accuracy = scores.get("accuracy", values.get("token_accuracy", math.nan))
    known = {"accuracy": accuracy, **scores, "loss": values["loss"], "token_accuracy": accuracy}
    name = recipe.evaluation.metric
    higher_is_better = (
        OWN_METRICS[name] if name in OWN_METRICS else metric.get(name).higher_is_better
    )
    is_smoothed = recipe.training.label_smoothing
    return EvaluationResult(
        loss=values["loss"],
        smoothed_loss=float(sums.loss) / sums.tokens if is_smoothed else None,
        perplexity=values["perplexity"],
        token_accuracy=accuracy,
        scores=scores,
        samples=samples,
        corpora=dict(corpora or {}),
        value=known[name] if higher_is_better else -known[name],
    )


def write_scores(
    data: RunData, out: Path, counts: dict[str, Any], scores: dict[str, float], **more: Any
) -> FinalScores:
    """Write `scores.json` for the final model, and return its scores."""
    content = {"set": data.final, **counts, "scores": scores, **more}
    write_json(out / "scores.json", content)
    return FinalScores(dict(scores))
