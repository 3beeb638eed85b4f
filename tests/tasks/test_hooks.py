"""The hooks of a task: called in the documented order, without state between them."""

import ast
import copy
import re
from pathlib import Path
from typing import Any

import pytest

from encoder_runs import recipe_of
from heedful import plugins
from heedful.run import train
from heedful.tasks import task as task_module
from heedful.tasks.task import Task

TASKS = ["translation", "language_modeling", "sft", "masked_lm", "denoising", "classification"]
ROOT = Path(__file__).parents[2]


# Hooks that only a compiled run, one with noise, or one that starts from another model, calls.
NOT_ALWAYS = ("plan_rows", "row_lengths", "batch_shapes", "num_rows", "adapt_tokenizers", "problem")
NOT_ALWAYS += ("row_noise",)


def documented_hooks() -> list[str]:
    """The hooks of docs/plugins.md, in the order of its table."""
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(\w+)\(.*\)` \|", page, re.MULTILINE)


def test_the_documentation_has_the_hooks_of_the_class_in_its_order() -> None:
    tree = ast.parse(Path(task_module.__file__).read_text(encoding="utf-8"))
    [actual] = [node for node in tree.body if getattr(node, "name", "") == Task.__name__]
    assert isinstance(actual, ast.ClassDef)
    methods = [node.name for node in actual.body if isinstance(node, ast.FunctionDef)]
    assert documented_hooks() == [name for name in methods if name not in ("__init__", "metrics")]


@pytest.mark.parametrize("name", TASKS)
def test_a_run_calls_the_hooks_in_order_and_the_task_keeps_no_state(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))  # nothing is prepared yet
    kind, hooks, called, tasks = plugins.task.get(name), documented_hooks(), list[str](), set()
    states: list[dict[str, Any]] = []

    def watched(hook: str) -> Any:
        original = getattr(kind, hook)

        def call(self: Task, *args: Any, **options: Any) -> Any:
            if args[:1] != (None,):  # `model_keys` before the data are read
                called.append(hook)
            tasks.add(self)
            states.append(copy.deepcopy(vars(self)))
            actual = original(self, *args, **options)
            states.append(copy.deepcopy(vars(self)))
            return actual

        return call

    for hook in hooks:
        monkeypatch.setattr(kind, hook, watched(hook))
    train(recipe_of(name, tmp_path, training__max_steps=4), tmp_path / "run")
    assert [hook for hook in dict.fromkeys(called) if hook not in NOT_ALWAYS] == [
        hook for hook in hooks if hook not in NOT_ALWAYS
    ]
    assert len(tasks) == 1
    assert all(state == states[0] for state in states)
