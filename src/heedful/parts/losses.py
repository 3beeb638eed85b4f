"""Losses as (sum, count): divided once an optimizer step, by the count over all that it saw."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.parts.heads import OutputHead

# Rows of logits formed at once: 512 rows of a 10,000-word vocabulary are 20 MB of fp32, which
# stays in a desktop processor's last cache.
_CHUNK_ELEMENTS = 5_000_000
# But never fewer rows: each chunk reads the whole matrix and writes its whole gradient.
_LEAST_ROWS = 512
_WIDE = torch.float32


class LossSum(NamedTuple):
    """Sums over target tokens. `loss` is what is trained on; `nll` is without label smoothing.

    `correct` counts targets that were the likeliest token; it is -1 where it was not asked for.
    `tokens` is how many targets were summed over (the count of "sum and count").
    """

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    correct: Int[Tensor, ""]
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_loss(
    head: OutputHead,
    states: Float[Tensor, "N D"],
    targets: Int[Tensor, "N"],
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """`cross_entropy(head(states), targets)` without ever holding the (N, V) logits.

    Rows are taken in chunks, and each chunk's gradient is formed while its probabilities are still
    in the processor's cache (Hsu et al. 2024 do so on GPUs). The head is called, so that what wraps
    or replaces its matrix is seen. Under autocast it runs in that type, the softmax in fp32.
    """
    states = head.transform(states)
    weights = [weight for weight in head.out.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled():
        states, weights = states.detach(), []
    vocab = getattr(head.out, "out_features", _CHUNK_ELEMENTS)  # a wrapper may not say
    rows = max(_LEAST_ROWS, _CHUNK_ELEMENTS // vocab)
    loss, nll, correct = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, targets, head.logits, rows, label_smoothing, count_correct, *weights
    )
    return LossSum(loss, nll, correct, targets.numel())


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        rows: int,
        smoothing: float,
        count_correct: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = bool(ctx.needs_input_grad[0] or weights)
        grad_states = torch.empty_like(states)
        # Summed in fp32 at least: chunks would vanish in a 16-bit weight's own type.
        grads = [w.new_zeros(w.shape, dtype=torch.promote_types(w.dtype, _WIDE)) for w in weights]
        sums = torch.float32 if states.device.type == "mps" else torch.float64
        loss, nll = states.new_zeros(2, dtype=sums)
        correct = targets.new_zeros(()) if count_correct else targets.new_full((), -1)
        chunks = (of.split(rows) for of in (states.detach(), targets[:, None], grad_states))
        for x, target, grad_x in zip(*chunks, strict=True):
            with torch.set_grad_enabled(wanted):
                out = logits_of(x.requires_grad_(wanted))
            logits = out.detach().float()
            if count_correct:
                correct += (logits.argmax(-1, keepdim=True) == target).sum()
            log_probs = F.log_softmax(logits, -1)
            chunk_nll, share = -log_probs.gather(-1, target).sum(), smoothing / logits.size(-1)
            nll += chunk_nll
            loss += (1 - smoothing) * chunk_nll
            if smoothing:
                loss -= share * log_probs.sum()
            if not wanted:
                continue
            grad = log_probs.exp_()  # d loss / d logits = softmax - q
            if smoothing:
                grad -= share
            grad.scatter_add_(-1, target, grad.new_full((1, 1), smoothing - 1).expand_as(target))
            found = torch.autograd.grad(out, (x, *weights), grad.to(out.dtype))
            grad_x.copy_(found[0])
            for total, part in zip(grads, found[1:], strict=True):
                total += part
        ctx.grads = grad_states, [g.to(w.dtype) for g, w in zip(grads, weights, strict=True)]
        nll = nll.float()
        # For reporting only, and kept by callers: neither may hold the gradients in memory.
        ctx.mark_non_differentiable(nll, correct)
        return loss.float(), nll, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, of_weights = ctx.grads
        scale = grads[0]
        return grad_states * scale, *[None] * 5, *(grad * scale for grad in of_weights)
