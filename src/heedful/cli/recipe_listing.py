"""Prints a recipe as YAML with every key of its task and model."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from heedful.config import Recipe, default_values
from heedful.config.keys import inline, keys_of, type_name
from heedful.tasks.task import Task
from heedful.zoo import architecture
from heedful.zoo.architectures import Architecture, key_descriptions

_COMMENT = 34  # column


def render_recipe(recipe: Recipe, task: Task) -> str:
    """Each key that the task reads with its value, description, type and default, as YAML.

    Keys of the model that the recipe leaves to the architecture are comments, so that the text is
    the same recipe.
    """
    values, defaults = recipe.values(), default_values(recipe.task)
    lines: list[str] = []
    for name, field, is_section in keys_of(Recipe):
        if not any(key == name or key.startswith(f"{name}.") for key in values):
            continue
        *parents, last = name.split(".")
        indent, text = "  " * len(parents), field.description or ""
        nested = [*_nested_lines(name, recipe, task)]
        if (is_section or nested) and not parents:
            lines.append("")
        if is_section or nested:
            # Comments alone would make the section null.
            value = " {}" if nested and all(line.startswith("  #") for line in nested) else ""
            lines += [_line(f"{indent}{last}:{value}", text), *nested]
        else:
            note = _note(text, type_name(field.annotation), defaults[name])
            lines.append(_line(f"{indent}{last}: {inline(values[name])}", note))
    return "\n".join(lines).lstrip("\n") + "\n"


def _nested_lines(name: str, recipe: Recipe, task: Task) -> Iterator[str]:
    """The lines of a section whose keys depend on task or architecture."""
    if name == "objective":
        keys = task.objective.model_dump(mode="json")
        for key, field in type(task.objective).model_fields.items():
            default = field.get_default(call_default_factory=True)
            note = _note(field.description or "", type_name(field.annotation), default)
            yield _line(f"  {key}: {inline(keys[key])}", note)
    elif name == "model":
        yield from _model_lines(recipe, task)


def _model_lines(recipe: Recipe, task: Task) -> Iterator[str]:
    keys, default = recipe.model, task.default_model["architecture"]
    is_new = recipe.init_from is recipe.distillation.teacher is None
    name = keys.get("architecture") or (default if is_new and not keys else None)
    kind = architecture(name) if name else None
    size = keys.get("size", None if keys else task.default_model.get("size"))
    notes = {
        "architecture": _note("Published architecture of the model.", "str", default),
        "size": _note(f"Published size: {', '.join(kind.sizes)}.", "str | null", None)
        if kind and kind.sizes
        else "Published size.",
        **(_config_notes(kind) if kind else {}),
    }
    common = key_descriptions(None)
    for key, value in keys.items():
        yield _line(f"  {key}: {inline(value)}", notes.get(key) or common.get(key, ""))
    if kind is not None:
        from_task = task.model_keys(None, str(name))
        unset = {"architecture": name, "size": size, **_config_values(kind, size), **from_task}
        for key, value in unset.items():
            if key not in keys and key in notes and (key != "size" or kind.sizes):
                is_known = value is not MISSING and "vocab_size" not in key  # the tokenizer's
                text = f" {inline(to_jsonable_python(value))}" if is_known else ""
                yield _line(f"  # {key}:{text}", notes[key])


def _config_values(kind: Architecture, size: object) -> Mapping[str, Any]:
    """The value of each key of an architecture's Config where a recipe does not set it."""
    sizes = kind.sizes.get(str(size), {})
    return {field.name: sizes.get(field.name, field.default) for field in fields(kind.config)}


def _config_notes(kind: Architecture) -> dict[str, str]:
    descriptions = key_descriptions(kind.config)
    return {
        field.name: _note(descriptions.get(field.name, ""), type_name(field.type), field.default)
        for field in fields(kind.config)
    }


def _note(text: str, kind: str, default: Any) -> str:
    """A description with the type and the default of its key."""
    if default is MISSING or default is PydanticUndefined:
        return f"{text} ({kind})"
    return f"{text} ({kind}, default {inline(to_jsonable_python(default))})"


def _line(key: str, note: str) -> str:
    return f"{key:<{_COMMENT}}  # {note}" if note else key
