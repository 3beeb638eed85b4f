"""Back-translation: a backward model translates monolingual targets, on which a forward one trains.

Sennrich et al. 2016, "Improving Neural Machine Translation Models with Monolingual Data", section
3.2; sampled sources: Edunov et al. 2018, "Understanding Back-Translation at Scale"; a tag before
back-translated sources: Caswell et al. 2019, "Tagged Back-Translation".

The folder of the whole has one folder or file per stage, so that a stage is complete or resumed:
`backward` (a run), `back` (a bulk job), `back.jsonl` (all pairs), `forward` (a run).
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from heedful.bulk.folder import read_results
from heedful.bulk.job import BulkJob, choose_workers, run_job, run_locally
from heedful.bulk.shards import SHARD_ROWS
from heedful.config import Files, Recipe, parse_recipe
from heedful.data.prepared import content_key
from heedful.data.row_files import depends_on_languages, expand_path, format_of, open_rows
from heedful.data.rows import collect
from heedful.data.splits import normalized
from heedful.deploy.optimize import optimize
from heedful.dry_run import prepare_run
from heedful.errors import UserError
from heedful.files import atomic_open, read_object, write_json, write_text
from heedful.generation.rules import sampling_rules
from heedful.options import SAMPLING_OPTIONS, Options
from heedful.pipelines import Translator, load
from heedful.pipelines.loading import expect
from heedful.progress import PrintLine
from heedful.recipe_changes import check_changes
from heedful.recipe_files import recorded_recipe, with_absolute_paths
from heedful.run import TrainingRun
from heedful.tasks.corpora import resolve_paths, split_files
from heedful.tasks.start import checked_task
from heedful.tasks.translation import open_pairs
from heedful.training.folder import is_run

BACKWARD, SHARDS, PAIRS, FORWARD = "backward", "back", "back.jsonl", "forward"
PARALLEL, BACK = "parallel", "back"  # names of the corpora of the forward run
_SETTINGS = "back_translation.json"
_HELD_OUT = "valid.jsonl"
_SPLITS = ("train", "valid", "test")
# A function of (recipe, folder, resume) that returns the run, which may be interrupted.
TrainStage = Callable[[Recipe, Path, bool], TrainingRun]


@dataclass(frozen=True)
class BackTranslation:
    """The settings of a back-translation.

    Attributes:
        mono: files of texts in the target language, one per line, or tables with a column `text`.
        tag: the token before back-translated sources; None: none.
        weight: passes over the back-translated pairs in an epoch (`data.corpora.back.weight`).
        backward_changes: keys of the backward run that differ from the recipe's.
        backward_model: a model of the reverse direction; None: one is trained.
        decoding: options of the translation, as in `heedful.options.Options`.
        optimize: find the fastest backend first; None: for more than `OPTIMIZE_FROM` texts.
    """

    mono: Sequence[Path]
    tag: str | None = "<bt>"
    weight: float = 1.0
    backward_changes: Mapping[str, Any] = field(default_factory=dict)
    backward_model: Path | None = None
    decoding: Mapping[str, Any] = field(default_factory=dict)
    optimize: bool | None = None


OPTIMIZE_FROM = 20_000  # texts; fewer are translated faster than backends are compared


def back_translate(
    recipe: Recipe,
    settings: BackTranslation,
    out: Path,
    train_stage: TrainStage,
    print_line: PrintLine,
) -> TrainingRun:
    """Train backward, translate the monolingual texts, and train forward on both.

    Started again with the same settings, it resumes at the last checkpoint of a run, or at the last
    shard of translations.

    Args:
        recipe: of the forward run, without the back-translated pairs.
        out: the folder of all stages.

    Returns:
        The forward run, or the backward one if it was interrupted.

    Raises:
        UserError: a recipe without pairs of files; other settings than those `out` was started
            with; no translation left; errors of the runs.
    """
    recipe = with_absolute_paths(recipe)
    _check(recipe, settings, out)
    claim = _checked_claim(recipe, out, settings)
    valid = _held_out_rows(recipe, out, print_line)
    _check_texts(recipe, valid, settings, out)
    _claim(out, claim, valid)
    recipe = _with_valid_file(recipe, out / _HELD_OUT)
    model_folder = settings.backward_model or out / BACKWARD
    if settings.backward_model is None:
        backward = reverse_recipe(recipe).replace(settings.backward_changes)
        print_line(f"1 of 3: a model of the reverse direction, in {model_folder}")
        run = _train_unless_complete(backward, model_folder, train_stage)
        if run is not None and run.reason == "interrupted":
            return run
    if not (out / PAIRS).is_file():
        print_line(f"2 of 3: translations of {', '.join(map(str, settings.mono))}")
        _translate(model_folder, settings, out, recipe, print_line)
    print_line(f"3 of 3: a model on both kinds of pairs, in {out / FORWARD}")
    forward = forward_recipe(recipe, out / PAIRS, settings)
    run = _train_unless_complete(forward, out / FORWARD, train_stage)
    if run is None:
        raise UserError(f"{out} is finished: its model is {out / FORWARD}; give another out=FOLDER")
    return run


def reverse_recipe(recipe: Recipe) -> Recipe:
    """The recipe of the reverse direction: sources are targets, in all keys that name a side."""
    data, filters = recipe.data, recipe.data.filters
    swap = {"src": "tgt", "tgt": "src"}
    changes: dict[str, Any] = {
        "data.src_language": data.tgt_language,
        "data.tgt_language": data.src_language,
        "expect": [],
    }
    if filters.model_fields_set & {"src_script", "tgt_script", "unique"}:
        changes["data.filters.src_script"] = filters.tgt_script
        changes["data.filters.tgt_script"] = filters.src_script
        changes["data.filters.unique"] = [swap.get(part, part) for part in filters.unique]
    for split in _SPLITS:
        changes |= _reversed_files(f"data.{split}", getattr(data, split), Path(data.folder or ""))
    return recipe.replace(changes)


def _reversed_files(key: str, files: Files, folder: Path) -> dict[str, Any]:
    """The keys of a split with the sides exchanged; raises UserError for files of pairs."""
    if not files.paths():
        return {}
    if files.file is None:
        return {f"{key}.src": files.tgt, f"{key}.tgt": files.src}
    names = files.src_field, files.tgt_field
    if names == (None, None):
        named = resolve_paths(files.file, folder)
        paths = [file for path in named for file in expand_path(path)]
        if pairs := [*filter(depends_on_languages, paths)]:
            raise UserError(
                f"{pairs[0]} has no columns, which back-translation exchanges; write its pairs "
                f"into a .tsv file, or into files of lines, {key}.src and {key}.tgt"
            )
        is_numbered = all(format_of(path) in ("tsv", "csv") for path in paths)
        names = (1, 2) if is_numbered else ("src", "tgt")
    src, tgt = (name or side for name, side in zip(names, ("src", "tgt"), strict=True))
    return {f"{key}.src_field": tgt, f"{key}.tgt_field": src}


def forward_recipe(recipe: Recipe, pairs: Path, settings: BackTranslation) -> Recipe:
    """The recipe of the forward run: the parallel and the back-translated pairs as corpora."""
    content = recipe.model_dump(exclude_unset=True)
    data = content["data"]
    parallel = data.pop("train")
    parallel |= {split: data.pop(split) for split in ("valid", "test") if split in data}
    back = {"file": str(pairs.absolute()), "weight": settings.weight}
    if settings.tag is not None:
        back["src_tag"] = settings.tag
    data["corpora"] = {PARALLEL: parallel, BACK: back}
    return parse_recipe(content, "back-translation")


def _check(recipe: Recipe, settings: BackTranslation, out: Path) -> None:
    """Raise UserError for a recipe that cannot be reversed, or settings that a stage refuses."""
    if recipe.task != "translation":
        raise UserError(f"back-translation is for the task translation, not {recipe.task}")
    if recipe.data.corpora:
        raise UserError("back-translation makes data.corpora itself; give the pairs as data.train")
    if not recipe.data.train.paths():
        raise UserError("data.train is not given: add its pairs, as for heedful train")
    if recipe.distillation.teacher is not None:
        raise UserError("back-translation and distillation.teacher exclude each other; leave one")
    if recipe.init_from is not None and settings.backward_model is None:
        raise UserError(
            f"init_from {recipe.init_from} is a model of the forward direction; give one of the "
            "reverse direction as backward_model=DIRECTORY, or leave init_from out"
        )
    if not settings.mono:
        raise UserError("no monolingual text is given; name a file, mono=FILE")
    if settings.backward_model is not None:
        if settings.backward_changes:
            raise UserError("backward_model is a finished model, so backward_changes has no effect")
        if settings.optimize:
            raise UserError(
                "backward_model is not changed, so it is not optimized here: run heedful optimize "
                f"{settings.backward_model} before"
            )
        expect(load(settings.backward_model), Translator, "back-translation")
    options = Options.from_keywords(settings.decoding).with_defaults({})
    sampling_rules(**{name: getattr(options, name) for name in SAMPLING_OPTIONS})
    checked_task(reverse_recipe(recipe).replace(settings.backward_changes))
    with_valid = _with_valid_file(recipe, out / _HELD_OUT)
    checked_task(forward_recipe(with_valid, out / PAIRS, settings))


def _checked_claim(recipe: Recipe, out: Path, settings: BackTranslation) -> dict[str, Any]:
    """The settings as the folder records them; UserError if it was started with other ones."""
    backward = settings.backward_model
    content = {
        "mono": content_key(settings.mono),
        "tag": settings.tag,
        "weight": settings.weight,
        "backward_changes": dict(settings.backward_changes),
        "backward_model": None if backward is None else str(backward.absolute()),
        "decoding": dict(settings.decoding),
        "seed": recipe.training.seed,
    }
    content = json.loads(json.dumps(content))
    path = out / _SETTINGS
    if not path.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} holds other files; give a new out=FOLDER")
        return content
    before = read_object(path)
    if changed := [key for key, value in content.items() if before.get(key) != value]:
        raise UserError(
            f"{out} was started with other settings ({', '.join(changed)}); give those again, or "
            "another out=FOLDER"
        )
    return content


def _held_out_rows(recipe: Recipe, out: Path, print_line: PrintLine) -> list[dict[str, str]] | None:
    """The validation pairs held out from train; None: the recipe has files, or `out` has the rows.

    Both runs then have the same ones, and none is back-translated.
    """
    if recipe.data.valid.paths() or (out / _HELD_OUT).is_file():
        return None
    return [*prepare_run(recipe, print_line).texts("valid")]


def _check_texts(
    recipe: Recipe, valid: list[dict[str, str]] | None, settings: BackTranslation, out: Path
) -> None:
    """Raise UserError, before anything is trained, if no monolingual text will be translated."""
    if (out / PAIRS).is_file():
        return
    if valid is None:
        recipe = _with_valid_file(recipe, out / _HELD_OUT)
    held_out = _held_out_targets(recipe) | {normalized(row["tgt"]) for row in valid or ()}
    are_held_out = [normalized(text) in held_out for text in _texts(settings.mono)]
    names = ", ".join(map(str, settings.mono))
    if not are_held_out:
        raise UserError(f"{names} has no text; give monolingual text of the target language")
    if all(are_held_out):
        raise UserError(
            f"each text of {names} is also a target in data.valid or data.test, and none of those "
            "is back-translated; give more monolingual text"
        )


def _claim(out: Path, content: dict[str, Any], valid: list[dict[str, str]] | None) -> None:
    """Record in the folder the settings that it is started with, and the held-out pairs."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _SETTINGS).is_file():
        write_json(out / _SETTINGS, content)
    if valid is not None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in valid)
        write_text(out / _HELD_OUT, "".join(lines))


