"""The recipe: everything that a training run depends on, strict and typed.

A recipe is YAML. An unknown key is an error that names the nearest right one; a value of the wrong
kind is an error that names its key. `--set key=value` overrides one key; the resolved recipe is
saved with the run, so that a run can be repeated from its folder alone.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from heedful.errors import UserError

TaskName = Literal[
    "translation",
    "dates",
    "copy",
    "reverse",
    "sort",
    "language_modelling",
    "masked_lm",
    "denoising",
    "classification",
]
RECIPES = Path(__file__).parent / "recipes"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Files(_Strict):
    """Where examples are read from (.gz or not).

    Sentence pairs: two line-parallel files `src` and `tgt`, or one `file` of both (TSV or JSONL).
    Texts: `text`, plain or JSONL. Texts with labels: `file`, TSV or JSONL (masked LM reads the
    texts of one too).
    """

    src: str | list[str] | None = None
    tgt: str | list[str] | None = None
    file: str | list[str] | None = None
    text: str | list[str] | None = None
    src_field: str = "src"
    tgt_field: str = "tgt"
    text_field: int | str | None = None
    label_field: int | str | None = None
    pair_field: int | str | None = None


class Generated(_Strict):
    """Sizes of the data that the tasks dates, copy, reverse and sort make themselves."""

    num_train: int = Field(10_000, ge=1)
    num_valid: int = Field(1_000, ge=1)
    num_test: int = Field(1_000, ge=1)
    num_symbols: int = Field(10, ge=2)
    min_length: int = Field(10, ge=1)
    max_length: int = Field(10, ge=1)
    seed: int = 1


class Data(_Strict):
    """Where the examples come from and which of them are used."""

    train: Files = Files()
    valid: Files = Files()
    test: Files = Files()
    hold_out: int = Field(1_000, ge=1)
    hold_out_tail: float = Field(0.1, gt=0, lt=1)
    documents: Literal["line", "paragraph", "file"] = "line"
    generated: Generated = Generated()  # type: ignore[call-arg]
    src_language: str | None = None
    tgt_language: str | None = None
    max_length: int = Field(128, ge=2)
    too_long: Literal["drop", "truncate", "error"] = "drop"


class TokenizerRecipe(_Strict):
    """How text becomes ids."""

    kind: Literal["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte"] = "bpe"
    vocab_size: int | None = Field(8_000, ge=5)
    joint: bool = True
    lowercase: bool = False
    keep_whitespace: bool = False
    normalization: Literal["nfc", "nfkc", "none"] = "nfkc"


class Optimizer(_Strict):
    """Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019)."""

    name: Literal["adam", "adamw"] = "adam"
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(1e-9, gt=0)
    weight_decay: float = Field(0.0, ge=0)


class Schedule(_Strict):
    """The learning rate at every step; see `training/schedules.py` for the formulas."""

    name: Literal["paper", "inverse_sqrt", "cosine", "linear", "constant"] = "inverse_sqrt"
    learning_rate: float | None = Field(None, gt=0)
    warmup_steps: int = Field(1_000, ge=0)
    final_fraction: float = Field(0.0, ge=0, le=1)


class Training(_Strict):
    """How steps are taken, how often the run is looked at, and when it ends."""

    seed: int = 1
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    max_steps: int | None = Field(None, ge=1)
    max_epochs: int | None = Field(None, ge=1)
    max_minutes: float | None = Field(None, gt=0)
    batch_tokens: int | None = Field(4_096, ge=1)
    batch_sentences: int | None = Field(None, ge=1)
    accumulate: int = Field(1, ge=1)
    optimizer: Optimizer = Optimizer()  # type: ignore[call-arg]
    schedule: Schedule = Schedule()  # type: ignore[call-arg]
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    clip_norm: float | None = Field(1.0, gt=0)
    evaluate_every: int = Field(500, ge=1)
    log_every: int = Field(20, ge=1)
    early_stopping: int | None = Field(None, ge=1)
    average_last: int = Field(1, ge=1)
    tensorboard: bool = False


class Distillation(_Strict):
    """Learning from a larger model's outputs; see `tasks/distillation.py` for the losses."""

    teacher: str | None = None
    level: Literal["word", "sequence"] = "word"
    temperature: float = Field(2.0, gt=0)
    soft_weight: float = Field(5.0, ge=0)
    hard_weight: float = Field(2.0, ge=0)
    cosine_weight: float = Field(0.0, ge=0)
    copy_layers: bool = False
    beam_size: int = Field(4, ge=1)


class Evaluation(_Strict):
    """What a run is judged by."""

    metric: Literal["loss", "token_accuracy", "accuracy", "bleu", "chrf", "exact_match"] = "loss"
    decode_sentences: int = Field(200, ge=0)
    beam_size: int = Field(1, ge=1)
    final_beam_size: int = Field(5, ge=1)
    length_penalty: float = 1.0
    num_samples: int = Field(5, ge=0)


class Expectation(_Strict):
    """Is my run right? The held-out loss that the recipe as it stands has at a step."""

    step: int = Field(ge=1)
    low: float
    high: float

    @model_validator(mode="after")
    def _low_first(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}")
        return self


