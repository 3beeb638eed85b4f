"""The recipe of an adaptation: its corpora, its method, and as many steps as its time allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from heedful.config import Recipe, parse_recipe
from heedful.data.language_tags import is_same_language
from heedful.dry_run import RunEstimate
from heedful.errors import UserError
from heedful.pipelines import Translator, parameter_count

Method = Literal["auto", "full", "lora"]
MEMORY, GENERAL = "memory", "general"  # names of the corpora
MEMORY_VALID, GENERAL_TRAIN, GENERAL_VALID = (
    f"{name}.jsonl" for name in ("memory.valid", "general", "general.valid")
)
LARGEST_FULL = 50_000_000  # parameters; all weights of larger models are not trained
EPOCHS = 10  # passes over the memory, at most
EVALUATIONS = 10  # on held-out text
FEWEST_STEPS = 20
_SHARE_OF_STEPS = 0.85  # of the time of a training; the rest is for evaluations and batches
PATIENCE = 3  # evaluations without improvement
_BATCH_TOKENS = 2_048
_MAX_LENGTH = 128  # tokens of a side, at most
# In place of general text: the KL divergence from the probabilities of the model itself on the
# memory (docs/log.md has what was compared).
_TEACHER = {
    "level": "word",
    "temperature": 1.0,
    "distillation_weight": 1.0,
    "cross_entropy_weight": 1.0,
}
# By method, the optimizer and its peak rate.
_OPTIMIZERS = {"full": ("muon", 0.002), "lora": ("adamw", 0.002)}
_ADAPTER = {"rank": 16, "alpha": 32.0, "targets": ["*"]}


@dataclass(frozen=True)
class Adaptation:
    """The settings of an adaptation.

    Attributes:
        memory: files of the translation memory, as in `data.train.file`.
        general: files of pairs of the kind that the model was trained on; empty: those of its run,
            if there is one.
        valid: files of held-out pairs of the memory; empty: a part of it.
        minutes: of the whole adaptation.
        method: train all weights (full) or an adapter (lora); auto: by the size of the model.
        keep: placeholders and numbers are kept (`data.keep`); None: as the model does.
        changes: keys of the recipe with other values.
    """

    memory: Sequence[Path]
    general: Sequence[Path] = ()
    valid: Sequence[Path] = ()
    minutes: float = 10.0
    method: Method = "auto"
    keep: bool | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The steps of a training and their time.

    Attributes:
        steps: of all epochs, or as many as fit in the time.
        seconds: the time that is left for them and for evaluations.
    """

    steps: int
    epochs: float
    seconds_per_step: float
    seconds: float

    @classmethod
    def fitting(cls, estimate: RunEstimate, seconds: float) -> "Plan":
        """The plan for a run that was measured; raises UserError if hardly a step fits."""
        assert estimate.total_steps is not None, "the recipe has a number of epochs"
        fitting = int(_SHARE_OF_STEPS * seconds / estimate.seconds_per_step)
        if fitting < FEWEST_STEPS:
            more = FEWEST_STEPS * estimate.seconds_per_step / _SHARE_OF_STEPS - seconds
            raise UserError(
                f"the time is too short: {FEWEST_STEPS} steps of {estimate.seconds_per_step:.2g} s "
                f"and scores take {minutes_of(more)} more; raise minutes"
            )
        steps = min(estimate.total_steps, fitting)
        return cls(steps, steps / estimate.steps_per_epoch, estimate.seconds_per_step, seconds)

    def summary(self) -> str:
        """The plan in words."""
        return (
            f"{self.steps:,} steps of {self.seconds_per_step:.2g} s ({self.epochs:.1f} passes over "
            f"the memory), about {minutes_of(self.steps * self.seconds_per_step / _SHARE_OF_STEPS)}"
        )

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with the keys that the plan sets; a number of steps between evaluations that
        it has stays."""
        changes = {"training.max_steps": self.steps, "training.max_minutes": self.seconds / 60}
        if "evaluate_every" not in recipe.training.model_fields_set:
            changes["training.evaluate_every"] = max(1, -(-self.steps // EVALUATIONS))
        return recipe.replace(changes)


def minutes_of(seconds: float) -> str:
    """A time in minutes, for a line."""
    return f"{seconds / 60:.1f} minutes"


def method_of(model: Translator, settings: Adaptation) -> Literal["full", "lora"]:
    """The method, for `auto` by the size of the model."""
    if settings.method != "auto":
        return settings.method
    return "lora" if parameter_count(model.net) > LARGEST_FULL else "full"


def method_reason(model: Translator, settings: Adaptation) -> str:
    """The method, and why it was chosen, for a line."""
    size = parameter_count(model.net)
    name = {"full": "all weights are trained", "lora": "low-rank updates (LoRA)"}
    relation = "more than" if size > LARGEST_FULL else "at most"
    reason = "" if settings.method != "auto" else f", {relation} {LARGEST_FULL:,}"
    return f"{name[method_of(model, settings)]}: {size:,} parameters{reason}"


def languages_of(model: Translator, settings: Adaptation) -> dict[str, str]:
    """The keys of `data` for the languages that the model names, or else the settings.

    Raises:
        UserError: both name another one.
    """
    languages = {}
    for side, own in (("src", model.metadata.src_language), ("tgt", model.metadata.tgt_language)):
        given = settings.changes.get(f"data.{side}_language", own)
        if own is not None and not (isinstance(given, str) and is_same_language(given, own)):
            raise UserError(
                f"data.{side}_language is {own} in this model, so it cannot be {given}; leave it "
                "out, or give another model"
            )
        if given is not None:
            languages[f"{side}_language"] = given
    return languages


def recipe_of(
    model: Translator, folder: Path, settings: Adaptation, out: Path, weight: float | None
) -> Recipe:
    """The recipe of the training, without its number of steps.

    Args:
        folder: of the model.
        out: the folder with the files of held-out and general pairs.
        weight: passes over the general pairs for one over the memory; None: there are none.
    """
    method = method_of(model, settings)
    corpora: dict[str, Any] = {
        MEMORY: {
            "file": [str(path) for path in settings.memory],
            "valid": {"file": str(out / MEMORY_VALID)},
        }
    }
    if weight is not None:
        corpora[GENERAL] = {
            "file": str(out / GENERAL_TRAIN),
            "weight": weight,
            "valid": {"file": str(out / GENERAL_VALID)},
        }
    keep = model.metadata.keep
    data: dict[str, Any] = {
        **languages_of(model, settings),
        "corpora": corpora,
        "max_length": min(_MAX_LENGTH, model.config.max_length),
    }
    if settings.keep or (settings.keep is None and keep is not None):
        data |= {"keep": True, "keep_patterns": [] if keep is None else [*keep.patterns]}
    optimizer, rate = _OPTIMIZERS[method]
    content: dict[str, Any] = {
        "task": "translation",
        "init_from": str(folder),
        "data": data,
        "training": {
            "max_epochs": EPOCHS,
            "batch_tokens": _BATCH_TOKENS,
            "optimizer": {"name": optimizer},
            "schedule": {"name": "linear", "learning_rate": rate, "warmup_steps": 10},
            "patience": PATIENCE,
            "checkpoint_every_minutes": 1.0,
        },
        "evaluation": {"metric": "loss", "decode_sentences": 0, "final_beam_size": 1},
    }
    if weight is None:
        content["distillation"] = {"teacher": str(folder), **_TEACHER}
    if method == "lora":
        content["adapter"] = _ADAPTER
    recipe = parse_recipe(content, "adaptation")
    return recipe.replace(settings.changes) if settings.changes else recipe
