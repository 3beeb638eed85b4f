"""Helpers of tasks: rows of a recipe's files, new tokenizers, the batches of an epoch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from heedful.config import Files, Recipe
from heedful.data.buckets import BatchShape, batch_shapes, padded_lengths
from heedful.data.columns import CorpusRange
from heedful.data.draws import draw_rows
from heedful.data.filters import FilterChain, make_filters
from heedful.data.plans import plan_batches
from heedful.data.rows import CORPUS, LABEL, Rows, join_rows, read_rows
from heedful.data.splits import drop_held_out, split_random, split_tail
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.task_keys import TaskKeys, alternatives
from heedful.tasks.corpora import (
    SOURCES,
    SPLITS,
    corpus_shares,
    files_by_split,
    languages_of,
    resolve_paths,
    split_files,
)
from heedful.tasks.run_data import RawData


def check_sources(recipe: Recipe, keys: TaskKeys) -> None:
    """Raise UserError for a recipe with two sources for one split, or none for train."""
    sources = [key for key in SOURCES if keys.includes(f"data.train.{key}")]
    for entry in split_files(recipe):
        named = [key for key in SOURCES if getattr(entry.files, key) is not None]
        if len(named) > 1 and "src" not in sources:
            raise UserError(f"{entry.key}: give {' or '.join(sources)}, not both")
        if entry.split == "train" and not named and sources:
            settings = alternatives(sources, "--set data.train.{}=FILE", " ")
            raise UserError(f"data.train is not given: add {settings}")


def read_texts(files: Files, recipe: Recipe) -> Rows:
    """Texts of plain files, or the texts of files of labeled texts or pairs, one per row."""
    if not resolve_paths(files.file):
        return read_rows(
            resolve_paths(files.text), {"text": files.text_field}, unit=recipe.data.text_unit
        )
    rows = read_labeled(files)
    if "pair" not in rows:
        return Rows({"text": rows["text"]}, rows.report, rows.sources, rows.locations)
    texts = [text for pair in zip(rows["text"], rows["pair"], strict=True) for text in pair]
    locations = None if rows.locations is None else np.repeat(rows.locations, 2, axis=1)
    return Rows({"text": texts}, None, rows.sources, locations)


def read_labeled(files: Files) -> Rows:
    """Labeled texts, or labeled pairs of texts."""
    fields = {"text": files.text_field, "label": files.label_field}
    if files.pair_field is not None:
        fields["pair"] = files.pair_field
    return read_rows(resolve_paths(files.file), fields)


def read_splits(recipe: Recipe, read_files: Callable[[Files], Rows]) -> RawData:
    """The rows of each split for which the recipe names files; those of train are filtered."""
    parts: dict[str, list[Rows]] = {}
    summaries: dict[str, str] = {}
    chain: FilterChain | None = None
    for entry in files_by_split(recipe):
        rows = read_files(entry.files)
        if entry.corpus:
            rows = rows.of_corpus(entry.corpus)
        if entry.split == "train":
            chain = chain or training_filters(recipe, rows.columns)
            rows = chain.apply(rows)
        summaries[entry.key.removeprefix("data.")] = rows.report.summary()
        parts.setdefault(entry.split, []).append(rows)
    assert chain is not None, "check_sources requires files of train"
    chain.check()
    return RawData(
        {split: join_rows(listed) for split, listed in parts.items()}, summaries, chain.report
    )


def training_filters(recipe: Recipe, columns: Iterable[str]) -> FilterChain:
    """The filters of the recipe for rows with these columns; raises UserError as `make_filters`."""
    texts = [name for name in columns if name not in (LABEL, CORPUS)]
    languages = {name: languages_of(recipe, name) for name in recipe.data.corpora or [""]}
    return FilterChain(make_filters(recipe.data.filters, texts, languages))


def hold_out_rows(recipe: Recipe, raw: RawData) -> RawData:
    """The rows with a valid split; without one, random rows of train are held out."""
    rows, summaries = raw.rows, raw.summaries
    if "valid" not in rows:
        train, valid = split_random(rows["train"], recipe.data.valid_size)
        rows = rows | {"train": train, "valid": valid}
        source = "data.corpora" if recipe.data.corpora else "data.train"
        summaries = summaries | {"valid": f"{len(valid):,} of {source} (data.valid_size)"}
    return replace(raw, rows=drop_held_out_from_train(rows), summaries=summaries)


def read_text_data(recipe: Recipe) -> RawData:
    """The texts of a recipe; without files for valid, the last texts of train are held out.

    Of several corpora these are the last texts of each.
    """
    data = recipe.data
    raw = read_splits(recipe, lambda files: read_texts(files, recipe))
    rows = dict(raw.rows)
    if "valid" not in rows:
        is_table = any(corpus.file for corpus in (data.train, *data.corpora.values()))
        unit = "line" if is_table else data.text_unit
        size = 0.1 if data.valid_size is None else data.valid_size
        if data.corpora and isinstance(size, int):
            raise UserError(
                "data.valid_size of data.corpora is a share of each corpus, below 1, for texts; "
                f"give a share instead of {size}"
            )
        sides = [split_tail(part, size, unit) for part in _by_corpus(rows["train"])]
        trains, valids = zip(*sides, strict=True)
        rows |= {"train": join_rows(trains), "valid": join_rows(valids)}
    # A file named for both train and valid is kept in both (recipe `rhyme`).
    if data.text_unit != "file":
        rows = drop_held_out_from_train(rows)
    return replace(raw, rows=rows)


def _by_corpus(rows: Rows) -> list[Rows]:
    """The rows of each corpus, in order; all rows without `data.corpora`."""
    if CORPUS not in rows:
        return [rows]
    names = np.array(rows[CORPUS])
    return [rows.select(np.flatnonzero(names == name)) for name in dict.fromkeys(rows[CORPUS])]


def drop_held_out_from_train(rows: dict[str, Rows]) -> dict[str, Rows]:
    """The rows by split, without the rows of train that are also in valid or test."""
    held_out = [rows[name] for name in SPLITS[1:] if name in rows]
    return rows | {"train": drop_held_out(rows["train"], held_out)}


def joint_tokenizer(recipe: Recipe, train: Rows, **options: Any) -> tuple[Tokenizer, Tokenizer]:
    """One new tokenizer for both sides; options: those of `train_tokenizer`."""
    names = [name for name in train.columns if name not in (LABEL, CORPUS)]
    texts = [text for name in names for text in train[name]]
    tokenizer = make_tokenizer(recipe, texts, **options)
    return tokenizer, tokenizer


def make_tokenizer(recipe: Recipe, texts: list[str], **options: Any) -> Tokenizer:
    """A tokenizer with the recipe's settings, trained on `texts`."""
    settings = recipe.tokenizer.model_dump(exclude={"path", "joint"})
    if settings["vocab_size"] == "auto":
        default_size = None if settings["kind"] == "byte" else 8_000
        settings |= {"vocab_size": default_size, "or_fewer": True}
    return train_tokenizer(texts, **settings, **options)


