"""Losses as (sum, count): divided once an optimizer step, by the count over all that it saw."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.heads import OutputHead

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


ChunkLossOf = Callable[[Float[Tensor, "... n V"], Int[Tensor, "n"], bool], ChunkLoss]


def head_loss(
    head: OutputHead,
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunked_loss(
    head: nn.Module,
    states: Float[Tensor, "... N D"],
    targets: Int[Tensor, "N"],
    loss_of: ChunkLossOf,
) -> LossSum:
    """A loss of a head's logits, which are formed some rows at a time, with their gradient at once.

    The gradient of a few rows is formed while they are still in the processor's cache; Hsu et al.
    2024 do so on GPUs, where a whole chunk is worked on at once. The head is called, so that what
    wraps or replaces its matrix is seen. Under autocast it runs in that type, the loss in fp32.

    Args:
        states: (N, D), or more of the same targets, as (2, N, D) of two passes.
        loss_of: from logits (..., n, V) in fp32, targets (n,), and whether the gradient is wanted.
    """
    logits_of: Callable[[Tensor], Tensor] = head
    out = head
    if isinstance(head, OutputHead):
        states, logits_of, out = head.transform(states), head.logits, head.out
    weights = [weight for weight in out.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled():
        states, weights = states.detach(), []
    vocab = getattr(out, "out_features", 10_000)  # a wrapper may not say
    rows = max(_LEAST_ROWS, _CHUNK_ELEMENTS // vocab)
    passes = states.shape[:-2].numel()
    block = max(1, _BLOCK_ELEMENTS // (passes * vocab)) if states.device.type == "cpu" else rows
    loss, nll, correct = _Chunked.apply(  # type: ignore[no-untyped-call]
        states, targets, logits_of, (rows, block), loss_of, *weights
    )
    return LossSum(loss, nll, correct, targets.numel())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        sizes: tuple[int, int],
        loss_of: ChunkLossOf,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows, block = sizes
        wanted = bool(ctx.needs_input_grad[0] or weights)
        grad_states = torch.empty_like(states)
        # Summed in fp32 at least: chunks would vanish in a 16-bit weight's own type.
        grads = [
            w.new_zeros(w.shape, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights
        ]
        sums = torch.float32 if states.device.type == "mps" else torch.float64
        loss, nll = states.new_zeros(2, dtype=sums)
        correct: Tensor | None = None
        chunks = (states.detach().split(rows, -2), targets.split(rows), grad_states.split(rows, -2))
        for x, target, grad_x in zip(*chunks, strict=True):
            with torch.set_grad_enabled(wanted):
                out = logits_of(x.requires_grad_(wanted))
            grad = torch.empty_like(out)
            blocks = (out.detach().split(block, -2), target.split(block), grad.split(block, -2))
            for logits, some, place in zip(*blocks, strict=True):
                found = loss_of(logits.float(), some, wanted)
                loss += found.loss
                nll += found.nll
                if found.correct is not None:
                    correct = found.correct if correct is None else correct + found.correct
                if found.grad is not None:
                    place.copy_(found.grad)
            if not wanted:
                continue
            of_x, *of_weights = torch.autograd.grad(out, (x, *weights), grad)
            grad_x.copy_(of_x)
            for total, part in zip(grads, of_weights, strict=True):
                total += part
        ctx.grads = grad_states, [g.to(w.dtype) for g, w in zip(grads, weights, strict=True)]
        nll = nll.float()
        # For reporting only, and kept by callers: neither may hold the gradients in memory.
        ctx.mark_non_differentiable(nll, *(() if correct is None else (correct,)))
        return loss.float(), nll, correct

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        grad_states, of_weights = ctx.grads
        return grad_states * scale, *[None] * 4, *(grad * scale for grad in of_weights)
