"""Weight files that hold only what was trained, and name the model that has all other tensors."""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heedful.errors import UserError
from heedful.zoo.names import few
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

_ENTRY = "base"  # of the file's metadata


@dataclass(frozen=True)
class BaseWeights:
    """Tensors that a weight file takes from another one.

    Attributes:
        path: of the other file, from the directory of this one.
        sha256: of its content.
        tensors: names of those that are taken.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    path: str
    sha256: str
    tensors: tuple[str, ...]


def save_added(
    path: Path,
    weights: Mapping[str, Tensor],
    trained: Collection[str],
    base: Path,
    directory: Path,
) -> None:
    """Write the trained weights of a net, and that the others are those of the model `base`.

    Args:
        weights: of the whole net.
        trained: names of those that differ from the base.
        base: a model directory.
        directory: that the file will be in, where it is written elsewhere first.

    Raises:
        UserError: the base is no model directory, is `directory` itself or has a base; all weights
            were trained; the base lacks a tensor that was not trained, or has another.
    """
    file = base / WEIGHTS
    if base.resolve() == directory.resolve():
        raise UserError(f"{directory} cannot be its own base; save to another directory")
    if read_base(file) is not None:
        raise UserError(f"{base} has a base itself; save it whole first, by load and save")
    theirs, frozen = load_tensors(file), sorted(weights.keys() - set(trained))
    if not frozen:
        raise UserError(
            f"nothing is taken from {base}: all weights of the net require a gradient; freeze some "
            "by requires_grad_(False), or save without a base"
        )
    unlike = [name for name in frozen if not _is_equal(weights[name], theirs.get(name))]
    if unlike:
        raise UserError(
            f"cannot save what was added to {base}: {few(unlike)} require no gradient, but are not "
            "as they are there"
        )
    place = os.path.relpath(file.resolve(), directory.resolve())
    about = BaseWeights(place, _digest(file), tuple(frozen))
    added = {name: weights[name] for name in weights if name in set(trained)}
    save_tensors(path, added, metadata={_ENTRY: json.dumps(asdict(about))})


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a weight file, with those that it takes from its base.

    Raises UserError as `load_tensors` does, and where the base is gone or has changed.
    """
    tensors, base = load_tensors(path), read_base(path)
    if base is None:
        return tensors
    file = Path(os.path.normpath(path.parent / base.path))
    if not file.is_file():
        raise UserError(f"{path} adds to {file}, which is not there; move the model back to there")
    if _digest(file) != base.sha256:
        raise UserError(
            f"{path} adds to {file}, which has changed since; put the former file there, or train "
            "again on this one"
        )
    theirs = load_tensors(file)
    missing = [name for name in base.tensors if name not in theirs]
    if missing:
        raise UserError(f"{path} takes {few(missing)} from {file}, which lacks it; it is damaged")
    return {name: theirs[name] for name in base.tensors} | tensors


def read_base(path: Path) -> BaseWeights | None:
    """The tensors that a weight file takes from another one; None: it takes none.

    That of a file that cannot be read is None, too: `load_tensors` says what is wrong with it.

    Raises UserError where the entry is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            entry = (file.metadata() or {}).get(_ENTRY)
    except (SafetensorError, OSError):
        return None
    if entry is None:
        return None
    try:
        return TypeAdapter(BaseWeights).validate_json(entry)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise UserError(f"{path}: what it says of its base is damaged: {reason}") from None


def _is_equal(own: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(own.detach().cpu(), other.to(own.dtype))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
