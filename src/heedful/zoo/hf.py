"""The Hugging Face format: keys of `config.json`, nets from and to it, and its directories."""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heedful import plugins, zoo
from heedful.errors import UserError
from heedful.files import MODEL_FILES, plain_name, read_object, write_directory, write_json
from heedful.parts.feedforward import Activation, Gate
from heedful.zoo.architectures import Format
from heedful.zoo.names import from_hf, to_hf
from heedful.zoo.saved import (
    CONFIG,
    WEIGHTS,
    load_tensors,
    make_config,
    save_tensors,
    uninitialized_net,
)

Keys = dict[str, Any]
# Hugging Face name -> heedful name; of several for one heedful name, the first is written.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
GATES: dict[str, Gate] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}


class Hf:
    """Annotation of a field of a Config: its keys in `config.json`.

    A subclass that declares the field again without an annotation inherits it.

    Args:
        keys: keys in `config.json`: all are written; in a file that is read they must be equal,
            where a missing key has the default.
        values: Hugging Face value -> our value, if they differ; other values are refused.
        like: the field whose value is meant by None; that value is written.
    """

    def __init__(
        self, *keys: str, values: Mapping[Any, Any] | None = None, like: str | None = None
    ) -> None:
        self.keys = keys
        self.values = values
        self.like = like

    def read(self, content: Mapping[str, Any], default: Any, where: str) -> Any:
        """The value of the field; raises UserError if it is unsupported or the keys differ."""
        value = content.get(self.keys[0], default)
        for key in self.keys[1:]:
            if (other := content.get(key, default)) != value:
                raise UserError(
                    f"{where}: {self.keys[0]} is {value!r} and {key} is {other!r}, but heedful has "
                    "one value for both; make them equal"
                )
        if self.values is None:
            return value
        for hf_value, our_value in self.values.items():
            if hf_value == value:
                return our_value
        known = ", ".join(map(repr, self.values))
        raise UserError(f"{where}: {self.keys[0]} is {value!r}; supported: {known}")

    def write(self, value: Any) -> dict[str, Any]:
        """The keys of `config.json` for a value of the field."""
        if self.values is not None:
            value = next(
                hf_value for hf_value, our_value in self.values.items() if our_value == value
            )
        return dict.fromkeys(self.keys, value)


@dataclass(frozen=True)
class HfConfig:
    """Conversion between `config.json` of one model type and the Config of an architecture.

    Args:
        model_type: as in `config.json`.
        classes: Hugging Face class -> keys of the Config that it implies (its head). On export the
            first class with matching keys is used.
        fixed: key of `config.json` -> the only supported value. Other values are refused on import;
            it is written on export.
        idle: key of `config.json` that changes training only -> its value without effect. Other
            values are not imported, with a notice; it is written on export.
        defaults: key of the Config -> its value if a file lacks it, if not the default of the
            Config.
        read: further keys of the Config, from the content of `config.json` and the keys read so far
            (with defaults); they override those.
        write: further keys of `config.json`, from a Config; they override the others.
    """

    model_type: str
    classes: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    idle: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Keys, Keys], dict[str, Any]] = lambda content, keys: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}


def config_keys_from_hf(
    format: HfConfig, config: type[Any], content: Mapping[str, Any], where: str
) -> dict[str, object]:
    """Keys of a Config from the content of `config.json`.

    Args:
        config: the Config, whose fields are annotated with `Hf`.
        where: the file, for messages.

    Raises:
        UserError: a class or a value that the architecture does not support.
    """
    for key, built in format.fixed.items():
        if content.get(key, built) != built:
            raise UserError(
                f"{where}: {key} is {content[key]!r}, but heedful's {format.model_type} supports "
                f"{built!r} only"
            )
    names = content.get("architectures") or [next(iter(format.classes))]
    if names[0] not in format.classes:
        known = ", ".join(format.classes)
        raise UserError(f"{where}: class {names[0]} is not supported; supported: {known}")
    values = {**format.defaults, **format.classes[names[0]]}
    defaults = {field.name: field.default for field in fields(config)}
    if "num_labels" in defaults:  # a file without labels has two
        values["num_labels"] = len(content.get("id2label") or ()) or content.get("num_labels") or 2
    for name, hf in _annotated(config).items():
        if not content.keys().isdisjoint(hf.keys):
            values[name] = hf.read(content, values.get(name, defaults[name]), where)
        if hf.like is not None and values[name] == values[hf.like]:
            values[name] = None
    return values | format.read(dict(content), defaults | values)


def idle_notices(format: HfConfig, content: Mapping[str, Any]) -> list[str]:
    """Notices of the keys that change training only and are not imported."""
    found = {key: content.get(key, idle) for key, idle in format.idle.items()}
    listed = [f"{key} {value!r}" for key, value in found.items() if value != format.idle[key]]
    return [f"not imported, it changes training only: {', '.join(listed)}"] if listed else []


