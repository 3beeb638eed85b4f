"""What a check is, and the checks of a net's outputs: what they must and must not depend on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.insight.probe import PADDING_SIDES, Batch, Lookups, Probe, Side
from heedful.insight.report import CheckResult


@dataclass(frozen=True)
class Check:
    """A named question to a net.

    Attributes:
        holds: what is asked for.
        hint: what a failure usually means and where to look.
        run: asks it.
        presupposes: checks without which the answer would mean nothing. Where one of them failed
            this one is skipped, so that one defect is reported once, where it is.
    """

    name: str
    holds: str
    hint: str
    run: Callable[[Probe], CheckResult]
    presupposes: tuple["Check", ...] = ()


def check(
    name: str, holds: str, hint: str, presupposes: Sequence[Check] = ()
) -> Callable[[Callable[[Probe], CheckResult]], Check]:
    """Makes a function of a probe into a `Check`."""

    def wrap(run: Callable[[Probe], CheckResult]) -> Check:
        def named(probe: Probe) -> CheckResult:
            found = run(probe)
            shown = hint if found.status == "failed" else ""
            return CheckResult(name, found.status, found.detail, shown, found.error, holds)

        return Check(name, holds, hint, named, tuple(presupposes))

    return wrap


def passed(detail: str, error: float | None = None) -> CheckResult:
    """The name and the hint are the check's: `check` adds them."""
    return CheckResult("", "passed", detail, error=error)


def failed(detail: str, error: float | None = None) -> CheckResult:
    """As `passed`."""
    return CheckResult("", "failed", detail, error=error)


def skipped(reason: str) -> CheckResult:
    """As `passed`."""
    return CheckResult("", "skipped", reason)


@check(
    "output shape",
    "net(src (B, S), tgt (B, T)) gives finite logits (B, T, V), also for one row or one token",
    "Look for batch and sequence in the wrong order, heads split in the wrong order, a squeeze "
    "that also drops a batch of one, or an output that is a tuple; NaN usually comes from a "
    "softmax over a row that is masked as a whole.",
)
def output_shape(probe: Probe) -> CheckResult:
    single = Batch(probe.ids("src", 1, 2), probe.ids("tgt", 1, 1))
    for batch in (probe.batch(3), single):
        with torch.no_grad():
            logits = probe.forward(probe.net, batch)
        called = f"src {tuple(batch.src.shape)}, tgt {tuple(batch.tgt.shape)}"
        if not isinstance(logits, Tensor):
            return failed(f"{called} gave a {type(logits).__name__}, not a tensor")
        wanted = (*batch.tgt.shape, probe.tgt_vocab_size)
        if tuple(logits.shape) != wanted:
            return failed(f"{called} gave {tuple(logits.shape)}, not {wanted}")
        if not logits.is_floating_point():
            return failed(f"{called} gave {logits.dtype}, not floating-point logits")
        if not usable(logits):
            return failed(f"{called} gave logits with NaN or +inf")
    return passed(f"{called} gave {tuple(logits.shape)}, and larger batches likewise")


@check(
    "dropout off in evaluation",
    "two calls in evaluation mode give the same logits",
    "Functional dropout needs training=self.training, and scaled_dot_product_attention needs "
    "dropout_p=0 outside training; a module that is not registered does not hear of eval().",
    [output_shape],
)
def deterministic(probe: Probe) -> CheckResult:
    batch = probe.batch(3)
    error = distance(probe.logits(batch), probe.logits(batch))
    if error > probe.tolerance:
        awake = [name for name, module in probe.net.named_modules() if module.training]
        more = f"; still in training mode: {', '.join(awake)}" if awake else ""
        return failed(f"two calls differ by {error:.1e}{more}", error)
    differs = distance(*_two_training_calls(probe, batch)) > probe.tolerance
    return passed(f"equal; in training mode two calls {'differ' if differs else 'agree'}", error)


@check(
    "causality",
    "logits at a target position do not depend on later target tokens",
    "The causal mask is missing, transposed, aligned to the wrong corner or off by one, or it is "
    "of the other polarity (torch's MultiheadAttention: True = hidden; "
    "scaled_dot_product_attention: True = may attend). Training then looks too good and decoding "
    "fails.",
    [deterministic],
)
def causality(probe: Probe) -> CheckResult:
    effects = influence(probe, "tgt").triu(1)  # [i, j]: of token j on the logits at i < j
    error = float(effects.max())
    if error > probe.tolerance:
        position, token = divmod(int(effects.argmax()), effects.size(1))
        return failed(f"logits at {position} change by {error:.1e} with token {token}", error)
    leak = _gradient_from_later(probe)
    if leak is None:
        return passed("later tokens change nothing (no lookup seen to take gradients of)", error)
    if leak > 0:
        return failed(f"logits at 0 have a gradient of {leak:.1e} from later tokens", leak)
    return passed("later tokens change nothing and get no gradient", error)


