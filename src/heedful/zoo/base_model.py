"""Models that store trained tensors only, and refer to a base model for all others."""

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from heedful.errors import UserError
from heedful.files import in_hf_format, read_object
from heedful.zoo.names import abbreviate_names
from heedful.zoo.saved import WEIGHTS, load_tensors

CONFIG = "config.json"


@dataclass(frozen=True)
class Base:
    """The base of a model directory: the entry `base` of its `config.json`.

    Attributes:
        path: path of the base's directory, relative to the directory of the model.
        sha256: hash of the base's `model.safetensors`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    path: str
    sha256: str

    @classmethod
    def create(cls, base: Path, directory: Path) -> "Base":
        """The base of a model that will be in `directory`.

        Raises:
            UserError: not a model directory, `directory` itself, or a model with a base.
        """
        if base.resolve() == directory.resolve():
            raise UserError(f"{directory} cannot be its own base; save to another directory")
        if not (base / WEIGHTS).is_file():
            raise UserError(f"{base} holds no {WEIGHTS}; a base is a model directory of heedful")
        content = read_object(base / CONFIG)
        if in_hf_format(content):
            raise UserError(
                f"{base} is in the Hugging Face format, which cannot be a base: import it first, "
                f"by `heedful import hf {base} OUT`, and start from OUT"
            )
        if "base" in content:
            raise UserError(
                f"{base} has a base itself; make it a whole model first: heedful merge {base} OUT"
            )
        path = os.path.relpath(base.resolve(), directory.resolve())
        return cls(path, _digest(base / WEIGHTS))

    @classmethod
    def read(cls, content: Mapping[str, object], where: Path) -> "Base | None":
        """The entry in the content of a `config.json`, the file `where`; None without one.

        Raises:
            UserError: a damaged entry.
        """
        if "base" not in content:
            return None
        try:
            return TypeAdapter(cls).validate_python(content["base"])
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(f"{where}: its entry `base` is damaged: {reason}") from None

    def load(self, directory: Path) -> dict[str, Tensor]:
        """All tensors of the base of a model in `directory`.

        Raises:
            UserError: the base is missing, damaged, or has changed.
        """
        file = Path(os.path.normpath(directory / self.path)) / WEIGHTS
        if not file.is_file():
            raise UserError(
                f"{directory} needs its base {file}, which does not exist; move it back there"
            )
        if _digest(file) != self.sha256:
            raise UserError(
                f"{directory} needs its base {file}, which has changed; restore the former file "
                "or train again on this one"
            )
        return load_tensors(file)


def check_frozen(weights: Mapping[str, Tensor], trained: Collection[str], base: Path) -> None:
    """Raise UserError unless all weights that were not trained equal those of the base."""
    frozen = sorted(weights.keys() - set(trained))
    if not frozen:
        raise UserError(
            f"nothing is taken from {base}: all weights of the net require a gradient; freeze some "
            "by requires_grad_(False), or save without a base"
        )
    tensors = load_tensors(base / WEIGHTS)
    unlike = [name for name in frozen if not _is_equal(weights[name], tensors.get(name))]
    if unlike:
        raise UserError(
            f"cannot save what was added to {base}: {abbreviate_names(unlike)} require no "
            "gradient, but differ from its weights"
        )


def _is_equal(own: Tensor, other: Tensor | None) -> bool:
    return other is not None and torch.equal(own.detach().cpu(), other.to(own.dtype))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
