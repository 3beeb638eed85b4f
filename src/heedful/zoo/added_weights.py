"""Weight files that hold trained tensors only, and refer to a base model for all others."""

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
from heedful.zoo.names import abbreviate_names
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

_ENTRY = "base"  # key in the metadata of the file


@dataclass(frozen=True)
class BaseWeights:
    """Tensors of a base file that complete a weight file.

    Attributes:
        path: path of the base file, relative to the directory of the weight file.
        sha256: hash of the base file.
        tensors: names of the tensors to read from it.
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
    """Write the trained weights of a net, with a reference to a base model for the others.

    Args:
        path: the file to write.
        weights: all weights of the net.
        trained: names of the weights to write.
        base: directory of the base model.
        directory: final directory of the file, to which the path of the base is relative.

    Raises:
        UserError: the base is not a model directory, is `directory` itself or has a base; all
            weights were trained; or weights that were not trained differ from the base.
    """
    file = base / WEIGHTS
    if base.resolve() == directory.resolve():
        raise UserError(f"{directory} cannot be its own base; save to another directory")
    if read_base(file) is not None:
        raise UserError(f"{base} has a base itself; save it whole first, by load and save")
    base_tensors, frozen = load_tensors(file), sorted(weights.keys() - set(trained))
    if not frozen:
        raise UserError(
            f"nothing is taken from {base}: all weights of the net require a gradient; freeze some "
            "by requires_grad_(False), or save without a base"
        )
    changed = [name for name in frozen if not _is_equal(weights[name], base_tensors.get(name))]
    if changed:
        raise UserError(
            f"cannot save with the base {base}: {abbreviate_names(changed)} require no gradient, "
            "but differ from the base"
        )
    relative = os.path.relpath(file.resolve(), directory.resolve())
    reference = BaseWeights(relative, _digest(file), tuple(frozen))
    added = {name: weights[name] for name in weights if name in set(trained)}
    save_tensors(path, added, metadata={_ENTRY: json.dumps(asdict(reference))})


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a weight file, completed from its base.

    Raises UserError as `load_tensors`, and if the base is missing or has changed.
    """
    tensors, base = load_tensors(path), read_base(path)
    if base is None:
        return tensors
    file = Path(os.path.normpath(path.parent / base.path))
    if not file.is_file():
        raise UserError(f"{path} needs its base {file}, which does not exist; restore it there")
    if _digest(file) != base.sha256:
        raise UserError(
            f"{path} needs its base {file}, which has changed; restore the former file, or train "
            "again on this one"
        )
    base_tensors = load_tensors(file)
    missing = [name for name in base.tensors if name not in base_tensors]
    if missing:
        raise UserError(
            f"{path} needs {abbreviate_names(missing)} of its base {file}, which lacks it"
        )
    return {name: base_tensors[name] for name in base.tensors} | tensors


def read_base(path: Path) -> BaseWeights | None:
    """The reference to a base in a weight file; None if it has none or cannot be read.

    Raises UserError if the entry is damaged; `load_tensors` reports unreadable files.
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
        raise UserError(f"{path}: the reference to its base is damaged: {reason}") from None


def _is_equal(own: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(own.detach().cpu(), other.to(own.dtype))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
