"""The check that outputs do not depend on later tokens."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.insight.checks import (
    POOLED,
    Failed,
    Outcome,
    Skipped,
    check,
    distance,
    distances,
    gradient_beyond_rounding,
    influence,
)
from heedful.insight.probe import NetInputs, Probe

# Nets of up to this many parameters are tested at every position of a long text, others at some.
_SMALL_NET = 5_000_000
_ELEMENTS = 1 << 16  # of the outputs that are computed at once


@check(
    "causality",
    requirement="{outputs} at a {target}position do not depend on later {target}tokens",
    hint="The causal mask is missing, transposed, aligned to the wrong corner or off by one, "
    "or has the opposite polarity (torch's MultiheadAttention: True = masked; "
    "scaled_dot_product_attention: True = may attend). The training loss is then too low, "
    "and decoding fails.",
    needs=("no dropout in evaluation",),
    retry_in_double=True,
)
def causality(probe: Probe) -> Outcome:
    """Later tokens must have no effect on outputs, and get no gradient from them.

    All pairs of tokens of a short text, then all distances in a long one. Gradients also show
    effects that cancel in the outputs.
    """
    if not probe.causal:
        raise Skipped("an encoder: tokens may attend to later ones")
    if probe.is_pooled:
        raise Skipped(POOLED)
    effects = influence(probe, probe.output_side).triu(1)  # only later tokens
    error = float(effects.max())
    if error > probe.tolerance:
        position, token = divmod(int(effects.argmax()), effects.size(1))
        detail = f"{probe.outputs_name} at {position} change by {error:.1e} with token {token}"
        raise Failed(detail, error)
    error = max(error, _require_no_effect_from_afar(probe))
    length, seen = probe.long_length, True
    for batch, position in (
        (probe.batch(3), 0),
        *((probe.long_batch(2), position) for position in (0, length // 3, length - 2)),
    ):
        leak = _gradient_from_later(probe, batch, position)
        seen = seen and leak is not None
        if leak:  # also true for NaN
            name = probe.outputs_name
            detail = f"{name} at {position} have a gradient of {leak:.1e} from later tokens"
            raise Failed(detail, leak)
    gradients = "get no gradient" if seen else "gradients are unknown: no lookup was recorded"
    return f"later tokens have no effect and {gradients}, in {probe.at_lengths}", error


def _require_no_effect_from_afar(probe: Probe) -> float:
    """Replace the tokens from each position on, and remove them, in a long text.

    Returns the largest effect on the outputs before; raises `Failed` above the tolerance.
    """
    side, name = probe.output_side, probe.outputs_name
    batch = probe.long_batch(2)
    ids, outputs = batch.ids[side], probe.outputs(batch)
    other_ids, length = probe.other_tokens(side, ids), ids.size(1)
    small = sum(p.numel() for p in probe.net.parameters()) <= _SMALL_NET
    splits = range(1, length, 1 if small else max(1, length // 16))
    worst = _largest_effect(probe, batch, outputs, other_ids, splits)
    if worst > probe.tolerance:  # also where rows depend on each other, as another check reports
        worst = _require_no_effect(probe, batch, outputs, other_ids, splits)
    for kept in {length // 2, length - 1}:
        prefix = probe.outputs(batch.replace_ids(side, ids[:, :kept]))
        worst = max(worst, error := distance(outputs[:, :kept], prefix))
        if error > probe.tolerance:
            detail = f"{name} change by {error:.1e} when tokens {kept} and later are removed"
            raise Failed(detail, error)
    return worst


def _largest_effect(
    probe: Probe,
    batch: NetInputs,
    outputs: Float[Tensor, "B P V"],
    other_ids: Int[Tensor, "B T"],
    splits: range,
) -> float:
    """The largest effect on outputs of the tokens from each split on, of many splits at once.

    Infinite in the first batch that has one above the tolerance.
    """
    side, rows = probe.output_side, outputs.size(0)
    at_once, worst = max(1, _ELEMENTS // outputs.numel()), 0.0
    for first in range(0, len(splits), at_once):
        places = torch.tensor(splits[first : first + at_once], device=outputs.device)
        starts = places.repeat_interleave(rows)[:, None]
        copies = torch.arange(rows, device=outputs.device).repeat(len(places))
        many, expected = batch.select_rows(copies), outputs[copies]
        is_before = torch.arange(other_ids.size(1), device=outputs.device) < starts
        changed = torch.where(is_before, many.ids[side], other_ids[copies])
        actual = probe.outputs(many.replace_ids(side, changed))
        error = distance(expected, torch.where(is_before[..., None], actual, expected))
        if error > probe.tolerance:
            return math.inf
        worst = max(worst, error)
    return worst


def _require_no_effect(
    probe: Probe,
    batch: NetInputs,
    outputs: Float[Tensor, "B P V"],
    other_ids: Int[Tensor, "B T"],
    splits: range,
) -> float:
    """`_largest_effect` of one split at a time; raises `Failed` with the position and the token."""
    side, name = probe.output_side, probe.outputs_name
    ids, length, worst = batch.ids[side], other_ids.size(1), 0.0

    def effects_of(first: int, last: int) -> Float[Tensor, "P"]:
        changed = ids.clone()
        changed[:, first:last] = other_ids[:, first:last]
        return distances(outputs, probe.outputs(batch.replace_ids(side, changed)))

    for split in splits:
        effects = effects_of(split, length)[:split]
        worst = max(worst, error := float(effects.max()))
        if error > probe.tolerance:
            position = int(effects.argmax())
            singly = [float(effects_of(j, j + 1)[position]) for j in range(split, length)]
            strongest = max(singly)
            which = f"token {split + singly.index(strongest)}"
            if strongest <= probe.tolerance:
                which = f"tokens {split} and later"
            raise Failed(f"{name} at {position} change by {error:.1e} with {which}", error)
    return worst


def _gradient_from_later(probe: Probe, batch: NetInputs, position: int) -> float | None:
    """See `gradient_beyond_rounding`: of the outputs at a position, at later tokens."""
    side = probe.output_side

    def score(outputs: Tensor) -> Tensor:
        here = outputs[:, position]
        weights = torch.rand(here.shape, generator=probe.generator).to(here)
        return (here * weights).nan_to_num(neginf=0.0).sum()

    def gradient_of(at: Probe) -> Tensor | None:
        return at.token_gradient(batch, side, score)

    later = torch.zeros_like(batch.ids[side], dtype=torch.bool)
    later[:, position + 1 :] = True
    return gradient_beyond_rounding(probe, gradient_of, later)