def config_to_hf(format: HfConfig, config: Any) -> dict[str, Any]:
    """The content of `config.json` for a Config."""
    values = asdict(config)
    classes = format.classes.items()
    name = next(name for name, keys in classes if keys.items() <= values.items())
    content: dict[str, Any] = {"architectures": [name], "model_type": format.model_type}
    content |= {**format.fixed, **format.idle}
    for key, hf in _annotated(type(config)).items():
        value = values[key]
        if value is None and hf.like is not None:
            value = values[hf.like]
        content |= hf.write(value)
    if values.get("num_labels", 2) != 2:  # `config.json` has the labels, not their number
        content |= labels_to_hf([f"LABEL_{label}" for label in range(values["num_labels"])])
    return content | format.write(config)


def labels_to_hf(labels: Sequence[str]) -> dict[str, Any]:
    """The keys of `config.json` for the labels of a classifier."""
    names = {str(number): label for number, label in enumerate(labels)}
    return {"id2label": names, "label2id": {label: int(number) for number, label in names.items()}}


def _annotated(config: type[Any]) -> dict[str, Hf]:
    """The annotation of each field, possibly inherited."""
    return {
        name: annotation
        for cls in reversed(config.__mro__)
        for name, hint in inspect.get_annotations(cls).items()
        for annotation in getattr(hint, "__metadata__", ())
        if isinstance(annotation, Hf)
    }


# --- Directories --------------------------------------------------------------------------------


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
    reason, version = "of another framework", "transformers 4"
    option = f", {OTHER_FRAMEWORKS.get(suffix)}=True"
    if suffix in PICKLED:
        reason, version = "a pickled file, which can run code when it is opened", "transformers"
        option = ""
    # AutoModel would leave out the model's head.
    classes = config.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else None
    model = name if isinstance(name, str) and name.isidentifier() else "AutoModel"
    return UserError(
        f"{path} holds no {WEIGHTS}, only {files[suffix]}, {reason}. On a machine where that file "
        f"is trusted, save it again with {version}: {model}.from_pretrained({str(path)!r}"
        f'{option}).save_pretrained("NEW", safe_serialization=True); and copy the files of its '
        "tokenizer to NEW"
    )


# --- Nets ---------------------------------------------------------------------------------------


class ImportedNet(NamedTuple):
    """A net that was built from a Hugging Face directory, and notices."""

    architecture: str
    config: Any
    net: nn.Module
    notices: list[str]


def net_from_hf(
    directory: HfDirectory, where: str, architecture: str | None = None, **keys: object
) -> ImportedNet:
    """Build the net of a directory and load its weights.

    Args:
        where: name of the directory, for messages.
        architecture: the architecture to build; default: heedful's own for the model type, or the
            only one of a plugin.
        keys: keys of heedful's Config that override the directory's.

    Raises:
        UserError: an unknown model type, an unsupported setting, a missing or unknown tensor, or
            a wrong shape.
    """
    name = architecture_of(directory.config["model_type"], architecture, where)
    kind, format = zoo.architecture(name), hf_format(name)
    assert format.config is not None, "architectures with this model type have one"
    with json_user_errors(where):
        config_keys = config_keys_from_hf(format.config, kind.config, directory.config, where)
    config = make_config(name, config_keys | keys, where)
    net = uninitialized_net(name, config, directory.tensors, where)

    def initialized() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return kind.build(config)

    notices = idle_notices(format.config, directory.config)
    notices += from_hf(net, directory.tensors, format.names(config), where, initialized)
    return ImportedNet(name, config, net.eval(), notices)


def architecture_of(model_type: str, architecture: str | None, where: str) -> str:
    """The architecture for a model type: `architecture`, heedful's own, or the only plugin's.

    Raises UserError for a type that is not supported, or that several plugins read.
    """
    names = plugins.architecture.names()
    configs = {name: hf_format(name).config for name in names}
    types = {name: config.model_type for name, config in configs.items() if config is not None}
    readers = [name for name, supported in types.items() if supported == model_type]
    if not readers:
        raise UserError(
            f"{where}: the model type {model_type} is not supported; "
            f"supported: {', '.join(sorted(set(types.values())))}"
        )
    own = [name for name in readers if plugins.architecture.plugin_of(name) is None]
    candidates = own or readers
    if architecture is not None:
        candidates = [name for name in readers if name == architecture]
    if not candidates:
        raise UserError(
            f"{where}: {architecture} does not read the model type {model_type}; "
            f"architectures that do: {', '.join(readers)}"
        )
    if len(candidates) > 1:
        raise UserError(
            f"{where}: {' and '.join(candidates)} read the model type {model_type}; choose one of "
            "them by architecture=NAME"
        )
    return candidates[0]


def net_to_hf(name: str, config: Any, net: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and the tensors of a net in the Hugging Face format.

    An architecture that the format has only as another one, with other settings or another order of
    weights, is converted to that one by its `export_as`.

    Raises:
        UserError: the format does not support the architecture or a setting.
    """
    format = hf_format(name)
    if format.export_as is not None:
        name, config, net = format.export_as(config, net)
        format = hf_format(name)
    if format.config is None:
        raise UserError(f"the Hugging Face format does not support the architecture {name}")
    return config_to_hf(format.config, config), to_hf(net, format.names(config))


def hf_format(name: str) -> Format[HfConfig]:
    """The tables of an architecture for this format; empty if it is not supported."""
    return zoo.architecture(name).formats.get("hf", Format())
