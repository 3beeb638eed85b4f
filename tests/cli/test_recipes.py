"""The recipes: strict, commented, and every shipped one runs."""

import json
import re
from dataclasses import fields
from importlib import import_module
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as how_tested
from hypothesis import strategies as st
from pydantic import BaseModel

from commands import Commands, assert_refused, tiny
from heedful.config import (
    RECIPES,
    Recipe,
    TaskName,
    changed_keys,
    load_recipe,
    nearest,
    parse_recipe,
    shipped_recipes,
)
from heedful.errors import UserError
from heedful.jobs import job_of

NAMES = shipped_recipes()
TASKS = {name: load_recipe(name).task for name in NAMES}
TRANSLATION = [name for name in NAMES if TASKS[name] == "translation"]
MADE = [name for name in NAMES if TASKS[name] in ("dates", "copy", "reverse", "sort")]
TAUGHT = [name for name in NAMES if name.startswith("distil-")]
OF_TEXTS = [name for name in NAMES if name not in (*TRANSLATION, *MADE, *TAUGHT)]
SMALL = {
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.d_ff": 32,
    "training.device": "cpu",
    "training.max_steps": 4,
    "training.evaluate_every": 2,
    "training.log_every": 1,
    "training.schedule.warmup_steps": 2,
}
TWO_STACKS = {"model.num_encoder_layers": 1, "model.num_decoder_layers": 1}
PAIRS = TWO_STACKS | {
    "training.batch_tokens": 400,
    "evaluation.decode_sentences": 3,
    "evaluation.final_beam_size": 2,
}

# Which keys a task has no use for, as regular expressions of whole names. Every other key of the
# schema stands in each recipe of the task, and none of these does.
_MADE = r"data\.(train|valid|test)\..*|data\.(documents|hold_out|hold_out_tail|(src|tgt)_language)"
_OF_PAIRS = r"data\.\w+\.(src|tgt|src_field|tgt_field)|data\.tgt_language|tokenizer\.joint"
_DECODED = r"evaluation\.(decode_sentences|beam_size|final_beam_size|length_penalty)"
_NO_OBJECTIVE = r"objective"
_GENERATED = r"data\.generated\..*"
_LABELLED = r"data\.\w+\.(label_field|pair_field)"
UNUSED = {
    "copy": [_MADE, _NO_OBJECTIVE],
    "reverse": [_MADE, _NO_OBJECTIVE],
    "sort": [_MADE, _NO_OBJECTIVE],
    "dates": [_MADE, _NO_OBJECTIVE, r"data\.generated\.(num_symbols|min_length|max_length)"],
    "translation": [
        *(_GENERATED, _LABELLED, _NO_OBJECTIVE),
        r"data\.\w+\.(text|text_field)|data\.(documents|hold_out_tail)",
    ],
    "language_modelling": [
        *(_GENERATED, _OF_PAIRS, _LABELLED, _DECODED),
        r"data\.\w+\.file|data\.(hold_out|max_length|too_long)",
    ],
    "masked_lm": [_GENERATED, _OF_PAIRS, _DECODED, r"data\.hold_out"],
    "denoising": [
        *(_GENERATED, _OF_PAIRS, _LABELLED, _DECODED),
        r"data\.\w+\.file|data\.hold_out",
    ],
    "classification": [
        *(_GENERATED, _OF_PAIRS, _DECODED),
        r"data\.\w+\.text|data\.(documents|hold_out_tail)",
    ],
}
# What a task does not need, but its recipes show, for they were made from the recipe copy.
SHOWN_ANYWAY = {
    ("dates", f"data.generated.{key}") for key in ("num_symbols", "min_length", "max_length")
}
# Other files' keys are as those of train, where they are explained.
AS_IN_TRAIN = re.compile(r"data\.(valid|test)\..*")


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


def leaves(model=Recipe, prefix=""):
    """Dotted names of all keys of the schema, `model` aside, which is the architecture's."""
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += leaves(kind, f"{prefix}{name}.")
        elif f"{prefix}{name}" != "model":
            found.append(f"{prefix}{name}")
    return found


