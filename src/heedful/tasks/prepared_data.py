"""A task's data as prepared once in a shared cache folder, in two passes over the rows.

The first pass reads, filters, holds out and trains tokenizers; the second one writes ids.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import TypeAdapter

from heedful.config import Recipe, default_values
from heedful.data.columns import Columns, ColumnsWriter, open_columns, write_columns
from heedful.data.encoding import ChunkEncoder, Encoder, encode_rows
from heedful.data.labels import ProblemType, count_labels, label_columns, label_counts, label_names
from heedful.data.prepared import MANIFEST, FolderLock, content_key, prepare_once
from heedful.data.reports import DataReport
from heedful.data.row_files import FileRows, depends_on_languages, format_of
from heedful.data.rows import Rows
from heedful.data.scan import ChunkFacts, Scan, scan_rows, scanned_chunks, take_held_out
from heedful.data.special_tokens import language_tokens
from heedful.data.splits import KnownRows, Split, split_by_source
from heedful.data.tokenizer import Tokenizer
from heedful.data.workers import POOL_BYTES, choose_workers, map_in_order
from heedful.errors import UserError
from heedful.files import (
    read_json,
    remove,
    remove_unfinished,
    user_errors,
    write_json,
    write_text,
)
from heedful.plugins import SHIPPED
from heedful.progress import PrintLine, track
from heedful.tasks.corpora import SOURCES, SPLITS, check_ranges, resolve_paths, split_files
from heedful.tasks.run_data import FILTERS, DataSummary, Inherited, RawData, RunData
from heedful.tasks.task import Task

SHARD_CHUNKS = 16  # of training rows between two points at which a preparation can be resumed
SUMMARIES = "read.json"  # in a prepared folder: a line on each source that was read
_TRAINING_ROWS = "training_rows.json"  # of the first pass, in an unfinished folder


def prepare(task: Task, cache: Path, inherited: Inherited, print_line: PrintLine) -> RunData:
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
    directory = prepare_once(
        cache, key, partial(write_data, task, inherited), about, resumable=True
    )
    data = open_data(directory, inherited.start_id)
    summary = DataSummary(
        read_json(directory / SUMMARIES),
        data.filters,
        data.tokenizers,
        {name: columns.report for name, columns in data.splits.items()},
        label_counts(data.splits["train"], data.labels, data.problem) if data.labels else {},
    )
    if summary.labels and not inherited.labels:
        summary.check_labels()
    for line in summary.lines():
        print_line(line)
    if inherited.tokenizers and (ignored := _ignored_keys(recipe, inherited.tokenizers[0])):
        print_line(f"note: the tokenizer is an existing one: {ignored}")
    return data


def _ignored_keys(recipe: Recipe, tokenizer: Tokenizer) -> str:
    """The keys of a new tokenizer that are set otherwise than an existing one is."""
    values, defaults = recipe.values(), default_values(recipe.task)
    actual = {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    actual["lowercase"] = tokenizer.lowercases
    return ", ".join(
        f"tokenizer.{name} has no effect, it is {str(value).lower()}"
        for name, value in actual.items()
        if values.get(f"tokenizer.{name}") not in (defaults[f"tokenizer.{name}"], None, value)
    )


def open_data(directory: Path, start_id: int | None) -> RunData:
    """Open a folder written by `prepare`; `start_id`: as in `Inherited`."""
    hold = FolderLock(directory)
    src, tgt = load_tokenizers(directory)
    splits = {
        name: open_columns(directory / name) for name in SPLITS if (directory / name).is_dir()
    }
    start_id = tgt.bos_id if start_id is None else start_id
    return RunData(directory, (src, tgt), splits, start_id, holds=(hold,))


@dataclass(frozen=True)
class TrainingRows:
    """The choice of the training rows among all rows of train: what the second pass needs.

    Attributes:
        chunks: facts about all rows.
        labels: the names of the labels, in order; empty for rows without labels.
        split: the rows that are held out.
        known: the held-out rows whose sources are dropped from train.
    """

    chunks: list[ChunkFacts]
    labels: tuple[str, ...]
    split: Split
    known: KnownRows

    @property
    def num_rows(self) -> int:
        """Training rows, with those whose source is also held out."""
        return sum(chunk.num_rows for chunk in self.chunks) - self.split.num_valid


_JSON = TypeAdapter(TrainingRows)


@dataclass(frozen=True)
class FirstPass:
    """All rows read once.

    Attributes:
        scan: of the rows of train, with those that are held out.
        held_out: rows in memory of valid and, if the recipe has one, test.
        summaries: a line on each source, by its key.
    """

    scan: Scan
    train: TrainingRows
    held_out: dict[str, Rows]
    summaries: dict[str, str]

    @classmethod
    def read(cls, recipe: Recipe, raw: RawData, sample_size: int) -> "FirstPass":
        """Read all rows; raises UserError for wrong ones.

        Args:
            sample_size: maximum number of sampled training rows.
        """
        problem = raw.problem
        held_out, summaries = {}, dict[str, str]()
        for name in SPLITS[1:]:
            if name in raw.sources:
                source = raw.rows_of(name)
                workers = choose_workers(recipe.data.workers, source.num_bytes)
                workers = min(workers, 1 + source.num_bytes // POOL_BYTES)
                read = scan_rows(source, num_workers=workers, problem=problem)
                held_out[name] = read.sample
                summaries |= _summaries(raw.sources[name], read)
        train = raw.rows_of("train")
        workers = choose_workers(recipe.data.workers, train.num_bytes)
        with_source_hashes = "valid" not in held_out and raw.hold_out_tail is None
        scan = scan_rows(
            train,
            raw.filters,
            sample_size,
            workers,
            with_source_hashes=with_source_hashes,
            problem=problem,
        )
        summaries = _summaries(raw.sources["train"], scan) | summaries
        has_labels = bool(scan.labels) or problem != "single_label"
        labels = label_names(scan.labels, problem) if has_labels else ()
        for rows in held_out.values() if labels else ():
            label_columns(rows, labels, problem)  # raises UserError before the slow steps
        split = Split()
        if "valid" not in held_out:
            if raw.hold_out_tail is not None:
                split = raw.hold_out_tail(scan)
            else:
                assert scan.source_hashes is not None
                split = split_by_source(scan.source_hashes, recipe.data.valid_size, scan.noun)
            valid = take_held_out(train, scan.chunks, split, workers)
            num_chosen = len(valid)
            if labels and problem != "regression":
                split, valid = _keep_labels(scan, split, valid, problem)
            held_out = {"valid": valid, **held_out}
            key = "data.corpora" if recipe.data.corpora else "data.train"
            summaries["valid"] = f"{len(valid):,} of {key} (data.valid_size)"
            if num_kept := num_chosen - len(valid):
                summaries["valid"] += f"; {num_kept:,} kept in train, for labels without other rows"
        is_tail = raw.hold_out_tail is not None and "valid" not in raw.sources
        compared = ("test",) if is_tail else ("valid", "test")
        known = KnownRows.from_rows(
            [held_out[name] for name in compared if raw.drops_held_out and name in held_out],
            both_directions=len(recipe.data.corpora) > 1,  # they may be of both directions
        )
        has_files = not isinstance(raw.sources["train"], Rows)
        chosen = TrainingRows(scan.chunks, labels, split, known)
        return cls(scan, chosen, held_out, summaries if has_files else {})

    def sample(self) -> Rows:
        """The sampled training rows; raises UserError if all rows are in a held-out set."""
        scan = self.scan
        rows = self.train.split.take(scan.sample, scan.sample_indices, held_out=False)
        rows = self.train.known.drop_from(rows)
        if not len(rows):
            refuse_held_out(self.train.num_rows, scan.noun)
        return rows


def _keep_labels(scan: Scan, split: Split, valid: Rows, problem: ProblemType) -> tuple[Split, Rows]:
    """The split without the first held-out source of each label that train would lose.

    If nothing were held out then, the split stays.
    """
    assert scan.source_hashes is not None
    hashes, is_held = scan.source_hashes[split.held_out], np.ones(len(valid), bool)
    held = count_labels(valid, problem)
    lost = {label for label, count in held.items() if count == scan.labels[label]}
    for index in range(len(valid)) if lost else ():
        if lost & count_labels(valid.select(np.array([index])), problem).keys():
            is_returned = hashes == hashes[index]
            is_held &= ~is_returned
            lost -= count_labels(valid.select(np.flatnonzero(is_returned)), problem).keys()
    if is_held.all() or not is_held.any():
        return split, valid
    return replace(split, held_out=split.held_out[is_held]), valid.select(np.flatnonzero(is_held))


def summarize(task: Task, inherited: Inherited) -> DataSummary:
    """The summary of the data that `write_data` would write; nothing is written."""
    raw = replace(task.raw_data(), problem=task.problem(inherited.problem))
    read, tokenizers = _first_pass(task, inherited, raw)
    held_out, text_columns, labels = {}, task.text_columns(tokenizers), read.train.labels
    for name, rows in read.held_out.items():
        options = task.encode_options(name, labels, inherited)
        held_out[name] = encode_rows(rows, text_columns, **options).report
    encoder = Encoder(text_columns, **task.encode_options("train", labels, inherited))
    encode = ChunkEncoder(encoder, read.train.split, read.train.known)
    totals, num_of_label = _TrainTotals(), Counter[str]()
    train = raw.rows_of("train")
    workers = choose_workers(task.recipe.data.workers, train.num_bytes)
    with track("tokenizing", read.scan.num_rows) as advance:
        results = map_in_order(encode, scanned_chunks(train, read.scan.chunks), workers)
        for columns, chunk in zip(results, read.scan.chunks, strict=True):
            totals.add(columns)
            num_of_label.update(label_counts(columns, encoder.labels, encoder.problem))
            advance(chunk.num_rows)
    report = _checked_train(task, encoder, totals.report, read.train.num_rows, totals.corpora)
    summary = DataSummary(
        read.summaries,
        read.scan.filters,
        tokenizers,
        {"train": report, **held_out},
        num_of_label,
    )
    if not inherited.labels:
        summary.check_labels()
    return summary


@dataclass
class _TrainTotals:
    """The sums of the reports on chunks, and the names of their corpora."""

    report: DataReport | None = None
    corpora: set[str] = field(default_factory=set)

    def add(self, columns: Columns) -> None:
        """Add a chunk."""
        self.report = columns.report if self.report is None else self.report.plus(columns.report)
        self.corpora |= {corpus.name for corpus in columns.corpora}


def write_data(task: Task, inherited: Inherited, directory: Path) -> None:
    """Write ids by split, held-out texts, tokenizers, and the summaries of the files.

    The first pass ends in the file `_TRAINING_ROWS`, with which an interrupted preparation
    continues in the second pass.
    """
    remove_unfinished(directory)
    raw = replace(task.raw_data(), problem=task.problem(inherited.problem))
    if not (directory / _TRAINING_ROWS).is_file():
        for left in directory.iterdir():
            if left.name != MANIFEST:
                remove(left)
        _write_first_pass(task, inherited, raw, directory)
    _encode_train(task, inherited, raw, directory)


def load_tokenizers(directory: Path) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target of a prepared folder; equal if joint."""
    src, other = Tokenizer.load(directory / "src.json"), directory / "tgt.json"
    return src, Tokenizer.load(other) if other.is_file() else src


