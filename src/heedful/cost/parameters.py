"""Numbers of parameters of a net, and of those that take part in computing a token."""

from torch import nn

from heedful.parts.experts import Experts
from heedful.pipelines import parameter_count


def parameters_by_part(net: nn.Module) -> dict[str, int]:
    """Parameters of the net, and by the name of its parts; tied matrices count in each part."""
    parts = {name: parameter_count(part) for name, part in net.named_children()}
    return {"total": parameter_count(net), **parts}


def active_parameters(net: nn.Module) -> int:
    """Parameters without those of the experts that a token is not sent to."""
    inactive = 0
    for module in net.modules():
        if isinstance(module, Experts):
            sizes = [parameter_count(expert) for expert in module.experts]
            inactive += sum(sizes) - module.top_k * sizes[0]
    return parameter_count(net) - inactive
