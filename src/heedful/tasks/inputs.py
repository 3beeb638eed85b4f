"""Helpers of tasks: rows of a recipe's files, new tokenizers, shapes of batches, Config keys."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int64

from heedful.config import DEFAULT_TEXT_SHARE, Files, Filters, Recipe
from heedful.data.buckets import BatchShape, batch_shapes
from heedful.data.filters import Filter, make_filters
from heedful.data.plans import BLOCK_ROWS
from heedful.data.row_files import FileRows, format_of, open_rows
from heedful.data.rows import CORPUS, LABEL, Rows
from heedful.data.scan import Scan, corpus_tails
from heedful.data.splits import Split
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.data.workers import choose_workers
from heedful.errors import UserError
from heedful.task_keys import TaskKeys, alternatives
from heedful.tasks.corpora import (
    SOURCES,
    SplitFiles,
    languages_of,
    resolve_paths,
    split_files,
)
from heedful.tasks.run_data import RawData, RunData
from heedful.zoo import architecture

TWO_STACKS = {"architecture": "vaswani2017", "size": "tiny"}  # default of `model`
NO_DATA = 8  # vocabulary size before the data are read
SomeRows: TypeAlias = Int64[np.ndarray, " n"] | slice  # indices of rows, or a range of them
LengthsOf: TypeAlias = Callable[[SomeRows], tuple[Int64[np.ndarray, " n"], ...]]


def check_sources(recipe: Recipe, keys: TaskKeys) -> None:
    """Raise UserError for a recipe with two sources for one split, or none for train."""
    sources = [key for key in SOURCES if keys.includes(f"data.train.{key}")]
    entries = split_files(recipe)
    for entry in entries:
        named = [key for key in SOURCES if getattr(entry.files, key) is not None]
        if len(named) > 1 and "src" not in sources:
            raise UserError(f"{entry.key}: give {' or '.join(sources)}, not both")
    if sources and all(entry.split != "train" for entry in entries):
        settings = alternatives(sources, "data.train.{}=FILE", " ")
        raise UserError(f"data.train is not given: add {settings}")


def open_texts(files: Files, recipe: Recipe) -> FileRows:
    """Texts of plain files, or the texts of files of labeled texts or pairs, one per row."""
    if not resolve_paths(files.file):
        paths = resolve_paths(files.text)
        is_plain = paths and all(format_of(path) == "text" for path in paths)
        if is_plain and files.text_field is not None:
            raise UserError(
                f"text_field {files.text_field} is a column of tables, and {paths[0]} is plain "
                "text: leave text_field out"
            )
        return open_rows(
            paths,
            {"text": files.text_field},
            unit=recipe.data.text_unit,
            header=files.header,
        )
    return replace(open_labeled(files), as_texts=True)


def open_labeled(files: Files) -> FileRows:
    """Labeled texts, or labeled pairs of texts."""
    fields = {"text": files.text_field, "label": files.label_field}
    if files.pair_field is not None:
        fields["pair"] = files.pair_field
    return open_rows(resolve_paths(files.file), fields, header=files.header)


def raw_data(recipe: Recipe, open_files: Callable[[SplitFiles], FileRows]) -> RawData:
    """The rows of each split for which the recipe names files; without files of valid,
    random rows of train are held out, all or none of those with one source."""
    sources: dict[str, dict[str, FileRows]] = {}
    for entry in split_files(recipe):
        rows = replace(open_files(entry), corpus=entry.corpus)
        sources.setdefault(entry.split, {})[entry.key.removeprefix("data.")] = rows
    columns = next(iter(sources["train"].values())).names
    return RawData(
        {**sources},
        filters=training_filters(recipe, columns),
        drops_held_out=recipe.data.drop_held_out is not False,
    )


def training_filters(recipe: Recipe, columns: Iterable[str]) -> list[Filter]:
    """The filters of the recipe for rows with these columns; raises UserError as `make_filters`."""
    if recipe.data.filters == Filters():
        return []
    texts = [name for name in columns if name not in (LABEL, CORPUS)]
    languages = {name: languages_of(recipe, name) for name in recipe.data.corpora or [""]}
    return make_filters(recipe.data.filters, texts, languages)


def raw_text_data(recipe: Recipe) -> RawData:
    """The texts of a recipe; without files for valid, the last texts of train are held out.

    Of several corpora these are the last texts of each.
    """
    data = recipe.data
    raw = raw_data(recipe, lambda entry: open_texts(entry.files, recipe))
    is_table = any(corpus.file for corpus in (data.train, *data.corpora.values()))
    unit = "line" if is_table else data.text_unit
    size = DEFAULT_TEXT_SHARE if data.valid_size is None else data.valid_size

    def hold_out(scan: Scan) -> Split:
        if data.corpora and isinstance(size, int):
            raise UserError(
                "data.valid_size of data.corpora is a share of each corpus, below 1, for texts; "
                f"give a share instead of {size}"
            )
        return Split(tails=tuple(corpus_tails(raw.rows_of("train"), scan.chunks, size, unit)))

    drops = is_table if data.drop_held_out is None else data.drop_held_out
    return replace(raw, hold_out_tail=hold_out, drops_held_out=drops)


def joint_tokenizer(recipe: Recipe, sample: Rows, **options: Any) -> tuple[Tokenizer, Tokenizer]:
    """One new tokenizer for both sides; options: those of `train_tokenizer`."""
    names = [name for name in sample.columns if name not in (LABEL, CORPUS)]
    texts = [text for name in names for text in sample[name]]
    tokenizer = make_tokenizer(recipe, texts, **options)
    return tokenizer, tokenizer


def make_tokenizer(recipe: Recipe, texts: list[str], **options: Any) -> Tokenizer:
    """A tokenizer with the recipe's settings, trained on `texts`."""
    settings = recipe.tokenizer.model_dump(exclude={"path", "joint", "sample_size"})
    if settings["vocab_size"] == "auto":
        default_size = None if settings["kind"] == "byte" else 8_000
        settings |= {"vocab_size": default_size, "or_fewer": True}
    num_workers = choose_workers(recipe.data.workers, sum(map(len, texts)))
    return train_tokenizer(texts, **settings, **options, num_workers=num_workers)


