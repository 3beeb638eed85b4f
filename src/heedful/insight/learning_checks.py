"""The checks of a net's weights: whether gradients reach them, how they start, what they learn."""

import copy
import math
import time
from itertools import combinations

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.insight.checks import (
    check,
    deterministic,
    distance,
    failed,
    output_shape,
    passed,
    skipped,
)
from heedful.insight.lookups import Lookups
from heedful.insight.probe import Batch, Probe, loss_of
from heedful.insight.report import CheckResult
from heedful.insight.sight_checks import causality

# A loss is near ln V at the start if it is no further above it than this, in nats: logits of
# standard deviation s raise it by about s² / 2.
INITIAL_LOSS_MARGIN = 1.5
# One batch counts as learnt by heart below this share of ln V.
OVERFIT_SHARE = 0.1
OVERFIT_STEPS = 300
_ONE_CLASS = "the net has one output a text: there is no class to tell apart"


@check(
    "gradient flow",
    "every parameter that requires a gradient gets one: finite, not all zero",
    "A parameter without a gradient is never used, is used under detach() or no_grad(), or was "
    "replaced by another object after it was registered; all zeros: its output is multiplied by "
    "zero or masked as a whole.",
    [output_shape],
)
def gradient_flow(probe: Probe) -> CheckResult:
    named = dict(probe.net.named_parameters())  # a shared parameter once, by its first name
    wanted = {name: p for name, p in named.items() if p.requires_grad}
    frozen = len(named) - len(wanted)
    if not wanted:
        return skipped("no parameter requires a gradient")
    probe.net.zero_grad(set_to_none=True)
    loss = probe.random_loss(probe.outputs_with_grad(probe.batch(8)))
    if not loss.requires_grad:
        return failed(f"the {probe.kind.words['outputs']} are cut off from every parameter")
    loss.backward()
    complaints: dict[str, list[str]] = {}
    for name, parameter in wanted.items():
        if complaint := _complaint(parameter.grad):
            complaints.setdefault(complaint, []).append(name)
    probe.net.zero_grad(set_to_none=True)
    if complaints:
        return failed("; ".join(f"{what}: {', '.join(of)}" for what, of in complaints.items()))
    more = f"; {frozen} are frozen" if frozen else ""
    return passed(f"all {len(wanted)} parameters get a gradient{more}")


@check(
    "weight tying",
    "embeddings and output that are equal are one parameter",
    "They were tied once and came apart (a copy in place of the object, a checkpoint loaded or a "
    "module moved afterwards), or tied by their storage only: the optimizer then moves them apart, "
    "or moves them twice.",
    [output_shape],
)
def weight_tying(probe: Probe) -> CheckResult:
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in probe.net.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    with Lookups() as lookups:
        probe.outputs(probe.batch(1))
    embeddings = {id(weight) for _, weight, _ in lookups.seen}
    embeddings |= {id(m.weight) for m in probe.net.modules() if isinstance(m, nn.Embedding)}
    for a, b in combinations(parameters, 2):
        first, second = parameters[a], parameters[b]
        pair = f"{names[a][0]} and {names[b][0]}"
        if first.data_ptr() == second.data_ptr() and first.numel() and second.numel():
            return failed(f"{pair} share their memory but are two parameters")
        if (a in embeddings or b in embeddings) and _same_values(first, second):
            return failed(f"{pair} are equal but not tied")
    tied = [" = ".join(group) for group in names.values() if len(group) > 1]
    return passed(f"tied: {'; '.join(tied)}" if tied else "nothing is tied, nothing is equal")


@check(
    "bf16",
    "under bf16 autocast {outputs}, loss and gradients are finite",
    "A mask is filled with a number that bf16 cannot hold (the lowest fp32 number becomes -inf), "
    "a type is fixed by .float() or by a buffer, or a norm divides by a rounded zero.",
    [output_shape],
)
def bf16(probe: Probe) -> CheckResult:
    batch, first = probe.batch(3), probe.kind.sides[0]
    if probe.cannot_pad(first) is None:
        full = probe.width(first)
        batch = probe.padded(batch, first, [full, full - 1, full - 3])
    real = probe.real(batch)
    exact = probe.outputs(batch)[real]
    probe.net.zero_grad(set_to_none=True)
    with torch.autocast(probe.device.type, dtype=torch.bfloat16):
        outputs = probe.outputs_with_grad(batch)
    loss = probe.random_loss(outputs, real)
    if not bool(loss.isfinite()):
        return failed(f"the loss is {float(loss.detach())}")
    if loss.requires_grad:
        loss.backward()
    for name, parameter in probe.net.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return failed(f"the gradient of {name} is not finite")
    probe.net.zero_grad(set_to_none=True)
    error = distance(exact[None], outputs.detach()[real][None].to(exact.dtype))
    word = probe.kind.words["outputs"]
    return passed(f"finite; {word} within {error:.1e} of full precision", error)


