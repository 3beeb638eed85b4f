"""One training run, from a recipe to a model.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the complete recipe, the log, the checkpoints and, at the end, scores and a
report. Prepared data are in a cache that runs share.
"""

import platform
from collections.abc import Callable, Collection, Iterator
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
from heedful.config import Recipe
from heedful.errors import UserError, describe, error_line
from heedful.evaluation.likelihood import unigram_entropy
from heedful.files import as_path
from heedful.pipelines import (
    choose_device,
    load,
    parameter_count,
)
from heedful.progress import PrintLine, has_display, use_display
from heedful.recipe_changes import changed_settings, check_changes, check_started
from heedful.recipe_files import load_recipe, recorded_recipe, with_absolute_paths
from heedful.tasks.in_memory import InMemoryData, TrainingData
from heedful.tasks.scoring import FinalScores
from heedful.tasks.start import (
    PreparedRun,
    checked_task,
    make_trainer,
    open_run_beside,
    start_run,
)
from heedful.tasks.task import Task
from heedful.tasks.threads import fastest_threads
from heedful.training.checkpoint import BestModel, average_weights
from heedful.training.events import (
    Event,
    Listener,
    RunFinished,
    RunStarted,
    StopReason,
)
from heedful.training.folder import RunFolder, can_resume, save_recipe
from heedful.training.listeners import (
    JsonlLog,
    RunDisplay,
    TensorBoardLog,
    read_log,
    session_starts,
)
from heedful.training.run_report import write_run_report
from heedful.training.trainer import Trainer
from heedful.training.verdict import ExpectationListener, general_verdicts
from heedful.zoo.saved import WEIGHTS, set_weights

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

    >>> import heedful
    >>> run = heedful.train("copy", "runs/copy")  # doctest: +SKIP
    >>> run.scores, run.reason  # doctest: +SKIP
    >>> run.model.save("copier")  # doctest: +SKIP
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
    tunes_threads: bool = False,
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
        tunes_threads: with `training.parallel: auto` on a CPU, a long run measures whether fewer
            threads are faster, and uses them, as the command does; False: it leaves torch's threads
            as they are.

    Raises:
        UserError: an error in recipe, data or folder; a loss or gradient that is not finite;
            another process of the run has ended.

    >>> import heedful
    >>> pairs = [(f"{a} {b}", f"{b} {a}") for a in "abcdefgh" for b in "abcdefgh"]
    >>> keys = {"training.max_steps": 2, "tokenizer.kind": "word", "tokenizer.vocab_size": None}
    >>> recipe = heedful.load_recipe("translation", keys)
    >>> run = heedful.train(recipe, data=pairs, progress=False)
    >>> output = run.model.translate("a b")
    """
    with processes.join() as group, ExitStack() as stack:
        # Check the arguments, the folder and the recipe.
        recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        _check_arguments(out, resume, on_event)
        temporary = TemporaryDirectory(prefix="heedful-") if out is None else None
        out = as_path(temporary.name if temporary is not None else out or "", "out")
        recipe = with_absolute_paths(recipe)
        rows = None if data is None else _rows_of(recipe, data, out)
        if rows is not None:
            recipe = rows.recipe
            stack.enter_context(rows.named_in_errors())
        resume = resume or (processes.is_restarted() and group.from_main(lambda: can_resume(out)))
        device = group.device(choose_device(recipe.training.device))
        if not group.is_main:
            return _train_beside(checked_task(recipe), out, device, resume)
        listeners, print_line = stack.enter_context(_displayed(on_event, print_line, progress))
        folder = stack.enter_context(RunFolder(out, resume=resume))
        with folder.undone_on_error():
            if resume:
                _check_same_run(out, recipe, changes)
            task = checked_task(recipe)

            # Prepare data and model, also for other processes.
            run = start_run(task, rows, folder, device, resume, print_line)
            if tunes_threads and device.type == "cpu":
                stack.enter_context(fastest_threads(run, folder, resume, print_line))
            processes.current().wait()

            # Build the trainer.
            trainer = make_trainer(run, out, device, resume, is_temporary=temporary is not None)
            writers = _listeners(stack, trainer, recipe, out, resume, print_line)
            trainer.listeners = [*listeners, *writers]
            started = _started(run, trainer, out)
        folder.update_facts(report=(report := _report_of(run, trainer, device, command)))

        # Loop: optimizer steps, evaluations, checkpoints.
        trainer.emit(started)
        reason = trainer.run()

        # Score the final model; that of an interrupted run is not final.
        is_final = reason != "interrupted"
        scores, scored = _score(run, trainer, out, print_line) if is_final else (None, "")
        trainer.emit(_finished(trainer, reason, scores, scored))
        if scores is not None:
            folder.update_facts(report=report | scores.to_json())
        _conclude(out, scores, print_line, is_temporary=temporary is not None)
        return TrainingRun(out, recipe.task, reason, scores, recipe.training.device, temporary)


def _train_beside(task: Task, out: Path, device: torch.device, resume: bool) -> TrainingRun:
    """Build, loop and score in a process beside the main one, once that has prepared the run."""
    processes.current().wait()
    run = open_run_beside(task, out, device)
    trainer = make_trainer(run, out, device, resume)
    reason = trainer.run()
    scores = None if reason == "interrupted" else _score(run, trainer, out, print)[0]
    return TrainingRun(out, task.recipe.task, reason, scores, task.recipe.training.device)


def _check_arguments(out: object, resume: bool, on_event: object) -> None:
    """Raise UserError for arguments of `train` that do not fit each other."""
    if out is None and resume:
        raise UserError("to resume a run, give its folder as out")
    if on_event is not None and not callable(on_event):
        raise UserError(f"on_event must be a function of an event, not {describe(on_event)}")
    if out is None and processes.current().count > 1:
        raise UserError("a run of several processes needs a folder that they share: give out")


def _rows_of(recipe: Recipe, data: TrainingData, out: Path) -> InMemoryData:
    """Rows from memory as files of the run."""
    return InMemoryData.convert(recipe, plugins.task.get(recipe.task).row_columns, data, out)


def _check_same_run(out: Path, recipe: Recipe, changes: Collection[str]) -> None:
    """Raise UserError for a recipe that differs from that of a run to resume, but for `changes`."""
    check_changes(recorded_recipe(out / "recipe.yaml"), recipe, changes, str(out))
    for event in session_starts(out / "log.jsonl")[-1:]:
        check_started(event.recipe, recipe, str(out))


@contextmanager
def _displayed(
    on_event: Callable[[Event], None] | None, print_line: PrintLine | None, progress: bool
) -> Iterator[tuple[list[Listener], PrintLine]]:
    """The listeners of a run and the function that prints its lines.

    With `progress` they include a display, unless the caller displays progress already.
    """
    listeners: list[Listener] = [] if on_event is None else [on_event]
    if not progress or has_display():
        yield listeners, print_line or (lambda line: None)
        return
    display = RunDisplay(Console(stderr=True))
    try:
        with use_display(display.track):
            yield [display.on, *listeners], print_line or display.print_line
    finally:
        display.close()


def _listeners(
    stack: ExitStack,
    trainer: Trainer,
    recipe: Recipe,
    out: Path,
    resume: bool,
    print_line: PrintLine,
) -> list[Listener]:
    """Write the recipe of a resumed session, and return the listeners that write its log, until
    `stack` closes it, and compare it with the recipe's bands."""
    if not trainer.trained.evaluates_in_all:
        print_line(
            "           the main process evaluates alone: the whole weights take more than "
            "half the memory of a process"
        )
    step = (trainer.resumed_from or 0) if resume else None
    log = JsonlLog(out / "log.jsonl", resume_step=step)
    stack.callback(log.close)
    listeners: list[Listener] = [log.on]
    if resume:
        last = recipe.training.max_steps
        if last is not None and step is not None and step > last:
            raise UserError(
                f"training.max_steps is {last:,}, but the run in {out} has {step:,} steps; give "
                "more than that to continue it"
            )
        save_recipe(recipe, out / "recipe.yaml")
    if recipe.training.tensorboard:
        board = TensorBoardLog(out / "tensorboard", resume_step=step)
        stack.callback(board.close)
        listeners.append(board.on)
    if recipe.expect:
        listeners.append(ExpectationListener(recipe.expect, print_line).on)
    return listeners


