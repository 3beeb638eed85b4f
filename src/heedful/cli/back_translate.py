"""`heedful back-translate`: a model that also learns from text in the target language alone."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful.cli.flags import Json, Quiet, RecipeName, TrainingFlags
from heedful.cli.help import IN_OUT
from heedful.cli.shared import make_console, print_result, report_result, run_recipe

if TYPE_CHECKING:
    from heedful.back_translation import BackTranslation
    from heedful.config import Recipe
    from heedful.run import TrainingRun


def _flag(default: Any, name: str, metavar: str | None, help: str, **options: Any) -> Any:
    panel = "Back-translation"
    return typer.Option(default, name, metavar=metavar, help=help, rich_help_panel=panel, **options)


@dataclass(frozen=True)
class BackTranslationFlags:
    """The monolingual text, the backward model, and the decoding of its translations."""

    mono: list[Path] = _flag(
        ..., "--mono", "FILE", "Text in the target language, a sentence a line; repeatable."
    )
    backward: Path | None = _flag(
        None,
        "--backward",
        "MODEL",
        "Model of the reverse direction.",
        show_default="one is trained by the recipe with its sides exchanged",
    )
    backward_set: list[str] | None = _flag(
        None, "--backward-set", "KEY=VALUE", "Set a key of the backward run alone; repeatable."
    )
    tag: str = _flag(
        "<bt>", "--tag", "TOKEN", "Token before back-translated sources; an empty text: none."
    )
    weight: float = _flag(
        1.0, "--weight", "X", "Passes over the back-translated pairs for each over the others."
    )
    optimize: bool | None = _flag(
        None,
        "--optimize/--no-optimize",
        None,
        "Find the fastest backend of the backward model first; not for --backward.",
        show_default="for more than 20,000 texts",
    )
    beam_size: int | None = _flag(
        None,
        "--beam-size",
        "N",
        "Hypotheses kept by beam search; 1 is greedy search.",
        min=1,
        show_default="the model's, or 5",
    )
    temperature: float | None = _flag(
        None,
        "--temperature",
        "X",
        "Sample the translations, with logits divided by this.",
        show_default="no sampling",
    )
    top_k: int | None = _flag(None, "--top-k", "N", "Sample among the N most probable tokens.")
    top_p: float | None = _flag(
        None, "--top-p", "X", "Sample from the smallest set of tokens with total probability X."
    )

    @property
    def settings(self) -> "BackTranslation":
        """The settings of `heedful.back_translation`."""
        from heedful.back_translation import BackTranslation
        from heedful.recipe_files import read_settings

        names = ("beam_size", "temperature", "top_k", "top_p")
        options = {name: getattr(self, name) for name in names}
        return BackTranslation(
            mono=self.mono,
            tag=self.tag or None,
            weight=self.weight,
            backward_changes=read_settings(self.backward_set or ()),
            backward_model=self.backward,
            decoding={name: value for name, value in options.items() if value is not None},
            optimize=self.optimize,
        )


def back_translate(
    *,
    recipe: RecipeName,
    back_translation: BackTranslationFlags,
    flags: TrainingFlags,
    out: Path = typer.Option(
        ...,
        metavar="DIR",
        help="Folder of all stages; the model is DIR/forward.",
        rich_help_panel=IN_OUT,
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a translator on pairs and on text in the target language alone (back-translation).

    A model of the reverse direction is trained on the pairs (DIR/backward) and translates the text
    (DIR/back.jsonl), by beam search or, with --temperature, by sampling; then the model is trained
    on both (DIR/forward), the translations marked by a tag. The same command continues after an
    interruption at any stage. The settings of the recipe are those of heedful train, for both runs.

    Example: heedful back-translate my.yaml --mono more.de --out bt

    Example: heedful back-translate my.yaml --mono more.de --top-k 10 --out bt
    """
    from heedful.back_translation import back_translate
    from heedful.recipe_files import load_recipe

    console = make_console(quiet=quiet or json)
    again = f"continue with: {shlex.join(['heedful', *sys.argv[1:]])}"

    def train_stage(stage: "Recipe", folder: Path, resume: bool) -> "TrainingRun":
        return run_recipe(stage, folder, console, resume=resume, again=again)

    loaded = load_recipe(recipe, flags.overrides)
    result = back_translate(loaded, back_translation.settings, out, train_stage, console.print)
    print_result(result) if json else report_result(result, console)
