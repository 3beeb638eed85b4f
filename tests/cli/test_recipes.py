"""The recipes: strict, explained, and every shipped one runs."""

import json
import re
import runpy
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as how_tested
from hypothesis import strategies as st

import heedful
from commands import assert_refused, tiny
from heedful import plugins
from heedful.cli.flags import RECIPE_KEYS, TrainingFlags
from heedful.config import Recipe, default_values, parse_recipe, task_keys
from heedful.config.keys import flatten, keys_of, type_name
from heedful.errors import UserError
from heedful.plugins import nearest
from heedful.recipe_changes import changed_keys
from heedful.recipe_files import (
    RECIPES,
    load_recipe,
    parse_yaml,
    read_settings,
    shipped_recipes,
)
from heedful.tasks.language_modeling import WindowSettings
from heedful.tasks.masked_lm import Masking
from heedful.tasks.noise import BartNoise, T5Noise
from heedful.tasks.sft import SftSettings
from heedful.tasks.translation import GeneratedPairs
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.architectures import key_descriptions

NAMES = shipped_recipes()
TASKS = {name: load_recipe(name).task for name in NAMES}
# The first recipe of each task: its run is as in use, with a report that has its charts.
WHOLE = {TASKS[name]: name for name in reversed(NAMES)}
MADE = ("dates", "copy", "reverse", "sort")
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
ONE_STACK = {"model.num_layers": 1}
TWO_STACKS = {"model.num_encoder_layers": 1, "model.num_decoder_layers": 1}
TEACHERS = {  # runs that recipes learn from
    "classification-student": {"teacher": "classification"},
    "multi30k-distilled": {
        "teacher": "multi30k-en-de",
        "back_translation_models": "multi30k-de-en",
    },
}
PAIR = ("src", "tgt")
DECODED = {"evaluation.decode_sentences": 3, "evaluation.final_beam_size": 2}


def leaf_keys():
    """Dotted names of all keys of the schema, except `model`, which depends on the architecture."""
    return [key.name for key in keys_of(Recipe) if not key.is_section and key.name != "model"]


def test_there_are_recipes_for_every_task():
    assert {"copy", "reverse", "sort", "dates", "multi30k", "tatoeba", "translation"} <= set(NAMES)
    assert {"rhyme", "shakespeare", "shakespeare-llama", "language-model"} <= set(NAMES)
    assert {"masked-lm", "classification", "denoising"} <= set(NAMES)
    assert set(TASKS.values()) == set(plugins.task.names())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_a_round_trip(name):
    recipe = load_recipe(name)
    again = parse_recipe(yaml.safe_load(recipe.to_yaml()))
    assert again == recipe
    assert changed_keys(recipe, again) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_only_keys_that_differ_from_the_defaults(name):
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ")
    content = yaml.safe_load(text)
    assert "#" not in json.dumps(content), "a comment without a space before it is part of a value"
    inherited = load_recipe(content["base"]).values() if "base" in content else {}
    defaults = default_values(TASKS[name]) | inherited
    for key, value in flatten(content).items():
        if key in leaf_keys() and key not in ("task", "expect"):
            assert value != defaults[key], f"{name}.yaml repeats the default of {key}"
    for key, value in inherited.get("model", {}).items():
        assert key not in content.get("model", {}) or content["model"][key] != value, key
    # Bands are for data that a recipe names or generates; recipes for the user's data have none.
    recipe = load_recipe(name)
    is_own = issubclass(plugins.task.get(recipe.task), GeneratedPairs)
    assert ("expect" in content) == (is_own or bool(recipe.data.train.paths()))
    steps = [band["step"] for band in content.get("expect", [])]
    assert steps == sorted(set(steps))


def test_every_key_has_a_description():
    described = {key.name: key.field for key in keys_of(Recipe)}
    for objective in (WindowSettings, SftSettings, Masking, T5Noise, BartNoise):
        described |= objective.model_fields
    configs = [architecture(name).config for name in ARCHITECTURES]
    of_models = [text for config in configs for text in key_descriptions(config).values()]
    for text in [field.description for field in described.values()] + of_models:
        assert re.fullmatch(r"[A-Z].{12,}\.", text), text


def test_the_page_of_all_keys_is_up_to_date():
    docs = Path(heedful.__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "make_recipe.py"))["render"]()
    assert (docs / "recipe.md").read_text(encoding="utf-8") == page, "run make docs"


