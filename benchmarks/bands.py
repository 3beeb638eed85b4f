"""Loss bands: trains every recipe that has them up to the last one, and compares the losses.

DATA holds multi30k/, tatoeba/, tinyshakespeare/ and sst2/; recipes without data are left out and
marked as such.
"""

import json
import signal
from pathlib import Path

from common import argument_parser, command_line, table, write_results
from heedful.config import Expectation, Recipe
from heedful.files import read_json
from heedful.plugins import SHIPPED
from heedful.recipe_files import load_recipe, read_settings, shipped_recipes
from heedful.run import train
from heedful.training.events import Evaluated, Event
from heedful.training.listeners import read_log
from runs import RUNS

QUICK_RECIPES = ("rhyme",)
# Data for recipes that do not name any.
DATA_OF: dict[str, dict[str, str | list[str]]] = {
    "translation": {
        "data.train.src": "multi30k/train.en.gz",
        "data.train.tgt": "multi30k/train.de.gz",
    },
    "transformer-base": {
        "data.train.src": "multi30k/train.en.gz",
        "data.train.tgt": "multi30k/train.de.gz",
    },
    "denoising": {"data.train.text": ["multi30k/train.en.gz", "multi30k/train.de.gz"]},
    "language-model": {"data.train.text": "multi30k/train.en.gz"},
    "masked-lm": {"data.train.file": "sst2/train.tsv", "data.valid.file": "sst2/dev.tsv"},
    "classification": {"data.train.file": "sst2/train.tsv", "data.valid.file": "sst2/dev.tsv"},
    "classification-student": {
        "data.train.file": "sst2/train.tsv",
        "data.valid.file": "sst2/dev.tsv",
    },
}
# Loss bands of these recipes with these data.
BANDS: dict[str, list[tuple[int, float, float]]] = {
    "translation": [(500, 3.6, 3.95), (1000, 3.15, 3.45)],
    "transformer-base": [(30, 9.2, 9.85)],
    "denoising": [(500, 2.6, 3.15), (1000, 1.65, 1.97)],
    "language-model": [(250, 3.9, 4.4), (500, 3.54, 3.94)],
    "masked-lm": [(545, 6.1, 6.65)],
    "classification": [(217, 0.48, 0.62), (651, 0.48, 0.61)],
    "classification-student": [(217, 0.41, 0.54), (651, 0.39, 0.52)],
}
# Settings for the same steps with less memory.
SPLIT = {"transformer-base": ["training.batch_tokens=5000", "training.gradient_accumulation=10"]}
# Recipes of the teachers of a recipe, by key, each trained up to its last band.
TEACHERS = {
    "classification-student": {"teacher": "classification"},
    "multi30k-distilled": {
        "teacher": "multi30k-en-de",
        "back_translation_models": "multi30k-de-en",
    },
}


