"""The checks of what a position sees: no later token, or all of them, and in their order."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.insight.checks import (
    check,
    deterministic,
    distance,
    failed,
    influence,
    passed,
    skipped,
)
from heedful.insight.kind import Side
from heedful.insight.lookups import Lookups
from heedful.insight.probe import Batch, Probe
from heedful.insight.report import CheckResult

_ZERO_START = (
    "A head or a residual gate that starts at exactly zero looks the same: take a few training "
    "steps first."
)
_ONE_FOR_ALL = "the net has one output a text, which stands at no position"


@check(
    "causality",
    "{outputs} at a {written}position do not depend on later {written}tokens",
    "The causal mask is missing, transposed, aligned to the wrong corner or off by one, or it is "
    "of the other polarity (torch's MultiheadAttention: True = hidden; "
    "scaled_dot_product_attention: True = may attend). Training then looks too good and decoding "
    "fails.",
    [deterministic],
)
def causality(probe: Probe) -> CheckResult:
    if not probe.kind.causal:
        return skipped("an encoder: every token may see later ones")
    if probe.kind.of_text:
        return skipped(_ONE_FOR_ALL)
    outputs = probe.kind.words["outputs"]
    effects = influence(probe, probe.written).triu(1)  # [i, j]: of token j on the outputs at i < j
    error = float(effects.max())
    if error > probe.tolerance:
        position, token = divmod(int(effects.argmax()), effects.size(1))
        return failed(f"{outputs} at {position} change by {error:.1e} with token {token}", error)
    leak = _gradient_from_later(probe)
    if leak is None:
        return passed("later tokens change nothing (no lookup seen to take gradients of)", error)
    if leak > 0:
        return failed(f"{outputs} at 0 have a gradient of {leak:.1e} from later tokens", leak)
    return passed("later tokens change nothing and get no gradient", error)


@check(
    "mask polarity",
    "each target token changes the next logits, each source token changes all logits",
    "A mask is used the wrong way round (it hides what it should show), hides one token too many, "
    f"or the encoder's output never reaches the decoder. {_ZERO_START}",
    [deterministic],
    single_holds="each token changes the {outputs} of others",
    single_hint="A mask is used the wrong way round (it hides what it should show), or hides one "
    f"token too many. {_ZERO_START}",
    delicate=True,
)
def mask_polarity(probe: Probe) -> CheckResult:
    if probe.kind.of_text:
        effects = influence(probe, probe.written)[0]  # (J,)
        return _each_is_used(
            probe, probe.written, effects[: (probe.kind.reach or len(effects)) + 1]
        )
    effects = influence(probe, probe.written)
    complaint = _unseen(probe, effects) if probe.kind.causal else _isolated(probe, effects)
    if complaint is not None:
        return failed(complaint)
    weakest = _least_used(effects)
    if probe.kind.single:
        return passed("every token is made use of", weakest)
    found = _each_is_used(probe, "src", influence(probe, "src").amin(0))
    if found.status == "failed" or found.error is None:
        return found
    return passed(found.detail, min(found.error, weakest))


@check(
    "sees both sides",
    "{outputs} at a position depend on the tokens before it and on those after it",
    "A causal mask is left in an encoder, the padding mask hides one token too many, or a window "
    "is narrower than it should be.",
    [mask_polarity],
    delicate=True,
)
def sees_both_sides(probe: Probe) -> CheckResult:
    if probe.kind.causal:
        return skipped("a decoder: no token may see later ones")
    if probe.kind.of_text:
        return skipped(_ONE_FOR_ALL)
    effects = influence(probe, "ids")
    distance_to = _distances_to(effects)
    near = distance_to.abs() <= (probe.kind.reach or effects.size(1))
    weakest = []
    for which, where in (("later", distance_to < 0), ("earlier", distance_to > 0)):
        found = effects.masked_fill(~(where & near), torch.inf)
        weakest.append(float(found.min()))
        if weakest[-1] > probe.tolerance:
            continue
        outputs = probe.kind.words["outputs"]
        if float(effects[where].max()) <= probe.tolerance:
            return failed(f"no {which} token changes the {outputs} at any position")
        position, token = divmod(int(found.argmin()), effects.size(1))
        return failed(f"token {token} does not change the {outputs} at {position}")
    return passed("earlier and later tokens change the outputs", min(weakest))


@check(
    "position awareness",
    "the same tokens in another order give other {outputs}",
    "Positions are not added, are added after they were needed, or are the same for every token.",
    [mask_polarity, sees_both_sides],
    delicate=True,
)
def position_awareness(probe: Probe) -> CheckResult:
    batch = probe.batch(3)
    outputs, ids, word = probe.outputs(batch), batch.ids[probe.written], probe.kind.words["outputs"]
    # Two neighbours change places, seen from next to them: a window cannot hide them both.
    pairs = [(-3, -2), (1, 2)] if probe.kind.of_text else [(-3, -2)]
    swaps = []
    for first, second in pairs:
        swapped = ids.clone()
        swapped[:, [first, second]] = ids[:, [second, first]]
        other = probe.outputs(batch.replaced(probe.written, swapped))
        swaps.append(distance(outputs[:, -1:], other[:, -1:]))
    if probe.kind.single:
        if max(swaps) <= probe.tolerance:
            return failed(f"reordering tokens does not change the {word} of others", max(swaps))
        return passed(f"reordering tokens changes the {word} of others", max(swaps))
    rolled = distance(outputs, probe.outputs(batch.replaced("src", batch.ids["src"].roll(1, 1))))
    if rolled <= probe.tolerance:
        return failed("reordering the source changes nothing", rolled)
    if swaps[0] <= probe.tolerance:
        return failed("reordering earlier target tokens does not change the last logits", swaps[0])
    return passed("reordering source or target changes the logits", min(rolled, swaps[0]))


def _distances_to(effects: Float[Tensor, "T T"]) -> Int[Tensor, "T T"]:
    """[i, j]: how many places token j is before position i."""
    places = torch.arange(effects.size(1), device=effects.device)
    return places[:, None] - places


def _unseen(probe: Probe, effects: Float[Tensor, "T T"]) -> str | None:
    """What a causal net makes no use of: the token just before, or any that is in reach."""
    outputs = probe.kind.words["outputs"]
    following = effects.diagonal(-1)  # of token j on the outputs at j + 1
    if float(following.min()) <= probe.tolerance:
        token = int(following.argmin())
        if float(effects.triu(1).max()) > probe.tolerance:
            return f"{outputs} follow later tokens and not token {token}: mask inverted"
        return f"{_token(probe)} {token} does not change the {outputs} at {token + 1}"
    before = _distances_to(effects)
    near = (before > 0) & (before <= (probe.kind.reach or effects.size(1)))
    found = effects.masked_fill(~near, torch.inf)
    if float(found.min()) > probe.tolerance:
        return None
    position, token = divmod(int(found.argmin()), effects.size(1))
    return f"{_token(probe)} {token} does not change the {outputs} at {position}"


def _isolated(probe: Probe, effects: Float[Tensor, "T T"]) -> str | None:
    """Neighbours in an encoder of which neither changes the other's output."""
    outputs = probe.kind.words["outputs"]
    either = torch.maximum(effects.diagonal(1), effects.diagonal(-1))
    if float(either.max()) <= probe.tolerance:
        if _padding_is_seen(probe, "ids"):
            return f"padding changes the {outputs}, other real tokens do not: mask inverted"
        return f"no token changes the {outputs} of others"
    if float(either.min()) > probe.tolerance:
        return None
    token = int(either.argmin())
    return f"tokens {token} and {token + 1} do not change each other's {outputs}"


