"""Checks of weights: gradients, tying, bf16, initial loss, and overfitting one batch."""

import math
import time
from itertools import combinations

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.insight.checks import (
    Failed,
    Outcome,
    Skipped,
    check,
    distance,
    first_non_finite_gradient,
)
from heedful.insight.lookups import EmbeddingLookups
from heedful.insight.probe import NetInputs, Probe

# Maximum of the initial loss above ln V, in nats. Logits with standard deviation s raise the loss
# by about s² / 2.
INITIAL_LOSS_MARGIN = 1.5
# A batch is overfit when its loss is below this fraction of ln V.
OVERFIT_SHARE = 0.1
OVERFIT_STEPS = 300


@check(
    "gradient flow",
    requirement="every parameter that requires a gradient gets one: finite, not all zero",
    hint="A parameter without a gradient is never used, is used under detach() or no_grad(), "
    "or was replaced by another object after it was registered. A gradient of zeros: its output "
    "is multiplied by zero or fully masked.",
    needs=("output shape",),
)
def gradient_flow(probe: Probe) -> Outcome:
    """The gradients of all parameters that require one; shared parameters count once."""
    parameters = dict(probe.net.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    if not trainable:
        raise Skipped("no parameter requires a gradient")
    probe.net.zero_grad(set_to_none=True)
    loss = probe.random_loss(probe.outputs(probe.batch(8), grad=True))
    if not loss.requires_grad:
        raise Failed(f"the {probe.outputs_name} do not depend on any trainable parameter")
    loss.backward()
    defects: dict[str, list[str]] = {}
    for name, parameter in trainable.items():
        if parameter.grad is None:
            defects.setdefault("no gradient", []).append(name)
        elif not bool(parameter.grad.isfinite().all()):
            defects.setdefault("a gradient that is not finite", []).append(name)
        elif not bool(parameter.grad.any()):
            defects.setdefault("a gradient of zeros", []).append(name)
    probe.net.zero_grad(set_to_none=True)
    if defects:
        raise Failed("; ".join(f"{kind}: {', '.join(names)}" for kind, names in defects.items()))
    frozen = len(parameters) - len(trainable)
    more = f"; {frozen} are frozen" if frozen else ""
    return f"all {len(trainable)} parameters get a gradient{more}", None


@check(
    "weight tying",
    requirement="embeddings and output layers with equal weights share one parameter",
    hint="They were tied and became separate (a copy instead of the object, a checkpoint loaded "
    "or a module moved afterwards), or share only their storage: the optimizer then updates "
    "them separately, or twice.",
    needs=("output shape",),
)
def weight_tying(probe: Probe) -> Outcome:
    """Find separate parameters that share memory, and equal ones of which one is an embedding.

    Of two frozen ones neither is updated.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in probe.net.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    with EmbeddingLookups() as lookups:
        probe.outputs(probe.batch(2))
    embeddings = {id(weight) for _, weight, _ in lookups.records}
    embeddings |= {id(m.weight) for m in probe.net.modules() if isinstance(m, nn.Embedding)}
    for first, second in combinations(names, 2):
        if not (first.requires_grad or second.requires_grad):  # tables of sinusoids
            continue
        pair = f"{names[first][0]} and {names[second][0]}"
        if first.data_ptr() == second.data_ptr() and first.numel() and second.numel():
            raise Failed(f"{pair} share their memory but are two parameters")
        if embeddings & {id(first), id(second)} and _same_values(first, second):
            raise Failed(f"{pair} are equal but not tied")
    tied = [" = ".join(group) for group in names.values() if len(group) > 1]
    return f"tied: {'; '.join(tied)}" if tied else "no tied and no equal weights", None


@check(
    "bf16",
    requirement="under bf16 autocast {outputs}, loss and gradients are finite",
    hint="A mask is filled with a number out of the range of bf16 (the lowest fp32 number becomes "
    "-inf), a type is fixed by .float() or by a buffer, or a norm divides by a number that "
    "is rounded to zero.",
    needs=("output shape",),
)
def bf16(probe: Probe) -> Outcome:
    """Outputs, loss and gradients under autocast, with padding if the net supports it."""
    batch, first = probe.batch(3), probe.sides[0]
    if probe.no_padding_reason(first) is None:
        batch = probe.pad(batch, first, probe.row_lengths(first))
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
    if name := first_non_finite_gradient(probe.net):
        raise Failed(f"the gradient of {name} is not finite")
    probe.net.zero_grad(set_to_none=True)
    error = distance(exact[None], outputs.detach()[real][None].to(exact.dtype))
    return f"finite; {probe.outputs_name} within {error:.1e} of full precision", error


@check(
    "initial loss",
    requirement=f"the loss on random tokens is at most {INITIAL_LOSS_MARGIN} nats above "
    "ln {size}",
    hint="The initial logits are too large: embeddings are initialized from N(0, 1) and tied to "
    "the output, weights are initialized before tying, or a norm is missing before the output. "
    "Trained nets fail too: pass fresh=False for them.",
    needs=("output shape",),
)
def initial_loss(probe: Probe) -> Outcome:
    """The expected loss over uniformly distributed labels, without sampling them."""
    if not probe.fresh:
        raise Skipped("the net is trained (fresh=False)")
    size = _num_classes(probe)
    batch = probe.batch(8)
    logits = probe.outputs(batch).float()
    excluded = logits == -math.inf
    if probe.output_kind == "tokens":
        # With tied embeddings the logit of the input token itself is high, which is correct.
        excluded |= F.one_hot(batch.ids[probe.output_side], size).bool()
    mean = logits.masked_fill(excluded, 0.0).sum(-1) / (~excluded).sum(-1)
    loss = float((logits.masked_fill(excluded, -math.inf).logsumexp(-1) - mean).mean())
    excess = loss - math.log(size)
    detail = f"{loss:.2f}; ln {probe.terms['size']} is {math.log(size):.2f}"
    if not excess <= INITIAL_LOSS_MARGIN:
        raise Failed(detail, excess)
    return detail, excess


@check(
    "one batch overfits",
    requirement=f"training on four rows reduces their loss below {OVERFIT_SHARE} ln {{size}}",
    hint="The net cannot learn: a detach(), a missing residual, bounded logits, norms in the "
    "wrong place, targets shifted twice, or initial weights that are far too large.",
    needs=(
        "no dropout in evaluation",
        "causality",
    ),
)
def one_batch_overfits(probe: Probe) -> Outcome:
    """Train with Adam at a learning rate for the net's width, and at a quarter of it.

    Wide and deep nets need lower rates.
    """
    if not probe.overfit:
        raise Skipped("disabled (overfit=False)")
    size = _num_classes(probe)
    if not any(p.requires_grad for p in probe.net.parameters()):
        raise Skipped("no parameter requires a gradient")
    batch, labels = _training_batch(probe, size)
    goal = OVERFIT_SHARE * math.log(size)
    deadline = time.monotonic() + probe.overfit_seconds
    width = max((p.size(-1) for p in probe.net.parameters() if p.dim() > 1), default=128)
    fast = min(3e-3, 0.3 / width)

    def train_at(rate: float) -> list[float]:
        """The losses of the steps of a copy, in evaluation mode, since dropout adds noise."""
        learner = probe.copy_net()
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

    runs = []
    for rate in (fast, fast / 4):
        losses = train_at(rate)
        run = f"{losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps at rate {rate:.0e}"
        if losses[-1] < goal:
            return f"loss {run}", losses[-1]
        runs.append(run)
    if time.monotonic() > deadline:
        raise Skipped(f"out of time: loss {', '.join(runs)}; raise overfit_seconds")
    raise Failed(f"loss {', '.join(runs)}, not below {goal:.2f}", losses[-1])


def _num_classes(probe: Probe) -> int:
    """The size of the logits; raises `Skipped` for nets without a cross-entropy loss."""
    if probe.outputs_name != "logits":
        raise Skipped(f"the net returns {probe.outputs_name}, not logits: it has no loss")
    size = probe.outputs(probe.batch(2)).size(-1)
    if size == 1:
        raise Skipped("the net has a single output: it has no classes")
    return size


def _same_values(a: Tensor, b: Tensor) -> bool:
    """True for matrices with equal values, also transposed; False for constant ones."""
    if a.dim() != 2 or b.dim() != 2 or bool((a == a.flatten()[0]).all()):
        return False
    return torch.equal(a, b) or torch.equal(a, b.t())


def _training_batch(probe: Probe, size: int) -> tuple[NetInputs, Int[Tensor, "B P"]]:
    """Four rows and their labels.

    Labels are the next tokens for a causal net; for an encoder random tokens, or a class per text.
    Every row begins with a token of its own, or equals the row that begins with it and has its
    labels: a net cannot learn other labels for the same input.
    """
    batch, side = probe.batch(4), probe.output_side
    ids, tokens = batch.ids[side], probe.tokens(side).to(probe.device)
    copies = torch.arange(4, device=ids.device) % len(tokens)
    first, wanted = ids[:, :1], tokens[copies][:, None]
    exchanged = torch.where(ids == wanted, first, ids).where(ids != first, wanted)
    ids = exchanged[copies]
    batch = batch.replace_ids(side, ids)
    if probe.is_pooled:
        order = torch.randperm(4, generator=probe.generator).to(ids.device)
        return batch, (order % size)[copies][:, None]
    if probe.causal:
        return batch.replace_ids(side, ids[:, :-1]), ids[:, 1:]
    return batch, probe.ids(side, *ids.shape)[copies]
