"""`heedful train`: a run from a recipe."""

from pathlib import Path

import typer

from heedful.cli.flags import Out, Quiet, RecipeName, Settings
from heedful.cli.shared import make_console, report_result, run_recipe


def train(
    recipe: RecipeName,
    settings: Settings = None,
    out: Out = None,
    resume: bool = typer.Option(
        False, "--resume", help="Continue from the newest checkpoint in the folder."
    ),
    quiet: Quiet = False,
) -> None:
    """Train a model as a recipe says.

    The folder must be new or empty. It holds the best model so far at any time, the log,
    checkpoints, and at the end a report. Ctrl-C saves; --resume goes on exactly. With --set a
    resumed run takes another learning rate, clipping or precision from there on, which the log and
    the report then note. Given a run's folder in place of a recipe, that folder is the default of
    --out; of a recipe.yaml that no run wrote, the default is named by the folder that it is in.

    Example: heedful train translation --set data.train.file=pairs.tsv
    """
    from heedful.recipe_files import load_recipe, recipe_path

    folder = out or _default_folder(recipe_path(recipe))
    console = make_console(quiet=quiet)
    loaded = load_recipe(recipe, settings or [])
    changes = [setting.partition("=")[0] for setting in settings or []]
    result = run_recipe(loaded, folder, console, resume=resume, changes=changes)
    report_result(result, console)


def _default_folder(recipe: Path) -> Path:
    """The folder of the run whose recipe it is, or else one in runs/."""
    from heedful.training.folder import is_run

    if recipe.name != "recipe.yaml":
        return Path("runs") / recipe.stem
    return recipe.parent if is_run(recipe.parent) else Path("runs") / recipe.resolve().parent.name
