"""The stages of an adaptation: texts, scores before, training, the mixture of weights, scores after.

The folder of an adaptation is a model directory; `run` in it is the run that trained. The weights
are a mean of those of the model and of the run (Wortsman et al. 2022, "Robust fine-tuning of
zero-shot models", section 3), whose share is chosen by the loss on held-out text.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from heedful.adaptation.recipe import (
    EVALUATIONS,
    GENERAL,
    GENERAL_TRAIN,
    GENERAL_VALID,
    MEMORY,
    MEMORY_VALID,
    Adaptation,
    languages_of,
    method_of,
    recipe_of,
)
from heedful.adaptation.texts import General, Memory, read_general, read_memory, write_rows
from heedful.config import Recipe
from heedful.data.prepared import content_key
from heedful.dry_run import RunEstimate, estimate_run
from heedful.errors import UserError
from heedful.files import as_path, read_object, write_json
from heedful.pipelines import Translator, load, parameter_count
from heedful.pipelines.loading import check_own_format, expect
from heedful.progress import PrintLine
from heedful.recipe_files import recorded_recipe
from heedful.run import TrainingRun, train
from heedful.tasks.run_data import RunData
from heedful.tasks.start import checked_task, prepare_data
from heedful.tasks.task import Task
from heedful.training.folder import can_resume
from heedful.zoo.names import set_weights, weights_of

RUN, FACTS = "run", "adaptation.json"
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the trained weights
FEWEST_STEPS = 20
METRICS = ("bleu", "chrf")
# A function of (recipe, folder, resume) that returns the run, which may be interrupted.
TrainStage = Callable[[Recipe, Path, bool], TrainingRun]


@dataclass(frozen=True)
class Adapted:
    """The result of an adaptation.

    Attributes:
        directory: of the model.
        share: of the trained weights in those of the model; 0: it is the original, because nothing
            was better on held-out text.
        before, after: scores on held-out text by metric and corpus, as `bleu/memory`; None: the
            training was interrupted.
    """

    directory: Path
    share: float = 0.0
    before: Mapping[str, float] | None = None
    after: Mapping[str, float] | None = None

    @property
    def is_complete(self) -> bool:
        """False for an adaptation that was interrupted; the same call continues it."""
        return self.after is not None


def adapt(
    model: str | PathLike[str],
    settings: Adaptation,
    out: str | PathLike[str],
    train_stage: TrainStage | None = None,
    print_line: PrintLine = lambda line: None,
) -> Adapted:
    """Adapt a translator to a translation memory, and write the new model to a folder.

    Called again with the same arguments after an interruption, it continues.

    Args:
        model: a model directory of heedful: a run, or an imported model.
        out: a new folder.
        train_stage: trains a recipe; default: `heedful.train`.
        print_line: is called with lines on texts, plan and scores.

    Raises:
        UserError: no translator; a memory that is damaged, of other languages, with few units or
            known to the model; a folder of something else.

    Example: `adapt("runs/mine", Adaptation([Path("memory.tmx")]), "adapted")`
    """
    began = time.monotonic()
    folder, out = as_path(model, "model"), as_path(out, "out")
    check_own_format(folder)
    translator = expect(load(folder, device="cpu", backend="eager"), Translator, "adapt")
    settings = _checked(translator, settings)
    claim = _checked_claim(folder, settings, out)
    if can_resume(out / RUN):
        recipe = recorded_recipe(out / RUN)
        print_line(f"resuming   {out / RUN}")
    else:
        recipe = _prepare(translator, folder, settings, out, claim, print_line)
    task = checked_task(recipe)
    data = prepare_data(task, lambda line: None)
    facts = read_object(out / FACTS)
    if "before" not in facts:
        before, seconds = _timed_scores(task, translator, data)
        facts |= {"before": before}
        if not can_resume(out / RUN):
            left = 60 * settings.minutes - (time.monotonic() - began)
            recipe = _planned(recipe, left - 2 * seconds, print_line)
        write_json(out / FACTS, facts)
    run = (train_stage or _train)(recipe, out / RUN, can_resume(out / RUN))
    if run.reason == "interrupted":
        return Adapted(out)
    return _conclude(translator, run, task, data, out, facts, print_line)


def _train(recipe: Recipe, folder: Path, resume: bool) -> TrainingRun:
    return train(recipe, folder, resume=resume, command="heedful.adaptation.adapt")


def _checked(model: Translator, settings: Adaptation) -> Adaptation:
    """The settings with absolute paths; raises UserError for wrong ones."""
    if not settings.memory:
        raise UserError("no translation memory is given; name a file")
    if not settings.minutes > 0:
        raise UserError(f"minutes must be above 0, not {settings.minutes:g}")
    if model.metadata.language_tags:
        raise UserError(
            "this model has several target languages, whose tags adapt does not set; fine-tune it "
            "by heedful train with init_from and data.corpora"
        )
    paths = {
        name: [path.absolute() for path in getattr(settings, name)]
        for name in ("memory", "general", "valid")
    }
    return replace(settings, **paths)


def _checked_claim(model: Path, settings: Adaptation, out: Path) -> dict[str, Any]:
    """The settings as the folder records them; UserError if it was started with other ones."""
    content = {
        "model": str(model.absolute()),
        **{name: content_key(getattr(settings, name)) for name in ("memory", "general", "valid")},
        "minutes": settings.minutes,
        "method": settings.method,
        "keep": settings.keep,
        "changes": dict(settings.changes),
    }
    content = json.loads(json.dumps(content))
    path = out / FACTS
    if not path.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} exists already; give a new out=FOLDER")
        return content
    facts = read_object(path)
    if "after" in facts:
        raise UserError(f"{out} is finished; give another out=FOLDER")
    if changed := [key for key, value in content.items() if facts["settings"].get(key) != value]:
        raise UserError(
            f"{out} was started with other settings ({', '.join(changed)}); give those again, or "
            "another out=FOLDER"
        )
    return content


def _prepare(
    model: Translator,
    folder: Path,
    settings: Adaptation,
    out: Path,
    claim: dict[str, Any],
    print_line: PrintLine,
) -> Recipe:
    """Read all texts, write those that the run needs besides the memory, and make its recipe."""
    languages = languages_of(model)
    memory = read_memory(settings.memory, settings.valid, languages, model)
    print_line(f"memory     {memory.summary}; {len(memory.valid):,} held out")
    if line := memory.characters():
        print_line(f"characters {line}")
    general = read_general(settings.general, folder, memory, languages, print_line)
    weight = None
    if general is not None:
        weight = min(1.0, memory.num_units / len(general.train))
        known = f"; {general.known:,} units are in it already" if general.known else ""
        print_line(
            f"general    {len(general.train):,} pairs of {general.origin}, {len(general.valid):,} "
            f"held out{known}"
        )
    recipe = recipe_of(model, folder, settings, out.absolute(), weight)
    checked_task(recipe)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FACTS, {"settings": claim})
    _write(memory, general, out)
    return recipe


def _write(memory: Memory, general: General | None, out: Path) -> None:
    write_rows(memory.valid, out / MEMORY_VALID)
    if general is not None:
        write_rows(general.train, out / GENERAL_TRAIN)
        write_rows(general.valid, out / GENERAL_VALID)


def _timed_scores(task: Task, model: Translator, data: RunData) -> tuple[dict[str, float], float]:
    """Scores of a model on all held-out rows, and the seconds that they took."""
    began = time.monotonic()
    scores = _scores(task, model, data)
    return scores, time.monotonic() - began


def _scores(task: Task, model: Translator, data: RunData) -> dict[str, float]:
    """The loss, and the scores of translations, by corpus."""
    evaluation = task.evaluate(model, data)
    with TemporaryDirectory() as folder:
        final = task.compute_final_scores(model, data, Path(folder))
    losses = {f"loss/{name}": loss for name, loss in evaluation.corpora.items()}
    return {**losses, **final.values()}


def _planned(recipe: Recipe, seconds: float, print_line: PrintLine) -> Recipe:
    """The recipe with its number of steps: of all epochs, or as many as fit in the time."""
    estimate = estimate_run(recipe, lambda line: None)
    total = estimate.total_steps
    assert total is not None
    # The measured steps are without the reading of batches and the evaluations.
    fitting = max(FEWEST_STEPS, int(0.8 * seconds / estimate.seconds_per_step))
    steps = min(total, fitting)
    print_line(_plan_line(recipe, estimate, steps))
    every = max(1, -(-steps // EVALUATIONS))
    return recipe.replace(
        {
            "training.max_steps": steps,
            "training.max_minutes": max(seconds, 1.0) / 60,
            "training.evaluate_every": every,
        }
    )


def _plan_line(recipe: Recipe, estimate: RunEstimate, steps: int) -> str:
    minutes = steps * estimate.seconds_per_step / 60
    method = "full" if recipe.adapter.rank is None else f"LoRA of rank {recipe.adapter.rank}"
    epochs = steps / estimate.steps_per_epoch
    return (
        f"plan       {method}: {steps:,} steps ({epochs:.1f} epochs) of "
        f"{estimate.seconds_per_step:.2f} s, about {minutes:.1f} minutes"
    )


@torch.no_grad()
def _conclude(
    original: Translator,
    run: TrainingRun,
    task: Task,
    data: RunData,
    out: Path,
    facts: dict[str, Any],
    print_line: PrintLine,
) -> Adapted:
    """Choose the share of the trained weights, write the model, and score it."""
    tuned = expect(load(out / RUN, device="cpu", backend="eager"), Translator, "adapt")
    weights = {name: tensor.clone() for name, tensor in weights_of(tuned.net).items()}
    losses = {0.0: task.evaluate(original, data).corpora}
    for share in SHARES:
        set_weights(tuned.net, mixed(weights_of(original.net), weights, share), out)
        losses[share] = task.evaluate(tuned, data).corpora
    share = choose_share(losses)
    set_weights(tuned.net, mixed(weights_of(original.net), weights, share), out)
    after = facts["before"] if not share else _scores(task, tuned, data)
    model = tuned if share else original
    model.file_writer(out)(out)
    facts |= {"share": share, "losses": losses, "after": after}
    write_json(out / FACTS, facts)
    return Adapted(out, share, facts["before"], after)


def mixed(
    original: Mapping[str, Tensor], trained: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """Means of the weights of two nets, with this share of the second."""
    return {name: torch.lerp(tensor, trained[name], share) for name, tensor in original.items()}


def choose_share(losses: Mapping[float, Mapping[str, float]]) -> float:
    """The share of the trained weights with the smallest held-out loss.

    Args:
        losses: by share the loss of each corpus; with share 0 the model's own.
    """
    return min(losses, key=lambda share: sum(losses[share].values()))
