"""`heedful recipes`: the recipes that come with heedful."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="List, show and copy the shipped recipes; every key in them is explained.",
    no_args_is_help=True,
)


@app.command("ls")
def list_recipes() -> None:
    """List the shipped recipes, each with its first line.

    Example: heedful recipes ls
    """
    from heedful.config import RECIPES, shipped_recipes

    names = shipped_recipes()
    width = max(map(len, names)) + 2
    for name in names:
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:<{width}}{first.removeprefix('# ')}")


@app.command("show")
def show(name: Annotated[str, typer.Argument(help="A shipped recipe.")]) -> None:
    """Print a recipe.

    Example: heedful recipes show translation
    """
    from heedful.config import recipe_path

    typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)


@app.command("cp")
def copy(
    name: Annotated[str, typer.Argument(help="A shipped recipe.")],
    to: Annotated[Path | None, typer.Argument(help="Where to. Default: NAME.yaml here.")] = None,
) -> None:
    """Copy a recipe, to make it your own.

    Example: heedful recipes cp translation mine.yaml
    """
    from heedful.config import recipe_path
    from heedful.errors import UserError
    from heedful.files import write_text

    source = recipe_path(name)
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists():
        raise UserError(f"{target} exists already; give another name")
    write_text(target, source.read_text(encoding="utf-8"))
    typer.echo(f"{target}: train it with heedful train {target}")