def main() -> None:
    """Train, compare, write the page; exits with an error if a loss is outside its band."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the data sets")
    parser.add_argument("--runs", type=Path, default=RUNS / "bands", help="folder of the runs")
    parser.add_argument(
        "--only",
        default="",
        help="recipes to run, comma-separated; the page keeps the results of the others",
    )
    arguments = parser.parse_args()
    names = [name for name in shipped_recipes() if recipe_with_bands(name).expect]
    if arguments.quick:
        names = [name for name in names if name in QUICK_RECIPES]
    if arguments.only:
        names = [name for name in names if name in arguments.only.split(",")]
    data, outside = [], []
    for name in names:
        recipe = recipe_with_bands(name)
        loss_by_step = held_out_losses(name, recipe, arguments.data, arguments.runs)
        for band in recipe.expect:
            loss = loss_by_step.get(band.step) if loss_by_step is not None else None
            verdict = "data absent" if loss_by_step is None else "not evaluated"
            if loss is not None:
                verdict = "within" if band.low <= loss <= band.high else "OUTSIDE"
            if verdict in ("OUTSIDE", "not evaluated"):
                outside.append(f"{name}, step {band.step}: {verdict}")
            data.append({"recipe": name, **band.model_dump(), "loss": loss, "verdict": verdict})
    before = arguments.results / "bands.json"
    if arguments.only and before.is_file():
        others = [band for band in read_json(before)["bands"] if band["recipe"] not in names]
        data = sorted([*others, *data], key=lambda band: band["recipe"])
    rows = [
        [
            band["recipe"],
            f"{band['step']:,}",
            f"{band['low']:g} to {band['high']:g}",
            "–" if band["loss"] is None else f"{band['loss']:.3f}",
            band["verdict"],
        ]
        for band in data
    ]
    write_results(
        "bands",
        "Loss bands of the recipes",
        [
            "The held-out loss of each shipped recipe at a step, with label smoothing if it has "
            "any: its band, and the loss in a run of this script. Data of recipes that name none: "
            f"{', '.join(f'{name}: {file_names(DATA_OF[name])}' for name in sorted(DATA_OF))}. "
            + " ".join(
                f"{name} runs with {', '.join(settings)}." for name, settings in SPLIT.items()
            ),
            table(["recipe", "step", "band", "loss", ""], rows),
        ],
        {"bands": data},
        directory=arguments.results,
        command=command_line({arguments.data: "DATA", arguments.runs: "RUNS"}),
    )
    if outside:
        raise SystemExit("; ".join(outside))


def held_out_losses(name: str, recipe: Recipe, data: Path, runs: Path) -> dict[int, float] | None:
    """Train a recipe up to its last band; returns held-out losses by step, or None without data."""
    settings = [*SPLIT.get(name, [])]
    for key, value in (named_files(recipe) | DATA_OF.get(name, {})).items():
        paths = [data / path for path in ([value] if isinstance(value, str) else value)]
        if not all(path.is_file() for path in paths):
            return None
        settings.append(f"{key}={json.dumps(list(map(str, paths)))}")
    for key, teacher in TEACHERS.get(name, {}).items():
        if held_out_losses(teacher, recipe_with_bands(teacher), data, runs) is None:
            return None
        settings.append(f"distillation.{key}={runs / teacher}")
    last = max(band.step for band in recipe.expect)
    out = runs / name
    if last not in losses_of_run(out):
        started = (out / "recipe.yaml").is_file()
        run_recipe = load_recipe(out) if started else load_recipe(name, read_settings(settings))
        run_recipe = run_recipe.model_copy(update={"expect": recipe.expect})
        ended = train(run_recipe, out, resume=started, on_event=StopAfter(last))
        if ended.reason == "interrupted" and last not in losses_of_run(out):
            raise SystemExit("stopped and saved; run the same command again to continue")
    return losses_of_run(out)


def recipe_with_bands(name: str) -> Recipe:
    """A shipped recipe with its bands, or with those of `BANDS`."""
    recipe, own = load_recipe(name), BANDS.get(name, [])
    bands = [Expectation(step=step, low=low, high=high) for step, low, high in own]
    return recipe.model_copy(update={"expect": bands or recipe.expect})


def file_names(files: dict[str, str | list[str]]) -> str:
    """The names of the files as text."""
    groups = [[value] if isinstance(value, str) else value for value in files.values()]
    return " and ".join(name for group in groups for name in group)


def named_files(recipe: Recipe) -> dict[str, str | list[str]]:
    """The files that a recipe names, except those included in heedful."""
    files: dict[str, str | list[str]] = {}
    for split in ("train", "valid", "test"):
        for key in ("src", "tgt", "file", "text"):
            value = getattr(getattr(recipe.data, split), key)
            if value is not None and not str(value).startswith(SHIPPED):
                files[f"data.{split}.{key}"] = value
    return files


def losses_of_run(out: Path) -> dict[int, float]:
    """Held-out losses by step of a run so far, as in bands; {} if it has not begun."""
    events = read_log(out / "log.jsonl") if (out / "log.jsonl").is_file() else []
    return {
        event.step: event.loss if event.smoothed_loss is None else event.smoothed_loss
        for event in events
        if isinstance(event, Evaluated)
    }


class StopAfter:
    """An event function that stops a run after its evaluation at a step; the run is saved.

    It raises SIGTERM, since shells let background processes ignore SIGINT.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, event: Event) -> None:
        """Interrupt the run after the evaluation."""
        if isinstance(event, Evaluated) and event.step >= self.step:
            signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
