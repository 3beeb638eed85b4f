"""`heedful list`: the models, tasks, metrics, schedules and recipes that can be named."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from heedful import plugins
from heedful.cli.flags import Json
from heedful.cli.guard import add_command
from heedful.cli.help import first_sentence, new_group
from heedful.cli.shared import print_json

app = new_group("List models, tasks, metrics, schedules and recipes, plugins included.")
_COLUMNS = 80
TASKS = {
    "translation": "pairs of texts: the target given the source, scored by decoding",
    "language_modeling": "running text: the next token, scored by perplexity",
    "sft": "prompts or chats with answers: the answers, scored by perplexity and accuracy",
    "masked_lm": "texts with masked tokens (BERT), scored by the accuracy of the masked ones",
    "denoising": "corrupted texts (BART, T5): the original, scored by decoding",
    "classification": "texts or pairs of texts with labels or values, scored by the kind of these",
    "copy": "sequences of symbols, generated: the same sequence",
    "reverse": "sequences of symbols, generated: in reverse order",
    "sort": "sequences of symbols, generated: in sorted order",
}
METRICS = {
    "bleu": "sacreBLEU's BLEU, with its signature",
    "chrf": "sacreBLEU's chrF2",
    "chrf++": "sacreBLEU's chrF2++, which counts words too",
    "ter": "sacreBLEU's translation edit rate; lower is better",
    "exact_match": "share of outputs that equal their reference",
    "tokenized_lowercase_bleu": "BLEU of lowercased, Moses-tokenized text, for older papers",
}
SCHEDULES = {
    "noam": "linear warm-up, then 1/sqrt(step), scaled by d_model (Vaswani et al. 2017)",
    "inverse_sqrt": "linear warm-up, then 1/sqrt(step)",
    "cosine": "linear warm-up, then half a cosine to the end of the run",
    "linear": "linear warm-up, then a line to the end of the run",
    "constant": "linear warm-up, then the same rate",
}


def descriptions(registry: Any, texts: Mapping[str, str]) -> dict[str, str]:
    """A line for each entry of a registry: from `texts`, or the docstring of its module."""
    return {name: texts.get(name) or _documented(registry, name) for name in registry.names()}


def _documented(registry: Any, name: str) -> str:
    """The first sentence of an entry's docstring; a built-in one is not imported for it."""
    entry = registry.unresolved(name)
    if not isinstance(entry, str):
        function = getattr(entry, "function", entry)
        return first_sentence(inspect.getdoc(function) or "")
    spec = find_spec(entry.partition(":")[0])
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    return first_sentence(ast.get_docstring(ast.parse(source)) or "")


def recipes() -> dict[str, str]:
    """The shipped recipes, each with its first line."""
    from heedful.recipe_files import RECIPES, shipped_recipes

    files = {name: RECIPES / f"{name}.yaml" for name in shipped_recipes()}
    return {
        name: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        for name, path in files.items()
    }


def print_rows(rows: Mapping[str, str], json: bool) -> None:
    """Print each name with its description in 80 columns, or JSON."""
    if json:
        print_json(rows)
        return
    width = max(map(len, rows)) + 2
    for name, text in rows.items():
        lines = textwrap.wrap(text, max(_COLUMNS - width, _COLUMNS // 3)) or [""]
        for first, line in zip([name, *[""] * len(lines)], lines, strict=False):
            typer.echo(f"{first:<{width}}{line}".rstrip())


def _add(name: str, text: str, rows: Callable[[], Mapping[str, str]]) -> None:
    def show(json: Json = False) -> None:
        print_rows(rows(), json)

    show.__doc__ = f"{text}\n\nExample: heedful list {name}"
    add_command(app, name, show)


_add(
    "models",
    "List the architectures for model.architecture.",
    lambda: descriptions(plugins.architecture, {}),
)
_add("tasks", "List the tasks of recipes.", lambda: descriptions(plugins.task, TASKS))
_add(
    "metrics",
    "List the metrics of --metrics and of evaluation.metric.",
    lambda: descriptions(plugins.metric, METRICS),
)
_add(
    "schedules",
    "List the learning rate schedules for training.schedule.name.",
    lambda: descriptions(plugins.schedule, SCHEDULES),
)
_add("recipes", "List the recipes that come with heedful.", recipes)
