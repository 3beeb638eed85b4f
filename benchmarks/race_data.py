"""The text of the tasks of the race, as plain files that every system reads."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from heedful.data.row_files import open_rows
from heedful.data.rows import collect
from localization import help_texts, line, messages
from nanogpt import split_text
from race_logits import CONTEXT

Pairs = list[tuple[str, str]]
Files = dict[str, str]  # the text of each file of a corpus, by name
Parts = dict[str, tuple[int, int]]  # the lines of each part of a test set
HELD_OUT = 14  # one of so many lines of SST-2 is for validation


def corpus_files(files: Files, folder: Path) -> None:
    """Write the files of a corpus, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def two_sides(splits: dict[str, Pairs]) -> Files:
    """The files of translations."""
    return {
        f"{split}.{language}": "".join(f"{pair[side]}\n" for pair in pairs)
        for split, pairs in splits.items()
        for side, language in enumerate(("en", "de"))
    }


def plays(data: Path) -> tuple[Files, Parts]:
    """Tiny Shakespeare: three parts of its characters, and the characters of each test window."""
    parts = split_text((data / "input.txt").read_text(encoding="utf-8"))
    names = ("test.txt", "train.txt", "valid.txt")
    files = dict(zip(names, parts, strict=True))
    windows = (len(files["test.txt"]) - 1) // CONTEXT
    return {**files, "test.windows": f"{CONTEXT}\n" * windows}, {"test": (0, windows)}


def reviews(data: Path) -> tuple[Files, Parts]:
    """SST-2: train.tsv without the lines for validation, and dev.tsv as test set."""
    lines = (data / "train.tsv").read_text(encoding="utf-8").splitlines()
    test = [line.split("\t") for line in (data / "dev.tsv").read_text("utf-8").splitlines()]
    split = {
        "train": [line for number, line in enumerate(lines) if number % HELD_OUT],
        "valid": lines[::HELD_OUT],
    }
    files = {f"{name}.tsv": "".join(f"{line}\n" for line in kept) for name, kept in split.items()}
    files["train.text"] = "".join(line.split("\t")[0] + "\n" for line in split["train"])
    for side, name in enumerate(("text", "label")):
        files[f"test.{name}"] = "".join(f"{pair[side]}\n" for pair in test)
    return files, {"dev": (0, len(test))}


def captions(data: Path) -> tuple[Files, Parts]:
    """Multi30k: train, val and test_2016_flickr."""
    names = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    splits = {}
    for split, name in names.items():
        sides = [
            gzip.decompress((data / f"{name}.{language}.gz").read_bytes()).decode().splitlines()
            for language in ("en", "de")
        ]
        splits[split] = clean(zip(*sides, strict=True))
    return two_sides(splits), {"test_2016_flickr": (0, len(splits["test"]))}


def software(data: Path) -> tuple[Files, Parts]:
    """LibreOffice: its memory, and as test set messages, then paragraphs of help."""
    languages = {"src": "en", "tgt": "de"}
    fields: dict[str, str | None] = {"src": None, "tgt": None}
    rows = collect(open_rows([data / "train.tmx.gz"], fields, languages=languages))
    train = zip(rows["src"], rows["tgt"], strict=True)
    valid = gzip.decompress((data / "valid.tsv.gz").read_bytes()).decode()
    lines = [text.split("\t")[:2] for text in valid.splitlines()]
    tests = [messages(data / "test.po"), help_texts(data / "test.help.tsv.gz")]
    parts, pairs = {}, []
    for test in tests:
        found = clean(zip(test.sources, test.references, strict=True))
        parts[test.name] = (len(pairs), len(pairs) + len(found))
        pairs += found
    splits = {
        "train": clean(train),
        "valid": clean((src, tgt) for src, tgt in lines),
        "test": pairs,
    }
    return two_sides(splits), parts


def clean(pairs: Iterable[tuple[str, str]]) -> Pairs:
    """Pairs in one line each, without those that have an empty side."""
    lined = ((line(src).strip(), line(tgt).strip()) for src, tgt in pairs)
    return [(src, tgt) for src, tgt in lined if src and tgt]
