"""The number of threads of a training: measured, noted, and without effect on the steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import tiny
from heedful.config import Recipe
from heedful.files import read_json
from heedful.run import train
from heedful.tasks import threads
from heedful.tasks.threads import TimedSteps, fastest_threads
from process_group import assert_equal_steps

STEPS = 100  # tokens per second by number of threads are this, divided by the seconds below


@pytest.fixture(autouse=True)
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that are set, on a machine with four; torch keeps its own."""
    used = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    return used


class Folder:
    """The facts of a run's folder."""

    path = Path("nowhere")

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def update_facts(self, **facts: Any) -> None:
        """Note them."""
        self.facts |= facts


def choose(
    monkeypatch: pytest.MonkeyPatch,
    used: list[int],
    seconds: dict[int, float],
    total_steps: int | None = 10**6,
    **keys: Any,
) -> tuple[int, Folder, list[str]]:
    """The number in the block, the facts and the lines, where a step takes `seconds`[threads]."""

    class Steps:
        """Steps of 100 tokens."""

        def __init__(self, *arguments: Any) -> None:
            pass

        def take(self, count: int) -> tuple[float, int]:
            """As `TimedSteps.take`."""
            return count * seconds[used[-1]], count * STEPS

    epochs = SimpleNamespace(total_steps=lambda: total_steps)
    facts = SimpleNamespace(threads=keys.pop("noted", None))
    resume = keys.pop("resume", False)
    monkeypatch.setattr(threads, "TimedSteps", Steps)
    monkeypatch.setattr(threads, "facts_of_run", lambda path: facts)
    task: Any = SimpleNamespace(recipe=Recipe.model_validate(tiny(**keys)))
    run: Any = SimpleNamespace(task=task, epochs=epochs)
    folder, lines = Folder(), list[str]()
    before = used[-1]
    with fastest_threads(run, folder, resume, lines.append):  # type: ignore[arg-type]
        inside = used[-1]
    assert used[-1] == before, "the threads of the process are as before"
    return inside, folder, lines


@pytest.mark.parametrize(
    ("seconds", "chosen", "line"),
    [
        ({4: 0.1, 2: 0.2, 1: 0.4}, 4, "4: 1,000 tokens/s (2 500, 1 250)"),
        ({4: 0.4, 2: 0.1, 1: 0.2}, 2, "2: 1,000 tokens/s (4 250, 1 500)"),
        ({4: 0.2, 2: 0.4, 1: 0.1}, 1, "1: 1,000 tokens/s (4 500, 2 250)"),
        ({4: 0.104, 2: 0.1, 1: 0.4}, 4, "4: 962 tokens/s (2 1,000, 1 250)"),  # less than 5%
    ],
)
def test_the_fastest_number_is_chosen_and_noted(
    monkeypatch: pytest.MonkeyPatch,
    used: list[int],
    seconds: dict[int, float],
    chosen: int,
    line: str,
) -> None:
    inside, folder, lines = choose(monkeypatch, used, seconds)
    assert (inside, folder.facts) == (chosen, {"threads": chosen})
    assert lines == [f"threads    {line}"]


@pytest.mark.parametrize(
    ("keys", "cores", "step"),
    [
        ({"total_steps": 1_000}, 4, 0.1),
        ({"training__max_minutes": 5}, 4, 0.1),
        ({"training__parallel": "none"}, 4, 0.1),
        ({"training__parallel": "ddp"}, 4, 0.1),
        ({"training__compile": True}, 4, 0.1),
        ({}, 1, 0.1),
        ({}, 4, 0.6),
    ],
    ids=["short", "minutes", "none", "ddp", "compiled", "one thread", "long steps"],
)
def test_nothing_is_chosen_where_nothing_is_gained(
    monkeypatch: pytest.MonkeyPatch,
    used: list[int],
    keys: dict[str, Any],
    cores: int,
    step: float,
) -> None:
    used.append(cores)
    inside, folder, lines = choose(monkeypatch, used, {4: step, 2: 0.01, 1: 0.01}, **keys)
    assert (inside, folder.facts, lines) == (cores, {}, [])


@pytest.mark.parametrize(("noted", "inside"), [(2, 2), (8, 4), (None, 4)])
def test_a_resumed_run_has_the_noted_number(
    monkeypatch: pytest.MonkeyPatch, used: list[int], noted: int | None, inside: int
) -> None:
    """At most that of the machine; it measures nothing."""
    actual, folder, lines = choose(monkeypatch, used, {}, resume=True, noted=noted)
    assert (actual, folder.facts, lines) == (inside, {}, [])


def test_measured_steps_change_nothing(
    monkeypatch: pytest.MonkeyPatch, used: list[int], tmp_path: Path
) -> None:
    """The run takes the steps of one that measures nothing, with dropout."""
    recipe = Recipe.model_validate(tiny(training__max_steps=3))
    lines, taken = list[str](), list[int]()
    train(recipe, tmp_path / "plain", progress=False)
    assert read_json(tmp_path / "plain" / "run.json")["threads"] is None
    monkeypatch.setattr(threads, "_LEAST_RUN", 0.0)
    monkeypatch.setattr(threads, "_MAX_STEPS", 4)
    real = TimedSteps.take

    def take(self: TimedSteps, count: int) -> tuple[float, int]:
        taken.append(used[-1])
        _, tokens = real(self, count)
        return 0.1 if used[-1] == 2 else 0.4, tokens

    monkeypatch.setattr(TimedSteps, "take", take)
    options: dict[str, Any] = {"progress": False, "tunes_threads": True}
    train(recipe, tmp_path / "run", print_line=lines.append, **options)
    assert {4, 2, 1} == {*taken}
    assert read_json(tmp_path / "run" / "run.json")["threads"] == 2
    assert any(line.startswith("threads    2: ") for line in lines)
    assert_equal_steps(tmp_path / "run", tmp_path / "plain")
