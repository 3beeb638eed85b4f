"""What a run asks of its task, whatever the task is."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from heedful.config import Recipe, TokenizerRecipe
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.files import write_json
from heedful.inference import ModelCard, SavedModel
from heedful.parts.losses import LossSum
from heedful.plugins import nearest
from heedful.recipe_files import RECIPES
from heedful.training.trainer import Evaluation

Say = Callable[[str], None]
Found = TypeVar("Found")
DONE = "prepared.json"
SHIPPED = "shipped:"


@dataclass(frozen=True)
class FinalScores:
    """What a finished run is worth: by name a number, or a mapping with "score" and details."""

    by_name: dict[str, Any]

    def values(self) -> dict[str, float]:
        """Name to number alone."""
        return {
            name: float(entry["score"] if isinstance(entry, Mapping) else entry)
            for name, entry in self.by_name.items()
        }


class Job(ABC):
    """One task's part of a run: its data on disk, and the model that learns from it.

    A job is made with the run's recipe and folder for data, which it prepares (or opens, where a
    run goes on). The run then builds a net from `sizes()` and hands the model in as `model`.

    Attributes:
        recipe: of the run.
        model: the net with its tokenizers; set once, before the first batch.
        teacher: the model that it learns from, where it does; no part of what is saved.
        tokenizers: of what goes in and what comes out.
        num_train, num_valid: how many examples there are.
        say: told in a line what was found or done.
    """

    default_model: ClassVar[dict[str, Any]] = {}
    model: Any
    teacher: Any = None

    def __init__(
        self,
        recipe: Recipe,
        directory: Path,
        say: Say,
        tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    ) -> None:
        """`tokenizers`: those of a model that the run starts or learns from; else new ones."""
        self.recipe = recipe
        self.directory = directory
        self.given = tokenizers
        self.say = say
        self.tokenizers: tuple[Tokenizer, Tokenizer]
        self.num_train = self.num_valid = 0
        if (directory / DONE).is_file():
            self.open()
        else:
            # What was found is kept: a prepared folder says how it was made.
            write_json_after(directory / DONE, self.prepare(say))
            self.open()

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Refuse what is wrong with the recipe before any data are read; raises UserError."""
        if recipe.objective:
            raise UserError(f"the task {recipe.task} has no objective settings; leave them out")

    @abstractmethod
    def prepare(self, say: Say) -> dict[str, Any]:
        """Read, tokenise and store the data; returns what `prepared.json` is to say of it."""

    @abstractmethod
    def open(self) -> None:
        """Open what `prepare` stored."""

    @classmethod
    def stand_in_sizes(cls, recipe: Recipe, name: str) -> dict[str, object]:
        """`sizes` before the data are read, for a first look at the recipe."""
        return {"vocab_size": 8, "src_vocab_size": 8, "tgt_vocab_size": 8}

    @abstractmethod
    def sizes(self, recipe: Recipe, name: str) -> dict[str, object]:
        """Keys of the architecture's Config that follow from the data; others have no such key."""

    def learn_from(self, teacher: SavedModel, *, resume: bool) -> None:
        """Take a teacher for distillation; raises UserError where the task has none."""
        raise UserError(f"the task {self.recipe.task} cannot be distilled; leave out distillation")

    @abstractmethod
    def card(self, name: str) -> ModelCard:
        """What the model's `config.json` will say of it."""

    @abstractmethod
    def plan(self, epoch: int) -> Sequence[Any]:
        """The batches of an epoch, a pure function."""

    @abstractmethod
    def load(self, item: Any) -> Any:
        """A planned batch as tensors on the model's device."""

    @abstractmethod
    def loss(self, batch: Any) -> LossSum:
        """Sums over a batch's targets, differentiable."""

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """What the model is worth now, on held-out data; draws no random numbers."""

    @abstractmethod
    def finish(self, out: Path) -> FinalScores:
        """Score the run's final model and write what it says into the run's folder."""


def write_json_after(path: Path, content: dict[str, Any]) -> None:
    """Say that a folder is whole, after everything else is in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def objective(recipe: Recipe, kind: type[Found], keys: Mapping[str, Any] = {}) -> Found:
    """The task's own settings as its dataclass; raises UserError naming a wrong key."""
    content = {**keys, **recipe.objective}
    known = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    for key in content:
        if key not in known:
            raise UserError(f"unknown key objective.{key}; {nearest(key, known)}")
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # the dataclass's own check, whose message begins with the key
            raise UserError(f"objective.{message}") from None
        raise UserError(f"objective.{first['loc'][0]}: {message}") from None
    except UserError as error:
        raise UserError(f"objective.{error}") from None


def make_tokenizer(
    settings: TokenizerRecipe, texts: list[str], *, extra_specials: Sequence[str] = (), **more: Any
) -> Tokenizer:
    """A tokenizer as the recipe wants it, learnt from some texts."""
    return train_tokenizer(
        texts,
        kind=settings.kind,
        vocab_size=settings.vocab_size,
        lowercase=settings.lowercase,
        normalization=settings.normalization,
        keep_whitespace=settings.keep_whitespace,
        extra_specials=extra_specials,
        **more,
    )


def listed(paths: str | list[str] | None) -> list[Path]:
    """The files that a recipe names, one or several; `shipped:NAME` comes with heedful."""
    names = [paths] if isinstance(paths, str) else paths or []
    return [
        RECIPES / name.removeprefix(SHIPPED) if name.startswith(SHIPPED) else Path(name)
        for name in names
    ]


def held_out(count: int, total: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """Which of `total` examples are kept and which `count` held out: by place, always the same."""
    if total < 2 * count:
        raise UserError(
            f"data.hold_out {count} of {total} {what} would leave too few to train on; "
            "lower it, or give data.valid"
        )
    out = np.zeros(total, dtype=bool)
    out[np.random.default_rng(0).choice(total, count, replace=False)] = True
    return np.flatnonzero(~out), np.flatnonzero(out)


def read_texts(path: Path) -> list[Any]:
    """The entries of one of a run's own JSONL files."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
