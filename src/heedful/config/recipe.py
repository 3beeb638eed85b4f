"""The recipe: everything that a training run depends on, strict, typed, each key described once.

`recipe_files.py` reads recipes from files.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from heedful import plugins
from heedful.config.adapter import Adapter
from heedful.config.base import Strict
from heedful.config.data import Data, TokenizerRecipe
from heedful.config.distillation import Distillation
from heedful.config.evaluation import OWN_METRICS, Evaluation, Expectation
from heedful.config.keys import flatten, keys_of, set_key, set_keys
from heedful.config.problems import wrong_key
from heedful.config.training import SCHEDULES_WITHOUT_END, Schedule, Training
from heedful.errors import UserError
from heedful.task_keys import BUILT_IN, ENDS, KEEP_BANDS, TaskKeys, key_of_corpus

TaskName = Annotated[str, AfterValidator(plugins.task.check)]


class Recipe(Strict):
    """A whole run. `model` holds keys of the architecture, `objective` keys of the task.

    Raises:
        ValidationError (`parse_recipe`: UserError): an unknown key, a wrong value, keys that
            exclude each other, a plugin that does not load.
    """

    plugins: list[str] = Field(
        [],
        description="Python files that register tasks, architectures, metrics or schedules; empty: "
        "none.",
    )
    task: TaskName = Field("translation", description="Task to train.")
    init_from: str | None = Field(
        None,
        description="Folder of a model whose weights, sizes and tokenizer the run starts from; "
        "null: new weights.",
    )
    data: Data = Field(default_factory=Data, description="Examples of the run.")
    tokenizer: TokenizerRecipe = Field(
        default_factory=TokenizerRecipe, description="Conversion of text to token ids."
    )
    model: dict[str, Any] = Field(
        {},
        description="Architecture, one of its published sizes, and any key of its Config; empty: "
        "the task's default model.",
    )
    objective: dict[str, Any] = Field(
        {}, description="Keys of the task itself; empty: the task's defaults."
    )
    adapter: Adapter = Field(
        default_factory=Adapter,
        description="Low-rank updates, trained in place of the weights.",
    )
    training: Training = Field(
        default_factory=Training, description="Optimization, evaluations and end of the run."
    )
    distillation: Distillation = Field(
        default_factory=Distillation, description="Training on the outputs of a teacher model."
    )
    evaluation: Evaluation = Field(
        default_factory=Evaluation, description="Scores of the validation and test split."
    )
    expect: list[Expectation] = Field(
        [],
        description="Bands of the validation loss by step, reported on but without influence on "
        "the run; dropped when `--set` or a variant changes a key that the loss depends on; "
        "empty: none.",
    )

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, content: Any) -> Any:
        """Load the plugins, whose names the other keys may use; fill in the task's defaults."""
        if not isinstance(content, dict):
            return content
        listed = content.get("plugins")
        plugins.load_listed(map(str, listed if isinstance(listed, list) else []))
        name = content.get("task", cls.model_fields["task"].default)
        is_known = isinstance(name, str) and name in plugins.task.names()
        return task_keys(name).fill(content) if is_known else content

    @model_validator(mode="after")
    def _check_keys_are_read(self) -> Self:
        keys = task_keys(self.task)
        for name in set_keys(self):
            if not keys.includes(name):
                raise UserError(keys.refusal(name, self.task))
        for corpus, section in self.data.corpora.items():
            for name in set_keys(section):
                if not keys.includes(key_of_corpus(name)):
                    raise UserError(
                        f"data.corpora.{corpus}.{name} is not read by the task {self.task}; leave "
                        "it out"
                    )
        return self

    @model_validator(mode="after")
    def _check_corpora(self) -> Self:
        """Refuse files and weights that contradict `data.corpora`."""
        data = self.data
        for name in ("train", "valid", "test"):
            if data.corpora and getattr(data, name).paths():
                inside = "" if name == "train" else f".{name}"
                raise UserError(
                    f"data.{name} and data.corpora both name files; leave data.{name} out, or give "
                    f"it as data.corpora.NAME{inside}"
                )
        if data.temperature is not None and len(data.corpora) < 2:
            raise UserError("data.temperature has no effect without several data.corpora")
        held_out = any(corpus.valid.paths() for corpus in data.corpora.values())
        if held_out and data.valid_size is not None:
            raise UserError(
                "data.valid_size holds out rows of data.corpora, but one of them has valid files; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Refuse keys that exclude or need each other."""
        training, evaluation = self.training, self.evaluation
        if training.max_steps is training.max_epochs is training.max_minutes is None:
            raise UserError("no end is set; give training.max_steps, max_epochs or max_minutes")
        if training.batch_tokens is None and training.batch_sentences is None:
            raise UserError("give training.batch_tokens or training.batch_sentences")
        if training.schedule.name in ("cosine", "linear") and (
            training.max_steps is training.max_epochs is None
        ):
            raise UserError(
                f"the schedule {training.schedule.name} ends with the run: give training.max_steps "
                "or max_epochs"
            )
        if self.data.valid_size is not None and self.data.valid.paths():
            raise UserError(
                "data.valid_size holds out part of data.train, but data.valid is given; leave one "
                "of them out"
            )
        if training.optimizer.name == "adam" and training.optimizer.weight_decay:
            raise UserError("training.optimizer: weight_decay is not Adam's; set name to adamw")
        if training.r_drop and self.distillation.teacher and self.distillation.level == "word":
            raise UserError(
                "training.r_drop and distillation of level word both replace the loss of a whole "
                "run; leave one out, or set distillation.level to sequence"
            )
        if self.adapter.rank is not None and self.init_from is None:
            raise UserError(
                "adapter.rank needs a model whose weights are adapted; give its folder as init_from"
            )
        if self.adapter.rank is None and self.adapter != Adapter():
            raise UserError("the keys of adapter have no effect without adapter.rank; set it")
        for key, is_set in (
            ("subword_sampling", training.subword_sampling is not None),
            ("noise", training.noise.is_on),
        ):
            if training.compile and is_set:
                raise UserError(
                    f"training.compile pads batches to few shapes, but training.{key} gives "
                    "texts other lengths in each epoch; leave one of them out"
                )
        if evaluation.metric not in OWN_METRICS and not evaluation.decode_sentences:
            raise UserError(
                f"evaluation.metric {evaluation.metric} needs decoded text: raise decode_sentences"
            )
        return self

    def replace(self, changes: Mapping[str, Any]) -> "Recipe":
        """A copy with other values by dotted key, as `{"training.max_steps": 5}`, validated again.

        Loss bands (`expect`) are dropped where the loss depends on a changed key.

        Raises:
            UserError: an unknown key, a wrong value, a combination that is refused.
        """
        content = self.model_dump(exclude_unset=True)
        drop_stale_bands(content, changes)
        for key, value in changes.items():
            set_key(content, key, value)
        return parse_recipe(content, "recipe", {"changes": changes})

    def values(self) -> dict[str, Any]:
        """The value of each key that the task reads, as JSON, by the key's dotted name."""
        content = self.model_dump(mode="json")
        content["data"]["corpora"] = {
            name: corpus.model_dump(mode="json", exclude_defaults=True)
            for name, corpus in self.data.corpora.items()
        }
        read = task_keys(self.task)
        return {
            key.name: reduce(getitem, key.name.split("."), content)
            for key in keys_of(Recipe)
            if not key.is_section and read.includes(key.name)
        }

    def to_yaml(self, *, differences: bool = False) -> str:
        """Each key that the task reads with its value, or only those that differ from defaults."""
        defaults = default_values(self.task) if differences else {}
        content: dict[str, Any] = {"task": self.task}
        for name, value in self.values().items():
            if not differences or value != defaults[name]:
                set_key(content, name, value)
        return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)


