"""`heedful average`: one model from the mean of several checkpoints' weights."""

from pathlib import Path
from typing import Annotated

import typer

from heedful.cli.shared import NewFolder


def average(
    run: Annotated[Path, typer.Argument(help="A run's folder, which says what the model is.")],
    out: NewFolder,
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", "-c", help="A checkpoint or model directory; repeatable."),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Only the last n of the run's own checkpoints.")
    ] = None,
) -> None:
    """Average the weights of checkpoints (Vaswani et al. 2017, sec. 6.1).

    Without --checkpoint: those that the run kept (training.average_last).

    Example: heedful average runs/translation averaged --last 5
    """
    from heedful.errors import UserError
    from heedful.inference import load
    from heedful.training.averaging import average_weights
    from heedful.training.checkpoint import Checkpoints
    from heedful.zoo.names import set_weights
    from heedful.zoo.saved import WEIGHTS

    model = load(run, device="cpu")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{out} exists already; give a new directory")
    folders = checkpoints or Checkpoints(run / "checkpoints", keep=1).regular()
    if not folders:
        raise UserError(f"{run} keeps no checkpoints; name some with --checkpoint")
    folders = folders[-last:] if last else folders
    set_weights(model.net, average_weights([folder / WEIGHTS for folder in folders]), out)
    model.save(out)
    names = ", ".join(folder.name for folder in folders)
    typer.echo(f"{out}: the average of {len(folders)} checkpoints ({names})")
