"""`heedful recipes`: the recipes that come with heedful."""

import itertools
import shlex
from pathlib import Path

import typer

from heedful.cli.flags import Json, complete_recipe
from heedful.cli.guard import add_command
from heedful.cli.help import new_group
from heedful.cli.list_ import print_rows, recipes
from heedful.errors import UserError

app = new_group("List, show and copy the shipped recipes, with a description of every key.")


def list_recipes(json: Json = False) -> None:
    """List the shipped recipes, each with its first line.

    Example: heedful recipes list
    """
    print_rows(recipes(), json)


def show(
    name: str = typer.Argument(
        ...,
        metavar="RECIPE",
        help="Recipe file, or name of a shipped recipe.",
        autocompletion=complete_recipe,
    ),
) -> None:
    """Print a recipe with every key of its task and model: value, description, type and default.

    The recipe itself holds only what differs from the defaults. Keys of the model that it leaves to
    the architecture are printed as comments.

    Example: heedful recipes show translation
    """
    from heedful import plugins
    from heedful.cli.recipe_listing import render_recipe
    from heedful.files import read_text
    from heedful.recipe_files import recipe_path, recorded_recipe

    recipe = recorded_recipe(Path(name))
    task = plugins.task.get(recipe.task)(recipe)
    lines = read_text(recipe_path(name)).splitlines()
    for line in itertools.takewhile(lambda line: line.startswith("#"), lines):
        typer.echo(line)
    typer.echo(render_recipe(recipe, task), nl=False)


def copy(
    name: str = typer.Argument(
        ..., metavar="RECIPE", help="Name of a shipped recipe.", autocompletion=complete_recipe
    ),
    to: Path | None = typer.Argument(
        None, metavar="FILE", help="New file.", show_default="RECIPE.yaml here"
    ),
) -> None:
    """Copy a recipe, to make it your own.

    Example: heedful recipes copy translation mine.yaml
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
    typer.echo(f"{target}: train it with heedful train {shlex.quote(str(target))}")


add_command(app, "list", list_recipes)
add_command(app, "ls", list_recipes, hidden=True)
add_command(app, "show", show)
add_command(app, "copy", copy)
add_command(app, "cp", copy, hidden=True)
