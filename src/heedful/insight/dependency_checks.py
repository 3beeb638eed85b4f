"""Checks of the inputs that outputs must or must not depend on; causality has its own file."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.insight.checks import (
    POOLED,
    Failed,
    Outcome,
    Skipped,
    check,
    distance,
    distances,
    influence,
    period_of_positions,
)
from heedful.insight.kind import Side
from heedful.insight.probe import NetInputs, Probe


@check(
    "batch independence",
    requirement="a batch of n has the {outputs} of n batches of one, in any order of rows",
    hint="Something is normalized or summed over the batch (BatchNorm, a norm over the wrong "
    "dimension), or batch and sequence are mixed up in a view.",
    needs=("no dropout in evaluation",),
)
def batch_independence(probe: Probe) -> Outcome:
    """A batch is compared with its rows one by one, and with the batch in another order."""
    batch = probe.batch(3)
    together = probe.outputs(batch)
    order = torch.tensor([2, 0, 1], device=probe.device)
    others = {
        side: torch.cat([ids[:1], probe.batch(3).ids[side][1:]]) for side, ids in batch.ids.items()
    }
    errors = {
        "in another order": distance(together[order], probe.outputs(batch.select_rows(order))),
        "beside other rows": distance(together[:1], probe.outputs(NetInputs(others))[:1]),
    }
    alone = _as_batches_of_one(probe, batch)
    if alone is not None and alone.shape == together.shape:
        errors["as batches of one"] = distance(together, alone)
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] > probe.tolerance:
        raise Failed(f"rows differ by {errors[worst]:.1e} {worst}", errors[worst])
    return "rows do not depend on each other", errors[worst]


@check(
    "mask polarity",
    requirement="each target token changes the next logits, each source token changes all logits",
    hint="A mask is inverted, masks one token too many, the decoder does not use the encoder's "
    "output, or the net shifts its inputs itself, so that logits are those of the token they are "
    "at, not of the next one. A head or a residual gate that is initialized with zeros has the "
    "same effect: train for a few steps first.",
    single_requirement="each token changes the {outputs} of others",
    single_hint="A mask is inverted or masks one token too many, or a decoder shifts its inputs "
    "itself, so that {outputs} are those of the token they are at, not of the next one. A head or "
    "a residual gate that is initialized with zeros has the same effect: train for a few steps "
    "first.",
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
            where = (offsets >= 0) & (offsets <= reach)  # its own token is of those before the next
            _require_effects(probe, effects, where, f"{probe.terms['target']}token")
    else:
        _require_neighbor_effects(probe, either)
    if probe.is_single_stack:
        return "every token has an effect", float(either.min())
    detail, weakest = _require_all_used(probe, "src", influence(probe, "src").amin(0))
    return detail, min(weakest, float(either.min()))


@check(
    "bidirectional attention",
    requirement="the encoder's states at a position depend on the tokens before it and on those "
    "after it",
    hint="The encoder has a causal mask: pass it the padding mask only.",
    single_requirement="{outputs} at a position depend on the tokens before it and on those after "
    "it",
    single_hint="An encoder has a causal mask, the padding mask masks one token too many, or a "
    "window is too narrow.",
    needs=("mask polarity",),
    retry_in_double=True,
)
def bidirectional_attention(probe: Probe) -> Outcome:
    """Earlier and later tokens must have an effect in an encoder."""
    if not probe.is_single_stack:
        return _bidirectional_encoder(probe)
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


def _bidirectional_encoder(probe: Probe) -> Outcome:
    """Effects of the first and of the last source token on their neighbours' states."""
    batch = probe.batch(3)
    ids = batch.ids["src"]
    states = _source_states(probe, batch)
    if states is None:
        raise Skipped("no module of the net returns states of the source, (B, S, D)")
    effects = {}
    for which, token, neighbour in (("later", -1, -2), ("earlier", 0, 1)):
        changed = ids.clone()
        changed[:, token] = probe.other_tokens("src", ids[:, token])
        other = _source_states(probe, batch.replace_ids("src", changed))
        assert other is not None
        effects[which] = float(distances(states, other)[neighbour])
        if effects[which] <= probe.tolerance:
            raise Failed(f"no {which} source token changes the states of the encoder")
    return "earlier and later tokens change the encoder's states", min(effects.values())


