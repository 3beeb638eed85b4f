"""`heedful train`: a run from a recipe."""

from pathlib import Path

import typer

from heedful.cli.flags import Json, Out, Quiet, RecipeName, TrainingFlags
from heedful.cli.shared import make_console, print_result, report_result, run_recipe


def train(
    *,
    recipe: RecipeName,
    flags: TrainingFlags,
    out: Out = None,
    resume: bool = typer.Option(
        False, "--resume", help="Continue from the newest checkpoint in the folder."
    ),
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Prepare data and net, measure a few steps, print data, sizes, memory and time, and "
        "write no run.",
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a model by a recipe.

    The folder must be new or empty. It holds the best model so far at any time, the log,
    checkpoints, and at the end a report. Ctrl-C saves; --resume continues exactly. Learning
    rate, clipping and precision can be changed on resuming; log and report note the change.
    For a run's folder in place of a recipe, --out is that folder by default; for another
    recipe.yaml, the name of its folder. With torchrun --nproc-per-node N -m before the command, N
    processes train one run together (training.parallel); without it, a run of ten minutes or more
    on a CPU measures which number of threads is the fastest.

    Example: heedful train translation --minutes 30 --set data.train.file=my.tsv
    """
    from heedful.processes import join
    from heedful.recipe_files import load_recipe, recipe_path

    with join() as processes:
        if dry_run:
            if processes.is_main:
                from heedful.cli.estimate import estimate

                estimate(load_recipe(recipe, flags.overrides), quiet=quiet, json=json)
            return
        folder = out or _default_folder(recipe_path(recipe))
        console = make_console(quiet=quiet or json or not processes.is_main)
        overrides = flags.overrides
        loaded = load_recipe(recipe, overrides)
        result = run_recipe(loaded, folder, console, resume=resume, changes=[*overrides])
        if processes.is_main:
            print_result(result) if json else report_result(result, console)


def _default_folder(recipe: Path) -> Path:
    """The folder of the run with this recipe, or one in runs/ with its name."""
    from heedful.training.folder import is_run

    if recipe.name != "recipe.yaml":
        return Path("runs") / recipe.stem
    return recipe.parent if is_run(recipe.parent) else Path("runs") / recipe.resolve().parent.name
