"""The checks of a net's weights: whether gradients reach them, how they start, what they learn."""

import math
import time
from itertools import combinations

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.insight.checks import Failed, Seen, Skipped, check, distance, not_finite
from heedful.insight.lookups import Lookups
from heedful.insight.probe import Batch, Probe

# A loss is near ln V at the start if it is no further above it than this, in nats: logits of
# standard deviation s raise it by about s² / 2.
INITIAL_LOSS_MARGIN = 1.5
# One batch counts as learnt by heart below this share of ln V.
OVERFIT_SHARE = 0.1
OVERFIT_STEPS = 300


@check(
    "gradient flow",
    holds="every parameter that requires a gradient gets one: finite, not all zero",
    hint="A parameter without a gradient is never used, is used under detach() or no_grad(), "
    "or was replaced by another object after it was registered; all zeros: its output is "
    "multiplied by zero or masked as a whole.",
    needs=("output shape",),
)
def gradient_flow(probe: Probe) -> Seen:
    """Each parameter that requires a gradient gets one; a shared one counts once."""
    named = dict(probe.net.named_parameters())
    wanted = {name: p for name, p in named.items() if p.requires_grad}
    if not wanted:
        raise Skipped("no parameter requires a gradient")
    probe.net.zero_grad(set_to_none=True)
    loss = probe.random_loss(probe.outputs(probe.batch(8), grad=True))
    if not loss.requires_grad:
        raise Failed(f"the {probe.outputs_name} are cut off from every parameter")
    loss.backward()
    complaints: dict[str, list[str]] = {}
    for name, parameter in wanted.items():
        if parameter.grad is None:
            complaints.setdefault("no gradient", []).append(name)
        elif not bool(parameter.grad.isfinite().all()):
            complaints.setdefault("a gradient that is not finite", []).append(name)
        elif not bool(parameter.grad.any()):
            complaints.setdefault("a gradient of zeros", []).append(name)
    probe.net.zero_grad(set_to_none=True)
    if complaints:
        raise Failed("; ".join(f"{what}: {', '.join(of)}" for what, of in complaints.items()))
    frozen = len(named) - len(wanted)
    more = f"; {frozen} are frozen" if frozen else ""
    return f"all {len(wanted)} parameters get a gradient{more}", None


