"""`heedful demo`: train the recipe dates, then translate with it."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from heedful import pipelines
from heedful.cli.shared import make_console, run_recipe
from heedful.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from heedful.examples.dates import DateExample

    Result = tuple[DateExample, str]  # and the output of the model

_MAX_ERRORS = 5  # of the test that are shown


def demo(
    out: Path = typer.Option(Path("runs/demo"), metavar="DIR", help="Folder of the run."),
) -> None:
    """Train a Transformer on dates in five languages, then translate unseen ones.

    Takes about three minutes on two cores. After Ctrl-C the same command continues; after the
    training it only prints the result, and in a terminal asks for dates of your own.

    Example: heedful demo
    """
    console = make_console()
    if not (out / "scores.json").is_file():
        _train(out, console)
    model = pipelines.load_translator(out)
    if model.metadata.task != "dates":
        raise UserError(
            f"{out} holds a model of the task {model.metadata.task}; give another --out"
        )
    _show_score(out, console)
    results = _read_results(out)
    _show_groups(results, console)
    _show_examples(model, results, console)
    line = f"echo '3rd of May, 2031' | {_command()} translate {shlex.quote(str(out))}"
    console.print("\nTranslate your own:", line, sep="\n  ")
    if sys.stdin.isatty() and sys.stdout.isatty():
        _ask(model, console)


def _train(out: Path, console: "Console") -> None:
    """Train a new run, or continue an interrupted one by the recipe in its folder."""
    from heedful.recipe_files import recorded_recipe
    from heedful.training.folder import is_run

    started = is_run(out) and (out / "recipe.yaml").is_file()
    recipe = recorded_recipe(out if started else Path("dates"))  # with a shipped plugin
    if recipe.task != "dates":
        raise UserError(f"{out} holds a run of the task {recipe.task}; give another --out")
    console.print(
        f"{'Continuing' if started else 'Training'} the recipe dates in {out};"
        " Ctrl-C saves, and the same command continues."
    )
    run_recipe(recipe, out, console, resume=started, again="the same command continues")


def _show_score(out: Path, console: "Console") -> None:
    from heedful.files import read_json
    from heedful.training.events import RunFinished, format_score
    from heedful.training.listeners import read_log

    content = read_json(out / "scores.json")
    score = content["scores"]["exact_match"]
    ends = [event for event in read_log(out / "log.jsonl") if isinstance(event, RunFinished)]
    spent = f", after {ends[-1].seconds / 60:.1f} minutes of training" if ends else ""
    console.print(
        f"\nExact match on {content['num_segments']:,} held-out dates, of years and in styles that"
        f" training never saw: {format_score('exact_match', score['score'])}{spent}"
    )
    if (out / "report.html").is_file():
        console.print(f"Report: {out / 'report.html'}")


def _read_results(out: Path) -> "list[Result]":
    """The test examples of the run, with its outputs."""
    from heedful.data.text_files import read_lines
    from heedful.examples.dates import generate
    from heedful.recipe_files import recorded_recipe

    sizes = recorded_recipe(out).data.generated
    examples = generate(sizes.num_test, seed=sizes.seed, split="test")
    return list(zip(examples, read_lines(out / "test.output.txt"), strict=True))


def _show_groups(results: "list[Result]", console: "Console") -> None:
    """The same score by language and by the part of a date that training did not have."""
    from babel import Locale
    from rich.table import Table

    from heedful.examples.date_styles import LANGUAGES
    from heedful.examples.dates import HELD_OUT_GROUPS

    right: dict[tuple[str, str], list[bool]] = {}
    for example, output in results:
        key = (example.language, example.group)
        right.setdefault(key, []).append(output == example.tgt)
    table = Table("", *HELD_OUT_GROUPS, box=None, pad_edge=False)
    for language in LANGUAGES:
        hits_by_group = [right.get((language, group), []) for group in HELD_OUT_GROUPS]
        table.add_row(
            Locale(language).english_name,
            *(f"{sum(hits)} of {len(hits)}" for hits in hits_by_group),
        )
    console.print(table)


def _show_examples(
    model: "pipelines.Translator", results: "list[Result]", console: "Console"
) -> None:
    """Phrases that are in no training example, and some errors of the test, with translations."""
    from heedful.examples.dates import EXAMPLES_FOR_PEOPLE

    outputs = model.translate([example.src for example in EXAMPLES_FOR_PEOPLE], beam_size=1)
    console.print("\nPhrases that it never saw:")
    _print_results(list(zip(EXAMPLES_FOR_PEOPLE, outputs, strict=True)), console)
    errors = [result for result in results if result[1] != result[0].tgt]
    if errors:
        shown = errors[:_MAX_ERRORS]
        of_them = f"; the first {len(shown)}" if len(errors) > len(shown) else ""
        console.print(f"\nWrong in the test: {len(errors):,} of {len(results):,}{of_them}:")
        _print_results(shown, console)


def _print_results(results: "list[Result]", console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("phrase", "translation", "expected", "", box=None, pad_edge=False)
    for example, output in results:
        mark = Text("ok", "green") if output == example.tgt else Text("wrong", "red")
        table.add_row(example.src, output, example.tgt, mark)
    console.print(table)


def _ask(model: "pipelines.Translator", console: "Console") -> None:
    """Answer dates that are typed, until an empty line."""
    console.print("\nOr type a date here, in any of the five languages (Enter alone ends).")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not text:
            return
        try:
            output: Any = model.generate([text], beam_size=1, return_details=True)[0][0]
        except UserError as error:
            console.print(str(error), style="red")
            continue
        console.print(f"  {output.text}{'' if output.finished else ' (cut off)'}")


def _command() -> str:
    """The shell word that calls this program in the current folder."""
    program = Path(sys.argv[0])
    on_path = shutil.which("heedful")
    if program.name != "heedful" or (on_path and Path(on_path).samefile(program)):
        return "heedful"
    relative = os.path.relpath(program)
    return shlex.quote(str(program) if relative.startswith("..") else relative)
