"""One training run, from recipe to model: where the rooms are put together.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the resolved recipe, the log, the checkpoints, the prepared data and, at the
end, scores and a report.
"""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import heedful
from heedful import plugins
from heedful.config import Recipe, changed_keys
from heedful.data.tokenizer import IMPORTED
from heedful.errors import UserError
from heedful.files import remove_unfinished, write_text
from heedful.inference import (
    SavedModel,
    choose_device,
    load,
    open_net,
    parameter_count,
    save_description,
)
from heedful.jobs.job import FinalScores, Job, Say
from heedful.recipe_files import load_recipe
from heedful.training.averaging import average_weights
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import Listener, Reason, RunFinished, RunStarted
from heedful.training.expectations import Expectations
from heedful.training.folder import RunFolder
from heedful.training.loggers import JsonlLog, TensorBoardLog, read_log
from heedful.training.report import write_report
from heedful.training.schedules import make_schedule
from heedful.training.trainer import Trainer, TrainStep, Work
from heedful.zoo import architecture
from heedful.zoo.saved import (
    OF_WORDS,
    WEIGHTS,
    copy_matching,
    load_tensors,
    make_config,
    save_tensors,
    set_weights,
    weights_of,
)


@dataclass(frozen=True)
class Result:
    """How a run ended. `scores` are of the held-out test (or validation) text."""

    directory: Path
    task: str
    reason: Reason
    scores: FinalScores | None


def train(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    listeners: Sequence[Listener] = (),
    say: Say = lambda line: None,
    command: str = "heedful.train",
) -> Result:
    """Train what a recipe says into the folder `out`.

    Args:
        recipe: a `Recipe`, the path of one, or the name of a shipped one.
        resume: go on from the newest checkpoint in `out`.
        listeners: told of every event; the log (and TensorBoard's files) are written anyway.
        say: told in a line what the data hold.

    Raises:
        UserError: anything wrong with recipe, data or folder; a loss that is not finite.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe)
    out = Path(out)
    device = choose_device(recipe.training.device)
    with RunFolder(out) as folder:
        with folder.undone_on_error():
            job, trainer, resumed_from = _start(recipe, out, device, resume, say)
            trainer.listeners = [*listeners, *_logs(recipe, out, resume, resumed_from, say)]
        facts = _facts(job.model.net, device, command, trainer.bf16)
        return _run(job, trainer, resumed_from, out, say, facts)


def _logs(
    recipe: Recipe, out: Path, resume: bool, resumed_from: int | None, say: Say
) -> list[Listener]:
    step = (resumed_from or 0) if resume else None
    logs: list[Listener] = [JsonlLog(out / "log.jsonl", resume_step=step)]
    if recipe.training.tensorboard:
        logs.append(TensorBoardLog(out / "tensorboard", resume_step=step))
    return [*logs, Expectations(recipe.expect, say)]


def _run(
    job: Job, trainer: Trainer, resumed_from: int | None, out: Path, say: Say, facts: dict[str, str]
) -> Result:
    """From the first step to scores and report."""
    try:
        trainer.emit(_started(job, resumed_from))
        reason = trainer.run()
        scores = None
        if reason != "interrupted":
            say("scoring the held-out text with the model that the run chooses")
            _choose_final(trainer, job, out)
            scores = job.finish(out)
        state = trainer.state
        values = {} if scores is None else scores.values()
        trainer.emit(RunFinished(state.step, state.seconds, reason, state.best, values))
    finally:
        for listener in trainer.listeners:
            listener.close()
    write_report(
        out / "report.html",
        title=f"{job.recipe.task}: {out.name}",
        events=read_log(out / "log.jsonl"),
        recipe_yaml=job.recipe.to_yaml(),
        facts=facts,
        final_scores=scores.by_name if scores else {},
    )
    return Result(out, job.recipe.task, reason, scores)


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Whether steps multiply in bf16; `auto`: where the processor does so itself."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch has no public word on the CPU's instructions in the versions that we support.
    flags = Path("/proc/cpuinfo")
    return device.type == "cpu" and flags.is_file() and "avx512_bf16" in flags.read_text()


def _start(
    recipe: Recipe, out: Path, device: torch.device, resume: bool, say: Say
) -> tuple[Job, Trainer, int | None]:
    """Everything up to the first step; the step that a resumed run goes on from."""
    kind: type[Job] = plugins.task.get(recipe.task)
    kind.check(recipe)
    source = None if recipe.init_from is None else load(recipe.init_from, device="cpu")
    teacher = recipe.distillation.teacher
    master = source if teacher is None else load(teacher, device=str(device))
    _check_model(recipe, kind, source)  # what is wrong is told before the data are read
    _open_folder(recipe, out, resume)
    tokenizers = None
    if master is not None:
        tokenizers = (master.src_tokenizer, master.tgt_tokenizer)
    job: Job = kind(recipe, out / "data", say, tokenizers)
    torch.manual_seed(recipe.training.seed)
    job.model = model = _build(recipe, job, source)
    if source is not None:
        # Also where a run goes on: it may have been stopped before its first checkpoint.
        found = _take_over(model, source)
        if not resume:
            _report_loaded(found, say, str(recipe.init_from))
    if teacher is not None:
        assert master is not None
        job.learn_from(master, resume=resume)
    model.net.to(device)
    save_description(model, out)
    checkpoints = Checkpoints(out / "checkpoints", recipe.training.average_last)
    rate = make_schedule(
        recipe.training.schedule,
        d_model=model.config.d_model,
        max_steps=recipe.training.max_steps,
    )
    work = Work(
        plan=job.plan,
        load=job.load,
        evaluate=job.evaluate,
        keep_best=lambda: save_tensors(out / WEIGHTS, weights_of(model.net)),
    )
    work.plan(0)  # an example above the batch's limit is told now
    trainer = Trainer(
        TrainStep(model.net, lambda net, batch: job.loss(batch)),
        work,
        recipe.training,
        rate,
        checkpoints,
        bf16=uses_bf16(recipe.training.precision, device),
        compare_at=[one.step for one in recipe.expect],
    )
    return job, trainer, trainer.resume() if resume else None


def _open_folder(recipe: Recipe, out: Path, resume: bool) -> None:
    """A new folder with the resolved recipe in it, or one whose recipe is still the same."""
    saved = out / "recipe.yaml"
    if resume:
        if not saved.is_file():
            raise UserError(f"{out} holds no run to resume (no recipe.yaml); leave out --resume")
        changed = changed_keys(load_recipe(saved), recipe)
        if changed:
            raise UserError(
                f"cannot resume {out} with another recipe; changed: {', '.join(changed)}; "
                "start a new run, or resume with its own recipe.yaml"
            )
        remove_unfinished(out)
    elif saved.exists() or (out / "checkpoints").exists() or (out / "data").exists():
        raise UserError(f"{out} already holds a run; go on with --resume, or give another --out")
    else:
        write_text(saved, recipe.to_yaml())


def _build(recipe: Recipe, job: Job, source: SavedModel | None) -> SavedModel:
    name, config = _model_config(recipe, type(job), source, job.sizes)
    net = architecture(name).build(config)
    card = job.card(name)
    if source is not None and source.has_tokenizer and source.src_tokenizer.kind == IMPORTED:
        # An imported model's outputs go on to begin and end as it was trained.
        card = replace(card, generation=source.card.generation)
    return open_net(net, config, card, *job.tokenizers)


def _check_model(recipe: Recipe, kind: type[Job], source: SavedModel | None) -> None:
    """Refuse what is wrong with a recipe's `model`, with stand-ins for what the data will say."""
    _model_config(recipe, kind, source, kind.stand_in_sizes)


