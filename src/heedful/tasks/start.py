"""A run before its first step: data, model, loss and trainer, new or from the run's folder.

The main process prepares data and model; other processes of the job then open its files.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from heedful import extras, plugins, processes
from heedful.config import Distillation, Recipe
from heedful.data.prepared import cache_folder, check_prepared
from heedful.errors import UserError
from heedful.files import plain_name, remove_unfinished
from heedful.kernels import library as kernels
from heedful.models.adapters import freeze
from heedful.pipelines import SavedModel, Translator, load, save_description
from heedful.progress import PrintLine
from heedful.tasks.distillation import (
    DistillationLoss,
    check_distillation,
    initialize_from_layers,
    open_backward,
    prepare_teacher,
    sequence_distillation,
)
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.in_memory import InMemoryData
from heedful.tasks.init_from import load_matching_weights
from heedful.tasks.new_model import (
    adapt_model,
    build_model,
    inherited_parts,
    rebuild_model,
    trained_share,
)
from heedful.tasks.prepared_data import open_data, prepare, summarize
from heedful.tasks.rdrop import RDropLoss
from heedful.tasks.run_data import DataSummary, RunData
from heedful.tasks.task import Task
from heedful.tasks.word_dropout import WordDropoutLoss
from heedful.training.block_compiler import BlockCompiler
from heedful.training.checkpoint import BestModel, Checkpoints
from heedful.training.folder import MARKER, RunFolder, facts_of_run, save_recipe
from heedful.training.optimizer import resolve_precision
from heedful.training.parallel import parallelism_of
from heedful.training.schedules import make_schedule
from heedful.training.step import LossFunction, LossNet, parts_per_batch
from heedful.training.trainer import Trainer
from heedful.zoo.saved import Base, load_tensors, trainable, weights_of


@dataclass(frozen=True)
class PreparedRun:
    """The task, data, model and loss of a run."""

    task: Task
    data: RunData
    model: SavedModel
    loss: LossFunction

    @cached_property
    def epochs(self) -> EpochBatches:
        """The training batches."""
        return EpochBatches(self.task, self.data)

    def loss_net(self, net: nn.Module | None = None) -> LossNet:
        """A net with the loss; default: that of the model."""
        checkpointing = self.task.recipe.training.activation_checkpointing
        net = self.model.net if net is None else net
        return LossNet(net, self.loss, activation_checkpointing=checkpointing)


def checked_task(recipe: Recipe) -> Task:
    """The recipe's task; raises UserError for errors that show before any data are read."""
    task: Task = plugins.task.get(recipe.task)(recipe)
    task.check()
    if recipe.distillation != Distillation():
        check_distillation(recipe, task.distillation_levels)
    if recipe.training.tensorboard:
        extras.require("tensorboard", "training.tensorboard")
    make_schedule(recipe.training.schedule, d_model=1, max_steps=recipe.training.max_steps)
    return task


def prepare_data(task: Task, print_line: PrintLine) -> RunData:
    """The data of a new run, read, tokenized and stored in the cache, where the run finds them.

    Outputs of a teacher (distillation of level sequence) are not computed.
    """
    return prepare(task, cache_folder(), inherited_parts(task, *_origins(task)), print_line)


def count_data(task: Task) -> DataSummary:
    """The summary of the data that `prepare_data` would store; nothing is stored."""
    return summarize(task, inherited_parts(task, *_origins(task)))


def _origins(task: Task) -> tuple[SavedModel | None, SavedModel | None]:
    """The model that the run starts from, and its teacher, on the CPU."""
    recipe = task.recipe
    return _open_model(recipe.init_from, "cpu"), _open_model(recipe.distillation.teacher, "cpu")


