"""Read and write model directories in the Hugging Face format: JSON and safetensors."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heedful.errors import UserError
from heedful.files import MODEL_FILES, plain_name, read_object, write_directory, write_json
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHER_FRAMEWORKS = {".h5": "from_tf", ".msgpack": "from_flax"}


@dataclass(frozen=True)
class HfDirectory:
    """The content of a model directory.

    Attributes:
        config: `config.json`, with a `model_type`.
        generation_config: `generation_config.json`; {} without that file.
        tensors: all weights, by their names in the files, memory-mapped.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_hf_directory(path: Path) -> HfDirectory:
    """Read configuration and weights, which may be in shards. Pickled files are never opened.

    Raises:
        UserError: not a directory; `config.json` is missing, damaged or has no `model_type`; no
            safetensors; a shard is missing or truncated, or lacks a tensor.
    """
    config = read_hf_config(path)
    generation = path / GENERATION_CONFIG
    generation_config = read_object(generation) if generation.is_file() else {}
    if (path / WEIGHTS).is_file():
        tensors = load_tensors(path / WEIGHTS)
    elif (path / INDEX).is_file():
        tensors = _read_shards(path)
    else:
        raise _no_safetensors(path, config)
    return HfDirectory(config, generation_config, tensors)


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read `config.json`; raises UserError as `read_hf_directory`."""
    if not path.is_dir():
        raise UserError(f"{path} is no directory; name one that holds a {CONFIG} and a {WEIGHTS}")
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} holds no {CONFIG}: it is not a model in the Hugging Face format")
    config = read_object(path / CONFIG)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        if "heedful" in config:
            raise UserError(f"{path} is a model of heedful's already; use it as it is")
        raise UserError(f"{path / CONFIG} has no model_type; add it")
    return config


def write_hf_directory(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    generation_config: Mapping[str, Any] | None = None,
    write_text: Callable[[Path], None] = lambda directory: None,
    owns: Collection[str] = MODEL_FILES,
) -> None:
    """Write a directory that `transformers` can open; it appears complete or not at all.

    Args:
        tensors: the weights; they must not share memory.
        write_text: called with the directory, to write the files of the tokenizer.
        owns: names of all entries that a directory at `path` may hold.

    Raises:
        UserError: the disk is full, or no permission.
    """
    assert config.get("model_type"), "a config.json needs a model_type"

    def fill(directory: Path) -> None:
        write_text(directory)
        # transformers requires the name of the framework.
        save_tensors(directory / WEIGHTS, tensors, metadata={"format": "pt"})
        if generation_config is not None:
            write_json(directory / GENERATION_CONFIG, dict(generation_config))
        write_json(directory / CONFIG, dict(config))

    write_directory(path, fill, owns)


@contextmanager
def json_user_errors(where: str) -> Iterator[None]:
    """Raise errors of a block that reads JSON values of unknown types as UserError."""
    try:
        yield
    except UserError:  # a ValueError that has its message already
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{where}: a value in its JSON files has a wrong type or range "
            f"({type(error).__name__}: {error}); it is damaged, or of an unknown format"
        ) from error


def _read_shards(path: Path) -> dict[str, Tensor]:
    """The tensors of all shards that the index names."""
    weight_map = read_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path / INDEX} has no weight_map from tensors to files")
    tensors: dict[str, Tensor] = {}
    shard_of: dict[str, str] = {}
    counts = Counter(plain_name(shard, path / INDEX) for shard in weight_map.values())
    for shard, count in sorted(counts.items()):
        if not (path / shard).is_file():
            raise UserError(
                f"{path} has no shard {shard}, which holds {count} tensors according to {INDEX}; "
                "copy it there"
            )
        for name, tensor in load_tensors(path / shard).items():
            if name in tensors:
                raise UserError(f"{path}: {name} is in two shards, {shard_of[name]} and {shard}")
            tensors[name], shard_of[name] = tensor, shard
    for name, shard in weight_map.items():
        if shard_of.get(name) != shard:
            raise UserError(
                f"{path / shard} has no tensor {name}, which {INDEX} lists; fetch it again"
            )
    return tensors


def _no_safetensors(path: Path, config: Mapping[str, Any]) -> UserError:
    """The error for a directory without safetensors: its other weights, and how to convert them."""
    files = {entry.suffix: entry.name for entry in sorted(path.iterdir(), reverse=True)}
    suffix = next((suffix for suffix in (*PICKLED, *OTHER_FRAMEWORKS) if suffix in files), None)
    if suffix is None:
        return UserError(f"{path} holds neither {WEIGHTS} nor {INDEX}; add the weights")
    reason, option = "of another framework", f", {OTHER_FRAMEWORKS.get(suffix)}=True"
    if suffix in PICKLED:
        reason, option = "a pickled file, which can run code when it is opened", ""
    # AutoModel would leave out the model's head.
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    model = name if isinstance(name, str) and name.isidentifier() else "AutoModel"
    return UserError(
        f"{path} holds no {WEIGHTS}, only {files[suffix]}, {reason}. On a machine where that file "
        f"is trusted, save it again with transformers: {model}.from_pretrained({str(path)!r}"
        f'{option}).save_pretrained("NEW", safe_serialization=True)'
    )
