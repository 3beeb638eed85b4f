"""Conversion between the keys of a Config and `config.json` of the Hugging Face format."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from heedful.errors import UserError
from heedful.parts.feedforward import Activation, Gate

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
        defaults: key of the Config -> its value if a file lacks it, if not the default of the
            Config.
        read: further keys of the Config, from the content of `config.json` and the keys read so far
            (with defaults); they override those.
        write: further keys of `config.json`, from a Config; they override the others.
    """

    model_type: str
    classes: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
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


def config_to_hf(format: HfConfig, config: Any) -> dict[str, Any]:
    """The content of `config.json` for a Config."""
    values = asdict(config)
    classes = format.classes.items()
    name = next(name for name, keys in classes if keys.items() <= values.items())
    content: dict[str, Any] = {"architectures": [name], "model_type": format.model_type}
    content |= format.fixed
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
