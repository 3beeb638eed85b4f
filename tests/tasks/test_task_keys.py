"""Keys of a recipe: each task reads the keys that it declares, and refuses all others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_jsonable_python

from commands import assert_refused, tiny
from encoder_runs import recipe_of
from heedful import plugins
from heedful.config import (
    Recipe,
    Strict,
    TokenizerRecipe,
    default_values,
    parse_recipe,
    task_keys,
)
from heedful.config.keys import keys_of, set_key, set_keys
from heedful.errors import UserError
from heedful.recipe_files import load_recipe, shipped_recipes
from heedful.run import train
from heedful.task_keys import BUILT_IN

LEAVES = [key.name for key in keys_of(Recipe) if not key.is_section]
FIELDS = {key.name: key.field for key in keys_of(Recipe)}
SHIPPED = [*BUILT_IN, "dates"]
DATES = ["shipped:dates.py"]


def content_of(task: str) -> dict[str, Any]:
    """A minimal recipe of a task."""
    listed = {"plugins": DATES} if task == "dates" else {}
    return {**listed, "task": task, "training": {"max_steps": 1}}


@pytest.fixture(autouse=True)
def with_dates() -> None:
    plugins.load_plugin(*DATES)


def test_the_table_of_built_in_tasks_equals_their_classes() -> None:
    for task, keys in BUILT_IN.items():
        assert plugins.task.get(task).recipe_keys is keys
    assert {*SHIPPED} <= {*plugins.task.names()}


@pytest.mark.parametrize("task", SHIPPED)
def test_a_declared_key_is_accepted_and_any_other_refused_by_name(task: str) -> None:
    keys = task_keys(task)
    for name in LEAVES:
        content = content_of(task)
        if name not in ("plugins", "task", "training.max_steps"):
            set_key(
                content,
                name,
                to_jsonable_python(FIELDS[name].get_default(call_default_factory=True)),
            )
        if keys.includes(name):
            assert parse_recipe(content).values().keys() >= {name}
            continue
        message = f"^recipe: {name} is not read by the task {task}; (use|leave)"
        with pytest.raises(UserError, match=message):
            parse_recipe(content)
        with pytest.raises(ValueError, match=f"{name} is not read"):
            Recipe(**content)


@pytest.mark.parametrize("task", SHIPPED)
def test_declared_names_and_the_keys_of_defaults_are_keys_of_a_recipe(task: str) -> None:
    keys = task_keys(task)
    assert keys.names - {"objective.context"} <= {key.name for key in keys_of(Recipe)}
    assert {*keys.defaults} <= {*LEAVES}
    assert all(keys.includes(name) for name in keys.defaults)
    shared = {name: FIELDS[name].get_default(call_default_factory=True) for name in keys.defaults}
    assert not any(keys.defaults[name] == to_jsonable_python(shared[name]) for name in shared)


@pytest.mark.parametrize(
    ("task", "setting", "advice"),
    [
        ("language_modeling", "data.max_length=7", "use objective.context"),
        ("language_modeling", "data.truncation=error", "leave it out"),
        ("language_modeling", "evaluation.final_beam_size=2", "leave it out"),
        ("translation", "data.text_unit=file", "leave it out"),
        (
            "translation",
            "data.test.text=x",
            "use data.test.src and data.test.tgt, or data.test.file",
        ),
        ("classification", "evaluation.beam_size=2", "leave it out"),
        ("copy", "data.valid_size=5", "use data.generated.num_valid"),
        ("denoising", "data.tgt_language=de", "use data.src_language"),
        ("dates", "data.generated.num_symbols=3", "leave it out"),
    ],
)
def test_the_command_names_the_key_to_use_instead(
    commands: Any, tmp_path: Path, task: str, setting: str, advice: str
) -> None:
    name = next(name for name in shipped_recipes() if load_recipe(name).task == task)
    ended = commands.run("train", name, "--out", tmp_path / "run", "--set", setting)
    key = setting.partition("=")[0]
    line = f"error: --set: {key} is not read by the task {task}; {advice}"
    assert_refused(ended, line)
    assert not (tmp_path / "run").exists()


def test_the_recipe_file_that_sets_the_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: masked_lm\ndata: {generated: {num_valid: 3}}\ntraining: {max_steps: 1}\n"
    )
    with pytest.raises(
        UserError, match=r"mine\.yaml: data\.generated\.num_valid is not read by the task masked"
    ):
        load_recipe(path)


@pytest.mark.parametrize(
    ("task", "train"),
    [
        ("translation", {"src": "a", "tgt": "b"}),
        ("classification", {"file": "a.tsv"}),
        ("language_modeling", {"text": "a"}),
    ],
)
@pytest.mark.parametrize("size", [5, 0.2])
def test_a_validation_size_beside_validation_files_is_refused(
    task: str, train: dict[str, str], size: float
) -> None:
    recipe: dict[str, Any] = {"task": task, "training": {"max_steps": 1}}
    recipe["data"] = {"train": train, "valid_size": size}
    assert parse_recipe(recipe).data.valid_size == size
    recipe["data"]["valid"] = train
    with pytest.raises(UserError, match=r"data\.valid_size holds out .* but data\.valid is given"):
        parse_recipe(recipe)
    del recipe["data"]["valid_size"]
    parse_recipe(recipe)


@pytest.mark.parametrize("size", [0, -1, 1.5, 1.0])
def test_a_validation_size_is_a_number_of_rows_or_a_share(size: float) -> None:
    recipe = {"task": "translation", "training": {"max_steps": 1}, "data": {"valid_size": size}}
    with pytest.raises(UserError, match=rf"data\.valid_size: give a number of rows.*, not {size}$"):
        parse_recipe(recipe)


def test_a_teacher_s_settings_without_a_teacher_are_refused(tmp_path: Path) -> None:
    recipe = parse_recipe(tiny(distillation={"temperature": 3.0}))
    with pytest.raises(UserError, match=r"distillation\.temperature is set but distillation\.t"):
        train(recipe, tmp_path / "run")


# --- defaults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "smoothing", "betas", "eps"),
    [
        ("translation", 0.1, (0.9, 0.98), 1e-9),
        ("language_modeling", 0.0, (0.9, 0.95), 1e-8),
        ("masked_lm", 0.0, (0.9, 0.999), 1e-6),
        ("classification", 0.0, (0.9, 0.999), 1e-8),
        ("denoising", 0.0, (0.9, 0.98), 1e-6),
    ],
)
def test_defaults_suit_the_task(
    task: str, smoothing: float, betas: tuple[float, float], eps: float
) -> None:
    training = parse_recipe(content_of(task)).training
    assert training.label_smoothing == smoothing
    assert (training.optimizer.betas, training.optimizer.eps) == (betas, eps)


@pytest.mark.parametrize("task", SHIPPED)
def test_a_key_that_is_set_is_not_replaced_by_the_tasks_default(task: str) -> None:
    content = content_of(task)
    own = {"label_smoothing": 0.25, "optimizer": {"name": "adamw", "betas": [0.5, 0.6]}}
    content["training"] |= own
    training = parse_recipe(content).training
    assert (training.label_smoothing, training.optimizer.betas) == (0.25, (0.5, 0.6))
    assert training.optimizer.eps == default_values(task)["training.optimizer.eps"]
    assert content["training"] == {"max_steps": 1, **own}  # the caller's dictionary stays


def test_sections_as_objects_have_the_tasks_defaults_too() -> None:
    plain = Recipe(**content_of("language_modeling"))
    training = type(plain.training)(max_steps=1)
    assert Recipe(task="language_modeling", training=training) == plain


@pytest.mark.parametrize("task", SHIPPED)
def test_a_recipe_of_defaults_has_no_differences_and_survives_a_round_trip(task: str) -> None:
    recipe = parse_recipe(content_of(task))
    values = {**recipe.values(), "plugins": [], "training.max_steps": None, "task": "translation"}
    defaults = default_values(task)
    assert values == {name: defaults[name] for name in values}
    assert recipe.to_yaml(differences=True).count("\n") == (5 if task == "dates" else 3)


# --- declared keys are read -----------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[set[tuple[str, str]]]:
    """The keys that are read in the block, as class of the section and name."""
    actual: set[tuple[str, str]] = set()
    plain, dump = Strict.__getattribute__, TokenizerRecipe.model_dump

    def read(self: Any, name: str) -> Any:
        actual.add((type(self).__name__, name))
        return plain(self, name)

    def dumped(self: Any, **options: Any) -> Any:
        if options.get("exclude"):  # the settings of a new tokenizer
            actual.update((type(self).__name__, key) for key in type(self).model_fields)
        return dump(self, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strict, "__getattribute__", read)
        patch.setattr(TokenizerRecipe, "model_dump", dumped)
        yield actual


def sections() -> dict[str, str]:
    """The class of each section by its dotted name."""
    annotations = {
        key.name: key.field.annotation.__name__ for key in keys_of(Recipe) if key.is_section
    }
    return {"": "Recipe", **annotations}


def runs_of(task: str, folder: Path) -> Iterator[Recipe]:
    """Recipes that together use all keys of a task: other files, each level."""
    small = {
        "training__max_steps": 1,
        "training__evaluate_every": 1,
        "training__schedule": {"name": "cosine", "learning_rate": 0.01, "warmup_steps": 0},
    }
    table = folder / "table.tsv"
    table.write_text("".join(f"{word} is old\t{word}\n" for word in "abcdefgh"), encoding="utf-8")
    if task == "copy":
        yield parse_recipe(tiny(**small))
    elif task == "dates":
        generated = {"num_train": 20, "num_valid": 4, "num_test": 4}
        content = tiny(**small, task="dates", plugins=DATES, data__max_length=80)
        content["tokenizer"]["kind"] = "char"
        content["data"]["generated"] = generated
        yield parse_recipe(content)
    else:
        yield recipe_of(task, folder, **small)
    if task in ("translation", "masked_lm"):
        yield recipe_of(task, folder, **small, data={"train": {"file": str(table)}})
    for level in (
        plugins.task.get(task).distillation_levels
        if task in ("translation", "classification")
        else ()
    ):
        taught = {"teacher": str(folder / "run-0"), "level": level}
        taught |= {"include_references": True} if level == "sequence" else {}
        yield recipe_of(task, folder, **small, distillation=taught)


@pytest.mark.parametrize(
    "task",
    [
        "translation",
        "language_modeling",
        "masked_lm",
        "denoising",
        "classification",
        "copy",
        "dates",
    ],
)
def test_every_declared_key_is_read_by_a_run(task: str, tmp_path: Path) -> None:
    with recorded() as actual:
        for number, recipe in enumerate(runs_of(task, tmp_path)):
            train(recipe, tmp_path / f"run-{number}")
    of = sections()
    unread = {
        name
        for name in LEAVES
        if task_keys(task).includes(name)
        and (of[name.rpartition(".")[0]], name.rpartition(".")[2]) not in actual
    }
    if task in ("language_modeling", "masked_lm"):  # their teachers are read as a classifier's
        unread = {name for name in unread if not name.startswith("distillation.")}
    assert unread == set()


def test_set_keys_names_what_was_set_and_nothing_else() -> None:
    recipe = Recipe(training={"max_steps": 1, "optimizer": {"eps": 1.0}}, data={}, model={"a": 1})
    assert {*set_keys(recipe)} == {"training.max_steps", "training.optimizer.eps", "model"}
