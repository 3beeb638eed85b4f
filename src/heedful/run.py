"""One training run, from a recipe to a model.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the complete recipe, the log, the checkpoints and, at the end, scores and a
report. Prepared data are in a cache that runs share.
"""

import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

import heedful
from heedful import extras, plugins
from heedful.config import Recipe
from heedful.errors import UserError, describe
from heedful.evaluation.likelihood import unigram_entropy
from heedful.files import as_path, read_text, remove_unfinished, write_text
from heedful.pipelines import (
    SavedModel,
    choose_device,
    load,
    parameter_count,
    save_description,
)
from heedful.progress import PrintLine, has_display, use_display
from heedful.recipe_changes import changed_settings, check_changes, check_started
from heedful.recipe_files import load_recipe, with_absolute_paths
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.in_memory import InMemoryData, TrainingData
from heedful.tasks.run_data import RunData
from heedful.tasks.scoring import FinalScores
from heedful.tasks.start import RunParts, checked_task, make_loss, new_parts, resume_parts
from heedful.tasks.task import Task
from heedful.training.best import BestModel
from heedful.training.block_compiler import BlockCompiler
from heedful.training.checkpoint import Checkpoints, average_weights
from heedful.training.display import RunDisplay
from heedful.training.events import (
    Event,
    EventCallback,
    Listener,
    RunFinished,
    RunStarted,
    StopReason,
)
from heedful.training.folder import RunFolder, facts_of_run
from heedful.training.loggers import JsonlLog, TensorBoardLog, read_log
from heedful.training.precision import resolve_precision
from heedful.training.run_report import write_run_report
from heedful.training.schedules import make_schedule, total_steps
from heedful.training.step import TrainStep
from heedful.training.trainer import Trainer, TrainingHooks
from heedful.training.verdict import ExpectationListener, general_verdicts
from heedful.zoo.names import set_weights, trainable, weights_of
from heedful.zoo.saved import WEIGHTS, load_tensors

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