class Recipe(_Strict):
    """A whole run.

    `model` holds the architecture's own keys, checked when the model is built, and `objective` the
    task's own (`jobs/`).
    """

    task: TaskName = "translation"
    init_from: str | None = None
    data: Data = Data()  # type: ignore[call-arg]
    tokenizer: TokenizerRecipe = TokenizerRecipe()  # type: ignore[call-arg]
    model: dict[str, Any] = {}
    objective: dict[str, Any] = {}
    training: Training = Training()  # type: ignore[call-arg]
    distillation: Distillation = Distillation()  # type: ignore[call-arg]
    evaluation: Evaluation = Evaluation()  # type: ignore[call-arg]
    expect: list[Expectation] = []

    def to_yaml(self) -> str:
        """Every key with its value, defaults included."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_recipe(recipe: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe by path or by the name of a shipped one, with `key=value` overrides.

    Raises:
        UserError: no such recipe, not YAML, an unknown key, a wrong value.
    """
    path = recipe_path(recipe)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{path}{line}: {problem}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys, not a {type(content).__name__}")
    for override in overrides:
        _apply_override(content, override)
    return parse_recipe(content, str(path))


def parse_recipe(content: dict[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe's content. Raises UserError naming the first wrong key."""
    try:
        parsed = Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{where}: {_describe(error)}") from None
    training = parsed.training
    if training.max_steps is training.max_epochs is training.max_minutes is None:
        raise UserError(
            f"{where}: no end is set; give training.max_steps, max_epochs or max_minutes"
        )
    if training.batch_tokens is None and training.batch_sentences is None:
        raise UserError(f"{where}: give training.batch_tokens or training.batch_sentences")
    metric = parsed.evaluation.metric
    if metric in ("bleu", "chrf", "exact_match") and not parsed.evaluation.decode_sentences:
        raise UserError(
            f"{where}: evaluation.metric {metric} needs decoded text: raise decode_sentences"
        )
    if training.schedule.name in ("cosine", "linear") and training.max_steps is None:
        raise UserError(
            f"{where}: the schedule {training.schedule.name} ends at training.max_steps: give it"
        )
    return parsed


def recipe_path(recipe: str | Path) -> Path:
    """The file of a recipe given by path or by the name of a shipped one."""
    path = Path(recipe)
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "recipe.yaml").is_file():
            return path / "recipe.yaml"
        raise UserError(f"{path} is a directory, and holds no recipe.yaml")
    names = shipped_recipes()
    if str(recipe) in names:
        return RECIPES / f"{recipe}.yaml"
    close = difflib.get_close_matches(str(recipe), names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"shipped recipes: {', '.join(names)}"
    raise UserError(f"no recipe {recipe}: no such file, and no shipped recipe of that name; {hint}")


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with heedful."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def changed_keys(before: Recipe, now: Recipe) -> list[str]:
    """Dotted names of the keys whose values differ, with both values.

    What a recipe says of the loss that is right (`expect`) is no part of how it is trained.
    """
    old, new = (_flatten(one.model_dump(mode="json", exclude={"expect"})) for one in (before, now))
    return [
        f"{key} ({json.dumps(old.get(key))} -> {json.dumps(new.get(key))})"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def nearest(key: str, known: list[str]) -> str:
    """A hint for an unknown key: the nearest right one, or all of them."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def _apply_override(content: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override}: write key=value, for example training.max_steps=100")
    try:
        value = yaml.safe_load(text) if text else None
    except (yaml.YAMLError, ValueError):  # ValueError: a date that is none
        value = text
    place = content
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(place.get(parent), dict):
            place[parent] = {}
        place = place[parent]
    place[last] = value


def _describe(error: ValidationError) -> str:
    problems = error.errors()
    first = problems[0]
    keys = _written(first["loc"])
    key = ".".join(keys)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = list(_fields_at(keys[:-1]))
        return f"unknown key {key}; {nearest(keys[-1], known)}{more}"
    if first["type"] == "literal_error":
        options = re.findall("'([^']+)'", first["ctx"]["expected"])
        value = str(first["input"])
        return f"{key}: unknown value {value}; {nearest(value, options)}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}{more}"
    message = message[0].lower() + message[1:]
    return f"{key}: {message}, not {first['input']!r}{more}"


def _written(location: tuple[int | str, ...]) -> list[str]:
    """The keys of an error's place, without pydantic's positions and names of union members."""
    keys: list[str] = []
    for part in location:
        if isinstance(part, int):  # a place in a list of models
            keys.append(str(part))
            continue
        fields = _fields_at(keys)
        keys.append(str(part))
        if part not in fields or not _models_in(fields[str(part)].annotation):
            break
    return keys


def _fields_at(keys: list[str]) -> dict[str, Any]:
    model: type[BaseModel] = Recipe
    for key in keys:
        if key.isdigit():
            continue
        model = _models_in(model.model_fields[key].annotation)[0]
    return dict(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    return [
        option
        for option in (annotation, *get_args(annotation))
        if isinstance(option, type) and issubclass(option, BaseModel)
    ]


def _flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
