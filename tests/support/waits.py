"""What makes the host wait for a device, counted."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that give the host a number, or a tensor whose size depends on the numbers.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")


class Waits(TorchDispatchMode):
    """Counts what waits, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            name = "nonzero"
        if name.startswith(WAITING):
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))
