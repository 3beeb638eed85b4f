"""A session of training before its first step: folder, data, net and trainer.

The main process prepares the data; the other processes of a job then open its files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from heedful import processes
from heedful.config import Recipe
from heedful.evaluation.likelihood import unigram_entropy
from heedful.files import remove_unfinished
from heedful.kernels import training as kernels
from heedful.pipelines import SavedModel, save_description
from heedful.progress import PrintLine
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.in_memory import InMemoryData
from heedful.tasks.run_data import RunData
from heedful.tasks.start import RunParts, make_loss, new_parts, resume_parts
from heedful.tasks.task import Task
from heedful.training.block_compiler import BlockCompiler
from heedful.training.checkpoint import BestModel, Checkpoints
from heedful.training.folder import RunFolder, facts_of_run, save_recipe
from heedful.training.parallel import sharing_of
from heedful.training.precision import resolve_precision
from heedful.training.schedules import make_schedule
from heedful.training.step import TrainStep, parts_per_batch
from heedful.training.tensor_parallel import data_processes
from heedful.training.trainer import Trainer, TrainingHooks
from heedful.zoo.names import trainable, weights_of
from heedful.zoo.saved import load_tensors


@dataclass(frozen=True)
class Session:
    """A session that can begin.

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
    unigram_entropy: float | None


def prepare_session(
    task: Task,
    rows: InMemoryData | None,
    folder: RunFolder,
    device: torch.device,
    resume: bool,
    print_line: PrintLine,
) -> RunParts:
    """Check the recipe, open the folder, prepare data and net."""
    out, recipe, group = folder.path, task.recipe, processes.current()
    training = recipe.training
    for line in task.notes():
        print_line(line)
    precision = _precision(recipe, out, device, resume)
    sharing = sharing_of(training, group, precision)
    batch_parts = _batch_parts(recipe, out, resume)
    if sharing != "none":
        print_line(f"processes  {group.count} ({sharing}), each batch in parts: {batch_parts}")
    if device.type == "cpu" and (reason := kernels.load()):
        print_line(f"kernels    none, which makes training slower: {reason}")
    num_parts = training.gradient_accumulation * batch_parts
    num_shares = data_processes(group, training).count
    if num_parts < num_shares:
        needed = parts_per_batch(training.gradient_accumulation, num_shares)
        noun = "processes" if num_shares == group.count else "groups of processes"
        print_line(
            f"{num_shares - num_parts} of {num_shares} {noun} have no share of a step: the "
            f"batches have too few parts; training.batch_parts={needed} gives each one"
        )
    _open_folder(recipe, rows, folder, precision, batch_parts, resume)
    if resume and Checkpoints(out / "checkpoints", keep=1).newest() is not None:
        return resume_parts(task, out, device, print_line)
    parts = new_parts(task, out, device, print_line)
    save_description(parts.model, out, parts.base)
    folder.update_facts(**parts.data_facts)
    return parts


def start_session(
    task: Task,
    out: Path,
    open_parts: Callable[[Task, Path, torch.device], RunParts],
    device: torch.device,
    resume: bool,
) -> Session:
    """The run in a prepared folder, before its first step."""
    group, recipe = processes.current(), task.recipe
    precision = _precision(recipe, out, device, resume)
    parts = open_parts(task, out, device)
    if not next(parts.model.net.parameters()).is_meta:
        parts.model.net.to(device)
    epochs = EpochBatches(task, parts.data)
    first = epochs.plan_epoch(0)  # raises UserError for an example larger than a batch
    steps = epochs.total_steps()
    entropy = group.from_main(
        lambda: unigram_entropy(epochs.load_batch(item).targets for item in first)
    )
    best = BestModel(out)
    trainer = _make_trainer(task, parts, epochs, best, device, precision, steps)
    resumed_from = trainer.resume() if resume else None
    if resumed_from is not None:
        group.from_main(best.publish)
    return Session(task, parts.data, parts.model, trainer, best, resumed_from, steps, entropy)


def _batch_parts(recipe: Recipe, out: Path, resume: bool) -> int:
    """The parts of each batch: of the recipe, or as the run's first start set them."""
    training = recipe.training
    if training.batch_parts is not None:
        return training.batch_parts
    if resume:
        return facts_of_run(out).batch_parts
    num_shares = data_processes(processes.current(), training).count
    return parts_per_batch(training.gradient_accumulation, num_shares)


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
    recipe, model, group = task.recipe, parts.model, processes.current()
    training = recipe.training
    hooks = TrainingHooks(
        plan_epoch=epochs.plan_epoch,
        load_batch=epochs.load_batch,
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
            processes=group.for_thread(),
        ),
        precision=precision,
        compiler=BlockCompiler(model.net) if training.compile else None,
        stored_weights=weights_of if model.adapter is None else trainable,
        extra_evaluation_steps=[expectation.step for expectation in recipe.expect],
        processes=group,
        batch_parts=_batch_parts(recipe, best.path.parent.parent, resume=True),
    )
    return trainer


def _save_best(best: BestModel, trainer: Trainer) -> None:
    """Store the net's weights as the best so far; before any evaluation, as the first ones."""
    step = trainer.state.step
    kind = "weights" if trainer.updates.average is None else "averaged weights"
    best.save(
        trainer.stored_weights(trainer.net),
        value=trainer.state.best_value,
        step=step,
        source=f"the {kind} of step {step:,}",
    )


def _open_folder(
    recipe: Recipe,
    rows: InMemoryData | None,
    folder: RunFolder,
    precision: str,
    batch_parts: int,
    resume: bool,
) -> None:
    """Write recipe and rows into the folder of a new run, or check that of a run to resume."""
    out = folder.path
    if not resume:
        folder.claim(precision, batch_parts)
        save_recipe(recipe, out / "recipe.yaml")
        if rows is not None:
            rows.write()
        return
    if rows is not None:
        rows.check_unchanged()
    remove_unfinished(out)
    if Checkpoints(out / "checkpoints", keep=1).newest():
        load_tensors(BestModel(out).path)  # read at the end: raises UserError now if it is damaged
