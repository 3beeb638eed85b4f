"""What every task shares: data prepared once, batches by a plan, the loss, and how it is judged."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from pydantic import TypeAdapter, ValidationError

from heedful.config import OWN_METRICS, Files, Recipe, Strict
from heedful.data.collate import Batch
from heedful.data.columns import open_columns, write_columns
from heedful.data.encoding import TextColumn, encode_rows
from heedful.data.prepared import Hold, content_key, prepared
from heedful.data.rows import LABEL, Rows, drop_held_out, format_of, hold_out, split_tail
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import averages, batch_loss, total
from heedful.files import read_json, write_json
from heedful.parts.losses import LossSum
from heedful.pipelines import ModelCard
from heedful.plugins import SHIPPED, metric
from heedful.recipe_files import wrong_key
from heedful.task_keys import ALL, TEXTS, TaskKeys
from heedful.tasks.inputs import (
    SOURCES,
    SPLITS,
    check_sources,
    given_files,
    listed,
    make_tokenizer,
    read_texts,
    split_files,
    write_rows,
)
from heedful.tasks.run_data import Data, Origin
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation
from heedful.zoo import architecture

Say = Callable[[str], None]
MASK = "<mask>"
HELD_OUT_SEED = 0  # held-out texts are masked and corrupted by it, so that runs can be compared


class Keys(Strict):
    """Keys that a task has of its own, the recipe's `objective`."""


@dataclass(frozen=True)
class FinalScores:
    """What a finished run is worth: by name a number, or a mapping with "score" and details.

    A classifier's `confusion` has a row and a column for each of its `labels`.
    """

    by_name: dict[str, Any]
    labels: Sequence[str] = ()
    confusion: Sequence[Sequence[int]] = ()

    def values(self) -> dict[str, float]:
        """Name to number alone."""
        return {
            name: float(entry["score"] if isinstance(entry, Mapping) else entry)
            for name, entry in self.by_name.items()
        }


