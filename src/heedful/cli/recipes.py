"""`heedful recipes`: the recipes that come with heedful."""

import itertools
from pathlib import Path

import typer

from heedful.cli.before import add_verb
from heedful.cli.flags import Json
from heedful.cli.shared import print_json
from heedful.errors import UserError

app = typer.Typer(
    help="List, show and copy the shipped recipes; every key in them is explained.",
    no_args_is_help=True,
)


@app.command("ls")
def list_recipes(json: Json = False) -> None:
    """List the shipped recipes, each with its first line.

    Example: heedful recipes ls
    """
    from heedful.recipe_files import RECIPES, shipped_recipes

    files = {name: RECIPES / f"{name}.yaml" for name in shipped_recipes()}
    about = {
        name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        for name, path in files.items()
    }
    if json:
        print_json(about)
        return
    width = max(map(len, about)) + 2
    for name, line in about.items():
        typer.echo(f"{name:<{width}}{line}")


@app.command("show")
def show(
    name: str = typer.Argument(..., help="A recipe file, or a shipped recipe's name."),
) -> None:
    """Print a recipe with every key of its task and model: value, description, type and default.

    The recipe itself holds only what differs from the defaults. Keys of the model that it leaves to
    the architecture are printed as comments.

    Example: heedful recipes show translation
    """
    from heedful import plugins
    from heedful.cli.recipe_listing import explained
    from heedful.files import read_text
    from heedful.recipe_files import load_recipe, recipe_path

    recipe = load_recipe(name)
    task = plugins.task.get(recipe.task)(recipe)
    lines = read_text(recipe_path(name)).splitlines()
    for line in itertools.takewhile(lambda line: line.startswith("#"), lines):
        typer.echo(line)
    typer.echo(explained(recipe, task), nl=False)


def copy(
    name: str = typer.Argument(..., help="A shipped recipe."),
    to: Path | None = typer.Argument(None, help="Where to. Default: NAME.yaml here."),
) -> None:
    """Copy a recipe, to make it your own.

    Example: heedful recipes cp translation mine.yaml
    """
    from heedful.files import write_text
    from heedful.recipe_files import recipe_path

    source = recipe_path(name)
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise UserError(f"{target} exists already; give another name")
    write_text(target, source.read_text(encoding="utf-8"))
    typer.echo(f"{target}: train it with heedful train {target}")


add_verb(app, "cp", copy)