@check(
    "mask polarity",
    "each target token changes the next logits, each source token changes all logits",
    "A mask is used the wrong way round (it hides what it should show), hides one token too many, "
    "or the encoder's output never reaches the decoder. A head or a residual gate that starts at "
    "exactly zero looks the same: take a few training steps first.",
    [deterministic],
)
def mask_polarity(probe: Probe) -> CheckResult:
    effects = influence(probe, "tgt")
    following = effects.diagonal(-1)  # of token j on the logits at j + 1
    if float(following.min()) <= probe.tolerance:
        token = int(following.argmin())
        if float(effects.triu(1).max()) > probe.tolerance:
            return failed(f"logits follow later tokens and not token {token}: mask inverted")
        return failed(f"target token {token} does not change the logits at {token + 1}")
    from_source = influence(probe, "src").amin(0)  # (S,)
    weakest = float(from_source.min())
    if weakest > probe.tolerance:
        return passed("every token is made use of", min(weakest, float(following.min())))
    if float(from_source.max()) > probe.tolerance:
        return failed(f"source token {int(from_source.argmin())} does not change the logits")
    if probe.cannot_pad("src") is None and _source_padding_effect(probe) > probe.tolerance:
        return failed("source padding changes the logits, real tokens do not: mask inverted")
    return failed("the source does not change the logits")


@check(
    "position awareness",
    "the same tokens in another order give other logits",
    "Positions are not added, are added after they were needed, or are the same for every token.",
    [mask_polarity],
)
def position_awareness(probe: Probe) -> CheckResult:
    batch = probe.batch(3)
    logits = probe.logits(batch)
    rolled = distance(logits, probe.logits(Batch(batch.src.roll(1, 1), batch.tgt)))
    if rolled <= probe.tolerance:
        return failed("reordering the source changes nothing", rolled)
    swapped = batch.tgt.clone()
    swapped[:, [0, 1]] = batch.tgt[:, [1, 0]]
    last = distance(logits[:, -1:], probe.logits(Batch(batch.src, swapped))[:, -1:])
    if last <= probe.tolerance:
        return failed("reordering earlier target tokens does not change the last logits", last)
    return passed("reordering source or target changes the logits", min(rolled, last))


@check(
    "batch independence",
    "a batch of n gives what n batches of one give, in any order of rows",
    "Something is normalised or summed over the batch (BatchNorm, a norm over the wrong "
    "dimension), batch and sequence are mixed up in a view, or a module keeps state between calls.",
    [deterministic],
)
def batch_independence(probe: Probe) -> CheckResult:
    batch = probe.batch(3)
    together = probe.logits(batch)
    rows = zip(batch.src.split(1), batch.tgt.split(1), strict=True)
    apart = torch.cat([probe.logits(Batch(src, tgt)) for src, tgt in rows])
    alone = distance(together, apart)
    order = torch.tensor([2, 0, 1], device=probe.device)
    permuted = probe.logits(Batch(batch.src[order], batch.tgt[order]))
    moved = distance(together[order], permuted)
    error = max(alone, moved)
    if error > probe.tolerance:
        which = "alone" if alone >= moved else "in another order"
        return failed(f"rows differ by {error:.1e} when given {which}", error)
    return passed("rows do not depend on each other", error)


@check(
    "cached = uncached",
    "decoding token by token with a cache, also reordered, gives what whole prefixes give",
    "The position of a new token is off by one, keys are cached before or after they should be, "
    "the causal mask is aligned to the wrong corner when there are fewer queries than keys, or a "
    "reorder forgets a layer or the source.",
    [causality],
)
def cached(probe: Probe) -> CheckResult:
    start = getattr(probe.net, "start", None)
    if start is None or not hasattr(probe.net, "step"):
        return skipped("the net has no start(src, src_lengths, capacity=...) and step(ids, cache)")
    batches = [probe.batch(3)]
    lengths = [probe.src_width, probe.src_width - 1, probe.src_width - 3]
    for where in PADDING_SIDES if "src_lengths" in probe.accepts else ():
        if probe.cannot_pad("src", where) is None:
            batches.append(probe.padded(batches[0], "src", lengths, where))
    worst = 0.0
    for batch in batches:
        keywords = {} if batch.padding_side == "right" else {"padding_side": "left"}
        with torch.no_grad():
            cache = start(batch.src, batch.src_lengths, capacity=probe.tgt_width, **keywords)
            plan = _REORDERS if hasattr(cache, "reorder") else {}
            error, step = _decode(probe, batch, cache, plan)
        if error > probe.tolerance:
            told = f", source padded on the {batch.padding_side}" if batch is not batches[0] else ""
            return failed(f"logits at {step} differ by {error:.1e}{told}", error)
        worst = max(worst, error)
    return passed("equal" if plan else "equal (the cache has no reorder(rows))", worst)


