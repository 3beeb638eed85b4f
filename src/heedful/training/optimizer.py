"""The optimizer of a run and the precision of its steps, and their state as named tensors."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.amp import GradScaler

from heedful.config import Optimizer
from heedful.errors import UserError
from heedful.hardware import has_fast_bf16_products
from heedful.training.shards import shard_like
from heedful.zoo.saved import trainable

AUTOCAST = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SCALER = {"scale": "scaler.scale", "_growth_tracker": "scaler.growth_tracker"}
_MOMENTUM = 0.95  # Nesterov momentum of Muon
_STACK_ELEMENTS = 2**24  # of matrices that Muon updates at once, which need some copies


def make_optimizer(
    net: nn.Module, settings: Optimizer, *, layer_decay: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters: Adam, AdamW or Muon.

    AdamW decays matrices only, not biases and norms. Muon updates the matrices of linears in
    blocks, and AdamW all other parameters. The trainer sets the learning rate of each group before
    every step, multiplied by the group's `lr_factor`.

    Args:
        layer_decay: ratio of the learning rates of a block and of the one above it.
    """
    factors = _lr_factors(net, layer_decay)
    linears: set[int] = set()
    if settings.name == "muon":
        blocks = [module for name, module in net.named_modules() if "blocks." in name]
        linears = {id(module.weight) for module in blocks if isinstance(module, nn.Linear)}
    groups: dict[tuple[bool, float, float], list[Tensor]] = {}
    for name, parameter in trainable(net).items():
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        key = (id(parameter) in linears, decay, factors[name])
        groups.setdefault(key, []).append(parameter)
    muon, others = (
        [
            {"params": parameters, "weight_decay": decay, "lr_factor": factor}
            for (is_muon, decay, factor), parameters in groups.items()
            if is_muon == for_muon
        ]
        for for_muon in (True, False)
    )
    cls = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    adam = cls(others, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)
    return MuonWithAdamW(muon, adam) if muon else adam


def _lr_factors(net: nn.Module, layer_decay: float) -> dict[str, float]:
    """Factor of the learning rate of each parameter: `layer_decay` to the power of its depth.

    The depth counts the blocks above it in its stack (Clark et al. 2020, ELECTRA); embeddings are
    below all blocks, and all other parameters (final norm, head) above them.
    """
    indices = {name: re.match(r"(.*)\.blocks\.(\d+)\.", name) for name, _ in net.named_parameters()}
    pairs = {(match[1], match[2]) for match in indices.values() if match is not None}
    blocks = Counter(stack for stack, _ in pairs)
    factors = {}
    for name, match in indices.items():
        depth = 0
        if match is not None:
            depth = blocks[match[1]] - 1 - int(match[2])
        elif "embedding" in name:
            depth = max(blocks.values(), default=0)
        factors[name] = layer_decay**depth
    return factors


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for the other parameters, as one optimizer.

    The update of Muon is the orthogonalized momentum of the gradient (Jordan et al. 2024, "Muon: An
    optimizer for hidden layers in neural networks"; not for embeddings, output layer, biases and
    norms). It is scaled to the root mean square of AdamW's updates (Liu et al. 2025, "Muon is
    Scalable for LLM Training", sec. 2.2), so that both share one learning rate.

    If `found_inf` is 1, a step changes neither weights nor state, as in torch's fused optimizers.
    `torch.optim.Muon` has the same results, but no such flag. On devices whose bf16 products are
    not faster the update is computed in fp32: with emulated ones it takes a CPU 15 times as long.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], adamw: torch.optim.Optimizer) -> None:
        super().__init__([{"lr": 0.0, **group} for group in groups] + adamw.param_groups, {})
        self._muon_groups = self.param_groups[: len(groups)]
        self.param_groups[len(groups) :] = adamw.param_groups  # shared, as is the state
        adamw.state = self.state
        self._adamw = adamw
        device = groups[0]["params"][0].device
        self._type = torch.bfloat16 if has_fast_bf16(device) else torch.float32
        self.found_inf = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both optimizers; does not wait for the device."""
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        for group in self._muon_groups:
            self._step_matrices(group, self.found_inf > 0)

    def _step_matrices(self, group: dict[str, Any], skipped: Tensor) -> None:
        """A step of Muon for the matrices of a group; without effect where `skipped` is True."""
        lr, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        momentum_weight = torch.where(skipped, 0.0, 1 - _MOMENTUM)
        decay_factor = torch.where(skipped, 1.0, decay)
        for matrices in _stacks(group["params"]):
            directions = [self._direction(m, skipped, momentum_weight) for m in matrices]
            stack = directions[0] if len(directions) == 1 else torch.stack(directions)
            updates = _orthogonal(stack).masked_fill_(skipped, 0.0)
            for matrix, update in zip(
                matrices, (updates,) if len(matrices) == 1 else updates, strict=True
            ):
                matrix.mul_(decay_factor)
                matrix.add_(update, alpha=-lr * 0.2 * math.sqrt(max(matrix.shape)))

    def _direction(self, matrix: Tensor, skipped: Tensor, weight: Tensor) -> Tensor:
        """The momentum of a matrix by Nesterov's rule, in the type of the update."""
        assert matrix.grad is not None
        gradient = matrix.grad.masked_fill_(skipped, 0.0)
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, weight)
        return gradient.lerp(momentum, _MOMENTUM).to(self._type)


