"""One training run, from recipe to model: where the rooms are put together.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the whole recipe, the log, the checkpoints and, at the end, scores and a
report. Its data are prepared in a cache that runs share.
"""

import platform
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import heedful
from heedful import plugins
from heedful.config import Recipe
from heedful.data.prepared import cache_folder, check_prepared
from heedful.errors import UserError
from heedful.evaluation.likelihood import unigram_entropy
from heedful.files import plain_name, read_text, remove_unfinished, write_text
from heedful.pipelines import (
    SavedModel,
    Translator,
    choose_device,
    load,
    parameter_count,
    save_description,
)
from heedful.recipe_changes import changed_settings, check_changes, check_started
from heedful.recipe_files import load_recipe, with_absolute_paths
from heedful.tasks.distillation import (
    Distilled,
    OtherTeachers,
    begin_as_layers,
    check_distillation,
    ready_teacher,
    sequence_distillation,
)
from heedful.tasks.epochs import Epochs
from heedful.tasks.init_from import take_over
from heedful.tasks.new_model import build, model_config, opened_again, origin_of
from heedful.tasks.rdrop import RDrop
from heedful.tasks.run_data import Data
from heedful.tasks.task import FinalScores, Say, Task
from heedful.tasks.word_dropout import WordDropout
from heedful.training.best import BestModel
from heedful.training.checkpoint import Checkpoints, average_weights
from heedful.training.events import Listener, RunFinished, RunStarted, StopReason
from heedful.training.folder import MARKER, RunFolder, facts_of_run
from heedful.training.loggers import JsonlLog, TensorBoardLog, read_log
from heedful.training.precision import resolve_precision
from heedful.training.report import write_report
from heedful.training.schedules import make_schedule, total_steps
from heedful.training.trainer import Objective, Trainer, TrainStep, Work
from heedful.training.verdict import Expectations, general_verdicts
from heedful.zoo.names import set_weights, weights_of
from heedful.zoo.saved import WEIGHTS, load_tensors

_SPLITS = {"test": "test text", "valid": "held-out text"}


@dataclass(frozen=True)
class Result:
    """How a run ended. `scores` are of the held-out test (or validation) text."""

    directory: Path
    task: str
    reason: StopReason
    scores: FinalScores | None


@dataclass(frozen=True)
class _Run:
    """What a run has once it is started; `resumed_from` is the step that it goes on from.

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
) -> Result:
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
            run.trainer.listeners = [*listeners, *log, Expectations(recipe.expect, say)]
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
    return Result(out, recipe.task, reason, scores)


def _opened(path: str | None, device: str) -> SavedModel | None:
    return None if path is None else load(path, device=device, engine="eager")


@dataclass(frozen=True)
class _Parts:
    """Data and model of a run, and the teacher whose probabilities it learns from."""

    data: Data
    model: SavedModel
    teacher: SavedModel | None

    @property
    def names(self) -> dict[str, Any]:
        """What the run's folder notes of the data, to open them again."""
        outputs = self.data.outputs
        return {
            "data": self.data.directory.name,
            "outputs": None if outputs is None else outputs.name,
            "start_id": self.data.start_id,
        }


def _begin(task: Task, out: Path, device: torch.device, say: Say) -> _Parts:
    """Data and model as a new run has them; errors of the recipe are raised before data are read.

    Also for a run that goes on without a checkpoint, or whose prepared data are gone.
    """
    recipe = task.recipe
    source = _opened(recipe.init_from, "cpu")
    teacher = _opened(recipe.distillation.teacher, str(device))
    others = OtherTeachers.open(recipe.distillation, str(device))
    model_config(task, None, source, teacher)
    origin = origin_of(recipe.tokenizer.path, source, teacher)
    data = task.prepare(cache_folder(), origin, say)
    torch.manual_seed(recipe.training.seed)
    model = build(task, data, source, teacher, device)
    if source is not None:
        take_over(model, source, say, str(recipe.init_from), out)
    if teacher is not None:
        ready_teacher(teacher, model, task, data)
        if recipe.distillation.copy_layers:
            begin_as_layers(model, teacher, say)
        if recipe.distillation.level == "sequence":
            assert isinstance(teacher, Translator)
            data = sequence_distillation(data, task, teacher, others, cache_folder(), say)
            teacher = None
    return _Parts(data, model, teacher)


def _reopen(task: Task, out: Path, device: torch.device) -> _Parts | None:
    """Data and model of a run with a checkpoint, from its folder and its prepared data alone.

    None where the prepared data are gone.
    """
    recipe = task.recipe
    facts = facts_of_run(out)
    names = [plain_name(name, out / MARKER) for name in (facts.data, facts.outputs) if name]
    directories = [cache_folder() / name for name in names]
    if not directories or not all(path.is_dir() for path in directories):
        return None
    for path in directories:
        check_prepared(path)
    directory, *outputs = directories
    data = task.open(directory, facts.start_id)
    data = data.learning_from(outputs[0] if outputs else None)
    model = opened_again(out, data, device)
    teacher = None
    if recipe.distillation.level == "word":
        teacher = _opened(recipe.distillation.teacher, str(device))
    if teacher is not None:
        ready_teacher(teacher, model, task, data)
    return _Parts(data, model, teacher)


