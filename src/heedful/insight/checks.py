"""What a check is, and the checks of a net's outputs as such: shape, randomness, other rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.insight.kind import Kind, Side
from heedful.insight.probe import Batch, Probe
from heedful.insight.report import CheckResult


@dataclass(frozen=True)
class Texts:
    """What a check says; the words of a kind stand in braces (`Kind.words`)."""

    holds: str
    hint: str


@dataclass(frozen=True)
class Check:
    """A named question to a net.

    Attributes:
        two, one: what is asked of two stacks and of one, and what a failure usually means.
        ask: asks it.
        presupposes: checks without which the answer would mean nothing. Where one of them failed
            this one is skipped, so that one defect is reported once, where it is.
        delicate: it fails where effects are no larger than rounding, which those of tiny or 16-bit
            nets may rightly be: it is asked again in fp64 before that counts.
    """

    name: str
    two: Texts
    one: Texts
    ask: Callable[[Probe], CheckResult]
    presupposes: tuple["Check", ...] = ()
    delicate: bool = False

    def run(self, probe: Probe) -> CheckResult:
        """Ask a net."""
        found = self.ask(probe)
        if self.delicate and found.status == "failed":
            finer = probe.in_double()
            again = found if finer is None else self.ask(finer)
            found = again if again.status == "passed" else found
        return self.named(found, probe.kind)

    def named(self, found: CheckResult, kind: Kind) -> CheckResult:
        """A finding with the check's name and texts."""
        texts = self.one if kind.single else self.two
        hint = texts.hint.format_map(kind.words) if found.status == "failed" else ""
        holds = texts.holds.format_map(kind.words)
        return replace(found, name=self.name, hint=hint, holds=holds)


def check(
    name: str,
    holds: str,
    hint: str,
    presupposes: Sequence[Check] = (),
    *,
    single_holds: str | None = None,
    single_hint: str | None = None,
    delicate: bool = False,
) -> Callable[[Callable[[Probe], CheckResult]], Check]:
    """Makes a function of a probe into a `Check`; one stack is told the same unless said."""

    def wrap(ask: Callable[[Probe], CheckResult]) -> Check:
        one = Texts(single_holds or holds, single_hint or hint)
        return Check(name, Texts(holds, hint), one, ask, tuple(presupposes), delicate)

    return wrap


def passed(detail: str, error: float | None = None) -> CheckResult:
    """The name, the hint and what holds are the check's: `Check.named` adds them."""
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
    single_holds="net(ids (B, T)) gives finite {outputs}, in the batch's shape, also for one row "
    "or one token",
)
def output_shape(probe: Probe) -> CheckResult:
    sides = probe.kind.sides
    single = Batch({side: probe.ids(side, 1, 2 if side == "src" else 1) for side in sides})
    width: int | None = (
        None  # that of tokens is the vocabulary; others say theirs at the first call
    )
    for batch in (probe.batch(3), single):
        with torch.no_grad():
            found = probe.raw(probe.net, batch)
        called = ", ".join(f"{side} {tuple(ids.shape)}" for side, ids in batch.ids.items())
        if not isinstance(found, Tensor):
            return failed(f"{called} gave a {type(found).__name__}, not a tensor")
        wanted = _wanted_shape(probe, batch, width)
        if not _fits(tuple(found.shape), wanted):
            shown = ", ".join(map(str, wanted))
            return failed(f"{called} gave {tuple(found.shape)}, not ({shown})")
        if not found.is_floating_point():
            outputs = probe.kind.words["outputs"]
            return failed(f"{called} gave {found.dtype}, not floating-point {outputs}")
        if not usable(found):
            return failed(f"{called} gave {probe.kind.words['outputs']} with NaN or +inf")
        width = found.size(-1)
    return passed(f"{called} gave {tuple(found.shape)}, and larger batches likewise")


