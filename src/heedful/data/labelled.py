"""Texts and pairs of texts with a label each: read from files, and stored as ids and numbers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int64, Integer

from heedful.data.documents import Origins, TextReport
from heedful.data.lines import is_jsonl, read_lines, read_objects, text_of
from heedful.data.store import (
    CHUNK,
    IdStore,
    joined,
    map_array,
    open_ids,
    pack_ids,
    write_store,
)
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import read_json, replacing, write_json

Field: TypeAlias = int | str  # a column by its number, counted from 1; a column or key by its name

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")
_SHOWN = 10  # labels that a message lists


@dataclass(frozen=True)
class Labelled:
    """Texts, for pairs the second texts, and a label each, with an account of the reading."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[str]
    report: TextReport

    def __len__(self) -> int:
        return len(self.texts)

    def label_names(self) -> tuple[str, ...]:
        """The labels there are: those that are numbers first, by value, then the rest as text.

        Raises:
            UserError: there is one label only.
        """
        names = sorted(set(self.labels), key=_rank)
        if len(names) < 2:
            raise UserError(
                f"every text has the label {names[0]!r}, so there is nothing to learn;"
                " give texts of two labels at least, or name another field for the label"
            )
        return tuple(names)

    def label_ids(self, label_names: Sequence[str]) -> Int64[np.ndarray, " N"]:
        """The place of each label among `label_names`, those that were trained on.

        Raises:
            UserError: a label is none of them (with its line).
        """
        known = {name: number for number, name in enumerate(label_names)}
        for index, label in enumerate(self.labels):
            if label not in known:
                raise UserError(
                    f"{self.report.place(index)}: label {label!r} is not among those of the"
                    f" training text ({_listed(label_names)}); correct it, or train on it too"
                )
        return np.array([known[label] for label in self.labels], dtype=np.int64)

    def select(self, indices: Integer[np.ndarray, " n"]) -> "Labelled":
        """Some of the texts, in that order, for example to hold them out."""
        chosen = indices.tolist()
        origins = self.report.origins
        return Labelled(
            [self.texts[i] for i in chosen],
            None if self.pairs is None else [self.pairs[i] for i in chosen],
            [self.labels[i] for i in chosen],
            TextReport(
                num_lines=len(chosen),
                num_kept=len(chosen),
                origins=None if origins is None else origins.select(indices),
            ),
        )


def read_labelled(
    paths: Sequence[Path],
    *,
    text_field: Field | None = None,
    label_field: Field | None = None,
    pair_field: Field | None = None,
    format: Literal["tsv", "jsonl"] | None = None,
) -> Labelled:
    """The labelled texts of some files, one file after the other.

    TSV has columns between tabs, every line as many as the first, and no quoting. Columns are
    named by number, counted from 1, in a file without a header; or by what the first line calls
    them, which then is a header. JSONL has one object a line, its keys named; a label there may be
    a text, a whole number, true or false. Whitespace around a label is dropped.

    An entry whose text, or second text, is empty (nothing but whitespace) is left out and counted.

    Args:
        text_field, label_field: by default columns 1 and 2 of exactly two, or "text" and "label".
        pair_field: of the second text, for pairs.
        format: of all files. By default a file must be named `.tsv` or `.jsonl`, with or without
            `.gz`. Either may be gzip.

    Raises:
        UserError: no file; one that cannot be read or holds no text; fields that are not there or
            fit no format; a line that is broken or has no label (with its number).
    """
    if not paths:
        raise UserError("no file is named; name at least one file of labelled texts")
    rows: list[tuple[str, str, str]] = []  # text, label, second text
    places: list[tuple[int, int]] = []
    num_lines = num_empty = 0
    for number, path in enumerate(paths):
        before = len(rows)
        wanted = (text_field, label_field, pair_field)
        entries = _jsonl if _format(path, format) == "jsonl" else _tsv
        for line, row in entries(path, wanted):
            num_lines += 1
            if row is None or not row[0].strip() or not (pair_field is None or row[2].strip()):
                num_empty += 1
                continue
            if not row[1].strip():
                raise UserError(f"{path}, line {line}: no label; add it, or drop the line")
            rows.append((row[0], row[1].strip(), row[2]))
            places.append((number, line))
        if len(rows) == before:
            raise UserError(f"{path} holds no labelled text; leave it out, or name another file")
    origins = Origins.of([str(path) for path in paths], places)
    return Labelled(
        texts=[row[0] for row in rows],
        pairs=None if pair_field is None else [row[2] for row in rows],
        labels=[row[1] for row in rows],
        report=TextReport(num_lines, len(rows), num_empty, origins=origins),
    )


