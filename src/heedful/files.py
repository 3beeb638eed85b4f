"""Atomic writes: a temporary file or directory beside the target, synced, then renamed."""

import codecs
import ctypes
import errno
import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from heedful.errors import UserError, describe

_NO_CHARSETS = frozenset(
    [
        *("charmap", "idna", "mbcs", "oem", "punycode", "undefined"),
        *("raw-unicode-escape", "raw_unicode_escape", "unicode-escape", "unicode_escape"),
    ]
)
_LINE_BREAK = re.compile(r"\r\n|[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")  # of `str.splitlines`

# Names of all files of a model directory in heedful's, Hugging Face's or CTranslate2's format; a
# directory with other entries is never replaced.
MODEL_FILES = frozenset(
    (
        *("config.json", "generation_config.json", "model.safetensors", "model.bin", "head.npz"),
        *("tokenizer.json", "tokenizer.src.json", "tokenizer.tgt.json", "tokenizer_config.json"),
        *("tokenizer.source.json", "tokenizer.target.json", "tokenizer_source", "tokenizer_target"),
        *("source.spm", "target.spm", "vocab.json", "target_vocab.json", "vocabulary.json"),
        *("shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json"),
        *("backends", "example.py", "modules.json", "sentence_bert_config.json", "1_Pooling"),
        *("2_Normalize", "config_sentence_transformers.json"),
    )
)
_WEIGHTS = {"model.safetensors", "model.bin"}  # every model has one of them
LARGEST_TEXT = 512 << 20  # bytes; the largest tokenizers have a tenth
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LEFTOVER = re.compile(r"\..*\.\d+\.tmp")
_CACHE_VARIABLE = "HEEDFUL_CACHE"  # environment variable with the folder of the cache
_AT_CWD, _EXCHANGE = -100, 2  # constants of renameat2(2)


def cache_home() -> Path:
    """The folder of what can be made again: HEEDFUL_CACHE; default: in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(_CACHE_VARIABLE) or Path(home) / "heedful")


def as_path(path: str | os.PathLike[str], name: str) -> Path:
    """A path that a caller gave as the argument `name`; raises UserError for another type."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"{name} must be a path, as text or a pathlib.Path, not {describe(path)}")
    return Path(path)


