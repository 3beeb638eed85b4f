"""R-Drop: a loss on the divergence of two passes of a batch under different dropout."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heedful.data.collate import Batch
from heedful.evaluation.likelihood import target_states
from heedful.parts.losses import ChunkLoss, LossSum, chunked_loss


@dataclass(frozen=True)
class RDropLoss:
    """The loss of two passes of a batch, and their divergence: with the cross-entropies
    H₁ and H₂, ½ (H₁ + H₂) + ½ α · ½ (KL(p₁‖p₂) + KL(p₂‖p₁)), summed over the targets.

    Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks", eqs. 2 to 4. The
    paper sums the passes; the mean used here is half of that, of the size of one pass. Logits and
    their gradient are computed in chunks (`chunked_loss`).

    Args:
        alpha: the paper's α, the weight of the divergence.
    """

    alpha: float
    label_smoothing: float = 0.0

    def __call__(self, net: Any, batch: Batch) -> LossSum:
        states = torch.stack([target_states(net, batch) for _ in range(2)])
        return chunked_loss(net.head, states, batch.targets, self._loss_of)

    def _loss_of(self, logits: Tensor, target: Tensor, needs_grad: bool) -> ChunkLoss:
        """Loss and gradient from the logits (2, n, V) of both passes."""
        smoothing, alpha = self.label_smoothing, self.alpha
        index = target.expand(2, -1)[..., None]
        log_probs = logits.log_softmax(-1)
        nll = -log_probs.gather(-1, index).sum() / 2
        loss = (1 - smoothing) * nll - smoothing / 2 * log_probs.mean(-1).sum()
        correct = (log_probs.sum(0).argmax(-1) == target).sum()
        ratio = log_probs[0] - log_probs[1]
        probs = log_probs.exp_()
        grad = probs * ratio
        means = grad.sum(-1, keepdim=True)  # KL(p₁‖p₂) and -KL(p₂‖p₁) of each row
        loss += alpha / 4 * (means[0] - means[1]).sum()
        if not needs_grad:
            return ChunkLoss(loss, nll, correct, None)
        # d KL(p₁‖p₂) / d z₁ = p₁ (log p₁/p₂ - KL(p₁‖p₂)), d KL(p₂‖p₁) / d z₁ = p₁ - p₂
        torch.addcmul(grad, probs, means, value=-1, out=grad)
        torch.sub(probs[0], probs[1], out=ratio)
        grad[0].add_(ratio)
        grad[1].add_(ratio).neg_()
        grad.mul_(alpha / 4).add_(probs, alpha=0.5).sub_(smoothing / 2 / probs.size(-1))
        grad.scatter_add_(-1, index, grad.new_full((1, 1, 1), (smoothing - 1) / 2).expand_as(index))
        return ChunkLoss(loss, nll, correct, grad)
