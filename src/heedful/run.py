"""One training run, from recipe to model: where the rooms are put together.

A run's folder is a model directory (`config.json`, `model.safetensors`, tokenizers: the best model
so far) that also holds the resolved recipe, the log, the checkpoints, the prepared data and, at the
end, scores and a report.
"""

import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import heedful
from heedful.bundle import (
    Card,
    Limits,
    Translator,
    choose_device,
    parameter_count,
    save_description,
)
from heedful.config import Recipe, changed_keys, load_recipe
from heedful.errors import UserError
from heedful.evaluation.metrics import Scores, corpus_scores, perplexity
from heedful.files import remove_unfinished, write_json, write_text
from heedful.prepare import Prepared, Say, prepare
from heedful.tasks.translation import pair_loss
from heedful.text.batches import plan_epoch
from heedful.training.averaging import average_weights
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import Listener, Reason, RunFinished, RunStarted, Sample
from heedful.training.loggers import JsonlLog, TensorBoardLog, read_log
from heedful.training.report import write_report
from heedful.training.schedules import make_schedule
from heedful.training.trainer import Evaluation, Trainer, Work
from heedful.zoo import architecture
from heedful.zoo.saved import WEIGHTS, load_tensors, make_config, save_tensors, set_weights


@dataclass(frozen=True)
class Result:
    """How a run ended. `scores` are of the held-out test (or validation) text."""

    directory: Path
    reason: Reason
    scores: Scores | None


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
    recipe = _resolve(recipe, device)
    with _undone_on_error(out):
        data, model, trainer, resumed_from = _start(recipe, out, device, resume, say)
        log_step = (resumed_from or 0) if resume else None
        trainer.listeners = [*listeners, JsonlLog(out / "log.jsonl", resume_step=log_step)]
        if recipe.training.tensorboard:
            trainer.listeners.append(TensorBoardLog(out / "tensorboard", resume_step=log_step))
    try:
        trainer.emit(_started(recipe, data, model, resumed_from))
        reason = trainer.run()
        scores = None
        if reason != "interrupted":
            say("scoring the held-out text with the model that the run chooses")
            _choose_final(trainer, model, recipe, data, out)
            scores = _final_scores(recipe, data, model, out)
        state = trainer.state
        values = {} if scores is None else scores.values()
        trainer.emit(RunFinished(state.step, state.seconds, reason, state.best, values))
    finally:
        for listener in trainer.listeners:
            listener.close()
    write_report(
        out / "report.html",
        title=f"{recipe.task}: {out.name}",
        events=read_log(out / "log.jsonl"),
        recipe_yaml=recipe.to_yaml(),
        facts=_facts(model.net, device, command),
        final_scores=scores.to_dict()["scores"] if scores else {},
    )
    return Result(out, reason, scores)


