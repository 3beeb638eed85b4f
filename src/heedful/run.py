"""One training run, from a recipe to a model.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the complete recipe, the log, the checkpoints and, at the end, scores and a
report. Prepared data are in a cache that runs share.
"""

import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

import heedful
from heedful import extras, plugins, processes
from heedful.config import Recipe, parse_recipe
from heedful.data.file_names import store_stdin
from heedful.data.prepared import cache_folder
from heedful.errors import UserError, describe, error_line
from heedful.files import as_path
from heedful.pipelines import (
    choose_device,
    load,
    parameter_count,
)
from heedful.progress import PrintLine, has_display, use_display
from heedful.recipe_changes import changed_settings, check_changes, check_started
from heedful.recipe_files import load_recipe, recorded_recipe, with_absolute_paths
from heedful.tasks.cores import Follower, fastest_cores, follow_cores
from heedful.tasks.in_memory import InMemoryData, TrainingData
from heedful.tasks.scoring import FinalScores
from heedful.tasks.session import Session, prepare_session, start_session
from heedful.tasks.start import checked_task, follow_parts
from heedful.tasks.task import Task
from heedful.training.checkpoint import average_weights
from heedful.training.display import RunDisplay
from heedful.training.events import (
    Event,
    EventCallback,
    Listener,
    RunFinished,
    RunStarted,
    StopReason,
)
from heedful.training.folder import RunFolder, can_resume, save_recipe
from heedful.training.loggers import JsonlLog, TensorBoardLog, read_log, session_starts
from heedful.training.run_report import write_run_report
from heedful.training.verdict import ExpectationListener, general_verdicts
from heedful.zoo.names import set_weights
from heedful.zoo.saved import WEIGHTS

_SPLITS = {"test": "test text", "valid": "held-out text"}


@dataclass(frozen=True)
class TrainingRun:
    """A session of training that has ended, and its model.

    Attributes:
        directory: the run's folder, itself a model directory. A temporary folder, where `train` had
            no `out`, is removed when this object is no longer used; `model` does not need it.
        task: the name of the recipe's task.
        reason: the reason why the session ended.
        scores: of the final model on the test split, or on the validation split of a run without
            one; None for an interrupted run.
    """

    directory: Path
    task: str
    reason: StopReason
    scores: FinalScores | None
    _device: str = field(default="auto", repr=False)
    _temporary: "TemporaryDirectory[str] | None" = field(default=None, repr=False)

    @cached_property
    def model(self) -> Any:
        """The run's model, as `heedful.load(run.directory)` opens it; the best so far, if the run
        was interrupted."""
        return load(self.directory, device=self._device)


def train(
    recipe: Recipe | str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    data: TrainingData | None = None,
    resume: bool = False,
    changes: Collection[str] = (),
    on_event: Callable[[Event], None] | None = None,
    print_line: PrintLine | None = None,
    progress: bool = True,
    command: str = "heedful.train",
    follower: Follower | None = None,
) -> TrainingRun:
    """Train by a recipe, and return the run with its model.

    In processes that torchrun started all call it alike, and train together; the main one (rank 0)
    writes, displays and calls `on_event`. After a restart by torchrun the run continues.

    Args:
        recipe: a `Recipe`, the path of one, or the name of a shipped one.
        out: the run's folder; None: a temporary one, which is removed with the returned run: keep
            the model by `run.model.save(folder)`.
        data: rows to train on, in place of the recipe's files: a list of texts, of pairs or of
            (text, label), a `datasets.Dataset`, or a mapping from split to rows
            (`InMemoryData.convert`). They are stored in the run's folder.
        resume: continue from the newest checkpoint in `out`.
        changes: keys that may differ from the run's recipe although later steps depend on them;
            the differences are noted in the log and the report.
        on_event: is called with every event of the run (`heedful.training.events`), besides the
            log and TensorBoard's files. An exception that it raises ends the run.
        print_line: is called with lines on data and model; default: they are part of the display.
        progress: display the progress on standard error, unless a display is in use
            (`heedful.progress.use_display`).
        command: the command line, for the report.
        follower: with `training.parallel: auto` on a CPU, the run may use fewer threads, or start
            further Python processes, if that is faster; each of these calls this function of a
            module with the arguments of `follow`, as the command does. None: it trains in this
            process, and leaves torch's threads as they are.

    Raises:
        UserError: an error in recipe, data or folder; a loss or gradient that is not finite;
            another process of the run has ended.

    Example: `heedful.train("translation", "runs/mine", data=[("A dog.", "Ein Hund.")]).model`
    """
    with processes.join():
        arguments = (data, resume, changes, on_event, print_line, progress, command, follower)
        return _train(recipe, out, *arguments)


def follow(recipe: Mapping[str, Any], out: str, resume: bool) -> None:
    """Train as a further process of a run on a CPU, which another process has started.

    Args:
        recipe: as JSON.
        out: the run's folder.
        resume: the run continues from a checkpoint.
    """
    with processes.join():
        task, device = checked_task(parse_recipe(recipe)), torch.device("cpu")
        if follow_cores(task, follow_parts(task, Path(out), device), Path(out)):
            _train_beside(task, Path(out), device, resume)


