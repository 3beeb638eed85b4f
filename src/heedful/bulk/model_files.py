"""The files of a model that its outputs depend on: their hashes, and whether they have changed."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from heedful.errors import UserError
from heedful.files import MODEL_FILES, in_hf_format, open_bytes, read_object, user_errors
from heedful.pipelines.base import CONFIG
from heedful.zoo.saved import WEIGHTS, Base

Stamp = tuple[int, int, int]
# Of the Hugging Face format alone.
_HF_FILES = {"model.safetensors.index.json", "special_tokens_map.json", "added_tokens.json"}
_HF_FILES |= {"chat_template.jinja", "vocab.txt", "merges.txt"}


class ModelFiles:
    """The files of a model directory, as they were when this was made.

    Raises:
        UserError: the directory holds no model, or not the expected one.
    """

    def __init__(self, model: Path, expected: Mapping[str, str]) -> None:
        self.model = model
        self._stamps = _stamps_of(model)
        if model_hashes(model) != expected:
            raise self._changed()

    def check_unchanged(self) -> None:
        """Raise UserError if a file was written, replaced, added or removed since."""
        if _stamps_of(self.model) != self._stamps:
            raise self._changed()

    def _changed(self) -> UserError:
        return UserError(
            f"{self.model} was changed while the job ran; put it back, and the same command "
            "continues, or give another folder"
        )


def model_hashes(model: Path) -> dict[str, str]:
    """The SHA-256 of each file of a model directory that its outputs depend on.

    Raises:
        UserError: the directory holds no model.
    """
    files = model_files(model)
    if not files:
        raise UserError(f"{model} holds no model; give the directory that a training wrote")
    return {os.path.relpath(path, model): sha256_of_file(path) for path in files}


def model_files(model: Path) -> list[Path]:
    """The files of a model directory: configuration, weights, tokenizers, backends; and the weights
    of its base."""
    if not model.is_dir():
        return []
    suffixes = (".safetensors", ".model", ".spm")
    names = {path.name for path in model.iterdir() if path.suffix in suffixes}
    files = [model / name for name in sorted(names | _HF_FILES | (MODEL_FILES - {"example.py"}))]
    inner = [path for file in files if file.is_dir() for path in sorted(file.rglob("*"))]
    return [path for path in (*files, *inner, *_base_files(model)) if path.is_file()]


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a file; raises UserError if it cannot be read."""
    with user_errors("read", path), open_bytes(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(path: Path) -> Stamp:
    """The size of a file, and the times of the last change of its content and of its entry.

    Who replaces a file can set the former time, but not the latter.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _stamps_of(model: Path) -> dict[Path, Stamp]:
    with user_errors("read", model):
        return {path: stamp_of(path) for path in model_files(model)}


def _base_files(model: Path) -> list[Path]:
    """The weights of the base of a model that has one."""
    if not (model / CONFIG).is_file():
        return []
    content = read_object(model / CONFIG)
    base = None if in_hf_format(content) else Base.read(content, model / CONFIG)
    return [] if base is None else [Path(os.path.normpath(model / base.path)) / WEIGHTS]
