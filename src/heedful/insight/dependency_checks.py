"""Checks of the shape of outputs, and of the inputs that they must or must not depend on."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.insight.checks import (
    Failed,
    Outcome,
    Skipped,
    check,
    distance,
    has_no_nan,
    influence,
    require_equal,
)
from heedful.insight.kind import Side
from heedful.insight.probe import NetInputs, Probe

POOLED = "the net has one output per text, not per position"


@check(
    "output shape",
    requirement="net(src (B, S), tgt (B, T)) returns finite logits (B, T, V), also for one row or "
    "one token",
    hint="Look for batch and sequence in the wrong order, heads split in the wrong order, a "
    "squeeze that also drops a batch of one, or an output that is a tuple; NaN usually "
    "comes from a softmax over a row that is fully masked.",
    single_requirement="net(ids (B, T)) returns finite {outputs} of the right shape, also for one "
    "row or one token",
)
def output_shape(probe: Probe) -> Outcome:
    """The shape for three rows, and for one row with one token."""
    sides = probe.sides
    single = NetInputs({side: probe.ids(side, 1, 2 if side == "src" else 1) for side in sides})
    # Logits of tokens have the size of the vocabulary; other outputs that of the first call.
    has_tokens = probe.output_kind == "tokens"
    width: int | None = probe.vocab_sizes[probe.output_side] if has_tokens else None
    letter = "C" if probe.output_kind == "classes" else "D"
    for batch in (probe.batch(3), single):
        with torch.no_grad():
            outputs = probe.call_net(batch)
        inputs = ", ".join(f"{side} {tuple(ids.shape)}" for side, ids in batch.ids.items())
        if not isinstance(outputs, Tensor):
            raise Failed(f"{inputs} gave a {type(outputs).__name__}, not a tensor")
        shape = tuple(outputs.shape)
        expected = (*batch.ids[probe.output_side].shape[: 1 if probe.is_pooled else 2], width)
        if len(shape) != len(expected) or shape != (*expected[:-1], width or shape[-1]):
            sizes = ", ".join(str(size or letter) for size in expected)
            raise Failed(f"{inputs} gave {shape}, not ({sizes})")
        if not outputs.is_floating_point():
            raise Failed(f"{inputs} gave {outputs.dtype}, not floating-point {probe.outputs_name}")
        if not has_no_nan(outputs):
            raise Failed(f"{inputs} gave {probe.outputs_name} with NaN or +inf")
        width = shape[-1]
    return f"{inputs} gave {shape}; larger batches are correct too", None


@check(
    "no dropout in evaluation",
    requirement="two calls in evaluation mode return the same {outputs}",
    hint="Functional dropout needs training=self.training, and scaled_dot_product_attention "
    "needs dropout_p=0 outside training; eval() does not reach a module that is not "
    "registered.",
    needs=("output shape",),
)
def deterministic(probe: Probe) -> Outcome:
    """Two calls in evaluation mode are compared, and two in training mode.

    Buffers that calls in training mode change (running statistics) are restored.
    """
    batch = probe.batch(3)
    training = [name for name, module in probe.net.named_modules() if module.training]
    more = f"; still in training mode: {', '.join(training)}" if training else ""
    first, second = probe.outputs(batch), probe.outputs(batch)
    error = require_equal(probe, first, second, f"two calls differ by {{error}}{more}")
    saved = [(buffer, buffer.clone()) for buffer in probe.net.buffers()]
    probe.net.train()
    try:
        error_in_training = distance(probe.outputs(batch), probe.outputs(batch))
    finally:
        probe.net.eval()
        for buffer, value in saved:
            buffer.copy_(value)
    differ = "differ" if error_in_training > probe.tolerance else "agree"
    return f"equal; in training mode two calls {differ}", error


@check(
    "batch independence",
    requirement="a batch of n has the {outputs} of n batches of one, in any order of rows",
    hint="Something is normalized or summed over the batch (BatchNorm, a norm over the wrong "
    "dimension), batch and sequence are mixed up in a view, or a module keeps state "
    "between calls.",
    needs=("no dropout in evaluation",),
)
def batch_independence(probe: Probe) -> Outcome:
    """A batch is compared with its rows one by one, and with the batch in another order."""
    batch = probe.batch(3)
    together = probe.outputs(batch)
    alone = torch.cat([probe.outputs(batch.select_rows(slice(row, row + 1))) for row in range(3)])
    order = torch.tensor([2, 0, 1], device=probe.device)
    permuted = probe.outputs(batch.select_rows(order))
    errors = {
        "as batches of one": distance(together, alone),
        "in another order": distance(together[order], permuted),
    }
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > probe.tolerance:
        raise Failed(f"rows differ by {errors[worst]:.1e} {worst}", errors[worst])
    return "rows do not depend on each other", errors[worst]


@check(
    "causality",
    requirement="{outputs} at a {target}position do not depend on later {target}tokens",
    hint="The causal mask is missing, transposed, aligned to the wrong corner or off by one, "
    "or has the opposite polarity (torch's MultiheadAttention: True = masked; "
    "scaled_dot_product_attention: True = may attend). The training loss is then too low, "
    "and decoding fails.",
    needs=("no dropout in evaluation",),
)
def causality(probe: Probe) -> Outcome:
    """Later tokens must have no effect on outputs, and get no gradient from them.

    Gradients also show effects that cancel in the outputs.
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

    def score_first_position(outputs: Tensor) -> Tensor:
        weights = torch.rand(outputs[:, 0].shape, generator=probe.generator).to(outputs)
        return (outputs[:, 0] * weights).sum()

    gradient = probe.token_gradient(probe.batch(3), probe.output_side, score_first_position)
    if gradient is None:
        return "later tokens have no effect (gradients unknown: no lookup was recorded)", error
    leak = float(gradient[:, 1:].abs().max() / gradient.abs().max().clamp(min=1e-30))
    if leak > 0:
        detail = f"{probe.outputs_name} at 0 have a gradient of {leak:.1e} from later tokens"
        raise Failed(detail, leak)
    return "later tokens have no effect and get no gradient", error


