"""Checks of padding on either side: it has no effect, gets no gradient, and causes no NaN."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from heedful.insight.checks import (
    Check,
    Failed,
    Outcome,
    Skipped,
    check,
    first_non_finite_gradient,
    gradient_beyond_rounding,
    has_no_nan,
    require_equal,
)
from heedful.insight.kind import NAMES, Side
from heedful.insight.probe import PADDING_SIDES, NetInputs, Probe
from heedful.parts.tokens import PaddingSide


def _check_padding(side: Side, where: PaddingSide, probe: Probe) -> Outcome:
    """Compare a batch of padded rows with its rows without padding.

    Rows without padding are in a batch as well, so that a defect of batches of one is not reported
    as one of padding.
    """
    if reason := probe.no_padding_reason(side, where):
        raise Skipped(reason)
    batch, lengths = probe.batch(3), probe.row_lengths(side)
    batched = probe.pad(batch, side, lengths, where)
    padded, real = probe.outputs(batched), probe.real(batched)
    together, alone = [], []
    for row, length in enumerate(lengths):
        shorter = batch.replace_ids(side, batch.ids[side][:, :length])
        alone.append(probe.outputs(shorter)[row : row + 1])
        together.append(padded[row][real[row]][None])
    # All rows at once: the outputs of one text may be a single number, without a deviation.
    detail = f"{probe.outputs_name} change by {{error}} when the {NAMES[side]} is padded"
    error = require_equal(probe, torch.cat(alone, 1), torch.cat(together, 1), detail)
    return "padding has no effect", error


def _padding_checks(
    side: Side, *, masked: str, needs: Sequence[str], end: str = "", stacks: Literal[1, 2]
) -> tuple[Check, Check]:
    """The checks of right padding and of left padding.

    Args:
        masked: the attention in which padding must be masked.
        needs: checks that right padding needs.
        end: the end of the text of `requirement`.
    """
    text = NAMES[side]
    prefix = "padding" if side == "ids" else f"{text} padding"
    declare = partial(check, stacks=stacks)
    right = declare(
        f"{prefix}, right",
        requirement=f"a padded {text} has the same outputs as without padding{end}",
        hint=f"Keys of padding are attended to: the mask is missing in {masked}, inverted, "
        "broadcast over the wrong dimension, or a finite penalty that is too small.",
        needs=needs,
    )
    left = declare(
        f"{prefix}, left",
        requirement=f"a {text} padded on the left has the same outputs as without padding{end}",
        hint="Positions must count real tokens only, and the padding mask must mask the left end.",
        needs=(f"{prefix}, right",),
    )
    check_right, check_left = (partial(_check_padding, side, where) for where in PADDING_SIDES)
    return right(check_right), left(check_left)


_AT_REAL = ", at its real positions"
source_padding = _padding_checks(
    "src",
    masked="the encoder's self-attention or in cross-attention",
    needs=("batch independence", "mask polarity"),
    stacks=2,
)
target_padding = _padding_checks(
    "tgt",
    masked="the decoder's self-attention",
    needs=("batch independence", "mask polarity", "causality"),
    end=_AT_REAL,
    stacks=2,
)
text_padding = _padding_checks(
    "ids",
    masked="the self-attention",
    needs=("batch independence", "mask polarity", "causality", "bidirectional attention"),
    end=_AT_REAL,
    stacks=1,
)


@check(
    "empty rows",
    requirement="a source that is only padding has finite logits and gradients, which do not "
    "depend on the padding",
    hint="A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the "
    "backward pass; a row of equal finite penalties attends to all padding evenly. Attention "
    "without a visible key must return zeros, without dividing by zero.",
    single_requirement="a row that is only padding has finite {outputs} and gradients, and "
    "changes no other row",
    single_hint="A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the "
    "backward pass. Attention without a visible key must return zeros, without dividing by zero.",
    needs=(
        "source padding, right",
        "padding, right",
    ),
)
def empty_rows(probe: Probe) -> Outcome:
    """Rows that are only padding, on each side that supports padding."""
    first = probe.sides[0]
    if reason := probe.no_padding_reason(first):
        raise Skipped(reason)
    for side in probe.sides:
        if probe.no_padding_reason(side) is None:
            _require_finite(probe, side)
    batch, width = probe.batch(2), probe.width(first)
    narrow, wide = (
        probe.outputs(probe.pad(batch, first, [width, 0], extra=extra)) for extra in (0, 3)
    )
    if probe.is_single_stack:
        detail = f"{probe.outputs_name} change by {{error}} in a batch with an empty row"
        error = require_equal(probe, probe.outputs(batch)[:1], wide[:1, :width], detail)
    else:
        detail = f"{probe.outputs_name} of an empty source change by {{error}} with its padding"
        error = require_equal(probe, narrow, wide, detail)
    return "finite forward and backward", error


@check(
    "no gradient from padding",
    requirement="the loss of the real {target}tokens has no gradient at padding",
    hint="The loss depends on padding although its value does not show it, or padding causes NaN "
    "in the backward pass (torch.where does not stop the gradient of the branch that is not "
    "selected).",
    needs=(
        "source padding, left",
        "target padding, left",
        "padding, left",
        "empty rows",
    ),
)
def padding_gradient(probe: Probe) -> Outcome:
    """The gradient of a loss of the real tokens with respect to the embeddings of padding."""
    checked = []
    for side in probe.sides:
        for where in PADDING_SIDES:
            if probe.no_padding_reason(side, where):
                continue
            batch = probe.pad(probe.batch(3), side, probe.row_lengths(side), where)
            gradient = _gradient_at_padding(probe, batch, side)
            if gradient is None:
                continue
            name = f"{NAMES[side]}, {where}"
            if gradient != 0:  # also true for NaN
                raise Failed(f"padding ({name}) has a gradient of {gradient:.1e}", gradient)
            checked.append(name)
    if not checked:
        reason = probe.no_padding_reason(probe.sides[0])
        raise Skipped(reason or "no embedding lookup of the ids was recorded")
    return f"none ({'; '.join(checked)})", 0.0


def _gradient_at_padding(probe: Probe, batch: NetInputs, side: Side) -> float | None:
    """See `gradient_beyond_rounding`: of a loss of the real tokens, at the padding of `side`."""
    real = probe.real(batch)

    def gradient_of(at: Probe) -> Tensor | None:
        return at.token_gradient(batch, side, partial(at.random_loss, real=real))

    return gradient_beyond_rounding(probe, gradient_of, probe.padding(batch, side))


def _require_finite(probe: Probe, side: Side) -> None:
    """Require finite outputs and gradients for a batch with an empty row of `side`."""
    empty = probe.pad(probe.batch(2), side, [probe.width(side), 0])
    outputs = probe.outputs(empty, grad=True)
    if not has_no_nan(outputs):
        raise Failed(f"{NAMES[side]} of length 0: {probe.outputs_name} with NaN or +inf")
    if not outputs.requires_grad:
        return  # reported by the check "gradient flow"
    probe.net.zero_grad(set_to_none=True)
    real = outputs[:1] if side == probe.output_side else outputs
    real.float().logsumexp(-1).mean().backward()
    if name := first_non_finite_gradient(probe.net):
        raise Failed(f"{NAMES[side]} of length 0: gradient of {name} is not finite")