def _first_pass(
    task: Task, inherited: Inherited, raw: RawData
) -> tuple[FirstPass, tuple[Tokenizer, Tokenizer]]:
    """All rows read once, and the tokenizers: inherited, or trained on a sample."""
    size = 0 if inherited.tokenizers else task.recipe.tokenizer.sample_size
    read = FirstPass.read(task.recipe, raw, size)
    return read, inherited.tokenizers or task.train_tokenizers(read.sample())


def _write_first_pass(task: Task, inherited: Inherited, raw: RawData, directory: Path) -> None:
    """The first pass: write everything but the training ids."""
    read, tokenizers = _first_pass(task, inherited, raw)
    text_columns = task.text_columns(tokenizers)
    for name, rows in read.held_out.items():
        options = task.encode_options(name, read.train.labels, inherited)
        write_columns(directory / name, encode_rows(rows, text_columns, **options))
        cells = zip(*rows.columns.values(), strict=True)
        records = (dict(zip(rows.columns, row, strict=True)) for row in cells)
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_text(directory / f"{name}.jsonl", "".join(lines))
    write_json(directory / SUMMARIES, read.summaries)
    if read.scan.filters.filters:
        write_json(directory / FILTERS, read.scan.filters.to_json())
    for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
        if side == "src" or tokenizer is not tokenizers[0]:
            tokenizer.save(directory / f"{side}.json")
    write_text(directory / _TRAINING_ROWS, _JSON.dump_json(read.train).decode())


