"""Experts: feed-forward networks of which a router chooses a few for each token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class Experts(nn.Module):
    """Σ wₑ · expertₑ(x) over the k likeliest of E experts (Shazeer et al. 2017, sec. 2).

    w is the softmax over all experts, of which the k largest are kept and divided by their sum
    (Mixtral's order, the same as a softmax over the k logits).

    Each expert is a module of linears that are called, not a slice of one joint tensor, so that a
    wrapper of linears sees every one. An expert is called with the tokens that chose it and no
    others, k / E of the work of all. Their number must be known on the host, for which an
    accelerator is waited for once a layer. A graph needs fixed shapes, and a training step on an
    accelerator must not wait: there each expert is called with all tokens, and those that did not
    choose it count 0.

    Args:
        num_experts: E.
        top_k: k, experts of a token.
        expert: makes one: (…, D) -> (…, D).
        balance_weight: of the balance loss in training (`balance_loss`); 0: there is none.
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
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be from 1 to num_experts {num_experts}, not {top_k}")
        self.top_k, self.balance_weight = top_k, balance_weight
        self.collected: list[Tensor] | None = None  # of a training step, while it runs
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(num_experts))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        logits = self.router(x)
        if self.collected is not None:
            self.collected.append(logits)
        probs = _probabilities(logits)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        device = x.device.type
        must_not_wait = device == "meta" or (device != "cpu" and torch.is_grad_enabled())
        if torch.compiler.is_compiling() or must_not_wait:
            shares = torch.zeros_like(probs).scatter(-1, chosen, weights)[..., None].unbind(-2)
            out = sum(w * expert(x) for w, expert in zip(shares, self.experts, strict=True))
            return out.to(x.dtype)
        rows, flat = x.flatten(0, 1), chosen.flatten()
        out = self._each_its_own(rows, flat, weights.flatten())
        return out.view_as(x)

    def _each_its_own(
        self, rows: Float[Tensor, "N D"], chosen: Int[Tensor, "M"], weights: Float[Tensor, "M"]
    ) -> Float[Tensor, "N D"]:
        """Each expert with the tokens that chose it; M = k · N."""
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        tokens = order // self.top_k
        # In training also with no token, so that each weight has a gradient (zero) for DDP.
        parts = zip(rows[tokens].split(counts), self.experts, strict=True)
        found = [e(part) for part, e in parts if part.size(0) or torch.is_grad_enabled()]
        weighted = torch.cat(found) * weights[order, None]
        return torch.zeros_like(rows).index_add(0, tokens, weighted.to(rows.dtype))


@contextmanager
def record_router_logits(experts: Sequence[Experts]) -> Iterator[list[Tensor]]:
    """Collects the logits (B, T, E) of these experts' routers, call by call, while it is open.

    By an attribute, not by hooks, which cannot be compiled; nothing of it stays on the modules.
    """
    logits: list[Tensor] = []
    for each in experts:
        each.collected = logits
    try:
        yield logits
    finally:
        for each in experts:
            each.collected = None


def balance_loss(
    logits: Sequence[Float[Tensor, "B T E"]], top_k: int, real: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, ""]:
    """E · Σ fₑ pₑ, least (k) where all experts are chosen equally often.

    f is the share of real tokens that choose an expert, p its mean probability (Fedus et al. 2021,
    eqs. 4 to 6), both over all layers together. Only p has a gradient.

    Args:
        logits: of the routers of all layers.
        real: False at padding, which does not count; default: all are real.
    """
    probs = _probabilities(torch.stack(list(logits)))
    chosen = torch.zeros_like(probs).scatter(-1, probs.topk(top_k, dim=-1).indices, 1.0)
    weight = probs.new_ones(probs.shape[1:3]) if real is None else real.to(probs.dtype)
    count = weight.sum().clamp(min=1) * len(logits)
    shares, means = ((each * weight[..., None]).sum((0, 1, 2)) / count for each in (chosen, probs))
    return probs.size(-1) * (shares * means).sum()


def _probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
