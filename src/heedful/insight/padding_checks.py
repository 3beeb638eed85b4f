"""The checks of padding: what is not there must not be seen, on either side, nor make a NaN."""

import torch
from jaxtyping import Bool
from torch import Tensor

from heedful.insight.checks import (
    batch_independence,
    causality,
    check,
    distance,
    failed,
    mask_polarity,
    passed,
    skipped,
    usable,
)
from heedful.insight.probe import (
    IGNORED,
    NAMES,
    PADDING_SIDES,
    Batch,
    Lookups,
    PaddingSide,
    Probe,
    Side,
    loss_of,
)
from heedful.insight.report import CheckResult

_PADDING_HINT = (
    "Keys of padding are attended to: the mask is missing in the {where}, of the other polarity, "
    "broadcast over the wrong dimension, or a finite penalty that is too small."
)
_LEFT_HINT = (
    "Positions must count real tokens, so that left padding moves none of them; and the padding "
    "mask must mark the left end."
)


@check(
    "source padding, right",
    "a padded source gives what the source alone gives",
    _PADDING_HINT.format(where="encoder's self-attention or in cross-attention"),
    [batch_independence, mask_polarity],
)
def source_padding_right(probe: Probe) -> CheckResult:
    return _padding_invariance(probe, "src", "right")


@check(
    "source padding, left",
    "a source padded on the left gives what the source alone gives",
    _LEFT_HINT,
    [source_padding_right],
)
def source_padding_left(probe: Probe) -> CheckResult:
    return _padding_invariance(probe, "src", "left")


@check(
    "target padding, right",
    "a padded target gives what the target alone gives, at its real positions",
    _PADDING_HINT.format(where="decoder's self-attention"),
    [batch_independence, mask_polarity, causality],
)
def target_padding_right(probe: Probe) -> CheckResult:
    return _padding_invariance(probe, "tgt", "right")


@check(
    "target padding, left",
    "a target padded on the left gives what the target alone gives, at its real positions",
    _LEFT_HINT,
    [target_padding_right],
)
def target_padding_left(probe: Probe) -> CheckResult:
    return _padding_invariance(probe, "tgt", "left")


@check(
    "empty rows",
    "a row of padding alone gives finite logits and gradients, and sees nothing of its padding",
    "A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the backward "
    "pass; a row of equal large penalties attends to all padding evenly. Give zeros where there "
    "is nothing to attend to, before the softmax divides.",
    [source_padding_right],
)
def empty_rows(probe: Probe) -> CheckResult:
    if reason := probe.cannot_pad("src"):
        return skipped(reason)
    batch = probe.batch(2)
    for side in ("src", "tgt"):
        if side == "tgt" and probe.cannot_pad("tgt"):
            continue
        empty = probe.padded(batch, side, [getattr(batch, side).size(1), 0], "right")
        logits = probe.logits_with_grad(empty)
        if not usable(logits):
            return failed(f"{NAMES[side]} of length 0: logits with NaN or +inf")
        if not logits.requires_grad:
            continue  # gradient flow reports it
        probe.net.zero_grad(set_to_none=True)
        real = logits if side == "src" else logits[:1]
        real.float().logsumexp(-1).mean().backward()
        for name, parameter in probe.net.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                return failed(f"{NAMES[side]} of length 0: gradient of {name} is not finite")
    lengths = [probe.src_width, 0]
    narrow = probe.logits(probe.padded(batch, "src", lengths, "right", extra=0))
    wide = probe.logits(probe.padded(batch, "src", lengths, "right", extra=3))
    error = distance(narrow, wide)
    if error > probe.tolerance:
        return failed(f"logits of an empty source change by {error:.1e} with its padding", error)
    return passed("finite forward and backward", error)


@check(
    "no gradient from padding",
    "the loss of the real target tokens has no gradient at positions of padding",
    "Padding reaches the loss by a way that its value does not show, or it makes NaN in the "
    "backward pass (torch.where does not stop the gradient of the branch that was not taken).",
    [source_padding_left, target_padding_left, empty_rows],
)
def padding_gradient(probe: Probe) -> CheckResult:
    looked_at = []
    for side in NAMES:
        for where in PADDING_SIDES:
            if probe.cannot_pad(side, where):
                continue
            gradient = _gradient_at_padding(probe, side, where)
            if gradient is None:
                continue
            place = f"{NAMES[side]}, {where}"
            if gradient != 0:  # also true of NaN
                return failed(f"padding ({place}) has a gradient of {gradient:.1e}", gradient)
            looked_at.append(place)
    if looked_at:
        return passed(f"none ({'; '.join(looked_at)})", 0.0)
    return skipped(probe.cannot_pad("src") or "no embedding lookup of the ids was seen")


def _padding_invariance(probe: Probe, side: Side, where: PaddingSide) -> CheckResult:
    if reason := probe.cannot_pad(side, where):
        return skipped(reason)
    batch = probe.batch(3)
    full = getattr(batch, side).size(1)
    lengths = [full, full - 1, full - 3]
    padded = probe.logits(probe.padded(batch, side, lengths, where))
    errors = []
    for row, length in enumerate(lengths):
        src, tgt = batch.src[row : row + 1], batch.tgt[row : row + 1]
        got = padded[row : row + 1]
        if side == "src":
            src = src[:, :length]
        else:
            tgt = tgt[:, :length]
            got = got[:, :length] if where == "right" else got[:, -length:]
        errors.append(distance(probe.logits(Batch(src, tgt)), got))
    error = max(errors)
    if error > probe.tolerance:
        return failed(f"logits change by {error:.1e} when the {NAMES[side]} is padded", error)
    return passed("padding changes nothing", error)


def _gradient_at_padding(probe: Probe, side: Side, where: PaddingSide) -> float | None:
    """The largest, NaN if there is one; None where the lookup of the ids cannot be seen."""
    batch = probe.batch(3)
    full = getattr(batch, side).size(1)
    batch = probe.padded(batch, side, [full, full - 1, full - 3], where)
    with Lookups() as lookups:
        logits = probe.logits_with_grad(batch)
    found = lookups.of(getattr(batch, side))
    if found is None:
        return None
    labels = probe.ids("tgt", *batch.tgt.shape)
    if side == "tgt":
        labels = labels.masked_fill(_padding(batch, side), IGNORED)
    loss = loss_of(logits, labels)
    (gradient,) = torch.autograd.grad(loss, [found[1]], materialize_grads=True)
    return float(gradient[_padding(batch, side)].abs().max())


def _padding(batch: Batch, side: Side) -> Bool[Tensor, "B T"]:
    """True where `side` is padding."""
    lengths: Tensor = getattr(batch, f"{side}_lengths")
    columns = torch.arange(getattr(batch, side).size(1), device=lengths.device)
    if batch.padding_side == "left":
        columns = columns.flip(0)
    return columns >= lengths[:, None]
