"""The checks of outputs: their shape, what they depend on, and what they must not depend on."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.insight.checks import (
    Failed,
    Seen,
    Skipped,
    check,
    distance,
    influence,
    must_equal,
    usable,
)
from heedful.insight.kind import Side
from heedful.insight.probe import Batch, Probe

ONE_FOR_ALL = "the net has one output a text, which stands at no position"


@check(
    "output shape",
    holds="net(src (B, S), tgt (B, T)) gives finite logits (B, T, V), also for one row or one "
    "token",
    hint="Look for batch and sequence in the wrong order, heads split in the wrong order, a "
    "squeeze that also drops a batch of one, or an output that is a tuple; NaN usually "
    "comes from a softmax over a row that is masked as a whole.",
    single_holds="net(ids (B, T)) gives finite {outputs}, in the batch's shape, also for one row "
    "or one token",
)
def output_shape(probe: Probe) -> Seen:
    """Also of one row with one token."""
    sides = probe.sides
    single = Batch({side: probe.ids(side, 1, 2 if side == "src" else 1) for side in sides})
    # Of tokens it is the vocabulary; the others' is what the first call gives.
    width: int | None = probe.vocab_sizes[probe.written] if probe.output_kind == "tokens" else None
    letter = "C" if probe.output_kind == "classes" else "D"
    for batch in (probe.batch(3), single):
        with torch.no_grad():
            found = probe.raw(batch)
        called = ", ".join(f"{side} {tuple(ids.shape)}" for side, ids in batch.ids.items())
        if not isinstance(found, Tensor):
            raise Failed(f"{called} gave a {type(found).__name__}, not a tensor")
        shape = tuple(found.shape)
        wanted = (*batch.ids[probe.written].shape[: 1 if probe.of_text else 2], width)
        if len(shape) != len(wanted) or shape != (*wanted[:-1], width or shape[-1]):
            shown = ", ".join(str(size or letter) for size in wanted)
            raise Failed(f"{called} gave {shape}, not ({shown})")
        if not found.is_floating_point():
            raise Failed(f"{called} gave {found.dtype}, not floating-point {probe.outputs_name}")
        if not usable(found):
            raise Failed(f"{called} gave {probe.outputs_name} with NaN or +inf")
        width = shape[-1]
    return f"{called} gave {shape}, and larger batches likewise", None


@check(
    "dropout off in evaluation",
    holds="two calls in evaluation mode give the same {outputs}",
    hint="Functional dropout needs training=self.training, and scaled_dot_product_attention "
    "needs dropout_p=0 outside training; a module that is not registered does not hear of "
    "eval().",
    needs=("output shape",),
)
def deterministic(probe: Probe) -> Seen:
    """Dropout is off in evaluation mode; running statistics, which training moves, are put back."""
    batch = probe.batch(3)
    awake = [name for name, module in probe.net.named_modules() if module.training]
    more = f"; still in training mode: {', '.join(awake)}" if awake else ""
    first, second = probe.outputs(batch), probe.outputs(batch)
    error = must_equal(probe, first, second, f"two calls differ by {{error}}{more}")
    saved = [(buffer, buffer.clone()) for buffer in probe.net.buffers()]
    probe.net.train()
    try:
        apart = distance(probe.outputs(batch), probe.outputs(batch))
    finally:
        probe.net.eval()
        for buffer, value in saved:
            buffer.copy_(value)
    differ = "differ" if apart > probe.tolerance else "agree"
    return f"equal; in training mode two calls {differ}", error


@check(
    "batch independence",
    holds="a batch of n gives what n batches of one give, in any order of rows",
    hint="Something is normalised or summed over the batch (BatchNorm, a norm over the wrong "
    "dimension), batch and sequence are mixed up in a view, or a module keeps state "
    "between calls.",
    needs=("dropout off in evaluation",),
)
def batch_independence(probe: Probe) -> Seen:
    """A batch of n = n batches of one = the batch in another order."""
    batch = probe.batch(3)
    together = probe.outputs(batch)
    apart = torch.cat([probe.outputs(batch.rows(slice(row, row + 1))) for row in range(3)])
    order = torch.tensor([2, 0, 1], device=probe.device)
    moved = probe.outputs(batch.rows(order))
    errors = {
        "alone": distance(together, apart),
        "in another order": distance(together[order], moved),
    }
    which = max(errors, key=lambda name: errors[name])
    if errors[which] > probe.tolerance:
        raise Failed(f"rows differ by {errors[which]:.1e} when given {which}", errors[which])
    return "rows do not depend on each other", errors[which]


@check(
    "causality",
    holds="{outputs} at a {written}position do not depend on later {written}tokens",
    hint="The causal mask is missing, transposed, aligned to the wrong corner or off by one, "
    "or it is of the other polarity (torch's MultiheadAttention: True = hidden; "
    "scaled_dot_product_attention: True = may attend). Training then looks too good and "
    "decoding fails.",
    needs=("dropout off in evaluation",),
)
def causality(probe: Probe) -> Seen:
    """By values, and by gradients, which show what cancels in the values."""
    if not probe.causal:
        raise Skipped("an encoder: every token may see later ones")
    if probe.of_text:
        raise Skipped(ONE_FOR_ALL)
    effects = influence(probe, probe.written).triu(1)  # [i, j]: of token j on the outputs at i < j
    error = float(effects.max())
    if error > probe.tolerance:
        position, token = divmod(int(effects.argmax()), effects.size(1))
        seen = f"{probe.outputs_name} at {position} change by {error:.1e} with token {token}"
        raise Failed(seen, error)

    def of_first(outputs: Tensor) -> Tensor:
        weights = torch.rand(outputs[:, 0].shape, generator=probe.generator).to(outputs)
        return (outputs[:, 0] * weights).sum()

    gradient = probe.token_gradient(probe.batch(3), probe.written, of_first)
    if gradient is None:
        return "later tokens change nothing (no lookup seen to take gradients of)", error
    leak = float(gradient[:, 1:].abs().max() / gradient.abs().max().clamp(min=1e-30))
    if leak > 0:
        seen = f"{probe.outputs_name} at 0 have a gradient of {leak:.1e} from later tokens"
        raise Failed(seen, leak)
    return "later tokens change nothing and get no gradient", error


@check(
    "mask polarity",
    holds="each target token changes the next logits, each source token changes all logits",
    hint="A mask is used the wrong way round (it hides what it should show), hides one token "
    "too many, or the encoder's output never reaches the decoder. A head or a residual "
    "gate that starts at exactly zero looks the same: take a few training steps first.",
    single_holds="each token changes the {outputs} of others",
    single_hint="A mask is used the wrong way round (it hides what it should show), or hides one "
    "token too many. A head or a residual gate that starts at exactly zero looks the "
    "same: take a few training steps first.",
    needs=("dropout off in evaluation",),
    delicate=True,
)
def mask_polarity(probe: Probe) -> Seen:
    """What must be seen is seen: of a window only the nearest tokens are asked for."""
    effects = influence(probe, probe.written)
    size = effects.size(1)
    if probe.of_text:
        return _each_is_used(probe, probe.written, effects[0, : (probe.reach or size) + 1])
    either = torch.maximum(effects.diagonal(1), effects.diagonal(-1))
    if probe.causal:
        before = _before(effects)
        nearest, later = float(effects.diagonal(-1).min()), float(effects.triu(1).max())
        if nearest <= probe.tolerance < later:
            name = probe.outputs_name
            raise Failed(f"{name} follow later tokens and not those before: mask inverted")
        for reach in (1, probe.reach or size):
            where = (before > 0) & (before <= reach)
            _must_be_used(probe, effects, where, f"{probe.words['written']}token")
    else:
        _neighbours_are_used(probe, either)
    if probe.single:
        return "every token is made use of", float(either.min())
    seen, weakest = _each_is_used(probe, "src", influence(probe, "src").amin(0))
    return seen, min(weakest, float(either.min()))


@check(
    "sees both sides",
    holds="{outputs} at a position depend on the tokens before it and on those after it",
    hint="A causal mask is left in an encoder, the padding mask hides one token too many, or a "
    "window is narrower than it should be.",
    needs=("mask polarity",),
    stacks=1,
    delicate=True,
)
def sees_both_sides(probe: Probe) -> Seen:
    """Of an encoder's position."""
    if probe.causal:
        raise Skipped("a decoder: no token may see later ones")
    if probe.of_text:
        raise Skipped(ONE_FOR_ALL)
    effects = influence(probe, "ids")
    before = _before(effects)
    near = before.abs() <= (probe.reach or effects.size(1))
    found = []
    for which, where in (("later", before < 0), ("earlier", before > 0)):
        if float(effects[where].max()) <= probe.tolerance:
            raise Failed(f"no {which} token changes the {probe.outputs_name} at any position")
        found.append(_must_be_used(probe, effects, where & near, "token"))
    return "earlier and later tokens change the outputs", min(found)


