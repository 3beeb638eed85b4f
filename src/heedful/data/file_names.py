"""Names of data files: folders and patterns become files, standard input a file of the cache."""

import glob
import hashlib
import os
import sys
from pathlib import Path
from typing import BinaryIO

from heedful.config import Files, Recipe
from heedful.data.prepared import prepare_once
from heedful.errors import UserError
from heedful.files import user_errors

STDIN = "-"
_KEYS = ("src", "tgt", "text", "file")  # of a split, which name files
_DATASET = ("state.json", "dataset_dict.json")  # in a folder that is one table
_BLOCK = 1 << 20


def expand_path(path: Path) -> list[Path]:
    """The files of a path or pattern, sorted by name.

    A folder means all files in it that are not hidden, unless it is a table of `datasets`; a name
    with `*`, `?` or `[` that is not the name of a file means all files that match it.

    Raises:
        UserError: no file matches.
    """
    if path.is_dir() and not any((path / name).exists() for name in _DATASET):
        files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        if not files:
            raise UserError(f"the folder {path} has no files; name another one")
        return files
    if path.exists() or not glob.has_magic(str(path)):
        return [path]
    if not (matches := sorted(map(Path, glob.glob(str(path))))):
        raise UserError(f"no file matches the pattern {path}; correct it")
    return matches


def store_stdin(recipe: Recipe, cache: Path) -> Recipe:
    """The recipe with a file of the cache in place of `-`, which standard input is read into.

    A second pass over the data, and a resumed run, read it again.

    Raises:
        UserError: `-` is named more than once; standard input is a terminal.
    """
    data = recipe.data
    sections = [data.train, data.valid, data.test]
    sections += [files for c in data.corpora.values() for files in (c, c.valid, c.test)]
    count = sum(files.paths().count(STDIN) for files in sections)
    if not count:
        return recipe
    if count > 1:
        raise UserError(f"the recipe names {STDIN} (standard input) {count} times; name it once")
    if sys.stdin.isatty():
        raise UserError(f"{STDIN} is standard input, which is a terminal; pipe the data into it")

    def stored(files: Files) -> Files:
        update = {}
        for key in _KEYS:
            paths = getattr(files, key)
            listed = [paths] if isinstance(paths, str) else paths or []
            if STDIN in listed:
                path = _store(sys.stdin.buffer, key, cache)
                update[key] = [str(path) if name == STDIN else name for name in listed]
        return files.model_copy(update=update) if update else files

    corpora = {
        name: stored(corpus).model_copy(
            update={"valid": stored(corpus.valid), "test": stored(corpus.test)}
        )
        for name, corpus in data.corpora.items()
    }
    splits = {"train": stored(data.train), "valid": stored(data.valid), "test": stored(data.test)}
    return recipe.model_copy(
        update={"data": data.model_copy(update={**splits, "corpora": corpora})}
    )


def _store(stream: BinaryIO, key: str, cache: Path) -> Path:
    """The content of a stream as a file of the cache; its ending is by the recipe key."""
    digest, name = hashlib.blake2b(digest_size=16), "stdin.tsv" if key == "file" else "stdin.txt"
    with user_errors("write", cache):
        cache.mkdir(parents=True, exist_ok=True)
    temporary = cache / f".stdin.{os.getpid()}.tmp"  # a killed process's is removed by `cache rm`
    try:
        with user_errors("write", temporary), temporary.open("wb") as file:
            while block := stream.read(_BLOCK):
                digest.update(block)
                file.write(block)
                if key == "file" and file.tell() == len(block) and block.lstrip()[:1] == b"{":
                    name = "stdin.jsonl"

        def fill(folder: Path) -> None:
            temporary.rename(folder / name)

        about = {"task": "standard input", "files": []}
        folder = prepare_once(cache, {"stdin": digest.hexdigest(), "name": name}, fill, about)
    finally:
        temporary.unlink(missing_ok=True)
    return (folder / name).absolute()