@check(
    "dropout off in evaluation",
    "two calls in evaluation mode give the same {outputs}",
    "Functional dropout needs training=self.training, and scaled_dot_product_attention needs "
    "dropout_p=0 outside training; a module that is not registered does not hear of eval().",
    [output_shape],
)
def deterministic(probe: Probe) -> CheckResult:
    batch = probe.batch(3)
    error = distance(probe.outputs(batch), probe.outputs(batch))
    if error > probe.tolerance:
        awake = [name for name, module in probe.net.named_modules() if module.training]
        more = f"; still in training mode: {', '.join(awake)}" if awake else ""
        return failed(f"two calls differ by {error:.1e}{more}", error)
    differs = distance(*_two_training_calls(probe, batch)) > probe.tolerance
    return passed(f"equal; in training mode two calls {'differ' if differs else 'agree'}", error)


@check(
    "batch independence",
    "a batch of n gives what n batches of one give, in any order of rows",
    "Something is normalised or summed over the batch (BatchNorm, a norm over the wrong "
    "dimension), batch and sequence are mixed up in a view, or a module keeps state between calls.",
    [deterministic],
)
def batch_independence(probe: Probe) -> CheckResult:
    batch = probe.batch(3)
    together = probe.outputs(batch)
    apart = torch.cat([probe.outputs(batch.rows(slice(row, row + 1))) for row in range(3)])
    alone = distance(together, apart)
    order = torch.tensor([2, 0, 1], device=probe.device)
    moved = distance(together[order], probe.outputs(batch.rows(order)))
    error = max(alone, moved)
    if error > probe.tolerance:
        which = "alone" if alone >= moved else "in another order"
        return failed(f"rows differ by {error:.1e} when given {which}", error)
    return passed("rows do not depend on each other", error)


def distances(a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"]) -> Float[Tensor, "P"]:
    """Largest difference at each position, in standard deviations of `a`; inf where not a number.

    Logits that are equal infinities (tokens that are forbidden) do not differ.
    """
    gap = (a.double() - b.double()).abs().masked_fill(a == b, 0.0)
    finite = a.double()[a.isfinite()]
    spread = float(finite.std(correction=0)) if finite.numel() else 0.0
    return (gap / max(spread, 1e-12)).nan_to_num(nan=math.inf, posinf=math.inf).amax((0, 2))


def distance(a: Float[Tensor, "B P V"], b: Float[Tensor, "B P V"]) -> float:
    """The largest of `distances`."""
    return float(distances(a, b).max())


def influence(probe: Probe, side: Side) -> Float[Tensor, "P J"]:
    """[i, j]: by how much the outputs at position i change with token j of `side`."""
    batch = probe.batch(3)
    outputs = probe.outputs(batch)
    columns = []
    for j in range(batch.ids[side].size(1)):
        ids = batch.ids[side].clone()
        ids[:, j] = probe.others(side, ids[:, j])
        columns.append(distances(outputs, probe.outputs(batch.replaced(side, ids))))
    return torch.stack(columns, dim=1)


def usable(outputs: Tensor) -> bool:
    """-inf is a forbidden token; NaN and +inf are accidents."""
    return not bool((outputs.isnan() | (outputs == math.inf)).any())


def _wanted_shape(probe: Probe, batch: Batch, width: int | None) -> tuple[Any, ...]:
    """A letter stands for any number."""
    kind, ids = probe.kind, batch.ids[probe.written]
    if kind.outputs == "tokens":
        return (*ids.shape, probe.vocab_sizes[probe.written])
    letter = "C" if kind.outputs == "classes" else "D"
    return (*ids.shape[: 1 if kind.of_text else 2], width or letter)


def _fits(shape: tuple[int, ...], wanted: tuple[Any, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        isinstance(want, str) or size == want for size, want in zip(shape, wanted, strict=True)
    )


def _two_training_calls(probe: Probe, batch: Batch) -> tuple[Tensor, Tensor]:
    """Running statistics, which training mode moves, are put back."""
    saved = [(buffer, buffer.clone()) for buffer in probe.net.buffers()]
    probe.net.train()
    try:
        return probe.outputs(batch), probe.outputs(batch)
    finally:
        probe.net.eval()
        for buffer, value in saved:
            buffer.copy_(value)
