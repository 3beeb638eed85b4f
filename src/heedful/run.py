"""One training run, from recipe to model.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the whole recipe, the log, the checkpoints and, at the end, scores and a
report. Its data are prepared in a cache that runs share.
"""

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import heedful
from heedful import plugins
from heedful.config import Recipe
from heedful.errors import UserError
from heedful.evaluation.likelihood import unigram_entropy
from heedful.files import read_text, remove_unfinished, write_text
from heedful.pipelines import (
    SavedModel,
    choose_device,
    parameter_count,
    save_description,
)
from heedful.recipe_changes import changed_settings, check_changes, check_started
from heedful.recipe_files import load_recipe, with_absolute_paths
from heedful.tasks.distillation import check_distillation
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.preparation import Say
from heedful.tasks.run_data import Data
from heedful.tasks.scoring import FinalScores
from heedful.tasks.start import RunParts, begin, begin_from_folder, loss_of
from heedful.tasks.task import Task
from heedful.training.best import BestModel
from heedful.training.checkpoint import Checkpoints, average_weights
from heedful.training.events import Listener, RunFinished, RunStarted, StopReason
from heedful.training.folder import RunFolder, facts_of_run
from heedful.training.loggers import JsonlLog, TensorBoardLog, read_log
from heedful.training.precision import resolve_precision
from heedful.training.report import write_report
from heedful.training.schedules import make_schedule, total_steps
from heedful.training.step import TrainStep
from heedful.training.trainer import Trainer, TrainingHooks
from heedful.training.verdict import ExpectationListener, general_verdicts
from heedful.zoo.names import set_weights, weights_of
from heedful.zoo.saved import WEIGHTS, load_tensors

_SPLITS = {"test": "test text", "valid": "held-out text"}


@dataclass(frozen=True)
class TrainingRun:
    """How a run ended. `scores` are of the held-out test (or validation) text."""

    directory: Path
    task: str
    reason: StopReason
    scores: FinalScores | None


@dataclass(frozen=True)
class _Run:
    """A started run; `resumed_from` is the step of the checkpoint that it resumes.

    `unigram_entropy` is that of the targets that it learns from, as `RunStarted` has it.
    """

    task: Task
    data: Data
    model: SavedModel
    trainer: Trainer
    best: BestModel
    resumed_from: int | None
    total_steps: int | None
    unigram_entropy: float


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    changes: Collection[str] = (),
    listeners: Sequence[Listener] = (),
    say: Say = lambda line: None,
    command: str = "heedful.train",
) -> TrainingRun:
    """Train what a recipe says into the folder `out`.

    Args:
        recipe: a `Recipe`, the path of one, or the name of a shipped one.
        resume: go on from the newest checkpoint in `out`.
        changes: keys that may differ from the run's recipe though its steps depend on them; what
            differs is noted in the log and the report.
        listeners: are given every event; the log (and TensorBoard's files) are written anyway.
        say: is given lines on what the data hold.

    Raises:
        UserError: anything wrong with recipe, data or folder; a loss that is not finite.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    recipe = with_absolute_paths(recipe)
    out = Path(out)
    device = choose_device(recipe.training.device)
    with RunFolder(out, resume=resume) as folder:
        with folder.undone_on_error():
            if resume:
                check_changes(load_recipe(out / "recipe.yaml"), recipe, changes, str(out))
                for event in _starts(out / "log.jsonl")[-1:]:
                    check_started(event.recipe, recipe, str(out))
            run = _start(recipe, folder, device, resume, say)
            step = (run.resumed_from or 0) if resume else None
            log: list[Listener] = [JsonlLog(out / "log.jsonl", resume_step=step)]
            _save_recipe(recipe, out / "recipe.yaml")
            if recipe.training.tensorboard:
                log.append(TensorBoardLog(out / "tensorboard", resume_step=step))
            run.trainer.listeners = [*listeners, *log, ExpectationListener(recipe.expect, say)]
        reason, scores = _finish(run, out, say)
    events = read_log(out / "log.jsonl")
    for verdict in general_verdicts(events, out) if scores else ():
        say(str(verdict))
    write_report(
        out / "report.html",
        title=f"{recipe.task.replace('_', ' ')}: {out.name}",
        events=events,
        recipe_yaml=recipe.to_yaml(differences=True),
        facts=_facts(run, device, command),
        final_scores=scores.by_name if scores else {},
        labels=scores.labels if scores else (),
        confusion=scores.confusion if scores else (),
    )
    return TrainingRun(out, recipe.task, reason, scores)


def _start(recipe: Recipe, folder: RunFolder, device: torch.device, resume: bool, say: Say) -> _Run:
    """Everything up to the first step."""
    out = folder.path
    task = _checked_task(recipe)
    precision = _precision(recipe, out, device, resume)
    _open_folder(recipe, folder, precision, resume)
    if resume and Checkpoints(out / "checkpoints", keep=1).newest() is not None:
        parts = begin_from_folder(task, out, device, say)
    else:
        parts = begin(task, out, device, say)
        save_description(parts.model, out)
        folder.note(**parts.names)
    parts.model.net.to(device)
    epochs = EpochBatches(task, parts.data)
    first = epochs.plan_epoch(0)  # an example above the batch's limit is refused here
    steps = total_steps(recipe.training, len(first))
    entropy = unigram_entropy(epochs.load_batch(item).targets for item in first)
    best = BestModel(out)
    trainer = _make_trainer(task, parts, epochs, best, device, precision, steps)
    resumed_from = trainer.resume() if resume else None
    if resumed_from is not None:
        best.publish()
    return _Run(task, parts.data, parts.model, trainer, best, resumed_from, steps, entropy)


def _checked_task(recipe: Recipe) -> Task:
    """The recipe's task; raises UserError for what is wrong before any data are read."""
    task: Task = plugins.task.get(recipe.task)(recipe)
    task.check()
    check_distillation(recipe, task.distillation_levels)
    make_schedule(recipe.training.schedule, d_model=1, max_steps=recipe.training.max_steps)
    return task


