"""Learning to name the class of a text: labelled texts, judged by accuracy and F1."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import Field

from heedful.data.collate import Batch, collate_texts
from heedful.data.encoding import TextColumn
from heedful.data.labels import label_ids, label_names
from heedful.data.report import listed as listed_names
from heedful.data.rows import Rows, hold_out
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import target_loss, target_states, total
from heedful.files import write_text
from heedful.inference import Classifier, ModelCard
from heedful.parts.losses import LossSum
from heedful.tasks.inputs import (
    SPLITS,
    evaluation_plan,
    given_files,
    make_tokenizer,
    read_labelled,
    training_plan,
)
from heedful.tasks.masked_lm import MASK
from heedful.tasks.masking import example_rng
from heedful.tasks.task import Data, EncoderTask, FinalScores, Keys, Origin, PlannedRows, Say
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation

_SHOWN = 10  # labels that a line lists


class WordKeys(Keys):
    """What is done to texts that are learnt from (Iyyer et al. 2015, sec. 3.1)."""

    word_dropout: float = Field(
        0.0, ge=0, lt=1, description="chance of each token to be hidden while it is learnt from"
    )


class Classification(EncoderTask):
    """Texts, or pairs of texts, with a label each, from TSV or JSONL files (`data.train.file`).

    The names of the labels come from all of the training file, and every other file must keep to
    them. Held-out texts are never dropped: where training texts are, they are cut.
    """

    Objective = WordKeys
    sources: ClassVar[tuple[str, ...]] = ("file",)
    head = "classify"

    def check(self) -> None:
        super().check()
        paired = self.recipe.data.train.pair_field is not None
        for name, files in given_files(self.recipe):
            if (files.pair_field is not None) != paired:
                raise UserError(
                    f"data.{name}.pair_field and data.train.pair_field must both be given, or "
                    "neither"
                )

    def read(self) -> dict[str, Rows]:
        rows = self.read_files(read_labelled)
        names = label_names(rows["train"])
        for split in rows.values():
            label_ids(split, names)  # a label that is none of them is told before the work begins
        if "valid" not in rows:
            rows["train"], rows["valid"] = hold_out(rows["train"], self.recipe.data.hold_out)
        self._names = names
        return {name: rows[name] for name in SPLITS if name in rows}

    def make_tokenizers(self, train: Rows) -> tuple[Tokenizer, Tokenizer]:
        texts = [text for name in ("text", "pair") if name in train for text in train[name]]
        tokenizer = make_tokenizer(self.recipe, texts, extra_specials=[MASK], template="both")
        return tokenizer, tokenizer

    def columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        paired = self.recipe.data.train.pair_field is not None
        return {"text": TextColumn(tokenizers[0], ("text", "pair") if paired else ("text",))}

    def encoding(self, split: str, rows: Rows, origin: Origin) -> dict[str, Any]:
        names = self._names
        if sorted(origin.labels) == sorted(names):  # in the order of the model that is gone on with
            names = tuple(origin.labels)
        labels = {"numbers": {"labels": label_ids(rows, names)}, "info": {"labels": names}}
        options = super().encoding(split, rows, origin) | labels
        if split != "train" and options["truncation"] == "drop":
            options["truncation"] = "truncate"
        return options

    def prepare(self, cache: Path, origin: Origin, say: Say) -> Data:
        data = super().prepare(cache, origin, say)
        counts = np.bincount(data.splits["train"].numbers("labels"), minlength=len(labels_of(data)))
        shown = [f"{name} ({n:,})" for name, n in zip(labels_of(data), counts, strict=True)]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        say(f"labels     {', '.join(shown[:_SHOWN])}{more}")
        return data

    def model_keys(self, data: Data | None, name: str) -> dict[str, object]:
        num_labels = 2 if data is None else len(labels_of(data))
        return super().model_keys(data, name) | {"num_labels": num_labels}

    def check_teacher(self, data: Data, labels: Sequence[str]) -> None:
        """Refuse a teacher whose classes are not those of the training text."""
        if tuple(labels) != labels_of(data):
            raise UserError(
                f"distillation.teacher knows the labels {listed_names(labels)}, but "
                f"data.train.file has {listed_names(labels_of(data))}; they must be the same"
            )

    def card(self, data: Data, name: str) -> ModelCard:
        return replace(super().card(data, name), labels=labels_of(data))

    def batches(self, data: Data, epoch: int) -> Sequence[PlannedRows]:
        batches = training_plan(self.recipe, epoch, data.ids("train").lengths)
        return [PlannedRows(epoch, indices) for indices in batches]

    def collate(self, data: Data, item: PlannedRows, split: str = "train") -> Batch:
        columns = data.splits[split]
        batch = collate_texts(
            columns.sequences("text"),
            item.indices,
            pad_id=data.tokenizer.pad_id,
            labels=columns.numbers("labels"),
            second=columns.numbers("text.second") if "text.second" in columns else None,
        )
        chance, seed = self.objective.word_dropout, self.recipe.training.seed
        if split != "train" or not chance:
            return batch
        return hide_words(batch, data.tokenizer, chance=chance, seed=seed, epoch=item.epoch)

    def evaluate(self, model: Classifier, data: Data) -> Evaluation:
        found, predictions = self._predicted(model, data, "valid")
        scores = self._scores(data, "valid", predictions)
        labels, names = data.splits["valid"].numbers("labels"), labels_of(data)
        rows = data.texts("valid", self.recipe.evaluation.num_samples or 1)
        samples = [
            Sample("\n".join(text for key, text in row.items() if key != "label"), right, output)
            for row, right, output in zip(
                rows[: self.recipe.evaluation.num_samples],
                (names[label] for label in labels),
                (names[label] for label in predictions),
                strict=False,
            )
        ]
        return self.judged(found, samples, scores)

    def finish(self, model: Classifier, data: Data, out: Path) -> FinalScores:
        """Name the class of each test text (validation text where there is none), and score.

        `scores.json` has a table of errors besides: `confusion[i][j]` texts of `labels[i]` were
        taken for `labels[j]`. The names are in `test.output.txt`, one a line.
        """
        found, predictions = self._predicted(model, data, data.final)
        scores = self._scores(data, data.final, predictions)
        scores |= {"loss": float(found.nll) / found.tokens}
        names = labels_of(data)
        table = confusion(data.splits[data.final].numbers("labels"), predictions, len(names))
        named = "".join(f"{names[label]}\n" for label in predictions.tolist())
        write_text(out / f"{data.final}.output.txt", named)
        tables = {"labels": list(names), "confusion": table.tolist()}
        return self.written(data, out, {"num_texts": len(predictions)}, scores, **tables)

    @torch.inference_mode()
    def _predicted(
        self, model: Classifier, data: Data, split: str
    ) -> tuple[LossSum, Int64[np.ndarray, " N"]]:
        """Sums over a held-out split, and the label that each of its texts is given."""
        net, smoothing = model.net.eval(), self.recipe.training.label_smoothing
        parts, predictions = [], np.zeros(len(data.splits[split]), dtype=np.int64)
        for indices in evaluation_plan(data.ids(split).lengths):
            batch = self.collate(data, PlannedRows(0, indices), split).to(model.device)
            states = target_states(net, batch)
            parts.append(target_loss(net.head, states, batch.targets, label_smoothing=smoothing))
            predictions[indices] = net.head(states).argmax(-1).cpu().numpy()
        return total(parts), predictions

    def _scores(
        self, data: Data, split: str, predictions: Int64[np.ndarray, " N"]
    ) -> dict[str, float]:
        labels = data.splits[split].numbers("labels")
        table = confusion(labels, predictions, len(labels_of(data)))
        return {"accuracy": accuracy(table), "macro_f1": macro_f1(table)}


def labels_of(data: Data) -> tuple[str, ...]:
    """Names of the classes, in the order of the logits."""
    names: list[Any] = data.splits["train"].info["labels"]
    return tuple(names)


def hide_words(
    batch: Batch, tokenizer: Tokenizer, *, chance: float, seed: int, epoch: int
) -> Batch:
    """The batch with each ordinary token hidden by chance (Iyyer et al. 2015, "word dropout").

    A token is hidden behind the mask, or is unknown where the tokenizer has none. What is hidden
    is a pure function of the seed, the epoch and the text's place in its store.
    """
    hidden_id = tokenizer.specials.mask_id
    if hidden_id is None:
        hidden_id = tokenizer.unk_id
    if hidden_id < 0:
        raise UserError("objective.word_dropout needs a mask or an unknown token in the tokenizer")
    ids = batch.tokens.ids.numpy().copy()
    special = np.isin(ids, sorted(tokenizer.special_ids))  # padding too
    for row, index in enumerate(batch.indices.tolist()):
        drawn = example_rng(seed, epoch, index).random(ids.shape[1]) < chance
        ids[row][drawn & ~special[row]] = hidden_id
    return replace(batch, tokens=replace(batch.tokens, ids=torch.from_numpy(ids)))


def confusion(
    labels: Int64[np.ndarray, " N"], predictions: Int64[np.ndarray, " N"], num_labels: int
) -> Int64[np.ndarray, "C C"]:
    """How many texts of each label (row) were taken for each label (column)."""
    places = labels * num_labels + predictions
    return np.bincount(places, minlength=num_labels**2).reshape(num_labels, num_labels)


def accuracy(table: Int64[np.ndarray, "C C"]) -> float:
    """The share of a `confusion` that was named rightly."""
    return float(table.trace() / table.sum())


def macro_f1(table: Int64[np.ndarray, "C C"]) -> float:
    """The mean of all labels' F1, 2 · right / (texts of it + texts taken for it).

    Each label weighs alike, however rare. One that neither a text has nor any was taken for has no
    F1 and is left out.
    """
    right, both = table.diagonal(), table.sum(axis=0) + table.sum(axis=1)
    return float((2 * right[both > 0] / both[both > 0]).mean())