def _encode_train(task: Task, inherited: Inherited, raw: RawData, directory: Path) -> None:
    """The second pass: write the ids of the training rows, chunk by chunk."""
    with user_errors("read", directory / _TRAINING_ROWS):
        rows = _JSON.validate_json((directory / _TRAINING_ROWS).read_bytes())
    text_columns = task.text_columns(load_tokenizers(directory))
    encoder = Encoder(text_columns, **task.encode_options("train", rows.labels, inherited))
    encode = ChunkEncoder(encoder, rows.split, rows.known)
    writer = ColumnsWriter(directory / "train")
    train = raw.rows_of("train")
    workers = choose_workers(task.recipe.data.workers, train.num_bytes)
    counts, start = [chunk.num_rows for chunk in rows.chunks], writer.position
    with track("tokenizing", sum(counts)) as advance, closing(writer):
        advance(sum(counts[:start]))
        results = map_in_order(encode, scanned_chunks(train, rows.chunks, start), workers)
        for number, columns in enumerate(results, start + 1):
            writer.append(columns)
            if number % SHARD_CHUNKS == 0:
                writer.commit(number)
            advance(counts[number - 1])
        corpora = {corpus.name for corpus in writer.corpora}
        report = _checked_train(task, encoder, writer.report, rows.num_rows, corpora)
        writer.complete(report, encoder.info)
    (directory / _TRAINING_ROWS).unlink()


