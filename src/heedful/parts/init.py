"""First values of the weights: drawn once, after tying."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from heedful.parts.positions import LearnedTable
from heedful.parts.residual import Residual

Initializer = Callable[[nn.Module, str, Tensor], None]


def init_weights(net: nn.Module, draw: Initializer | None = None) -> nn.Module:
    """Initializer every parameter of `net` once, however many modules share it.

    `draw(module, name, parameter)` fills one; the default is `xavier`.
    """
    done: set[int] = set()
    with torch.no_grad():
        for module in net.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:
                    done.add(id(parameter))
                    (draw or xavier)(module, name, parameter)
    return net


def xavier(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Linear maps by Xavier's uniform draw, biases zero, norms the identity, embeddings N(0, 1/D).

    Glorot and Bengio 2010, eq. 16, over the joint matrix where a linear is a part of one
    (`joint_rows`); of embeddings so that √D · embedding has unit variance.
    """
    if isinstance(module, nn.Embedding | LearnedTable):
        nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
    elif parameter.dim() > 1:
        rows: int = getattr(module, "joint_rows", parameter.size(0))
        bound = (6 / (rows + parameter.size(1))) ** 0.5
        nn.init.uniform_(parameter, -bound, bound)
    else:
        _constant(module, name, parameter)


def normal(std: float = 0.02) -> Initializer:
    """All matrices and embeddings N(0, std²), biases zero, norms the identity: BERT and GPT."""

    def draw(module: nn.Module, name: str, parameter: Tensor) -> None:
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        else:
            _constant(module, name, parameter)

    return draw


@torch.no_grad()
def shrink_residuals(net: nn.Module) -> None:
    """Divide the last matrix of every residual branch by √N, for N branches in a stack.

    As GPT-2 (Radford et al. 2019, sec. 2.3), so that the sum over the depth keeps its size.
    """
    branches = [module.sublayer for module in net.modules() if isinstance(module, Residual)]
    for branch in branches:
        for name, last in branch.named_modules():
            if name.rpartition(".")[2] in ("out", "down"):  # every expert's, where there are some
                assert isinstance(last, nn.Linear)
                last.weight /= len(branches) ** 0.5


def _constant(module: nn.Module, name: str, parameter: Tensor) -> None:
    is_scale = isinstance(module, nn.LayerNorm | nn.RMSNorm) and name == "weight"
    nn.init.constant_(parameter, 1.0 if is_scale else 0.0)
