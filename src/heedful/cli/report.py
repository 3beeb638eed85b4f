"""`heedful report`: the page of a run, written again."""

from pathlib import Path

import typer

from heedful.cli.flags import RunFolder
from heedful.cli.help import IN_OUT
from heedful.errors import UserError


def report(
    run: RunFolder,
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="Write to this HTML file.",
        show_default="report.html in RUN",
        rich_help_panel=IN_OUT,
    ),
) -> None:
    """Write the report of a run again, from its folder; also for an unfinished run.

    The page has curves, scores, samples, checks and the recipe.

    Example: heedful report runs/translation
    """
    from heedful.training.run_report import write_run_report

    page = run / "report.html"
    if output is None and page.is_symlink():  # perhaps made by whom the folder came from
        raise UserError(f"{page} is a link to another place; give --output FILE")
    typer.echo(write_run_report(run, output))
