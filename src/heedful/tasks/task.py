"""The hooks of a task: its data, its loss, and how a model is judged."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from pydantic import TypeAdapter, ValidationError

from heedful.config import Recipe, Strict
from heedful.data.collate import Batch
from heedful.data.encoding import TextColumn
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.parts.losses import LossSum
from heedful.pipelines import ModelCard
from heedful.recipe_files import wrong_key
from heedful.task_keys import ALL, TaskKeys
from heedful.tasks.inputs import check_sources, joint_tokenizer
from heedful.tasks.run_data import Data, Origin, RawData
from heedful.tasks.scoring import FinalScores
from heedful.training.trainer import Evaluation

MASK = "<mask>"
HELD_OUT_SEED = 0  # held-out texts are masked and corrupted by it, so that runs can be compared


class ObjectiveSettings(Strict):
    """Base of a task's `objective` settings: masking, noise, windows."""


class Task(ABC):
    """One task by a recipe. A run calls the hooks in this order; a hook keeps nothing for another:

    1. `check`: refuse a wrong recipe.
    2. Data, where no earlier run has prepared them (`heedful.tasks.preparation`): `read` gives rows
       of text, `new_tokenizers` learns tokenizers of them, `columns` and `encode_options` say how
       rows become ids.
    3. The net: `model_keys` (once before the data are read, too) and `card`.
    4. Each epoch `plan`; each batch `collate`, then `loss`.
    5. `evaluate` at each evaluation, and `finish` on the final model.

    A subclass has `read`, `columns`, `model_keys`, `plan`, `collate`, `evaluate` and `finish`; the
    others have a default. Helpers for them: `heedful.tasks.inputs` (reading, tokenizers, plans),
    `heedful.tasks.net_keys` and `heedful.tasks.scoring`.

    Attributes:
        Objective: the class of the task's own keys, which are `objective` in a recipe.
        default_model: `model` where a recipe says nothing of it.
        recipe_keys: the keys of a recipe that it reads, and its defaults for them.
        levels: of distillation.
        length_key: the recipe's key that says how many tokens a model must read.
        unit: what `count` counts.
    """

    objective_class: ClassVar[Any] = ObjectiveSettings
    default_model: ClassVar[dict[str, Any]] = {"architecture": "bert", "size": "tiny"}
    recipe_keys: ClassVar[TaskKeys] = ALL
    distillation_levels: ClassVar[tuple[str, ...]] = ("word",)
    length_key: ClassVar[str] = "data.max_length"
    unit: ClassVar[str] = "examples"

    def __init__(self, recipe: Recipe) -> None:
        """Raises UserError for wrong keys of the recipe's objective."""
        self.recipe = recipe
        self.objective: Any = parse_objective(recipe, self.objective_class)

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

    @abstractmethod
    def read_raw_data(self) -> RawData:
        """The rows of train, valid and, where given, test."""

    def train_tokenizers(self, train: Rows) -> tuple[Tokenizer, Tokenizer]:
        """New tokenizers of source and target, learnt from training rows; one twice by default."""
        return joint_tokenizer(self.recipe, train)

    @abstractmethod
    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        """How the columns of ids are made of a row's texts."""

    def encode_options(self, split: str, raw: RawData, origin: Origin) -> dict[str, Any]:
        """Options of `encode_rows` for a split."""
        data = self.recipe.data
        return {"max_length": data.max_length, "truncation": data.truncation}

    @abstractmethod
    def model_keys(self, data: Data | None, name: str) -> dict[str, object]:
        """Keys of an architecture's Config that follow from the data; it may lack some.

        `data` is None before they are read, for a first look at the recipe.

        Raises:
            UserError: the architecture cannot learn the task.
        """

    def describe_model(self, data: Data, name: str) -> ModelCard:
        """The description of the model in its `config.json`."""
        return ModelCard(name, self.recipe.task, self.recipe.data.src_language, labels=data.labels)

    @abstractmethod
    def plan_epoch(self, data: Data, epoch: int) -> Sequence[Any]:
        """The batches of an epoch, as items for `collate`; a pure function.

        One of several processes takes `plan(data, epoch)[rank::world]`.
        """

    @abstractmethod
    def collate(self, data: Data, item: Any) -> Batch:
        """A planned batch as tensors on the CPU, a pure function."""

    def split_size(self, data: Data, split: str) -> int:
        """How many examples a split has, which a run says at its start."""
        return len(data.splits[split])

    def loss(self, net: Any, batch: Batch, **options: Any) -> LossSum:
        """Sums over a batch's targets, differentiable; options as of `head_loss`."""
        return batch_loss(net, batch, **options)

    @abstractmethod
    def evaluate(self, model: Any, data: Data) -> Evaluation:
        """Loss, scores and samples on held-out data; draws no random numbers."""

    @abstractmethod
    def compute_final_scores(self, model: Any, data: Data, out: Path) -> FinalScores:
        """Score the run's final model, and write scores and outputs into the run's folder."""


def parse_objective(recipe: Recipe, kind: Any) -> Any:
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