# Before which step which rows go on: every source gets two beams, beams change places, one source
# leaves. The rows of a source stand side by side, equally many for each.
_REORDERS: dict[int, list[int]] = {1: [0, 0, 1, 1, 2, 2], 2: [1, 0, 3, 3, 4, 5], 3: [1, 0, 4, 5]}


def distances(a: Float[Tensor, "B T V"], b: Float[Tensor, "B T V"]) -> Float[Tensor, "T"]:
    """Largest difference at each position, in standard deviations of `a`; inf where not a number.

    Logits that are equal infinities (tokens that are forbidden) do not differ.
    """
    gap = (a.double() - b.double()).abs().masked_fill(a == b, 0.0)
    finite = a.double()[a.isfinite()]
    spread = float(finite.std(correction=0)) if finite.numel() else 0.0
    return (gap / max(spread, 1e-12)).nan_to_num(nan=math.inf, posinf=math.inf).amax((0, 2))


def distance(a: Float[Tensor, "B T V"], b: Float[Tensor, "B T V"]) -> float:
    """The largest of `distances`."""
    return float(distances(a, b).max())


def influence(probe: Probe, side: Side) -> Float[Tensor, "T J"]:
    """[i, j]: by how much the logits at target position i change with token j of `side`."""
    batch = probe.batch(3)
    logits = probe.logits(batch)
    columns = []
    for j in range(getattr(batch, side).size(1)):
        ids = getattr(batch, side).clone()
        ids[:, j] = probe.others(side, ids[:, j])
        changed = Batch(ids, batch.tgt) if side == "src" else Batch(batch.src, ids)
        columns.append(distances(logits, probe.logits(changed)))
    return torch.stack(columns, dim=1)


def usable(logits: Tensor) -> bool:
    """-inf is a forbidden token; NaN and +inf are accidents."""
    return not bool((logits.isnan() | (logits == math.inf)).any())


def _two_training_calls(probe: Probe, batch: Batch) -> tuple[Tensor, Tensor]:
    """Running statistics, which training mode moves, are put back."""
    saved = [(buffer, buffer.clone()) for buffer in probe.net.buffers()]
    probe.net.train()
    try:
        return probe.logits(batch), probe.logits(batch)
    finally:
        probe.net.eval()
        for buffer, value in saved:
            buffer.copy_(value)


def _gradient_from_later(probe: Probe) -> float | None:
    """What the first logits get from later tokens, relative to their own; None: cannot be seen."""
    batch = probe.batch(3)
    with Lookups() as lookups:
        logits = probe.logits_with_grad(batch)
    found = lookups.of(batch.tgt)
    if found is None:
        return None
    weights = torch.rand(logits[:, 0].shape, generator=probe.generator).to(logits)
    first = (logits[:, 0] * weights).sum()
    (gradient,) = torch.autograd.grad(first, [found[1]], materialize_grads=True)
    return float(gradient[:, 1:].abs().max() / gradient.abs().max().clamp(min=1e-30))


def _source_padding_effect(probe: Probe) -> float:
    """By how much other padding changes the logits."""
    batch = probe.batch(3)
    lengths = [probe.src_width - 2] * 3
    few = probe.padded(batch, "src", lengths, "right", extra=0)
    many = probe.padded(batch, "src", lengths, "right", extra=3)
    return distance(probe.logits(few), probe.logits(many))


def _decode(
    probe: Probe, batch: Batch, cache: Any, plan: dict[int, list[int]]
) -> tuple[float, str]:
    """Largest difference of step from whole prefix, and at which step it was."""
    owners = torch.arange(batch.src.size(0), device=probe.device)
    prefixes = batch.tgt[:, :0]
    worst, where = 0.0, ""
    for position in range(probe.tgt_width):
        if position in plan:
            rows = torch.tensor(plan[position], device=probe.device)
            cache.reorder(rows)
            owners, prefixes = owners[rows], prefixes[rows]
        tokens = probe.ids("tgt", owners.numel(), 1)
        prefixes = torch.cat([prefixes, tokens], dim=1)
        step = probe.net.step(tokens, cache)  # type: ignore[operator]
        lengths = None if batch.src_lengths is None else batch.src_lengths[owners]
        known = Batch(batch.src[owners], prefixes, lengths, padding_side=batch.padding_side)
        whole = probe.logits(known)
        error = distance(whole[:, -1:], step)
        if error > worst:
            reordered = " (after a reorder)" if any(p <= position for p in plan) else ""
            worst, where = error, f"step {position}{reordered}"
    return worst, where
