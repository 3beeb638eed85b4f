"""Recipes as files: reading YAML, bases and overrides, with one line for each mistake.

The YAML is version 1.2, where `no` and `on` are text. A run saves its whole recipe, so that it can
be repeated from its folder alone.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from heedful.config import Recipe, drop_stale_bands, parse_recipe
from heedful.config.keys import flatten, keys_of, set_key
from heedful.errors import UserError, describe
from heedful.files import read_text
from heedful.plugins import SHIPPED, nearest, not_executed

RECIPES = Path(__file__).parent / "recipes"
_LARGEST = 4 << 20  # bytes of a recipe
_MOST_NODES = 100_000
_NULLABLE = {key.name for key in keys_of(Recipe) if NoneType in get_args(key.field.annotation)}


class _Yaml12(yaml.SafeLoader):
    """YAML 1.2: only true and false are booleans; 010 (an octal number in YAML 1.1), 1:30 (one of
    base 60) and a date are text."""


_TYPES = {  # of plain scalars, by the pattern of a whole one and its first characters
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": ("[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)", "-+0123456789"),
    "float": (
        r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
_Yaml12.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _type, (_pattern, _letters) in _TYPES.items():
    _Yaml12.add_implicit_resolver(
        f"tag:yaml.org,2002:{_type}", re.compile(rf"({_pattern})\Z"), list(_letters)
    )


def load_recipe(
    recipe: str | PathLike[str], overrides: Mapping[str, Any] = MappingProxyType({})
) -> Recipe:
    """Read a recipe by path or by the name of a shipped one.

    A recipe may name another as its `base` (a shipped name, or a path relative to this file) and
    then holds only what differs: sections are merged, other values replaced. `null` removes a key
    of the base, or is its value where the key may be null. With an override of `init_from`, only
    the dropout rates of the recipe's own `model` are kept. Loss bands (`expect`) are dropped where
    an override, or a recipe over its base, changes a key on which the loss depends.

    Args:
        overrides: values by dotted key, as `{"training.max_steps": 5}`.

    Raises:
        UserError: no such recipe or base, invalid YAML, an unknown key, a wrong value.

    >>> import heedful
    >>> recipe = heedful.load_recipe("translation", {"training.max_steps": 100})
    >>> recipe.task, recipe.training.max_steps
    ('translation', 100)
    """
    if not isinstance(recipe, str | PathLike):
        raise UserError(f"recipe must be the name or path of one, not {describe(recipe)}")
    if not isinstance(overrides, Mapping):
        raise UserError(
            f'overrides must be a mapping, as {{"training.max_steps": 100}}, not '
            f"{describe(overrides)}"
        )
    for key in overrides:
        if not isinstance(key, str):
            raise UserError(f"overrides: a key must be text, not {describe(key)}")
    path = recipe_path(recipe)
    content, sources = _read_with_bases(path)
    if overrides.get("init_from"):
        # The model that the run starts from has its sizes, except for overrides.
        model = content.get("model") or {}
        content["model"] = {key: model[key] for key in model if "dropout" in str(key)}
    drop_stale_bands(content, overrides)
    for key, value in overrides.items():
        set_key(content, key, value)
    return parse_recipe(content, str(path), {"overrides": [*overrides], **sources})


def recorded_recipe(path: Path) -> Recipe:
    """The recipe in the folder of a run, or another one that is only looked at.

    It may come from anybody, so no plugin that it names is executed; the user's recipe or
    environment has loaded them.

    Raises:
        UserError: as `load_recipe`; a plugin that is not loaded.
    """
    with not_executed(path):
        return load_recipe(path)


def _read_with_bases(path: Path) -> tuple[dict[str, Any], dict[str, Collection[str]]]:
    """A recipe's content merged over its bases', and the dotted keys that each file sets."""
    layers: list[tuple[Path, dict[str, Any]]] = []
    while True:
        content = parse_yaml(read_text(path, most=_LARGEST), str(path))
        if content is None:
            content = {}
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise UserError(f"{path}: a recipe is a mapping of keys, not a {kind}")
        layers.append((path, content))
        base = content.pop("base", None)
        if base is None:
            break
        if not isinstance(base, str):
            raise UserError(f"{path}: base: give a recipe's name or path, not {base!r}")
        try:
            base_path = recipe_path(base, path.parent)
        except UserError as error:
            raise UserError(f"{path}: base: {error}") from None
        if any(base_path.samefile(other) for other, _ in layers):
            raise UserError(f"{path}: base {base} is itself based on this recipe; name another")
        path = base_path
    sources: dict[str, Collection[str]] = {str(file): [*flatten(keys)] for file, keys in layers}
    merged: dict[str, Any] = {}
    for file, content in reversed(layers):
        drop_stale_bands(merged, sources[str(file)])
        _merge(merged, content)
    return merged, sources


def _merge(content: dict[str, Any], changes: dict[str, Any], prefix: str = "") -> None:
    """Change a base's content as a recipe over it says."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value, f"{prefix}{key}.")
        elif value is None and key in content and f"{prefix}{key}" not in _NULLABLE:
            del content[key]
        else:
            content[key] = value


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """A copy whose paths do not depend on the current folder."""

    def absolute(paths: Any) -> Any:
        if isinstance(paths, list):
            return [absolute(path) for path in paths]
        if paths is None or paths.startswith(SHIPPED):
            return paths
        return os.path.abspath(paths)

    def changed(section: BaseModel, *keys: str) -> Any:
        values = {key: getattr(section, key) for key in keys}
        update = {key: absolute(value) for key, value in values.items()}
        # A default that does not change stays unset.
        return section.model_copy(update={k: v for k, v in update.items() if v != values[k]})

    data = recipe.data
    splits = [data.train, data.valid, data.test]
    for corpus in data.corpora.values():
        splits += [corpus, corpus.valid, corpus.test]
    names = [name for files in splits for name in files.paths()]
    if any(not name.startswith(SHIPPED) and not os.path.isabs(name) for name in names):
        data = data.model_copy(update={"folder": os.path.abspath(data.folder or "")})
    objective = recipe.objective
    template = objective.get("chat_template")
    if isinstance(template, str) and os.path.isfile(template):  # else the name of a built-in one
        objective = objective | {"chat_template": os.path.abspath(template)}
    sections = {
        "data": data,
        "objective": objective,
        "tokenizer": changed(recipe.tokenizer, "path"),
        "distillation": changed(recipe.distillation, "teacher", "back_translation_models"),
    }
    update = {
        name: section for name, section in sections.items() if section != getattr(recipe, name)
    }
    return changed(recipe, "plugins", "init_from").model_copy(update=update)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML 1.2 of limited size with all aliases expanded.

    Raises:
        UserError: invalid YAML; the message begins with `where`.
    """
    try:
        loader = _Yaml12(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_nodes(node, {}) > _MOST_NODES:
            raise yaml.MarkedYAMLError(problem="its aliases make it too large; write it out")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise UserError(f"{where}{line}: {problem}") from None
    except RecursionError:
        raise UserError(f"{where}: nested too deep") from None
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
        # A tag whose text is not of its kind, or a number of thousands of digits.
        raise UserError(f"{where}: invalid YAML value: {str(error).partition(';')[0]}") from None


def _count_nodes(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of nodes with all aliases expanded; recursive ones exceed any limit."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES + 1  # kept if the node contains itself
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        # The value of a mapping is pairs of nodes, that of a sequence is nodes.
        children = (
            child for part in inside for child in (part if isinstance(part, tuple) else [part])
        )
        if isinstance(node, yaml.ScalarNode):
            node.value.encode()  # refuses half of a surrogate pair
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        known[id(node)] = 1 + sum(_count_nodes(child, known) for child in children)
    return known[id(node)]


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    """Raise an error for a key that stands twice (YAML 1.2.2, section 3.2.1.3), which PyYAML takes
    from its last place."""
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                problem = f"the key {key.value} stands twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)


def recipe_path(recipe: str | PathLike[str], folder: Path = Path()) -> Path:
    """The file of a recipe, given by a path from `folder` or by the name of a shipped one."""
    path = folder / recipe
    if path.is_file():
        return path
    if (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    names = shipped_recipes()
    if str(recipe) in names:
        return RECIPES / f"{recipe}.yaml"
    if path.is_dir():
        raise UserError(f"{path} is a directory, and holds no recipe.yaml")
    raise UserError(
        f"no recipe {recipe}: no such file, and no shipped recipe of that name; "
        f"{nearest(str(recipe), names)}"
    )


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_settings(
    settings: Iterable[str], example: str = "training.max_steps=100"
) -> dict[str, Any]:
    """The values of `KEY=VALUE` by key, of a key that is repeated the last one.

    A value is YAML, or else text; in text # begins no comment. Raises UserError with the example
    where a setting is malformed.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"overrides: {setting}: write key=value, for example {example}")
        if any("\ud800" <= character <= "\udfff" for character in setting):
            raise UserError(f"overrides: {setting}: not UTF-8; convert it")
        values.pop(key, None)  # its place is that of the last one
        try:  # - is a list with an empty item in YAML
            value = text if text == "-" else parse_yaml(text, "overrides") if text else None
        except UserError:
            value = text
        is_plain = (value is None or isinstance(value, str)) and text.strip()[:1] not in ("'", '"')
        values[key] = text if is_plain and "#" in text else value
    return values
