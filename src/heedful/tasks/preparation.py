"""Preparation of a task's data: read, tokenized and written once into a shared cache folder."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from heedful.config import Recipe
from heedful.data.columns import open_columns
from heedful.data.labels import label_counts
from heedful.data.prepared import FolderLock, content_key, prepare_once
from heedful.data.row_files import format_of
from heedful.files import read_json
from heedful.plugins import SHIPPED
from heedful.progress import PrintLine
from heedful.tasks.corpora import SOURCES, SPLITS, resolve_paths, split_files
from heedful.tasks.passes import SUMMARIES, fill, load_tokenizers
from heedful.tasks.run_data import DataSummary, InheritedParts, RunData
from heedful.tasks.task import Task


def prepare(task: Task, cache: Path, inherited: InheritedParts, print_line: PrintLine) -> RunData:
    """The data of a task, prepared in a folder of `cache` unless an earlier run did so.

    Raises:
        UserError: files that cannot be read, or that have no examples.
    """
    recipe = task.recipe
    files = [path for entry in split_files(recipe) for path in entry.files.paths()]
    about = {"task": recipe.task, "files": files}
    key = prepared_key(recipe, inherited)
    if named := task.objective_files():
        key["objective_files"] = content_key(named)
    directory = prepare_once(cache, key, partial(fill, task, inherited), about, resumable=True)
    data = open_data(directory, inherited.start_id)
    summary = _summary(data)
    if not inherited.labels:
        summary.check_labels()
    for line in summary.lines():
        print_line(line)
    return data


def _summary(data: RunData) -> DataSummary:
    train = data.splits["train"]
    return DataSummary(
        read_json(data.directory / SUMMARIES),
        data.filters,
        data.tokenizers,
        {name: columns.report for name, columns in data.splits.items()},
        label_counts(train, data.labels, data.problem),
    )


def open_data(directory: Path, start_id: int | None) -> RunData:
    """Open a folder written by `prepare`; `start_id`: as in `InheritedParts`."""
    hold = FolderLock(directory)
    src, tgt = load_tokenizers(directory)
    splits = {
        name: open_columns(directory / name) for name in SPLITS if (directory / name).is_dir()
    }
    start_id = tgt.bos_id if start_id is None else start_id
    return RunData(directory, (src, tgt), splits, start_id, holds=(hold,))


def prepared_key(recipe: Recipe, inherited: InheritedParts) -> dict[str, Any]:
    """All that prepared data depend on, as JSON; of files their content, not their names."""
    contents = [tokenizer.content() for tokenizer in inherited.tokenizers or ()]
    digest = hashlib.blake2b(json.dumps(contents, sort_keys=True).encode(), digest_size=16)
    files = {split: {*SOURCES} for split in SPLITS}
    left_out: dict[str, Any] = {
        **files,
        **dict.fromkeys(("folder", "corpora", "temperature", "workers"), True),
    }
    left_out_of_corpus: dict[str, Any] = {**files, **dict.fromkeys((*SOURCES, "weight"), True)}
    filters = recipe.data.filters
    if filters.min_script is None and not filters.language:  # only these depend on the languages
        languages = dict.fromkeys(("src_language", "tgt_language"), True)
        left_out, left_out_of_corpus = left_out | languages, left_out_of_corpus | languages
    corpora = {
        name: corpus.model_dump(exclude=left_out_of_corpus)
        for name, corpus in recipe.data.corpora.items()
    }
    return {
        "task": recipe.task,
        "plugins": content_key([file for path in recipe.plugins for file in _plugin_files(path)]),
        "data": recipe.data.model_dump(exclude=left_out),
        "corpora": [*corpora.items()],
        "files": [
            [
                [format_of(path), *content_key([path])]
                for path in resolve_paths(getattr(entry.files, source))
            ]
            for entry in split_files(recipe)
            for source in SOURCES
        ],
        "tokenizer": digest.hexdigest() if contents else recipe.tokenizer.model_dump(),
        "objective": recipe.objective,
        "labels": inherited.labels,
        **({} if inherited.problem in (None, "single_label") else {"problem": inherited.problem}),
    }


def _plugin_files(name: str) -> list[Path]:
    """The file of a plugin; of a shipped one all files of its package, which it reads."""
    if name.startswith(SHIPPED):
        package = Path(__file__).parents[1] / "examples"
        return sorted(path for path in package.iterdir() if path.is_file())
    return [Path(name)]
