"""The stages of an adaptation: texts, scores before, training, weights and scores after.

The folder of an adaptation is a model directory; `run` in it is the run that trained. The weights
are a mean of those of the model and of the run (Wortsman et al. 2022, "Robust fine-tuning of
zero-shot models", section 3), whose share is chosen by the loss on held-out text.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.adaptation.recipe import (
    GENERAL_TRAIN,
    GENERAL_VALID,
    MEMORY_VALID,
    Adaptation,
    Plan,
    languages_of,
    method_reason,
    minutes_of,
    recipe_of,
)
from heedful.adaptation.texts import read_general, read_memory, write_rows
from heedful.config import Recipe
from heedful.data.prepared import content_key
from heedful.data.row_files import expand_path
from heedful.data.rows import CORPUS
from heedful.dry_run import estimate_run
from heedful.errors import UserError
from heedful.files import (
    as_path,
    missing_folders,
    read_object,
    remove,
    remove_empty,
    write_json,
)
from heedful.pipelines import Translator, load
from heedful.pipelines.loading import check_own_format, expect
from heedful.progress import PrintLine
from heedful.recipe_files import recorded_recipe
from heedful.run import TrainingRun, train
from heedful.tasks.run_data import RunData
from heedful.tasks.start import checked_task, prepare_data
from heedful.tasks.task import Task
from heedful.tasks.translation import Translation
from heedful.training.folder import can_resume
from heedful.zoo.saved import set_weights, weights_of

RUN, FACTS = "run", "adaptation.json"
SHARES = (1.0, 0.75, 0.5, 0.25)  # of the trained weights
NO_GENERAL = (
    "no pairs: the training keeps near the model's own probabilities, and the cost for other text "
    "is not measured"
)
MOST_PASSES = 4.0  # over general pairs for one over the memory
METRICS = ("bleu", "chrf")
_TEXTS = ("memory", "general", "valid")  # settings that name files
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
    original = expect(load(folder, device="cpu", backend="eager"), Translator, "adapt")
    settings = _checked(original, settings)
    if original.metadata.language_codes:
        original.metadata = replace(original.metadata, **_chosen_languages(original, settings))
    claim = _checked_claim(folder, settings, out)
    if can_resume(out / RUN):
        recipe, before = recorded_recipe(out / RUN), read_object(out / FACTS)["before"]
        print_line(f"resuming   {out / RUN}")
    else:
        with _undone_on_error(out):
            recipe, before = _begin(original, folder, settings, out, claim, began, print_line)
    run = (train_stage or _train)(recipe, out / RUN, can_resume(out / RUN))
    if run.reason == "interrupted":
        return Adapted(out)
    adapted = _conclude(original, recipe, run, out, before, print_line)
    write_json(out / FACTS, {"settings": claim, **asdict(adapted), "directory": str(out)})
    return adapted


@contextmanager
def _undone_on_error(out: Path) -> Iterator[None]:
    """Remove the files that the block wrote into the folder if it raises."""
    made = missing_folders(out)
    try:
        yield
    except BaseException:
        for name in (FACTS, MEMORY_VALID, GENERAL_TRAIN, GENERAL_VALID):
            remove(out / name)
        remove_empty(made)
        raise


def _train(recipe: Recipe, folder: Path, resume: bool) -> TrainingRun:
    return train(recipe, folder, resume=resume, command="heedful.adaptation.adapt")


def _checked(model: Translator, settings: Adaptation) -> Adaptation:
    """The settings with absolute paths; raises UserError for wrong ones."""
    if not settings.memory:
        raise UserError("no translation memory is given; name a file")
    if not 0 < settings.minutes < math.inf:
        raise UserError(f"minutes must be above 0, not {settings.minutes:g}")
    if model.metadata.language_tags:
        raise UserError(
            "this model has several target languages, whose tags adapt does not set; fine-tune it "
            "by heedful train with init_from and data.corpora"
        )
    paths: dict[str, Any] = {
        name: [path.absolute() for path in getattr(settings, name)] for name in _TEXTS
    }
    return replace(settings, **paths)


def _chosen_languages(model: Translator, settings: Adaptation) -> dict[str, Any]:
    """The languages of the memory, of a model for many: they are then its own.

    Raises:
        UserError: they are not given.
    """
    languages: dict[str, Any] = {}
    for key in ("src_language", "tgt_language"):
        given = settings.changes.get(f"data.{key}") or getattr(model.metadata, key)
        if given is None:
            raise UserError(
                f"this model has {len(model.metadata.language_codes)} languages: set data."
                "src_language and data.tgt_language to those of the memory, such as "
                "data.src_language=en"
            )
        languages[key] = str(given)
    return languages


def _files(paths: Sequence[Path]) -> list[Path]:
    """The files of folders and patterns."""
    return [file for path in paths for file in expand_path(path)]


def _checked_claim(model: Path, settings: Adaptation, out: Path) -> dict[str, Any]:
    """The settings as the folder records them; UserError if it was started with other ones."""
    content = {
        "model": str(model.absolute()),
        **{name: content_key(_files(getattr(settings, name))) for name in _TEXTS},
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
    if facts.get("after"):
        raise UserError(f"{out} is finished; give another out=FOLDER")
    known = facts.get("settings")
    if not isinstance(known, dict) or (can_resume(out / RUN) and "before" not in facts):
        raise UserError(f"{path} is damaged; give another out=FOLDER")
    changed = [key for key, value in content.items() if known.get(key) != value]
    if changed and can_resume(out / RUN):
        raise UserError(
            f"{out} was started with other settings ({', '.join(changed)}); give those again, or "
            "another out=FOLDER"
        )
    return content


def _begin(
    model: Translator,
    folder: Path,
    settings: Adaptation,
    out: Path,
    claim: dict[str, Any],
    began: float,
    print_line: PrintLine,
) -> tuple[Recipe, dict[str, float]]:
    """Read all texts, write those that the run needs besides the memory, score the model, plan.

    Args:
        began: the time at which the adaptation began.

    Returns:
        The recipe, and the scores of the model.
    """
    languages = languages_of(model, settings)
    memory = read_memory(settings.memory, settings.valid, languages, model)
    print_line(f"memory     {memory.summary}; {len(memory.valid):,} held out")
    if line := memory.characters():
        print_line(f"characters {line}")
    general = read_general(settings.general, folder, memory, languages, print_line)
    weight = None if general is None else min(MOST_PASSES, memory.num_units / len(general.train))
    print_line(f"general    {NO_GENERAL if general is None else general.summary()}")
    recipe = recipe_of(model, folder, settings, out.absolute(), weight)
    task = checked_task(recipe)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / FACTS, {"settings": claim})
    write_rows(memory.valid, out / MEMORY_VALID)
    if general is not None:
        write_rows(general.train, out / GENERAL_TRAIN)
        write_rows(general.valid, out / GENERAL_VALID)
    data = prepare_data(task, lambda line: None)
    before, seconds = _scores(task, model, data)
    write_json(out / FACTS, {"settings": claim, "before": before})
    estimate = estimate_run(recipe, lambda line: None)
    # The final model is scored like this one, and its share of trained weights is chosen before.
    left = 60 * settings.minutes - (time.monotonic() - began) - 2 * seconds
    if (limit := recipe.training.max_minutes) is not None:
        left = min(left, 60 * limit)
    plan = Plan.fitting(estimate, left)
    reason = method_reason(model, settings)
    print_line(f"method     {reason}")
    print_line(f"plan       {plan.summary()}; scores take {minutes_of(2 * seconds)} more")
    return plan.applied(recipe), before


def _scores(task: Task, model: Translator, data: RunData) -> tuple[dict[str, float], float]:
    """The losses of the corpora and the scores of translations, and the seconds that they took."""
    began = time.monotonic()
    scores = {f"loss/{name}": loss for name, loss in task.evaluate(model, data).corpora.items()}
    assert isinstance(task, Translation)
    metrics = [name for name in METRICS if name in task.usable_metrics] or ["exact_match"]
    rows = data.texts("valid")
    for corpus in dict.fromkeys(row[CORPUS] for row in rows):
        of_corpus = [row for row in rows if row[CORPUS] == corpus]
        _, found = task.decode(model, of_corpus, task.recipe.evaluation.final_beam_size, metrics)
        scores |= {f"{name}/{corpus}": value for name, value in found.values().items()}
    return scores, time.monotonic() - began


@torch.no_grad()
def _conclude(
    model: Translator,
    recipe: Recipe,
    run: TrainingRun,
    out: Path,
    before: dict[str, float],
    print_line: PrintLine,
) -> Adapted:
    """Choose the share of the trained weights, give them to the model, write and score it.

    All else of the model stays as it is, such as its limits of outputs.
    """
    task = checked_task(recipe)
    data = prepare_data(task, lambda line: None)
    first = {name: tensor.clone() for name, tensor in weights_of(model.net).items()}
    of_run = load(run.directory, device="cpu", backend="eager")
    trained = weights_of(of_run.net)
    losses = {0.0: task.evaluate(model, data).loss}
    for share in SHARES:
        set_weights(model.net, mixed(first, trained, share), out)
        losses[share] = task.evaluate(model, data).loss
    share = min(losses, key=losses.__getitem__)
    print_line(f"weights    {share:.0%} of the trained ones and {1 - share:.0%} of the model's")
    set_weights(model.net, mixed(first, trained, share), out)
    if share:
        model.metadata = replace(model.metadata, keep=of_run.metadata.keep)
    after = _scores(task, model, data)[0] if share else before
    model.file_writer(out)(out)
    return Adapted(out, share, before, after)


def mixed(
    original: Mapping[str, Tensor], trained: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """Means of the weights of two nets, with this share of the second."""
    return {name: torch.lerp(tensor, trained[name], share) for name, tensor in original.items()}