@check(
    "position awareness",
    holds="the same tokens in another order give other {outputs}",
    hint="Positions are not added, are added after they were needed, or are the same for every "
    "token.",
    needs=(
        "mask polarity",
        "sees both sides",
    ),
    delicate=True,
)
def position_awareness(probe: Probe) -> Seen:
    """Two neighbours change places, seen from next to them: a window cannot hide them both."""
    batch = probe.batch(3)
    outputs, ids = probe.outputs(batch), batch.ids[probe.written]
    swaps = []
    for pair in [[-3, -2], [1, 2]] if probe.of_text else [[-3, -2]]:
        swapped = ids.clone()
        swapped[:, pair] = ids[:, pair[::-1]]
        other = probe.outputs(batch.replaced(probe.written, swapped))
        swaps.append(distance(outputs[:, -1:], other[:, -1:]))
    moved = max(swaps)
    if probe.single:
        if moved <= probe.tolerance:
            seen = f"reordering tokens does not change the {probe.outputs_name} of others"
            raise Failed(seen, moved)
        return f"reordering tokens changes the {probe.outputs_name} of others", moved
    rolled = distance(outputs, probe.outputs(batch.replaced("src", batch.ids["src"].roll(1, 1))))
    if rolled <= probe.tolerance:
        raise Failed("reordering the source changes nothing", rolled)
    if moved <= probe.tolerance:
        raise Failed("reordering earlier target tokens does not change the last logits", moved)
    return "reordering source or target changes the logits", min(rolled, moved)


