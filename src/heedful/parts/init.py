"""First values of the weights: drawn once, after tying."""

import torch
from torch import nn

from heedful.parts.positions import LearnedTable


@torch.no_grad()
def init_weights(net: nn.Module) -> nn.Module:
    """Draw every parameter of `net` once, however many modules share it.

    Linear maps get Xavier's uniform draw (Glorot and Bengio 2010, eq. 16), over the joint matrix of
    query, key and value where that is one, biases zero; embeddings and learned positions N(0, 1/D),
    so that √D · embedding has unit variance; norms the identity.
    """
    done: set[int] = set()
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            if isinstance(module, nn.Embedding | LearnedTable):
                nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
            elif parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                is_scale = isinstance(module, nn.LayerNorm) and name == "weight"
                nn.init.constant_(parameter, 1.0 if is_scale else 0.0)
    return net
