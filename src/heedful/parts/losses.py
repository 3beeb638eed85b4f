"""Losses as (sum, count): divided once an optimizer step, by the count over all that it saw."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heedful.parts.heads import OutputHead

# Rows of logits formed at once: 512 rows of a 10,000-word vocabulary are 20 MB of fp32, which
# stays in a desktop processor's last cache.
_CHUNK_ELEMENTS = 5_000_000
# But never fewer rows: each chunk reads the whole matrix and writes its whole gradient.
_LEAST_ROWS = 512


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


def head_loss(
    head: OutputHead,
    states: Float[Tensor, "N D"],
    targets: Int[Tensor, "N"],
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """`cross_entropy(head(states), targets)` without ever holding the (N, V) logits.

    A plain output matrix is read by the fused kernel below. One that was wrapped or replaced is
    called, a chunk of rows at a time, and once more on the way back.
    """
    hidden = head.transform(states)
    if type(head.out) is nn.Linear and head.softcap is None and not _is_hooked(head.out):
        return linear_cross_entropy(
            hidden,
            head.out.weight,
            targets,
            head.out.bias,
            label_smoothing=label_smoothing,
            count_correct=count_correct,
        )
    found = [
        checkpoint(_chunk_sums, head, x, target, label_smoothing, use_reentrant=False)
        for x, target in zip(hidden.split(_LEAST_ROWS), targets.split(_LEAST_ROWS), strict=True)
    ]
    loss, nll, correct = (torch.stack(column).sum() for column in zip(*found, strict=True))
    return LossSum(loss, nll.detach(), correct, targets.numel())


def _chunk_sums(
    head: OutputHead, x: Tensor, targets: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy(head.logits(x), targets, label_smoothing=label_smoothing)[:3]


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def linear_cross_entropy(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "N"],
    bias: Float[Tensor, "V"] | None = None,
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """`cross_entropy(hidden @ weight.T + bias, targets)` without ever holding the (N, V) logits.

    Rows are taken in chunks, and each chunk's gradient is formed while its probabilities are still
    in the processor's cache (Hsu et al. 2024 do so on GPUs). Under autocast the products run in its
    type, the softmax in fp32.
    """
    device = hidden.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        loss, nll, correct = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, bias, label_smoothing, count_correct, product_dtype
        )
    return LossSum(loss, nll, correct, targets.numel())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        smoothing: float,
        count_correct: bool,
        product_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        vocab = weight.size(0)
        dtype = product_dtype or hidden.dtype
        matrix = weight.detach().to(dtype)
        chunk = max(_LEAST_ROWS, _CHUNK_ELEMENTS // vocab)
        want = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if want else None
        # Summed in fp32 at least: chunks would vanish in a 16-bit weight's own type.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if want else None
        grad_bias = torch.zeros_like(bias) if want and bias is not None else None
        sums = torch.float32 if hidden.device.type == "mps" else torch.float64
        loss, nll = hidden.new_zeros(2, dtype=sums)
        correct = targets.new_zeros(()) if count_correct else targets.new_full((), -1)
        for start in range(0, targets.numel(), chunk):
            part = slice(start, start + chunk)
            x, target = hidden[part].detach().to(dtype), targets[part, None]
            logits = (x @ matrix.T).float()
            if bias is not None:
                logits += bias.detach()
            if count_correct:
                correct += (logits.argmax(-1, keepdim=True) == target).sum()
            log_probs = F.log_softmax(logits, -1)
            chunk_nll = -log_probs.gather(-1, target).sum()
            nll += chunk_nll
            loss += (1 - smoothing) * chunk_nll
            if smoothing:
                loss -= smoothing / vocab * log_probs.sum()
            if grad_hidden is None or grad_weight is None:
                continue
            # d loss / d logits = softmax - q
            grad = log_probs.exp_()
            if smoothing:
                grad -= smoothing / vocab
            grad.scatter_add_(-1, target, grad.new_full((1, 1), smoothing - 1).expand_as(target))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ matrix
            grad_weight += grad.T @ x
        ctx.grads = (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            grad_bias,
        )
        nll = nll.float()
        # For reporting only, and kept by callers: neither may hold the gradients in memory.
        ctx.mark_non_differentiable(nll, correct)
        return loss.float(), nll, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.grads
        scale = grads[0]
        scaled_bias = None if grad_bias is None else grad_bias * scale
        return grad_hidden * scale, grad_weight * scale, None, scaled_bias, None, None, None
