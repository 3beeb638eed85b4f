"""The text of the tasks of the race, as plain files that every system reads."""

import gzip
from collections.abc import Iterable
from pathlib import Path

from heedful.data.row_files import open_rows
from heedful.data.rows import collect
from localization import help_texts, line, messages
from race_peers import Corpus

Pairs = list[tuple[str, str]]
# For each task the folder in DATA, the parts of its test set, and settings of the peers: the
# vocabulary of Wu et al. 2021 for Multi30k, and that of heedful's recipe for the other; pieces of
# the longest outputs, 100 in JoeyNMT's configurations. Paragraphs of help are longer.
FOLDERS = {"multi30k": "multi30k", "libreoffice": "libreoffice/de"}


def corpus_of(task: str, data: Path, folder: Path) -> tuple[Corpus, dict[str, tuple[int, int]]]:
    """The files of a task, which are written once, and the lines of each part of its test set."""
    is_captions = task == "multi30k"
    folder = folder.absolute()
    corpus = Corpus(
        task,
        folder,
        "en",
        "de",
        vocabulary=10_000 if is_captions else 8_000,
        longest_output=100 if is_captions else 200,
    )
    splits, parts = (captions if is_captions else software)(data)
    for split, pairs in splits.items():
        for is_source in (True, False):
            path = corpus.file(split, is_source)
            text = "".join(f"{pair[0 if is_source else 1]}\n" for pair in pairs)
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return corpus, parts


def captions(data: Path) -> tuple[dict[str, Pairs], dict[str, tuple[int, int]]]:
    """Multi30k: train, val and test_2016_flickr."""
    names = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
    splits = {}
    for split, name in names.items():
        sides = [
            gzip.decompress((data / f"{name}.{language}.gz").read_bytes()).decode().splitlines()
            for language in ("en", "de")
        ]
        splits[split] = clean(zip(*sides, strict=True))
    return splits, {"test_2016_flickr": (0, len(splits["test"]))}


def software(data: Path) -> tuple[dict[str, Pairs], dict[str, tuple[int, int]]]:
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
    return splits, parts


def clean(pairs: Iterable[tuple[str, str]]) -> Pairs:
    """Pairs in one line each, without those that have an empty side."""
    lined = ((line(src).strip(), line(tgt).strip()) for src, tgt in pairs)
    return [(src, tgt) for src, tgt in lined if src and tgt]