def _resolve(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with `precision: auto` decided: bf16 where the processor multiplies in it."""
    training = recipe.training
    if training.precision != "auto":
        return recipe
    fast = {
        "cpu": torch.cpu._is_avx512_bf16_supported,
        "cuda": torch.cuda.is_bf16_supported,
    }.get(device.type, lambda: False)
    precision = "bf16" if fast() else "fp32"
    return recipe.model_copy(
        update={"training": training.model_copy(update={"precision": precision})}
    )


@contextmanager
def _undone_on_error(out: Path) -> Iterator[None]:
    """A start that fails leaves the folder as it was, so that the corrected command can use it."""
    new = next((path for path in [*reversed(out.parents), out] if not path.exists()), None)
    before = set() if new else set(out.glob("*"))
    try:
        yield
    except BaseException:
        for path in [new] if new else set(out.glob("*")) - before:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()
        raise


def _start(
    recipe: Recipe, out: Path, device: torch.device, resume: bool, say: Say
) -> tuple[Prepared, Translator, Trainer, int | None]:
    """Everything up to the first step; the step that a resumed run goes on from."""
    _model_config(recipe, 8, 8)  # what is wrong with it is told before the data are read
    _open_folder(recipe, out, resume)
    data = prepare(recipe, out / "data", say)
    torch.manual_seed(recipe.training.seed)
    model = _build(recipe, data)
    model.net.to(device)
    save_description(model, out)
    checkpoints = Checkpoints(out / "checkpoints", recipe.training.average_last)
    rate = make_schedule(
        recipe.training.schedule,
        d_model=model.config.d_model,
        max_steps=recipe.training.max_steps,
    )
    work = _work(recipe, data, model, out)
    work.plan(0)  # a pair above the batch's limit is told now
    trainer = Trainer(model.net, work, recipe.training, rate, checkpoints)
    return data, model, trainer, trainer.resume() if resume else None


def _open_folder(recipe: Recipe, out: Path, resume: bool) -> None:
    """A new folder with the resolved recipe in it, or one whose recipe is still the same."""
    saved = out / "recipe.yaml"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder for the run (--out)")
    if resume:
        if not saved.is_file():
            raise UserError(f"{out} holds no run to resume (no recipe.yaml); leave out --resume")
        remove_unfinished(out)
        changed = changed_keys(load_recipe(saved), recipe)
        if changed:
            raise UserError(
                f"cannot resume {out} with another recipe; changed: {', '.join(changed)}; "
                "start a new run, or resume with its own recipe.yaml"
            )
    elif saved.exists() or (out / "checkpoints").exists() or (out / "data").exists():
        raise UserError(f"{out} already holds a run; go on with --resume, or give another --out")
    else:
        write_text(saved, recipe.to_yaml())


def _build(recipe: Recipe, data: Prepared) -> Translator:
    sizes = data.src_tokenizer.vocab_size, data.tgt_tokenizer.vocab_size
    name, config = _model_config(recipe, *sizes)
    limits = Limits.of(data.train.src_lengths, data.train.tgt_lengths)
    card = Card(name, recipe.task, recipe.data.src_language, recipe.data.tgt_language, limits)
    net = architecture(name).build(config)
    return Translator(net, config, card, data.src_tokenizer, data.tgt_tokenizer)


def _model_config(recipe: Recipe, src_vocab_size: int, tgt_vocab_size: int) -> tuple[str, Any]:
    """Name and Config of the architecture that a recipe's `model` describes."""
    keys: dict[str, Any] = dict(recipe.model)
    name = str(keys.pop("architecture", "vaswani2017"))
    module = architecture(name)
    size = keys.pop("size", None)
    if size is not None and size not in module.SIZES:
        raise UserError(f"model.size: no size {size} of {name}; known: {', '.join(module.SIZES)}")
    for key in ("src_vocab_size", "tgt_vocab_size"):
        if key in keys:
            raise UserError(f"model.{key} follows from the tokenizer: set tokenizer.vocab_size")
    keys = {
        "src_vocab_size": src_vocab_size,
        "tgt_vocab_size": tgt_vocab_size,
        "max_length": recipe.data.max_length,
        **(module.SIZES[size] if size else {}),
        **({} if recipe.tokenizer.joint else {"tie_embeddings": "decoder"}),
        **keys,
    }
    return name, make_config(name, keys)


def _work(recipe: Recipe, data: Prepared, model: Translator, out: Path) -> Work:
    settings = recipe.training

    def plan(epoch: int) -> Sequence[Any]:
        return plan_epoch(
            data.train.src_lengths,
            data.train.tgt_lengths,
            max_tokens=settings.batch_tokens,
            max_sentences=settings.batch_sentences,
            seed=settings.seed,
            epoch=epoch,
        )

    def keep_best(net: nn.Module) -> None:
        save_tensors(out / WEIGHTS, dict(net.named_parameters()))

    return Work(
        plan=plan,
        load=lambda rows: model.collate(data.train, rows),
        loss=lambda net, batch: pair_loss(
            model.net, batch, label_smoothing=settings.label_smoothing
        ),
        evaluate=lambda net: _evaluate(recipe, data, model),
        keep_best=keep_best,
    )


def _evaluate(recipe: Recipe, data: Prepared, model: Translator) -> Evaluation:
    """Teacher-forced loss on all held-out pairs, and real decoding of the first of them."""
    found = model.teacher_forced_sums(data.valid, recipe.training.label_smoothing)
    nll, accuracy = float(found.nll) / found.tokens, float(found.correct) / found.tokens
    settings = recipe.evaluation
    pairs = data.valid_pairs[: settings.decode_sentences]
    scores: dict[str, float] = {}
    samples: list[Sample] = []
    if pairs:
        outputs = model.translate(
            [src for src, _ in pairs],
            beam_size=settings.beam_size,
            length_penalty=settings.length_penalty,
            too_long="truncate",
        )
        metrics = {*_metrics(recipe)[:1], settings.metric} & {"bleu", "chrf", "exact_match"}
        found_scores = corpus_scores(
            outputs,
            [tgt for _, tgt in pairs],
            trg_lang=recipe.data.tgt_language,
            metrics=sorted(metrics),
        )
        scores = found_scores.values()
        shown = list(zip(pairs, outputs, strict=True))[: settings.num_samples]
        samples = [Sample(src, tgt, output) for (src, tgt), output in shown]
    values_by_metric = scores | {"loss": -nll, "token_accuracy": accuracy}
    if settings.metric not in values_by_metric:
        raise UserError(
            f"evaluation.metric {settings.metric} needs decoded text: raise decode_sentences"
        )
    return Evaluation(
        loss=float(found.loss) / found.tokens,
        perplexity=perplexity(float(found.nll), found.tokens),
        token_accuracy=accuracy,
        scores=scores,
        samples=samples,
        value=values_by_metric[settings.metric],
    )


def _metrics(recipe: Recipe) -> list[str]:
    """What outputs of the task are scored by, the main one first."""
    return ["bleu", "chrf", "ter"] if recipe.task == "translation" else ["exact_match"]


def _choose_final(
    trainer: Trainer, model: Translator, recipe: Recipe, data: Prepared, out: Path
) -> None:
    """The run's model: the average of the last checkpoints where it is better than the best."""
    best = load_tensors(out / WEIGHTS)
    files = [path / WEIGHTS for path in trainer.checkpoints.regular()]
    if recipe.training.average_last > 1 and len(files) > 1:
        average = average_weights(files)
        set_weights(model.net, average, out)
        if _evaluate(recipe, data, model).value > trainer.state.best_value:
            save_tensors(out / WEIGHTS, average)
            return
    set_weights(model.net, best, out / WEIGHTS)


def _final_scores(recipe: Recipe, data: Prepared, model: Translator, out: Path) -> Scores:
    """Decode the test text (the validation text where there is none) and score it."""
    name, pairs = ("test", data.test_pairs) if data.test_pairs else ("valid", data.valid_pairs)
    settings = recipe.evaluation
    outputs = model.translate(
        [src for src, _ in pairs],
        beam_size=settings.final_beam_size,
        length_penalty=settings.length_penalty,
        too_long="truncate",
    )
    scores = corpus_scores(
        outputs,
        [tgt for _, tgt in pairs],
        trg_lang=recipe.data.tgt_language,
        metrics=_metrics(recipe),
    )
    beam = {"beam_size": settings.final_beam_size, "length_penalty": settings.length_penalty}
    write_json(out / "scores.json", {"set": name, **beam, **scores.to_dict()})
    lines = [f"{output}\n" for output in outputs]
    write_text(out / f"{name}.output.txt", "".join(lines))
    return scores


def _started(
    recipe: Recipe, data: Prepared, model: Translator, resumed_from: int | None
) -> RunStarted:
    return RunStarted(
        recipe=recipe.model_dump(mode="json"),
        num_parameters=parameter_count(model.net),
        num_train=len(data.train),
        num_valid=len(data.valid),
        device=str(model.device),
        total_steps=recipe.training.max_steps,
        resumed_from=resumed_from,
    )


def _facts(net: nn.Module, device: torch.device, command: str) -> dict[str, str]:
    return {
        "command": command,
        "parameters": f"{parameter_count(net):,}",
        "heedful": heedful.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}, {torch.get_num_threads()} threads",
        "device": str(device),
    }
