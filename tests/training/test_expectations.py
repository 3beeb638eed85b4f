"""A run says whether its held-out loss is in the band that its recipe names."""

from pathlib import Path

import pytest

from commands import assert_same_checkpoints, tiny
from heedful.config import Expectation
from heedful.errors import UserError
from heedful.recipe_files import parse_recipe
from heedful.run import train
from heedful.training.events import Evaluated
from heedful.training.loggers import Expectations, read_log

BAND = {"step": 4, "low": 1.5, "high": 2.0}


def said(loss: float, step: int = 4) -> list[str]:
    """What is said of an evaluation, by a recipe with one band."""
    lines: list[str] = []
    listener = Expectations([Expectation(**BAND)], lines.append)
    listener.on(Evaluated(step, 0, 1.0, loss, perplexity=9.0, token_accuracy=0.5))
    return lines


@pytest.mark.parametrize(
    ("loss", "word"),
    [(1.5, "within"), (2.0, "within"), (1.499, "below"), (2.001, "above"), (float("nan"), "above")],
)
def test_a_loss_is_within_a_band_or_on_a_side_of_it(loss: float, word: str) -> None:
    (line,) = said(loss)
    assert line.startswith(f"is it right? step 4: loss {loss:.3f} is {word} 1.5 to 2")
    assert ("heedful verify" in line) == (word != "within")
    assert said(loss, step=2) == []


def test_a_run_says_it_at_its_steps(tmp_path: Path) -> None:
    """Bands around, above and below what the run really finds; it is evaluated for step 5 alone."""
    bands = [
        {"step": 3, "low": 0.0, "high": 50.0},
        {"step": 5, "low": 0.0, "high": 50.0},
        {"step": 6, "low": 40.0, "high": 50.0},
        {"step": 9, "low": 0.0, "high": 1e-6},
    ]
    lines: list[str] = []
    train(parse_recipe(tiny(expect=bands)), tmp_path / "run", say=lines.append)
    found = {
        event.step: event.loss
        for event in read_log(tmp_path / "run/log.jsonl")
        if isinstance(event, Evaluated)
    }
    assert set(found) == {3, 5, 6, 9, 12}
    about = [line for line in lines if line.startswith("is it right?")]
    assert [line.split(";")[0].split(", where")[0] for line in about] == [
        f"is it right? step 3: loss {found[3]:.3f} is within 0 to 50",
        f"is it right? step 5: loss {found[5]:.3f} is within 0 to 50",
        f"is it right? step 6: loss {found[6]:.3f} is below 40 to 50",
        f"is it right? step 9: loss {found[9]:.3f} is above 0 to 1e-06",
    ]


def test_bands_change_nothing_of_a_run(tmp_path: Path) -> None:
    """No checkpoint, no best and no patience hangs on their steps, so that a resume may differ."""
    bands = [{"step": step, "low": 0.0, "high": 50.0} for step in (1, 5, 8)]
    keys = {"training__early_stopping": 2, "training__max_steps": 30}
    for name, expect in (("with", bands), ("without", [])):
        train(parse_recipe(tiny(expect=expect, **keys)), tmp_path / name)
    assert_same_checkpoints(tmp_path / "with", tmp_path / "without")


def test_a_run_without_bands_says_nothing_of_them(tmp_path: Path) -> None:
    lines: list[str] = []
    train(parse_recipe(tiny(training__max_steps=3)), tmp_path / "run", say=lines.append)
    assert not any("is it right" in line for line in lines)


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
