"""Text classification and regression: training on labeled texts, and scores by problem."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import Field

from heedful import task_keys
from heedful.config import Recipe
from heedful.data.collate import Batch, collate_texts
from heedful.data.encoding import TextColumn
from heedful.data.labels import ProblemType, label_targets
from heedful.data.plans import plan_evaluation_batches
from heedful.data.rows import CORPUS, LABEL, Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.labels import answer_texts, score_answers
from heedful.evaluation.likelihood import sum_losses, target_loss, target_states
from heedful.evaluation.sharing import current_shares
from heedful.files import write_lines
from heedful.parts.losses import LossSum
from heedful.pipelines import Classifier
from heedful.progress import track
from heedful.tasks.corpora import is_paired, split_files
from heedful.tasks.inputs import (
    SomeRows,
    check_derived_keys,
    encoder_keys,
    joint_tokenizer,
    open_labeled,
    raw_data,
)
from heedful.tasks.run_data import Inherited, RawData, RunData
from heedful.tasks.scoring import (
    FinalScores,
    corpus_losses,
    make_evaluation,
    sums_by_corpus,
    write_scores,
)
from heedful.tasks.task import MASK, ObjectiveSettings, Task
from heedful.training.events import EvaluationResult, Sample

_METRICS: dict[ProblemType, tuple[str, ...]] = {
    "single_label": ("loss", "token_accuracy", "accuracy", "macro_f1"),
    "multi_label": ("loss", "micro_f1", "macro_f1", "exact_match"),
    "regression": ("loss", "pearson", "spearman", "mean_squared_error", "mean_absolute_error"),
}


class Labels(ObjectiveSettings):
    """What the label of a text is."""

    problem: ProblemType | None = Field(
        None,
        description="Label of a text: single_label (one class), multi_label (any number of "
        "classes, separated by commas; an empty cell: none; the loss is the mean of their binary "
        "cross-entropies) or regression (a number, or several separated by commas; the loss is the "
        "mean squared error). JSONL and tables may have lists. null: that of the classifier of "
        "init_from, else single_label.",
    )


class TextClassification(Task):
    """Classification of texts, or of pairs of texts, from `data.train.file`, and regression.

    The label names are those of the training file; other files must have no other labels. Held-out
    texts are never dropped: with `data.truncation: drop` they are truncated instead.
    """

    objective_class = Labels
    recipe_keys = task_keys.CLASSIFICATION
    row_columns: ClassVar[tuple[str, ...]] = ("text", "label")

    @property
    def metrics(self) -> tuple[str, ...]:
        known = self.objective.problem or (None if self.recipe.init_from else "single_label")
        if known == "single_label":
            return _METRICS["single_label"]
        # `problem` refuses those of other problems, with the other settings that do not fit.
        return tuple(dict.fromkeys(name for names in _METRICS.values() for name in names))

    def check(self) -> None:
        super().check()
        if self.recipe.init_from is None:
            self.problem(None)
        check_derived_keys(self.recipe)
        entries = split_files(self.recipe)
        for entry in entries:
            if (entry.files.pair_field is not None) != is_paired(self.recipe):
                raise UserError(
                    f"{entry.key}.pair_field and {entries[0].key}.pair_field must both be given, "
                    "or neither"
                )

    def problem(self, origin: ProblemType | None) -> ProblemType:
        recipe, own = self.recipe, self.objective.problem
        if None not in (own, origin) and own != origin:
            raise UserError(
                f"objective.problem is {own}, but init_from: {recipe.init_from} is a classifier of "
                f"the problem {origin}; leave objective.problem out, or start from another model"
            )
        problem: ProblemType = own or origin or "single_label"
        _check_settings(recipe, problem)
        return problem

    def raw_data(self) -> RawData:
        return raw_data(self.recipe, lambda entry: open_labeled(entry.files))

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        return joint_tokenizer(self.recipe, sample, extra_specials=(MASK,), template="both")

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        texts = ("text", "pair") if is_paired(self.recipe) else ("text",)
        return {"text": TextColumn(tokenizers[0], texts)}

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: Inherited
    ) -> dict[str, Any]:
        # If the source model has the same classes, in its order.
        problem = self.problem(inherited.problem)
        is_same = sorted(inherited.labels) == sorted(labels)
        if problem == "regression":  # whose outputs have no names in the data
            is_same = len(inherited.labels) == len(labels)
        options = super().encode_options(split, labels, inherited)
        if split != "train" and options["truncation"] == "drop":
            options["truncation"] = "truncate"
        names = inherited.labels if is_same else labels
        return options | {"labels": names, "problem": problem}

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        num_labels = 2 if data is None else len(data.labels)
        return encoder_keys(self.recipe, data, name, "classify") | {"num_labels": num_labels}

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        return (data.ids("train").lengths_of(rows),)

    def collate(self, data: RunData, item: Int64[np.ndarray, " n"], split: str = "train") -> Batch:
        columns = data.splits[split]
        return collate_texts(
            columns.sequences("text"),
            item,
            pad_id=data.tokenizer.pad_id,
            labels=label_targets(columns, item, data.labels, data.problem),
            second=columns.numbers_of("text.second", item) if "text.second" in columns else None,
        )

    def evaluate(self, model: Classifier, data: RunData) -> EvaluationResult:
        """See `Task.evaluate`: the loss, and the metric of labels."""
        sums, by_corpus, answers = self._predict(model, data, "valid")
        targets, names = _targets(data, "valid"), data.labels
        rows = data.texts("valid", self.recipe.evaluation.num_samples)
        texts = (
            "\n".join(text for key, text in row.items() if key not in (LABEL, CORPUS))
            for row in rows
        )
        of_rows = (
            answer_texts(side[: len(rows)], names, data.problem) for side in (targets, answers)
        )
        samples = [Sample(*sides) for sides in zip(texts, *of_rows, strict=False)]
        scores, _ = score_answers(targets, answers, names, data.problem)
        return make_evaluation(self.recipe, sums, samples, scores, corpora=by_corpus)

    def compute_final_scores(self, model: Classifier, data: RunData, out: Path) -> FinalScores:
        """Classify and score the test texts, or those of valid if there is no test split.

        `scores.json` also has precision, recall and F1 of each label, and of single labels the
        confusion matrix: `confusion[i][j]` texts of `labels[i]` were classified as `labels[j]`. The
        predicted labels or values are in `test.output.txt`, one text per line.
        """
        sums, by_corpus, answers = self._predict(model, data, data.final)
        loss = {"loss": float(sums.nll) / sums.tokens}
        targets = _targets(data, data.final)
        scores, tables = score_answers(targets, answers, data.labels, data.problem)
        lines = answer_texts(answers, data.labels, data.problem)
        write_lines(out / f"{data.final}.output.txt", lines)
        scores |= loss | corpus_losses(by_corpus)
        scored = write_scores(data, out, {"num_texts": len(answers)}, scores, **tables)
        if "confusion" not in tables:
            return scored
        return replace(scored, labels=tables["labels"], confusion=tables["confusion"])

    @torch.inference_mode()
    def _predict(
        self, model: Classifier, data: RunData, split: str
    ) -> tuple[LossSum, dict[str, float], np.ndarray]:
        """Loss sums over a held-out split, the loss of each corpus, and the answer to each text:
        (N,), a label; (N, C), the labels that are true; (N, C), values."""
        net, smoothing = model.net.eval(), self.recipe.training.label_smoothing
        columns, lengths = data.splits[split], data.ids(split).lengths
        # Zero for the texts of other processes.
        if data.problem == "single_label":
            own = np.zeros(len(columns), dtype=np.int64)
        else:
            own = np.zeros((len(columns), len(data.labels)), dtype=np.float32)
        shares = current_shares()
        with track("classifying", len(own[shares.part])) as advance:

            def sums_of(start: int, end: int) -> LossSum:
                """The losses of some texts; writes what the net says of them to `own`."""
                parts = []
                for indices in plan_evaluation_batches(lengths[start:end])[shares.part]:
                    batch = self.collate(data, start + indices, split).to(model.device)
                    states = target_states(net, batch)
                    loss = target_loss(net.head, states, batch.targets, label_smoothing=smoothing)
                    parts.append(loss)
                    logits = net.head(states).float()
                    if data.problem == "single_label":
                        logits = logits.argmax(-1)
                    own[start + indices] = logits.cpu().numpy()
                    advance(len(indices))
                return sum_losses(parts)

            sums, by_corpus = sums_by_corpus(columns.corpora, len(columns), sums_of)
        answers = np.sum(shares.gather(own), axis=0)
        return sums, by_corpus, answers >= 0 if data.problem == "multi_label" else answers


def _targets(data: RunData, split: str) -> np.ndarray:
    """The labels of a held-out split, as `label_targets`."""
    columns = data.splits[split]
    return label_targets(columns, np.arange(len(columns)), data.labels, data.problem)


def _check_settings(recipe: Recipe, problem: ProblemType) -> None:
    """Raise UserError for settings that have no meaning for a problem."""
    training, metric, known = recipe.training, recipe.evaluation.metric, _METRICS[problem]
    wrong = [] if metric in known else [f"evaluation.metric {metric} (use {' or '.join(known)})"]
    if problem != "single_label":  # all of them are of a softmax
        for key in ("label_smoothing", "r_drop"):
            if value := getattr(training, key):
                wrong.append(f"training.{key} {value:g} (set it to 0)")
        if recipe.distillation.teacher is not None:
            wrong.append("distillation.teacher (leave it out)")
    if wrong:
        raise UserError(f"without a meaning for the problem {problem}: {', '.join(wrong)}")