def _each_is_used(probe: Probe, side: Side, effects: Float[Tensor, "J"]) -> CheckResult:
    """Whether every token of a side changes what all of it must change."""
    whose, outputs = "source" if side == "src" else "text", probe.kind.words["outputs"]
    weakest = float(effects.min())
    if weakest > probe.tolerance:
        return passed("every token is made use of", weakest)
    none = float(effects.max()) <= probe.tolerance
    # The output of a whole text may follow the token that it is read from, whatever the mask.
    if (none or probe.kind.of_text) and _padding_is_seen(probe, side):
        return failed(f"{whose} padding changes the {outputs}, real tokens do not: mask inverted")
    token = "source token" if side == "src" else "token"
    unused = f"the {whose}" if none else f"{token} {int(effects.argmin())}"
    return failed(f"{unused} does not change the {outputs}")


def _least_used(effects: Float[Tensor, "T T"]) -> float:
    """The smallest effect that was asked for between neighbours."""
    return float(torch.maximum(effects.diagonal(1), effects.diagonal(-1)).min())


def _token(probe: Probe) -> str:
    return f"{probe.kind.words['written']}token"


def _padding_is_seen(probe: Probe, side: Side) -> bool:
    """Whether other padding changes the outputs at real tokens."""
    if probe.cannot_pad(side) is not None:
        return False
    batch = probe.batch(3)
    lengths = [probe.width(side) - 2] * 3
    few = probe.padded(batch, side, lengths, "right", extra=0)
    many = probe.padded(batch, side, lengths, "right", extra=3)
    return distance(*(_at_real(probe, which) for which in (few, many))) > probe.tolerance


def _at_real(probe: Probe, batch: Batch) -> Float[Tensor, "1 n V"]:
    return probe.outputs(batch)[probe.real(batch)][None]


def _gradient_from_later(probe: Probe) -> float | None:
    """What the first outputs get from later tokens, relative to their own; None: cannot be seen."""
    batch = probe.batch(3)
    with Lookups() as lookups:
        outputs = probe.outputs_with_grad(batch)
    found = lookups.of(batch.ids[probe.written])
    if found is None:
        return None
    weights = torch.rand(outputs[:, 0].shape, generator=probe.generator).to(outputs)
    first = (outputs[:, 0] * weights).sum()
    if not first.requires_grad:
        return 0.0  # gradient flow reports it
    (gradient,) = torch.autograd.grad(first, [found[1]], materialize_grads=True)
    return float(gradient[:, 1:].abs().max() / gradient.abs().max().clamp(min=1e-30))
