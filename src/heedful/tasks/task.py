"""The hooks of a task: data, loss and evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
from jaxtyping import Int64
from pydantic import TypeAdapter, ValidationError

from heedful.config import Filters, Recipe, Strict, wrong_key
from heedful.data.buckets import BatchShape, padded_lengths
from heedful.data.collate import Batch
from heedful.data.draws import EpochDraw
from heedful.data.encoding import TextColumn
from heedful.data.labels import ProblemType
from heedful.data.plans import RowsOf, plan_batches, plan_by_buffers
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.parts.losses import LossSum
from heedful.pipelines import ModelMetadata
from heedful.task_keys import ALL, TaskKeys
from heedful.tasks.corpora import check_corpora, corpus_shares, is_paired
from heedful.tasks.inputs import (
    SomeRows,
    check_sources,
    joint_tokenizer,
    training_filters,
    training_shapes,
)
from heedful.tasks.noisy_rows import RowNoise
from heedful.tasks.run_data import Inherited, RawData, RunData
from heedful.tasks.scoring import FinalScores
from heedful.training.events import EvaluationResult

MASK = "<mask>"
HELD_OUT_SEED = 0  # seed of the noise in held-out texts, the same in all runs


class ObjectiveSettings(Strict):
    """Base of a task's `objective` settings: masking, noise, windows."""


