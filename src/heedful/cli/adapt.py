"""`heedful adapt`: a translator fine-tuned on a translation memory."""

import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from heedful.cli.flags import Json, ModelFolder, Quiet
from heedful.cli.help import IN_OUT
from heedful.cli.shared import make_console, print_json, run_recipe

if TYPE_CHECKING:
    from rich.console import Console

    from heedful.adaptation import Adaptation, Adapted
    from heedful.config import Recipe
    from heedful.run import TrainingRun


def _flag(default: Any, name: str, metavar: str | None, help: str, **options: Any) -> Any:
    panel = "Adaptation"
    return typer.Option(default, name, metavar=metavar, help=help, rich_help_panel=panel, **options)


@dataclass(frozen=True)
class AdaptationFlags:
    """Texts besides the memory, the time and the method."""

    general: list[Path] | None = _flag(
        None,
        "--general",
        "FILE",
        "Pairs of the kind that the model was trained on, which it should not forget; repeatable.",
        show_default="the training data of a run, if they are still there",
    )
    valid: list[Path] | None = _flag(
        None,
        "--valid",
        "FILE",
        "Held-out units, which are never trained on; repeatable.",
        show_default="a tenth of the memory, at most 300",
    )
    minutes: float = _flag(10.0, "--minutes", "X", "Time for all, scores included.")
    method: Literal["auto", "full", "lora"] = _flag(
        "auto",
        "--method",
        "auto|full|lora",
        "Train all weights (full), or low-rank updates of them (lora); auto: lora for a model of "
        "more than 50 million parameters.",
    )
    keep: bool | None = _flag(
        None,
        "--keep/--no-keep",
        None,
        "Train with placeholders, tags and numbers as tokens that are kept (data.keep).",
        show_default="as the model was trained",
    )
    settings: list[str] | None = _flag(
        None, "--set", "KEY=VALUE", "Set a key of the training's recipe; repeatable."
    )

    def adaptation(self, memory: list[Path]) -> "Adaptation":
        """The settings of `heedful.adaptation`."""
        from heedful.adaptation import Adaptation
        from heedful.recipe_files import read_settings

        return Adaptation(
            memory=memory,
            general=self.general or (),
            valid=self.valid or (),
            minutes=self.minutes,
            method=self.method,
            keep=self.keep,
            changes=read_settings(self.settings or (), "training.seed=2"),
        )


def adapt(
    *,
    model: ModelFolder,
    memory: list[Path] = typer.Argument(
        ...,
        metavar="MEMORY",
        help="Translation memory: files of .tmx, .xliff, .po, .csv, .tsv or .jsonl, or folders of "
        "them.",
    ),
    flags: AdaptationFlags,
    out: Path = typer.Option(
        ...,
        *("--out", "-o"),
        metavar="DIR",
        help="New model directory.",
        rich_help_panel=IN_OUT,
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Adapt a translator to a translation memory, in minutes on a CPU.

    Fine-tunes the model on the units of the memory and, so that it forgets less, on general
    pairs: those of --general, or the training data of a run. A plan with its time comes first, and
    BLEU and chrF before and after last: on held-out units, none of whose sources is trained on, and
    on held-out general pairs. The weights are a mean of the old and the trained ones, with the
    share that has the smallest held-out loss; if no share is better than the model, DIR is the
    model unchanged, and a line says so.

    The vocabulary stays the model's; characters that it lacks are counted. DIR/run is the training,
    of LoRA the adapter alone. The same command continues after an interruption.

    Example: heedful adapt runs/translation memory.tmx -o adapted

    Example: heedful adapt opus-mt memory.tmx --general news.tsv -o adapted
    """
    from heedful.adaptation import adapt as run_adaptation
    from heedful.cli.lines import bars_on_stderr

    console = make_console(quiet=quiet or json)
    again = f"continue with: {shlex.join(['heedful', *sys.argv[1:]])}"

    def train_stage(recipe: "Recipe", folder: Path, resume: bool) -> "TrainingRun":
        return run_recipe(recipe, folder, console, resume=resume, again=again)

    with bars_on_stderr(shown=not quiet):
        result = run_adaptation(model, flags.adaptation(memory), out, train_stage, console.print)
    if json:
        print_json(asdict(result) | {"directory": str(result.directory)})
    else:
        _report(result, console)


def _report(result: "Adapted", console: "Console") -> None:
    """Print the scores before and after, and a command that runs the model."""
    from heedful.training.events import format_score, score_label

    before, after = dict(result.before or {}), dict(result.after or {})
    lower: list[str] = []
    for name in sorted(after, key=lambda name: name.partition("/")[2], reverse=True):
        metric = name.partition("/")[0]
        values = f"{format_score(metric, before[name])} -> {format_score(metric, after[name])}"
        console.print(f"{score_label(name):<18} {values}")
        if metric != "loss" and before[name] > after[name] and result.share:
            lower.append(score_label(name))
    if lower:
        console.print(
            f"worse than before: {', '.join(lower)}; weights are chosen by held-out loss:"
            " compare outputs before you use them"
        )
    folder = result.directory
    if not result.share:
        console.print(f"nothing was better on held-out text: {folder} is the model unchanged")
    console.print(f"model        {folder}")
    console.print(f"use it       heedful translate {shlex.quote(str(folder))} 'your text'")
