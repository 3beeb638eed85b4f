"""Writing so that nothing which was saved is ever lost: beside, synced, then renamed."""

import ctypes
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from heedful.errors import UserError

# All that a model's directory holds, ours, Hugging Face's or CTranslate2's; what has more is no
# model alone.
MODEL_FILES = frozenset(
    (
        *("config.json", "generation_config.json", "model.safetensors", "model.bin", "head.npz"),
        *("tokenizer.json", "tokenizer.src.json", "tokenizer.tgt.json", "tokenizer_config.json"),
        *("tokenizer.source.json", "tokenizer.target.json", "tokenizer_source", "tokenizer_target"),
        *("source.spm", "target.spm", "vocab.json", "target_vocab.json", "vocabulary.json"),
        *("shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json"),
        *("backends", "example.py"),
    )
)
_WEIGHTS = {"model.safetensors", "model.bin"}  # of which every model has one
LARGEST_TEXT = 512 << 20  # bytes of a file of settings: the largest tokenizers have a tenth
_MAY_BE_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_LEFTOVER = re.compile(r"\..*\.\d+\.tmp")
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2(2)


@contextmanager
def replace_whole(named: Path) -> Iterator[Path]:
    """A path beside `named`, where the block makes a file or a directory: synced, then renamed.

    Whoever reads `named` sees the old content or all of the new. Raises UserError (a full disk, no
    permission, a directory in the way), and then leaves nothing behind.
    """
    if named.exists() and not named.is_file() and not named.is_dir():
        with _copied_into(named) as scratch:
            yield scratch
        return
    path = Path(os.path.realpath(named))  # what a link leads to is replaced, not the link
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    made = missing_folders(path.parent)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        yield beside
        for each in (*beside.rglob("*"), beside):
            _sync(each)
        if beside.is_dir() and path.exists():
            _exchange(beside, path)
        else:
            beside.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        remove(beside)
        remove_empty(made)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, for a library that writes temporary files of its own.

    Their names are not ours, so that a killed process would leave them behind; the folder's name
    is, and `remove_unfinished` and the next writer of `path` remove it with all that it holds.
    """
    path = Path(os.path.realpath(path))
    folder = path.with_name(f".{path.name}.folder.{os.getpid()}.tmp")
    try:
        folder.mkdir()
        yield folder
    finally:
        remove(folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """An open binary file that takes the place of `path` once the block has ended without error.

    As `replace_whole`, for content that comes bit by bit. What an interruption (Ctrl-C, SIGTERM,
    SIGHUP) leaves unfinished is kept as `path` with `.partial` behind its name.
    """
    with replace_whole(path) as beside, beside.open("wb") as file:
        try:
            yield file
        except (KeyboardInterrupt, SystemExit):
            file.flush()
            if beside.stat().st_size and (path.is_file() or not path.exists()):
                os.replace(beside, partial_of(path))
            raise


def partial_of(path: Path) -> Path:
    """Where an interruption leaves what was to be written to a file."""
    path = Path(os.path.realpath(path))
    return path.with_name(f"{path.name}.partial")


def write_text(path: Path, text: str) -> None:
    """`replace_whole` for text, in UTF-8."""
    with replace_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """`replace_whole` for JSON that a person may read."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def user_errors(verb: str, path: Path) -> Iterator[None]:
    """What the system refuses in the block, as a user's error: cannot `verb` the path, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from None


def open_bytes(path: Path) -> BufferedReader:
    """A file's bytes. Raises UserError for a device, as some have no end, and OSError as `open`."""
    if path.is_char_device():
        raise UserError(f"{path} is a device, not a file; name a text file")
    return path.open("rb")


def read_text(path: Path, *, most: int = LARGEST_TEXT) -> str:
    """All of a UTF-8 file of settings; raises UserError where it cannot be, or is no such file."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UserError(f"{path} is larger than {most >> 20} MiB, which no such file is")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start + 1}; convert it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None


def read_json(path: Path) -> Any:
    """Raises UserError where the file is missing or no JSON."""
    return parse_json(read_text(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """As `read_json`, of a file that must hold an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def parse_json(text: str, where: str) -> Any:
    """The content of JSON by its standard: no NaN, no half of a surrogate pair, no bottomless nest.

    Raises:
        UserError: it is none; `where` says what was read.
    """
    try:
        content = json.loads(text, parse_constant=_no_number)
        if _MAY_BE_HALF.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} holds half of a surrogate pair, which is no character; remove it"
        ) from None
    except RecursionError:
        raise UserError(f"{where} is no JSON of ours: nested too deep") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{where} is no JSON (truncated or foreign?): {reason}") from None
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def plain_name(name: object, where: object) -> str:
    """The name of a file beside `where`, which names it: never a path that leads elsewhere.

    Raises:
        UserError: it is absolute, leads up or down, or is no name at all.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
        raise UserError(f"{where} must name a file beside it, not {name!r}; correct it")
    return name


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before anything is done for it.

    Raises:
        UserError: a directory, a link to nowhere, a name that cannot be, no permission.
    """
    real = Path(os.path.realpath(path))
    try:
        is_there = bool(os.stat(path))
    except FileNotFoundError:
        is_there = False
    except (OSError, ValueError) as error:
        raise cannot_write(path, error) from None
    if not path.name or real.is_dir():
        raise cannot_write(path, "Is a directory")
    place = real
    if not is_there or real.is_file():  # a device or a pipe is written to, not replaced
        place = next(each for each in real.parents if each.exists())
        if not place.is_dir():
            raise cannot_write(path, "Not a directory")
    if not os.access(place, os.W_OK):
        raise cannot_write(path, "Permission denied")


