"""Writes docs/reference/registries.md and architectures.md from the code: names, keys, sizes."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

from pydantic_core import to_jsonable_python

from heedful import plugins
from heedful.cli.list_ import METRICS, SCHEDULES, TASKS, descriptions, recipes
from heedful.config.keys import inline, type_name
from heedful.task_keys import BUILT_IN
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.architectures import key_descriptions

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by `make docs` from the code. Do not edit. -->\n\n"


def render() -> dict[str, str]:
    """The current pages by file name."""
    return {"registries.md": NOTE + _registries(), "architectures.md": NOTE + _architectures()}


def _registries() -> str:
    text = (
        "# Tasks, metrics, schedules and recipes\n\nA plugin can add to each "
        "([how](../plugins.md)).\n\n## Tasks\n\nThe keys of a recipe that each task reads, besides "
        "those that all tasks read.\n"
    )
    shared = frozenset.intersection(*(keys.names for keys in BUILT_IN.values()))
    for name, what in descriptions(plugins.task, TASKS).items():
        if name not in BUILT_IN:
            continue
        keys = ", ".join(f"`{key}`" for key in sorted(BUILT_IN[name].names - shared))
        text += f"\n### {name}\n\n{what[0].upper()}{what[1:]}.\n\nKeys: {keys}.\n"
        defaults = BUILT_IN[name].defaults
        if defaults:
            values = ", ".join(f"`{key}: {inline(value)}`" for key, value in defaults.items())
            text += f"\nDefaults that differ: {values}.\n"
    text += "\nKeys that all tasks read: " + ", ".join(f"`{key}`" for key in sorted(shared)) + ".\n"
    for title, rows in (
        ("Metrics", descriptions(plugins.metric, METRICS)),
        ("Learning rate schedules", descriptions(plugins.schedule, SCHEDULES)),
        ("Recipes", recipes()),
    ):
        text += f"\n## {title}\n\n| name | description |\n|---|---|\n"
        text += "".join(f"| `{name}` | {_cell(row)} |\n" for name, row in rows.items())
    return text


def _architectures() -> str:
    text = (
        "# Architectures\n\nNames for `model.architecture` of a recipe and for "
        "`heedful.zoo.architecture(name)`. Keys are those of `model` in a recipe and arguments of "
        "the `Config`; sizes are values of `model.size`.\n"
    )
    for name, what in descriptions(plugins.architecture, {}).items():
        if name in ARCHITECTURES:
            text += f"\n## {name}\n\n{what}\n\n" + _architecture(name)
    return text


def _architecture(name: str) -> str:
    entry = architecture(name)
    text = ""
    if entry.sizes:
        rows = "".join(f"| `{size}` | {_settings(keys)} |\n" for size, keys in entry.sizes.items())
        text += f"| size | differs from the defaults in |\n|---|---|\n{rows}\n"
    read = entry.formats["hf"].config is not None if "hf" in entry.formats else False
    if "hf" in entry.formats:
        direction = "import and export" if read else "export"
        text += f"Hugging Face format: {direction}.\n\n"
    hints, descriptions = get_type_hints(entry.config), key_descriptions(entry.config)
    text += "| key | type | default | description |\n|---|---|---|---|\n"
    for field in fields(entry.config):
        default = "needed" if field.default is MISSING else f"`{_value(field.default)}`"
        kind = type_name(hints[field.name]).replace("|", "or")
        text += f"| `{field.name}` | {kind} | {default} | {_cell(descriptions[field.name])} |\n"
    return text


def _settings(keys: Any) -> str:
    return ", ".join(f"`{key}: {_value(value)}`" for key, value in keys.items()) or "nothing"


def _value(value: Any) -> str:
    return inline(to_jsonable_python(value))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    for page, content in render().items():
        (FOLDER / page).write_text(content, encoding="utf-8")
        print(f"wrote docs/reference/{page}")
