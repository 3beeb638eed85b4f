"""How the weights of linear layers lie in memory."""

import torch
from torch import nn


@torch.no_grad()
def make_weights_column_major(net: nn.Module) -> nn.Module:
    """Let each linear's weight, (out, in), lie in memory as (in, out); values and shapes stay.

    A CPU multiplies 2 to 64 rows of fp32, as many as a decoding step has, with such a weight in
    down to 0.6 of the time (docs/log.md), and more or fewer in the same. Weights that others share
    stay shared. Elsewhere and in other types nothing changes.
    """
    for module in net.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                weight.data = weight.t().contiguous().t()
    return net
