"""Data, model and loss at the start of a session: of a new run, or from the run's folder."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from heedful import extras, plugins
from heedful.config import Recipe
from heedful.data.prepared import cache_folder, check_prepared
from heedful.errors import UserError
from heedful.files import plain_name
from heedful.models.adapters import freeze
from heedful.pipelines import SavedModel, Translator, load
from heedful.progress import PrintLine
from heedful.tasks.distillation import (
    DistillationLoss,
    OtherTeachers,
    check_distillation,
    initialize_from_layers,
    prepare_teacher,
    sequence_distillation,
)
from heedful.tasks.init_from import load_matching_weights
from heedful.tasks.new_model import (
    adapt_model,
    architecture_and_config,
    build_model,
    inherited_parts,
    rebuild_model,
    trained_share,
)
from heedful.tasks.passes import count
from heedful.tasks.preparation import open_data, prepare
from heedful.tasks.rdrop import RDropLoss
from heedful.tasks.run_data import DataSummary, InheritedParts, RunData
from heedful.tasks.task import Task
from heedful.tasks.word_dropout import WordDropoutLoss
from heedful.training.folder import MARKER, facts_of_run
from heedful.training.schedules import make_schedule
from heedful.training.step import LossFunction
from heedful.zoo.saved import Base


@dataclass(frozen=True)
class RunParts:
    """Data and model of a run.

    Attributes:
        teacher: the model whose probabilities are targets, in word-level distillation.
        base: of a new run with an adapter, the model that has the weights which are not trained.
    """

    data: RunData
    model: SavedModel
    teacher: SavedModel | None
    base: Base | None = None

    @property
    def data_facts(self) -> dict[str, Any]:
        """The fields of `RunFacts` by which the prepared data are opened again."""
        outputs = self.data.outputs
        return {
            "data": self.data.directory.name,
            "outputs": None if outputs is None else outputs.name,
            "start_id": self.data.start_id,
        }


def checked_task(recipe: Recipe) -> Task:
    """The recipe's task; raises UserError for errors that show before any data are read."""
    task: Task = plugins.task.get(recipe.task)(recipe)
    task.check()
    check_distillation(recipe, task.distillation_levels)
    if recipe.training.tensorboard:
        extras.require("tensorboard", "training.tensorboard")
    make_schedule(recipe.training.schedule, d_model=1, max_steps=recipe.training.max_steps)
    return task


def prepare_data(task: Task, print_line: PrintLine) -> RunData:
    """The data of a new run, read, tokenized and stored in the cache, where the run finds them.

    Outputs of a teacher (distillation of level sequence) are not computed.
    """
    recipe = task.recipe
    source = _open_model(recipe.init_from, "cpu")
    teacher = _open_model(recipe.distillation.teacher, "cpu")
    return _prepare_data(task, source, teacher, print_line)


def count_data(task: Task) -> DataSummary:
    """The summary of the data that `prepare_data` would store; nothing is stored."""
    recipe = task.recipe
    source = _open_model(recipe.init_from, "cpu")
    teacher = _open_model(recipe.distillation.teacher, "cpu")
    return count(task, _inherited(task, source, teacher))


def _prepare_data(
    task: Task, source: SavedModel | None, teacher: SavedModel | None, print_line: PrintLine
) -> RunData:
    return prepare(task, cache_folder(), _inherited(task, source, teacher), print_line)


def _inherited(task: Task, source: SavedModel | None, teacher: SavedModel | None) -> InheritedParts:
    """What the data inherit from other models; raises UserError for a wrong model."""
    architecture_and_config(task, None, source, teacher)
    inherited = inherited_parts(task.recipe.tokenizer.path, source, teacher)
    if inherited.tokenizers is not None:
        inherited = replace(inherited, tokenizers=task.adapt_tokenizers(inherited.tokenizers))
    return inherited