class Task(ABC):
    """One task by a recipe: first its data, then a model on them.

    Attributes:
        Objective: the task's own keys.
        default_model: `model` where a recipe says nothing of it.
        recipe_keys: the keys of a recipe that it reads, and its defaults for them.
        levels: of distillation.
        length_key: the recipe's key that says how many tokens a model must read.
        unit: what `count` counts.
        template: of a new tokenizer, which special tokens it puts around a text.
    """

    Objective: ClassVar[Any] = Keys
    default_model: ClassVar[dict[str, Any]] = {"architecture": "bert", "size": "tiny"}
    recipe_keys: ClassVar[TaskKeys] = ALL
    levels: ClassVar[tuple[str, ...]] = ("word",)
    length_key: ClassVar[str] = "data.max_length"
    unit: ClassVar[str] = "examples"
    template: str = "none"

    def __init__(self, recipe: Recipe) -> None:
        """Raises UserError for wrong keys of the recipe's objective."""
        self.recipe = recipe
        self.objective: Any = read_objective(recipe, self.Objective)
        self._read: dict[str, str] = {}

    # --- data first ---

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names that `evaluation.metric` may have."""
        return ("loss", "token_accuracy", "accuracy")

    def check(self) -> None:
        """Refuse what is wrong with the recipe before any data are read; raises UserError."""
        recipe = self.recipe
        if recipe.evaluation.metric not in self.metrics:
            raise UserError(
                f"evaluation.metric {recipe.evaluation.metric} is none of the task {recipe.task}; "
                f"use {' or '.join(self.metrics)}"
            )
        check_sources(recipe, self.recipe_keys)

    def read(self) -> dict[str, Rows]:
        """The rows of train, valid and, where given, test; what was found in them is said later."""
        rows = {name: self.read_split(files) for name, files in given_files(self.recipe)}
        self._read = {name: split.report.summary() for name, split in rows.items()}
        if "valid" not in rows:
            rows["train"], rows["valid"] = self.hold_out(rows["train"])
        return rows

    def read_split(self, files: Files) -> Rows:
        """The rows of one split's files; those of train are read first."""
        raise NotImplementedError

    def hold_out(self, train: Rows) -> tuple[Rows, Rows]:
        """The rows to train on and those held out of them, where the recipe has no data.valid."""
        rest, valid = hold_out(train, self.recipe.data.hold_out)
        self._read["valid"] = f"{len(valid):,} of data.train (data.hold_out)"
        return rest, valid

    def drop_held_out(self, rows: Mapping[str, Rows]) -> Rows:
        """The rows of train without those that also stand in valid or test."""
        return drop_held_out(rows["train"], [rows[name] for name in SPLITS[1:] if name in rows])

    def special_tokens(self) -> Sequence[str]:
        """Names of special tokens that a new tokenizer gets."""
        return ()

    def make_tokenizers(self, train: Rows) -> tuple[Tokenizer, Tokenizer]:
        """New tokenizers, of both sides: one of all the texts that there are, twice."""
        texts = [text for name in train.columns if name != LABEL for text in train[name]]
        specials = self.special_tokens()
        tokenizer = make_tokenizer(
            self.recipe, texts, extra_specials=specials, template=self.template
        )
        return tokenizer, tokenizer

    @abstractmethod
    def columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        """How the columns of ids are made of a row's texts."""

    def encoding(self, split: str, rows: Rows, origin: Origin) -> dict[str, Any]:
        """Options of `encode_rows` for a split."""
        data = self.recipe.data
        return {"max_length": data.max_length, "truncation": data.truncation}

    def key(self, origin: Origin) -> dict[str, Any]:
        """All that prepared data depend on, as JSON: content of files, not their names."""
        recipe = self.recipe
        own = [tokenizer.content() for tokenizer in origin.tokenizers or ()]
        given = hashlib.blake2b(json.dumps(own, sort_keys=True).encode(), digest_size=16)
        paths = {split: {*SOURCES} for split in SPLITS}
        return {
            "task": recipe.task,
            "plugins": content_key([Path(path) for path in recipe.plugins if SHIPPED not in path]),
            "data": recipe.data.model_dump(
                exclude={"src_language": True, "tgt_language": True, "folder": True, **paths}
            ),
            "files": [
                [[format_of(path), *content_key([path])] for path in listed(getattr(files, source))]
                for files in split_files(recipe).values()
                for source in SOURCES
            ],
            "tokenizer": given.hexdigest() if own else recipe.tokenizer.model_dump(),
            "objective": recipe.objective,
            "labels": origin.labels,
        }

    def prepare(self, cache: Path, origin: Origin, say: Say) -> Data:
        """The data of the recipe, made in a folder of `cache` where no run has made them before.

        Raises:
            UserError: files that cannot be read, or nothing in them to learn from.
        """

        def fill(directory: Path) -> None:
            rows = self.read()
            rows["train"] = self.drop_held_out(rows)
            tokenizers = origin.tokenizers or self.make_tokenizers(rows["train"])
            columns = self.columns(tokenizers)
            for name, split in rows.items():
                options = self.encoding(name, split, origin)
                write_columns(directory / name, encode_rows(split, columns, **options))
            write_json(directory / "read.json", self._read)
            for name in SPLITS[1:]:
                if name in rows:
                    write_rows(directory / f"{name}.jsonl", rows[name])
            for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
                if side == "src" or tokenizer is not tokenizers[0]:
                    tokenizer.save(directory / f"{side}.json")

        files = [path for split in split_files(self.recipe).values() for path in split.paths()]
        about = {"task": self.recipe.task, "files": files}
        data = self.open(prepared(cache, self.key(origin), fill, about), origin.start_id)
        for name, summary in read_json(data.directory / "read.json").items():
            say(f"{'data.' + name:<10} {summary}")
        src, tgt = data.tokenizers
        more = "" if src is tgt else f" and {tgt.vocab_size:,}"
        say(f"tokenizer  {src.kind}, {src.vocab_size:,} entries{more}")
        for name, columns in data.splits.items():
            say(f"{name:<10} {columns.report.summary()}")
        return data

    def open(self, directory: Path, start_id: int | None) -> Data:
        """Open the folder that `prepare` made; `start_id` as of `Origin`."""
        hold = Hold(directory)
        src = Tokenizer.load(directory / "src.json")
        other = directory / "tgt.json"
        tgt = Tokenizer.load(other) if other.is_file() else src
        splits = {
            name: open_columns(directory / name) for name in SPLITS if (directory / name).is_dir()
        }
        start_id = tgt.bos_id if start_id is None else start_id
        return Data(directory, (src, tgt), splits, start_id, holds=(hold,))

    def count(self, data: Data, split: str) -> int:
        """How many examples a split has."""
        return len(data.splits[split])

    @abstractmethod
    def model_keys(self, data: Data | None, name: str) -> dict[str, object]:
        """Keys of an architecture's Config that follow from the data; it may lack some.

        `data` is None before they are read, for a first look at the recipe.

        Raises:
            UserError: the architecture cannot learn the task.
        """

    def card(self, data: Data, name: str) -> ModelCard:
        """What the model's `config.json` will say of it."""
        return ModelCard(name, self.recipe.task, self.recipe.data.src_language)

    @abstractmethod
    def batches(self, data: Data, epoch: int) -> Sequence[Any]:
        """The batches of an epoch, a pure function."""

    def plan(self, data: Data, epoch: int, rank: int = 0, world: int = 1) -> Sequence[Any]:
        """The batches of an epoch that one of `world` processes takes; all are the epoch's."""
        return self.batches(data, epoch)[rank::world]

    @abstractmethod
    def collate(self, data: Data, item: Any) -> Batch:
        """A planned batch as tensors on the CPU, a pure function."""

    # --- then the model ---

    def loss(self, net: Any, batch: Batch, **options: Any) -> LossSum:
        """Sums over a batch's targets, differentiable; options as of `head_loss`."""
        return batch_loss(net, batch, **options)

    @torch.inference_mode()
    def sums(self, net: Any, batches: Iterable[Batch]) -> LossSum:
        """Sums over held-out batches."""
        net.eval()
        device = next(net.parameters()).device
        options = {"label_smoothing": self.recipe.training.label_smoothing, "count_correct": True}
        return total([self.loss(net, batch.to(device), **options) for batch in batches])

    @abstractmethod
    def evaluate(self, model: Any, data: Data) -> Evaluation:
        """What a model is worth on held-out data; draws no random numbers."""

    @abstractmethod
    def finish(self, model: Any, data: Data, out: Path) -> FinalScores:
        """Score the run's final model and write what it says into the run's folder."""

    def judged(
        self, found: LossSum, samples: list[Sample], scores: dict[str, float] | None = None
    ) -> Evaluation:
        """An evaluation by the recipe's metric, from held-out sums and scores."""
        scores = scores or {}
        values = averages(found)
        accuracy = scores.get("accuracy", values["token_accuracy"])
        known = {"accuracy": accuracy, **scores, "loss": values["loss"], "token_accuracy": accuracy}
        name = self.recipe.evaluation.metric
        higher_is_better = (
            OWN_METRICS[name] if name in OWN_METRICS else metric.get(name).higher_is_better
        )
        return Evaluation(
            loss=float(found.loss) / found.tokens,
            perplexity=values["perplexity"],
            token_accuracy=accuracy,
            scores=scores,
            samples=samples,
            value=known[name] if higher_is_better else -known[name],
        )

    def written(
        self, data: Data, out: Path, counts: dict[str, Any], scores: dict[str, float], **more: Any
    ) -> FinalScores:
        """The scores of the run's final model, written into `scores.json`."""
        content = {"set": data.final, **counts, "scores": scores, **more}
        write_json(out / "scores.json", content)
        return FinalScores(dict(scores))