def _before(effects: Float[Tensor, "T T"]) -> Int[Tensor, "T T"]:
    """[i, j]: how many places token j is before position i."""
    places = torch.arange(effects.size(1), device=effects.device)
    return places[:, None] - places


def _must_be_used(
    probe: Probe, effects: Float[Tensor, "T T"], where: Bool[Tensor, "T T"], token_name: str
) -> float:
    """The smallest effect of those asked for; raises `Failed` where it is no more than rounding."""
    found = effects.masked_fill(~where, torch.inf)
    position, token = divmod(int(found.argmin()), effects.size(1))
    if float(found.min()) <= probe.tolerance:
        name = probe.outputs_name
        raise Failed(f"{token_name} {token} does not change the {name} at {position}")
    return float(found.min())


def _neighbours_are_used(probe: Probe, either: Float[Tensor, "N"]) -> None:
    """Of an encoder: of two neighbours one at least changes the other's output."""
    name = probe.outputs_name
    if float(either.max()) <= probe.tolerance:
        if _padding_is_seen(probe, "ids"):
            raise Failed(f"padding changes the {name}, other real tokens do not: mask inverted")
        raise Failed(f"no token changes the {name} of others")
    if float(either.min()) <= probe.tolerance:
        token = int(either.argmin())
        raise Failed(f"tokens {token} and {token + 1} do not change each other's {name}")


def _each_is_used(probe: Probe, side: Side, effects: Float[Tensor, "J"]) -> tuple[str, float]:
    """Every token of a side changes what all of it must change."""
    weakest, name = float(effects.min()), probe.outputs_name
    if weakest > probe.tolerance:
        return "every token is made use of", weakest
    whose = "source" if side == "src" else "text"
    none = float(effects.max()) <= probe.tolerance
    # The output of a whole text may follow the token that it is read from, whatever the mask.
    if (none or probe.of_text) and _padding_is_seen(probe, side):
        raise Failed(f"{whose} padding changes the {name}, real tokens do not: mask inverted")
    token = "source token" if side == "src" else "token"
    unused = f"the {whose}" if none else f"{token} {int(effects.argmin())}"
    raise Failed(f"{unused} does not change the {name}")


def _padding_is_seen(probe: Probe, side: Side) -> bool:
    """Whether other padding changes the outputs at real tokens."""
    if probe.cannot_pad(side) is not None:
        return False
    batch, lengths = probe.batch(3), [probe.width(side) - 2] * 3
    few, many = (probe.padded(batch, side, lengths, extra=extra) for extra in (0, 3))
    seen = [probe.outputs(which)[probe.real(which)][None] for which in (few, many)]
    return distance(*seen) > probe.tolerance
