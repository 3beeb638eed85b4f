"""`heedful verify`: the checklist that a Transformer must pass."""

from pathlib import Path
from typing import Annotated

import typer


def verify(
    model: Annotated[
        Path | None, typer.Argument(help="A model directory. Default: a new tiny Transformer.")
    ] = None,
    overfit: Annotated[
        bool, typer.Option(help="Also train a copy on one batch, which takes some seconds.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random ids.")] = 0,
) -> None:
    """Check a model: causality, padding, masks, cache, gradients, tying and more.

    A failure comes with what it usually means. Exit code 1 if any check fails. For your own module:
    heedful.insight.verify(net).

    Example: heedful verify runs/dates
    """
    import json as json_format

    from rich.console import Console

    from heedful.insight import verify as check

    if model is None:
        from heedful.zoo import vaswani2017

        net = vaswani2017.build(
            vaswani2017.Config(
                100,
                100,
                d_model=64,
                num_heads=4,
                num_encoder_layers=2,
                num_decoder_layers=2,
                d_ff=128,
            )
        )
    else:
        from heedful.bundle import Translator, expect, load

        found = load(model)
        # The checklist is for two stacks: what it says of sources has no meaning for one.
        expect(found, Translator, "verify")
        net = found.net
    report = check(net, fresh=model is None, overfit=overfit, seed=seed)
    if json:
        typer.echo(json_format.dumps(report.to_dict(), indent=2))
    else:
        Console().print(report.table())
    if not report.ok:
        raise typer.Exit(1)
