"""`heedful list`, `heedful tokenizer`, and the flags of `heedful train` that set keys."""

import json
from pathlib import Path

import pytest

from commands import Commands, assert_refused, write_recipe
from heedful import plugins
from heedful.cli.flags import RECIPE_KEYS
from heedful.cli.list_ import METRICS, SCHEDULES, TASKS
from heedful.config import Recipe
from heedful.config.keys import keys_of
from heedful.data.tokenizer import Tokenizer
from heedful.recipe_files import load_recipe, shipped_recipes

TEXT = "the cat sat on the mat\na dog runs in the park\n"


@pytest.fixture
def tokenizer(commands: Commands, tmp_path: Path) -> Path:
    (tmp_path / "text").write_text(TEXT * 20)
    path = tmp_path / "tokenizer.json"
    done = commands.run("tokenizer", "train", tmp_path / "text", "-o", path, "--json")
    assert done.code == 0, done.err
    size = Tokenizer.load(path).vocab_size
    assert json.loads(done.out) == {"path": str(path), "kind": "bpe", "vocab_size": size}
    return path


@pytest.mark.parametrize(
    ("kind", "registry"),
    [
        ("models", plugins.architecture),
        ("tasks", plugins.task),
        ("metrics", plugins.metric),
        ("schedules", plugins.schedule),
    ],
)
def test_list_names_each_entry_with_a_description(commands: Commands, kind: str, registry) -> None:
    rows = json.loads(commands.run("list", kind, "--json").out)
    built_in = {name for name in registry.names() if registry.plugin_of(name) is None}
    built_in.discard("dates")  # of an example, which other tests register in this process
    assert rows.keys() >= built_in
    assert all(rows[name] for name in built_in)
    lines = commands.run("list", kind).out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == list(rows)
    table = {"tasks": TASKS, "metrics": METRICS, "schedules": SCHEDULES}.get(kind, {})
    assert table.keys() <= built_in


def test_list_recipes_names_the_shipped_recipes(commands: Commands) -> None:
    result = commands.run("list", "recipes")
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == shipped_recipes()
    assert result.out == commands.run("recipes", "ls").out


def test_a_text_is_encoded_and_decoded(commands: Commands, tokenizer: Path) -> None:
    texts = TEXT.splitlines()
    result = commands.run("tokenizer", "encode", tokenizer, stdin=TEXT.encode())
    ids = [[int(word) for word in line.split()] for line in result.out.splitlines()]
    assert ids == Tokenizer.load(tokenizer).encode_batch(texts)
    assert commands.run("tokenizer", "decode", tokenizer, stdin=result.out.encode()).out == TEXT
    row = json.loads(commands.run("tokenizer", "encode", tokenizer, texts[0], "--json").out)
    assert (row["text"], row["ids"]) == (texts[0], ids[0])
    pieces = commands.run("tokenizer", "encode", tokenizer, texts[0], "--pieces").out.split()
    assert pieces == row["pieces"]
    row = json.loads(commands.run("tokenizer", "decode", tokenizer, "5 6", "--json").out)
    assert row["ids"] == [5, 6]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("tokenizer decode tokenizer.json 5,6", "line 1: 5,6 is no token id"),
        ("tokenizer decode tokenizer.json 99999999999999999999", "not a token id"),
        (f"tokenizer decode tokenizer.json {'9' * 5000}", "not a token id"),
        ("tokenizer decode tokenizer.json 99999", "line 1: 99999 is not a token id of a vocab"),
        ("tokenizer encode missing a", "missing"),
        ("tokenizer train missing -o out", "missing"),
        ("tokenizer train text -o out --kind bpee", "is not one of"),
        ("tokenizer train rows.jsonl -o out", "rows.jsonl is not plain text, by its name"),
        ("tokenizer train text -o out --vocab-size 5000", "more than the text allows"),
    ],
)
@pytest.mark.usefixtures("tokenizer")
def test_bad_input_of_a_tokenizer_is_one_line(
    commands: Commands, tmp_path: Path, line: str, part: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat"}\n')
    assert_refused(commands.run(*line.split(), cwd=tmp_path), part)
    assert not (tmp_path / "out").exists()


def test_the_flags_of_train_are_keys_of_the_recipe() -> None:
    assert {*RECIPE_KEYS.values()} <= {key.name for key in keys_of(Recipe)}


def test_flags_of_train_set_keys(commands: Commands, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json")
    flags = "--steps 2 --epochs 9 --minutes 5 --lr 0.5 --batch-tokens 60 --seed 3 --device cpu"
    words = [*flags.split(), "--precision", "fp32", "--set", "training.seed=4", "--json"]
    done = commands.run("train", recipe, "--out", tmp_path / "run", *words)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["reason"], result["directory"]) == ("max_steps", str(tmp_path / "run"))
    assert "exact_match" in result["scores"]
    training = load_recipe(tmp_path / "run").training
    ends = (training.max_steps, training.max_epochs, training.max_minutes)
    assert ends == (2, 9, 5)
    assert training.schedule.learning_rate == 0.5
    assert (training.batch_tokens, training.device, training.precision) == (60, "cpu", "fp32")
    assert training.seed == 4  # --set has the last word


def test_a_wrong_value_of_a_flag_names_its_key(commands: Commands, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json")
    refused = commands.run("train", recipe, "--out", tmp_path / "run", "--lr", -1)
    assert_refused(refused, "training.schedule.learning_rate", "greater than 0")
    refused = commands.run("train", recipe, "--out", tmp_path / "run", "--precision", "fp8")
    assert_refused(refused, "training.precision: unknown value fp8")