@check(
    "mask polarity",
    requirement="each target token changes the next logits, each source token changes all logits",
    hint="A mask is inverted, masks one token too many, or the decoder does not use the encoder's "
    "output. A head or a residual gate that is initialized with zeros has the same effect: "
    "train for a few steps first.",
    single_requirement="each token changes the {outputs} of others",
    single_hint="A mask is inverted or masks one token too many. A head or a residual gate that is "
    "initialized with zeros has the same effect: train for a few steps first.",
    needs=("no dropout in evaluation",),
    retry_in_double=True,
)
def mask_polarity(probe: Probe) -> Outcome:
    """All tokens within `NetKind.reach` must have an effect."""
    effects = influence(probe, probe.output_side)
    size = effects.size(1)
    if probe.is_pooled:
        return _require_all_used(probe, probe.output_side, effects[0, : (probe.reach or size) + 1])
    either = torch.maximum(effects.diagonal(1), effects.diagonal(-1))
    if probe.causal:
        offsets = _offsets(effects)
        nearest, later = float(effects.diagonal(-1).min()), float(effects.triu(1).max())
        if nearest <= probe.tolerance < later:
            name = probe.outputs_name
            raise Failed(f"{name} depend on later tokens, not on earlier ones: mask inverted")
        for reach in (1, probe.reach or size):
            where = (offsets > 0) & (offsets <= reach)
            _require_effects(probe, effects, where, f"{probe.terms['target']}token")
    else:
        _require_neighbor_effects(probe, either)
    if probe.is_single_stack:
        return "every token has an effect", float(either.min())
    detail, weakest = _require_all_used(probe, "src", influence(probe, "src").amin(0))
    return detail, min(weakest, float(either.min()))


@check(
    "bidirectional attention",
    requirement="{outputs} at a position depend on the tokens before it and on those after it",
    hint="An encoder has a causal mask, the padding mask masks one token too many, or a window "
    "is too narrow.",
    needs=("mask polarity",),
    stacks=1,
    retry_in_double=True,
)
def bidirectional_attention(probe: Probe) -> Outcome:
    """Earlier and later tokens must have an effect in an encoder."""
    if probe.causal:
        raise Skipped("a decoder: tokens must not attend to later ones")
    if probe.is_pooled:
        raise Skipped(POOLED)
    effects = influence(probe, "ids")
    offsets = _offsets(effects)
    near = offsets.abs() <= (probe.reach or effects.size(1))
    weakest = []
    for which, where in (("later", offsets < 0), ("earlier", offsets > 0)):
        if float(effects[where].max()) <= probe.tolerance:
            raise Failed(f"no {which} token changes the {probe.outputs_name} at any position")
        weakest.append(_require_effects(probe, effects, where & near, "token"))
    return "earlier and later tokens change the outputs", min(weakest)