def settings(changes):
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def small_overrides(name, folder):
    """Overrides with which a recipe runs for a few steps on generated texts."""
    recipe, task = load_recipe(name), TASKS[name]
    changes = dict(SMALL)
    if name == "multi30k-distilled":  # its sizes are its teacher's
        changes = {key: value for key, value in SMALL.items() if not key.startswith("model.")}
    else:
        is_translator = recipe.model.get("architecture") == "vaswani2017"
        changes |= TWO_STACKS if is_translator else ONE_STACK
    if "sample_tokens" in recipe.objective:
        changes["objective.sample_tokens"] = 5
    if recipe.training.batch_tokens is not None:
        changes["training.batch_tokens"] = 400
    if task in MADE:
        counts = {"num_train": 60, "num_valid": 5, "num_test": 5}
        return changes | DECODED | {f"data.generated.{key}": n for key, n in counts.items()}
    if recipe.tokenizer.vocab_size is not None and name not in TEACHERS:
        size = 200 if recipe.data.keep else 60  # masks are tokens
        changes["tokenizer.vocab_size"] = {"byte_bpe": 300}.get(recipe.tokenizer.kind, size)
    colors = ["red", "old", "shy", "yellow", "brown"]
    animals = ["dog", "cat", "cow", "mouse", "horse", "owl"]
    lines = [f"the {c} {a} sees a {b} ." for c in colors for a in animals for b in animals]
    texts = {"src": lines, "tgt": [line[::-1] for line in lines], "text": lines}
    texts["file"] = [f"{line}\t{'far' if 'dog' in line else 'near'}" for line in lines]
    held_out = {
        side: [line.replace("dog", "fox").replace("god", "xof") for line in texts[side]]
        for side in PAIR
    }
    for name, files in (("", texts), ("held_out_", held_out)):
        for key, content in files.items():
            path = folder / f"{name}{key}{'.tsv' if key == 'file' else '.txt'}"
            path.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
            files[key] = path
    if task == "sft":
        path = folder / "chats.jsonl"
        rows = [json.dumps({"prompt": line, "response": line[::-1]}) for line in lines]
        path.write_text("\n".join(rows), encoding="utf-8")
        return changes | {"data.train.file": path, "data.valid_size": 10, "data.max_length": 200}
    if task == "classification":
        return changes | {"data.train.file": texts["file"], "data.valid_size": 10}
    if task != "translation":
        return changes | {"data.train.text": texts["text"]}
    for split in ("train", "valid", "test"):
        if split == "train" or recipe.data.model_dump()[split]["src"] is not None:
            changes |= {f"data.{split}.{side}": texts[side] for side in ("src", "tgt")}
            texts = held_out
    has_valid = "data.valid.src" in changes
    return changes | DECODED | ({} if has_valid else {"data.valid_size": 5})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if WHOLE[TASKS[name]] == name else [pytest.mark.slow])
        for name in sorted({*NAMES} - {"rhyme", "translation-student"})
    ],
)
def test_a_shipped_recipe_runs(commands, tmp_path, name):
    """The two recipes that are missing here have tests of their own."""
    changes, command, out = small_overrides(name, tmp_path), ["train"], tmp_path / "run"
    for key, first in TEACHERS.get(name, {}).items():
        overrides = small_overrides(first, tmp_path)
        if name == "classification-student":
            overrides |= {"model.num_layers": 2}
            command = ["distill", tmp_path / key]
        else:
            changes[f"distillation.{key}"] = tmp_path / key
        assert commands.run("train", first, "--out", tmp_path / key, *settings(overrides)).code == 0
    is_whole = WHOLE[TASKS[name]] == name
    ended = commands.run(*command, name, "--out", out, *settings(changes), whole=is_whole)
    assert ended.code == 0, ended.err
    own = {
        "translation": "bleu",
        "classification": "accuracy",
        **dict.fromkeys(MADE, "exact_match"),
    }
    scores = json.loads((out / "scores.json").read_text())["scores"]
    assert own.get(TASKS[name], "loss") in scores
    assert (out / "model.safetensors").is_file()
    num_charts = (out / "report.html").read_text(encoding="utf-8").count("<svg")
    assert (num_charts > 3) if is_whole else (num_charts == 0)


def test_the_rhyme_runs_on_its_own_text(commands, tmp_path):
    """It needs only files that are shipped with heedful."""
    changes = {"training.max_steps": 3, "training.evaluate_every": 3, "objective.sample_tokens": 5}
    ended = commands.run("train", "rhyme", "--out", tmp_path / "run", *settings(changes))
    assert ended.code == 0, ended.err
    assert (tmp_path / "run/samples.txt").read_text(encoding="utf-8").strip()
    scores = json.loads((tmp_path / "run/scores.json").read_text())
    assert scores["num_characters"] == len((RECIPES / "rhyme.txt").read_text(encoding="utf-8"))