def start_run(
    task: Task,
    rows: InMemoryData | None,
    folder: RunFolder,
    device: torch.device,
    resume: bool,
    print_line: PrintLine,
) -> PreparedRun:
    """Data and model of a run in its folder, which other processes can then open.

    Raises:
        UserError: an error in recipe, data or folder.
    """
    out, recipe, group = folder.path, task.recipe, processes.current()
    training = recipe.training
    for line in task.notes():
        print_line(line)
    precision, batch_parts = _step_settings(recipe, out if resume else None, device)
    if group.count > 1:
        parallelism = parallelism_of(training, group, precision)
        print_line(f"processes  {group.count} ({parallelism}), each batch in parts: {batch_parts}")
    if device.type == "cpu" and (reason := kernels.load()):
        print_line(f"kernels    none, which makes training slower: {reason}")
    num_parts = training.gradient_accumulation * batch_parts
    if num_parts < group.count:
        needed = parts_per_batch(training.gradient_accumulation, group.count)
        print_line(
            f"{group.count - num_parts} of {group.count} processes have no share of a step: the "
            f"batches have too few parts; training.batch_parts={needed} gives each one"
        )
    if resume:
        if rows is not None:
            rows.check_unchanged()
        remove_unfinished(out)
        if Checkpoints(out / "checkpoints", keep=1).newest() is not None:
            load_tensors(BestModel(out).path)  # read at the end: raises UserError if damaged
            return open_run(task, out, device) or _prepare_again(task, out, device, print_line)
    else:
        folder.claim(precision, batch_parts)
        save_recipe(recipe, out / "recipe.yaml")
        if rows is not None:
            rows.write()
    run = new_run(task, out, device, print_line)
    has_base = run.model.adapter is not None
    base = Base.create(Path(str(recipe.init_from)), out) if has_base else None
    save_description(run.model, out, base)
    folder.update_facts(**run.data.facts)
    return run


def new_run(
    task: Task, out: Path | None, device: torch.device, print_line: PrintLine
) -> PreparedRun:
    """Data and model of a new run, or of a resumed one without checkpoint or prepared data.

    Args:
        out: the run's folder; None: of a dry run, which has none.

    Raises:
        UserError: an error in recipe or data; those of the recipe before any data are read.
    """
    recipe = task.recipe
    source = _open_model(recipe.init_from, "cpu")
    teacher = _open_model(recipe.distillation.teacher, str(device))
    backward = open_backward(recipe.distillation, str(device)) if teacher else []
    data = prepare(task, cache_folder(), inherited_parts(task, source, teacher), print_line)
    torch.manual_seed(recipe.training.seed)
    model = build_model(task, data, source, teacher, device)
    if source is not None:
        new = load_matching_weights(model, source, print_line, str(recipe.init_from), out)
        if recipe.adapter.rank is not None:
            print_line(adapt_model(model, recipe.adapter, new))
    if teacher is not None:
        prepare_teacher(teacher, model, task, data)
        if recipe.distillation.copy_layers:
            initialize_from_layers(model, teacher, print_line)
        if recipe.distillation.level == "sequence":
            assert isinstance(teacher, Translator)
            data = sequence_distillation(data, task, teacher, backward, cache_folder(), print_line)
            teacher = None
    if recipe.training.freeze:
        freeze(model.net, recipe.training.freeze, "training.freeze")
    if recipe.training.freeze or model.adapter is not None:
        print_line(f"           {trained_share(model.net)}")
    return PreparedRun(task, data, model, _make_loss(task, data, teacher, device))


def open_run_beside(task: Task, out: Path, device: torch.device) -> PreparedRun:
    """Data and model of a run that another process, which has the net's weights, has prepared.

    With FSDP the net's parameters are on the meta device: this process gets shards of them.

    Raises:
        UserError: this process does not find the folders of the other.
    """
    has_weights = task.recipe.training.parallel != "fsdp"
    run = open_run(task, out, device, is_checked=True, has_weights=has_weights)
    if run is None:
        raise UserError(
            f"the data that the main process prepared are not in {cache_folder()}; let "
            "HEEDFUL_CACHE be a folder that all machines of the run share"
        )
    return run


def open_run(
    task: Task,
    out: Path,
    device: torch.device,
    *,
    is_checked: bool = False,
    needs_teacher: bool = True,
    has_weights: bool = True,
) -> PreparedRun | None:
    """Data and model of a run from its folder and prepared data; None if these are missing.

    Args:
        is_checked: another process compares the data with their digests.
        needs_teacher: open the teacher of word-level distillation too.
        has_weights: as in `rebuild_model`.
    """
    recipe = task.recipe
    facts = facts_of_run(out)
    names = [plain_name(name, out / MARKER) for name in (facts.data, facts.outputs) if name]
    directories = [cache_folder() / name for name in names]
    if not directories or not all(path.is_dir() for path in directories):
        return None
    for path in [] if is_checked else directories:
        check_prepared(path)
    directory, *outputs = directories
    data = open_data(directory, facts.start_id)
    data = data.with_teacher_outputs(outputs[0] if outputs else None)
    model = rebuild_model(out, data, device, has_weights=has_weights)
    if recipe.training.freeze:
        freeze(model.net, recipe.training.freeze, "training.freeze")
    teacher = None
    if needs_teacher and recipe.distillation.level == "word":
        teacher = _open_model(recipe.distillation.teacher, str(device))
    if teacher is not None:
        prepare_teacher(teacher, model, task, data)
    return PreparedRun(task, data, model, _make_loss(task, data, teacher, device))