def new_parts(
    task: Task, out: Path | None, device: torch.device, print_line: PrintLine
) -> RunParts:
    """Data and model of a new run, or of a resumed one without checkpoint or prepared data.

    Args:
        out: the run's folder; None: of a dry run, which has none.

    Raises:
        UserError: an error in recipe or data; those of the recipe before any data are read.
    """
    recipe = task.recipe
    source = _open_model(recipe.init_from, "cpu")
    teacher = _open_model(recipe.distillation.teacher, str(device))
    others = OtherTeachers.open(recipe.distillation, str(device))
    data = _prepare_data(task, source, teacher, print_line)
    torch.manual_seed(recipe.training.seed)
    model, base = build_model(task, data, source, teacher, device), None
    if source is not None:
        new = load_matching_weights(model, source, print_line, str(recipe.init_from), out)
        if recipe.adapter.rank is not None:
            print_line(adapt_model(model, recipe.adapter, new))
            base = None if out is None else Base.create(Path(str(recipe.init_from)), out)
    if teacher is not None:
        prepare_teacher(teacher, model, task, data)
        if recipe.distillation.copy_layers:
            initialize_from_layers(model, teacher, print_line)
        if recipe.distillation.level == "sequence":
            assert isinstance(teacher, Translator)
            data = sequence_distillation(data, task, teacher, others, cache_folder(), print_line)
            teacher = None
    if recipe.training.freeze:
        freeze(model.net, recipe.training.freeze, "training.freeze")
    if recipe.training.freeze or model.adapter is not None:
        print_line(f"           {trained_share(model.net)}")
    return RunParts(data, model, teacher, base)


def resume_parts(task: Task, out: Path, device: torch.device, print_line: PrintLine) -> RunParts:
    """Data and model of a run with a checkpoint; missing prepared data are prepared again."""
    return open_prepared(task, out, device) or _prepare_again(task, out, device, print_line)


def follow_parts(task: Task, out: Path, device: torch.device) -> RunParts:
    """Data and net of a run that another process has prepared, which also has the net's weights.

    With FSDP the net's parameters are on the meta device: this process gets shards of them.

    Raises:
        UserError: this process does not find the folders of the other.
    """
    has_weights = task.recipe.training.parallel != "fsdp"
    parts = open_prepared(task, out, device, is_checked=True, has_weights=has_weights)
    if parts is None:
        raise UserError(
            f"the data that the main process prepared are not in {cache_folder()}; let "
            "HEEDFUL_CACHE be a folder that all machines of the run share"
        )
    return parts


def open_prepared(
    task: Task,
    out: Path,
    device: torch.device,
    *,
    is_checked: bool = False,
    needs_teacher: bool = True,
    has_weights: bool = True,
) -> RunParts | None:
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
    return RunParts(data, model, teacher)


def _prepare_again(task: Task, out: Path, device: torch.device, print_line: PrintLine) -> RunParts:
    """Prepare the missing data of a run again; raises UserError if they would differ."""
    problem = f"cannot resume {out}: its prepared data are missing in {cache_folder()}"
    print_line(f"preparing the data of {out} again: they are missing in {cache_folder()}")
    try:
        parts = new_parts(task, out, device, print_line)
    except UserError as error:
        raise UserError(f"{problem} and cannot be prepared again: {error}") from None
    facts = facts_of_run(out)
    if parts.data_facts != {key: getattr(facts, key) for key in parts.data_facts}:
        raise UserError(
            f"{problem}, and the files that they were made from have changed, or the version of "
            "heedful; restore the old ones, or start a new run"
        )
    return parts


def make_loss(task: Task, parts: RunParts, device: torch.device) -> LossFunction:
    """The loss of a run: the task's, R-Drop or distillation, with word dropout if it is set."""
    settings, distillation = task.recipe.training, task.recipe.distillation
    smoothing = settings.label_smoothing
    loss: LossFunction = partial(task.loss, label_smoothing=smoothing)
    if settings.r_drop:
        loss = RDropLoss(settings.r_drop, smoothing)
    if parts.teacher is not None:
        loss = DistillationLoss(distillation, parts.teacher.net, smoothing)
    if settings.word_dropout:
        loss = WordDropoutLoss(loss, parts.data.tokenizers, settings.word_dropout, device)
    return loss


def _open_model(path: str | None, device: str) -> SavedModel | None:
    """The model of a folder as a torch net; None without a path."""
    return None if path is None else load(path, device=device, backend="eager")