def training_shapes(recipe: Recipe, *lengths: Int64[np.ndarray, " N"]) -> list[BatchShape]:
    """The shapes of `training.compile` for batches of texts or pairs of these lengths."""
    settings = recipe.training
    return batch_shapes(
        *lengths, max_tokens=settings.batch_tokens, max_sentences=settings.batch_sentences
    )


def rows_per_batch(recipe: Recipe, length: int) -> int:
    """Rows of `length` tokens in a training batch."""
    training = recipe.training
    if training.batch_sentences is not None:
        return training.batch_sentences
    assert training.batch_tokens is not None
    return max(1, training.batch_tokens // length)


def epoch_rows(
    recipe: Recipe, epoch: int, corpora: Sequence[CorpusRange]
) -> Int64[np.ndarray, " n"] | None:
    """The training rows that an epoch reads, by `draw_rows`; None without `data.corpora`: all."""
    if not corpora:
        return None
    return draw_rows(corpus_shares(recipe, corpora), seed=recipe.training.seed, epoch=epoch)


def plan_training(
    recipe: Recipe, epoch: int, corpora: Sequence[CorpusRange], *lengths: Int64[np.ndarray, " N"]
) -> list[Int64[np.ndarray, " n"]]:
    """The batches of an epoch, by the lengths of texts or of both sides of pairs.

    Args:
        corpora: the ranges of the corpora of which `epoch_rows` chooses rows.
    """
    settings = recipe.training
    if settings.compile:
        lengths = tuple(padded_lengths(training_shapes(recipe, *lengths), *lengths))
    rows = epoch_rows(recipe, epoch, corpora)
    if rows is not None:
        lengths = tuple(side[rows] for side in lengths)
    batches = plan_batches(
        *lengths,
        max_tokens=settings.batch_tokens,
        max_sentences=settings.batch_sentences,
        seed=settings.seed,
        epoch=epoch,
    )
    return batches if rows is None else [rows[batch] for batch in batches]
