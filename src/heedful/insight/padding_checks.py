"""The checks of padding: what is not there must not be seen, on either side, nor make a NaN."""

import torch

from heedful.insight.checks import (
    batch_independence,
    check,
    distance,
    failed,
    passed,
    skipped,
    usable,
)
from heedful.insight.kind import NAMES, Side
from heedful.insight.lookups import Lookups
from heedful.insight.probe import PADDING_SIDES, PaddingSide, Probe
from heedful.insight.report import CheckResult
from heedful.insight.sight_checks import causality, mask_polarity, sees_both_sides

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
    "padding, right",
    "a padded text gives what the text alone gives, at its real positions",
    _PADDING_HINT.format(where="self-attention"),
    [batch_independence, mask_polarity, causality, sees_both_sides],
)
def padding_right(probe: Probe) -> CheckResult:
    return _padding_invariance(probe, "ids", "right")


@check(
    "padding, left",
    "a text padded on the left gives what the text alone gives, at its real positions",
    _LEFT_HINT,
    [padding_right],
)
def padding_left(probe: Probe) -> CheckResult:
    return _padding_invariance(probe, "ids", "left")


@check(
    "empty rows",
    "a row of padding alone gives finite logits and gradients, and sees nothing of its padding",
    "A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the backward "
    "pass; a row of equal large penalties attends to all padding evenly. Give zeros where there "
    "is nothing to attend to, before the softmax divides.",
    [source_padding_right, padding_right],
    single_holds="a row of padding alone gives finite {outputs} and gradients, and changes no "
    "other row",
    single_hint="A softmax over a row of -inf is NaN, and one NaN spreads to every weight in the "
    "backward pass. Give zeros where there is nothing to attend to, before the softmax divides.",
)
def empty_rows(probe: Probe) -> CheckResult:
    sides = [side for side in probe.kind.sides if probe.cannot_pad(side) is None]
    if probe.kind.sides[0] not in sides:
        return skipped(probe.cannot_pad(probe.kind.sides[0]) or "")
    for side in sides:
        if complaint := _not_finite(probe, side):
            return failed(f"{NAMES[side]} of length 0: {complaint}")
    batch, outputs = probe.batch(2), probe.kind.words["outputs"]
    if probe.kind.single:
        width = probe.width("ids")
        beside = probe.outputs(probe.padded(batch, "ids", [width, 0]))[:1, :width]
        error = distance(probe.outputs(batch)[:1], beside)
        if error > probe.tolerance:
            return failed(f"{outputs} change by {error:.1e} beside an empty row", error)
    else:
        lengths = [probe.width("src"), 0]
        narrow = probe.outputs(probe.padded(batch, "src", lengths, "right", extra=0))
        wide = probe.outputs(probe.padded(batch, "src", lengths, "right", extra=3))
        error = distance(narrow, wide)
        if error > probe.tolerance:
            seen = f"{outputs} of an empty source change by {error:.1e} with its padding"
            return failed(seen, error)
    return passed("finite forward and backward", error)


@check(
    "no gradient from padding",
    "the loss of the real {written}tokens has no gradient at positions of padding",
    "Padding reaches the loss by a way that its value does not show, or it makes NaN in the "
    "backward pass (torch.where does not stop the gradient of the branch that was not taken).",
    [source_padding_left, target_padding_left, padding_left, empty_rows],
)
def padding_gradient(probe: Probe) -> CheckResult:
    looked_at = []
    for side in probe.kind.sides:
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
    unpadded = probe.cannot_pad(probe.kind.sides[0])
    return skipped(unpadded or "no embedding lookup of the ids was seen")


def _padding_invariance(probe: Probe, side: Side, where: PaddingSide) -> CheckResult:
    if reason := probe.cannot_pad(side, where):
        return skipped(reason)
    batch = probe.batch(3)
    full = probe.width(side)
    lengths = [full, full - 1, full - 3]
    batched = probe.padded(batch, side, lengths, where)
    padded, real = probe.outputs(batched), probe.real(batched)
    pairs = []
    for row, length in enumerate(lengths):
        alone = batch.rows(slice(row, row + 1))
        alone = alone.replaced(side, alone.ids[side][:, :length])
        pairs.append((probe.outputs(alone), padded[row][real[row]][None]))
    # All rows together: what is of a whole text may be one number, which has no spread of its own.
    error = distance(*(torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True)))
    if error > probe.tolerance:
        outputs = probe.kind.words["outputs"]
        return failed(f"{outputs} change by {error:.1e} when the {NAMES[side]} is padded", error)
    return passed("padding changes nothing", error)


def _not_finite(probe: Probe, side: Side) -> str | None:
    """What is not finite where a row of `side` is empty."""
    empty = probe.padded(probe.batch(2), side, [probe.width(side), 0])
    outputs = probe.outputs_with_grad(empty)
    if not usable(outputs):
        return f"{probe.kind.words['outputs']} with NaN or +inf"
    if not outputs.requires_grad:
        return None  # gradient flow reports it
    probe.net.zero_grad(set_to_none=True)
    real = outputs[:1] if side == probe.written else outputs
    real.float().logsumexp(-1).mean().backward()
    for name, parameter in probe.net.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return f"gradient of {name} is not finite"
    return None


def _gradient_at_padding(probe: Probe, side: Side, where: PaddingSide) -> float | None:
    """The largest, NaN if there is one; None where the lookup of the ids cannot be seen."""
    full = probe.width(side)
    batch = probe.padded(probe.batch(3), side, [full, full - 1, full - 3], where)
    with Lookups() as lookups:
        outputs = probe.outputs_with_grad(batch)
    found = lookups.of(batch.ids[side])
    if found is None:
        return None
    loss = probe.random_loss(outputs, probe.real(batch))
    if not loss.requires_grad:
        return 0.0  # gradient flow reports it
    (gradient,) = torch.autograd.grad(loss, [found[1]], materialize_grads=True)
    return float(gradient[probe.padding(batch, side)].abs().max())
