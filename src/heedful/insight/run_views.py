"""The training of a run over its steps: curves of its log, and the scale of weights by layer."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from heedful.training.checkpoint import Checkpoints
from heedful.training.events import Evaluated, StepDone
from heedful.training.run_report import RecordedRun
from heedful.zoo.saved import WEIGHTS, load_tensors

_MAX_POINTS = 400
_BLOCK = re.compile(r"^(.*?)\.?blocks\.(\d+)\.")


def views_of_run(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The view of a run's training, and notes.

    Raises:
        UserError: not the folder of a run, one without steps, or a damaged one.
    """
    run = RecordedRun.read(path)
    steps = [event for event in run.events if isinstance(event, StepDone)]
    evaluations = [event for event in run.events if isinstance(event, Evaluated)]
    charts = [
        _chart("loss", train=[(e.step, e.nll) for e in steps],
               valid=[(e.step, e.nll) for e in evaluations]),
        _chart("rate", rate=[(e.step, e.learning_rate) for e in steps]),
        _chart("gradient", gradient=[(e.step, e.grad_norm) for e in steps]),
    ]  # fmt: skip
    scales: dict[str, list[tuple[int, float]]] = {}
    notes = ["gradient norms are of all parameters together: a run does not log them by layer"]
    folders = Checkpoints(path / "checkpoints", keep=1).regular()
    for folder in folders:
        step = int(folder.name.rpartition("-")[2])
        for layer, scale in weight_scales(load_tensors(folder / WEIGHTS)).items():
            scales.setdefault(layer, []).append((step, scale))
    if scales:
        charts.append(_chart("weights", **scales))
    if len(folders) < 2:
        notes.append(
            f"weights by layer are of {len(folders)} checkpoints; keep more with "
            "training.average_checkpoints"
        )
    return {"training": [chart for chart in charts if chart["series"]]}, notes


def weight_scales(tensors: Any) -> dict[str, float]:
    """The root mean square of the matrices of each block, and of those outside of blocks."""
    sums: dict[str, list[float]] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.ndim < 2:
            continue
        block = _BLOCK.match(name)
        layer = f"{block[1]} {int(block[2])}" if block else name.split(".")[0]
        values = np.asarray(tensor.double().numpy())
        total = sums.setdefault(layer, [0.0, 0.0])
        total[0] += float((values**2).sum())
        total[1] += values.size
    return {layer: (square / count) ** 0.5 for layer, (square, count) in sums.items()}


def _chart(name: str, **series: list[tuple[int, float]]) -> dict[str, Any]:
    """A chart's series with finite values, thinned to what a screen can show."""
    shown = []
    for label, points in series.items():
        finite = [(step, value) for step, value in points if np.isfinite(value)]
        stride = -(-len(finite) // _MAX_POINTS) or 1
        if finite:
            kept = finite[::stride] + ([finite[-1]] if (len(finite) - 1) % stride else [])
            shown.append({"name": label, "points": [[s, float(f"{v:.6g}")] for s, v in kept]})
    return {"name": name, "series": shown}
