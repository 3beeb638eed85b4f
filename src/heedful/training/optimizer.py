"""The optimizer of a run, and its state as named tensors."""

import torch
from torch import Tensor, nn

from heedful.config import Optimizer


def make_optimizer(net: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Adam or AdamW over all parameters; AdamW decays matrices only, not biases and norms.

    The learning rate is set before every step by the trainer, from its schedule.
    """
    if settings.name == "adam":
        return torch.optim.Adam(
            net.parameters(), lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
        )
    parameters = list(net.parameters())
    groups = [
        {
            "params": [p for p in parameters if p.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Its state, each tensor named by its parameter: `weight.exp_avg` and so on."""
    return {
        f"{name}.{key}": value
        for name, parameter in net.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    net: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Put back what `optimizer_tensors` gave."""
    for name, parameter in net.named_parameters():
        prefix = f"{name}."
        optimizer.state[parameter] = {
            key.removeprefix(prefix): value.to(parameter.device)
            for key, value in tensors.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }
