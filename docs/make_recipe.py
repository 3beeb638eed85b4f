"""Writes docs/recipe.md: every key of a recipe, as `heedful.config` describes it."""

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from heedful.config import Corpus, Expectation, Files, Recipe
from heedful.config.keys import inline, keys_of, type_name
from heedful.task_keys import BUILT_IN

PAGE = Path(__file__).parent / "recipe.md"
HEAD = """<!-- Written by `make docs` from src/heedful/config/. Do not edit. -->

# Every key of a recipe

A recipe holds what differs from these defaults. `heedful recipes list` lists the shipped ones,
`heedful recipes show NAME` prints one with every key, `heedful recipes copy NAME` copies one, and
`--set key=value` changes one key of a run. Keys of `model` are those of the architecture's
`Config`; keys of `objective` are the task's own. A key without tasks in the last column is read by
every task; to set a key that the task does not read is an error. A default with names of tasks is
that of these tasks.

A recipe with `base: NAME`, a shipped recipe or a path relative to the recipe's own file, holds what
differs from that recipe: sections are merged, other values replaced, and `null` removes a key of
the base (a key that may be `null` is then `null`).
"""
AS_TRAIN = ("data.valid", "data.test")  # have the keys of data.train


def render() -> str:
    """The current page."""
    sections: dict[str, list[str]] = {"": []}
    for name, field, is_section in keys_of(Recipe):
        parent, _, last = name.rpartition(".")
        if parent not in AS_TRAIN:
            sections[parent].append(_row(last, field, name))
        if is_section:
            sections[name] = []
    sections["expect"] = [_row(name, field) for name, field in Expectation.model_fields.items()]
    sections["data.corpora.NAME"] = [
        _row(name, field)
        for name, field in Corpus.model_fields.items()
        if name not in Files.model_fields
    ]
    text = HEAD
    for name, rows in sections.items():
        if name not in AS_TRAIN:
            title = f"\n## {name}\n" if name else ""
            head = "| key | type | default | | tasks |\n|---|---|---|---|---|\n"
            text += f"{title}\n{head}" + "".join(rows)
    return text


def _row(key: str, field: FieldInfo, name: str = "") -> str:
    """One key's row; `name` is its dotted name where tasks may differ in it."""
    kind = field.annotation
    is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
    if is_section:
        default = "below"
    elif field.is_required():
        default = "needed"
    else:
        value = field.get_default(call_default_factory=True)
        default = f"`{inline(to_jsonable_python(value))}`"
    own: dict[str, list[str]] = {}
    for task, keys in BUILT_IN.items():
        if name in keys.defaults:
            own.setdefault(inline(keys.defaults[name]), []).append(task)
    default += "".join(f"; {', '.join(tasks)}: `{value}`" for value, tasks in own.items())
    readers = [task for task, keys in BUILT_IN.items() if name and keys.includes(name)]
    some = "" if is_section or len(readers) in (0, len(BUILT_IN)) else ", ".join(readers)
    type_text = "" if is_section else type_name(kind).replace("|", "or")
    return f"| `{key}` | {type_text} | {default} | {field.description} | {some} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}")
