"""FLOPs of the matrix products of a training step, by torch's formulas."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
# The CPU's fused attention, by which a traced step represents that of a GPU, has no formula.
_AS_ON_GPU: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}


class ProductCounter(TorchDispatchMode):
    """Counts the FLOPs of the products in the block: 2 m n k for (m, k) x (k, n).

    torch's `FlopCounterMode` without its hooks of modules, which refuse `torch.autograd.grad`.
    Products in kernels of heedful are not seen (`heedful.kernels.library.unused`).

    Attributes:
        flops: so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = flop_registry.get(_AS_ON_GPU.get(packet, packet))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out