@dataclass(frozen=True)
class _Run:
    """A started run.

    Attributes:
        resumed_from: the step of the checkpoint that it resumes.
        unigram_entropy: as in `RunStarted`.
    """

    task: Task
    data: RunData
    model: SavedModel
    trainer: Trainer
    best: BestModel
    resumed_from: int | None
    total_steps: int | None
    unigram_entropy: float


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
) -> TrainingRun:
    """Train by a recipe, and return the run with its model.

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

    Raises:
        UserError: an error in recipe, data or folder; a loss or gradient that is not finite.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    if out is None and resume:
        raise UserError("to resume a run, give its folder as out")
    if on_event is not None and not callable(on_event):
        raise UserError(f"on_event must be a function of an event, not {describe(on_event)}")
    temporary = TemporaryDirectory(prefix="heedful-") if out is None else None
    out = as_path(temporary.name if temporary is not None else out or "", "out")
    recipe, rows = with_absolute_paths(recipe), None
    if data is not None:
        columns = plugins.task.get(recipe.task).row_columns
        rows = InMemoryData.convert(recipe, columns, data, out)
        recipe = rows.recipe
    is_temporary = temporary is not None
    try:
        with _displayed(on_event, print_line, progress) as (listeners, print_line):
            settings = (resume, changes, listeners, print_line, command)
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
    *,
    is_temporary: bool,
) -> tuple[StopReason, FinalScores | None]:
    """Train in the folder `out`, and write its report; arguments as of `train`."""
    device = choose_device(recipe.training.device)
    with RunFolder(out, resume=resume) as folder:
        with folder.undone_on_error():
            if resume:
                check_changes(load_recipe(out / "recipe.yaml"), recipe, changes, str(out))
                for event in _session_starts(out / "log.jsonl")[-1:]:
                    check_started(event.recipe, recipe, str(out))
            run = _start(recipe, rows, folder, device, resume, print_line)
            step = (run.resumed_from or 0) if resume else None
            logs: list[Listener] = [JsonlLog(out / "log.jsonl", resume_step=step)]
            _save_recipe(recipe, out / "recipe.yaml")
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
    if packages := extras.missing_packages("report"):
        print_line(f"no report was written: it needs {packages}; then: heedful report {out}")
    else:
        write_run_report(out)
    return reason, scores


def _start(
    recipe: Recipe,
    rows: InMemoryData | None,
    folder: RunFolder,
    device: torch.device,
    resume: bool,
    print_line: PrintLine,
) -> _Run:
    """Check the recipe, open the folder, prepare data and net; everything before the first step."""
    out = folder.path
    task = checked_task(recipe)
    for line in task.notes():
        print_line(line)
    precision = _precision(recipe, out, device, resume)
    _open_folder(recipe, rows, folder, precision, resume)
    if resume and Checkpoints(out / "checkpoints", keep=1).newest() is not None:
        parts = resume_parts(task, out, device, print_line)
    else:
        parts = new_parts(task, out, device, print_line)
        save_description(parts.model, out, parts.base)
        folder.update_facts(**parts.data_facts)
    parts.model.net.to(device)
    epochs = EpochBatches(task, parts.data)
    first = epochs.plan_epoch(0)  # raises UserError for an example larger than a batch
    steps = total_steps(recipe.training, epochs.mean_size(len(first)))
    entropy = unigram_entropy(epochs.load_batch(item).targets for item in first)
    best = BestModel(out)
    trainer = _make_trainer(task, parts, epochs, best, device, precision, steps)
    resumed_from = trainer.resume() if resume else None
    if resumed_from is not None:
        best.publish()
    return _Run(task, parts.data, parts.model, trainer, best, resumed_from, steps, entropy)


def _precision(recipe: Recipe, out: Path, device: torch.device, resume: bool) -> str:
    """The precision of training; `auto` of a resumed run is that of its first session."""
    precision = str(recipe.training.precision)
    if resume and precision == "auto":
        precision = facts_of_run(out).precision
    return resolve_precision(precision, device)


def _make_trainer(
    task: Task,
    parts: RunParts,
    epochs: EpochBatches,
    best: BestModel,
    device: torch.device,
    precision: str,
    steps: int | None,
) -> Trainer:
    """The trainer of a run, with loss, batches, evaluation and checkpoints."""
    recipe, model = task.recipe, parts.model
    training = recipe.training
    hooks = TrainingHooks(
        plan_epoch=epochs.plan_epoch,
        load_batch=lambda item: epochs.load_batch(item).to(device),
        evaluate=lambda: task.evaluate(model, parts.data),
        save_best=lambda: _save_best(best, trainer),
    )
    trainer = Trainer(
        TrainStep(
            model.net,
            make_loss(task, parts, device),
            activation_checkpointing=training.activation_checkpointing,
        ),
        hooks,
        training,
        make_schedule(training.schedule, d_model=model.config.d_model, max_steps=steps),
        Checkpoints(
            best.path.parent,
            training.average_checkpoints,
            best=training.average_of == "best",
        ),
        precision=precision,
        compiler=BlockCompiler(model.net) if training.compile else None,
        stored_weights=weights_of if model.adapter is None else trainable,
        extra_evaluation_steps=[expectation.step for expectation in recipe.expect],
    )
    return trainer


def _save_best(best: BestModel, trainer: Trainer) -> None:
    """Store the net's weights as the best so far; before any evaluation, as the first ones."""
    step = trainer.state.step
    kind = "weights" if trainer.average is None else "averaged weights"
    best.save(
        trainer.stored_weights(trainer.net),
        value=trainer.state.best_value,
        step=step,
        source=f"the {kind} of step {step:,}",
    )


