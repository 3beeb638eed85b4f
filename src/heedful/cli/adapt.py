"""`heedful adapt`: a translator fine-tuned on a translation memory."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from heedful.cli.flags import Json, ModelFolder, Quiet
from heedful.cli.help import IN_OUT
from heedful.cli.shared import make_console, print_json, run_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from heedful.adaptation import Adapted
    from heedful.config import Recipe
    from heedful.run import TrainingRun


def adapt(
    model: ModelFolder,
    memory: list[Path] = typer.Argument(
        ..., metavar="MEMORY...", help="Translation memory: .tmx, .xliff, .po, .csv, .tsv, a folder."
    ),
    out: Path = typer.Option(
        ..., "--out", "-o", metavar="DIR", help="New model directory.", rich_help_panel=IN_OUT
    ),
    general: list[Path] | None = typer.Option(
        None,
        metavar="FILE",
        help="Pairs of the kind that the model was trained on, so that it keeps its quality there; "
        "repeatable.",
        show_default="the training data of a run, if they are still there",
    ),
    valid: list[Path] | None = typer.Option(
        None,
        metavar="FILE",
        help="Held-out units of the memory; repeatable.",
        show_default="a tenth of the memory, at most 500",
    ),
    minutes: float = typer.Option(10.0, metavar="X", help="Minutes for all, scores included."),
    method: Literal["auto", "full", "lora"] = typer.Option(
        "auto",
        metavar="auto|full|lora",
        help="Train all weights (full) or low-rank updates of them (lora); auto: lora for more than "
        "50 million parameters.",
    ),
    keep: bool | None = typer.Option(
        None,
        "--keep/--no-keep",
        help="Train with placeholders, tags and numbers as tokens that are kept (data.keep).",
        show_default="as the model was trained",
    ),
    settings: list[str] | None = typer.Option(
        None, "--set", metavar="KEY=VALUE", help="Set a key of the recipe; repeatable."
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Adapt a translator to a translation memory, in minutes on a CPU.

    Example: heedful adapt runs/translation memory.tmx -o adapted
    """
    from heedful.adaptation import Adaptation
    from heedful.adaptation import adapt as run_adaptation
    from heedful.cli.lines import bars_on_stderr
    from heedful.recipe_files import read_setting

    console = make_console(quiet=quiet or json)
    again = f"continue with: {shlex.join(['heedful', *sys.argv[1:]])}"

    def train_stage(recipe: "Recipe", folder: Path, resume: bool) -> "TrainingRun":
        return run_recipe(recipe, folder, console, resume=resume, again=again)

    changes = dict(read_setting(text, "training.seed=2") for text in settings or ())
    adaptation = Adaptation(
        memory, general or (), valid or (), minutes, method, keep, changes
    )
    with bars_on_stderr(shown=not quiet):
        result = run_adaptation(model, adaptation, out, train_stage, console.print)
    if json:
        print_json({"directory": str(result.directory), "share": result.share,
                    "before": result.before, "after": result.after})
    else:
        _report(result, console)


def _report(result: "Adapted", console: "Console") -> None:
    for name, value in (result.after or {}).items():
        console.print(f"{name:<18} {(result.before or {})[name]:.4g} -> {value:.4g}")
