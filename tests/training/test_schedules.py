"""The learning rate: every formula against numbers computed by hand or in another way."""

import math

import pytest

from commands import tiny
from heedful.config import Schedule, parse_recipe
from heedful.errors import UserError
from heedful.run import train
from heedful.training.events import RunStarted, StepDone
from heedful.training.listeners import read_log
from heedful.training.schedules import make_schedule


def rates(steps, *, d_model=512, max_steps=None, **keys):
    rate = make_schedule(Schedule(**keys), d_model=d_model, max_steps=max_steps)
    return [rate(step) for step in steps]


def test_noam_is_equation_3():
    actual = rates([1, 2000, 4000, 16000], d_model=512, name="noam", warmup_steps=4000)
    # 512^-0.5 = 1 / (16 √2); 4000^-1.5 and the square roots by hand
    width = 1 / (16 * math.sqrt(2))
    top = width / math.sqrt(4000)
    expected = [width / (4000 * math.sqrt(4000)), top / 2, top, top / 2]
    assert actual == pytest.approx(expected, rel=1e-12)
    assert top == pytest.approx(6.98771e-4, rel=1e-5)
    assert rates([4000], d_model=2048, name="noam", warmup_steps=4000) == pytest.approx([top / 2])


def test_inverse_sqrt():
    actual = rates([1, 50, 100, 400, 10_000], name="inverse_sqrt", learning_rate=0.8)
    assert rates([1000, 4000], name="inverse_sqrt", learning_rate=0.8) == pytest.approx([0.8, 0.4])
    assert actual[:3] == pytest.approx([0.0008, 0.04, 0.08])
    exact = rates([25, 100, 400, 900], name="inverse_sqrt", learning_rate=3.0, warmup_steps=100)
    assert exact == pytest.approx([0.75, 3.0, 1.5, 1.0], rel=1e-12)


def test_cosine():
    keys = {"name": "cosine", "learning_rate": 2.0, "warmup_steps": 10}
    steps = [5, 10, 40, 55, 70, 100, 130, 500]
    shares = [0.5, 1, None, (1 + math.sqrt(0.5)) / 2, None, 0.5, None, None]
    actual = rates(steps, max_steps=190, **keys)
    # progress 1/6, 1/4, 1/3, 1/2, 2/3: cosines √3/2, √1/2, 1/2, 0, -1/2
    shares[2] = (1 + math.sqrt(3) / 2) / 2
    shares[4] = 0.75
    shares[6] = 0.25
    shares[7] = 0.0
    assert actual == pytest.approx([2.0 * share for share in shares], abs=1e-12)
    floor = rates([10, 100, 190, 191], max_steps=190, min_lr_ratio=0.1, **keys)
    assert floor == pytest.approx([2.0, 1.1, 0.2, 0.2], rel=1e-12)


def test_linear():
    keys = {"name": "linear", "learning_rate": 4.0, "warmup_steps": 4}
    actual = rates([1, 2, 4, 9, 14, 19, 24, 30], max_steps=24, **keys)
    assert actual == pytest.approx([1.0, 2.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0], abs=1e-12)
    floor = rates([4, 14, 24, 99], max_steps=24, min_lr_ratio=0.5, **keys)
    assert floor == pytest.approx([4.0, 3.0, 2.0, 2.0], rel=1e-12)


def test_constant():
    actual = rates([1, 2, 3, 4, 5, 10**6], name="constant", learning_rate=0.3, warmup_steps=4)
    assert actual == pytest.approx([0.075, 0.15, 0.225, 0.3, 0.3, 0.3])


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_without_warmup_the_first_rate_is_the_peak(name):
    keys = {"name": name, "learning_rate": 1.0, "warmup_steps": 0}
    first, second = rates([1, 2], max_steps=10**6, **keys)
    assert first == pytest.approx(1.0, rel=1e-5)
    assert 0 < second <= 1.0


def test_noam_refuses_a_learning_rate():
    with pytest.raises(UserError, match="learning_rate to null"):
        rates([1], name="noam", learning_rate=0.1)
    with pytest.raises(UserError, match="warmup_steps of at least 1"):
        rates([1], name="noam", warmup_steps=0)


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "linear", "constant"])
def test_all_other_schedules_require_a_learning_rate(name):
    with pytest.raises(UserError, match=f"{name} needs a learning_rate"):
        rates([1], name=name)


def test_a_run_of_epochs_ends_where_its_schedule_does(tmp_path):
    schedule = {"name": "cosine", "learning_rate": 0.01, "warmup_steps": 2}
    ends = {"training__max_steps": None, "training__max_epochs": 2}
    train(parse_recipe(tiny(**ends, training__schedule=schedule, training__log_every=1)), tmp_path)
    events = read_log(tmp_path / "log.jsonl")
    total = next(event.total_steps for event in events if isinstance(event, RunStarted))
    actual = [event.learning_rate for event in events if isinstance(event, StepDone)]
    assert len(actual) == total
    assert actual == rates(range(1, len(actual) + 1), max_steps=total, **schedule)
    assert actual[-1] == 0
