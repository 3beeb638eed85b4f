"""R-Drop: two passes of a batch under different dropout are to say the same."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heedful.data.collate import Batch
from heedful.evaluation.likelihood import target_states
from heedful.parts.heads import ClassificationHead
from heedful.parts.losses import LossSum

# Logits of each pass that are formed at once: they are read more often than those of `head_loss`.
_CHUNK_ELEMENTS = 1_250_000


class RDrop:
    """A task's objective in the mean of two passes, and their divergence: with the cross-entropies
    H₁ and H₂, ½ (H₁ + H₂) + ½ α · ½ (KL(p₁‖p₂) + KL(p₂‖p₁)), summed over the targets.

    Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks", eqs. 2 to 4. Theirs is the
    double, as they add the passes up; the mean keeps the loss at the size of one pass. As in
    `head_loss` the logits are formed some at a time, with their gradient at once.

    Args:
        alpha: the paper's α, the weight of the divergence.
    """

    def __init__(self, alpha: float, label_smoothing: float = 0.0) -> None:
        self.alpha = alpha
        self.label_smoothing = label_smoothing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, net: Any, batch: Batch) -> LossSum:
        states, head = torch.stack([target_states(net, batch) for _ in range(2)]), net.head
        logits_of = out = head
        if not isinstance(head, ClassificationHead):
            states, logits_of, out = head.transform(states), head.logits, head.out
        rows = max(1, _CHUNK_ELEMENTS // getattr(out, "out_features", 1))
        weights = [weight for weight in out.parameters() if weight.requires_grad]
        loss, nll, correct = _TwoPasses.apply(  # type: ignore[no-untyped-call]
            states, batch.targets, logits_of, rows, self.alpha, self.label_smoothing, *weights
        )
        return LossSum(loss, nll, correct, batch.targets.numel())


class _TwoPasses(torch.autograd.Function):
    """Loss, nll and correct of `RDrop` from the states (2, M, D) of both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        rows: int,
        alpha: float,
        smoothing: float,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = [torch.zeros_like(each) for each in (states, *weights)]
        loss, nll = states.new_zeros(2, dtype=torch.float32)
        correct = targets.new_zeros(())
        chunks = (states.detach().split(rows, 1), targets.split(rows), grads[0].split(rows, 1))
        for both, target, grad_both in zip(*chunks, strict=True):
            with torch.enable_grad():
                x = both.flatten(0, 1).requires_grad_()
                out = logits_of(x)
            log_probs = out.detach().float().log_softmax(-1).unflatten(0, (2, -1))
            place = target.expand(2, -1)[..., None]
            chunk_nll = -log_probs.gather(-1, place).sum() / 2
            nll += chunk_nll
            loss += (1 - smoothing) * chunk_nll - smoothing / 2 * log_probs.mean(-1).sum()
            correct += (log_probs.sum(0).argmax(-1) == target).sum()
            ratio = log_probs[0] - log_probs[1]
            probs = log_probs.exp_()
            grad = probs * ratio
            means = grad.sum(-1, keepdim=True)  # KL(p₁‖p₂) and -KL(p₂‖p₁) of each row
            loss += alpha / 4 * (means[0] - means[1]).sum()
            # d KL(p₁‖p₂) / d z₁ = p₁ (log p₁/p₂ - KL(p₁‖p₂)), d KL(p₂‖p₁) / d z₁ = p₁ - p₂
            torch.addcmul(grad, probs, means, value=-1, out=grad)
            torch.sub(probs[0], probs[1], out=ratio)
            grad[0].add_(ratio)
            grad[1].add_(ratio).neg_()
            grad.mul_(alpha / 4).add_(probs, alpha=0.5).sub_(smoothing / 2 / probs.size(-1))
            grad.scatter_add_(
                -1, place, grad.new_full((1, 1, 1), (smoothing - 1) / 2).expand_as(place)
            )
            grad = grad.flatten(0, 1).to(out.dtype)
            of_x, *of_weights = torch.autograd.grad(out, (x, *weights), grad)
            grad_both.copy_(of_x.unflatten(0, (2, -1)))
            for total, part in zip(grads[1:], of_weights, strict=True):
                total += part
        ctx.grads = grads
        ctx.mark_non_differentiable(nll, correct)
        return loss, nll, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_states, *of_weights = (grad * grads[0] for grad in ctx.grads)
        return of_states, *[None] * 5, *of_weights