def _prepare_again(
    task: Task, out: Path, device: torch.device, print_line: PrintLine
) -> PreparedRun:
    """Prepare the missing data of a run again; raises UserError if they would differ."""
    problem = f"cannot resume {out}: its prepared data are missing in {cache_folder()}"
    print_line(f"preparing the data of {out} again: they are missing in {cache_folder()}")
    try:
        run = new_run(task, out, device, print_line)
    except UserError as error:
        raise UserError(f"{problem} and cannot be prepared again: {error}") from None
    noted = facts_of_run(out)
    if any(getattr(noted, key) != value for key, value in run.data.facts.items()):
        raise UserError(
            f"{problem}, and the files that they were made from have changed, or the version of "
            "heedful; restore the old ones, or start a new run"
        )
    return run


def _make_loss(
    task: Task, data: RunData, teacher: SavedModel | None, device: torch.device
) -> LossFunction:
    """The loss of a run: the task's, R-Drop or distillation, with word dropout if it is set.

    Args:
        teacher: the model whose probabilities are targets, in word-level distillation.
    """
    settings, smoothing = task.recipe.training, task.recipe.training.label_smoothing
    loss: LossFunction = partial(task.loss, label_smoothing=smoothing)
    if settings.r_drop:
        loss = RDropLoss(settings.r_drop, smoothing)
    if teacher is not None:
        loss = DistillationLoss(task.recipe.distillation, teacher.net, smoothing)
    if settings.word_dropout:
        loss = WordDropoutLoss(loss, data.tokenizers, settings.word_dropout, device)
    return loss


def _open_model(path: str | None, device: str) -> SavedModel | None:
    """The model of a folder as a torch net; None without a path."""
    return None if path is None else load(path, device=device, backend="eager")


def make_trainer(
    run: PreparedRun, out: Path, device: torch.device, resume: bool, *, is_temporary: bool = False
) -> Trainer:
    """The trainer of a run in its folder, at its first step or at its newest checkpoint.

    Called by all processes.

    Args:
        is_temporary: as in `Trainer`.
    """
    task, model, group = run.task, run.model, processes.current()
    recipe, training = task.recipe, task.recipe.training
    if not next(model.net.parameters()).is_meta:
        model.net.to(device)
    precision, batch_parts = _step_settings(recipe, out, device)
    best, max_steps = BestModel(out), run.epochs.total_steps()
    run.epochs.plan_epoch(0)  # raises UserError for an example larger than a batch
    trainer = Trainer(
        run.loss_net(),
        training,
        make_schedule(training.schedule, d_model=model.config.d_model, max_steps=max_steps),
        Checkpoints(
            out / "checkpoints",
            training.average_checkpoints,
            best=training.average_of == "best",
            processes=group.for_thread(),
        ),
        plan_epoch=run.epochs.plan_epoch,
        load_batch=run.epochs.load_batch,
        evaluate=lambda: task.evaluate(model, run.data),
        save_best=lambda: _save_best(best, trainer),
        precision=precision,
        compiler=BlockCompiler(model.net) if training.compile else None,
        stored_weights=weights_of if model.adapter is None else trainable,
        extra_evaluation_steps=[expectation.step for expectation in recipe.expect],
        is_temporary=is_temporary,
        processes=group,
        batch_parts=batch_parts,
    )
    if resume and trainer.resume() is not None:
        group.from_main(best.publish)
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


def _step_settings(recipe: Recipe, out: Path | None, device: torch.device) -> tuple[str, int]:
    """The precision of steps and the parts of each batch, by the recipe.

    Where it leaves them open, as the run in the folder `out` began; None: as a new run.
    """
    training, facts = recipe.training, None if out is None else facts_of_run(out)
    precision, batch_parts = str(training.precision), training.batch_parts
    if precision == "auto" and facts is not None:
        precision = facts.precision
    if batch_parts is None and facts is not None:
        batch_parts = facts.batch_parts
    if batch_parts is None:
        batch_parts = parts_per_batch(training.gradient_accumulation, processes.current().count)
    return resolve_precision(precision, device), batch_parts
