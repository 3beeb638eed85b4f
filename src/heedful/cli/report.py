"""`heedful report`: the page of a run, written again."""

import typer

from heedful.cli.flags import Output, RunFolder


def report(run: RunFolder, output: Output = None) -> None:
    """Write the report of a run again, from its folder; also for an unfinished run.

    The page has curves, scores, samples, checks and the recipe. Without --output it replaces
    report.html in the folder.

    Example: heedful report runs/translation
    """
    from heedful.training.run_report import write_run_report

    typer.echo(write_run_report(run, output))
