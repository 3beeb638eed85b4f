"""`heedful prepare`: the data of a run, before the run."""

import typer

from heedful.cli.flags import Json, Quiet, RecipeName, spread
from heedful.cli.lines import bars_on_stderr
from heedful.cli.shared import make_console, print_json
from heedful.cli.training_flags import TrainingFlags


@spread()
def prepare(
    *,
    recipe: RecipeName,
    flags: TrainingFlags,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Read and tokenize the data of a recipe, so that its run begins at once.

    The data are stored in the cache that runs share (heedful cache ls), and every error in them is
    found. Runs with the same data and tokenizer use them, whatever their model. The settings are
    those of heedful train: a run that has the same ones finds its data prepared.

    Example: heedful prepare translation --set data.train.file=my.tsv
    """
    from heedful.dry_run import prepare_run
    from heedful.recipe_files import load_recipe

    console = make_console(quiet=quiet or json)
    with bars_on_stderr(shown=not quiet):
        data = prepare_run(load_recipe(recipe, flags.overrides), console.print)
    splits = {name: len(columns) for name, columns in data.splits.items()}
    if json:
        print_json({"directory": str(data.directory), "rows": splits})
    elif not quiet:
        typer.echo(f"prepared   {data.directory.name} (heedful cache ls)")