def _model_config(
    recipe: Recipe, kind: type[Job], source: SavedModel | None, sizes_of: Any
) -> tuple[str, Any]:
    """Name and Config of the architecture that a recipe's `model` describes.

    Where a run starts from another model of that architecture, that one's sizes stand instead of
    those of `size`; keys that the recipe sets by themselves win over both.
    """
    keys: dict[str, Any] = dict(recipe.model)
    if not keys and source is None:
        keys = dict(kind.default_model)
    first = source.card.architecture if source is not None else kind.default_model["architecture"]
    name = str(keys.pop("architecture", first))
    module = architecture(name)
    size = keys.pop("size", None)
    if size is not None and size not in module.SIZES:
        raise UserError(f"model.size: no size {size} of {name}; known: {', '.join(module.SIZES)}")
    base: dict[str, Any] = {}
    if source is not None and source.card.architecture == name:
        base = asdict(source.config)
    follows = sizes_of(recipe, name)
    for key in follows:
        if "vocab_size" in key and key in keys:
            raise UserError(f"model.{key} follows from the tokenizer: set tokenizer.vocab_size")
    known = module.Config.__dataclass_fields__
    follows = {key: value for key, value in follows.items() if key in known}
    return name, make_config(name, (module.SIZES[size] if size else {}) | base | follows | keys)


def _take_over(model: SavedModel, source: SavedModel) -> tuple[list[str], list[str], list[str]]:
    """Copy what fits; tables of words only where both have the same words."""
    same = all(
        ours.content() == theirs.content()
        for ours, theirs in (
            (model.src_tokenizer, source.src_tokenizer),
            (model.tgt_tokenizer, source.tgt_tokenizer),
        )
    )
    return copy_matching(model.net, source.net, without="" if same else OF_WORDS)


def _report_loaded(found: tuple[list[str], list[str], list[str]], say: Say, source: str) -> None:
    """Say what a run that starts from another model took over, and what not."""
    loaded, new, unused = found
    if not loaded:
        raise UserError(
            f"init_from: no tensor of {source} fits this model; its architecture or sizes differ"
        )
    say(f"init_from  {len(loaded)} tensors of {source} loaded")
    for what, names in (("drawn anew, not loaded", new), ("of it not used", unused)):
        if names:
            say(f"           {len(names)} {what}: {', '.join(names)}")


def _choose_final(trainer: Trainer, job: Job, out: Path) -> None:
    """The run's model: the average of the last checkpoints where it is better than the best."""
    best = load_tensors(out / WEIGHTS)
    files = [path / WEIGHTS for path in trainer.checkpoints.regular()]
    if job.recipe.training.average_last > 1 and len(files) > 1:
        average = average_weights(files)
        set_weights(job.model.net, average, out)
        if job.evaluate().value > trainer.state.best_value:
            save_tensors(out / WEIGHTS, average)
            return
    set_weights(job.model.net, best, out / WEIGHTS)


def _started(job: Job, resumed_from: int | None) -> RunStarted:
    return RunStarted(
        recipe=job.recipe.model_dump(mode="json"),
        num_parameters=parameter_count(job.model.net),
        num_train=job.num_train,
        num_valid=job.num_valid,
        device=str(job.model.device),
        total_steps=job.recipe.training.max_steps,
        resumed_from=resumed_from,
    )


def _facts(net: nn.Module, device: torch.device, command: str, bf16: bool) -> dict[str, str]:
    return {
        "command": command,
        "parameters": f"{parameter_count(net):,}",
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}, {torch.get_num_threads()} threads",
        "device": f"{device}, {'bf16' if bf16 else 'fp32'}",
    }