class LabelledStore:
    """Labelled texts on disk, each with what the model expects around it.

    Args:
        labels: of each text, as places among `label_names`.
        seconds: for pairs, where in its sequence each second text begins.
    """

    def __init__(
        self,
        ids: IdStore,
        labels: Int64[np.ndarray, " N"],
        label_names: tuple[str, ...],
        seconds: Int64[np.ndarray, " N"] | None,
    ) -> None:
        self.ids = ids
        self.labels = labels
        self.label_names = label_names
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """The length of each sequence in tokens, marks counted."""
        return self.ids.lengths


def encode_labelled(
    labelled: Labelled,
    tokenizer: Tokenizer,
    path: Path,
    *,
    label_names: Sequence[str],
    max_length: int,
    too_long: Literal["error", "drop", "truncate"],
) -> tuple[LabelledStore, TextReport]:
    """Tokenise labelled texts, as `tokenizer.wrap` frames them, into a store at `path`; open it.

    Args:
        label_names: those of the training text, in the order of the classifier's outputs.
        max_length: tokens of a sequence at most, marks counted.
        too_long: what becomes of a longer one: an error, left out, or its text cut at the end, so
            that all marks stay; of a pair the longer text is cut, then both alike (Devlin et al.
            2018's `run_classifier`).

    Returns:
        The store, and the report with over-long texts, tokens and unknown tokens filled in.

    Raises:
        UserError: a label that is none of `label_names`; an over-long text under "error"; no room
            between the marks; nothing left; the files not writable.
    """
    labels, paired = labelled.label_ids(label_names), labelled.pairs is not None
    num_marks = len(tokenizer.wrap([], [] if paired else None))
    if max_length < num_marks + 1 + paired:
        raise UserError(
            f"max_length {max_length} leaves no room for text beside {num_marks} marks; raise it"
        )
    chunks: list[IdStore] = []
    kept: list[int] = []
    seconds: list[int] = []
    num_over = num_unknown = 0
    for start in range(0, len(labelled), CHUNK):
        sequences = []
        for index, (first, second) in enumerate(_encoded(labelled, tokenizer, start), start):
            length = num_marks + len(first) + len(second)
            if length > max_length:
                num_over += 1
                if too_long == "error":
                    raise over_long(labelled.report.place(index), length, max_length)
                if too_long == "drop":
                    continue
                first, second = cut_pair(first, second, max_length - num_marks)
            kept.append(index)
            num_unknown += first.count(tokenizer.unk_id) + second.count(tokenizer.unk_id)
            sequences.append(tokenizer.wrap(first, second if paired else None))
            seconds.append(len(sequences[-1]) - len(second) - len(tokenizer.suffix_ids))
        chunks.append(pack_ids(sequences, tokenizer.vocab_size))
    if not kept:
        raise UserError(
            f"no text is left: all {len(labelled)} are longer than max_length {max_length};"
            " raise it, or set too_long to truncate"
        )
    store = LabelledStore(
        joined(chunks),
        labels[kept],
        tuple(label_names),
        np.array(seconds, dtype=np.int64) if paired else None,
    )
    _save(path, store)
    origins = labelled.report.origins
    return open_labelled(path), replace(
        labelled.report,
        num_kept=len(kept),
        num_dropped=num_over if too_long == "drop" else 0,
        num_truncated=num_over if too_long == "truncate" else 0,
        num_tokens=len(store.ids.ids) - num_marks * len(kept),
        num_unknown=num_unknown,
        origins=None if origins is None else origins.select(np.array(kept)),
    )


