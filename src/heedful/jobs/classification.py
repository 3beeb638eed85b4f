"""Learning to name the class of a text: labelled texts, judged by accuracy and F1."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from heedful.config import Files, Recipe
from heedful.data.labelled import (
    Labelled,
    LabelledStore,
    encode_labelled,
    open_labelled,
    read_labelled,
)
from heedful.data.sequences import LabelledBatch, collate_labelled
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.metrics import perplexity
from heedful.files import write_json, write_text
from heedful.inference import ModelCard, SavedModel
from heedful.inference.language_model import total
from heedful.jobs.encoders import (
    check_encoder_recipe,
    encoder_sizes,
    evaluation_plan,
    training_plan,
)
from heedful.jobs.job import (
    FinalScores,
    Job,
    Say,
    held_out,
    listed,
    make_tokenizer,
    objective,
    read_texts,
)
from heedful.jobs.sources import check_distillation, ready_teacher, saved_model
from heedful.jobs.texts import splits_of
from heedful.parts.losses import LossSum
from heedful.tasks.classification import (
    accuracy,
    confusion,
    hide_words,
    label_logits,
    label_loss,
    macro_f1,
    text_states,
)
from heedful.tasks.distillation import distilled_labels
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation

SPLITS = ("train", "valid", "test")
MASK = "<mask>"
_SHOWN = 10  # labels that a line lists


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Objective:
    """What is done to texts that are learnt from.

    Args:
        word_dropout: the chance of each ordinary token to be hidden behind the mask, anew in every
            epoch, so that no single word decides (Iyyer et al. 2015, sec. 3.1).
    """

    word_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


class PlannedRows(NamedTuple):
    """A planned batch: some texts as an epoch hides their words."""

    epoch: int
    indices: Int64[np.ndarray, " B"]


class Classification(Job):
    """Texts, or pairs of texts, with a label each, from TSV or JSONL files (`data.train.file`).

    The names of the labels come from all of the training file, and every other file must keep to
    them. Held-out texts are never dropped: where training texts are, they are cut.
    """

    default_model: ClassVar[dict[str, Any]] = {"architecture": "bert", "size": "tiny"}

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        objective(recipe, Objective)
        check_encoder_recipe(recipe, ("file",))
        check_distillation(recipe)
        paired = recipe.data.train.pair_field is not None
        for name, files in splits_of(recipe).items():
            if listed(files.file) and (files.pair_field is not None) != paired:
                raise UserError(
                    f"data.{name}.pair_field and data.train.pair_field must both be given, or "
                    "neither"
                )

    def prepare(self, say: Say) -> dict[str, Any]:
        splits = {
            name: read_file(files)
            for name, files in splits_of(self.recipe).items()
            if listed(files.file)
        }
        for name, split in splits.items():
            say(f"{'data.' + name:<10} {split.report.summary()}")
        names = self._label_names(splits["train"])
        say(f"labels     {_counted(splits['train'], names)}")
        for split in splits.values():
            split.label_ids(names)  # a label that is none of them is told before the work begins
        if "valid" not in splits:
            kept, out = held_out(self.recipe.data.hold_out, len(splits["train"]), "texts")
            splits |= {"train": splits["train"].select(kept), "valid": splits["train"].select(out)}
            say(f"no data.valid: {len(out):,} texts are held out of the training")
        tokenizer = self._tokenizer(splits["train"])
        say(f"tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} entries")
        for name, split in splits.items():
            too_long = self.recipe.data.truncation
            _, report = encode_labelled(
                split,
                tokenizer,
                self.directory / name,
                label_names=names,
                max_length=self.recipe.data.max_length,
                too_long="truncate" if name != "train" and too_long == "drop" else too_long,
            )
            say(f"{name:<10} {report.summary()}")
        self._write_samples(splits["valid"])
        tokenizer.save(self.directory / "tokenizer.json")
        return {name: len(split) for name, split in splits.items()}

    def open(self) -> None:
        tokenizer = Tokenizer.load(self.directory / "tokenizer.json")
        self.tokenizers = (tokenizer, tokenizer)
        self.stores: dict[str, LabelledStore] = {
            name: open_labelled(self.directory / name)
            for name in SPLITS
            if (self.directory / f"{name}.ids.npy").is_file()
        }
        self.labels = self.stores["train"].label_names
        self.num_train, self.num_valid = (len(self.stores[name]) for name in SPLITS[:2])

    @classmethod
    def stand_in_sizes(cls, recipe: Recipe, name: str) -> dict[str, object]:
        return encoder_sizes(recipe, name, 8, head="classify", num_labels=2)

    def sizes(self, recipe: Recipe, name: str) -> dict[str, object]:
        vocab_size, num_labels = self.tokenizers[0].vocab_size, len(self.labels)
        return encoder_sizes(recipe, name, vocab_size, head="classify", num_labels=num_labels)

    def learn_from(self, teacher: SavedModel, *, resume: bool) -> None:
        """From what it says of each text. Its classes have to be those of the training text."""
        longest = self.recipe.data.max_length
        say = (lambda line: None) if resume else self.say
        self.teacher = ready_teacher(teacher, self.model, self.recipe, longest=longest, say=say)
        if tuple(teacher.card.labels) != tuple(self.labels):
            raise UserError(
                f"distillation.teacher knows the labels {', '.join(teacher.card.labels)}, but "
                f"data.train.file has {', '.join(self.labels)}; they must be the same"
            )

    def card(self, name: str) -> ModelCard:
        data = self.recipe.data
        return ModelCard(name, self.recipe.task, data.src_language, labels=self.labels)

    def plan(self, epoch: int) -> Sequence[PlannedRows]:
        batches = training_plan(self.recipe, self.stores["train"].lengths, epoch)
        return [PlannedRows(epoch, indices) for indices in batches]

    def load(self, item: PlannedRows) -> LabelledBatch:
        batch = self._batch("train", item.indices)
        chance = objective(self.recipe, Objective).word_dropout
        if not chance:
            return batch
        return hide_words(
            batch,
            chance=chance,
            tokenizer=self.tokenizers[0],
            seed=self.recipe.training.seed,
            epoch=item.epoch,
        )

    def loss(self, batch: LabelledBatch) -> LossSum:
        net, smoothing = self.model.net, self.recipe.training.label_smoothing
        if self.teacher is None:
            return label_loss(net, batch, label_smoothing=smoothing)
        settings = self.recipe.distillation
        return distilled_labels(net, self.teacher.net, batch, settings, label_smoothing=smoothing)

    def evaluate(self) -> Evaluation:
        found, predictions = self._judged("valid")
        scores = self._scores("valid", predictions)
        nll = float(found.nll) / found.tokens
        values = {"loss": -nll, "token_accuracy": scores["accuracy"], **scores}
        return Evaluation(
            loss=float(found.loss) / found.tokens,
            perplexity=perplexity(float(found.nll), found.tokens),
            token_accuracy=scores["accuracy"],
            scores=scores,
            samples=self._samples(predictions),
            value=values[self.recipe.evaluation.metric],
        )

    def finish(self, out: Path) -> FinalScores:
        """Name the class of each test text (validation text where there is none), and score.

        `scores.json` has a table of errors besides: `confusion[i][j]` texts of `labels[i]` were
        taken for `labels[j]`. The names are in `test.output.txt`, one a line.
        """
        name = "test" if "test" in self.stores else "valid"
        found, predictions = self._judged(name)
        scores = self._scores(name, predictions) | {"loss": float(found.nll) / found.tokens}
        table = confusion(self.stores[name].labels, predictions, len(self.labels))
        content = {"set": name, "num_texts": len(predictions), "scores": scores}
        tables = {"labels": list(self.labels), "confusion": table.tolist()}
        write_json(out / "scores.json", content | tables)
        named = "".join(f"{self.labels[label]}\n" for label in predictions.tolist())
        write_text(out / f"{name}.output.txt", named)
        return FinalScores(dict(scores))

    def _label_names(self, train: Labelled) -> tuple[str, ...]:
        """Those of the text; in the order of its teacher or the model that it starts from."""
        names = train.label_names()
        for path in (self.recipe.distillation.teacher, self.recipe.init_from):
            known = [] if path is None else saved_model(path).get("labels", [])
            if sorted(known) == sorted(names):
                return tuple(known)
        return names

    def _tokenizer(self, train: Labelled) -> Tokenizer:
        if self.given is not None:
            return self.given[0]
        texts = train.texts + (train.pairs or [])
        settings = self.recipe.tokenizer
        return make_tokenizer(settings, texts, extra_specials=[MASK], template="both")

    def _write_samples(self, split: Labelled) -> None:
        """The first held-out texts as they were read, to be shown."""
        count = self.recipe.evaluation.num_samples
        texts = split.texts[:count]
        if split.pairs is not None:
            texts = [f"{text}\n{pair}" for text, pair in zip(texts, split.pairs, strict=False)]
        lines = [json.dumps(text, ensure_ascii=False) + "\n" for text in texts]
        write_text(self.directory / "samples.jsonl", "".join(lines))

    def _batch(self, name: str, indices: Any) -> LabelledBatch:
        return collate_labelled(
            self.stores[name],
            indices,
            pad_id=self.tokenizers[0].pad_id,
            device=self.model.device,
        )

    @torch.inference_mode()
    def _judged(self, name: str) -> tuple[LossSum, np.ndarray]:
        """Sums over a held-out split, and the label that each of its texts is given."""
        net, store = self.model.net.eval(), self.stores[name]
        smoothing = self.recipe.training.label_smoothing
        parts, predictions = [], np.zeros(len(store), dtype=np.int64)
        for indices in evaluation_plan(store.lengths):
            batch = self._batch(name, indices)
            states = text_states(net, batch)
            parts.append(label_loss(net, batch, states=states, label_smoothing=smoothing))
            predictions[indices] = label_logits(net, states).argmax(-1).cpu().numpy()
        return total(parts), predictions

    def _scores(self, name: str, predictions: np.ndarray) -> dict[str, float]:
        table = confusion(self.stores[name].labels, predictions, len(self.labels))
        return {"accuracy": accuracy(table), "macro_f1": macro_f1(table)}

    def _samples(self, predictions: np.ndarray) -> list[Sample]:
        labels = self.stores["valid"].labels
        return [
            Sample(text, self.labels[labels[index]], self.labels[predictions[index]])
            for index, text in enumerate(read_texts(self.directory / "samples.jsonl"))
        ]


def read_file(files: Files) -> Labelled:
    """The labelled texts of a split."""
    return read_labelled(
        listed(files.file),
        text_field=files.text_field,
        label_field=files.label_field,
        pair_field=files.pair_field,
    )


def _counted(labelled: Labelled, names: Sequence[str]) -> str:
    """The labels with the number of their texts."""
    counts = np.bincount(labelled.label_ids(names), minlength=len(names)).tolist()
    shown = [f"{name} ({count:,})" for name, count in zip(names, counts, strict=True)]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more
