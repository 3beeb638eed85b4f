"""`heedful verify`: properties that every Transformer must have."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import Device, Json
from heedful.cli.shared import print_json
from heedful.errors import UserError

# Tokens of the longest input, padding included, and of the shortest that the checks need.
_LONGEST, _SHORTEST = 10, 8
_WIDTH = 80  # columns of the table


def verify(
    model: Path | None = typer.Argument(
        None, metavar="MODEL", help="Model directory.", show_default="a new tiny Transformer"
    ),
    overfit: bool = typer.Option(
        True, help="Also train a copy on one batch, which takes some seconds."
    ),
    json: Json = False,
    seed: int = typer.Option(0, min=0, max=2**63 - 1, metavar="N", help="Seed of the random ids."),
    device: Device = "auto",
) -> None:
    """Check a model: causality, padding, masks, cache, gradients, tying and more.

    For every kind of model; a check that does not apply is skipped, with the reason. A failure is
    printed with its usual cause. Exit code 1 if any check fails. For your own module:
    heedful.insight.verify(net).

    Example: heedful verify runs/dates

    Example: heedful verify --no-overfit
    """
    from rich.console import Console

    from heedful.insight import verify as check

    length = _LONGEST
    if model is None:
        from heedful.zoo import architecture
        from heedful.zoo.saved import make_config

        sizes = {"d_model": 64, "num_heads": 4, "d_ff": 128, "src_vocab_size": 100}
        stacks = {"num_encoder_layers": 2, "num_decoder_layers": 2, "tgt_vocab_size": 100}
        net = architecture("vaswani2017").build(make_config("vaswani2017", {**sizes, **stacks}))
    else:
        opened = pipelines.load(model, device=device, backend="eager")
        net, length = opened.net, min(_LONGEST, opened.config.max_length)
        if length < _SHORTEST:
            raise UserError(
                f"verify needs inputs of {_SHORTEST} tokens or more, but this model allows {length}"
            )
    report = check(net, fresh=model is None, overfit=overfit, length=length, seed=seed)
    if json:
        print_json(report.to_dict())
    else:
        console = Console()
        console.print(report.table(), width=min(_WIDTH, console.width))
    if not report.ok:
        raise typer.Exit(1)
