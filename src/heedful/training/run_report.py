"""The report of a run as a function of its folder, and the runs of a comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError, with_config

from heedful.config import Recipe
from heedful.data.reports import FilterReport
from heedful.errors import UserError
from heedful.recipe_files import recorded_recipe
from heedful.training.events import Event
from heedful.training.folder import MARKER, facts_of_run, is_run
from heedful.training.listeners import read_log
from heedful.training.report import write_report


@with_config(extra="ignore")
@dataclass(frozen=True)
class ReportFacts:
    """The part of a report that is not in the log, as a run notes it in its folder.

    Attributes:
        facts: texts by name, such as versions, machine and command.
        scores: final scores, as `write_report` takes them; empty before the end of the run.
        labels, confusion: of a classifier.
        filters: the training rows that filters dropped (`FilterReport`).
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    labels: Sequence[str] = ()
    confusion: Sequence[Sequence[int]] = ()
    filters: FilterReport = field(default_factory=FilterReport)


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it, finished or not."""

    path: Path
    recipe: Recipe
    events: list[Event]
    facts: ReportFacts

    @classmethod
    def read(cls, path: Path) -> "RecordedRun":
        """Read a run's folder, executing nothing.

        Raises:
            UserError: another folder; one without a log; a plugin of the run that is not loaded.
        """
        if not is_run(path):
            raise UserError(
                f"{path} is not the folder of a run (no {MARKER}); give the one that heedful train "
                "wrote"
            )
        if not (path / "log.jsonl").is_file():
            raise UserError(f"{path} has no log.jsonl yet: no step was taken")
        try:
            facts = TypeAdapter(ReportFacts).validate_python(facts_of_run(path).report)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(f"{path / MARKER} is damaged (report.{key})") from None
        return cls(path, recorded_recipe(path), read_log(path / "log.jsonl"), facts)


def write_run_report(path: Path, out: Path | None = None) -> Path:
    """Write the report of the run in the folder `path`; default of `out`: its report.html.

    Raises:
        UserError: no run, a damaged folder, a file that cannot be written.
    """
    run = RecordedRun.read(path)
    out = out or path / "report.html"
    write_report(
        out,
        title=f"{run.recipe.task.replace('_', ' ')}: {path.resolve().name}",
        events=run.events,
        recipe_yaml=run.recipe.to_yaml(differences=True),
        facts=run.facts.facts,
        final_scores=run.facts.scores,
        labels=run.facts.labels,
        confusion=run.facts.confusion,
        filters=run.facts.filters,
        folder=path,
    )
    return out