def check_new(
    path: Path,
    *,
    overwrite: bool = False,
    owns: Collection[str] = (),
    source: Path | None = None,
) -> None:
    """Refuse a directory to be written where something is, but an empty one.

    Args:
        overwrite: what is there may be replaced,
        owns: where it holds nothing but entries of these names, and where they are those of a
            model, a model's weights.
        source: what is read, and must never be replaced by what is made of it.

    Raises:
        UserError: it is a file, or holds anything (else); it has no name of its own.
    """
    if not path.name or path.name == "..":
        raise UserError(f"{path} cannot be a new directory; name one")
    if path.is_symlink() and not path.exists():
        raise UserError(f"{path} is a link that leads nowhere; name another place")
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path} exists already, as a file; name another place")
        check_writable(path)
    entries = sorted(os.listdir(path)) if path.exists() else []
    if entries and not overwrite:
        raise UserError(f"{path} exists already; name a new directory, or give --overwrite")
    if source is not None and source.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{path} holds what is read, and cannot be replaced; name another place")
    entries = [entry for entry in entries if not is_leftover(entry)]
    others = [entry for entry in entries if entry not in owns]
    if others:
        raise UserError(
            f"{path} holds {others[0]}, which is no part of such a directory, so it is not"
            " replaced; name another place"
        )
    if entries and owns is MODEL_FILES and not _WEIGHTS.intersection(entries):
        raise UserError(f"{path} holds no model, so it is not replaced; name another place")


def write_directory(
    path: Path, fill: Callable[[Path], None], owns: Collection[str] = MODEL_FILES
) -> None:
    """Let `fill` make a directory beside `path`, sync it, and put it in the place of `path`.

    Whoever looks finds the old directory or the new one whole. What killed processes left beside it
    is removed first. A link at `path` stays one.

    Args:
        owns: names of all that an old directory there may hold.

    Raises:
        UserError: it holds more; no room, or no permission.
    """
    check_new(path, overwrite=True, owns=owns)
    with replace_whole(path) as beside:
        beside.mkdir()
        fill(beside)


def remove_leftovers(path: Path) -> None:
    """Remove what writers of `path` that were killed left beside it."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        process = left.name.removesuffix(".tmp").rpartition(".")[2]
        if process.isdecimal() and not _is_alive(int(process)):
            remove(left)


def remove_unfinished(directory: Path) -> None:
    """Remove what killed processes left half-written in a directory of ours, at any depth."""
    for entry in [*directory.rglob(".*.*.tmp")]:
        if is_leftover(entry.name):
            remove(entry)


def is_leftover(name: str) -> bool:
    """Whether a name is that of a temporary file or directory of `replace_whole`."""
    return _LEFTOVER.fullmatch(name) is not None


def missing_folders(folder: Path) -> list[Path]:
    """The folder and those above it that are not there, the innermost first."""
    return [one for one in (folder, *folder.parents) if not one.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, in this order; others, and those that are gone, stay so."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove(entry: Path) -> None:
    """Remove a file, a link, or a directory with all that is in it, as far as that can be done."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with suppress(OSError):
            entry.unlink()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def _exchange(new: Path, old: Path) -> None:
    """Let two directories change places, in one step where the system can (Linux)."""
    names = [_AT_CWD, os.fsencode(new), _AT_CWD, os.fsencode(old), _EXCHANGE]
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(*names) == 0:
        return
    aside = old.with_name(f".{old.name}.old.{os.getpid()}.tmp")
    old.replace(aside)
    new.replace(old)
    aside.replace(new)


@contextmanager
def _copied_into(device: Path) -> Iterator[Path]:
    """For a pipe or a device, which must be written to: a rename would put a file in its place."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory) / "content"
        yield scratch
        try:
            with scratch.open("rb") as source, device.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise cannot_write(device, error) from None


def cannot_write(path: Path, why: OSError | ValueError | str) -> UserError:
    """The error of a path that is not to be written, by what the system says or in words."""
    # A file where the path has a folder is "File exists" to mkdir.
    in_the_way = isinstance(why, FileExistsError)
    reason = "Not a directory" if in_the_way else getattr(why, "strerror", None) or str(why)
    return UserError(f"cannot write {path}: {reason}; make room, or name another place")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