def _train(
    recipe: Recipe | str | PathLike[str],
    out: str | PathLike[str] | None,
    data: TrainingData | None,
    resume: bool,
    changes: Collection[str],
    on_event: Callable[[Event], None] | None,
    print_line: PrintLine | None,
    progress: bool,
    command: str,
    follower: Follower | None,
) -> TrainingRun:
    """`train` among its processes."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    if out is None and resume:
        raise UserError("to resume a run, give its folder as out")
    if on_event is not None and not callable(on_event):
        raise UserError(f"on_event must be a function of an event, not {describe(on_event)}")
    group = processes.current()
    if out is None and group.count > 1:
        raise UserError("a run of several processes needs a folder that they share: give out")
    temporary = TemporaryDirectory(prefix="heedful-") if out is None else None
    out = as_path(temporary.name if temporary is not None else out or "", "out")
    recipe, rows = with_absolute_paths(store_stdin(recipe, cache_folder())), None
    if data is not None:
        columns = plugins.task.get(recipe.task).row_columns
        rows = InMemoryData.convert(recipe, columns, data, out)
        recipe = rows.recipe
    is_temporary = temporary is not None
    if processes.is_restarted() and group.from_main(lambda: can_resume(out)):
        resume = True
    if not group.is_main:
        on_event, print_line, progress = None, None, False
    try:
        with _displayed(on_event, print_line, progress) as (listeners, print_line):
            settings = (resume, changes, listeners, print_line, command, follower)
            reason, scores = _train_in(out, recipe, rows, *settings, is_temporary=is_temporary)
    except UserError as error:  # the files of rows in memory are not the caller's
        raise error if rows is None else UserError(rows.name_rows(str(error))) from None
    return TrainingRun(out, recipe.task, reason, scores, recipe.training.device, temporary)


@contextmanager
def _displayed(
    on_event: Callable[[Event], None] | None, print_line: PrintLine | None, progress: bool
) -> Iterator[tuple[list[Listener], PrintLine]]:
    """The listeners of a run and the function that prints its lines.

    With `progress` they include a display, unless the caller displays progress already.
    """
    listeners: list[Listener] = [] if on_event is None else [EventCallback(on_event)]
    if not progress or has_display():
        yield listeners, print_line or (lambda line: None)
        return
    display = RunDisplay(Console(stderr=True))
    try:
        with use_display(display.track):
            yield [display, *listeners], print_line or display.print_line
    finally:
        display.close()


def _train_in(
    out: Path,
    recipe: Recipe,
    rows: InMemoryData | None,
    resume: bool,
    changes: Collection[str],
    listeners: Sequence[Listener],
    print_line: PrintLine,
    command: str,
    follower: Follower | None,
    *,
    is_temporary: bool,
) -> tuple[StopReason, FinalScores | None]:
    """Train in the folder `out`, and write its report; arguments as in `train`."""
    group = processes.current()
    device = group.device(choose_device(recipe.training.device))
    if not group.is_main:
        return _train_beside(checked_task(recipe), out, device, resume)
    with RunFolder(out, resume=resume) as folder, ExitStack() as cores:
        with folder.undone_on_error():
            if resume:
                check_changes(recorded_recipe(out / "recipe.yaml"), recipe, changes, str(out))
                for event in session_starts(out / "log.jsonl")[-1:]:
                    check_started(event.recipe, recipe, str(out))
            task = checked_task(recipe)
            parts = prepare_session(task, rows, folder, device, resume, print_line)
            if device.type == "cpu":
                use = fastest_cores(task, parts, folder, follower, resume, print_line)
                cores.enter_context(use)
            processes.current().wait()
            run = start_session(task, out, lambda *_: parts, device, resume)
            if not run.trainer.trained.evaluates_in_all:
                print_line(
                    "           the main process evaluates alone: the whole weights take more than "
                    "half the memory of a process"
                )
            step = (run.resumed_from or 0) if resume else None
            logs: list[Listener] = [JsonlLog(out / "log.jsonl", resume_step=step)]
            save_recipe(recipe, out / "recipe.yaml")
            if recipe.training.tensorboard:
                logs.append(TensorBoardLog(out / "tensorboard", resume_step=step))
            expectations = ExpectationListener(recipe.expect, print_line)
            run.trainer.is_temporary = is_temporary
            run.trainer.listeners = [*listeners, *logs, expectations]
        facts = {
            "facts": _report_facts(run, device, command),
            "filters": run.data.filters.to_json(),
        }
        folder.update_facts(report=facts)
        reason, scores = _train_and_score(run, out, print_line)
        if scores is not None:
            result = {"labels": [*scores.labels], "confusion": [[*row] for row in scores.confusion]}
            folder.update_facts(report={**facts, "scores": scores.by_name, **result})
    events = read_log(out / "log.jsonl")
    for verdict in general_verdicts(events, None if is_temporary else out) if scores else ():
        print_line(str(verdict))
    if problem := _write_report(out):
        print_line(f"no report was written: {problem}; then: heedful report {out}")
    return reason, scores


def _write_report(out: Path) -> str | None:
    """Write the report of a run that has ended; returns why there is none, or None."""
    if packages := extras.missing_packages("report"):
        return f"it needs {packages}"
    try:
        write_run_report(out)
    except Exception as error:  # of a chart, for example; the run is complete
        return error_line(error)
    return None


def _train_beside(
    task: Task, out: Path, device: torch.device, resume: bool
) -> tuple[StopReason, FinalScores | None]:
    """Train in a process that is not the main one, once that has prepared the run."""
    processes.current().wait()
    return _train_and_score(start_session(task, out, follow_parts, device, resume), out, print)


def _train_and_score(
    run: Session, out: Path, print_line: PrintLine
) -> tuple[StopReason, FinalScores | None]:
    """Train to the end of the session; unless it was interrupted, score the final model."""
    trainer, group, state = run.trainer, processes.current(), run.trainer.state
    try:
        if group.is_main:
            trainer.emit(_started(run, out))
        reason = trainer.run()
        scores, values, scored = None, {}, ""
        if reason != "interrupted":
            scores, scored = _score(run, out, print_line)
            values = scores.values()
        trainer.emit(RunFinished(state.step, state.seconds, reason, state.best, values, scored))
    finally:
        for listener in trainer.listeners:
            listener.close()
    return reason, scores


def _started(run: Session, out: Path) -> RunStarted:
    """The first event of a session."""
    data, recipe = run.data, run.task.recipe
    training = recipe.training.model_copy(update={"precision": run.trainer.precision})
    recipe = recipe.model_copy(update={"training": training})
    return RunStarted(
        recipe=recipe.model_dump(mode="json"),
        num_parameters=parameter_count(run.model.net),
        num_train=run.task.split_size(data, "train"),
        num_valid=run.task.split_size(data, "valid"),
        device=_device_name(run.model.device),
        total_steps=run.total_steps,
        resumed_from=run.resumed_from,
        changes=_changes_on_resume(out / "log.jsonl", recipe) if run.resumed_from else [],
        unit=run.task.unit,
        unigram_entropy=run.unigram_entropy,
    )


def _device_name(device: torch.device) -> str:
    count = processes.current().count
    return str(device) if count == 1 else f"{count} processes on {device.type}"


def _score(run: Session, out: Path, print_line: PrintLine) -> tuple[FinalScores, str]:
    """The scores of the final model, and the names of the split and of the model.

    All processes compute them together; only the main one writes into the folder of the run.
    """
    trainer, group = run.trainer, processes.current()
    scored = f"{_SPLITS[run.data.final]}, {_choose_final(run)}"
    if group.is_main:
        print_line(f"scoring: {scored}")

    def compute() -> FinalScores:
        with nullcontext(out) if group.is_main else TemporaryDirectory() as folder:
            return run.task.compute_final_scores(run.model, run.data, Path(folder))

    try:
        scores = trainer.evaluate_together(compute)
    except Exception as error:  # of a metric, of a plugin's task, of a process
        if group.is_main:
            print_line(
                f"no scores: {error_line(error)}; the model and its checkpoints are complete"
            )
        return FinalScores({}), scored
    assert scores is not None, "signals end the process here"
    return scores, scored


def _changes_on_resume(log: Path, recipe: Recipe) -> list[str]:
    """The settings that steps depend on and that differ from those of the last session."""
    starts = session_starts(log)
    return changed_settings(starts[-1].recipe, recipe) if starts else []


def _choose_final(run: Session) -> str:
    """Write the final model: the average of the checkpoints if it is better than the best one.

    Called by all processes; the main one has the weights, and writes.

    Returns:
        A description of the weights.
    """
    net, trainer, group = run.model.net, run.trainer, processes.current()
    files = [path / WEIGHTS for path in group.from_main(trainer.checkpoints.to_average)]
    if run.task.recipe.training.average_checkpoints > 1 and len(files) > 1:
        average = average_weights(files) if group.is_main else {}
        if group.is_main:
            set_weights(net, average, run.best.path, trainer.stored_weights(net))
        evaluation = trainer.evaluate_together(lambda: run.task.evaluate(run.model, run.data))
        assert evaluation is not None, "signals end the process here"
        if group.is_main and evaluation.value > run.best.value:
            step, source = trainer.state.step, f"the mean of {len(files)} checkpoints"
            run.best.save(average, value=evaluation.value, step=step, source=source)

    def write_final() -> str:
        weights, source = run.best.write_final()
        set_weights(net, weights, run.best.path, trainer.stored_weights(net))
        return source

    return group.from_main(write_final)


def _report_facts(run: Session, device: torch.device, command: str) -> dict[str, str]:
    return {
        "command": command,
        "parameters": f"{parameter_count(run.model.net):,}",
        "training data": run.data.splits["train"].report.summary(),
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}, threads: {torch.get_num_threads()}",
        "device": f"{_device_name(device)}, {run.trainer.precision}",
    }