def _started(run: PreparedRun, trainer: Trainer, out: Path) -> RunStarted:
    """The first event of a session."""
    data, recipe = run.data, run.task.recipe
    training = recipe.training.model_copy(update={"precision": trainer.precision})
    recipe = recipe.model_copy(update={"training": training})
    batches = (run.epochs.load_batch(0, item) for item in run.epochs.plan_epoch(0))
    starts = session_starts(out / "log.jsonl") if trainer.resumed_from else []
    return RunStarted(
        recipe=recipe.model_dump(mode="json"),
        num_parameters=parameter_count(run.model.net),
        num_train=run.task.split_size(data, "train"),
        num_valid=run.task.split_size(data, "valid"),
        device=_device_name(trainer.updates.device),
        total_steps=run.epochs.total_steps(),
        resumed_from=trainer.resumed_from,
        changes=changed_settings(starts[-1].recipe, recipe) if starts else [],
        unit=run.task.unit,
        unigram_entropy=unigram_entropy(batch.targets for batch in batches),
    )


def _finished(
    trainer: Trainer, reason: StopReason, scores: FinalScores | None, scored: str
) -> RunFinished:
    """The last event of a session."""
    values, state = {} if scores is None else scores.values(), trainer.state
    return RunFinished(state.step, state.seconds, reason, state.best, values, scored)