def task_keys(task: str) -> TaskKeys:
    """The keys that a task reads; a built-in task is not imported for it."""
    keys: TaskKeys = BUILT_IN.get(task) or plugins.task.get(task).recipe_keys
    return keys


def default_values(task: str) -> dict[str, Any]:
    """The default of each key, as JSON, by the key's dotted name, where a recipe has this task."""
    shared = {
        key.name: to_jsonable_python(key.field.get_default(call_default_factory=True))
        for key in keys_of(Recipe)
        if not key.is_section
    }
    return {**shared, **task_keys(task).defaults}


def parse_recipe(
    content: Mapping[str, Any],
    where: str = "recipe",
    sources: Mapping[str, Collection[str]] | None = None,
) -> Recipe:
    """Check a recipe's content. Raises UserError naming the first wrong key.

    Args:
        sources: dotted keys by the place that sets them, which the error names; the first match
            counts.
    """
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        key, message = wrong_key(error, Recipe)
        key = key or message.split(" ")[0]  # a key that the task does not read
        for source, keys in (sources or {}).items():
            if any(f"{key}.".startswith(f"{k}.") or k.startswith(f"{key}.") for k in keys):
                where = source
                break
        raise UserError(f"{where}: {message}") from None


def drop_stale_bands(content: dict[str, Any], changed: Iterable[str]) -> None:
    """Remove the loss bands of a recipe's content unless the loss depends on no changed key."""
    schedule = flatten(content).get("training.schedule.name", Schedule.model_fields["name"].default)
    has_end = schedule not in SCHEDULES_WITHOUT_END
    for key in changed:
        if not key.startswith(KEEP_BANDS) or (has_end and key in ENDS):
            content.pop("expect", None)