def open_labelled(path: Path) -> LabelledStore:
    """Open what `encode_labelled` wrote; the ids stay on disk until they are looked at.

    Raises:
        UserError: a file is missing or damaged, or they are not of one store.
    """
    content = read_json(_beside(path, "labels.json"))
    ids, labels = open_ids(path), map_array(_beside(path, "labels.npy"))
    broken = UserError(f"{path}.labels.json and its .npy files are not one store; encode again")
    if not isinstance(content, dict) or content.keys() != {"label_names", "pairs"}:
        raise broken
    names, paired = content["label_names"], content["pairs"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise broken
    seconds = map_array(_beside(path, "seconds.npy")) if paired else None
    if not _within(labels, 0, np.full(len(ids), len(names) - 1)):
        raise broken
    if seconds is not None and not _within(seconds, 0, ids.lengths):
        raise broken
    return LabelledStore(ids, labels, tuple(names), seconds)


def _format(path: Path, format: Literal["tsv", "jsonl"] | None) -> Literal["tsv", "jsonl"]:
    if format is not None:
        return format
    if is_jsonl(path):
        return "jsonl"
    if path.name.removesuffix(".gz").endswith(".tsv"):
        return "tsv"
    raise UserError(f"{path} is not named .tsv or .jsonl; write it as one of them, and name it so")


_Wanted: TypeAlias = tuple[Field | None, Field | None, Field | None]
_Row: TypeAlias = tuple[str, str, str]  # as the fields that were wanted: text, label, second text


def _jsonl(path: Path, wanted: _Wanted) -> Iterator[tuple[int, _Row | None]]:
    if any(isinstance(field, int) for field in wanted):
        raise UserError(f"{path} is JSONL, whose fields have names; name them instead of numbers")
    text, label = str(wanted[0] or "text"), str(wanted[1] or "label")
    for number, entry in read_objects(path):
        if entry is None:
            yield number, None
            continue
        place = f"{path}, line {number}"
        value = entry.get(label)
        if isinstance(value, bool):
            entry[label] = "true" if value else "false"
        elif isinstance(value, int):
            entry[label] = str(value)
        second = "" if wanted[2] is None else text_of(entry, str(wanted[2]), place)
        yield number, (text_of(entry, text, place), text_of(entry, label, place), second)


def _tsv(path: Path, wanted: _Wanted) -> Iterator[tuple[int, _Row | None]]:
    fields = (1 if wanted[0] is None else wanted[0], 2 if wanted[1] is None else wanted[1])
    listed = [*fields, *([] if wanted[2] is None else [wanted[2]])]
    lines = enumerate(read_lines(path), 1)
    width = 2 if wanted == (None, None, None) else 0
    names = [field for field in listed if isinstance(field, str)]
    if not names:
        columns = [int(field) - 1 for field in listed]
        if min(columns) < 0:
            raise UserError(f"columns are counted from 1, so there is no column {min(columns) + 1}")
    elif len(names) < len(listed):
        raise UserError(f"{path}: name all columns by the header, or all by number, not some each")
    else:
        _, header = next(lines, (0, ""))
        found = [name.strip() for name in header.split("\t")]
        columns, width = [_column(path, found, name) for name in names], len(found)
    for number, line in lines:
        if not line.strip():
            yield number, None
            continue
        cells = line.split("\t")
        width = width or len(cells)
        if len(cells) != width or max(columns) >= width:
            needed = width if max(columns) < width else max(columns) + 1
            raise UserError(
                f"{path}, line {number}: {len(cells)} columns where there must be {needed};"
                " keep tabs out of the texts, or name other columns"
            )
        second = cells[columns[2]] if len(columns) > 2 else ""
        yield number, (cells[columns[0]], cells[columns[1]], second)


def _column(path: Path, header: list[str], name: str) -> int:
    if header.count(name) != 1:
        problem = "twice" if name in header else "not"
        raise UserError(
            f"{path}, line 1: column {name!r} is {problem} in the header"
            f" ({_listed(header)}); name a column that is there once"
        )
    return header.index(name)


def _rank(label: str) -> tuple[bool, Decimal, str]:
    is_number = _NUMBER.fullmatch(label) is not None
    return not is_number, Decimal(label) if is_number else Decimal(0), label


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _encoded(
    labelled: Labelled, tokenizer: Tokenizer, start: int
) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of a chunk of texts, and of their second texts, empty where there are none."""
    chunk = slice(start, start + CHUNK)
    firsts = tokenizer.encode_batch(labelled.texts[chunk])
    pairs = labelled.pairs
    seconds = [[] for _ in firsts] if pairs is None else tokenizer.encode_batch(pairs[chunk])
    return zip(firsts, seconds, strict=True)


def cut_pair(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """What is left of both when the longer one always gives way, of equals the second."""
    size = min(len(first), max(room - len(second), (room + 1) // 2))
    return first[:size], second[: room - size]


def over_long(place: str, length: int, max_length: int) -> UserError:
    """What is said of a text that is too long."""
    return UserError(
        f"{place}: {length} tokens (marks counted), more than max_length {max_length};"
        " raise it, or set too_long to drop or truncate"
    )


def _within(values: np.ndarray, low: int, high: np.ndarray) -> bool:
    """Whether these are whole numbers, one for each of `high`, none outside of its range."""
    sound = values.dtype == np.int64 and values.shape == high.shape
    return sound and bool(((values >= low) & (values <= high)).all())


def _save(path: Path, store: LabelledStore) -> None:
    # Gone first and written last: a store that has its names is whole.
    _beside(path, "labels.json").unlink(missing_ok=True)
    write_store(path, store.ids)
    arrays = {"labels": store.labels, "seconds": store.seconds}
    for name, array in arrays.items():
        _beside(path, f"{name}.npy").unlink(missing_ok=True)
        if array is not None:
            with replacing(_beside(path, f"{name}.npy")) as file:
                np.save(file, array, allow_pickle=False)
    content = {"label_names": list(store.label_names), "pairs": store.seconds is not None}
    write_json(_beside(path, "labels.json"), content)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")
