"""Files of a recipe: resolution of paths, and removal of held-out rows."""

from pathlib import Path

import pytest

from commands import tiny
from encoder_runs import PreparedTask, recipe_of, write
from heedful.config import Recipe, parse_recipe
from heedful.errors import UserError
from heedful.recipe_files import RECIPES
from heedful.tasks.corpora import split_files


def in_folder(recipe: Recipe, folder: str | None) -> Recipe:
    """A recipe with file names relative to a folder."""
    content = recipe.model_dump(exclude_unset=True)
    train = content["data"]["train"]
    train |= {key: Path(path).name for key, path in train.items()}
    content["data"]["folder"] = folder
    return parse_recipe(content)


@pytest.mark.parametrize("task", ["translation", "language_modeling", "classification"])
def test_relative_paths_are_in_the_data_folder(task, tmp_path, monkeypatch):
    recipe = recipe_of(task, tmp_path)
    whole = PreparedTask(recipe, tmp_path / "whole").data
    actual = PreparedTask(in_folder(recipe, str(tmp_path)), tmp_path / "folder").data
    name = next(iter(whole.splits["train"].columns))
    assert actual.ids("train", name).ids.tolist() == whole.ids("train", name).ids.tolist()
    with pytest.raises(UserError, match=str(tmp_path / "elsewhere")):
        PreparedTask(in_folder(recipe, str(tmp_path / "elsewhere")), tmp_path / "none")
    monkeypatch.chdir(tmp_path)  # null: the current folder
    PreparedTask(in_folder(recipe, None), tmp_path / "here")


def test_absolute_paths_and_shipped_files_ignore_the_data_folder():
    train = {"text": ["/a/b", "shipped:rhyme.txt", "c"]}
    recipe = parse_recipe(
        {
            "task": "language_modeling",
            "data": {"folder": "there", "train": train},
            "training": {"max_steps": 1},
        }
    )
    assert split_files(recipe)[0].files.text == ["/a/b", str(RECIPES / "rhyme.txt"), "there/c"]


TWICE = ["red dog sees", "old cat sees the cow", "big cow sees"]  # held out, and in training too