@check(
    "position awareness",
    requirement="the same tokens in another order have other {outputs}",
    hint="Positions are not added, are added too late, or are equal for all tokens.",
    needs=(
        "mask polarity",
        "bidirectional attention",
    ),
    retry_in_double=True,
)
def position_awareness(probe: Probe) -> Outcome:
    """Two adjacent tokens are swapped, next to the last position, so that windows contain both."""
    batch = probe.batch(3)
    outputs, ids = probe.outputs(batch), batch.ids[probe.output_side]
    swaps = []
    for pair in [[-3, -2], [1, 2]] if probe.is_pooled else [[-3, -2]]:
        swapped = ids.clone()
        swapped[:, pair] = ids[:, pair[::-1]]
        other = probe.outputs(batch.replace_ids(probe.output_side, swapped))
        swaps.append(distance(outputs[:, -1:], other[:, -1:]))
    effect = max(swaps)
    if probe.is_single_stack:
        if effect <= probe.tolerance:
            detail = f"reordering tokens does not change the {probe.outputs_name} of others"
            raise Failed(detail, effect)
        return f"reordering tokens changes the {probe.outputs_name} of others", effect
    rolled = distance(outputs, probe.outputs(batch.replace_ids("src", batch.ids["src"].roll(1, 1))))
    if rolled <= probe.tolerance:
        raise Failed("reordering the source changes nothing", rolled)
    if effect <= probe.tolerance:
        raise Failed("reordering earlier target tokens does not change the last logits", effect)
    return "reordering source or target changes the logits", min(rolled, effect)


def _offsets(effects: Float[Tensor, "T T"]) -> Int[Tensor, "T T"]:
    """[i, j]: i - j, the distance of token j before position i."""
    positions = torch.arange(effects.size(1), device=effects.device)
    return positions[:, None] - positions


def _require_effects(
    probe: Probe, effects: Float[Tensor, "T T"], where: Bool[Tensor, "T T"], token_name: str
) -> float:
    """The smallest effect at the True entries of `where`; `Failed` if it is within rounding."""
    selected = effects.masked_fill(~where, torch.inf)
    position, token = divmod(int(selected.argmin()), effects.size(1))
    if float(selected.min()) <= probe.tolerance:
        name = probe.outputs_name
        raise Failed(f"{token_name} {token} does not change the {name} at {position}")
    return float(selected.min())


def _require_neighbor_effects(probe: Probe, either: Float[Tensor, "N"]) -> None:
    """Require, for an encoder, that of two adjacent tokens one changes the output at the other.

    `either` are the larger effects of the two directions.
    """
    name = probe.outputs_name
    if float(either.max()) <= probe.tolerance:
        if _padding_has_effect(probe, "ids"):
            raise Failed(f"padding changes the {name}, other real tokens do not: mask inverted")
        raise Failed(f"no token changes the {name} of others")
    if float(either.min()) <= probe.tolerance:
        token = int(either.argmin())
        raise Failed(f"tokens {token} and {token + 1} do not change each other's {name}")


def _require_all_used(probe: Probe, side: Side, effects: Float[Tensor, "J"]) -> tuple[str, float]:
    """Require an effect of every token of a side; `effects` are their smallest effects."""
    weakest, name = float(effects.min()), probe.outputs_name
    if weakest > probe.tolerance:
        return "every token has an effect", weakest
    input_name = "source" if side == "src" else "text"
    none = float(effects.max()) <= probe.tolerance
    # A pooled output depends on the token whose state it is read from even with an inverted mask.
    if (none or probe.is_pooled) and _padding_has_effect(probe, side):
        raise Failed(f"{input_name} padding changes the {name}, real tokens do not: mask inverted")
    token = "source token" if side == "src" else "token"
    unused = f"the {input_name}" if none else f"{token} {int(effects.argmin())}"
    raise Failed(f"{unused} does not change the {name}")


def _padding_has_effect(probe: Probe, side: Side) -> bool:
    """True if the amount of padding changes the outputs at real tokens."""
    if probe.no_padding_reason(side) is not None:
        return False
    batch, lengths = probe.batch(3), [probe.width(side) - 2] * 3
    few, many = (probe.pad(batch, side, lengths, extra=extra) for extra in (0, 3))
    outputs = [probe.outputs(padded)[probe.real(padded)][None] for padded in (few, many)]
    return distance(*outputs) > probe.tolerance