def overridden(name: str, *settings: str) -> Recipe:
    """A recipe with the settings of `--set`."""
    return load_recipe(name, read_settings(settings))


# --- overrides ------------------------------------------------------------------------------


def test_numbers_and_booleans_are_those_of_yaml_1_2():
    """In YAML 1.1 the first two are the numbers 8 and 90; the others begin as a boolean does."""
    for text in ("010", "1:30", "true_pairs.tsv", "False friends", "2026-01-02"):
        assert parse_yaml(f"key: {text}", "a file") == {"key": text}
    numbers = {"-3": -3, "1_000": 1000, "0x1f": 31, "0": 0, "1.5": 1.5, "1.0e-05": 1e-5, ".5": 0.5}
    for text, number in numbers.items():
        assert parse_yaml(text, "a file") == number
    assert overridden("rhyme", "training.seed=010").training.seed == 10


@pytest.mark.parametrize(
    ("text", "place"),
    [("a: 1\nb: 2\na: 3\n", "line 3: the key a"), ("a:\n- {b: 1, b: 1}\n", "line 2: the key b")],
)
def test_a_key_that_stands_twice_is_refused(text, place):
    """The first value was dropped without a word."""
    with pytest.raises(UserError, match=f"a file, {place} stands twice"):
        parse_yaml(text, "a file")
    merged = "x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}\nz: {<<: *x}\n"
    assert parse_yaml(merged, "a file")["y"] == {"a": 3, "b": 2}


def test_a_recipe_with_a_name_that_begins_as_a_boolean_is_written_and_read(tmp_path):
    recipe = overridden("rhyme", "data.train.text=true_pairs.txt")
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml").data.train.text == "true_pairs.txt"


def test_the_text_of_a_setting_has_no_comments():
    settings = ["a=my file #2.txt", "b=#1.tsv", "c='x # y'", "d=[1, 2] # two", "e=5 # five"]
    assert [*read_settings(settings).values()] == ["my file #2.txt", "#1.tsv", "x # y", [1, 2], 5]


def test_overrides_are_read_as_yaml():
    settings = [
        "training.max_steps=7",
        "training.max_epochs=null",
        "training.optimizer.betas=[0.8, 0.9]",
        "training.schedule.learning_rate=1e-3",
        "training.tensorboard=true",
        "data.src_language=en",
        "model.positions=none",
        "training.clip_norm=",
    ]
    recipe = overridden("copy", *settings)
    training = recipe.training
    assert (training.max_steps, training.max_epochs) == (7, None)
    assert training.optimizer.betas == (0.8, 0.9)
    assert training.schedule.learning_rate == 0.001
    assert training.tensorboard is True
    assert training.clip_norm is None
    assert (recipe.data.src_language, recipe.model["positions"]) == ("en", "none")


def test_an_override_is_split_at_the_first_equals_sign_and_the_last_one_wins():
    recipe = overridden("translation", "data.train.src=a=b.en", "data.train.tgt=c.de")
    assert recipe.data.train.src == "a=b.en"
    recipe = overridden("copy", "training.max_steps=7", "training.max_steps=8")
    assert recipe.training.max_steps == 8
    for text in ("2020-13-45", "[1, ", "a: b: c", "@x"):  # no YAML
        assert overridden("copy", f"data.src_language={text}").data.src_language == text


def test_a_flag_and_a_whole_section_are_both_set():
    section = "training={max_steps: 3, schedule: {learning_rate: 0.5}}"
    given: dict[str, Any] = dict.fromkeys(RECIPE_KEYS) | {"steps": 9, "lr": 0.25, "seed": 7}
    flags = TrainingFlags(**given, settings=[section])
    training = load_recipe("copy", flags.overrides).training
    assert (training.seed, training.max_steps) == (7, 3)
    assert training.schedule.learning_rate == 0.5


REFUSED = {
    "training.max_steps": "write key=value",
    "=5": "write key=value",
    "": "write key=value",
}