def used(name):
    """The keys that a recipe's task uses. Distillation is explained in the recipes made for it."""
    patterns = list(UNUSED[TASKS[name]])
    if name not in TAUGHT:
        patterns.append(r"distillation\..*")
    return [key for key in leaves() if not any(re.fullmatch(each, key) for each in patterns)]


def objective_keys(name):
    """The keys that the task's own section has, from the dataclass that reads it."""
    recipe = load_recipe(name)
    if recipe.task == "denoising":
        from heedful.jobs.denoising import noise_of

        return [field.name for field in fields(noise_of(recipe))]
    job = job_of(recipe.task)
    kind = getattr(import_module(job.__module__), "Objective", None)
    return [] if kind is None else [field.name for field in fields(kind)]


def commented(text):
    """The keys of a file with a comment on their line."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {line.split(":")[0].strip() for line in lines if " #" in line}


def test_there_are_recipes_for_every_task():
    assert {"copy", "reverse", "sort", "dates", "multi30k", "tatoeba", "translation"} <= set(NAMES)
    assert {"rhyme", "shakespeare", "shakespeare-better", "language-model"} <= set(NAMES)
    assert {"masked-lm", "classification", "denoising"} <= set(NAMES)
    assert set(TASKS.values()) == set(get_args(TaskName)) == set(UNUSED)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_a_round_trip(name):
    recipe = load_recipe(name)
    again = parse_recipe(yaml.safe_load(recipe.to_yaml()))
    assert again == recipe
    assert changed_keys(recipe, again) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_there_and_no_other(name):
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))

    def has(key):
        place = content
        for part in key.split("."):
            if part not in place:
                return False
            place = place[part]
        return True

    wanted = set(used(name))
    for key in wanted:
        if not AS_IN_TRAIN.fullmatch(key):
            assert has(key), f"{name}.yaml lacks {key}"
    for key in set(leaves()) - wanted:
        if (TASKS[name], key) in SHOWN_ANYWAY or (name in TAUGHT and key.startswith("tokenizer.")):
            continue
        assert not has(key), f"{name}.yaml has {key}, which its task does not use"


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_objective_is_there(name):
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert sorted(content.get("objective", {})) == sorted(objective_keys(name))


def test_no_key_of_the_schema_is_without_a_recipe():
    missing = set(leaves()) - {key for name in NAMES for key in used(name)}
    if not TAUGHT:
        missing = {key for key in missing if not key.startswith("distillation.")}
    assert {key for key in missing if not AS_IN_TRAIN.fullmatch(key)} == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_commented(name):
    """In every recipe: a comment on the line, or above."""
    explained = commented((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    # Explained by the line before them, or by what they are.
    plain = {"src", "tgt", "tgt_field", "tgt_language", "hold_out", "num_train", "num_valid"}
    plain |= {"num_test", "max_length", "seed", "max_epochs", "eps", "betas", "label_smoothing"}
    plain |= {"objective"}
    keys = {key.rsplit(".", 1)[-1] for key in used(name)} | set(objective_keys(name))
    assert keys - explained - plain == set()


@pytest.mark.parametrize("name", NAMES)
def test_no_comment_became_a_part_of_a_value(name):
    """YAML takes a # for a comment only after a space."""

    def texts(value):
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    assert [text for text in texts(content) if "#" in text] == []


def settings(changes):
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("name", MADE)
def test_made_recipes_run(commands, tmp_path, name):
    sizes = {"num_train": 60, "num_valid": 5, "num_test": 5}
    changes = SMALL | PAIRS | {f"data.generated.{key}": value for key, value in sizes.items()}
    ended = commands.run("train", name, "--out", tmp_path / "run", *settings(changes))
    assert ended.code == 0, ended.err
    assert (tmp_path / "run/model.safetensors").is_file()
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.parametrize("name", TRANSLATION)
def test_translation_recipes_run_on_two_files(commands, tmp_path, name):
    adjectives = ["red", "old", "big", "shy", "new"]
    nouns = ["dog", "cat", "cow", "hen", "fox", "owl"]
    english = [f"the {a} {n} sees a {b}" for a in adjectives for n in nouns for b in nouns]
    for side, lines in (("en", english), ("xx", [line[::-1] for line in english])):
        (tmp_path / f"a.{side}").write_text("".join(f"{line}\n" for line in lines))
    changes = SMALL | PAIRS | {"tokenizer.vocab_size": 60, "data.hold_out": 5}
    for split in ("train", "valid", "test"):
        given = load_recipe(name).data.model_dump()[split]["src"] is not None
        if split == "train" or given:
            changes[f"data.{split}.src"] = tmp_path / "a.en"
            changes[f"data.{split}.tgt"] = tmp_path / "a.xx"
    ended = commands.run("train", name, "--out", tmp_path / "run", *settings(changes))
    assert ended.code == 0, ended.err
    assert "bleu" in ended.out
    assert (tmp_path / "run/scores.json").is_file()


