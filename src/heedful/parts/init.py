"""Initialization of weights, once for each parameter, after tying."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from heedful.parts.embeddings import LearnedTable
from heedful.parts.residual import Residual

Initializer = Callable[[nn.Module, str, Tensor], None]


def init_weights(net: nn.Module, initializer: Initializer | None = None) -> nn.Module:
    """Initialize every parameter of `net` once, also one that several modules share.

    Args:
        initializer: `initializer(module, name, parameter)` fills one parameter; default: `xavier`.

    >>> init_weights(nn.Linear(8, 4)).bias.tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    done: set[int] = set()
    with torch.no_grad():
        for module in net.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in done:
                    done.add(id(parameter))
                    (initializer or xavier)(module, name, parameter)
    return net


def xavier(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Xavier's uniform distribution for matrices, N(0, 1/D) for embeddings, biases 0, norms 1.

    Glorot and Bengio 2010, eq. 16; a matrix that is part of a joint one (`joint_rows`) has the
    bound of the joint matrix. With N(0, 1/D), √D · embedding has unit variance.
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
    """Matrices and embeddings N(0, std²), biases 0, norms 1, as in BERT and GPT."""

    def initialize(module: nn.Module, name: str, parameter: Tensor) -> None:
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        else:
            _constant(module, name, parameter)

    return initialize


@torch.no_grad()
def shrink_residuals(net: nn.Module) -> None:
    """Divide the last matrix of every residual branch by √N, N being the number of branches.

    GPT-2 (Radford et al. 2019, sec. 2.3): the variance of the residual stream then does not grow
    with the depth.
    """
    branches = [module.sublayer for module in net.modules() if isinstance(module, Residual)]
    for branch in branches:
        for name, last in branch.named_modules():
            if name.rpartition(".")[2] in ("out", "down"):  # in each expert, too
                assert isinstance(last, nn.Linear)
                last.weight /= len(branches) ** 0.5


def _constant(module: nn.Module, name: str, parameter: Tensor) -> None:
    is_scale = isinstance(module, nn.LayerNorm | nn.RMSNorm) and name == "weight"
    nn.init.constant_(parameter, 1.0 if is_scale else 0.0)