def _checked_train(
    task: Task, encoder: Encoder, report: DataReport | None, num_rows: int, corpora: Collection[str]
) -> DataReport:
    """The report on all training rows; raises UserError if none is left, or none of a corpus."""
    assert report is not None
    if report.num_also_held_out == num_rows:
        refuse_held_out(num_rows, report.noun)
    encoder.check(report, num_rows - report.num_also_held_out)
    if task.recipe.data.corpora:
        check_ranges(task.recipe, corpora)
    return report


def refuse_held_out(num_rows: int, noun: str) -> NoReturn:
    """Raise UserError for training rows whose sources are all held out."""
    raise UserError(
        f"each of the {num_rows} {noun} of data.train is also in data.valid"
        " or data.test, so none is left to train on; give other held-out data, or set "
        "data.drop_held_out to false"
    )


def _summaries(sources: dict[str, FileRows] | Rows, scan: Scan) -> dict[str, str]:
    """A line on each source of a split, by its key; none on rows in memory."""
    if isinstance(sources, Rows):
        return {}
    reports = zip(sources, scan.reports.values(), strict=True)
    return {key: report.summary() for key, report in reports}


def prepared_key(recipe: Recipe, inherited: Inherited) -> dict[str, Any]:
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
    named = [path for entry in split_files(recipe) for path in resolve_paths(entry.files.file)]
    # Only these, and tokens of languages, depend on the languages.
    depends = filters.min_script is not None or filters.language
    depends = depends or any(map(language_tokens, inherited.tokenizers or ()))
    if not depends and not any(map(depends_on_languages, named)):
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
        "files": {
            f"{entry.key}.{source}": [
                [format_of(path), *content_key([path])]
                for path in resolve_paths(getattr(entry.files, source))
            ]
            for entry in split_files(recipe)
            for source in SOURCES
        },
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
