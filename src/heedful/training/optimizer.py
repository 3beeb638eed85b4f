"""The optimizer of a run, and its state as named tensors."""

import torch
from torch import Tensor, nn

from heedful.config import Optimizer


def make_optimizer(net: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Adam or AdamW over all parameters; AdamW decays matrices only, not biases and norms.

    Muon is for the matrices of the blocks' linears, beside AdamW for all else. The learning rate is
    set before every step by the trainer, from its schedule.
    """
    if settings.name == "adam":
        return torch.optim.Adam(
            net.parameters(), lr=0.0, betas=settings.betas, eps=settings.eps, fused=True
        )
    linears = _linears_of_blocks(net) if settings.name == "muon" else []
    parameters = [p for p in net.parameters() if all(p is not matrix for matrix in linears)]
    groups = [
        {
            "params": [p for p in parameters if p.dim() > 1],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    return MuonBesideAdamW(linears, adamw, settings.weight_decay) if linears else adamw


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for the other parameters, as one optimizer.

    Muon steps along the gradient's momentum with all its singular values made alike (Jordan et al.
    2024, "Muon: An optimizer for hidden layers in neural networks"; not for embeddings, output,
    biases and norms). Its steps are scaled to the size of AdamW's (Liu et al. 2025, "Muon is
    Scalable for LLM Training", sec. 2.2), so that both share one learning rate.
    """

    def __init__(
        self, matrices: list[Tensor], adamw: torch.optim.AdamW, weight_decay: float
    ) -> None:
        muon = torch.optim.Muon(
            matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        groups = [*muon.param_groups, *adamw.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # the same that both parts have, as is the state
        muon.state = adamw.state = self.state
        self._muon, self._adamw, self._matrices = muon, adamw, matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both; none where the tensor `found_inf` is 1, as for a fused optimizer."""
        found_inf = getattr(self, "found_inf", None)
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        before = [matrix.clone() for matrix in self._matrices]
        self._adamw.step()
        self._muon.step()
        if found_inf is not None:
            for matrix, kept in zip(self._matrices, before, strict=True):
                matrix.copy_(torch.where(found_inf > 0, kept, matrix))


def _linears_of_blocks(net: nn.Module) -> list[Tensor]:
    return [
        module.weight
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name and module.weight.requires_grad
    ]


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
