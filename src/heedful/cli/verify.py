"""`heedful verify`: the checklist that a Transformer must pass."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import Json
from heedful.cli.shared import print_json
from heedful.errors import UserError

# The longest text that a net is shown, padding included, and the shortest that tells anything.
_LONGEST, _SHORTEST = 10, 8


def verify(
    model: Path | None = typer.Argument(
        None, help="A model directory, of any kind. Default: a new tiny Transformer."
    ),
    overfit: bool = typer.Option(
        True, help="Also train a copy on one batch, which takes some seconds."
    ),
    json: Json = False,
    seed: int = typer.Option(0, min=0, max=2**63 - 1, help="Seed of the random ids."),
) -> None:
    """Check a model: causality, padding, masks, cache, gradients, tying and more.

    It may be a translator, a language model, a masked language model, a classifier or an encoder
    without a head: checks that mean nothing for it are skipped, with the reason. A failure comes
    with what it usually means. Exit code 1 if any check fails. For your own module:
    heedful.insight.verify(net).

    Example: heedful verify runs/dates
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
        found = pipelines.load(model, backend="eager")
        net, length = found.net, min(_LONGEST, found.config.max_length)
        if length < _SHORTEST:
            raise UserError(
                f"verify shows a net texts of {_SHORTEST} tokens or more, but this model allows "
                f"{length}"
            )
    report = check(net, fresh=model is None, overfit=overfit, length=length, seed=seed)
    if json:
        print_json(report.to_dict())
    else:
        Console().print(report.table())
    if not report.ok:
        raise typer.Exit(1)
