"""Files of a recipe: where their paths begin."""

from pathlib import Path

import pytest

from encoder_runs import Ready, recipe_of
from heedful.config import Recipe
from heedful.errors import UserError
from heedful.recipe_files import RECIPES, parse_recipe
from heedful.tasks.inputs import split_files


def in_folder(recipe: Recipe, folder: str | None) -> Recipe:
    """The recipe with its files' names alone, in a folder."""
    content = recipe.model_dump(exclude_unset=True)
    train = content["data"]["train"]
    train |= {key: Path(path).name for key, path in train.items()}
    content["data"]["folder"] = folder
    return parse_recipe(content)


@pytest.mark.parametrize("task", ["translation", "language_modelling", "classification"])
def test_paths_begin_in_the_folder_of_the_data(task, tmp_path, monkeypatch):
    recipe = recipe_of(task, tmp_path)
    whole = Ready(recipe, tmp_path / "whole").data
    found = Ready(in_folder(recipe, str(tmp_path)), tmp_path / "folder").data
    name = next(iter(whole.splits["train"].columns))
    assert found.ids("train", name).ids.tolist() == whole.ids("train", name).ids.tolist()
    with pytest.raises(UserError, match=str(tmp_path / "elsewhere")):
        Ready(in_folder(recipe, str(tmp_path / "elsewhere")), tmp_path / "none")
    monkeypatch.chdir(tmp_path)  # null: where one stands
    Ready(in_folder(recipe, None), tmp_path / "here")


def test_whole_paths_and_shipped_files_are_in_no_folder():
    train = {"text": ["/a/b", "shipped:rhyme.txt", "c"]}
    recipe = parse_recipe(
        {
            "task": "language_modelling",
            "data": {"folder": "there", "train": train},
            "training": {"max_steps": 1},
        }
    )
    assert split_files(recipe)["train"].text == ["/a/b", str(RECIPES / "rhyme.txt"), "there/c"]