def _stacks(matrices: Sequence[Tensor]) -> list[list[Tensor]]:
    """Matrices with gradients, in lists that are updated at once.

    On a GPU those of one shape are together, since there the launches of small products take most
    of the time; elsewhere each is alone.
    """
    by_shape: dict[Any, list[Tensor]] = {}
    for matrix in matrices:
        if matrix.grad is not None:
            by_shape.setdefault(matrix.shape, []).append(matrix)
    stacks = []
    for same in by_shape.values():
        is_gpu = same[0].device.type == "cuda"
        size = max(1, _STACK_ELEMENTS // same[0].numel()) if is_gpu else 1
        stacks += [same[start : start + size] for start in range(0, len(same), size)]
    return stacks


def _orthogonal(matrices: Float[Tensor, "*N R C"]) -> Float[Tensor, "*N R C"]:
    """U Vᵀ of a matrix U S Vᵀ, or of each of N matrices, approximated by five Newton-Schulz steps
    (Jordan et al.)."""
    is_tall, is_one = matrices.size(-2) > matrices.size(-1), matrices.dim() == 2
    add_product: Any = torch.addmm if is_one else torch.baddbmm
    wide = matrices.mT if is_tall else matrices
    norms = wide.norm() if is_one else wide.norm(dim=(-2, -1), keepdim=True)
    wide = wide / norms.clamp(min=1e-7)  # singular values of at most 1
    for _ in range(5):
        gram = wide @ wide.mT
        wide = add_product(
            wide, add_product(gram, gram, gram, beta=-4.7750, alpha=2.0315), wide, beta=3.4445
        )
    return wide.mT if is_tall else wide


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, each tensor named by its parameter, such as `weight.exp_avg`."""
    return {
        f"{name}.{key}": value
        for name, parameter in trainable(net).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    net: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Restore the result of `optimizer_tensors`."""
    for name, parameter in trainable(net).items():
        prefix = f"{name}."
        optimizer.state[parameter] = {
            key.removeprefix(prefix): shard_like(value, parameter)
            for key, value in tensors.items()
            if key.startswith(prefix) and "." not in key.removeprefix(prefix)
        }


def resolve_precision(precision: str, device: torch.device) -> str:
    """The precision of steps on a device: fp32, bf16 or fp16.

    `auto` is bf16 where its products are faster than fp32's, else fp16 on a GPU and fp32 elsewhere.

    Raises:
        UserError: a precision that is unknown or that the device does not support.
    """
    has_bf16 = has_fast_bf16(device)
    if precision == "auto":
        without_bf16 = "fp16" if device.type == "cuda" else "fp32"
        return "bf16" if has_bf16 else without_bf16
    if precision == "bf16" and device.type == "cuda" and not has_bf16:
        raise UserError("this GPU does not support bf16; add training.precision=fp16 (or fp32)")
    if precision == "fp16" and device.type not in ("cuda", "cpu"):
        raise UserError(
            f"fp16 is supported on CUDA devices and the CPU, not on {device.type}; add "
            "training.precision=fp32"
        )
    if precision not in AUTOCAST:
        raise UserError(f"unknown precision {precision}; use auto, {', '.join(AUTOCAST)}")
    return precision


@cache
def has_fast_bf16(device: torch.device) -> bool:
    """True if the device multiplies matrices faster in bf16 than in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and has_fast_bf16_products()


def scaler_tensors(scaler: GradScaler) -> dict[str, Tensor]:
    """The loss scale and the steps since it last changed; empty for a disabled scaler."""
    state = scaler.state_dict()
    return {name: torch.tensor(state[key]) for key, name in _SCALER.items() if key in state}


def load_scaler_tensors(scaler: GradScaler, tensors: Mapping[str, Tensor]) -> None:
    """Restore the result of `scaler_tensors`; without such tensors the initial scale stays."""
    saved = {key: tensors[name].item() for key, name in _SCALER.items() if name in tensors}
    if saved:
        scaler.load_state_dict(scaler.state_dict() | saved)
