"""From raw text, or from a task that makes its own, to what a run trains on."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from heedful.config import Files, Recipe, TokenizerRecipe
from heedful.errors import UserError
from heedful.files import write_json, write_text
from heedful.tasks import dates, synthetic
from heedful.text.corpus import CorpusReport, Pair, PairSource, read_pairs
from heedful.text.store import PairStore, encode_pairs, open_pairs
from heedful.text.tokenizer import Tokenizer, train_tokenizer

Say = Callable[[str], None]
_DONE = "prepared.json"


@dataclass(frozen=True)
class Prepared:
    """Everything that a run reads: tokenizers, ids on disk, and held-out text to decode."""

    src_tokenizer: Tokenizer
    tgt_tokenizer: Tokenizer
    train: PairStore
    valid: PairStore
    valid_pairs: list[Pair]
    test_pairs: list[Pair]


def prepare(recipe: Recipe, directory: Path, say: Say) -> Prepared:
    """Read, split, tokenise and store the data of a recipe; or open what is stored already.

    What was found in the text (empty lines, over-long pairs, unknown tokens) is said in a line.
    """
    if (directory / _DONE).is_file():
        return _open(recipe, directory)
    splits = _read(recipe, say)
    src_tokenizer, tgt_tokenizer = _train_tokenizers(recipe.tokenizer, splits["train"].pairs)
    say(
        f"tokenizer  {recipe.tokenizer.kind}, {src_tokenizer.vocab_size:,} entries"
        + ("" if src_tokenizer is tgt_tokenizer else f" and {tgt_tokenizer.vocab_size:,}")
    )
    for name in ("train", "valid"):
        _, counted = encode_pairs(
            splits[name].pairs,
            src_tokenizer,
            tgt_tokenizer,
            directory / name,
            max_length=recipe.data.max_length,
            too_long=recipe.data.too_long,
            report=splits[name].report,
        )
        say(f"{name:<10} {counted.summary()}")
    test_report = splits["test"].report
    if test_report is not None:
        say(f"{'test':<10} {test_report.summary()}")
    for name in ("valid", "test"):
        lines = [json.dumps(pair, ensure_ascii=False) + "\n" for pair in splits[name].pairs]
        write_text(directory / f"{name}.jsonl", "".join(lines))
    src_tokenizer.save(directory / "tokenizer.src.json")
    tgt_tokenizer.save(directory / "tokenizer.tgt.json")
    write_json(directory / _DONE, {name: len(split.pairs) for name, split in splits.items()})
    return _open(recipe, directory)


def _open(recipe: Recipe, directory: Path) -> Prepared:
    src_tokenizer = Tokenizer.load(directory / "tokenizer.src.json")
    joint = recipe.tokenizer.joint
    return Prepared(
        src_tokenizer,
        src_tokenizer if joint else Tokenizer.load(directory / "tokenizer.tgt.json"),
        open_pairs(directory / "train"),
        open_pairs(directory / "valid"),
        _read_jsonl(directory / "valid.jsonl"),
        _read_jsonl(directory / "test.jsonl"),
    )


def _read_jsonl(path: Path) -> list[Pair]:
    with path.open(encoding="utf-8") as lines:
        return [(src, tgt) for src, tgt in map(json.loads, lines)]


class _Split(NamedTuple):
    """Pairs of one split and, where they were read from files, the account of that."""

    pairs: list[Pair]
    report: CorpusReport | None = None


def _read(recipe: Recipe, say: Say) -> dict[str, _Split]:
    """The splits train, valid and test; test may be empty."""
    if recipe.task != "translation":
        return _generate(recipe)
    data = recipe.data
    train = _Split(*read_pairs(_sources(data.train, "data.train")))
    test = _Split([])
    if not _absent(data.test):
        test = _Split(*read_pairs(_sources(data.test, "data.test")))
    if _absent(data.valid):
        train, valid = _hold_out(train, data.hold_out)
        say(f"no data.valid: {len(valid.pairs):,} pairs are held out of the training")
    else:
        valid = _Split(*read_pairs(_sources(data.valid, "data.valid")))
    return {"train": train, "valid": valid, "test": test}


def _hold_out(split: _Split, count: int) -> tuple[_Split, _Split]:
    """What is left, and `count` pairs: by position, the same whatever else a recipe says."""
    pairs, report = split
    assert report is not None
    if len(pairs) < 2 * count:
        raise UserError(
            f"data.hold_out {count} of {len(pairs)} pairs would leave too few to train on; "
            "lower it, or give data.valid"
        )
    held = np.random.default_rng(0).choice(len(pairs), count, replace=False)
    is_held = np.zeros(len(pairs), dtype=bool)
    is_held[held] = True
    out, kept = np.flatnonzero(is_held).tolist(), np.flatnonzero(~is_held).tolist()
    return (
        _Split([pairs[index] for index in kept], replace(report, origins=report.origins_of(kept))),
        _Split(
            [pairs[index] for index in out],
            CorpusReport(count, count, origins=report.origins_of(out)),
        ),
    )


def _generate(recipe: Recipe) -> dict[str, _Split]:
    sizes = recipe.data.generated
    counts = {"train": sizes.num_train, "valid": sizes.num_valid, "test": sizes.num_test}
    if recipe.task == "dates":
        names: tuple[dates.Split, ...] = ("train", "valid", "test")
        made = {name: dates.generate(counts[name], seed=sizes.seed, split=name) for name in names}
        return {name: _Split([(e.src, e.tgt) for e in made[name]]) for name in names}
    assert recipe.task != "translation"
    splits: dict[str, _Split] = {}
    seen: set[str] = set()
    for offset, (name, count) in enumerate(counts.items()):
        pairs = synthetic.generate(
            recipe.task,
            count,
            num_symbols=sizes.num_symbols,
            min_length=sizes.min_length,
            max_length=sizes.max_length,
            seed=sizes.seed + offset,
            exclude=seen,
        )
        splits[name] = _Split(pairs)
        seen |= {pair[0] for pair in pairs}
    return splits


def _absent(files: Files) -> bool:
    return files.src is None and files.tgt is None and files.file is None


def _sources(files: Files, key: str) -> list[PairSource]:
    """One source for each file, or pair of files, that a recipe names."""
    if _absent(files):
        raise UserError(
            f"{key} is not given: add --set {key}.src=FILE --set {key}.tgt=FILE, "
            f"or --set {key}.file=FILE.tsv"
        )
    if files.file is not None:
        if files.src is not None or files.tgt is not None:
            raise UserError(f"{key}: give file, or src and tgt, not both")
        return [
            PairSource(file=Path(path), src_field=files.src_field, tgt_field=files.tgt_field)
            for path in _listed(files.file)
        ]
    src, tgt = _listed(files.src), _listed(files.tgt)
    if len(src) != len(tgt):
        raise UserError(f"{key} names {len(src)} src files but {len(tgt)} tgt files")
    return [PairSource(src=Path(a), tgt=Path(b)) for a, b in zip(src, tgt, strict=True)]


def _listed(paths: str | list[str] | None) -> list[str]:
    return [paths] if isinstance(paths, str) else paths or []


def _train_tokenizers(settings: TokenizerRecipe, pairs: list[Pair]) -> tuple[Tokenizer, Tokenizer]:
    def trained(texts: list[str]) -> Tokenizer:
        return train_tokenizer(
            texts,
            kind=settings.kind,
            vocab_size=settings.vocab_size,
            lowercase=settings.lowercase,
            normalization=settings.normalization,
        )

    src, tgt = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if settings.joint:
        tokenizer = trained(src + tgt)
        return tokenizer, tokenizer
    return trained(src), trained(tgt)
