"""Writes docs/recipe.md: every key of a recipe, as `config.py` describes it."""

from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from heedful.config import Expectation, keys_of
from heedful.recipe_files import describe, inline

PAGE = Path(__file__).parent / "recipe.md"
HEAD = """<!-- Written by `make docs` from src/heedful/config.py. Do not edit. -->

# Every key of a recipe

A recipe holds what differs from these defaults. `heedful recipes ls` lists the shipped ones,
`heedful recipes show NAME` prints one with every key, `heedful recipes cp NAME` copies one, and
`--set key=value` changes one key of a run. Keys of `model` are those of the architecture's
`Config`; keys of `objective` are the task's own.
"""
AS_TRAIN = ("data.valid", "data.test")  # have the keys of data.train


def render() -> str:
    """The page as it should be now."""
    sections: dict[str, list[str]] = {"": []}
    for name, field, is_section in keys_of():
        parent, _, last = name.rpartition(".")
        if parent not in AS_TRAIN:
            sections[parent].append(_row(last, field))
        if is_section:
            sections[name] = []
    sections["expect"] = [_row(name, field) for name, field in Expectation.model_fields.items()]
    text = HEAD
    for name, rows in sections.items():
        if name not in AS_TRAIN:
            title = f"\n## {name}\n" if name else ""
            text += f"{title}\n| key | default | |\n|---|---|---|\n" + "".join(rows)
    return text


def _row(name: str, field: FieldInfo) -> str:
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        default = "below"
    elif field.default is PydanticUndefined:
        default = "needed"
    else:
        default = f"`{inline(to_jsonable_python(field.default))}`"
    return f"| `{name}` | {default} | {describe(field)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote docs/{PAGE.name}")
