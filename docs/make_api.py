"""Writes docs/reference/api/*.md: the public Python names, one page for each module.

Which names and methods there are is looked up, so that one that does not exist is an error.
"""

import importlib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import heedful
from heedful.options import DEFAULTS, Options
from heedful.pipelines.keywords import INTERNAL

FOLDER = Path(__file__).parent / "reference" / "api"
NOTE = "<!-- Written by `make docs` from the code. Do not edit. -->\n\n"
MODELS = ("Translator", "LanguageModel", "MaskedLanguageModel", "Classifier", "Embedder")
# Groups of the names of a module without `MODELS`; without an entry here: all of them, in one.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "heedful": {
        "Open a model": (
            *("load", "load_translator", "load_language_model", "load_masked_language_model"),
            *("load_classifier", "load_encoder", "ensemble", "from_net"),
        ),
        "Train": ("load_recipe", "train", "TrainingRun", "train_tokenizer", "Tokenizer"),
        "Check and exchange": ("verify", "import_hf", "export_hf", "UserError"),
    },
}
# Methods that other modules of heedful call, and users need not.
INTERNAL_OF: dict[str, frozenset[str]] = {
    "heedful.Tokenizer": frozenset(
        (
            *("content", "decoder", "encode_continuation", "encode_markup", "encode_rows"),
            *("extended", "has_own_pieces", "markup", "piece", "spelling", "token_texts"),
        )
    ),
    "heedful.parts.Attention": frozenset(("split_sizes",)),
    "heedful.parts.Cache": frozenset(
        (
            *("begin", "first", "grow", "reserve", "tensors", "with_all_slots", "with_texts"),
            "write_rows",
        )
    ),
    "heedful.parts.MaskSpec": frozenset(("hides_padding_alone", "is_causal_alone")),
    "heedful.parts.Tokens": frozenset(("longest", "rows")),
    "heedful.models.Stack": frozenset(("cache_layers", "plans")),
    "heedful.generation.LengthScore": frozenset(("hypothesis",)),
    "heedful.insight.Check": frozenset(("result", "run")),
    "heedful.insight.RunScales": frozenset(("create",)),
}


class Page(NamedTuple):
    """A page: title, text of the top, and names by the title of their group."""

    title: str
    text: str
    groups: dict[str, tuple[str, ...]]


def pages() -> dict[str, Page]:
    """The pages by file name."""
    result = {"heedful.md": _module("heedful"), "saved-models.md": _saved_models()}
    for name in ("parts", "models", "zoo", "generation", "insight"):
        result[f"{name}.md"] = _module(f"heedful.{name}")
    scales = ("heedful.run_scales.scales_of_run",)
    result["insight.md"].groups["Over a training"] = scales
    return result


def render() -> dict[str, str]:
    """The current pages by file name."""
    return {name: NOTE + _text(page) for name, page in pages().items()}


def _module(module: str) -> Page:
    names = importlib.import_module(module).__all__
    groups = GROUPS.get(module, {"": (*names,)})
    expected = {*names} - {*(MODELS if module == "heedful" else ())}
    assert {name for group in groups.values() for name in group} == expected, module
    full = {title: tuple(f"{module}.{name}" for name in group) for title, group in groups.items()}
    top = f"```{{eval-rst}}\n.. automodule:: {module}\n   :no-members:\n```\n"
    return Page(module, top, full)


def _saved_models() -> Page:
    groups = {
        "What all models have": ("heedful.pipelines.SavedModel",),
        "Models that generate": ("heedful.pipelines.Generator", *_of(MODELS[:2])),
        "Encoders": _of(MODELS[2:]),
    }
    return Page("Opened models", _OPENED + _options(), groups)


_OPENED = """`heedful.load` and its siblings return one of the classes below: a net with its
tokenizers and metadata. `Translator` and `LanguageModel` have the methods of `Generator`, and all
have those of `SavedModel`.

## Options

Keywords of `generate`, `translate`, `chat`, `stream` and `iterate_generations`, with the same names
as the flags of the command line and the fields of the server:

"""


def _options() -> str:
    rows = "| keyword | default | meaning |\n|---|---|---|\n"
    for field in fields(Options):
        if (text := field.metadata.get("help")) and field.name != "explicit":
            default = field.metadata["shown"] or f"`{DEFAULTS.get(field.name, field.default)!r}`"
            rows += f"| `{field.name}` | {_cell(default)} | {_cell(text)} |\n"
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"heedful.{name}" for name in names)


def _text(page: Page) -> str:
    text = f"# {page.title}\n\n{page.text}"
    for title, names in page.groups.items():
        text += f"\n## {title}\n" if title else ""
        text += "".join(map(_entry, names))
    return text


def _entry(name: str) -> str:
    """The directive of a name."""
    module, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(module), last)
    if isinstance(thing, type):
        directive = "exception" if issubclass(thing, Exception) else "class"
        options = ["   :members:"] if directive == "class" else []
        hidden = INTERNAL_OF.get(name, frozenset())
        missing = [method for method in hidden if not hasattr(thing, method)]
        assert not missing, f"{name} has no {missing}"
        if issubclass(thing, heedful.pipelines.SavedModel):
            hidden = INTERNAL
        if hidden:
            options.append(f"   :exclude-members: {', '.join(sorted(hidden))}")
    elif callable(thing):
        directive, options = "function", []
    else:
        entries = ", ".join(f"``{getattr(entry, 'name', entry)}``" for entry in thing)
        directive = f".. py:currentmodule:: {module}\n\n.. py:data:: {last}"
        return f"\n```{{eval-rst}}\n{directive}\n\n   {entries}\n```\n"
    lines = [f".. auto{directive}:: {name}", *options]
    return "\n```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in render().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
        print(f"wrote docs/reference/api/{name}")