def test_the_rhyme_runs_on_its_own_text(commands, tmp_path):
    """It needs nothing but what comes with heedful."""
    changes = {"training.max_steps": 3, "training.evaluate_every": 3, "objective.sample_tokens": 5}
    ended = commands.run("train", "rhyme", "--out", tmp_path / "run", *settings(changes))
    assert ended.code == 0, ended.err
    samples = (tmp_path / "run/samples.txt").read_text(encoding="utf-8")
    assert samples.strip()
    again = RECIPES / "rhyme.txt"
    assert json.loads((tmp_path / "run/scores.json").read_text())["num_characters"] == len(
        again.read_text(encoding="utf-8")
    )


def small_texts(name, folder):
    """What lets a recipe of texts run for a few steps on texts made here."""
    colours = ["red", "old", "shy", "yellow", "brown"]
    animals = ["dog", "cat", "cow", "mouse", "horse", "owl"]
    lines = [f"the {c} {a} sees a {b} ." for c in colours for a in animals for b in animals]
    changes = dict(SMALL)
    if TASKS[name] == "classification":
        labelled = "".join(f"{line}\t{'far' if 'dog' in line else 'near'}\n" for line in lines)
        (folder / "a.tsv").write_text(labelled, encoding="utf-8")
        changes |= {"data.train.file": folder / "a.tsv", "data.hold_out": 10}
    else:
        (folder / "a.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        changes["data.train.text"] = folder / "a.txt"
    recipe = load_recipe(name)
    if recipe.tokenizer.vocab_size is not None:
        least = {"byte_bpe": 300}
        changes["tokenizer.vocab_size"] = least.get(recipe.tokenizer.kind, 60)
    if "sample_tokens" in recipe.objective:
        changes["objective.sample_tokens"] = 5
    if recipe.training.batch_tokens is not None:
        changes["training.batch_tokens"] = 400
    return changes | (TWO_STACKS if TASKS[name] == "denoising" else {"model.num_layers": 2})


@pytest.mark.parametrize("name", [name for name in OF_TEXTS if name != "rhyme"])
def test_recipes_of_texts_run(commands, tmp_path, name):
    changes = small_texts(name, tmp_path)
    ended = commands.run("train", name, "--out", tmp_path / "run", *settings(changes))
    assert ended.code == 0, ended.err
    scores = json.loads((tmp_path / "run/scores.json").read_text())["scores"]
    assert "accuracy" in scores if TASKS[name] == "classification" else "loss" in scores
    assert (tmp_path / "run/report.html").is_file()


@pytest.mark.parametrize("name", TAUGHT)
def test_distilling_recipes_run(commands, tmp_path, name):
    """The teacher is a run of the recipe that is told after `distil-`."""
    first = name.removeprefix("distil-")
    changes = small_texts(first, tmp_path)
    assert commands.run("train", first, "--out", tmp_path / "a", *settings(changes)).code == 0
    changes = small_texts(name, tmp_path) | {"model.num_layers": 1}
    del changes["tokenizer.vocab_size"]
    where = tmp_path / "a", name, "--out", tmp_path / "b"
    ended = commands.run("distill", *where, *settings(changes))
    assert ended.code == 0, ended.err
    assert (tmp_path / "b/scores.json").is_file()


# --- overrides ------------------------------------------------------------------------------


def test_overrides_are_read_as_yaml():
    recipe = load_recipe(
        "copy",
        [
            "training.max_steps=7",
            "training.max_epochs=null",
            "training.optimizer.betas=[0.8, 0.9]",
            "training.schedule.learning_rate=1e-3",
            "training.tensorboard=true",
            "data.src_language=en",
            "model.positions=none",
            "training.clip_norm=",
        ],
    )
    training = recipe.training
    assert (training.max_steps, training.max_epochs) == (7, None)
    assert training.optimizer.betas == (0.8, 0.9)
    assert training.schedule.learning_rate == 0.001
    assert training.tensorboard is True
    assert training.clip_norm is None
    assert (recipe.data.src_language, recipe.model["positions"]) == ("en", "none")


def test_the_last_override_of_a_key_holds():
    recipe = load_recipe("copy", ["training.max_steps=7", "training.max_steps=8"])
    assert recipe.training.max_steps == 8


def test_a_value_may_hold_an_equals_sign():
    recipe = load_recipe("translation", ["data.train.src=a=b.en", "data.train.tgt=c.de"])
    assert recipe.data.train.src == "a=b.en"


@pytest.mark.parametrize("override", ["training.max_steps", "=5", ""])
def test_overrides_that_are_none(override):
    with pytest.raises(UserError, match="write key=value"):
        load_recipe("copy", [override])


@pytest.mark.parametrize("text", ["2020-13-45", "[1, ", "a: b: c", "@x"])
def test_an_override_that_is_no_yaml_is_text(text):
    assert load_recipe("copy", [f"data.src_language={text}"]).data.src_language == text


@pytest.mark.parametrize("key", leaves())
def test_a_mistyped_key_is_answered_with_the_right_one(key):
    """At every level: one letter too many finds the key itself."""
    *parents, last = key.split(".")
    wrong = ".".join([*parents, f"{last}x"])
    with pytest.raises(UserError) as refused:
        load_recipe("copy", [f"{wrong}=1"])
    assert f"unknown key {wrong}; " in str(refused.value)
    hint = re.search(r"did you mean (\w+)\?", str(refused.value))
    assert hint is not None
    # A sibling may be as near (src for tgtx is not; max_steps for max_stepsx is the key).
    assert hint[1] == last


def test_the_first_of_several_mistakes_is_named_and_the_others_counted():
    with pytest.raises(UserError, match=r"\(and 1 more\)"):
        load_recipe("copy", ["training.accumulate=0", "training.log_every=0"])


@how_tested(deadline=None)
@given(st.sampled_from(["training.seed", "data.generated.seed"]), st.integers(-(2**40), 2**40))
def test_changed_keys_names_both_values(key, value):
    before = load_recipe("copy")
    now = load_recipe("copy", [f"{key}={value}"])
    expected = [] if value == 1 else [f"{key} (1 -> {value})"]
    assert changed_keys(before, now) == expected


def test_changed_keys_sees_a_key_that_is_new():
    before, now = parse_recipe(tiny()), parse_recipe(tiny(model__bias=False))
    assert changed_keys(before, now) == ["model.bias (null -> false)"]


def test_nearest_lists_all_where_none_is_near():
    assert nearest("qqqq", ["b", "a"]) == "known: a, b"


# --- recipes ls, show, cp -------------------------------------------------------------------


def test_ls_lists_every_recipe_with_its_first_line(commands):
    lines = commands.run("recipes", "ls").out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert all(len(line.split()) > 3 and "#" not in line for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_show_prints_the_file(commands, name):
    shown = commands.run("recipes", "show", name)
    assert shown.out == (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def test_cp_copies_and_never_overwrites(commands, tmp_path):
    assert commands.run("recipes", "cp", "copy", cwd=tmp_path).code == 0
    copied = tmp_path / "copy.yaml"
    assert copied.read_text() == (RECIPES / "copy.yaml").read_text()
    copied.write_text("mine")
    assert_refused(commands.run("recipes", "cp", "copy", cwd=tmp_path), "copy.yaml exists")
    assert copied.read_text() == "mine"
    (tmp_path / "folder").mkdir()
    assert commands.run("recipes", "cp", "sort", tmp_path / "folder").code == 0
    assert load_recipe(tmp_path / "folder/sort.yaml") == load_recipe("sort")
    assert_refused(commands.run("recipes", "cp", "cpoy", cwd=tmp_path), "did you mean copy?")