def training_shapes(recipe: Recipe, num_rows: int, lengths_of: LengthsOf) -> list[BatchShape]:
    """The shapes of `training.compile` for batches of rows of these lengths, read in blocks."""
    settings, merged = recipe.training, Counter[tuple[int, ...]]()
    for start in range(0, num_rows, BLOCK_ROWS):
        sides = lengths_of(slice(start, min(start + BLOCK_ROWS, num_rows)))
        distinct, counts = np.unique(np.stack(sides), axis=1, return_counts=True)
        for lengths, count in zip(distinct.T.tolist(), counts.tolist(), strict=True):
            merged[tuple(lengths)] += count
    table = np.array([*merged], np.int64)
    return batch_shapes(
        *table.T,
        counts=np.array([*merged.values()], np.int64),
        max_tokens=settings.batch_tokens,
        max_sentences=settings.batch_sentences,
    )


def rows_per_batch(recipe: Recipe, length: int) -> int:
    """Rows of `length` tokens in a training batch, as many as both of its limits allow."""
    training = recipe.training
    limits = [] if training.batch_sentences is None else [training.batch_sentences]
    if training.batch_tokens is not None:
        limits.append(max(1, training.batch_tokens // length))
    return min(limits)


def check_derived_keys(recipe: Recipe) -> None:
    """Raise UserError for encoder keys that the task determines."""
    for key in ("head", "num_labels"):
        if key in recipe.model:
            raise UserError(f"model.{key} is determined by the task {recipe.task}; leave it out")


def encoder_keys(recipe: Recipe, data: RunData | None, name: str, head: str) -> dict[str, object]:
    """Config keys of an encoder with a head; raises UserError for another architecture."""
    if not architecture(name).has_key("head"):
        raise UserError(
            f"{name} is not an encoder, which the task {recipe.task} requires; set "
            "model.architecture to bert, roberta or distilbert, or start from such a model"
        )
    vocab_size = NO_DATA if data is None else data.tokenizer.vocab_size
    return {"vocab_size": vocab_size, "head": head, "max_length": recipe.data.max_length}


def decoder_keys(
    recipe: Recipe, data: RunData | None, name: str, max_length: int
) -> dict[str, object]:
    """Config keys of a decoder-only net; raises UserError for another architecture."""
    if any(architecture(name).has_key(key) for key in ("head", "num_decoder_layers")):
        raise UserError(
            f"{name} is not decoder-only, which the task {recipe.task} requires; set "
            "model.architecture to gpt2, llama or another language model, or start from one"
        )
    return {
        "vocab_size": NO_DATA if data is None else data.tokenizer.vocab_size,
        "max_length": max_length,
    }


def two_stack_keys(recipe: Recipe, data: RunData | None, name: str) -> dict[str, object]:
    """Config keys of an encoder-decoder; raises UserError for another architecture."""
    if not architecture(name).has_key("num_decoder_layers"):
        raise UserError(
            f"{name} is not an encoder-decoder, which the task {recipe.task} requires; set "
            "model.architecture to vaswani2017, bart, marian or t5"
        )
    src, tgt = (NO_DATA,) * 2 if data is None else (t.vocab_size for t in data.tokenizers)
    keys: dict[str, object] = {"src_vocab_size": src, "tgt_vocab_size": tgt}
    if data is not None and data.tokenizers[0] is not data.tokenizers[1]:
        keys |= {"tie_embeddings": "decoder"} if name == "vaswani2017" else {}
    return keys | {"max_length": recipe.data.max_length}
