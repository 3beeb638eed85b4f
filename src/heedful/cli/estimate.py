"""`heedful train --dry-run`: the size and the cost of a run, without the run."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from heedful.cli.lines import bars_on_stderr
from heedful.cli.shared import make_console, print_json

if TYPE_CHECKING:
    from heedful.config import Recipe
    from heedful.dry_run import RunEstimate


def estimate(recipe: "Recipe", *, quiet: bool, json: bool) -> None:
    """Prepare a run, measure a few steps of it, and print its size and cost."""
    from heedful.dry_run import estimate_run

    console = make_console(quiet=quiet or json)
    with bars_on_stderr(shown=not quiet):
        result = estimate_run(recipe, console.print)
    if json:
        print_json(asdict(result))
        return
    for name, text in rows(result).items():
        console.print(f"{name:<10} {text}")


def rows(result: "RunEstimate") -> dict[str, str]:
    """The lines of an estimate by their names."""
    from rich.filesize import decimal

    from heedful.progress import clock

    total, *parts = result.num_parameters.items()
    sizes = ", ".join(f"{name} {count:,}" for name, count in parts)
    examples = ", ".join(f"{name} {count:,}" for name, count in result.examples.items())
    steps = f"{result.steps_per_epoch:,} per epoch"
    if result.total_steps is not None:
        steps = f"{result.total_steps:,} in {result.epochs:.3g} epochs, {steps}"
    rate = result.tokens_per_step / result.seconds_per_step
    flops = f"{rate * result.flops_per_token / 1e9:,.1f} GFLOP/s"
    time = f"{result.seconds_per_step:.3g} s per step ({rate:,.0f} tokens/s, {flops})"
    if result.seconds is not None:
        time += f", about {clock(result.seconds)} without evaluations"
    return {
        "data": f"{examples} {result.unit}",
        "model": f"{result.architecture}, {total[1]:,} parameters ({sizes})",
        "device": f"{result.device}, {result.precision}",
        "steps": f"{steps}, {result.tokens_per_step:,.0f} tokens each",
        "memory": f"{decimal(result.state_bytes)} of weights, gradients and optimizer state, peak "
        f"{decimal(result.peak_bytes)}",
        "time": time,
    }
