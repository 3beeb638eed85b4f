"""The checks of padding: what is not there must not be seen, on either side, nor make a NaN."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from heedful.insight.checks import (
    Check,
    Failed,
    Seen,
    Skipped,
    check,
    must_equal,
    not_finite,
    usable,
)
from heedful.insight.kind import NAMES, Side
from heedful.insight.probe import PADDING_SIDES, Probe
from heedful.parts.tokens import PaddingSide


def _changes_nothing(side: Side, where: PaddingSide, probe: Probe) -> Seen:
    """A batch of padded rows = its rows without padding."""
    if reason := probe.cannot_pad(side, where):
        raise Skipped(reason)
    batch, lengths = probe.batch(3), probe.ragged(side)
    batched = probe.padded(batch, side, lengths, where)
    padded, real = probe.outputs(batched), probe.real(batched)
    together, alone = [], []
    for row, length in enumerate(lengths):
        single = batch.rows(slice(row, row + 1))
        alone.append(probe.outputs(single.replaced(side, single.ids[side][:, :length])))
        together.append(padded[row][real[row]][None])
    # All rows at once: what is of a whole text may be one number, which has no spread.
    changed = f"{probe.outputs_name} change by {{error}} when the {NAMES[side]} is padded"
    error = must_equal(probe, torch.cat(alone, 1), torch.cat(together, 1), changed)
    return "padding changes nothing", error


def _padding_checks(
    side: Side, *, masked: str, needs: Sequence[str], end: str = "", stacks: Literal[1, 2]
) -> tuple[Check, Check]:
    """The checks of padding on the right and on the left.

    Args:
        masked: the attention that must not see it.
        needs: checks that the one on the right needs.
        end: what `holds` says besides.
    """
    text = NAMES[side]
    prefix = "padding" if side == "ids" else f"{text} padding"
    declare = partial(check, stacks=stacks)
    right = declare(
        f"{prefix}, right",
        holds=f"a padded {text} gives what the {text} alone gives{end}",
        hint=f"Keys of padding are attended to: the mask is missing in {masked}, of the other "
        "polarity, broadcast over the wrong dimension, or a finite penalty that is too small.",
        needs=needs,
    )
    left = declare(
        f"{prefix}, left",
        holds=f"a {text} padded on the left gives what the {text} alone gives{end}",
        hint="Positions must count real tokens, so that left padding moves none of them; and the "
        "padding mask must mark the left end.",
        needs=(f"{prefix}, right",),
    )
    ask_right, ask_left = (partial(_changes_nothing, side, where) for where in PADDING_SIDES)
    return right(ask_right), left(ask_left)


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
    needs=("batch independence", "mask polarity", "causality", "sees both sides"),
    end=_AT_REAL,
    stacks=1,
)


@check(
    "empty rows",
    holds="a row of padding alone gives finite logits and gradients, and sees nothing of its "
    "padding",
    hint="A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the "
    "backward pass; a row of equal large penalties attends to all padding evenly. Give "
    "zeros where there is nothing to attend to, before the softmax divides.",
    single_holds="a row of padding alone gives finite {outputs} and gradients, and changes no "
    "other row",
    single_hint="A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the "
    "backward pass. Give zeros where there is nothing to attend to, before the softmax "
    "divides.",
    needs=(
        "source padding, right",
        "padding, right",
    ),
)
def empty_rows(probe: Probe) -> Seen:
    """A row of padding alone, on each side that can be padded."""
    first = probe.sides[0]
    if reason := probe.cannot_pad(first):
        raise Skipped(reason)
    for side in probe.sides:
        if probe.cannot_pad(side) is None:
            _must_be_finite(probe, side)
    batch, width = probe.batch(2), probe.width(first)
    narrow, wide = (
        probe.outputs(probe.padded(batch, first, [width, 0], extra=extra)) for extra in (0, 3)
    )
    if probe.single:
        beside = f"{probe.outputs_name} change by {{error}} beside an empty row"
        error = must_equal(probe, probe.outputs(batch)[:1], wide[:1, :width], beside)
    else:
        seen = f"{probe.outputs_name} of an empty source change by {{error}} with its padding"
        error = must_equal(probe, narrow, wide, seen)
    return "finite forward and backward", error


@check(
    "no gradient from padding",
    holds="the loss of the real {written}tokens has no gradient at positions of padding",
    hint="Padding reaches the loss by a way that its value does not show, or it makes NaN in "
    "the backward pass (torch.where does not stop the gradient of the branch that was not "
    "taken).",
    needs=(
        "source padding, left",
        "target padding, left",
        "padding, left",
        "empty rows",
    ),
)
def padding_gradient(probe: Probe) -> Seen:
    """The loss of real tokens has no gradient at padding."""
    looked_at = []
    for side in probe.sides:
        for where in PADDING_SIDES:
            if probe.cannot_pad(side, where):
                continue
            batch = probe.padded(probe.batch(3), side, probe.ragged(side), where)
            real = probe.real(batch)
            found = probe.token_gradient(batch, side, partial(probe.random_loss, real=real))
            if found is None:
                continue
            place = f"{NAMES[side]}, {where}"
            gradient = float(found[probe.padding(batch, side)].abs().max())
            if gradient != 0:  # also true of NaN
                raise Failed(f"padding ({place}) has a gradient of {gradient:.1e}", gradient)
            looked_at.append(place)
    if not looked_at:
        unpadded = probe.cannot_pad(probe.sides[0])
        raise Skipped(unpadded or "no embedding lookup of the ids was seen")
    return f"none ({'; '.join(looked_at)})", 0.0


def _must_be_finite(probe: Probe, side: Side) -> None:
    """Outputs and gradients where a row of `side` is empty."""
    empty = probe.padded(probe.batch(2), side, [probe.width(side), 0])
    outputs = probe.outputs(empty, grad=True)
    if not usable(outputs):
        raise Failed(f"{NAMES[side]} of length 0: {probe.outputs_name} with NaN or +inf")
    if not outputs.requires_grad:
        return  # gradient flow reports it
    probe.net.zero_grad(set_to_none=True)
    real = outputs[:1] if side == probe.written else outputs
    real.float().logsumexp(-1).mean().backward()
    if name := not_finite(probe.net):
        raise Failed(f"{NAMES[side]} of length 0: gradient of {name} is not finite")
