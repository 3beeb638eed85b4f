"""`heedful train`: a run from a recipe."""

from pathlib import Path

import typer

from heedful.cli.flags import Quiet, RecipeName, RunFolder, Settings
from heedful.cli.shared import make_console, report_result, run_recipe


def train(
    recipe: RecipeName,
    settings: Settings = None,
    out: RunFolder = None,
    resume: bool = typer.Option(
        False, "--resume", help="Go on from the newest checkpoint in the folder."
    ),
    quiet: Quiet = False,
) -> None:
    """Train a model as a recipe says.

    The folder holds the best model so far at any time, the log, checkpoints, and at the end a
    report. Ctrl-C saves; --resume goes on exactly.

    Example: heedful train translation --set data.train.src=a.en --set data.train.tgt=a.de
    """
    from heedful.recipe_files import load_recipe, recipe_path

    path = recipe_path(recipe)
    folder = out or (path.parent if path.name == "recipe.yaml" else Path("runs") / path.stem)
    console = make_console(quiet=quiet)
    result = run_recipe(load_recipe(recipe, settings or []), folder, console, resume=resume)
    report_result(result, console)
