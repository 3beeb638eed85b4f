"""The recipes: strict, commented, and every shipped one runs."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from commands import Commands, assert_refused, tiny
from heedful.config import (
    RECIPES,
    Recipe,
    changed_keys,
    load_recipe,
    nearest,
    parse_recipe,
    shipped_recipes,
)
from heedful.errors import UserError

NAMES = shipped_recipes()
TRANSLATION = [name for name in NAMES if load_recipe(name).task == "translation"]
SMALL = {
    "model.d_model": 16,
    "model.num_heads": 2,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "model.d_ff": 32,
    "training.device": "cpu",
    "training.max_steps": 4,
    "training.evaluate_every": 2,
    "training.log_every": 1,
    "training.schedule.warmup_steps": 2,
    "training.batch_tokens": 400,
    "evaluation.decode_sentences": 3,
    "evaluation.final_beam_size": 2,
}


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


def test_there_are_recipes_for_every_task():
    assert {"copy", "reverse", "sort", "dates", "multi30k", "tatoeba", "translation"} <= set(NAMES)
    assert {load_recipe(name).task for name in NAMES} == {
        "translation",
        "dates",
        "copy",
        "reverse",
        "sort",
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_a_round_trip(name):
    recipe = load_recipe(name)
    again = parse_recipe(yaml.safe_load(recipe.to_yaml()))
    assert again == recipe
    assert changed_keys(recipe, again) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_there_and_the_file_is_what_is_loaded(name):
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    task = content["task"]
    for key in leaves():
        made = key.startswith("data.generated.")
        files = key.startswith(("data.train", "data.valid", "data.test", "data.hold_out"))
        if (made and task == "translation") or (files and task != "translation"):
            continue
        if (
            made
            and task == "dates"
            and key.rsplit(".", 1)[1]
            in (
                "num_symbols",
                "min_length",
                "max_length",
            )
        ):
            continue
        if key.endswith("_language") and task != "translation":
            continue
        if re.search(r"(valid|test)\.(file|src_field|tgt_field)", key):
            continue  # as in train, where they are explained
        place = content
        for part in key.split("."):
            assert part in place, f"{name}.yaml lacks {key}"
            place = place[part]


def test_every_key_is_commented():
    """In the recipe for one's own files and in a made one: a comment on the line, or above."""
    texts = [
        (RECIPES / f"{name}.yaml").read_text(encoding="utf-8") for name in ("translation", "copy")
    ]
    lines = [line for text in texts for line in text.splitlines()]
    explained = {line.split(":")[0].strip() for line in lines if "#" in line.partition(":")[2]}
    # Explained by the line before them, or by what they are.
    plain = {"src", "tgt", "tgt_field", "tgt_language", "hold_out", "num_train", "num_valid"}
    plain |= {"num_test", "max_length", "seed", "batch_sentences", "max_epochs", "eps", "betas"}
    plain |= {"label_smoothing"}
    keys = {key.rsplit(".", 1)[1] if "." in key else key for key in leaves()}
    assert keys - explained - plain == set()


def settings(changes):
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TRANSLATION])
def test_made_recipes_run(commands, tmp_path, name):
    sizes = {"num_train": 60, "num_valid": 5, "num_test": 5}
    changes = SMALL | {f"data.generated.{key}": value for key, value in sizes.items()}
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
    changes = SMALL | {"tokenizer.vocab_size": 60, "data.hold_out": 5}
    for split in ("train", "valid", "test"):
        given = load_recipe(name).data.model_dump()[split]["src"] is not None
        if split == "train" or given:
            changes[f"data.{split}.src"] = tmp_path / "a.en"
            changes[f"data.{split}.tgt"] = tmp_path / "a.xx"
    ended = commands.run("train", name, "--out", tmp_path / "run", *settings(changes))
    assert ended.code == 0, ended.err
    assert "bleu" in ended.out
    assert (tmp_path / "run/scores.json").is_file()


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