@check(
    "initial loss",
    f"the loss on random tokens is at most {INITIAL_LOSS_MARGIN} nats above ln {{size}}",
    "The output starts too large: embeddings drawn N(0, 1) and tied to the output, weights drawn "
    "before tying, or no norm before it. A trained net also fails: give fresh=False for one.",
    [output_shape],
)
def initial_loss(probe: Probe) -> CheckResult:
    if not probe.fresh:
        return skipped("the net is not fresh")
    if reason := probe.kind.no_loss:
        return skipped(reason)
    batch = probe.batch(8)
    logits = probe.outputs(batch).float()
    size = logits.size(-1)
    if size == 1:
        return skipped(_ONE_CLASS)
    known = logits == -math.inf
    if probe.kind.outputs == "tokens":
        # Where output and input share their matrix, the token just read has a high logit by right.
        known |= F.one_hot(batch.ids[probe.written], size).bool()
    # The expectation over labels drawn evenly: no noise from drawing them.
    mean = logits.masked_fill(known, 0.0).sum(-1) / (~known).sum(-1)
    loss = float((logits.masked_fill(known, -math.inf).logsumexp(-1) - mean).mean())
    uniform = math.log(size)
    seen = f"{loss:.2f}; ln {probe.kind.words['size']} is {uniform:.2f}"
    if not loss <= uniform + INITIAL_LOSS_MARGIN:
        return failed(seen, loss - uniform)
    return passed(seen, loss - uniform)


@check(
    "one batch overfits",
    f"training on four rows brings their loss below {OVERFIT_SHARE} ln {{size}}",
    "The net cannot learn: a detach(), a missing residual, logits that are squashed, norms in the "
    "wrong place, targets shifted twice, or far too large first weights.",
    [deterministic, causality],
)
def one_batch_overfits(probe: Probe) -> CheckResult:
    if not probe.overfit:
        return skipped("not asked for")
    if reason := probe.kind.no_loss:
        return skipped(reason)
    if not any(p.requires_grad for p in probe.net.parameters()):
        return skipped("no parameter requires a gradient")
    size = probe.outputs(probe.batch(1)).size(-1)
    if size == 1:
        return skipped(_ONE_CLASS)
    batch, labels = _lesson(probe, size)
    goal = OVERFIT_SHARE * math.log(size)
    deadline = time.monotonic() + probe.overfit_seconds
    seen = []
    for rate in _rates(probe):
        first, last, steps = _train(probe, batch, labels, rate, goal, deadline)
        seen.append(f"{first:.2f} to {last:.2f} in {steps} steps at rate {rate:.0e}")
        if last < goal:
            return passed(f"loss {seen[-1]}", last)
    if time.monotonic() > deadline:
        return skipped(f"time ran out: loss {', '.join(seen)}; give more overfit_seconds")
    return failed(f"loss {', '.join(seen)}, not below {goal:.2f}", last)


def _complaint(gradient: Tensor | None) -> str | None:
    if gradient is None:
        return "no gradient"
    if not bool(gradient.isfinite().all()):
        return "a gradient that is not finite"
    return None if bool(gradient.any()) else "a gradient of zeros"


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Matrices of the same values, also transposed; constant ones tell nothing."""
    if a.dim() != 2 or b.dim() != 2 or bool((a == a.flatten()[0]).all()):
        return False
    return torch.equal(a, b) or torch.equal(a, b.t())


def _rates(probe: Probe) -> tuple[float, float]:
    """Adam's rate goes down with the width of the net; a second, lower one for deep nets."""
    width = max((p.size(-1) for p in probe.net.parameters() if p.dim() > 1), default=128)
    rate = min(3e-3, 0.3 / width)
    return rate, rate / 4


def _lesson(probe: Probe, size: int) -> tuple[Batch, Int[Tensor, "B P"]]:
    """Four rows and what is to be learnt by heart of them.

    Of a causal net that is the next token; of an encoder a random token at each position, or a
    class for each text.
    """
    batch, side = probe.batch(4), probe.written
    ids = batch.ids[side]
    if probe.kind.of_text:
        order = torch.randperm(4, generator=probe.generator).to(ids.device)
        return batch, (order % size)[:, None]
    if probe.kind.causal:
        return batch.replaced(side, ids[:, :-1]), ids[:, 1:]
    return batch, probe.ids(side, *ids.shape)


def _train(
    probe: Probe,
    batch: Batch,
    labels: Int[Tensor, "B P"],
    rate: float,
    goal: float,
    deadline: float,
) -> tuple[float, float, int]:
    """First and last loss, and steps taken, of learning `batch` by heart on a copy of the net.

    The copy stays in evaluation mode: dropout would only blur what is asked.
    """
    net = copy.deepcopy(probe.net)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=rate)
    losses: list[float] = []
    for step in range(OVERFIT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20)
        loss = loss_of(probe.forward(net, batch), labels)
        losses.append(float(loss.detach()))
        if not losses[-1] >= goal or time.monotonic() > deadline:
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1], len(losses)
