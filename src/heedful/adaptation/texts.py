"""The texts of an adaptation: held-out rows of a translation memory, and text of the kind that the
model was trained on."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from heedful.config import Recipe, parse_recipe
from heedful.data.rows import CORPUS, Rows, RowSource, hash_cells
from heedful.data.splits import normalized, source_columns
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import write_text
from heedful.pipelines import Translator
from heedful.progress import PrintLine, track
from heedful.recipe_files import recorded_recipe
from heedful.tasks.prepared_data import FirstPass
from heedful.tasks.translation import Translation
from heedful.training.folder import is_run

HELD_OUT = 300  # rows of each kind, at most
FEWEST = 100  # units of a memory
GENERAL_ROWS = (
    4  # general rows that are kept for each unit of the memory, of which an epoch reads 1
)
_SHOWN = 12  # characters in a line


@dataclass(frozen=True)
class Memory:
    """A translation memory.

    Attributes:
        num_units: its pairs.
        valid: those that are held out.
        hashes: of its pairs, each once.
        lacking: the characters that the model's vocabulary lacks, with their numbers.
        num_characters: of both sides.
        summary: what was read and left out.
    """

    num_units: int
    valid: Rows
    hashes: UInt64[np.ndarray, " n"]
    lacking: Counter[str]
    num_characters: int
    summary: str

    def characters(self) -> str | None:
        """A line on the characters that the vocabulary lacks; None: it has all."""
        if not self.lacking:
            return None
        total = self.lacking.total()
        shown = " ".join(character for character, _ in self.lacking.most_common(_SHOWN))
        more = " ..." if len(self.lacking) > _SHOWN else ""
        return (
            f"{len(self.lacking):,} that the model's vocabulary lacks, {total:,} times "
            f"({total / self.num_characters:.2%}), are unknown tokens: {shown}{more}"
        )


@dataclass(frozen=True)
class General:
    """Text of the kind that the model was trained on.

    Attributes:
        train: a sample of its rows; valid: rows that are held out.
        origin: the files, for a line.
        known: the units of the memory that are among its training rows.
    """

    train: Rows
    valid: Rows
    origin: str
    known: int

    def summary(self) -> str:
        """A line on them."""
        known = f"; {self.known:,} units of the memory are in it already" if self.known else ""
        return f"{len(self.train):,} pairs of {self.origin}, {len(self.valid):,} held out{known}"


def read_memory(
    files: Sequence[Path], valid: Sequence[Path], languages: Mapping[str, str], model: Translator
) -> Memory:
    """Read a memory, and hold out rows of it, or take those of the files `valid`.

    Raises:
        UserError: files that cannot be read, without pairs in these languages, with few pairs.
    """
    recipe = _recipe_of(files, valid, languages)
    raw = Translation(recipe).raw_data()
    counts = Counter[str](), Counter[str]()
    hashes: list[UInt64[np.ndarray, " n"]] = []
    with _of_the_model(languages):
        for rows in _parsed(raw.rows_of("train"), "memory"):
            for count, side in zip(counts, ("src", "tgt"), strict=True):
                count.update("".join(rows[side]))
            hashes.append(_pair_hashes(rows))
    num_units = sum(map(len, hashes))
    if 0 < num_units < FEWEST:
        names = ", ".join(map(str, files))
        raise UserError(
            f"{names}: {num_units:,} units are too few to adapt a model to; give {FEWEST} or more"
        )
    with _of_the_model(languages):
        read = FirstPass.read(recipe, raw, 0)
    lacking = _lacking(model.src_tokenizer, counts[0]) + _lacking(model.tgt_tokenizer, counts[1])
    return Memory(
        num_units,
        read.held_out["valid"] if valid else _some(read.held_out["valid"], HELD_OUT),
        np.unique(np.concatenate(hashes)),
        lacking,
        counts[0].total() + counts[1].total(),
        read.summaries["train"],
    )


@contextmanager
def _of_the_model(languages: Mapping[str, str]) -> Iterator[None]:
    """Errors on languages of files advise to give other files: those of a model cannot be set."""
    try:
        yield
    except UserError as error:
        problem, advice, _ = str(error).partition("set data.src_language")
        if not advice or len(languages) < 2:
            raise
        problem = problem.removesuffix("leave it out, or ").rstrip("; ")
        src, tgt = languages.values()
        raise UserError(
            f"{problem}; the model translates from {src} to {tgt}: give a memory of them"
        ) from None


def read_general(
    files: Sequence[Path],
    model: Path,
    memory: Memory,
    languages: Mapping[str, str],
    print_line: PrintLine,
) -> General | None:
    """A sample of general text: of the files, or else of the training data of a run.

    None without files, if the model is not the folder of a run whose data are still there.

    Raises:
        UserError: files that cannot be read; a memory that the training data contain.
    """
    if files:
        recipe, origin = _recipe_of(files, (), languages), ", ".join(map(str, files))
    else:
        found = _recipe_of_run(model, print_line)
        if found is None:
            return None
        recipe, origin = found, f"the training data of {model}"
    try:
        raw = Translation(recipe).raw_data()
        read = FirstPass.read(recipe, raw, GENERAL_ROWS * memory.num_units)
        train = _untagged(read.sample(), recipe)
    except UserError as error:
        if files:
            raise
        print_line(f"general    not used: {error}")
        return None
    known = np.zeros(len(memory.hashes), bool)
    for rows in _parsed(raw.rows_of("train"), "general text"):
        known |= np.isin(memory.hashes, _pair_hashes(rows))
    if known.all():
        raise UserError(
            f"each unit of the memory is also in {origin}, so the model knows it already; give "
            "another memory"
        )
    valid = read.held_out.get("test", read.held_out["valid"])
    return General(train, _some(_untagged(valid, recipe), HELD_OUT), origin, int(known.sum()))


def write_rows(rows: Rows, path: Path) -> None:
    """Write pairs as JSONL."""
    pairs = zip(rows["src"], rows["tgt"], strict=True)
    lines = (json.dumps({"src": a, "tgt": b}, ensure_ascii=False) + "\n" for a, b in pairs)
    write_text(path, "".join(lines))


def _recipe_of(
    files: Sequence[Path], valid: Sequence[Path], languages: Mapping[str, str]
) -> Recipe:
    """A recipe that reads pairs; without files of `valid` rows are held out."""
    data: dict[str, Any] = {**languages, "train": {"file": [*map(str, files)]}}
    if valid:
        data["valid"] = {"file": [*map(str, valid)]}
    return parse_recipe({"task": "translation", "data": data, "training": {"max_steps": 1}})


def _recipe_of_run(model: Path, print_line: PrintLine) -> Recipe | None:
    """The recipe of a run with pairs that train a translator; None: the model has none."""
    if not (is_run(model) and (model / "recipe.yaml").is_file()):
        return None
    recipe = recorded_recipe(model)
    if recipe.task != "translation":
        print_line(f"general    not used: {model} was trained for the task {recipe.task}")
        return None
    return recipe.replace({"init_from": None, "distillation": {}, "adapter": {}})


def _untagged(rows: Rows, recipe: Recipe) -> Rows:
    """The rows of corpora without tags: not back-translated ones, nor those of other languages."""
    if CORPUS not in rows:
        return rows
    tagged = {
        name
        for name, corpus in recipe.data.corpora.items()
        if corpus.src_tag is not None or corpus.tgt_tag is not None
    }
    kept = [index for index, name in enumerate(rows[CORPUS]) if name not in tagged]
    if not kept:
        raise UserError("all its corpora have tags; name general text")
    return rows.select(np.array(kept))


def _parsed(source: RowSource, what: str) -> Iterator[Rows]:
    with track(f"reading {what}", source.num_bytes) as advance:
        for chunk in source.chunks():
            yield chunk.parse()
            advance(chunk.num_bytes)


def _pair_hashes(rows: Rows) -> UInt64[np.ndarray, " n"]:
    return hash_cells([[*map(normalized, rows[side])] for side in ("src", "tgt")])


def _lacking(tokenizer: Tokenizer, counts: Counter[str]) -> Counter[str]:
    """The characters that are unknown tokens, and in no entry of the vocabulary."""
    known = set("".join(tokenizer.tokens(range(tokenizer.vocab_size))))
    candidates = (c for c in counts if not c.isspace() and c not in known)
    return Counter({c: counts[c] for c in candidates if tokenizer.unk_id in tokenizer.encode(c)})


def _some(rows: Rows, count: int) -> Rows:
    """About `count` rows, all of a source or none, the same for equal rows."""
    if len(rows) <= count:
        return rows
    hashes = hash_cells(source_columns(rows))
    return rows.select(np.flatnonzero(hashes <= np.sort(hashes)[count - 1]))
