"""`heedful train`: a run from a recipe."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from heedful.config import Recipe

USE = {  # what is typed to use a model, by its task
    "language_modelling": "heedful generate --prompt 'your text'",
    "masked_lm": "heedful fill --text 'one <mask> is hidden'",
    "classification": "echo 'your text' | heedful classify",
    "denoising": "heedful generate --prompt 'your text'",
    "translation": "echo 'your text' | heedful translate",
}


def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe file, a run's folder, or a shipped recipe's name.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override one key, e.g. training.max_steps=500."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: runs/RECIPE.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Train a model as a recipe says.

    The folder holds the best model so far at any time, the log, checkpoints, and at the end a
    report. Ctrl-C saves; --resume goes on exactly.

    Example: heedful train translation --set data.train.src=a.en --set data.train.tgt=a.de
    """
    from heedful.recipe_files import load_recipe, recipe_path

    path = recipe_path(recipe)
    folder = out or (path.parent if path.name == "recipe.yaml" else Path("runs") / path.stem)
    run_and_report(load_recipe(recipe, settings or []), folder, resume=resume, quiet=quiet)


def run_and_report(
    recipe: "Recipe", folder: Path, *, resume: bool = False, quiet: bool = False, first: str = ""
) -> None:
    """Train into a folder; say what came of it, and how it is used.

    `first` is said before anything else.
    """
    from rich.console import Console

    from heedful.run import train as run
    from heedful.training.progress import ProgressBar

    # Labels, paths and error texts are shown as they are, whatever brackets are in them.
    console = Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)
    if first:
        console.print(first)
    result = run(
        recipe,
        folder,
        resume=resume,
        listeners=[] if quiet else [ProgressBar()],
        say=console.print,
        command=shlex.join(["heedful", *sys.argv[1:]]),
    )
    if result.reason == "interrupted":
        again = shlex.join(["heedful", "train", str(folder), "--resume"])
        typer.echo(f"stopped and saved; go on with: {again}", err=True)
        raise typer.Exit(130)
    if result.scores is not None:
        signatures = {
            name: entry.get("signature", "")
            for name, entry in result.scores.by_name.items()
            if isinstance(entry, dict)
        }
        for name, value in result.scores.values().items():
            console.print(f"{name:<18} {value:.4g}   {signatures.get(name, '')}".rstrip())
    console.print(f"model        {folder}")
    console.print(f"report       {folder / 'report.html'}")
    use = USE.get(result.task, USE["translation"])
    console.print(f"use it       {use} {shlex.quote(str(folder))}")
