"""`heedful prepare`: the data of a run, before the run."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from heedful.cli.flags import Json, Quiet, RecipeName, TrainingFlags
from heedful.cli.lines import bars_on_stderr
from heedful.cli.shared import make_console, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from heedful.config import Recipe


def prepare(
    *,
    recipe: RecipeName,
    flags: TrainingFlags,
    dry_run: bool = typer.Option(
        False,
        "--dry-run",
        help="Read and tokenize all data, print the counts that a run prints, with the first ten "
        "rows that each of data.filters drops, and write nothing.",
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Read and tokenize the data of a recipe, so that its run begins at once.

    The data are stored in the cache that runs share (heedful cache ls), and every error in them is
    found. Runs with the same data and tokenizer use them, whatever their model. The settings are
    those of heedful train: a run that has the same ones finds its data prepared.

    Example: heedful prepare translation --set data.train.file=my.tsv

    Example: heedful prepare my.yaml --dry-run --set data.filters.max_ratio=3
    """
    from heedful.dry_run import prepare_run
    from heedful.recipe_files import load_recipe

    console = make_console(quiet=quiet or json)
    if dry_run:
        _read_only(load_recipe(recipe, flags.overrides), console, quiet=quiet, json=json)
        return
    with bars_on_stderr(shown=not quiet):
        data = prepare_run(load_recipe(recipe, flags.overrides), console.print)
    splits = {name: len(columns) for name, columns in data.splits.items()}
    if json:
        print_json({"directory": str(data.directory), "rows": splits})
    elif not quiet:
        typer.echo(f"prepared   {data.directory.name} (heedful cache ls)")


def _read_only(recipe: "Recipe", console: "Console", *, quiet: bool, json: bool) -> None:
    """Read and tokenize the data of a recipe, and print the dropped rows and all counts."""
    from heedful.dry_run import count_run

    with bars_on_stderr(shown=not quiet):
        result = count_run(recipe)
    if json:
        reports = {name: asdict(report) for name, report in result.reports.items()}
        rows = {name: report.num_kept for name, report in result.reports.items()}
        print_json({"rows": rows, "reports": reports, **result.filters.to_json()})
        return
    for count in result.filters.filters:
        share = count.num_dropped / max(count.num_seen, 1)
        console.print(
            f"{count.label}: {count.num_dropped:,} of {count.num_seen:,} dropped ({share:.1%})"
        )
        for example in count.examples:
            texts = "  |  ".join(text.replace("\n", " ") for text in example.texts.values())
            console.print(f"  {example.location}: {texts}")
        console.print("")
    for line in result.lines():
        console.print(line)
    if not result.filters.filters:
        console.print("filters    none (data.filters)")
