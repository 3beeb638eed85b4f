"""Text classification: training on labeled texts, evaluated by accuracy and F1."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64

from heedful import task_keys
from heedful.data.collate import Batch, collate_texts
from heedful.data.encoding import TextColumn
from heedful.data.headers import LABEL, Problem
from heedful.data.plans import plan_evaluation_batches
from heedful.data.row_formats import CORPUS
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.labels import confusion, label_scores, per_label
from heedful.evaluation.likelihood import sum_losses, target_loss
from heedful.evaluation.sharing import current_shares
from heedful.evaluation.target_scores import target_states
from heedful.files import write_lines
from heedful.parts.losses import LossSum
from heedful.pipelines import Classifier
from heedful.progress import track
from heedful.tasks.corpora import files_by_split, is_paired
from heedful.tasks.inputs import (
    SomeRows,
    joint_tokenizer,
    open_labeled,
    plan_training,
    raw_data,
)
from heedful.tasks.net_keys import check_derived_keys, encoder_keys
from heedful.tasks.run_data import InheritedParts, RawData, RunData
from heedful.tasks.scoring import (
    FinalScores,
    corpus_losses,
    make_evaluation,
    sums_by_corpus,
    write_scores,
)
from heedful.tasks.task import MASK, Task
from heedful.training.events import Sample
from heedful.training.trainer import EvaluationResult


class TextClassification(Task):
    """Classification of texts, or of pairs of texts, from `data.train.file`.

    The label names are those of the training file; other files must have no other labels. Held-out
    texts are never dropped: with `data.truncation: drop` they are truncated instead.
    """

    recipe_keys = task_keys.CLASSIFICATION
    row_columns: ClassVar[tuple[str, ...]] = ("text", "label")

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*super().metrics, "macro_f1")

    def check(self) -> None:
        super().check()
        check_derived_keys(self.recipe)
        entries = files_by_split(self.recipe)
        for entry in entries:
            if (entry.files.pair_field is not None) != is_paired(self.recipe):
                raise UserError(
                    f"{entry.key}.pair_field and {entries[0].key}.pair_field must both be given, "
                    "or neither"
                )

    def problem(self, origin: Problem | None) -> Problem:
        if origin not in (None, "single_label"):
            raise UserError(
                f"init_from: {self.recipe.init_from} is a {origin} classifier, but the task "
                f"{self.recipe.task} trains for one label per text; start from another model"
            )
        return "single_label"

    def raw_data(self) -> RawData:
        return raw_data(self.recipe, open_labeled)

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        return joint_tokenizer(self.recipe, sample, extra_specials=(MASK,), template="both")

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        texts = ("text", "pair") if is_paired(self.recipe) else ("text",)
        return {"text": TextColumn(tokenizers[0], texts)}

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: InheritedParts
    ) -> dict[str, Any]:
        # If the source model has the same classes, in its order.
        names = inherited.labels if sorted(inherited.labels) == sorted(labels) else labels
        options = super().encode_options(split, labels, inherited)
        if split != "train" and options["truncation"] == "drop":
            options["truncation"] = "truncate"
        return options | {"labels": names}

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        num_labels = 2 if data is None else len(data.labels)
        return encoder_keys(self.recipe, data, name, "classify") | {"num_labels": num_labels}

    def plan_epoch(self, data: RunData, epoch: int) -> Sequence[Int64[np.ndarray, " n"]]:
        return plan_training(self, data, epoch, lambda indices: indices)

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        return (data.ids("train").lengths_of(rows),)

    def collate(self, data: RunData, item: Int64[np.ndarray, " n"], split: str = "train") -> Batch:
        columns = data.splits[split]
        return collate_texts(
            columns.sequences("text"),
            item,
            pad_id=data.tokenizer.pad_id,
            labels=columns.numbers_of("labels", item),
            second=columns.numbers_of("text.second", item) if "text.second" in columns else None,
        )

    def evaluate(self, model: Classifier, data: RunData) -> EvaluationResult:
        """See `Task.evaluate`: the loss, and the metric of labels."""
        sums, by_corpus, predictions, table = self._predict(model, data, "valid")
        labels, names = data.splits["valid"].numbers("labels"), data.labels
        rows = data.texts("valid", self.recipe.evaluation.num_samples)
        texts = (
            "\n".join(text for key, text in row.items() if key not in (LABEL, CORPUS))
            for row in rows
        )
        samples = [
            Sample(text, names[label], names[prediction])
            for text, label, prediction in zip(texts, labels, predictions, strict=False)
        ]
        scores = label_scores(table)
        return make_evaluation(self.recipe, sums, samples, scores, corpora=by_corpus)

    def compute_final_scores(self, model: Classifier, data: RunData, out: Path) -> FinalScores:
        """Classify and score the test texts, or those of valid if there is no test split.

        `scores.json` also has precision, recall and F1 of each label, and the confusion matrix:
        `confusion[i][j]` texts of `labels[i]` were classified as `labels[j]`. The predicted labels
        are in `test.output.txt`, one per line.
        """
        sums, by_corpus, predictions, table = self._predict(model, data, data.final)
        names, loss = data.labels, float(sums.nll) / sums.tokens
        scores = label_scores(table) | {"loss": loss} | corpus_losses(by_corpus)
        labels = [names[label] for label in predictions.tolist()]
        write_lines(out / f"{data.final}.output.txt", labels)
        tables = {"labels": list(names), "confusion": table.tolist()}
        more = tables | {"per_label": per_label(table, names)}
        scored = write_scores(data, out, {"num_texts": len(predictions)}, scores, **more)
        return replace(scored, **tables)

    @torch.inference_mode()
    def _predict(
        self, model: Classifier, data: RunData, split: str
    ) -> tuple[LossSum, dict[str, float], Int64[np.ndarray, " N"], Int64[np.ndarray, "C C"]]:
        """Loss sums over a held-out split, the loss of each corpus, the predicted label of each
        text, and `confusion`."""
        net, smoothing = model.net.eval(), self.recipe.training.label_smoothing
        columns, lengths = data.splits[split], data.ids(split).lengths
        # Zero for the texts of other processes.
        own, shares = np.zeros(len(columns), dtype=np.int64), current_shares()
        with track("classifying", len(own[shares.part])) as advance:

            def sums_of(start: int, end: int) -> LossSum:
                parts = []
                for indices in plan_evaluation_batches(lengths[start:end])[shares.part]:
                    batch = self.collate(data, start + indices, split).to(model.device)
                    states = target_states(net, batch)
                    loss = target_loss(net.head, states, batch.targets, label_smoothing=smoothing)
                    parts.append(loss)
                    own[start + indices] = net.head(states).argmax(-1).cpu().numpy()
                    advance(len(indices))
                return sum_losses(parts)

            sums, by_corpus = sums_by_corpus(columns.corpora, len(columns), sums_of)
        predictions = np.sum(shares.gather(own), axis=0)
        table = confusion(columns.numbers("labels"), predictions, len(data.labels))
        return sums, by_corpus, predictions, table