def in_hf_format(content: Mapping[str, Any]) -> bool:
    """True for the content of a model's `config.json` in the Hugging Face format."""
    return "model_type" in content and "heedful" not in content


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Replace a file or directory atomically: the block writes to the path that is yielded.

    The path is a temporary one beside `path`, synced and renamed after the block, so that readers
    see either the old content or the whole new one.

    Raises:
        UserError: a full disk, no permission, a directory in the way; nothing is left behind.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with _copied_into(path) as scratch:
            yield scratch
        return
    target = Path(os.path.realpath(path))  # the target of a link is replaced, not the link
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    new_folders = missing_folders(target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        yield temporary
        sync_all(temporary)
        if temporary.is_dir() and target.exists():
            _exchange(temporary, target)
        else:
            temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from None
    finally:
        remove(temporary)
        remove_empty(new_folders)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, for a library that writes temporary files.

    Its name is one that `remove_unfinished` and the next writer of `path` recognize, so that the
    library's files of a killed process are removed with it.
    """
    path = Path(os.path.realpath(path))
    folder = path.with_name(f".{path.name}.folder.{os.getpid()}.tmp")
    try:
        folder.mkdir()
        yield folder
    finally:
        remove(folder)


@contextmanager
def atomic_open(path: Path) -> Iterator[BinaryIO]:
    """An open binary file that replaces `path` when the block ends without error.

    As `atomic_replace`, for content that is written in parts. After an interruption (Ctrl-C,
    SIGTERM, SIGHUP) the unfinished file is kept, named `path` and `.partial`.
    """
    with atomic_replace(path) as temporary, temporary.open("wb") as file:
        try:
            yield file
        except (KeyboardInterrupt, SystemExit):
            file.flush()
            if temporary.stat().st_size and (path.is_file() or not path.exists()):
                os.replace(temporary, partial_of(path))
            raise


def partial_of(path: Path) -> Path:
    """The path of the unfinished file that an interrupted write of `path` leaves."""
    path = Path(os.path.realpath(path))
    return path.with_name(f"{path.name}.partial")


def is_charset(name: str) -> bool:
    """True for the name of a character set that Python knows; some of its codecs are none."""
    try:
        "a".encode(name)  # LookupError for a codec of bytes, such as base64
        return codecs.lookup(name).name not in _NO_CHARSETS
    except (LookupError, ValueError):
        return False


def line_of_byte(data: bytes, place: int, encoding: str) -> int:
    """The number of the line of a place in encoded text; a byte of a character is no line end."""
    return data[:place].decode(encoding, "replace").count("\n") + 1


def one_line(text: str) -> str:
    """The text with a space for each line break."""
    return _LINE_BREAK.sub(" ", text)


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write a line for each text (`one_line`) with `atomic_replace`.

    Returns the number of texts with a line break.
    """
    texts = [*lines]
    written = [one_line(text) for text in texts]
    write_text(path, "".join(f"{line}\n" for line in written))
    return sum(line != text for line, text in zip(written, texts, strict=True))


def write_text(path: Path, text: str) -> None:
    """`atomic_replace` for text, in UTF-8."""
    with atomic_replace(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any) -> None:
    """`atomic_replace` for JSON that a person may read."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def user_errors(verb: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError: cannot `verb` the path, and why."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {verb} {path}: {error.strerror or error}") from None


def open_bytes(path: Path) -> BufferedReader:
    """Open a file for reading bytes; raises UserError for a device, which may be endless."""
    if path.is_char_device():
        raise UserError(f"{path} is a device, not a file; name a text file")
    return path.open("rb")


def read_text(path: Path, *, most: int = LARGEST_TEXT) -> str:
    """Read a UTF-8 file of at most `most` bytes; raises UserError where that fails."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UserError(f"{path} is larger than {most >> 20} MiB, the limit of such files")
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start + 1}; convert it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises UserError where it is missing or not JSON."""
    return parse_json(read_text(path), str(path))


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold an object; raises UserError where it does not."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def parse_json(text: str, where: str, make: Callable[[list[Any]], Any] | None = None) -> Any:
    """Parse standard JSON: no NaN, no lone surrogates, limited nesting; `make` makes objects.

    Raises:
        UserError: the text is not JSON; the message begins with `where`.
    """
    try:
        content = json.loads(text, parse_constant=_no_number, object_pairs_hook=make)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
    except UserError:
        raise
    except UnicodeEncodeError:
        raise UserError(
            f"{where} holds half of a surrogate pair, which is not a character; remove it"
        ) from None
    except RecursionError:
        raise UserError(f"{where} is not JSON: nested too deep") from None
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{where} is not JSON (truncated, or another format?): {reason}") from None
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def plain_name(name: object, where: object) -> str:
    """Check a file name in the file `where`, which must name a file of the same folder.

    Raises:
        UserError: the name is a path, empty or not text.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
        raise UserError(f"{where} must name a file beside it, not {name!r}; correct it")
    return name


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written as a file, before long work starts.

    Raises:
        UserError: a directory, a broken link, an invalid name, no permission.
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
        place = next(parent for parent in real.parents if parent.exists())
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
    """Refuse an output directory that exists, unless it is empty or may be overwritten.

    Args:
        overwrite: an existing directory may be replaced if all its entries are in `owns`.
        owns: names of entries; with `MODEL_FILES` the directory must also hold weights.
        source: input of the command, which must not be inside `path`.

    Raises:
        UserError: a file, a directory with entries that must not be replaced, a path without a
            name.
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
        raise UserError(f"{path} exists already; name a new directory, or give overwrite=True")
    if source is not None and source.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{path} holds what is read, and cannot be replaced; name another place")
    entries = [entry for entry in entries if not is_leftover(entry)]
    others = [entry for entry in entries if entry not in owns]
    if others:
        raise UserError(
            f"{path} holds {others[0]}, which does not belong to such a directory, so it is"
            " not replaced; name another place"
        )
    if entries and MODEL_FILES.issubset(owns) and not _WEIGHTS.intersection(entries):
        raise UserError(f"{path} holds no model, so it is not replaced; name another place")


def write_directory(
    path: Path, fill: Callable[[Path], None], owns: Collection[str] = MODEL_FILES
) -> None:
    """Replace a directory atomically with one that `fill` writes (`atomic_replace`).

    Leftovers of killed processes are removed first. A link at `path` stays a link.

    Args:
        owns: names of all entries that an old directory may hold.

    Raises:
        UserError: the old directory holds other entries; a full disk, no permission.
    """
    check_new(path, overwrite=True, owns=owns)
    with atomic_replace(path) as temporary:
        temporary.mkdir()
        fill(temporary)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files that killed writers of `path` left beside it."""
    # The pattern excludes files of other paths with this prefix, such as out.align beside out.
    named = re.compile(rf"\.{re.escape(path.name)}(?:\.folder|\.old)?\.(\d+)\.tmp")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        name = named.fullmatch(left.name)
        if name is not None and not _is_alive(int(name[1])):
            remove(left)


def remove_unfinished(directory: Path) -> None:
    """Remove temporary files that killed processes left in a directory, at any depth."""
    for entry in [*directory.rglob(".*.*.tmp")]:
        if is_leftover(entry.name):
            remove(entry)


def is_leftover(name: str) -> bool:
    """True for the name of a temporary file or directory of `atomic_replace`."""
    return _LEFTOVER.fullmatch(name) is not None


def missing_folders(folder: Path) -> list[Path]:
    """The folder and its parents, as far as they do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders that are empty, in this order."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def remove(entry: Path) -> None:
    """Remove a file, a link or a whole directory, ignoring errors."""
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
    """Exchange two directories, in one atomic step on Linux."""
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
    """A temporary file whose content is then written to a pipe or device, never renamed."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory) / "content"
        yield scratch
        try:
            with scratch.open("rb") as source, device.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise cannot_write(device, error) from None


def cannot_write(path: Path, why: OSError | ValueError | str) -> UserError:
    """The error for a path that cannot be written, with the system's reason or one in words."""
    # mkdir says "File exists" where a parent of the path is a file.
    in_the_way = isinstance(why, FileExistsError)
    reason = "Not a directory" if in_the_way else getattr(why, "strerror", None) or str(why)
    is_full = getattr(why, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return UserError(
        f"cannot write {path}: {reason}; {'make room, or ' if is_full else ''}name another place"
    )


def sync_all(path: Path) -> None:
    """Write a file, or a directory with all that it holds, from memory to the disk."""
    for entry in (*path.rglob("*"), path):
        _sync(entry)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
