"""Losses as (sum, count): divided once an optimizer step, by the count over all that it saw."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

# Logits that are formed at once, but never fewer rows: each chunk reads the whole matrix and writes
# its whole gradient.
_CHUNK_ELEMENTS = 5_000_000
_LEAST_ROWS = 512
# Of these, what a processor's core reads several times for the loss: 2 MB of fp32.
_BLOCK_ELEMENTS = 500_000


class LossSum(NamedTuple):
    """Sums over target tokens. `loss` is what is trained on; `nll` is without label smoothing.

    `correct` counts targets that were the likeliest token; None where it was not asked for.
    `tokens` is how many targets were summed over (the count of "sum and count").
    """

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    correct: Int[Tensor, ""] | None
    tokens: int


def cross_entropy(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"], *, label_smoothing: float = 0.0
) -> LossSum:
    """-Σ q log p with q = (1 - ε) at the target and ε / V on each of all V classes.

    This is the smoothing of Szegedy et al. 2016, sec. 7, as in `torch.nn.functional.cross_entropy`:
    the target's own class and the padding's have their share of ε. Give real targets only.
    """
    log_probs = logits.float().log_softmax(-1)
    nll = -log_probs.gather(-1, targets[:, None]).sum()
    loss = nll
    if label_smoothing:
        uniform = -log_probs.sum() / log_probs.size(-1)
        loss = (1 - label_smoothing) * nll + label_smoothing * uniform
    correct = (logits.argmax(-1) == targets).sum()
    return LossSum(loss, nll.detach(), correct, targets.numel())


class ChunkLoss(NamedTuple):
    """Of some rows: the sums of a `LossSum`, and d loss / d logits where it was asked for."""

    loss: Tensor
    nll: Tensor
    correct: Tensor | None
    grad: Tensor | None


ChunkLossFunction = Callable[[Float[Tensor, "... n V"], Int[Tensor, "n"], bool], ChunkLoss]


def head_loss(
    head: nn.Module,
    states: Float[Tensor, "N D"],
    targets: Int[Tensor, "N"],
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """`cross_entropy(head(states), targets)` without ever holding the (N, V) logits."""

    def loss_of(logits: Tensor, target: Tensor, wanted: bool) -> ChunkLoss:
        place, vocab = target[:, None], logits.size(-1)
        correct = (logits.argmax(-1) == target).sum() if count_correct else None
        probs = F.softmax(logits, -1)
        # log Σ exp from the likeliest token, whose probability is never small: one soft-max is all.
        log_sums = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
        nll = (log_sums - logits.gather(-1, place)).sum()
        loss = (1 - label_smoothing) * nll
        if label_smoothing:
            loss += label_smoothing * (log_sums.sum() - logits.sum() / vocab)
        if not wanted:
            return ChunkLoss(loss, nll, correct, None)
        grad = probs.sub_(label_smoothing / vocab)  # d loss / d logits = softmax - q
        grad.scatter_add_(-1, place, grad.new_full((1, 1), label_smoothing - 1).expand_as(place))
        return ChunkLoss(loss, nll, correct, grad)

    return chunked_loss(head, states, targets, loss_of)


def chunked_loss(
    head: nn.Module,
    states: Float[Tensor, "... N D"],
    targets: Int[Tensor, "N"],
    loss_of: ChunkLossFunction,
) -> LossSum:
    """A loss of a head's logits, which are formed some rows at a time, with their gradient at once.

    The gradient of a few rows is formed while they are still in the processor's cache; Hsu et al.
    2024 do so on GPUs, where a whole chunk is worked on at once. The head is called as a module, so
    that whatever wraps it or its matrix (LoRA, FSDP2) is seen. Under autocast it runs in that type,
    the loss in fp32.

    All logits are formed at once in a compiled step, and for a head that FSDP2 shards by itself:
    its weights are gathered for a call and for the backward pass of the step, not between. One that
    is sharded with the step (the root) is called in chunks.

    Args:
        states: (N, D), or more of the same targets, as (2, N, D) of two passes.
        loss_of: from logits (..., n, V) in fp32, targets (n,), and whether the gradient is wanted.
    """
    if torch.compiler.is_compiling() or _is_sharded(head):
        return _whole_loss(head(states), targets, loss_of)
    sums = torch.float32 if states.device.type == "mps" else torch.float64
    loss, nll = states.new_zeros(2, dtype=sums)
    correct: Tensor | None = None
    wanted = torch.is_grad_enabled() and (
        states.requires_grad or any(p.requires_grad for p in head.parameters())
    )
    gradients = _Gradients(states)
    rows = _rows_at_once(head, states)
    for x, target in zip(states.detach().split(rows, -2), targets.split(rows), strict=True):
        with torch.set_grad_enabled(wanted):
            out = head(x.requires_grad_(wanted))
        grad = torch.empty_like(out) if wanted else out
        passes = states.shape[:-2].numel()
        block = max(1, _BLOCK_ELEMENTS // (passes * out.size(-1)))
        block = block if out.device.type == "cpu" else rows
        blocks = (out.detach().split(block, -2), target.split(block), grad.split(block, -2))
        for logits, some, place in zip(*blocks, strict=True):
            found = loss_of(logits.float(), some, wanted)
            loss += found.loss
            nll += found.nll
            if found.correct is not None:
                correct = found.correct if correct is None else correct + found.correct
            if found.grad is not None:
                place.copy_(found.grad)
        if wanted:
            gradients.add(x, out, grad)
    total = loss.float()
    if wanted:
        total = gradients.attached_to(total)
    return LossSum(total, nll.float(), correct, targets.numel())


def _whole_loss(
    logits: Float[Tensor, "... N V"], targets: Int[Tensor, "N"], loss_of: ChunkLossFunction
) -> LossSum:
    """The loss of all logits at once, whose own gradient goes back through the head."""
    found = loss_of(logits.detach().float(), targets, logits.requires_grad)
    loss = found.loss.float()
    if found.grad is not None:
        loss = _Attached.apply(loss, (found.grad.to(logits.dtype),), logits)  # type: ignore[no-untyped-call]
    return LossSum(loss, found.nll.float(), found.correct, targets.numel())


def _is_sharded(head: nn.Module) -> bool:
    """Whether FSDP2 shards a head, or a part of it, by itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: then nothing is sharded
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in head.modules())