def _begin_again(task: Task, out: Path, device: torch.device, say: Say) -> _Parts:
    """As `_begin`, where a run's prepared data are gone; they must become the same."""
    problem = f"cannot resume {out}: its prepared data are gone from {cache_folder()}"
    say(f"preparing the data of {out} again, which are gone from {cache_folder()}")
    try:
        parts = _begin(task, out, device, say)
    except UserError as error:
        raise UserError(f"{problem} and cannot be made again: {error}") from None
    facts = facts_of_run(out)
    if parts.names != {key: getattr(facts, key) for key in parts.names}:
        raise UserError(
            f"{problem}, and the files that they were made of have changed; bring the old files "
            "back, or start a new run"
        )
    return parts


def _start(recipe: Recipe, folder: RunFolder, device: torch.device, resume: bool, say: Say) -> _Run:
    """Everything up to the first step."""
    task: Task = plugins.task.get(recipe.task)(recipe)
    task.check()
    check_distillation(recipe, task.levels)
    schedule = recipe.training.schedule
    make_schedule(schedule, d_model=1, max_steps=recipe.training.max_steps)
    out, wanted = folder.path, str(recipe.training.precision)
    if resume and wanted == "auto":
        wanted = facts_of_run(out).precision
    precision = resolve_precision(wanted, device)
    _open_folder(recipe, folder, precision, resume)
    has_checkpoint = resume and Checkpoints(out / "checkpoints", keep=1).newest() is not None
    if has_checkpoint:
        parts = _reopen(task, out, device) or _begin_again(task, out, device, say)
    else:
        parts = _begin(task, out, device, say)
        save_description(parts.model, out)
        folder.note(**parts.names)
    data, model, teacher = parts.data, parts.model, parts.teacher
    model.net.to(device)
    epochs = Epochs(task, data)
    first = epochs.plan(0)  # an example above the batch's limit is told now
    steps = total_steps(recipe.training, len(first))
    entropy = unigram_entropy(epochs.load(item).targets for item in first)
    best = BestModel(out)
    work = Work(
        plan=epochs.plan,
        load=lambda item: epochs.load(item).to(device),
        evaluate=lambda: task.evaluate(model, data),
        keep_best=lambda: _keep_best(best, trainer),
    )
    trainer = Trainer(
        TrainStep(model.net, _objective(task, data, teacher, device)),
        work,
        recipe.training,
        make_schedule(schedule, d_model=model.config.d_model, max_steps=steps),
        Checkpoints(
            out / "checkpoints",
            recipe.training.average_last,
            best=recipe.training.average_of == "best",
        ),
        precision=precision,
        compare_at=[one.step for one in recipe.expect],
    )
    resumed_from = trainer.resume() if resume else None
    if resumed_from is not None:
        best.publish()
    return _Run(task, data, model, trainer, best, resumed_from, steps, entropy)


def _keep_best(best: BestModel, trainer: Trainer) -> None:
    """Store the net's weights, which are the best so far, or the first before any evaluation."""
    step = trainer.state.step
    kind = "weights" if trainer.average is None else "averaged weights"
    best.keep(
        weights_of(trainer.net),
        value=trainer.state.best_value,
        step=step,
        source=f"the {kind} of step {step:,}",
    )


def _objective(
    task: Task, data: Data, teacher: SavedModel | None, device: torch.device
) -> Objective:
    """What is trained on: the task's own loss, that of two passes, or that of a teacher."""
    settings, distillation = task.recipe.training, task.recipe.distillation
    smoothing = settings.label_smoothing
    objective: Objective = partial(task.loss, label_smoothing=smoothing)
    if settings.r_drop:
        objective = RDrop(settings.r_drop, smoothing)
    if teacher is not None:
        objective = Distilled(distillation, teacher.net, smoothing)
    if settings.word_dropout:
        objective = WordDropout(objective, data.tokenizers, settings.word_dropout, device)
    return objective


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
                num_train=run.task.count(data, "train"),
                num_valid=run.task.count(data, "valid"),
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
            scores = run.task.finish(run.model, run.data, out)
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
    if run.task.recipe.training.average_last > 1 and len(files) > 1:
        average = average_weights(files)
        set_weights(net, average, run.best.path)
        value = run.task.evaluate(run.model, run.data).value
        if value > run.best.value:
            source = f"the mean of {len(files)} checkpoints"
            run.best.keep(average, value=value, step=trainer.state.step, source=source)
    weights, source = run.best.finish()
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
