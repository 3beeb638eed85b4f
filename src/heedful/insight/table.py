"""Which checks there are, in the order in which they are made, which is that of `checks.yaml`."""

from pathlib import Path

import yaml

# Each module declares its checks (`asks`).
from heedful.insight import cache_checks, padding_checks, sight_checks  # noqa: F401
from heedful.insight.checks import ASKS, Check
from heedful.insight.learning_checks import INITIAL_LOSS_MARGIN, OVERFIT_SHARE


def _read() -> tuple[Check, ...]:
    text = (Path(__file__).parent / "checks.yaml").read_text(encoding="utf-8")
    text = text.replace("{margin}", f"{INITIAL_LOSS_MARGIN}")
    described = yaml.safe_load(text.replace("{share}", f"{OVERFIT_SHARE}"))
    assert described.keys() == ASKS.keys()
    return tuple(Check(name, ASKS[name], **texts) for name, texts in described.items())


_ALL = _read()
CHECKS = tuple(check for check in _ALL if check.stacks != 1)  # of two stacks
SINGLE_CHECKS = tuple(check for check in _ALL if check.stacks != 2)
