"""The scales of a run's net by layer, at its checkpoints: weights, states and gradients.

They are measured afterwards, on the same training batches at each checkpoint, so that checkpoints
compare, and training takes no time for them.
"""

from functools import partial
from os import PathLike
from pathlib import Path

import torch

from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.files import as_path
from heedful.insight.scales import LayerScales, RunScales, layer_scales, weight_scales
from heedful.pipelines import choose_device
from heedful.progress import track
from heedful.tasks.start import PreparedRun, checked_task, open_run
from heedful.training.checkpoint import BestModel, Checkpoints
from heedful.training.run_report import RecordedRun
from heedful.training.step import LossNet
from heedful.zoo.saved import WEIGHTS, load_tensors, read_step, set_weights, trainable, weights_of

MAX_CHECKPOINTS = 8
_NUM_BATCHES, _NUM_TOKENS = 2, 1024  # tokens of each batch


def scales_of_run(path: str | PathLike[str], device: str = "auto") -> RunScales:
    """The scales of a run's net by layer, at up to `MAX_CHECKPOINTS` checkpoints.

    The checkpoints are those that the run keeps (`training.average_checkpoints`) and the best
    model. States and gradients are those of the first training batches, without dropout and
    distillation; without the prepared data of the run in the cache they are None.

    Args:
        path: the folder of a run.

    Raises:
        UserError: another folder; a run without checkpoints; damaged files.

    Example: `scales_of_run("runs/dates").gradients`, an array of checkpoints by layers.
    """
    folder = as_path(path, "path")
    recipe = RecordedRun.read(folder).recipe
    files = _checkpoint_files(folder)
    if not files:
        raise UserError(f"{folder} has no checkpoint yet; train further")
    torch_device = choose_device(device)
    run = open_run(checked_task(recipe), folder, torch_device, needs_teacher=False)
    batches = [] if run is None else _batches(run, torch_device)
    weights, measured = [], []
    with track("measuring checkpoints", len(files)) as advance:
        for file in files.values():
            tensors = load_tensors(file)
            weights.append(weight_scales(tensors))
            if run is not None:
                net = run.model.net
                stored = weights_of(net) if run.model.adapter is None else trainable(net)
                set_weights(net, tensors, file, only=stored)
                measured.append(_measure(run, batches))
            advance(1)
    return RunScales.create([*files], weights, measured)


def _checkpoint_files(folder: Path) -> dict[int, Path]:
    """Weight files by step: regular checkpoints and the best model, at most `MAX_CHECKPOINTS`."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=1).regular()
    files = {int(path.name.rpartition("-")[2]): path / WEIGHTS for path in checkpoints}
    best = BestModel(folder).path
    step = read_step(best) if best.is_file() else None
    if step is not None:
        files.setdefault(step, best)
    steps = sorted(files)
    if len(steps) > MAX_CHECKPOINTS:
        last, count = len(steps) - 1, MAX_CHECKPOINTS - 1
        steps = [steps[round(index * last / count)] for index in range(MAX_CHECKPOINTS)]
    return {step: files[step] for step in steps}


def _batches(run: PreparedRun, device: torch.device) -> list[Batch]:
    """The first rows of the first batches of a training epoch."""
    task, data = run.task, run.data
    plan = task.plan_epoch(data)
    batches = [task.collate(data, plan[index]) for index in range(min(_NUM_BATCHES, len(plan)))]
    counts = [max(1, -(-batch.num_tokens // _NUM_TOKENS)) for batch in batches]
    some = [
        next(part for index in range(count) if (part := batch.part(index, count)) is not None)
        for batch, count in zip(batches, counts, strict=True)
    ]
    return [batch.to(device) for batch in some]


def _measure(run: PreparedRun, batches: list[Batch]) -> LayerScales:
    """The scales of the net with its present weights, by the task's loss."""
    task, net = run.task, run.model.net
    loss_net = LossNet(
        net, partial(task.loss, label_smoothing=task.recipe.training.label_smoothing)
    )
    return layer_scales(net, batches, lambda net, batch: loss_net(batch))
