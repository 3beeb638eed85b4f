"""`heedful average`: a model with the mean of the weights of several checkpoints."""

from pathlib import Path

import typer

from heedful import pipelines
from heedful.cli.flags import NewFolder, Overwrite, RunFolder
from heedful.errors import UserError


def average(
    *,
    run: RunFolder,
    out: NewFolder,
    checkpoints: list[Path] | None = typer.Option(
        None,
        "--checkpoint",
        "-c",
        metavar="DIR",
        help="Checkpoint or model directory; repeatable.",
        show_default="those of the run",
    ),
    last: int | None = typer.Option(
        None, min=1, metavar="N", help="Only the last N checkpoints.", show_default="all"
    ),
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of checkpoints (Vaswani et al. 2017, sec. 6.1).

    Without --checkpoint: those that the run kept (training.average_checkpoints).

    Example: heedful average runs/translation averaged --last 5
    """
    from heedful.files import MODEL_FILES, check_new, read_object, write_directory
    from heedful.pipelines.base import CONFIG
    from heedful.pipelines.nets import load_net
    from heedful.training.checkpoint import Checkpoints, average_weights
    from heedful.zoo.saved import WEIGHTS

    check_new(out, overwrite=overwrite, owns=MODEL_FILES, source=run)
    model = pipelines.load(run, device="cpu", backend="eager")
    folders = checkpoints or Checkpoints(run / "checkpoints", keep=1).regular()
    if not folders:
        raise UserError(f"{run} keeps no checkpoints; name some with --checkpoint")
    if last and last > len(folders):
        raise UserError(
            f"--last {last} is more than the checkpoints that there are: {len(folders)}"
        )
    folders = folders[-last:] if last else folders
    mean = average_weights([folder / WEIGHTS for folder in folders])
    model.net, _ = load_net(run, read_object(run / CONFIG), "cpu", weights=mean)
    write_directory(out, model.file_writer(out))
    names = ", ".join(folder.name for folder in folders)
    typer.echo(f"{out}: the average of {names}")
