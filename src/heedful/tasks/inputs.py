"""Helpers of tasks: rows of a recipe's files, new tokenizers, the batches of an epoch."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from heedful.config import Files, Recipe
from heedful.data.buckets import BatchShape, batch_shapes, padded_lengths
from heedful.data.filters import FilterChain, FilterReport, make_filters
from heedful.data.plans import plan_batches
from heedful.data.rows import CORPUS, LABEL, Rows, read_rows
from heedful.data.splits import drop_held_out, split_random, split_tail
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.plugins import SHIPPED
from heedful.recipe_files import RECIPES
from heedful.task_keys import TaskKeys, alternatives
from heedful.tasks.run_data import RawData

SPLITS = ("train", "valid", "test")
SOURCES = ("src", "tgt", "text", "file")  # keys of a split that name its files


def check_sources(recipe: Recipe, keys: TaskKeys) -> None:
    """Raise UserError for a recipe with two sources for one split, or none for train."""
    sources = [key for key in SOURCES if keys.includes(f"data.train.{key}")]
    for name, files in split_files(recipe).items():
        named = [key for key in SOURCES if getattr(files, key) is not None]
        if len(named) > 1 and "src" not in sources:
            raise UserError(f"data.{name}: give {' or '.join(sources)}, not both")
        if name == "train" and not named and sources:
            settings = alternatives(sources, "--set data.train.{}=FILE", " ")
            raise UserError(f"data.train is not given: add {settings}")


def split_files(recipe: Recipe) -> dict[str, Files]:
    """The files of train, valid and test; relative paths are in `data.folder`."""
    folder = Path(recipe.data.folder or "")
    splits = {}
    for name in SPLITS:
        files: Files = getattr(recipe.data, name)
        named = {
            key: paths for key in SOURCES if (paths := resolve_paths(getattr(files, key), folder))
        }
        splits[name] = files.model_copy(update={k: [*map(str, v)] for k, v in named.items()})
    return splits


def splits_with_files(recipe: Recipe) -> list[tuple[str, Files]]:
    """The splits for which the recipe names files, with these files."""
    return [
        (name, files)
        for name, files in split_files(recipe).items()
        if any(getattr(files, key) is not None for key in SOURCES)
    ]


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


def read_splits(recipe: Recipe, read_files: Callable[[Files], Rows]) -> dict[str, Rows]:
    """The rows of each split for which the recipe names files."""
    return {name: read_files(files) for name, files in splits_with_files(recipe)}


def training_filters(recipe: Recipe, columns: Iterable[str]) -> FilterChain:
    """The filters of the recipe for rows with these columns; raises UserError as `make_filters`."""
    data = recipe.data
    texts = [name for name in columns if name not in (LABEL, CORPUS)]
    return FilterChain(make_filters(data.filters, texts, (data.src_language, data.tgt_language)))


def filter_training(recipe: Recipe, rows: dict[str, Rows]) -> tuple[dict[str, Rows], FilterReport]:
    """The rows by split, without the rows of train that the recipe's filters drop."""
    chain = training_filters(recipe, rows["train"].columns)
    rows = rows | {"train": chain.apply(rows["train"])}
    chain.check()
    return rows, chain.report


def hold_out_rows(recipe: Recipe, rows: dict[str, Rows]) -> RawData:
    """The filtered rows with a valid split; without one, random rows of train are held out."""
    rows, filters = filter_training(recipe, rows)
    summaries = {name: split.report.summary() for name, split in rows.items()}
    if "valid" not in rows:
        train, valid = split_random(rows["train"], recipe.data.valid_size)
        rows = rows | {"train": train, "valid": valid}
        summaries["valid"] = f"{len(valid):,} of data.train (data.valid_size)"
    return RawData(drop_held_out_from_train(rows), summaries, filters)


def read_text_data(recipe: Recipe) -> RawData:
    """The texts of a recipe; without files for valid, the last texts of train are held out."""
    data = recipe.data
    rows, filters = filter_training(
        recipe, read_splits(recipe, lambda files: read_texts(files, recipe))
    )
    summaries = {name: split.report.summary() for name, split in rows.items()}
    if "valid" not in rows:
        unit = "line" if resolve_paths(data.train.file) else data.text_unit
        size = 0.1 if data.valid_size is None else data.valid_size
        rows["train"], rows["valid"] = split_tail(rows["train"], size, unit)
    # A file named for both train and valid is kept in both (recipe `rhyme`).
    if data.text_unit != "file":
        rows = drop_held_out_from_train(rows)
    return RawData(rows, summaries, filters)


def drop_held_out_from_train(rows: dict[str, Rows]) -> dict[str, Rows]:
    """The rows by split, without the rows of train that are also in valid or test."""
    held_out = [rows[name] for name in SPLITS[1:] if name in rows]
    return rows | {"train": drop_held_out(rows["train"], held_out)}


def joint_tokenizer(recipe: Recipe, train: Rows, **options: Any) -> tuple[Tokenizer, Tokenizer]:
    """One new tokenizer for both sides; options: those of `train_tokenizer`."""
    texts = [text for name in train.columns if name != LABEL for text in train[name]]
    tokenizer = make_tokenizer(recipe, texts, **options)
    return tokenizer, tokenizer


def make_tokenizer(recipe: Recipe, texts: list[str], **options: Any) -> Tokenizer:
    """A tokenizer with the recipe's settings, trained on `texts`."""
    settings = recipe.tokenizer.model_dump(exclude={"path", "joint"})
    if settings["vocab_size"] == "auto":
        default_size = None if settings["kind"] == "byte" else 8_000
        settings |= {"vocab_size": default_size, "or_fewer": True}
    return train_tokenizer(texts, **settings, **options)


def resolve_paths(paths: str | list[str] | None, folder: Path = Path()) -> list[Path]:
    """The paths that a recipe names; `shipped:NAME` is a file that comes with heedful."""
    names = [paths] if isinstance(paths, str) else paths or []
    return [
        RECIPES / name.removeprefix(SHIPPED) if name.startswith(SHIPPED) else folder / name
        for name in names
    ]


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


def plan_training(
    recipe: Recipe, epoch: int, *lengths: Int64[np.ndarray, " N"]
) -> list[Int64[np.ndarray, " n"]]:
    """The batches of an epoch, by the lengths of texts or of both sides of pairs."""
    settings = recipe.training
    if settings.compile:
        lengths = tuple(padded_lengths(training_shapes(recipe, *lengths), *lengths))
    return plan_batches(
        *lengths,
        max_tokens=settings.batch_tokens,
        max_sentences=settings.batch_sentences,
        seed=settings.seed,
        epoch=epoch,
    )
