"""The checks of padding: what is not there must not be seen, on either side, nor make a NaN."""

from functools import partial

import torch

from heedful.insight.checks import Failed, Seen, Skipped, asks, must_equal, not_finite, usable
from heedful.insight.kind import NAMES, Side
from heedful.insight.probe import PADDING_SIDES, Probe
from heedful.parts.tokens import PaddingSide


def _padding(side: Side, where: PaddingSide, probe: Probe) -> Seen:
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


for _where in PADDING_SIDES:
    asks(f"source padding, {_where}")(partial(_padding, "src", _where))
    asks(f"target padding, {_where}")(partial(_padding, "tgt", _where))
    asks(f"padding, {_where}")(partial(_padding, "ids", _where))


@asks("empty rows")
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


@asks("no gradient from padding")
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