def _source_states(probe: Probe, batch: NetInputs) -> Float[Tensor, "B S D"] | None:
    """The last states of the source that any module returns, (B, S, D) or (S, B, D); else None.

    Modules of the decoder, such as the keys of cross-attention, return only functions of the
    encoder's states at the same position.
    """
    found: list[Tensor] = []
    rows, size = batch.ids["src"].shape

    def record(module: object, args: object, out: object) -> None:
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
                if value.shape[:2] == (rows, size):
                    found[:] = [value.detach()]
                elif value.shape[:2] == (size, rows):
                    found[:] = [value.detach().transpose(0, 1)]

    hooks = [module.register_forward_hook(record) for module in probe.net.modules()]
    try:
        # With gradients, since torch's TransformerEncoder has a fast path that calls no modules.
        probe.outputs(batch, grad=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


@check(
    "attention window",
    requirement="tokens within the reach of the windows have an effect, and farther ones have none",
    hint="A window of W keys is the token itself and the W - 1 before it: the mask is off by one "
    "(< for <=), or a layer ignores its window.",
    needs=("mask polarity",),
    stacks=1,
    retry_in_double=True,
)
def attention_window(probe: Probe) -> Outcome:
    """The effects of a token at the largest distance and one farther, in a long text.

    In an encoder at the largest distance after an output too.
    """
    far = probe.max_distance
    if far is None:
        raise Skipped("no limited distance is known; pass max_distance= if layers have windows")
    if probe.is_pooled:
        raise Skipped(POOLED)
    length, name = probe.long_length, probe.outputs_name
    if far + 2 > length:
        raise Skipped(f"the windows reach {far} tokens, further than {probe.at_lengths}")
    batch, token = probe.long_batch(2), (length - far - 1) // 2
    ids = batch.ids["ids"]
    changed = ids.clone()
    changed[:, token] = probe.other_tokens("ids", ids[:, token])
    outputs = probe.outputs(batch), probe.outputs(batch.replace_ids("ids", changed))
    effects = distances(*outputs)
    offsets = torch.arange(length, device=effects.device) - token
    beyond = float(effects[offsets.abs() > far].max())
    if beyond > probe.tolerance:
        seen = offsets[effects > probe.tolerance].tolist()
        offset = max(seen, key=lambda offset: (abs(offset), offset))
        where = f"{abs(offset)} {'before' if offset > 0 else 'after'}"
        raise Failed(f"{name} change with a token {where}, but windows reach {far}", beyond)
    _require_gradient(probe, batch, token, token + far)
    if not probe.causal:
        _require_gradient(probe, batch, length - 1 - token, length - 1 - token - far)
    return f"tokens have an effect up to a distance of {far}", beyond


def _require_gradient(probe: Probe, batch: NetInputs, token: int, position: int) -> None:
    """Require a gradient of the outputs at a position at a token, which windows just reach.

    Over many layers the effect itself is small.
    """
    side = probe.output_side

    def score(outputs: Tensor) -> Tensor:
        here = outputs[:, position]
        return (here * torch.rand(here.shape, generator=probe.generator).to(here)).sum()

    gradient = probe.token_gradient(batch, side, score)
    if gradient is not None and not bool(gradient[:, token].any()):
        where = f"{abs(position - token)} {'before' if position > token else 'after'}"
        name = probe.outputs_name
        raise Failed(f"{name} do not change with a token {where}, which the windows reach")


@check(
    "position awareness",
    requirement="the same tokens in another order have other {outputs}",
    hint="Positions are not added, are added too late, are equal for all tokens, or are taken "
    "modulo the size of their table.",
    needs=(
        "mask polarity",
        "bidirectional attention",
    ),
    retry_in_double=True,
)
def position_awareness(probe: Probe) -> Outcome:
    """Two adjacent tokens are swapped, which must change the outputs behind them.

    In a short and, for outputs per position, in a long text, in which no positions may recur.
    """
    name = probe.outputs_name
    for side in probe.sides:
        if period := period_of_positions(probe, side):
            what = {"src": "the source", "tgt": "the target"}.get(side, "a text")
            raise Failed(f"the positions of {what} begin again after {period}")
    batch = probe.batch(3)
    if probe.is_pooled:
        effect = max(_effect_of_swap(probe, batch, "ids", first) for first in (-3, 1))
        if effect <= probe.tolerance:
            raise Failed(f"reordering tokens does not change the {name}", effect)
        return f"reordering tokens changes the {name}", effect
    effects: list[float] = []
    long, middle = probe.long_batch(2), probe.long_length // 2
    far = f" at {middle} of {probe.at_lengths}"
    for texts, first, where in ((batch, -3, ""), (long, middle, far)):
        for side in probe.sides:
            effects.append(_effect_of_swap(probe, texts, side, first))
            if effects[-1] <= probe.tolerance:
                what = "the source" if side == "src" else f"{probe.terms['target']}tokens"
                others = "" if side == "src" else " of others"
                detail = f"reordering {what} does not change the {name}{others}{where}"
                raise Failed(detail, effects[-1])
    if probe.is_single_stack:
        return f"reordering tokens changes the {name} of others", min(effects)
    return "reordering source or target changes the logits", min(effects)


def _effect_of_swap(probe: Probe, batch: NetInputs, side: Side, first: int) -> float:
    """The change of the outputs when a token and the next one are swapped.

    Of outputs at the positions of the same side only those behind both.
    """
    first %= batch.ids[side].size(1)
    swapped = batch.ids[side].clone()
    swapped[:, [first, first + 1]] = swapped[:, [first + 1, first]]
    before, after = probe.outputs(batch), probe.outputs(batch.replace_ids(side, swapped))
    behind = first + 2 if side == probe.output_side and not probe.is_pooled else 0
    return distance(before[:, behind:], after[:, behind:])


def _as_batches_of_one(probe: Probe, batch: NetInputs) -> Float[Tensor, "..."] | None:
    """The outputs of each row alone; None if they fail, which "one row, one token" reports."""
    try:
        rows = [probe.outputs(batch.select_rows(slice(row, row + 1))) for row in range(3)]
        return torch.cat(rows)
    except Exception:  # of any kind
        return None


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