@pytest.mark.parametrize(("override", "message"), REFUSED.items())
def test_an_override_without_key_or_value_is_refused(override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        overridden("copy", override)


def test_a_mistyped_key_suggests_the_right_one():
    """In every section: one letter too many suggests the key itself."""
    keys = leaf_keys()
    assert len(keys) > 50
    for key in keys:
        last = key.rpartition(".")[2]
        with pytest.raises(UserError) as refused:
            overridden("copy", f"{key}x=1")
        assert f"unknown key {key}x; " in str(refused.value)
        hint = re.search(r"did you mean (\w+)\?", str(refused.value))
        assert hint is not None, key
        # A sibling may be as near (src for tgtx is not; max_steps for max_stepsx is the key).
        assert hint[1] == last


def test_the_first_error_is_named_and_the_others_are_counted():
    with pytest.raises(UserError, match=r"\(and 1 more\)"):
        overridden("copy", "training.gradient_accumulation=0", "training.log_every=0")


def test_a_value_of_a_wrong_type_names_the_types():
    for setting, message in {
        "tokenizer.vocab_size=[]": r".*\.vocab_size: expected int \| auto \| null, not \[\]$",
        "tokenizer.vocab_size=1": r"tokenizer\.vocab_size: .* greater than or equal to 5, not 1$",
        "data.src_language=[1]": r"data\.src_language: input should be a valid string, not \[1\]$",
    }.items():
        with pytest.raises(UserError, match=f"^overrides: {message}"):
            overridden("copy", setting)


@pytest.mark.parametrize("code", ["no", "on", "off", "y", "n", "yes", "No"])
def test_a_language_code_is_text(code, tmp_path):
    """`no` is Norwegian, and was false in YAML 1.1."""
    assert overridden("copy", f"data.src_language={code}").data.src_language == code
    file = tmp_path / "r.yaml"
    file.write_text(f"data: {{src_language: {code}}}\ntraining: {{max_steps: 1}}\n")
    recipe = load_recipe(file)
    assert recipe.data.src_language == code
    assert parse_recipe(yaml.safe_load(recipe.to_yaml())) == recipe
    assert overridden("copy", "training.tensorboard=no").training.tensorboard is False


RULES = {
    "no end is set": {"training": {}},
    "batch_tokens or training.batch_sentences": {
        "training": {"max_steps": 1, "batch_tokens": None, "batch_sentences": None}
    },
    "the schedule cosine ends with the run": {
        "training": {"max_minutes": 1, "schedule": {"name": "cosine"}}
    },
    "the schedule linear ends with the run: give training.max_steps or max_epochs": {
        "training": {"max_minutes": 1, "schedule": {"name": "linear"}}
    },
    "set name to adamw": {"training": {"max_steps": 1, "optimizer": {"weight_decay": 0.1}}},
    "min_lr_ratio has no effect with constant": {
        "training": {"max_steps": 1, "schedule": {"name": "constant", "min_lr_ratio": 0.1}}
    },
    "average_of: best has no effect without a mean": {
        "training": {"max_steps": 1, "average_of": "best"}
    },
    "evaluation.metric bleu needs decoded text": {
        "training": {"max_steps": 1},
        "evaluation": {"metric": "bleu", "decode_sentences": 0},
    },
}


@pytest.mark.parametrize(("message", "content"), RULES.items())
def test_contradictory_keys_are_refused(message, content):
    """Also for a recipe that a program makes."""
    for make in (parse_recipe, lambda keys: Recipe(**keys)):
        with pytest.raises(ValueError, match=message):
            make(content)


@how_tested(deadline=None)
@given(st.sampled_from(["training.seed", "data.generated.seed"]), st.integers(0, 2**40))
def test_changed_keys_names_both_values(key, value):
    before = load_recipe("copy")
    now = overridden("copy", f"{key}={value}")
    expected = [] if value == 1 else [f"{key} (1 -> {value})"]
    assert changed_keys(before, now) == expected


def test_changed_keys_sees_a_key_that_is_new():
    before, now = parse_recipe(tiny()), parse_recipe(tiny(model__bias=False))
    assert changed_keys(before, now) == ["model.bias (null -> false)"]


def test_nearest_lists_all_names_if_none_is_similar():
    assert nearest("qqqq", ["b", "a"]) == "known: a, b"


# --- recipes list, show, copy ---------------------------------------------------------------


def test_list_shows_every_recipe_with_a_sentence_in_80_columns(commands):
    output = commands.run("recipes", "list").out
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == NAMES
    for name in NAMES:
        sentence = (RECIPES / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ")
        assert re.search(rf"^{name} +{re.escape(sentence)}$", re.sub(r"\n +", " ", output), re.M)
    assert output == commands.run("recipes", "ls").out == commands.run("list", "recipes").out
    listed = commands.run("recipes", "--help").out
    assert not {"ls", "cp"} & {line.split()[0] for line in listed.splitlines() if line.strip()}
    assert commands.run("cache", "list").out == commands.run("cache", "ls").out


@pytest.fixture(scope="module")
def shown(commands):
    """The output of `recipes show NAME`."""
    return cache(lambda name: commands.run("recipes", "show", name).out)


@pytest.mark.parametrize("name", NAMES)
def test_show_prints_each_key_of_the_task_with_its_value_and_description(shown, name):
    output = shown(name)
    recipe, again = load_recipe(name), parse_recipe(yaml.safe_load(output))
    assert again.model_copy(update={"objective": recipe.objective}) == recipe
    model = type(plugins.task.get(recipe.task)(recipe).objective)
    assert model.model_validate(again.objective) == model.model_validate(recipe.objective)
    for key, field in model.model_fields.items():
        assert re.search(rf"^  {key}:.*  # {re.escape(field.description)} \(", output, re.M), key
    assert output.splitlines()[0] == (RECIPES / f"{name}.yaml").read_text().splitlines()[0]
    for key in keys_of(Recipe):
        if key.is_section or not task_keys(recipe.task).includes(key.name):
            continue
        last = key.name.rsplit(".", 1)[-1]
        note = re.escape(key.field.description)
        if key.name not in ("model", "objective"):  # whose keys follow
            note += r" \(.+, default .+\)$"
        assert re.search(rf"^ *{last}:.*  # {note}", output, re.M), key.name


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "architecture" in load_recipe(name).model]
)
def test_show_prints_each_key_of_the_model(shown, name):
    """Keys that the recipe leaves to the architecture are comments, with their value."""
    output = shown(name)
    output = output[output.index("\nmodel:") : output.index("\ntraining:")]
    keys = load_recipe(name).model
    kind = architecture(keys["architecture"])
    sizes = kind.sizes.get(keys.get("size"), {})
    for field in fields(kind.config):
        line = re.search(rf"^  (# )?{field.name}:(.*)  # (.+)$", output, re.M)
        assert line, field.name
        assert line[3].startswith(key_descriptions(kind.config)[field.name])
        assert (line[1] is None) == (field.name in keys)
        value = keys.get(field.name, sizes.get(field.name))
        assert value is None or yaml.safe_load(line[2]) == value