def _device_name(device: torch.device) -> str:
    count = processes.current().count
    return str(device) if count == 1 else f"{count} processes on {device.type}"


def _score(
    run: PreparedRun, trainer: Trainer, out: Path, print_line: PrintLine
) -> tuple[FinalScores, str]:
    """The scores of the final model, and the names of the split and of the model.

    All processes compute them together; only the main one writes into the folder of the run.
    """
    group = processes.current()
    scored = f"{_SPLITS[run.data.final]}, {_choose_final(run, trainer, out)}"
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


def _choose_final(run: PreparedRun, trainer: Trainer, out: Path) -> str:
    """Write the final model: the average of the checkpoints if it is better than the best one.

    Called by all processes; the main one has the weights, and writes.

    Returns:
        A description of the weights.
    """
    net, best, group = run.model.net, BestModel(out), processes.current()
    files = [path / WEIGHTS for path in group.from_main(trainer.checkpoints.to_average)]
    if run.task.recipe.training.average_checkpoints > 1 and len(files) > 1:
        average = average_weights(files) if group.is_main else {}
        if group.is_main:
            set_weights(net, average, best.path, trainer.stored_weights(net))
        evaluation = trainer.evaluate_together(lambda: run.task.evaluate(run.model, run.data))
        assert evaluation is not None, "signals end the process here"
        if group.is_main and evaluation.value > best.value:
            step, source = trainer.state.step, f"the mean of {len(files)} checkpoints"
            best.save(average, value=evaluation.value, step=step, source=source)

    def write_final() -> str:
        weights, source = best.write_final()
        set_weights(net, weights, best.path, trainer.stored_weights(net))
        return source

    return group.from_main(write_final)


def _report_of(
    run: PreparedRun, trainer: Trainer, device: torch.device, command: str
) -> dict[str, Any]:
    """Facts on data, net and machine for the report of a run (`ReportFacts`)."""
    facts = {
        "command": command,
        "parameters": f"{parameter_count(run.model.net):,}",
        "training data": run.data.splits["train"].report.summary(),
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}, threads: {torch.get_num_threads()}",
        "device": f"{_device_name(device)}, {trainer.precision}",
    }
    return {"facts": facts, "filters": run.data.filters.to_json()}


def _conclude(
    out: Path, scores: FinalScores | None, print_line: PrintLine, *, is_temporary: bool
) -> None:
    """Print the checks of a run that has ended, and write its report."""
    events = read_log(out / "log.jsonl")
    for verdict in general_verdicts(events, None if is_temporary else out) if scores else ():
        print_line(str(verdict))
    problem = None
    if packages := extras.missing_packages("report"):
        problem = f"it needs {packages}"
    else:
        try:
            write_run_report(out)
        except Exception as error:  # of a chart, for example; the run is complete
            problem = error_line(error)
    if problem is not None:
        print_line(f"no report was written: {problem}; then: heedful report {out}")