def _with_valid_file(recipe: Recipe, path: Path) -> Recipe:
    """The recipe with a file of validation pairs, unless it has one."""
    if recipe.data.valid.paths():
        return recipe
    content = recipe.model_dump(exclude_unset=True)
    content["data"].pop("valid_size", None)
    # Its rows are also in data.train.
    content["data"] |= {"valid": {"file": str(path.absolute())}, "drop_held_out": True}
    return parse_recipe(content, "back-translation")


def _train_unless_complete(
    recipe: Recipe, folder: Path, train_stage: TrainStage
) -> TrainingRun | None:
    """Train or resume a run to its end; None if it was complete before."""
    if (folder / "scores.json").is_file():
        check_changes(recorded_recipe(folder), recipe, (), str(folder))
        return None
    resume = is_run(folder) and (folder / "recipe.yaml").is_file()
    return train_stage(recipe, folder, resume)


def _translate(
    folder: Path, settings: BackTranslation, out: Path, recipe: Recipe, print_line: PrintLine
) -> None:
    """Write the pairs of translations and texts into shards, and then into one file."""
    count = sum(1 for _ in _texts(settings.mono))
    should_optimize = settings.optimize
    if should_optimize is None:
        should_optimize = count > OPTIMIZE_FROM
    if should_optimize and settings.backward_model is None and not (folder / "backends").is_dir():
        _optimize(folder, [*islice(_texts(settings.mono), 200)], print_line)
    many = count > OPTIMIZE_FROM  # for fewer, one process is done sooner than several start
    job = BulkJob(
        folder,
        "translate",
        settings.mono,
        out / SHARDS,
        options={**settings.decoding, "seed": recipe.training.seed},
        shard_rows=SHARD_ROWS,
        load_settings={"use": "throughput"},
        workers=choose_workers(folder) if many else 1,
    )
    print_line(f"{BACKWARD:<10} translates {count:,} texts")
    run_job(job, partial(run_locally, num_workers=job.workers), print_line)
    num_pairs, num_held_out = _write_pairs(
        out / SHARDS, out / PAIRS, folder, _held_out_targets(recipe)
    )
    print_line(
        f"{BACK:<10} {num_pairs:,} pairs of {count:,} texts; {num_held_out:,} dropped as also held "
        "out; others: too long, or no end"
    )
    shutil.rmtree(out / SHARDS)


