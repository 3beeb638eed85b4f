"""A model directory in the Hugging Face format: JSON and safetensors, read and written."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heedful.errors import UserError
from heedful.files import plain_name, read_object, write_directory, write_json
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_FRAMEWORKS = {".h5": "from_tf", ".msgpack": "from_flax"}


@dataclass(frozen=True)
class HfDirectory:
    """What a directory holds.

    Attributes:
        config: `config.json`; has a `model_type`.
        generation_config: `generation_config.json`; empty where there is none.
        tensors: all weights under their names in the files. They lie in the mapped files: what is
            never looked at is never read.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_hf_directory(path: Path) -> HfDirectory:
    """Read configuration and weights, whole or in shards; nothing is ever unpickled.

    Raises:
        UserError: no directory; `config.json` missing, broken or without a `model_type`; no
            safetensors, a shard that is missing or truncated, or a tensor in no shard.
    """
    if not path.is_dir():
        raise UserError(f"{path} is no directory; name one that holds a {CONFIG} and a {WEIGHTS}")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} holds no {CONFIG}: it is no model in the Hugging Face format")
    config = read_object(path / CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(f"{path / CONFIG} has no model_type, which says what the model is")
    generation = path / GENERATION_CONFIG
    generation_config = read_object(generation) if generation.is_file() else {}
    if (path / WEIGHTS).is_file():
        tensors = load_tensors(path / WEIGHTS)
    elif (path / INDEX).is_file():
        tensors = _read_shards(path)
    else:
        raise _no_safetensors(path, config)
    return HfDirectory(config, generation_config, tensors)


def write_hf_directory(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    generation_config: Mapping[str, Any] | None = None,
    write_text: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Write a directory that `transformers` can open, whole or not at all.

    No two of `tensors` may overlap in memory.

    Args:
        write_text: writes the tokenizers' files into the directory that it is given.

    Raises:
        UserError: no room, or no permission.
    """
    assert config.get("model_type"), "a config.json needs a model_type"

    def fill(directory: Path) -> None:
        write_text(directory)
        # Readers of this format ask which framework's layout it is in.
        save_tensors(directory / WEIGHTS, tensors, metadata={"format": "pt"})
        if generation_config is not None:
            write_json(directory / GENERATION_CONFIG, dict(generation_config))
        write_json(directory / CONFIG, dict(config))

    write_directory(path, fill)


def _read_shards(path: Path) -> dict[str, Tensor]:
    """All that is in the shards which the index names: files beside it."""
    places = read_object(path / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{path / INDEX} has no weight_map from tensors to files")
    tensors: dict[str, Tensor] = {}
    shard_of: dict[str, str] = {}
    counts = Counter(plain_name(shard, path / INDEX) for shard in places.values())
    for shard, count in sorted(counts.items()):
        if not (path / shard).is_file():
            raise UserError(
                f"{path} lacks the shard {shard}, which holds {count} tensors by its {INDEX}; "
                "copy it there"
            )
        for name, tensor in load_tensors(path / shard).items():
            if name in tensors:
                raise UserError(f"{path}: {name} is in two shards, {shard_of[name]} and {shard}")
            tensors[name], shard_of[name] = tensor, shard
    for name, shard in places.items():
        if shard_of.get(name) != shard:
            raise UserError(f"{path / shard} lacks the tensor {name}, which {INDEX} puts there")
    return tensors


def _no_safetensors(path: Path, config: Mapping[str, Any]) -> UserError:
    """What a directory holds instead of safetensors, and how to make them."""
    found = {entry.suffix: entry.name for entry in sorted(path.iterdir(), reverse=True)}
    suffix = next((each for each in (*PICKLED, *OTHER_FRAMEWORKS) if each in found), None)
    if suffix is None:
        return UserError(f"{path} holds neither a {WEIGHTS} nor a {INDEX}: it lacks the weights")
    reason, option = "of another framework", f", {OTHER_FRAMEWORKS.get(suffix)}=True"
    if suffix in PICKLED:
        reason, option = "a pickled file, which can run code when it is opened", ""
    # The class that the config names: the plain AutoModel would lose the model's head.
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    model = name if isinstance(name, str) and name.isidentifier() else "AutoModel"
    return UserError(
        f"{path} holds no {WEIGHTS}, only {found[suffix]}, {reason}. On a machine where that file "
        f"is trusted, save it again with transformers: {model}.from_pretrained({str(path)!r}"
        f'{option}).save_pretrained("NEW", safe_serialization=True)'
    )
