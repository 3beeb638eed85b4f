"""What verbs share: options, the console, how a run is started, how help is worded."""

import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from heedful.config import Recipe
    from heedful.engines.folder import Use
    from heedful.inference import SavedModel
    from heedful.options import TooLong
    from heedful.run import Result

ModelFolder = Annotated[Path, typer.Argument(help="A model directory.")]
Input = Annotated[Path | None, typer.Option("--input", "-i", help="A text a line. Default: stdin.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where to write. Default: stdout.")
]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Stop at the first line that cannot be used, instead of leaving it out."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
NewFolder = Annotated[Path, typer.Argument(help="The new model directory.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a model that is there already.")
]
Engine = Annotated[
    str,
    typer.Option(
        help="What runs the model: ctranslate2, compiled, or eager, the net itself. auto: what was "
        "found best where the model was optimised, else the net. What an engine lacks runs eager."
    ),
]
Precision = Annotated[
    str, typer.Option(help="float32, bfloat16 or int8, where there is one. auto: the best.")
]
Threads = Annotated[
    int | None, typer.Option(help="Cores of a worker. Default: as measured; small models: 1.")
]
RecipeName = Annotated[
    str, typer.Argument(help="A recipe file, a run's folder, or a shipped recipe's name.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key, e.g. training.max_steps=500."
    ),
]
RunFolder = Annotated[
    Path | None, typer.Option(help="Folder of the run. Default: in runs/, named by the recipe.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="A line of JSON for each text, with scores.")
]


def open_model(
    model: Path, input: Path | None, device: str, engine: str, precision: str, threads: int | None
) -> Any:
    """A model as its options say: for many texts from a file, one at a time from a pipe."""
    from heedful.inference import load

    use: Use = "throughput" if input else "latency"
    return load(model, device=device, engine=engine, precision=precision, threads=threads, use=use)


def too_long_of(truncate: bool, strict: bool = True) -> "TooLong":
    """What `--truncate` and `--strict` ask for."""
    if truncate:
        return "truncate"
    return "error" if strict else "leave_out"


def tell_counts(model: "SavedModel", what: str) -> None:
    """Tell how many texts were cut, and how many have no output."""
    if model.num_truncated:
        typer.echo(f"truncated {what}: {model.num_truncated:,}", err=True)
    if model.num_left_out:
        typer.echo(f"{what} left out, whose outputs are blank: {model.num_left_out:,}", err=True)


def help_of(verb: Callable[..., Any]) -> str:
    """The paragraphs of a docstring, each as one line: the terminal breaks it where it must."""
    paragraphs = (inspect.getdoc(verb) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


def make_console(*, quiet: bool = False) -> "Console":
    """Labels, paths and error texts are shown as they are, whatever brackets are in them."""
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, markup=False, soft_wrap=True)


def note(text: str) -> None:
    """Something that the user should know, beside the output."""
    typer.echo(f"note: {text}", err=True)


def run_recipe(
    recipe: "Recipe", folder: Path, console: "Console", *, resume: bool = False, again: str = ""
) -> "Result":
    """Train into a folder, with a progress bar unless the console is quiet.

    Ends the command with 130 where the run is interrupted; `again` is how it goes on then.
    """
    from heedful.progress import shown_by
    from heedful.run import train
    from heedful.training.progress import ProgressBar

    bar = ProgressBar(console)
    with shown_by(bar.work if console.is_terminal and not console.quiet else None):
        result = train(
            recipe,
            folder,
            resume=resume,
            listeners=[] if console.quiet else [bar],
            say=console.print,
            command=shlex.join(["heedful", *sys.argv[1:]]),
        )
    if result.reason == "interrupted":
        again = again or "go on with: " + shlex.join(["heedful", "train", str(folder), "--resume"])
        typer.echo(f"stopped and saved; {again}", err=True)
        raise typer.Exit(130)
    return result


def report_result(result: "Result", console: "Console") -> None:
    """What came of a run, and how its model is used."""
    by_name = result.scores.by_name if result.scores else {}
    for name, value in (result.scores.values() if result.scores else {}).items():
        entry = by_name[name]
        signature = entry.get("signature", "") if isinstance(entry, dict) else ""
        console.print(f"{name:<18} {value:.4g}   {signature}".rstrip())
    folder = result.directory
    console.print(f"model        {folder}")
    console.print(f"report       {folder / 'report.html'}")
    use = USE.get(result.task, USE["translation"])
    console.print(f"use it       {use} {shlex.quote(str(folder))}")


USE = {  # what is typed to use a model, by its task
    "language_modelling": "heedful generate --prompt 'your text'",
    "masked_lm": "heedful fill --text 'one <mask> is hidden'",
    "classification": "echo 'your text' | heedful classify",
    "denoising": "heedful generate --prompt 'your text'",
    "translation": "echo 'your text' | heedful translate",
}