class TextTask(Task):
    """A task that learns from texts alone, of one tokenizer."""

    recipe_keys = TEXTS
    template = "both"

    def encoding(self, split: str, rows: Rows, origin: Origin) -> dict[str, Any]:
        return super().encoding(split, rows, origin) | {"drop_unknown": True}

    def read_split(self, files: Files) -> Rows:
        return read_texts(files, self.recipe)

    def hold_out(self, train: Rows) -> tuple[Rows, Rows]:
        """The last texts are held out."""
        data = self.recipe.data
        unit = "line" if listed(data.train.file) else data.documents
        return split_tail(train, data.valid_fraction, unit)

    def drop_held_out(self, rows: Mapping[str, Rows]) -> Rows:
        """As of any task, but whole files stay: who names one twice means it, as `rhyme` does."""
        if self.recipe.data.documents == "file":
            return rows["train"]
        return super().drop_held_out(rows)


class EncoderTask(Task):
    """A task of nets of one stack that reads both ways."""

    head: ClassVar[str]
    template = "both"

    def special_tokens(self) -> Sequence[str]:
        return (MASK,)

    def check(self) -> None:
        super().check()
        for key in ("head", "num_labels"):
            if key in self.recipe.model:
                raise UserError(
                    f"model.{key} follows from the task {self.recipe.task}; leave it out"
                )

    def model_keys(self, data: Data | None, name: str) -> dict[str, object]:
        if not architecture(name).has_key("head"):
            raise UserError(
                f"{name} is no encoder, which the task {self.recipe.task} needs; set "
                "model.architecture to bert, roberta or distilbert, or start from such a model"
            )
        vocab_size = 8 if data is None else data.tokenizer.vocab_size
        return {
            "vocab_size": vocab_size,
            "head": self.head,
            "max_length": self.recipe.data.max_length,
        }


class SeqToSeqTask(Task):
    """A task of nets of two stacks."""

    default_model: ClassVar[dict[str, Any]] = {"architecture": "vaswani2017", "size": "tiny"}

    def model_keys(self, data: Data | None, name: str) -> dict[str, object]:
        if not architecture(name).has_key("num_decoder_layers"):
            raise UserError(
                f"{name} has one stack, but the task {self.recipe.task} needs two; set "
                "model.architecture to vaswani2017, bart, marian or t5"
            )
        src, tgt = (8, 8) if data is None else (each.vocab_size for each in data.tokenizers)
        keys: dict[str, object] = {"src_vocab_size": src, "tgt_vocab_size": tgt}
        if data is not None and data.tokenizers[0] is not data.tokenizers[1]:
            keys |= {"tie_embeddings": "decoder"} if name == "vaswani2017" else {}
        return keys | {"max_length": self.recipe.data.max_length}


def read_objective(recipe: Recipe, kind: Any) -> Any:
    """The task's own keys, a model or a union of such by `kind`; UserError names a wrong one."""
    model = _model_of(kind, recipe.objective.get("kind"))
    try:
        return TypeAdapter(model).validate_python(recipe.objective)
    except ValidationError as error:
        problem = wrong_key(error, model, "objective")[1]
        if problem.startswith("unknown key") and not model.model_fields:
            problem = f"the task {recipe.task} has no objective settings; leave them out"
        raise UserError(problem) from None


def _model_of(kind: Any, name: object) -> Any:
    """The model of a union whose `kind` is `name`; a plain model itself."""
    union = get_args(next(iter(get_args(kind)), None))
    return next((each for each in union if each.model_fields["kind"].default == name), kind)
