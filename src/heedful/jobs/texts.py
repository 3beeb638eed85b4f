"""Texts without labels as a run has them: read, split, stored as ids, opened again."""

from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from heedful.config import Files, Recipe
from heedful.data.documents import TextReport, read_documents, split_tail
from heedful.data.labelled import read_labelled
from heedful.data.sequences import encode_sequences
from heedful.data.store import IdStore, open_ids
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.jobs.job import Say, listed

SPLITS = ("train", "valid", "test")
_SOURCES = ("src", "tgt", "file", "text")


def check_sources(recipe: Recipe, sources: Collection[str]) -> None:
    """Refuse files that the task does not read, and a recipe without any to train on.

    `sources` are the keys of `data.train`, `data.valid` and `data.test` that it reads from.
    """
    wanted = " or ".join(sources)
    for name, files in splits_of(recipe).items():
        given = [key for key in _SOURCES if getattr(files, key) is not None]
        for key in given:
            if key not in sources:
                raise UserError(
                    f"data.{name}.{key} is of no use to the task {recipe.task}; give {wanted}"
                )
        if len(given) > 1:
            raise UserError(f"data.{name}: give {wanted}, not both")
        if name == "train" and not given:
            example = " or ".join(f"--set data.train.{key}=FILE" for key in sources)
            raise UserError(f"data.train is not given: add {example}")


def splits_of(recipe: Recipe) -> dict[str, Files]:
    """The files of train, valid and test."""
    return {"train": recipe.data.train, "valid": recipe.data.valid, "test": recipe.data.test}


class Texts(NamedTuple):
    """The texts of a split, and where they were read."""

    texts: list[str]
    report: TextReport


def read_splits(recipe: Recipe, say: Say) -> dict[str, Texts]:
    """The texts to train on, those held out and, where given, those to test on."""
    splits = {
        name: _read(files, recipe)
        for name, files in splits_of(recipe).items()
        if listed(files.text) or listed(files.file)
    }
    for name, split in splits.items():
        say(f"{'data.' + name:<10} {split.report.summary()}")
    if "valid" not in splits:
        splits["train"], splits["valid"] = _split(splits["train"], recipe)
    return {name: splits[name] for name in SPLITS if name in splits}


def store_texts(
    splits: dict[str, Texts], tokenizer: Tokenizer, directory: Path, recipe: Recipe, say: Say
) -> dict[str, int]:
    """Tokenise each split into `directory`, as `tokenizer.wrap` frames a text; says what was found.

    Returns how many texts each split has.
    """
    counts = {}
    for name, split in splits.items():
        store, report = encode_sequences(
            split.texts,
            tokenizer,
            directory / name,
            max_length=recipe.data.max_length,
            too_long=recipe.data.truncation,
            report=split.report,
        )
        say(f"{name:<10} {report.summary()}")
        counts[name] = len(store)
    return counts


def open_texts(directory: Path) -> dict[str, IdStore]:
    """The splits that `store_texts` stored."""
    return {
        name: open_ids(directory / name)
        for name in SPLITS
        if (directory / f"{name}.ids.npy").is_file()
    }


def _read(files: Files, recipe: Recipe) -> Texts:
    if not listed(files.file):
        text_field = str(files.text_field or "text")
        unit = recipe.data.documents
        return Texts(*read_documents(listed(files.text), unit, text_field=text_field))
    found = read_labelled(
        listed(files.file),
        text_field=files.text_field,
        label_field=files.label_field,
        pair_field=files.pair_field,
    )
    if found.pairs is None:
        return Texts(found.texts, found.report)
    both = list(chain.from_iterable(zip(found.texts, found.pairs, strict=True)))
    return Texts(both, _part(found.report, np.repeat(np.arange(len(found)), 2)))


def _split(texts: Texts, recipe: Recipe) -> tuple[Texts, Texts]:
    """What is trained on, and the last texts, which are held out."""
    unit = "line" if listed(recipe.data.train.file) else recipe.data.documents
    sides = split_tail(texts.texts, recipe.data.valid_fraction, unit)
    # A file that is cut is on both sides, the last text of one and the first of the other.
    places = [np.arange(len(sides[0])), np.arange(-len(sides[1]), 0) + len(texts.texts)]
    train, valid = (
        Texts(side, _part(texts.report, place)) for side, place in zip(sides, places, strict=True)
    )
    return train, valid


def _part(report: TextReport, indices: Int64[np.ndarray, " n"]) -> TextReport:
    """The report of some of the texts."""
    origins = report.origins
    assert origins is not None
    return TextReport(len(indices), len(indices), origins=origins.select(indices))
