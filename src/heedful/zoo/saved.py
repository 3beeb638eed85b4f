"""The weights of a net, and a net on disk: its Config as JSON, its weights as safetensors, or those
beside a base model's.

Nothing is unpickled.
"""

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heedful.errors import UserError
from heedful.files import atomic_replace, in_hf_format, read_object, scratch_folder
from heedful.parts.helpers import first_problem
from heedful.plugins import nearest
from heedful.zoo import architecture
from heedful.zoo.architectures import check_memory, meta_net, sizes_of
from heedful.zoo.names import FLOATS, Name, Names, abbreviate_names, from_hf

CONFIG = "config.json"

WEIGHTS = "model.safetensors"
LOCK = ".lock"  # next to the weights during a training run, and after it was killed
# Numbers of parameters, and of table elements, that are allowed for files of any size.
_SMALL, _LARGE = 1 << 24, 1 << 28
# Names of tensors with one row per vocabulary entry.
VOCABULARY_TENSORS = r"(.*embedding\.tokens\.weight|head\.out\.(weight|bias))"


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    """The parameters of the net; shared ones under their first name only."""
    return dict(net.named_parameters())


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the net that require a gradient."""
    return {name: weight for name, weight in net.named_parameters() if weight.requires_grad}


def set_weights(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    where: Path | str,
    only: Collection[str] | None = None,
) -> None:
    """Copy tensors named as in the net into it; raises UserError as `from_hf`.

    Args:
        only: names of the parameters to set, while the others keep their values; default: all.
    """
    own = weights_of(net)
    unchanged = {} if only is None else {name: own[name] for name in own.keys() - set(only)}
    from_hf(net, {**unchanged, **tensors}, Names([Name(name, name) for name in own]), where)


def make_config(name: str, keys: dict[str, object], where: str = "model") -> object:
    """The Config of an architecture from a mapping; raises UserError naming a wrong key."""
    config = architecture(name).config
    known = [field.name for field in fields(config)]
    # Keys of a recipe are shown with their section, keys of a file after its name.
    front, section = ("", "model.") if where == "model" else (f"{where}: ", "")
    for key in keys:
        if key not in known:
            raise UserError(f"{front}unknown key {section}{key}; {nearest(key, known)}")
    try:
        return TypeAdapter(config).validate_python(keys)
    except ValidationError as error:
        key, message = first_problem(error, known)
        place = f"{front}{section}{key}" if key else where
        raise UserError(f"{place}: {message}") from None


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to one safetensors file, completely or not at all."""
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_replace(path) as temporary, scratch_folder(path) as folder:
        file = folder / path.name
        try:
            save_file(content, file, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        file.chmod(0o644)  # safetensors creates files that only their owner can read
        file.replace(temporary)


def read_metadata(path: Path) -> dict[str, Any]:
    """The training metadata in a file of weights; empty if it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["training"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def read_step(path: Path) -> int | None:
    """The training step of the weights in a file; None if it is not stored."""
    step = read_metadata(path).get("step")
    return step if isinstance(step, int) else None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raises UserError if it is missing, truncated or not safetensors."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a model directory holds a {WEIGHTS}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file (truncated, or another format): {error}"
        ) from None


class _ZeroInitialization(TorchFunctionMode):
    """Random initializations write zeros, which is faster."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            tensor = args[0] if args else kwargs["tensor"]
            tensor.detach().zero_()
            return tensor
        return func(*args, **(kwargs or {}))


def uninitialized_net(
    name: str, config: Any, tensors: Mapping[str, Tensor], where: Path | str
) -> nn.Module:
    """A net of an architecture whose weights the caller must copy into it; its buffers are set.

    Args:
        tensors: the weights by name; only their sizes and values are checked.
        where: their file, for messages.

    Raises:
        UserError: sizes in the Config do not fit the tensors, or a tensor holds NaN or infinity.
    """
    _check_sizes(name, config, tensors, where)
    for key, tensor in tensors.items():
        if tensor.dtype in FLOATS and not tensor.sum(dtype=torch.float64).isfinite():
            raise UserError(f"{where}: {key} holds NaN or infinity; the model is damaged")
    with _ZeroInitialization():
        return architecture(name).build(config)


def initialized_net(name: str, config: Any, device: torch.device | None = None) -> nn.Module:
    """A new net with initialized weights.

    Args:
        device: device that will train it; default: the CPU.

    Raises:
        UserError: the device has too little memory to train it.
    """
    check_memory(name, config, device or torch.device("cpu"))
    return architecture(name).build(config)


def _check_sizes(name: str, config: Any, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Raise UserError for sizes that cannot be those of the tensors, before a net is built.

    Shapes are compared when the tensors are copied. Here the net may not have more parameters than
    the tensors have elements (with a margin for a new head), and tables must fit into memory.
    """
    count, numbers = len(tensors), sum(tensor.numel() for tensor in tensors.values())
    keys = asdict(config)
    layers = sum(value for key, value in keys.items() if key.endswith("layers"))
    weights = (
        f"its {count:,} tensors of {numbers:,} numbers; its config.json is damaged or of another "
        "model"
    )
    if layers * keys.get("num_experts", 1) > count:
        raise UserError(f"{where}: {layers:,} layers are more than {weights}")
    parameters, tables = sizes_of(name, config, str(where))
    if parameters > max(2 * numbers, _SMALL) or tables > max(numbers, _LARGE):
        raise UserError(
            f"{where}: a net of {parameters:,} parameters and tables of {tables:,} numbers is more "
            f"than {weights}"
        )


def check_parameters(name: str, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Check that a net of the architecture can be loaded from these weights.

    Raises:
        UserError: tensors of other names or shapes (for example of a wrapped linear layer), or
            missing ones; the message lists them.
    """
    own = weights_of(meta_net(name, config, "model"))
    shapes = {key: tensor.shape for key, tensor in own.items()}
    extra = sorted(key for key, tensor in weights.items() if shapes.get(key) != tensor.shape)
    missing = sorted(own.keys() - weights.keys())
    if extra or missing:
        problem = f"has {abbreviate_names(extra)} and not" if extra else "lacks"
        needed = abbreviate_names(missing) if missing else "the shapes"
        raise UserError(
            f"cannot save the model: its net {problem} {needed} of a {name} with its "
            "Config; merge or unwrap the modules that were changed"
        )


@torch.no_grad()
def copy_matching(
    net: nn.Module, source: nn.Module, origin: Callable[[str], str] = str
) -> tuple[list[str], list[str], list[str]]:
    """Copy the parameters that have the same name and shape in both nets.

    Args:
        origin: name in `source` of a parameter of `net`; unknown names are not copied.

    Returns:
        Names of `net` that were copied, names of `net` that were not, unused names of `source`.
    """
    own, others = weights_of(net), weights_of(source)
    origins = {name: other for name in sorted(own) if (other := origin(name)) in others}
    loaded = [name for name, other in origins.items() if own[name].shape == others[other].shape]
    for name in loaded:
        own[name].copy_(others[origins[name]])
    unused = others.keys() - {origins[name] for name in loaded}
    return loaded, sorted(own.keys() - set(loaded)), sorted(unused)


# --- Models that store trained tensors only, and refer to a base for all others -----------------


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
