"""The training of a run over its steps: curves of its log, and scales by layer at checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from heedful.insight.notes import Note
from heedful.insight.scales import RunScales
from heedful.training.events import Evaluated, StepDone
from heedful.training.run_report import RecordedRun

_MAX_POINTS = 400


def views_of_run(path: Path, scales: RunScales | None = None) -> tuple[dict[str, Any], list[Note]]:
    """The view of a run's training, and notes.

    Args:
        scales: of its checkpoints; None: only the curves of its log are shown.

    Raises:
        UserError: not the folder of a run, one without steps, or a damaged one.
    """
    run = RecordedRun.read(path)
    steps = [event for event in run.events if isinstance(event, StepDone)]
    evaluations = [event for event in run.events if isinstance(event, Evaluated)]
    charts = [
        _chart("loss", train=[(e.step, e.nll) for e in steps],
               valid=[(e.step, e.loss) for e in evaluations]),
        _chart("rate", rate=[(e.step, e.learning_rate) for e in steps]),
        _chart("gradient", gradient=[(e.step, e.grad_norm) for e in steps]),
    ]  # fmt: skip
    notes = []
    if scales is not None:
        tables = {"gradients": scales.gradients, "weights": scales.weights, "states": scales.states}
        charts += [
            _layer_chart(f"scale_{name}", scales, table)
            for name, table in tables.items()
            if table is not None
        ]
        if scales.states is None:
            notes.append(Note("note_no_data"))
        if len(scales.steps) < 3:
            notes.append(Note("note_checkpoints", (len(scales.steps),)))
    return {"training": [chart for chart in charts if chart["series"]]}, notes


def _chart(name: str, **series: list[tuple[int, float]]) -> dict[str, Any]:
    """A chart's series with finite values, thinned to what a screen can show."""
    shown = []
    for label, points in series.items():
        finite = [(step, value) for step, value in points if np.isfinite(value)]
        stride = -(-len(finite) // _MAX_POINTS) or 1
        if finite:
            points = finite[::stride] + ([finite[-1]] if (len(finite) - 1) % stride else [])
            shown.append({"name": label, "points": [[s, _short(v)] for s, v in points]})
    return {"name": name, "series": shown}


def _layer_chart(name: str, scales: RunScales, table: Float[np.ndarray, "C L"]) -> dict[str, Any]:
    """A chart over the layers that have values, with a series for each checkpoint."""
    columns = np.flatnonzero(np.isfinite(table).any(0))
    series = [
        {
            "name": step,
            "points": [[x, _short(v)] for x, v in enumerate(row[columns]) if np.isfinite(v)],
        }
        for step, row in zip(scales.steps, table, strict=True)
    ]
    layers = [scales.layers[column] for column in columns]
    return {"name": name, "layers": layers, "series": series}


def _short(value: float) -> float:
    return float(f"{value:.6g}")
