"""`heedful plan`: the cost of a run before it begins."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import typer

from heedful.cli.flags import Json, Quiet, RecipeName, TrainingFlags
from heedful.cli.lines import bars_on_stderr
from heedful.cli.shared import make_console, print_json

if TYPE_CHECKING:
    from heedful.plan import Plan

_GB = 1e9
_DAY = 86_400  # seconds


def plan(
    *,
    recipe: RecipeName,
    flags: TrainingFlags,
    gpus: int = typer.Option(1, "--gpus", metavar="N", help="Number of GPUs, one process each."),
    gpu: str | None = typer.Option(
        None,
        "--gpu",
        metavar="NAME",
        help="h100, h200, a100, l40s, rtx4090, … or cpu: this machine, whose speed is measured.",
        show_default="cpu",
    ),
    memory: float | None = typer.Option(
        None, "--memory", metavar="GB", help="Memory of a device.", show_default="the device's"
    ),
    parallel: Literal["none", "ddp", "fsdp"] | None = typer.Option(
        None,
        "--parallel",
        metavar="KIND",
        help="Data parallelism: none, ddp (each GPU has the whole net) or fsdp (each has a shard).",
        show_default="the recipe's, or ddp",
    ),
    tokens: int | None = typer.Option(
        None,
        "--tokens",
        metavar="N",
        help="Tokens to train on; no data are read, and inputs have the maximum length.",
        show_default="the recipe's data and steps",
    ),
    utilization: float | None = typer.Option(
        None,
        "--utilization",
        metavar="X",
        help="Share of a GPU's rate of matrix products that training reaches, from 0 to 1.",
        show_default="0.4",
    ),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Compute parameters, FLOPs, memory and time of a run, without training.

    No weights are allocated, so that a model of any size can be planned on any machine. The lengths
    are those of the recipe's data; if its files are missing, every input has the maximum length.

    Example: heedful plan multi30k --gpu l40s

    Example: heedful plan my-gpt.yaml --gpu h100 --gpus 64 --tokens 1000000000000
    """
    from heedful.plan import PlanOptions, make_plan
    from heedful.recipe_files import load_recipe

    options = PlanOptions(
        gpus=gpus,
        gpu=gpu or "cpu",
        memory=None if memory is None else memory * _GB,
        parallel=parallel,
        tokens=tokens,
        utilization=utilization,
    )
    console = make_console(quiet=quiet or json)
    with bars_on_stderr(shown=not quiet):
        result = make_plan(load_recipe(recipe, flags.overrides), options, console.print)
    if json:
        print_json({**asdict(result), "fits": result.fits})
        return
    for name, text in rows(result).items():
        console.print(f"{name:<11}{text}")


def rows(result: "Plan") -> dict[str, str]:
    """The lines of a plan by their names."""
    from rich.filesize import decimal

    total, *parts = result.num_parameters.items()
    sizes = ", ".join(f"{name} {count:,}" for name, count in parts)
    active = ""
    if result.active_parameters != total[1]:
        active = f", {result.active_parameters:,} of them active for a token"
    kinds = {name: size for name, size in asdict(result.memory).items() if size and name != "peak"}
    memory = ", ".join(f"{name.replace('_', ' ')} {decimal(size)}" for name, size in kinds.items())
    fits = "fits in" if result.fits else "DOES NOT FIT in"
    lines = {
        "model": f"{result.architecture}, {total[1]:,} parameters{active} ({sizes})",
        "device": _device(result),
        "FLOPs": f"{_si(result.flops_per_token)} per token: forward "
        f"{_si(result.forward_per_token)}, backward {_si(result.backward_per_token)}",
        "memory": f"{decimal(result.memory_peak)} at the peak, {fits} "
        f"{decimal(int(result.memory_available))}: {memory}",
    }
    if not result.fits:
        lines["change"] = "; ".join(
            f"{change} -> {decimal(peak)}" for change, peak in result.remedies.items()
        )
    if result.gpus > 1:
        lines["sent"] = f"{decimal(result.bytes_sent)} by each rank in a step ({result.parallel})"
    return lines | _time(result)


def _device(result: "Plan") -> str:
    count = "" if result.gpus == 1 else f"{result.gpus:,} x "
    how = "data sheet" if result.device != "cpu" else "measured here, at the shapes of the step"
    device = f"{count}{result.device}, {result.precision}"
    if result.product_rate is None:
        return device
    return f"{device}, {_si(result.product_rate)}FLOP/s of products ({how})"


def _time(result: "Plan") -> dict[str, str]:
    """Lines on steps, time and evenness."""
    from heedful.progress import clock

    steps = "" if result.total_steps is None else f"{result.total_steps:,} steps, "
    time = "not measured: a step needs more memory than this machine has"
    if result.seconds_per_step is not None:
        time = (
            f"{result.seconds_per_step:.3g} s per step ({result.tokens_per_second:,.0f} tokens/s, "
            f"{result.product_share:.0%} of the rate of products)"
        )
    if result.seconds is not None:
        days = f" ({result.seconds / _DAY:,.1f} days)" if result.seconds > _DAY else ""
        time += f", about {clock(result.seconds)}{days} without evaluations"
    lines = {
        "steps": f"{steps}{result.tokens_per_step:,.0f} tokens each, lengths: {result.lengths}",
        "time": time,
    }
    if result.ranks is not None:
        ranks = result.ranks
        lines["ranks"] = (
            f"{ranks.tokens_per_rank:,.0f} tokens each in {ranks.steps:,} steps, at most "
            f"{ranks.max_ratio:.3f} times the mean, {ranks.idle_share:.1%} of the time idle"
        )
    return lines


def _si(value: float) -> str:
    """A number with three digits and the prefix of a power of 1000, as `1.23 T`."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"