def _precision(recipe: Recipe, out: Path, device: torch.device, resume: bool) -> str:
    """The precision of training; that of the sessions before where a run is resumed."""
    wanted = str(recipe.training.precision)
    if resume and wanted == "auto":
        wanted = facts_of_run(out).precision
    return resolve_precision(wanted, device)


def _make_trainer(
    task: Task,
    parts: RunParts,
    epochs: EpochBatches,
    best: BestModel,
    device: torch.device,
    precision: str,
    steps: int | None,
) -> Trainer:
    """The trainer of a run, with its loss, its batches, its evaluation and its checkpoints."""
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
            loss_of(task, parts, device),
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
        extra_evaluation_steps=[one.step for one in recipe.expect],
    )
    return trainer


def _save_best(best: BestModel, trainer: Trainer) -> None:
    """Store the net's weights, which are the best so far, or the first before any evaluation."""
    step = trainer.state.step
    kind = "weights" if trainer.average is None else "averaged weights"
    best.save(
        weights_of(trainer.net),
        value=trainer.state.best_value,
        step=step,
        source=f"the {kind} of step {step:,}",
    )


def _finish(run: _Run, out: Path, say: Say) -> tuple[StopReason, FinalScores | None]:
    """From the first step to the scores."""
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
            say(f"scoring: {scored}")
            scores = run.task.compute_final_scores(run.model, run.data, out)
            values = scores.values()
        trainer.emit(RunFinished(state.step, state.seconds, reason, state.best, values, scored))
    finally:
        for listener in trainer.listeners:
            listener.close()
    return reason, scores


def _changes_on_resume(log: Path, recipe: dict[str, Any]) -> list[str]:
    """How settings on which steps depend differ from those of the session before."""
    starts = _starts(log)
    return changed_settings(starts[-1].recipe, recipe) if starts else []


def _starts(log: Path) -> list[RunStarted]:
    """The events of all sessions' starts; none where there is no log yet."""
    events = read_log(log) if log.is_file() else []
    return [event for event in events if isinstance(event, RunStarted)]


def _open_folder(recipe: Recipe, folder: RunFolder, precision: str, resume: bool) -> None:
    """Prepare a new folder with the recipe in it, or that of a run to resume."""
    out = folder.path
    if not resume:
        folder.claim(precision)
        _save_recipe(recipe, out / "recipe.yaml")
        return
    remove_unfinished(out)
    if Checkpoints(out / "checkpoints", keep=1).newest():
        load_tensors(BestModel(out).path)  # needed at the end


def _save_recipe(recipe: Recipe, path: Path) -> None:
    """Write a run's recipe; a file that says the same stays as it is, with its comments.

    Raises:
        UserError: the file says something else, and a user has edited it.
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
    """Write the run's model: the mean of its checkpoints where that is better than the best.

    Returns:
        Which weights these are.
    """
    net, trainer = run.model.net, run.trainer
    files = [path / WEIGHTS for path in trainer.checkpoints.to_average()]
    if run.task.recipe.training.average_checkpoints > 1 and len(files) > 1:
        average = average_weights(files)
        set_weights(net, average, run.best.path)
        value = run.task.evaluate(run.model, run.data).value
        if value > run.best.value:
            source = f"the mean of {len(files)} checkpoints"
            run.best.save(average, value=value, step=trainer.state.step, source=source)
    weights, source = run.best.write_final()
    set_weights(net, weights, run.best.path)
    return source


def _facts(run: _Run, device: torch.device, command: str) -> dict[str, str]:
    return {
        "command": command,
        "parameters": f"{parameter_count(run.model.net):,}",
        "training data": run.data.splits["train"].report.summary(),
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}, {torch.get_num_threads()} threads",
        "device": f"{device}, {run.trainer.precision}",
    }
