"""Checks of a run: the bands of its recipe, and those for any data."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import assert_same_checkpoints, tiny
from heedful.config import Expectation, parse_recipe
from heedful.errors import UserError
from heedful.evaluation.likelihood import unigram_entropy
from heedful.recipe_changes import changed_settings
from heedful.recipe_files import load_recipe, read_settings
from heedful.run import train
from heedful.training.events import Evaluated, Event, RunStarted, StepDone
from heedful.training.listeners import read_log
from heedful.training.verdict import ExpectationListener, general_verdicts, verdicts

BAND = {"step": 4, "low": 1.5, "high": 2.0}


def printed_lines(loss: float, step: int = 4) -> list[str]:
    """The lines printed for an evaluation, for a recipe with one band."""
    lines: list[str] = []
    listener = ExpectationListener([Expectation(**BAND)], lines.append)
    listener.on(Evaluated(step, 0, 1.0, loss, perplexity=9.0, token_accuracy=0.5))
    return lines


@pytest.mark.parametrize(
    ("loss", "word"),
    [(1.5, "within"), (2.0, "within"), (1.499, "below"), (2.001, "above"), (float("nan"), "above")],
)
def test_a_loss_is_within_below_or_above_a_band(loss: float, word: str) -> None:
    (line,) = printed_lines(loss)
    assert line.startswith(f"check: step 4: loss {loss:.3f} is {word} 1.5 to 2")
    assert ("heedful verify" in line) == (word != "within")
    assert printed_lines(loss, step=2) == []


def test_bands_are_ignored_after_a_change_of_settings() -> None:
    recipe, evaluated = {"expect": [BAND]}, Evaluated(4, 0, 1.0, 1.7, 9.0, 0.5)
    for changes, count in (([], 1), (["training.clip_norm (1.0 -> 0.5)"], 0)):
        resumed = RunStarted(recipe, 1, 1, 1, "cpu", 9, resumed_from=2, changes=changes)
        events = [RunStarted(recipe, 1, 1, 1, "cpu", 9), resumed, evaluated]
        assert len([v for v in verdicts(events, Path("run")) if "within" in v.text]) == count
        lines: list[str] = []
        listener = ExpectationListener([Expectation(**BAND)], lines.append)
        for event in events:
            listener.on(event)
        assert len(lines) == count


def test_bands_are_checked_at_their_steps(tmp_path: Path) -> None:
    """Bands around, above and below the loss; step 5 is evaluated only for its band."""
    bands = [
        {"step": 3, "low": 0.0, "high": 50.0},
        {"step": 5, "low": 0.0, "high": 50.0},
        {"step": 6, "low": 40.0, "high": 50.0},
        {"step": 9, "low": 0.0, "high": 1e-6},
    ]
    lines: list[str] = []
    train(parse_recipe(tiny(expect=bands)), tmp_path / "run", print_line=lines.append)
    actual = {
        event.step: event.smoothed_loss
        for event in read_log(tmp_path / "run/log.jsonl")
        if isinstance(event, Evaluated)
    }
    assert set(actual) == {3, 5, 6, 9, 12}
    about = [line for line in lines if line.startswith("check: step")]
    assert [line.split(";")[0].split(", the band")[0] for line in about] == [
        f"check: step 3: smoothed loss {actual[3]:.3f} is within 0 to 50",
        f"check: step 5: smoothed loss {actual[5]:.3f} is within 0 to 50",
        f"check: step 6: smoothed loss {actual[6]:.3f} is below 40 to 50",
        f"check: step 9: smoothed loss {actual[9]:.3f} is above 0 to 1e-06",
    ]


def test_bands_do_not_change_a_run(tmp_path: Path) -> None:
    """Extra evaluations affect neither checkpoints nor the best model nor patience."""
    bands = [{"step": step, "low": 0.0, "high": 50.0} for step in (1, 5, 8)]
    keys = {"training__patience": 2, "training__max_steps": 30}
    for name, expect in (("with", bands), ("without", [])):
        train(parse_recipe(tiny(expect=expect, **keys)), tmp_path / name)
    assert_same_checkpoints(tmp_path / "with", tmp_path / "without")


def test_a_run_without_bands_has_the_general_checks(tmp_path: Path) -> None:
    lines: list[str] = []
    recipe = parse_recipe(tiny(training__max_steps=3, training__log_every=1))
    train(recipe, tmp_path / "run", print_line=lines.append)
    about = [line for line in lines if line.startswith("check:")]
    parts = ("the training loss", "the held-out loss at step 3", f"`heedful verify {tmp_path}/run`")
    assert [part in line for part, line in zip(parts, about, strict=True)] == [True] * 3
    start = next(e for e in read_log(tmp_path / "run/log.jsonl") if isinstance(e, RunStarted))
    assert start.unigram_entropy is not None
    assert f"{start.unigram_entropy:.3f}" in about[1]


def of_losses(losses: list[float]) -> list[Event]:
    return [StepDone(i, 0, 9.0, x, 0.1, 1.0, 1.0, 1, 1.0) for i, x in enumerate(losses, start=1)]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(3, 400), st.floats(0.0, 10.0))
def test_a_clear_fall_is_distinguished_from_noise(seed: int, count: int, level: float) -> None:
    """A linear or curved fall of ten standard deviations counts, a rise does not."""
    noise = np.random.default_rng(seed).normal(0, 0.1, count)
    steady, curved = np.linspace(1, 0, count), np.exp(-np.linspace(0, 3, count))
    for shape in (steady, curved):
        smooth = general_verdicts(of_losses([*(level + shape)]), Path("run"))
        assert smooth[0].good, smooth
        assert not general_verdicts(of_losses([*(level - shape + 1)]), Path("run"))[0].good
        if count >= 20:
            falling = level + 10 * shape + noise
            assert general_verdicts(of_losses([*falling]), Path("run"))[0].good


def test_noise_is_rarely_reported_as_a_fall() -> None:
    rng = np.random.default_rng(0)
    actual = [
        general_verdicts(of_losses([*rng.normal(2, 0.1, 60)]), Path("run"))[0].good
        for _ in range(300)
    ]
    assert sum(map(bool, actual)) <= 6


def test_the_loss_is_compared_with_the_unigram_entropy() -> None:
    for entropy, good in ((1.3, True), (1.1, False)):
        start = RunStarted({}, 1, 1, 1, "cpu", 1, unigram_entropy=entropy)
        # The smoothed loss does not count.
        events = [
            Evaluated(step, 0, 1.0, loss, math.exp(loss), 0.5, smoothed_loss=9.0)
            for step, loss in ((1, 1.2), (2, 4.0))
        ]
        verdict = general_verdicts([start, *events], Path("run"))[0]
        assert verdict.good == good
        assert verdict.text.startswith("the held-out loss at step 1, 1.200 nats")
    assert general_verdicts(of_losses([1.0]), Path("run")) == []


def test_unigram_entropy_by_hand() -> None:
    actual = unigram_entropy(map(torch.tensor, ([5, 5, 7], [7, 9, 9, 9, 9])))
    assert actual == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(2))
    some = unigram_entropy(map(torch.tensor, ([1, 2], [3, 3])), enough=2)
    assert some == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("override", "is_kept"),
    [
        ("training.max_steps=700", True),
        ("data.folder=elsewhere", True),
        ("training.device=cpu", True),
        ("data.train.text=mine.txt", False),
        ("model.d_model=32", False),
        ("training.label_smoothing=0.1", False),
    ],
)
def test_overrides_remove_bands(override: str, is_kept: bool) -> None:
    assert bool(load_recipe("rhyme", read_settings([override])).expect) == is_kept
    given = read_settings([override, "expect=[{step: 1, low: 0, high: 1}]"])
    assert load_recipe("rhyme", given).expect


@pytest.mark.parametrize(
    ("override", "is_kept"),
    [
        ("training.max_steps=700", False),
        ("training.max_epochs=9", False),
        ("training.max_minutes=9", True),
        ("training.device=cpu", True),
    ],
)
def test_bands_of_a_schedule_that_ends_with_the_run(override: str, is_kept: bool) -> None:
    """By `cosine` the learning rate at a step depends on the last one."""
    assert bool(load_recipe("shakespeare", read_settings([override])).expect) == is_kept


def test_a_resumed_run_notes_another_end_of_its_schedule() -> None:
    for name, count in (("linear", 1), ("constant", 0)):
        before = parse_recipe(tiny(training__schedule={"name": name, "learning_rate": 0.1}))
        now = before.replace({"training.max_steps": 50, "training.log_every": 7})
        assert len(changed_settings(before.model_dump(mode="json"), now)) == count


def test_a_resumed_run_may_have_other_bands(tmp_path: Path) -> None:
    train(parse_recipe(tiny(training__max_steps=3)), tmp_path / "run")
    again = parse_recipe(tiny(training__max_steps=3, expect=[BAND]))
    assert train(again, tmp_path / "run", resume=True).reason == "max_steps"


@pytest.mark.parametrize(
    ("band", "message"),
    [
        ({"step": 0, "low": 0.0, "high": 1.0}, "expect.0.step: .* not 0"),
        ({"step": 1, "low": 0.0}, "expect.0.high: field required"),
        ({"step": 1, "low": 0.0, "high": 1.0, "hihg": 1.0}, "unknown key expect.0.hihg; .*high"),
        ({"step": 1, "low": 2.0, "high": 1.0}, "expect.0: low 2 must be below high 1"),
    ],
)
def test_a_wrong_band_is_refused(band: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_recipe(tiny(expect=[band]))
