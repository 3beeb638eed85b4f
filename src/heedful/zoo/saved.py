"""A net on disk: its configuration as JSON, its weights as safetensors; nothing is unpickled."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heedful.errors import UserError
from heedful.files import replace_whole, scratch_folder
from heedful.plugins import nearest
from heedful.zoo import architecture
from heedful.zoo.names import FLOATS, few, weights_of
from heedful.zoo.sizes import check_memory, meta_net, sizes_of

WEIGHTS = "model.safetensors"
LOCK = ".lock"  # stands beside them while a run works there, or after it was killed
# Numbers that parameters and tables may hold however few the file has.
_SMALL, _LARGE = 1 << 24, 1 << 28
# Names of tensors with a row for each entry of the vocabulary.
VOCABULARY_TENSORS = r"(.*embedding\.tokens\.weight|head\.out\.(weight|bias))"


def make_config(name: str, keys: dict[str, object], where: str = "model") -> object:
    """The frozen Config of an architecture from plain keys; raises UserError naming a wrong one."""
    config = architecture(name).config
    known = [field.name for field in fields(config)]
    # A recipe's section is the beginning of its keys, a file stands in front of all.
    front, section = ("", "model.") if where == "model" else (f"{where}: ", "")
    for key in keys:
        if key not in known:
            raise UserError(f"{front}unknown key {section}{key}; {nearest(key, known)}")
    try:
        return TypeAdapter(config).validate_python(keys)
    except ValidationError as error:
        first = error.errors()[0]
        key, message = ".".join(map(str, first["loc"])), first["msg"]
        place = f"{front}{section}{key}" if key else where
        raise UserError(f"{place}: {message.removeprefix('Value error, ')}") from None


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to one safetensors file, whole or not at all."""
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replace_whole(path) as beside, scratch_folder(path) as folder:
        file = folder / path.name
        try:
            save_file(content, file, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from None
        file.chmod(0o644)  # the library makes files that only their owner can read
        file.replace(beside)


def read_metadata(path: Path) -> dict[str, Any]:
    """The facts on their training that are stored with weights; empty where there are none."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["training"])
    except (SafetensorError, OSError, KeyError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def read_step(path: Path) -> int | None:
    """The step of training that a file's weights are of, where it says one."""
    step = read_metadata(path).get("step")
    return step if isinstance(step, int) else None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file; raises UserError where it is missing, truncated or foreign."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; a model directory holds a {WEIGHTS}")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is no whole safetensors file (truncated, or another format): {error}"
        ) from None


class _Undrawn(TorchFunctionMode):
    """New weights are zeros where others would be drawn, which takes longer."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            drawn = args[0] if args else kwargs["tensor"]
            drawn.detach().zero_()
            return drawn
        return func(*args, **(kwargs or {}))


def uninitialized_net(
    name: str, config: Any, tensors: Mapping[str, Tensor], where: Path | str
) -> nn.Module:
    """A net of an architecture whose weights are yet to be set, from `tensors` read at `where`.

    Tables and buffers are there. Raises UserError where the config's sizes are not the tensors', or
    these hold NaN or infinity.
    """
    _check_sizes(name, config, tensors, where)
    for key, tensor in tensors.items():
        if tensor.dtype in FLOATS and not tensor.sum(dtype=torch.float64).isfinite():
            raise UserError(f"{where}: {key} holds NaN or infinity; the model is damaged")
    with _Undrawn():
        return architecture(name).build(config)


def initialized_net(name: str, config: Any, device: torch.device | None = None) -> nn.Module:
    """A new net with weights as drawn; raises UserError where training it needs more memory.

    `device`: where it will be trained; default: the CPU.
    """
    check_memory(name, config, device or torch.device("cpu"))
    return architecture(name).build(config)


def _check_sizes(name: str, config: Any, tensors: Mapping[str, Tensor], where: Path | str) -> None:
    """Refuse sizes that the tensors cannot have, before a net of these sizes is made.

    Shapes are compared when the tensors are copied; here it is enough that a net without its head,
    which may be new, has no more numbers than the tensors, and that tables fit into memory.
    """
    count, numbers = len(tensors), sum(tensor.numel() for tensor in tensors.values())
    layers = sum(value for key, value in asdict(config).items() if key.endswith("layers"))
    blame = f"its {count:,} tensors of {numbers:,} numbers; its config.json is damaged or of"
    if layers * getattr(config, "num_experts", 1) > count:
        raise UserError(f"{where}: {layers:,} layers are more than {blame} another model")
    parameters, tables = sizes_of(name, config, str(where))
    if parameters > max(2 * numbers, _SMALL) or tables > max(numbers, _LARGE):
        raise UserError(
            f"{where}: a net of {parameters:,} parameters and tables of {tables:,} numbers is more "
            f"than {blame} another model"
        )


def check_parameters(name: str, config: Any, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights that a net of the architecture could not be loaded from.

    Raises UserError with the tensors that are not its own, by name or shape, as those of a linear
    that was wrapped; and with those that are missing.
    """
    own = weights_of(meta_net(name, config, "model"))
    shapes = {key: tensor.shape for key, tensor in own.items()}
    extra = sorted(key for key, tensor in weights.items() if shapes.get(key) != tensor.shape)
    missing = sorted(own.keys() - weights.keys())
    if extra or missing:
        problem = f"has {few(extra)} and not" if extra else "lacks"
        needed = few(missing) if missing else "the shapes"
        raise UserError(
            f"cannot save the model: its net {problem} {needed} of a {name} with its "
            "configuration; merge or unwrap the modules that were changed"
        )


@torch.no_grad()
def copy_matching(
    net: nn.Module, source: nn.Module, origin: Callable[[str], str] = str
) -> tuple[list[str], list[str], list[str]]:
    """Copy what has the same name and shape in both: names loaded, left as drawn, and unused.

    `origin`: what the source calls a tensor of the net; one that it lacks is not copied.
    """
    own, given = weights_of(net), weights_of(source)
    origins = {name: its for name in sorted(own) if (its := origin(name)) in given}
    loaded = [name for name, its in origins.items() if own[name].shape == given[its].shape]
    for name in loaded:
        own[name].copy_(given[origins[name]])
    unused = given.keys() - {origins[name] for name in loaded}
    return loaded, sorted(own.keys() - set(loaded)), sorted(unused)
