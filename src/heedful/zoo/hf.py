"""Configurations of the Hugging Face format, both ways: what an architecture says of it is data."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from heedful.errors import UserError


def _nothing(given: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class HfFormat:
    """How `config.json` of one model type and an architecture's `Config` say the same.

    Args:
        model_type: theirs, as in `config.json`.
        classes: their class -> what it says of our config (its head). On export the first class is
            taken whose word is our config's.
        keys: their key -> ours, where the values are the same.
        values: their key -> our key and their value -> ours, where they are not.
        fixed: their key -> the values that mean what we build. Any other is refused on import; the
            first is written on export.
        defaults: their key -> its value where a file leaves it out.
        read, write: what is beyond a table: our keys from their whole content, and theirs from our
            config; they win over the tables.
    """

    model_type: str
    classes: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, str]
    values: Mapping[str, tuple[str, Mapping[Any, Any]]] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[dict[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[Any], dict[str, Any]] = _nothing


def config_keys_from_hf(
    format: HfFormat, content: Mapping[str, Any], where: str
) -> dict[str, object]:
    """The keys of our Config; raises UserError for what the architecture does not build."""
    given = {**format.defaults, **content}
    for key, allowed in format.fixed.items():
        if key in given and given[key] not in allowed:
            raise UserError(
                f"{where}: {key} is {given[key]!r}, but heedful's {format.model_type} is built for "
                f"{' or '.join(repr(value) for value in allowed)} alone"
            )
    ours: dict[str, object] = dict(_class_of(format, content, where))
    for key, name in format.keys.items():
        if key in given:
            ours[name] = given[key]
    for key, (name, table) in format.values.items():
        if key in given:
            if given[key] not in table:
                known = ", ".join(map(repr, table))
                raise UserError(f"{where}: {key} is {given[key]!r}; known here: {known}")
            ours[name] = table[given[key]]
    return ours | format.read(given)


def config_to_hf(format: HfFormat, config: Any) -> dict[str, Any]:
    """What `config.json` says of our config."""
    ours = asdict(config)
    name = next(
        name
        for name, said in format.classes.items()
        if all(ours[key] == value for key, value in said.items())
    )
    content: dict[str, Any] = {"architectures": [name], "model_type": format.model_type}
    content |= {key: allowed[0] for key, allowed in format.fixed.items()}
    content |= {key: ours[name] for key, name in format.keys.items()}
    for key, (name, table) in format.values.items():
        content[key] = next(theirs for theirs, value in table.items() if value == ours[name])
    return content | format.write(config)


def _class_of(format: HfFormat, content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    names = content.get("architectures") or [next(iter(format.classes))]
    if names[0] not in format.classes:
        known = ", ".join(format.classes)
        raise UserError(f"{where}: no place for the class {names[0]}; known here: {known}")
    return format.classes[names[0]]
