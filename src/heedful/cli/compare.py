"""`heedful compare`: runs side by side."""

from pathlib import Path

import typer

from heedful.cli.flags import Json
from heedful.cli.shared import make_console, print_json


def compare(
    runs: list[Path] = typer.Argument(..., metavar="RUN", help="Folders of two to six runs."),
    json: Json = False,
) -> None:
    """Print scores, sizes and differing settings of runs, finished or not, side by side.

    Example: heedful compare runs/adam runs/muon
    """
    from heedful.training.comparison import Comparison

    comparison = Comparison.read(runs)
    if json:
        scores = {"scores": comparison.scores(), "scores_of": comparison.scored()}
        print_json({"runs": [*comparison.runs], **scores})
        return
    from rich.table import Column, Table

    console = make_console()
    for title, rows in comparison.tables().items():
        columns = (Column(name, justify="right", overflow="fold") for name in comparison.runs)
        table = Table(Column(title, no_wrap=True), *columns, box=None, pad_edge=False)
        for name, cells in rows.items():
            table.add_row(name, *cells)
        console.print(table)
        console.print()
