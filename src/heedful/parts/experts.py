"""Mixture of experts: a router sends each token to a few of several feed-forward networks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.helpers import check_positive, kernel_device, simulated


class Experts(nn.Module):
    """Σ wₑ · expertₑ(x) over the k most probable of E experts (Shazeer et al. 2017, sec. 2).

    w is the softmax over all experts, restricted to the k largest and renormalized (Mixtral; equal
    to a softmax over the k logits).

    Each expert is a module of linear layers, not a slice of one joint tensor, so that wrappers of
    linear layers (LoRA, int8) apply to every expert. On a CPU and in inference an expert is
    called with the tokens routed to it, k / E of the work of all; the token counts are needed on
    the host, which synchronizes with an accelerator once per layer. In a compiled graph, which
    needs fixed shapes, and in a training step on an accelerator, which must not synchronize, every
    expert is called with all tokens, and tokens not routed to it have weight 0.

    Args:
        d_model: width D of the input and the output.
        num_experts: E.
        top_k: k, experts per token.
        expert: makes one expert, a module (…, D) -> (…, D).
        balance_weight: weight of the balance loss in training (`balance_loss`); 0: no such loss.

    Raises:
        UserError: `top_k` is not from 1 to `num_experts`.

    >>> experts = Experts(16, 4, 2, lambda: FeedForward(16))
    >>> experts(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        expert: Callable[[], nn.Module],
        *,
        balance_weight: float = 0.0,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, num_experts=num_experts, top_k=top_k)
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k must be from 1 to num_experts {num_experts}, not {top_k}")
        self.top_k, self.balance_weight = top_k, balance_weight
        self.collected: list[Tensor] | None = None  # filled by `record_router_logits`
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(num_experts))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The weighted sum, for each token, of the outputs of its `top_k` experts."""
        logits = self.router(x)
        if self.collected is not None:
            self.collected.append(logits)
        probs = _probabilities(logits)
        weights, experts = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        device = kernel_device(x)
        must_not_sync = device == "meta" or (device != "cpu" and torch.is_grad_enabled())
        if torch.compiler.is_compiling() or must_not_sync:
            shares = torch.zeros_like(probs).scatter(-1, experts, weights)[..., None].unbind(-2)
            out = sum(w * expert(x) for w, expert in zip(shares, self.experts, strict=True))
            return out.to(x.dtype)
        rows = x.flatten(0, 1)
        out = self._call_routed(rows, experts.flatten(), weights.flatten())
        return out.view_as(x)

    def _call_routed(
        self, rows: Float[Tensor, "N D"], experts: Int[Tensor, "M"], weights: Float[Tensor, "M"]
    ) -> Float[Tensor, "N D"]:
        """Call each expert with the tokens routed to it; M = k · N."""
        order = experts.argsort(stable=True)
        counts = self._count_tokens(experts)
        tokens = order // self.top_k
        # In training also without tokens, so that each weight has a (zero) gradient for DDP.
        parts = zip(rows[tokens].split(counts), self.experts, strict=True)
        outputs = [
            expert(part) for part, expert in parts if part.size(0) or torch.is_grad_enabled()
        ]
        if not outputs:  # no token at all
            return torch.zeros_like(rows)
        weighted = torch.cat(outputs) * weights[order, None]
        return torch.zeros_like(rows).index_add(0, tokens, weighted.to(rows.dtype))

    def _count_tokens(self, experts: Int[Tensor, "M"]) -> list[int]:
        """The number of tokens that each expert is called with."""
        if simulated:  # equally many, as on average
            count, rest = divmod(experts.numel(), len(self.experts))
            return [count + (expert < rest) for expert in range(len(self.experts))]
        counts: list[int] = experts.bincount(minlength=len(self.experts)).tolist()
        return counts


@contextmanager
def record_router_logits(experts: Sequence[Experts]) -> Iterator[list[Tensor]]:
    """Context manager: the list of router logits (B, T, E), one tensor for each call in it.

    It sets an attribute of the modules and resets it on exit: hooks cannot be compiled.
    """
    logits: list[Tensor] = []
    for module in experts:
        module.collected = logits
    try:
        yield logits
    finally:
        for module in experts:
            module.collected = None


def balance_loss(
    logits: Sequence[Float[Tensor, "B T E"]], top_k: int, real: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, ""]:
    """Load-balancing loss E · Σ fₑ pₑ; its minimum k is reached with equally used experts.

    f is the fraction of real tokens routed to an expert, p its mean probability (Fedus et al. 2021,
    eqs. 4 to 6), both over all layers. Only p has a gradient.

    Args:
        logits: router logits of all layers.
        top_k: k, experts per token.
        real: False at padding, which is ignored; default: all tokens are real.
    """
    probs = _probabilities(torch.stack(list(logits)))
    routed = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0)
    weight = probs.new_ones(probs.shape[1:3]) if real is None else real.to(probs.dtype)
    count = weight.sum().clamp(min=1) * len(logits)
    shares, means = (
        (values * weight[..., None]).sum((0, 1, 2)) / count for values in (routed, probs)
    )
    return probs.size(-1) * (shares * means).sum()


def _probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