class Task(ABC):
    """A training task by its recipe: data, loss and evaluation, as hooks in the order of calls.

    1. `check` refuses a wrong recipe.
    2. `adapt_tokenizers` changes those of a model to start from. Data that no earlier run has
       prepared from the same files and `objective_files` (`heedful.tasks.prepared_data`):
       `raw_data` opens the sources of rows of text, `train_tokenizers` trains tokenizers on a
       sample unless they are another model's, `text_columns` and `encode_options` determine how
       rows become ids.
    3. The net: `model_keys` (also called once before the data are read) and `describe_model`.
    4. `plan_epoch` for each epoch, by the `row_lengths`; `collate` and `loss` for each batch.
    5. `evaluate` at each evaluation, and `compute_final_scores` for the final model.

    A hook keeps no state on the task: its results are in its return value. A subclass defines the
    abstract hooks; the others have a default. Helpers: `heedful.tasks.inputs` (reading,
    tokenizers, plans, keys of nets) and `heedful.tasks.scoring`.

    Attributes:
        objective_class: the class of the settings under `objective` in a recipe.
        default_model: the keys of `model` where the recipe sets none.
        recipe_keys: the recipe keys that the task reads, with its defaults for them.
        distillation_levels: the values of `distillation.level` that it supports.
        row_columns: the columns of a row of data in memory (`heedful.train(data=...)`); empty for
            a task that reads none.
        length_key: the recipe key that bounds the tokens of an input.
        unit: the noun for what `split_size` counts.
    """

    objective_class: ClassVar[Any] = ObjectiveSettings
    default_model: ClassVar[dict[str, Any]] = {"architecture": "bert", "size": "tiny"}
    recipe_keys: ClassVar[TaskKeys] = ALL
    distillation_levels: ClassVar[tuple[str, ...]] = ("word",)
    row_columns: ClassVar[tuple[str, ...]] = ()
    length_key: ClassVar[str] = "data.max_length"
    unit: ClassVar[str] = "examples"

    def __init__(self, recipe: Recipe) -> None:
        """Raises UserError for a wrong key of the recipe's `objective`."""
        self.recipe = recipe
        self.objective: Any = parse_objective(recipe, self.objective_class)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The values of `evaluation.metric` that it supports."""
        return ("loss", "token_accuracy", "accuracy")

    def check(self) -> None:
        """Refuse a wrong recipe before any data are read; raises UserError."""
        recipe = self.recipe
        if recipe.evaluation.metric not in self.metrics:
            raise UserError(
                f"evaluation.metric {recipe.evaluation.metric} is not supported by the task "
                f"{recipe.task}; use {' or '.join(self.metrics)}"
            )
        if recipe.training.noise.is_on and type(self).row_noise is Task.row_noise:
            raise UserError(
                f"training.noise is for pairs of texts, which the task {recipe.task} has not; "
                "leave it out"
            )
        check_sources(recipe, self.recipe_keys)
        if recipe.data.corpora:
            check_corpora(recipe)
        if self.row_columns and recipe.data.filters != Filters():
            pair = ["pair"] if is_paired(recipe) else []
            training_filters(recipe, [*self.row_columns, *pair])

    def notes(self) -> list[str]:
        """Lines to print before a run begins."""
        return []

    def adapt_tokenizers(
        self, tokenizers: tuple[Tokenizer, Tokenizer]
    ) -> tuple[Tokenizer, Tokenizer]:
        """The tokenizers of another model as the run uses them; ids of their tokens stay.

        Raises:
            UserError: a tokenizer that the task cannot use.
        """
        return tokenizers

    def problem(self, origin: ProblemType | None) -> ProblemType:
        """The kind of the labels, and so of the logits of a classifier.

        Args:
            origin: that of the classifier that the run starts from; None: it starts from another
                model, or from none.

        Raises:
            UserError: the task or its recipe does not fit the problem.
        """
        return "single_label"

    def objective_files(self) -> list[Path]:
        """Files that the objective names, whose content prepared data depend on."""
        return []

    @abstractmethod
    def raw_data(self) -> RawData:
        """The sources of rows of text of train and, if the recipe has them, valid and test."""

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        """Source and target tokenizer, trained on training rows; default: one for both.

        Args:
            sample: at most `tokenizer.sample_size` training rows.
        """
        return joint_tokenizer(self.recipe, sample)

    @abstractmethod
    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        """The columns of token ids, by name, with the texts of a row that each encodes."""

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: Inherited
    ) -> dict[str, Any]:
        """Options of `Encoder` for a split; `labels`: the ordered names of the labels in train."""
        data = self.recipe.data
        return {"max_length": data.max_length, "truncation": data.truncation}

    def row_noise(self, data: RunData) -> RowNoise:
        """The noise in texts of training rows, for `training.noise`, in a task that has it."""
        raise NotImplementedError

    @abstractmethod
    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        """Keys of the Config of architecture `name` that follow from the data.

        Keys that the Config lacks are ignored. `data` is None in the first call, which checks
        the recipe before the data are read.

        Raises:
            UserError: the architecture does not fit the task.
        """

    def describe_model(self, data: RunData, name: str) -> ModelMetadata:
        """The metadata of the model in its `config.json`."""
        return ModelMetadata(
            name,
            self.recipe.task,
            self.recipe.data.src_language,
            labels=data.labels,
            problem=data.problem,
        )

    def plan_epoch(self, data: RunData) -> Sequence[Any]:
        """The batches of the epoch `data.epoch`, as items for `collate`; a pure function.

        Default: by `plan_rows`, for the rows of one shuffle buffer at a time (`plan_by_buffers`).
        It does not depend on the number of processes, which divide the rows of the batches. With
        weights above 1, a row has an index for each time that it is read
        (`heedful.data.columns.COPY`), which `Sequences` and `Columns.numbers_of` resolve.
        """
        seed, corpora = self.recipe.training.seed, data.splits["train"].corpora
        num_rows = self.num_rows(data)
        rows_of: RowsOf = np.arange
        if corpora:
            draw = EpochDraw(corpus_shares(self.recipe, corpora), seed=seed, epoch=data.epoch)
            num_rows, rows_of = len(draw), draw.rows
        plan = partial(self.plan_rows, data)
        return plan_by_buffers(num_rows, plan, seed=seed, epoch=data.epoch, rows_of=rows_of)

    def plan_rows(self, data: RunData, buffer: int, rows: Int64[np.ndarray, " n"]) -> Sequence[Any]:
        """The batches of the rows of a shuffle buffer of an epoch; default: by `row_lengths`.

        Args:
            buffer: the number of the buffer, from 0.
            rows: (n,), the indices of its rows.
        """
        settings, lengths = self.recipe.training, self.row_lengths(data, rows)
        if data.shapes is not None:
            lengths = tuple(padded_lengths(data.shapes, *lengths))
        return plan_batches(
            *lengths,
            max_tokens=settings.batch_tokens,
            max_sentences=settings.batch_sentences,
            seed=settings.seed,
            epoch=data.epoch,
            buffer=buffer,
            rows=rows,
        )

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        """Lengths in tokens of training rows, or upper bounds; of source and target for pairs.

        Args:
            rows: indices of rows, or a range of them.

        Raises:
            UserError: the task does not define it, so `training.compile` is not supported.
        """
        raise UserError(
            f"training.compile: the task {self.recipe.task} has no batches of fixed shapes; leave "
            "it out"
        )

    def batch_shapes(self, data: RunData) -> list[BatchShape]:
        """The shapes that batches are padded to with `training.compile`."""
        return training_shapes(self.recipe, self.num_rows(data), partial(self.row_lengths, data))

    def num_rows(self, data: RunData) -> int:
        """The number of training rows that `row_lengths` knows."""
        return len(data.splits["train"])

    def split_size(self, data: RunData, split: str) -> int:
        """The size of a split in `unit`s, for the log."""
        return len(data.splits[split])

    @abstractmethod
    def collate(self, data: RunData, item: Any) -> Batch:
        """A planned batch as tensors on the CPU; a pure function."""

    def loss(self, net: Any, batch: Batch, **options: Any) -> LossSum:
        """Sums over the targets of a batch, differentiable; options: those of `head_loss`."""
        return batch_loss(net, batch, **options)

    @abstractmethod
    def evaluate(self, model: Any, data: RunData) -> EvaluationResult:
        """Loss, scores and samples on the validation set; uses no random numbers.

        All processes of a run call it, and divide the work by `heedful.evaluation.sharing`.
        """

    @abstractmethod
    def compute_final_scores(self, model: Any, data: RunData, out: Path) -> FinalScores:
        """Scores of the final model, which are written with its outputs into the run's folder.

        Called as `evaluate`.

        Args:
            out: the run's folder; in processes other than the main one a temporary folder.
        """


def parse_objective(recipe: Recipe, settings: Any) -> Any:
    """The recipe's `objective` as `settings`: a class, or a union of classes selected by `kind`.

    Raises:
        UserError: a wrong key or value, by name.
    """
    # Of a union the class whose `kind` defaults to that of the recipe; a single class as it is.
    kind, union = recipe.objective.get("kind"), get_args(next(iter(get_args(settings)), None))
    model = next((cls for cls in union if cls.model_fields["kind"].default == kind), settings)
    try:
        return TypeAdapter(model).validate_python(recipe.objective)
    except ValidationError as error:
        problem = wrong_key(error, model, "objective")[1]
        if problem.startswith("unknown key") and not model.model_fields:
            problem = f"the task {recipe.task} has no objective settings; leave them out"
        raise UserError(problem) from None