def _held_out_targets(recipe: Recipe) -> set[str]:
    """The normalized targets of the validation and test pairs, if the recipe drops such rows."""
    if recipe.data.drop_held_out is False:
        return set()
    entries = (entry for entry in split_files(recipe) if entry.split != "train")
    return {
        normalized(text) for entry in entries for text in collect(open_pairs(entry, recipe))["tgt"]
    }


def _write_pairs(
    shards: Path, path: Path, model: Path, held_out: Collection[str]
) -> tuple[int, int]:
    """Write the finished translations as sources, their texts as targets.

    Args:
        held_out: normalized texts that are left out.

    Returns:
        The numbers of pairs, and of texts that were left out as held out.

    Raises:
        UserError: no translation is finished, or left; nothing is written.
    """
    num_pairs = num_held_out = 0
    with atomic_open(path) as file:
        for row in read_results(shards):
            if normalized(row["text"]) in held_out:
                num_held_out += 1
            elif row.get("finished") and row["output"].strip():
                pair = {"src": row["output"], "tgt": row["text"]}
                file.write(f"{json.dumps(pair, ensure_ascii=False)}\n".encode())
                num_pairs += 1
        if not num_pairs and num_held_out:
            raise UserError(
                f"no pair is left: {num_held_out:,} monolingual texts are also in data.valid or "
                "data.test, and no other translation is finished; give more monolingual text, and "
                f"another folder than {path.parent}"
            )
        if not num_pairs:
            raise UserError(
                f"{model} ends none of its translations within its length limit; train it longer "
                "(a larger training.max_steps in backward_changes), or give another backward_model"
            )
    return num_pairs, num_held_out


def _texts(files: Sequence[Path]) -> Iterator[str]:
    """The texts of the files, read in chunks."""
    for chunk in open_rows(files).chunks():
        yield from chunk.parse()["text"]


def _optimize(folder: Path, texts: Sequence[str], print_line: PrintLine) -> None:
    """Find the fastest backend for many texts; a model that no backend runs stays as it is."""
    try:
        optimize(
            load(folder, device="cpu", backend="eager"),
            folder,
            texts,
            backends=("eager", "ctranslate2"),
            uses=("throughput",),
        )
    except UserError as error:
        print_line(f"{BACKWARD:<10} runs as a net: {error}")