def _rows_at_once(head: nn.Module, states: Tensor) -> int:
    """Rows of a chunk, by the number of logits that one has."""
    vocab = getattr(getattr(head, "out", head), "out_features", 10_000)  # a wrapper may not say
    return max(_LEAST_ROWS, _CHUNK_ELEMENTS // vocab)


class _Gradients:
    """The gradients of a loss that is formed chunk by chunk: of the states and of the weights.

    The weights are found in the graph of a chunk, so that they are those that the head was called
    with: FSDP2 exchanges the parameters of a module while it is called.
    """

    def __init__(self, states: Tensor) -> None:
        self.states = states
        self.of_states: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.of_weights: list[Tensor] = []

    def add(self, x: Tensor, out: Tensor, grad: Tensor) -> None:
        """The gradients of one chunk `out` of logits, of which `grad` is the gradient."""
        if not self.of_states:
            self.weights = [leaf for leaf in _leaves(out) if leaf is not x]
            # Summed in fp32 at least: chunks would vanish in a 16-bit weight's own type.
            self.of_weights = [
                w.new_zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32))
                for w in self.weights
            ]
        of_x, *of_weights = torch.autograd.grad(out, (x, *self.weights), grad)
        self.of_states.append(of_x)
        for total, part in zip(self.of_weights, of_weights, strict=True):
            total += part

    def attached_to(self, loss: Tensor) -> Tensor:
        """The loss, whose backward pass gives these gradients."""
        of_states = torch.cat(self.of_states, -2)
        of_weights = [g.to(w.dtype) for g, w in zip(self.of_weights, self.weights, strict=True)]
        attached: Tensor = _Attached.apply(  # type: ignore[no-untyped-call]
            loss, (of_states, *of_weights), self.states, *self.weights
        )
        return attached


class _Attached(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, grads: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad * scales[0] for grad in ctx.grads)


def _leaves(out: Tensor) -> list[Tensor]:
    """The leaves of a tensor's graph that want a gradient, each once."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    left = [out.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        left += [parent for parent, _ in node.next_functions]
    return found