@check(
    "weight tying",
    holds="embeddings and output that are equal are one parameter",
    hint="They were tied once and came apart (a copy in place of the object, a checkpoint "
    "loaded or a module moved afterwards), or tied by their storage only: the optimizer "
    "then moves them apart, or moves them twice.",
    needs=("output shape",),
)
def weight_tying(probe: Probe) -> Seen:
    """What is equal is one parameter, by itself and not by its memory alone."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in probe.net.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    with Lookups() as lookups:
        probe.outputs(probe.batch(1))
    embeddings = {id(weight) for _, weight, _ in lookups.seen}
    embeddings |= {id(m.weight) for m in probe.net.modules() if isinstance(m, nn.Embedding)}
    for first, second in combinations(names, 2):
        pair = f"{names[first][0]} and {names[second][0]}"
        if first.data_ptr() == second.data_ptr() and first.numel() and second.numel():
            raise Failed(f"{pair} share their memory but are two parameters")
        if embeddings & {id(first), id(second)} and _same_values(first, second):
            raise Failed(f"{pair} are equal but not tied")
    tied = [" = ".join(group) for group in names.values() if len(group) > 1]
    return f"tied: {'; '.join(tied)}" if tied else "nothing is tied, nothing is equal", None


@check(
    "bf16",
    holds="under bf16 autocast {outputs}, loss and gradients are finite",
    hint="A mask is filled with a number that bf16 cannot hold (the lowest fp32 number becomes "
    "-inf), a type is fixed by .float() or by a buffer, or a norm divides by a rounded "
    "zero.",
    needs=("output shape",),
)
def bf16(probe: Probe) -> Seen:
    """Under autocast, with padding where it can be shown."""
    batch, first = probe.batch(3), probe.sides[0]
    if probe.cannot_pad(first) is None:
        batch = probe.padded(batch, first, probe.ragged(first))
    real = probe.real(batch)
    exact = probe.outputs(batch)[real]
    probe.net.zero_grad(set_to_none=True)
    with torch.autocast(probe.device.type, dtype=torch.bfloat16):
        outputs = probe.outputs(batch, grad=True)
    loss = probe.random_loss(outputs, real)
    if not bool(loss.isfinite()):
        raise Failed(f"the loss is {float(loss.detach())}")
    if loss.requires_grad:
        loss.backward()
    if name := not_finite(probe.net):
        raise Failed(f"the gradient of {name} is not finite")
    probe.net.zero_grad(set_to_none=True)
    error = distance(exact[None], outputs.detach()[real][None].to(exact.dtype))
    return f"finite; {probe.outputs_name} within {error:.1e} of full precision", error


@check(
    "initial loss",
    holds=f"the loss on random tokens is at most {INITIAL_LOSS_MARGIN} nats above ln {{size}}",
    hint="The output starts too large: embeddings drawn N(0, 1) and tied to the output, "
    "weights drawn before tying, or no norm before it. A trained net also fails: give "
    "fresh=False for one.",
    needs=("output shape",),
)
def initial_loss(probe: Probe) -> Seen:
    """The expectation over labels drawn evenly: no noise from drawing them."""
    if not probe.fresh:
        raise Skipped("the net is not fresh")
    size = _num_classes(probe)
    batch = probe.batch(8)
    logits = probe.outputs(batch).float()
    known = logits == -math.inf
    if probe.output_kind == "tokens":
        # Where output and input share their matrix, the token just read has a high logit by right.
        known |= F.one_hot(batch.ids[probe.written], size).bool()
    mean = logits.masked_fill(known, 0.0).sum(-1) / (~known).sum(-1)
    loss = float((logits.masked_fill(known, -math.inf).logsumexp(-1) - mean).mean())
    above = loss - math.log(size)
    seen = f"{loss:.2f}; ln {probe.words['size']} is {math.log(size):.2f}"
    if not above <= INITIAL_LOSS_MARGIN:
        raise Failed(seen, above)
    return seen, above


@check(
    "one batch overfits",
    holds=f"training on four rows brings their loss below {OVERFIT_SHARE} ln {{size}}",
    hint="The net cannot learn: a detach(), a missing residual, logits that are squashed, "
    "norms in the wrong place, targets shifted twice, or far too large first weights.",
    needs=(
        "dropout off in evaluation",
        "causality",
    ),
)
def one_batch_overfits(probe: Probe) -> Seen:
    """At one of two rates: Adam's goes down with a net's width, and deep nets want less."""
    if not probe.overfit:
        raise Skipped("not asked for")
    size = _num_classes(probe)
    if not any(p.requires_grad for p in probe.net.parameters()):
        raise Skipped("no parameter requires a gradient")
    batch, labels = _lesson(probe, size)
    goal = OVERFIT_SHARE * math.log(size)
    deadline = time.monotonic() + probe.overfit_seconds
    width = max((p.size(-1) for p in probe.net.parameters() if p.dim() > 1), default=128)
    fast = min(3e-3, 0.3 / width)

    def losses_at(rate: float) -> list[float]:
        """Of a copy's steps, in evaluation mode: dropout would only blur what is asked."""
        learner = probe.copied()
        weights = [p for p in learner.net.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(weights, lr=rate)
        losses: list[float] = []
        for step in range(OVERFIT_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20)
            logits = learner.outputs(batch, grad=True).float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            losses.append(float(loss.detach()))
            if not losses[-1] >= goal or time.monotonic() > deadline:
                break
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return losses

    seen = []
    for rate in (fast, fast / 4):
        losses = losses_at(rate)
        course = f"{losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps at rate {rate:.0e}"
        if losses[-1] < goal:
            return f"loss {course}", losses[-1]
        seen.append(course)
    if time.monotonic() > deadline:
        raise Skipped(f"time ran out: loss {', '.join(seen)}; give more overfit_seconds")
    raise Failed(f"loss {', '.join(seen)}, not below {goal:.2f}", losses[-1])


def _num_classes(probe: Probe) -> int:
    """Of the logits; raises `Skipped` where there is no loss to look at."""
    if probe.outputs_name != "logits":
        name = probe.outputs_name
        raise Skipped(f"the net gives {name}, not logits: it has no loss of its own")
    size = probe.outputs(probe.batch(1)).size(-1)
    if size == 1:
        raise Skipped("the net has one output a text: there is no class to tell apart")
    return size


def _same_values(a: Tensor, b: Tensor) -> bool:
    """Matrices of the same values, also transposed; constant ones tell nothing."""
    if a.dim() != 2 or b.dim() != 2 or bool((a == a.flatten()[0]).all()):
        return False
    return torch.equal(a, b) or torch.equal(a, b.t())


def _lesson(probe: Probe, size: int) -> tuple[Batch, Int[Tensor, "B P"]]:
    """Four rows and what is to be learnt by heart of them.

    Of a causal net that is the next token; of an encoder a random token at each position, or a
    class for each text.
    """
    batch, side = probe.batch(4), probe.written
    ids = batch.ids[side]
    if probe.of_text:
        order = torch.randperm(4, generator=probe.generator).to(ids.device)
        return batch, (order % size)[:, None]
    if probe.causal:
        return batch.replaced(side, ids[:, :-1]), ids[:, 1:]
    return batch, probe.ids(side, *ids.shape)
