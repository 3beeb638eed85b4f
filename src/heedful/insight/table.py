"""Which checks there are, in the order in which they are made; what each says is `checks.yaml`."""

from pathlib import Path

import yaml

from heedful.insight.cache_checks import cached
from heedful.insight.checks import Ask, Check
from heedful.insight.learning_checks import (
    INITIAL_LOSS_MARGIN,
    OVERFIT_SHARE,
    bf16,
    gradient_flow,
    initial_loss,
    one_batch_overfits,
    weight_tying,
)
from heedful.insight.padding_checks import empty_rows, padding_gradient, padding_of
from heedful.insight.sight_checks import (
    batch_independence,
    causality,
    deterministic,
    mask_polarity,
    output_shape,
    position_awareness,
    sees_both_sides,
)

ASKS: dict[str, Ask] = {
    "output shape": output_shape,
    "dropout off in evaluation": deterministic,
    "causality": causality,
    "mask polarity": mask_polarity,
    "sees both sides": sees_both_sides,
    "position awareness": position_awareness,
    "batch independence": batch_independence,
    "source padding, right": padding_of("src", "right"),
    "source padding, left": padding_of("src", "left"),
    "target padding, right": padding_of("tgt", "right"),
    "target padding, left": padding_of("tgt", "left"),
    "padding, right": padding_of("ids", "right"),
    "padding, left": padding_of("ids", "left"),
    "empty rows": empty_rows,
    "cached = uncached": cached,
    "gradient flow": gradient_flow,
    "no gradient from padding": padding_gradient,
    "weight tying": weight_tying,
    "bf16": bf16,
    "initial loss": initial_loss,
    "one batch overfits": one_batch_overfits,
}


def _read() -> tuple[Check, ...]:
    text = (Path(__file__).parent / "checks.yaml").read_text(encoding="utf-8")
    text = text.replace("{margin}", f"{INITIAL_LOSS_MARGIN}").replace("{share}", f"{OVERFIT_SHARE}")
    described = yaml.safe_load(text)
    assert described.keys() == ASKS.keys()
    return tuple(Check(name, ask, **described[name]) for name, ask in ASKS.items())


_ALL = _read()
CHECKS = tuple(check for check in _ALL if check.stacks != 1)  # of two stacks
SINGLE_CHECKS = tuple(check for check in _ALL if check.stacks != 2)