def _train_and_score(
    run: _Run, out: Path, print_line: PrintLine
) -> tuple[StopReason, FinalScores | None]:
    """Train to the end of the session; unless it was interrupted, score the final model."""
    trainer, state = run.trainer, run.trainer.state
    try:
        data, recipe = run.data, run.task.recipe.model_dump(mode="json")
        recipe["training"]["precision"] = trainer.precision
        trainer.emit(
            RunStarted(
                recipe=recipe,
                num_parameters=parameter_count(run.model.net),
                num_train=run.task.split_size(data, "train"),
                num_valid=run.task.split_size(data, "valid"),
                device=str(run.model.device),
                total_steps=run.total_steps,
                resumed_from=run.resumed_from,
                changes=_changes_on_resume(out / "log.jsonl", recipe) if run.resumed_from else [],
                unit=run.task.unit,
                unigram_entropy=run.unigram_entropy,
            )
        )
        reason = trainer.run()
        scores, values, scored = None, {}, ""
        if reason != "interrupted":
            scored = f"{_SPLITS[data.final]}, {_choose_final(run)}"
            print_line(f"scoring: {scored}")
            scores = run.task.compute_final_scores(run.model, run.data, out)
            values = scores.values()
        trainer.emit(RunFinished(state.step, state.seconds, reason, state.best, values, scored))
    finally:
        for listener in trainer.listeners:
            listener.close()
    return reason, scores


def _changes_on_resume(log: Path, recipe: dict[str, Any]) -> list[str]:
    """The settings that steps depend on and that differ from those of the last session."""
    starts = _session_starts(log)
    return changed_settings(starts[-1].recipe, recipe) if starts else []


def _session_starts(log: Path) -> list[RunStarted]:
    """The `RunStarted` events of a log; empty if there is no log yet."""
    events = read_log(log) if log.is_file() else []
    return [event for event in events if isinstance(event, RunStarted)]


def _open_folder(
    recipe: Recipe, rows: InMemoryData | None, folder: RunFolder, precision: str, resume: bool
) -> None:
    """Write recipe and rows into the folder of a new run, or check that of a run to resume."""
    out = folder.path
    if not resume:
        folder.claim(precision)
        _save_recipe(recipe, out / "recipe.yaml")
        if rows is not None:
            rows.write()
        return
    if rows is not None:
        rows.check_unchanged()
    remove_unfinished(out)
    if Checkpoints(out / "checkpoints", keep=1).newest():
        load_tensors(BestModel(out).path)  # read at the end: raises UserError now if it is damaged


def _save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a run's recipe; a file with equal values is kept, with its comments.

    Raises:
        UserError: the file has other values, and a user has edited it.
    """
    if path.is_file():
        saved = load_recipe(path)
        if saved == recipe:
            return
        if saved.to_yaml() != read_text(path):
            raise UserError(
                f"{path} was edited and is another recipe, so it is not replaced; give another "
                "--out, or move it away"
            )
    write_text(path, recipe.to_yaml())


def _choose_final(run: _Run) -> str:
    """Write the final model: the average of the checkpoints if it is better than the best one.

    Returns:
        A description of the weights.
    """
    net, trainer = run.model.net, run.trainer
    files = [path / WEIGHTS for path in trainer.checkpoints.to_average()]
    if run.task.recipe.training.average_checkpoints > 1 and len(files) > 1:
        average = average_weights(files)
        set_weights(net, average, run.best.path, trainer.stored_weights(net))
        value = run.task.evaluate(run.model, run.data).value
        if value > run.best.value:
            source = f"the mean of {len(files)} checkpoints"
            run.best.save(average, value=value, step=trainer.state.step, source=source)
    weights, source = run.best.write_final()
    set_weights(net, weights, run.best.path, trainer.stored_weights(net))
    return source


def _report_facts(run: _Run, device: torch.device, command: str) -> dict[str, str]:
    return {
        "command": command,
        "parameters": f"{parameter_count(run.model.net):,}",
        "training data": run.data.splits["train"].report.summary(),
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}, threads: {torch.get_num_threads()}",
        "device": f"{device}, {run.trainer.precision}",
    }
