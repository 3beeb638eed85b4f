"""Names of data files: folders and patterns become files."""

import glob
from pathlib import Path

from heedful.errors import UserError

_DATASET = ("state.json", "dataset_dict.json")  # in a folder that is one table


def expand_path(path: Path) -> list[Path]:
    """The files of a path or pattern, sorted by name.

    A folder means all files in it that are not hidden, unless it is a table of `datasets`; a name
    with `*`, `?` or `[` that is not the name of a file means all files that match it.

    Raises:
        UserError: no file matches; `-`, which other commands read as standard input.
    """
    if path.name == "-" and not path.exists():
        raise UserError(
            "- is no file: a run reads its data twice, so store standard input in a file first"
        )
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