def test_every_key_of_every_architecture_has_a_description():
    configs = [architecture(name).config for name in ARCHITECTURES]
    names = {config: {field.name for field in fields(config)} for config in configs}
    assert {config: {*key_descriptions(config)} for config in configs} == names
    assert key_descriptions(None).keys() <= set.union(*names.values())


def test_a_description_is_that_of_the_nearest_class_in_the_words_of_a_recipe():
    class Base:
        """Keys.

        Args:
            d_ff, head_dim: width of something; None: as
                `d_model`.
            window: number of keys.
        """

    @dataclass
    class Config(Base):
        """More keys.

        Args:
            window: number of
                tokens.

        Raises:
            nothing: at all.
        """

        d_model: int
        d_ff: int
        window: int
        unknown: int

    assert key_descriptions(Config) == {
        "d_model": key_descriptions(None)["d_model"],
        "d_ff": "Width of something; null: as `d_model`.",
        "window": "Number of tokens.",
    }


def test_types_are_named_as_in_recipes():
    types = {key.name: type_name(key.field.annotation) for key in keys_of(Recipe)}
    assert types["training.max_steps"] == "int | null"
    assert types["data.truncation"] == "drop | truncate | error"
    assert types["training.optimizer.betas"] == "list of 2 float"
    assert types["data.train.src"] == "str | list of str | null"
    assert types["tokenizer.vocab_size"] == "int | auto | null"
    assert (types["model"], types["task"], types["expect"]) == ("mapping", "str", "list")


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


# --- base -----------------------------------------------------------------------------------


