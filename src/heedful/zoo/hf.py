"""Keys of a Config and of `config.json` in the Hugging Face format, translated both ways."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from heedful.errors import UserError
from heedful.parts.feedforward import Activation, Gate

Keys = dict[str, Any]
# Of several names for one of ours the first is written.
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
    """Annotates a Config's field with its key there.

    A subclass that declares the field again without one keeps it.

    Args:
        keys: all are written; in a file they must be equal, the default being that of one left out.
        values: their value -> ours, where they differ; any other is refused.
        like: the field of ours whose value None stands for, which they write out.
    """

    def __init__(
        self, *keys: str, values: Mapping[Any, Any] | None = None, like: str | None = None
    ) -> None:
        self.keys = keys
        self.values = values
        self.like = like

    def read(self, content: Mapping[str, Any], default: Any, where: str) -> Any:
        """Our value of theirs; raises UserError where there is none, or there are several."""
        value = content.get(self.keys[0], default)
        for key in self.keys[1:]:
            if (other := content.get(key, default)) != value:
                raise UserError(
                    f"{where}: {self.keys[0]} is {value!r} and {key} {other!r}, for which heedful "
                    "has one value; make them equal"
                )
        if self.values is None:
            return value
        for theirs, ours in self.values.items():
            if theirs == value:
                return ours
        known = ", ".join(map(repr, self.values))
        raise UserError(f"{where}: {self.keys[0]} is {value!r}; known here: {known}")

    def write(self, value: Any) -> dict[str, Any]:
        """Their keys with our value."""
        if self.values is not None:
            value = next(theirs for theirs, ours in self.values.items() if ours == value)
        return dict.fromkeys(self.keys, value)


@dataclass(frozen=True)
class HfConfig:
    """How `config.json` of one model type and an architecture's `Config` say the same.

    Args:
        model_type: as in `config.json`.
        classes: their class -> keys of our config that it implies (its head). On export the first
            class is taken whose keys are our config's.
        fixed: their key -> the value that we build. Any other is refused on import; it is written
            on export.
        defaults: our key -> its value where a file leaves it out, if that is not our default.
        read, write: what is beyond annotations: our keys from their whole content and from what is
            known of ours (defaults included), and theirs from our config; they win.
    """

    model_type: str
    classes: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Keys, Keys], dict[str, Any]] = lambda content, ours: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}


def config_keys_from_hf(
    format: HfConfig, config: type[Any], content: Mapping[str, Any], where: str
) -> dict[str, object]:
    """Keys of `config`, our Config, whose fields are annotated with `Hf`.

    Raises UserError for what the architecture does not build.
    """
    for key, built in format.fixed.items():
        if content.get(key, built) != built:
            raise UserError(
                f"{where}: {key} is {content[key]!r}, but heedful's {format.model_type} is built "
                f"for {built!r} alone"
            )
    names = content.get("architectures") or [next(iter(format.classes))]
    if names[0] not in format.classes:
        known = ", ".join(format.classes)
        raise UserError(f"{where}: no place for the class {names[0]}; known here: {known}")
    ours = {**format.defaults, **format.classes[names[0]]}
    usual = {each.name: each.default for each in fields(config)}
    if "num_labels" in usual:  # they leave the names of two classes out
        ours["num_labels"] = len(content.get("id2label") or ()) or content.get("num_labels") or 2
    for name, hf in _annotated(config).items():
        if not content.keys().isdisjoint(hf.keys):
            ours[name] = hf.read(content, ours.get(name, usual[name]), where)
        if hf.like is not None and ours[name] == ours[hf.like]:
            ours[name] = None
    return ours | format.read(dict(content), usual | ours)


def config_to_hf(format: HfConfig, config: Any) -> dict[str, Any]:
    """What `config.json` says of our config."""
    ours = asdict(config)
    classes = format.classes.items()
    name = next(name for name, said in classes if said.items() <= ours.items())
    content: dict[str, Any] = {"architectures": [name], "model_type": format.model_type}
    content |= format.fixed
    for key, hf in _annotated(type(config)).items():
        value = ours[key]
        if value is None and hf.like is not None:
            value = ours[hf.like]
        content |= hf.write(value)
    if ours.get("num_labels", 2) != 2:  # the names alone say how many classes there are
        content |= labels_to_hf([f"LABEL_{label}" for label in range(ours["num_labels"])])
    return content | format.write(config)


def labels_to_hf(labels: Sequence[str]) -> dict[str, Any]:
    """What `config.json` says of the classes' names."""
    names = {str(number): label for number, label in enumerate(labels)}
    return {"id2label": names, "label2id": {label: int(number) for number, label in names.items()}}


def _annotated(config: type[Any]) -> dict[str, Hf]:
    """The annotation of each field, its own or that of the class it comes from."""
    return {
        name: mark
        for cls in reversed(config.__mro__)
        for name, hint in inspect.get_annotations(cls).items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Hf)
    }