@pytest.mark.parametrize(
    "task", ["translation", "language_modeling", "masked_lm", "denoising", "classification"]
)
@pytest.mark.parametrize("split", ["valid", "test"])
def test_held_out_rows_are_removed_from_training(task, split, tmp_path):
    content = recipe_of(task, tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    files = {key: Path(path) for key, path in content["data"]["train"].items()}
    content["data"].pop("valid_size", None)
    for name, texts in {"valid": ["the cow sees the cow"], split: TWICE}.items():
        content["data"][name] = {}
        for key, path in files.items():
            end = "\tx" if key == "file" else ""
            lines = [text[::-1] if key == "tgt" else f"{text}{end}" for text in texts]
            content["data"][name][key] = write(tmp_path / f"{name}-{path.name}", lines)
            if name == split:
                write(path, [*lines, *lines, *path.read_text().splitlines()])
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    columns = run.data.splits["train"]
    assert columns.report.num_held_out == 2 * len(TWICE)
    assert "6 dropped as also held out" in "\n".join(run.printed_lines)
    name = next(iter(columns.columns))
    texts = {run.tokenizer.decode(ids.tolist()) for ids in columns.sequences(name)}
    assert texts.isdisjoint(TWICE)


def test_a_text_with_another_label_or_target_is_another_example(tmp_path):
    recipe = recipe_of("classification", tmp_path)
    content = recipe.model_dump(exclude_unset=True)
    del content["data"]["valid_size"]
    path = Path(content["data"]["train"]["file"])
    first = path.read_text().splitlines()[0]
    text, _, label = first.partition("\t")
    other = {"x": "y", "y": "x"}[label]
    content["data"]["valid"] = {"file": write(tmp_path / "held.tsv", [f"{text}\t{other}"])}
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    assert run.data.splits["train"].report.num_held_out == 0


def test_a_run_whose_training_text_is_all_held_out_is_refused(tmp_path):
    recipe = recipe_of("masked_lm", tmp_path)
    content = recipe.model_dump(exclude_unset=True)
    content["data"]["valid"] = content["data"]["train"]
    with pytest.raises(UserError, match=r"each of the 80 texts of data\.train is also in"):
        PreparedTask(parse_recipe(content), tmp_path / "data")


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
def test_generated_training_data_have_no_held_out_example(task, tmp_path):
    run = PreparedTask(parse_recipe(tiny(task=task)), tmp_path / "data")
    assert run.data.splits["train"].report.num_held_out == 0


@pytest.mark.parametrize(
    "task", ["translation", "language_modeling", "masked_lm", "denoising", "classification"]
)
def test_filters_drop_training_rows_alone_before_rows_are_held_out(task, tmp_path):
    """Of rows with and without a mark, those with it are filtered; held-out files keep them."""
    marks = {"min_letters": 1.0, "unique": ["row"]}
    content = recipe_of(task, tmp_path, evaluation__num_samples=0).model_dump(exclude_unset=True)
    content["data"]["filters"] = marks
    files = {key: Path(path) for key, path in content["data"]["train"].items()}
    content["data"]["test"] = {}
    for key, path in files.items():
        lines = [*dict.fromkeys(path.read_text().splitlines())]
        if key in ("src", "tgt"):
            lines = path.read_text().splitlines()
        marked = [f"#{line}" for line in lines]
        write(path, [line for pair in zip(lines, marked, strict=True) for line in pair])
        content["data"]["test"][key] = write(tmp_path / f"test-{path.name}", marked)
    run = PreparedTask(parse_recipe(content), tmp_path / "data")
    report = run.data.filters
    assert [count.label for count in report.filters] == ["min_letters 1", "unique row"]
    assert report.filters[0].num_dropped == report.filters[0].num_seen // 2
    examples = report.filters[0].examples
    assert len(examples) == 10
    assert all("#" in str(example.texts) and ", line " in example.location for example in examples)
    assert f"filters    {report.num_dropped:,} of " in "\n".join(run.printed_lines)
    assert f"{report.num_dropped:,} dropped by filters" in run.printed_lines[0]
    name = next(iter(run.data.splits["train"].columns))

    def has_marks(split):
        if split != "train":
            return {"#" in str(row) for row in run.data.texts(split)}
        texts = run.data.ids(split, name)
        return {"#" in run.tokenizer.decode(texts[i].tolist()) for i in range(len(texts))}

    assert (has_marks("train"), has_marks("valid"), has_marks("test")) == ({False}, {False}, {True})


def test_filters_are_part_of_the_key_of_prepared_data(tmp_path):
    recipe = recipe_of("masked_lm", tmp_path)
    keys = {"data.filters.min_script": 0.5, "data.filters.src_script": "Latin"}
    identified = {"data.filters.language": True, "data.src_language": "en"}
    changes = [
        *({}, {"data.filters.min_words": 1}, keys, {**keys, "data.src_language": "en"}),
        *(identified, {**identified, "data.filters.language_probability": 0.99}),
    ]
    folders = {
        PreparedTask(recipe.replace(change), tmp_path / "data").data.directory.name
        for change in [*changes, {"data.src_language": "en"}, {"data.src_language": "de"}]
    }
    assert len(folders) == len(changes), "the language matters to min_script and language"


def test_filters_that_do_not_fit_the_data_are_refused(tmp_path):
    recipe = recipe_of("classification", tmp_path)
    for change, message in (
        ({"data.filters.unique": ["tgt"]}, "data.filters.unique: rows have no tgt; use row or"),
        ({"data.filters.min_script": 0.5}, "data.filters.min_script: no language; set data"),
        ({"data.filters.min_words": 99}, "data.filters.min_words: 99 drops all 80 rows that"),
    ):
        with pytest.raises(UserError, match=message):
            PreparedTask(recipe.replace(change), tmp_path / "data")
    with pytest.raises(UserError, match=r"filters\.max_ratio is not read by the task class"):
        recipe.replace({"data.filters.max_ratio": 2.0})