def write_recipes(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_recipe_with_a_base_overrides_it(tmp_path):
    write_recipes(
        tmp_path,
        first="task: copy\nmodel: {d_model: 64, bias: false}\n"
        "training: {max_steps: 5, batch_tokens: 100, clip_norm: 2, label_smoothing: 0.3}\n"
        "evaluation: {beam_size: 3}\nexpect: [{step: 5, low: 1, high: 2}]\n",
        second="base: first.yaml\nmodel: {d_model: 32, bias: null, num_heads: 2}\n"
        "training: {clip_norm: null, label_smoothing: null, schedule: {warmup_steps: 3}}\n",
        third="base: second.yaml\ntraining: {max_steps: 7}\nevaluation: null\n",
    )
    recipe = load_recipe(tmp_path / "third.yaml")
    assert (recipe.task, recipe.model) == ("copy", {"d_model": 32, "num_heads": 2})
    training = recipe.training
    assert (training.max_steps, training.batch_tokens, training.schedule.warmup_steps) == (
        7,
        100,
        3,
    )
    assert training.clip_norm is None, "a key that may be null is null"
    assert training.label_smoothing == Recipe.model_fields["training"].annotation().label_smoothing
    assert (recipe.expect, recipe.evaluation.beam_size) == ([], 1)
    assert load_recipe(tmp_path / "first.yaml").expect


def test_bands_of_a_base_stay_unless_the_loss_depends_on_a_changed_key(tmp_path):
    write_recipes(
        tmp_path,
        mine="base: copy\ntraining: {log_every: 7}\n",
        other="base: copy\ntraining: {seed: 7}\n",
    )
    assert load_recipe(tmp_path / "mine.yaml").expect == load_recipe("copy").expect
    assert load_recipe(tmp_path / "other.yaml").expect == []


def test_a_base_is_a_relative_path_or_a_shipped_name(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    write_recipes(tmp_path, copy="task: sort\ntraining: {max_steps: 1}\n")
    write_recipes(tmp_path / "a", one="base: ../copy.yaml\n", two="base: copy\n")
    monkeypatch.chdir(tmp_path / "a")
    assert load_recipe("one.yaml").task == "sort"
    assert load_recipe("two.yaml") == load_recipe("copy")


WRONG_BASES = {
    "mine.yaml: base: no recipe cpoy: .* did you mean copy?": {"mine": "base: cpoy"},
    "mine.yaml: base: give a recipe's name or path, not 5": {"mine": "base: 5"},
    "mine.yaml: base mine.yaml is itself based on this recipe": {"mine": "base: mine.yaml"},
    "b.yaml: base mine.yaml is itself based on this recipe": {
        "mine": "base: b.yaml",
        "b": "base: mine.yaml",
    },
    "b.yaml: unknown key training.max_stpes; did you mean max_steps?": {
        "mine": "base: b.yaml\ntraining: {seed: 2}",
        "b": "training: {max_stpes: 3, seed: 1}",
    },
    "mine.yaml: training.seed: ": {
        "mine": "base: b.yaml\ntraining: {seed: -2}",
        "b": "training: {max_steps: 3, seed: 1}",
    },
    "b.yaml: a recipe is a mapping of keys, not a list": {"mine": "base: b.yaml", "b": "[1]"},
}


@pytest.mark.parametrize(("message", "texts"), WRONG_BASES.items())
def test_a_wrong_base_is_one_line_that_names_the_file(message, texts, tmp_path):
    write_recipes(tmp_path, **texts)
    with pytest.raises(UserError, match=f"^{tmp_path}/{message}") as refused:
        load_recipe(tmp_path / "mine.yaml")
    assert "\n" not in str(refused.value)


def test_a_recipe_is_replaced_by_dotted_key():
    recipe = load_recipe("copy")
    keys = {"training.max_steps": 5, "model.d_model": 8, "data.generated.seed": 3}
    changed = recipe.replace(keys)
    assert changed == load_recipe("copy", keys)
    assert (changed.expect, recipe.expect != [], recipe.training.max_steps) == ([], True, None)
    assert recipe.replace({"training.log_every": 3}).expect == recipe.expect
    assert recipe.replace({}) == recipe
    for key, message in {
        "training.max_stpes": r"^changes: unknown key training\.max_stpes; did you mean",
        "data.train.src": r"^changes: data\.train\.src is not read by the task copy",
    }.items():
        with pytest.raises(UserError, match=message):
            recipe.replace({key: "x"})


def test_overrides_can_be_values_by_dotted_key():
    keys = {"training.max_steps": 5, "training.optimizer.betas": (0.8, 0.9), "data.max_length": 9}
    recipe = load_recipe("copy", keys)
    assert recipe == overridden("copy", *(f"{k}={json.dumps(v)}" for k, v in keys.items()))
    with pytest.raises(UserError, match=r"^overrides: unknown key training\.max_stpes; did you"):
        load_recipe("copy", {"training.max_stpes": 5})
    with pytest.raises(UserError, match=r"^overrides: unknown key trainig; did you mean training"):
        load_recipe("copy", {"trainig.max_steps": 5})
