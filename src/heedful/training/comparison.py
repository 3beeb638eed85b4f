"""Several runs side by side: scores, sizes and differing settings, as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heedful.config.keys import flatten, inline
from heedful.errors import UserError
from heedful.progress import clock
from heedful.training.events import Evaluated, RunFinished, RunStarted, StepDone, format_score
from heedful.training.events import score_label as label
from heedful.training.listeners import REASONS
from heedful.training.run_report import RecordedRun

_MOST_RUNS = 6  # columns that fit a terminal
MISSING = ""  # the cell of a value that a run lacks


@dataclass(frozen=True)
class Comparison:
    """Runs by their names, which are unique, with tables of a cell per run."""

    runs: Mapping[str, RecordedRun]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Comparison":
        """Read the folders of two or more runs; raises UserError as `RecordedRun.read` does."""
        if not 2 <= len(paths) <= _MOST_RUNS:
            raise UserError(f"give 2 to {_MOST_RUNS} runs, not {len(paths)}")
        folders = [path.resolve() for path in paths]
        if len({*folders}) < len(folders):
            raise UserError("a run is given twice; give each once")
        names = [folder.name for folder in folders]
        texts = names if len({*names}) == len(names) else [str(path) for path in paths]
        return cls(dict(zip(texts, map(RecordedRun.read, paths), strict=True)))

    def scores(self) -> dict[str, list[float | None]]:
        """Final scores, else those of the best evaluation, by metric: a value per run."""
        by_run = [_scores(run) for run in self.runs.values()]
        metrics = dict.fromkeys(name for scores in by_run for name in scores)
        return {name: [scores.get(name) for scores in by_run] for name in metrics}

    def scored(self) -> list[str]:
        """The text that the scores of each run are of; not the same for one that has not ended."""
        return [_scored(run) for run in self.runs.values()]

    def tables(self) -> dict[str, dict[str, list[str]]]:
        """Scores, sizes and differing keys of the recipes, as texts."""
        shown = {
            label(name): [MISSING if one is None else format_score(name, one) for one in values]
            for name, values in self.scores().items()
        }
        sizes = [_sizes(run) for run in self.runs.values()]
        return {
            "Scores": shown,
            "Runs": {name: [row[name] for row in sizes] for name in sizes[0]},
            "Differing settings": self._differing_settings(),
        }

    def _differing_settings(self) -> dict[str, list[str]]:
        values = [flatten(run.recipe.values()) for run in self.runs.values()]
        keys = dict.fromkeys(key for row in values for key in row)
        rows = {
            key: [inline(row[key]) if key in row else MISSING for row in values] for key in keys
        }
        unset = {MISSING, inline(None)}  # a key that one task lacks and another leaves null
        return {key: cells for key, cells in rows.items() if len({*cells}) > 1 and {*cells} - unset}


def _scores(run: RecordedRun) -> dict[str, float]:
    final = {
        name: float(entry["score"] if isinstance(entry, Mapping) else entry)
        for name, entry in run.facts.scores.items()
    }
    evaluations = [event for event in run.events if isinstance(event, Evaluated)]
    if final or not evaluations:
        return final
    best = [event for event in evaluations if event.is_best] or evaluations
    return {"loss": best[-1].loss, **best[-1].scores}


def _sizes(run: RecordedRun) -> dict[str, str]:
    starts = [event for event in run.events if isinstance(event, RunStarted)]
    ends = [event for event in run.events if isinstance(event, RunFinished)]
    timed = [e for e in run.events if isinstance(e, StepDone | Evaluated | RunFinished)]
    return {
        "parameters": f"{starts[-1].num_parameters:,}" if starts else MISSING,
        "device": starts[-1].device if starts else MISSING,
        "steps": f"{timed[-1].step:,}" if timed else "0",
        "training time": clock(timed[-1].seconds) if timed else MISSING,
        "end": REASONS[ends[-1].reason] if ends else "not finished",
        "scores of": _scored(run),
    }


def _scored(run: RecordedRun) -> str:
    if not run.facts.scores:
        is_evaluated = any(isinstance(event, Evaluated) for event in run.events)
        return "held-out text, during training" if is_evaluated else MISSING
    ends = [event for event in run.events if isinstance(event, RunFinished)]
    return ends[-1].scored.partition(",")[0] if ends else MISSING
