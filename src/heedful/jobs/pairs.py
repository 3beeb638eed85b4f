"""Pairs of texts, read from files or made by a task, and how they are stored for a run."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from heedful.config import Files, Recipe, TokenizerRecipe
from heedful.data.corpus import CorpusReport, Pair, PairSource, read_pairs
from heedful.data.pair_store import PairStore, encode_pairs, open_pairs
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import read_json, write_text
from heedful.jobs.job import DONE, Say, held_out, make_tokenizer, read_texts
from heedful.tasks import dates, synthetic


@dataclass(frozen=True)
class Prepared:
    """Everything that a run reads: tokenizers, ids on disk, and held-out text to decode."""

    src_tokenizer: Tokenizer
    tgt_tokenizer: Tokenizer
    train: PairStore
    valid: PairStore
    valid_pairs: list[Pair]
    test_pairs: list[Pair]


def prepare(
    recipe: Recipe, directory: Path, say: Say, given: tuple[Tokenizer, Tokenizer] | None = None
) -> dict[str, int]:
    """Read, split, tokenise and store the data of a recipe; returns how many pairs each split has.

    What was found in the text (empty lines, over-long pairs, unknown tokens) is said in a line.
    `given` are tokenizers to use instead of new ones.
    """
    splits = _read(recipe, say)
    src_tokenizer, tgt_tokenizer = given or _train_tokenizers(
        recipe.tokenizer, splits["train"].pairs
    )
    say(
        f"tokenizer  {src_tokenizer.kind}, {src_tokenizer.vocab_size:,} entries"
        + ("" if src_tokenizer is tgt_tokenizer else f" and {tgt_tokenizer.vocab_size:,}")
    )
    for name in ("train", "valid"):
        _, counted = encode_pairs(
            splits[name].pairs,
            src_tokenizer,
            tgt_tokenizer,
            directory / name,
            max_length=recipe.data.max_length,
            too_long=recipe.data.truncation,
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
    return {"joint": src_tokenizer is tgt_tokenizer} | {
        name: len(split.pairs) for name, split in splits.items()
    }


def open_prepared(directory: Path) -> Prepared:
    """Open what `prepare` stored."""
    src_tokenizer = Tokenizer.load(directory / "tokenizer.src.json")
    joint = read_json(directory / DONE)["joint"]
    return Prepared(
        src_tokenizer,
        src_tokenizer if joint else Tokenizer.load(directory / "tokenizer.tgt.json"),
        open_pairs(directory / "train"),
        open_pairs(directory / "valid"),
        [(src, tgt) for src, tgt in read_texts(directory / "valid.jsonl")],
        [(src, tgt) for src, tgt in read_texts(directory / "test.jsonl")],
    )


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
    kept, out = (places.tolist() for places in held_out(count, len(pairs), "pairs"))
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
    splits: dict[str, _Split] = {}
    seen: set[str] = set()
    for offset, (name, count) in enumerate(counts.items()):
        pairs = synthetic.generate(
            recipe.task,  # type: ignore[arg-type]
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
    src, tgt = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if settings.joint:
        tokenizer = make_tokenizer(settings, src + tgt)
        return tokenizer, tokenizer
    return make_tokenizer(settings, src), make_tokenizer(settings, tgt)
