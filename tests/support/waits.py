"""Counts the operations that make the host wait for a device."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that return a number to the host, or a tensor whose size depends on values.
WAITING = (
    *("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "_unique"),
    *("equal", "bincount", "repeat_interleave"),
)
# Methods that read a tensor on the CPU without an operator.
READING = ("tolist", "numpy", "__array__")


class Waits(TorchDispatchMode):
    """Counts what waits, by name.

    A tensor of `randint` may be read: only dropout on a CPU does so, to seed a generator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self._methods = {name: getattr(Tensor, name) for name in READING}

    def __enter__(self) -> "Waits":
        for name, method in self._methods.items():
            setattr(Tensor, name, self._counted(name, method))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self._methods.items():
            setattr(Tensor, name, method)

    def _counted(self, name: str, method: Any) -> Any:
        def read(tensor: Tensor, *args: Any, **keys: Any) -> Any:
            if not hasattr(tensor, "is_seed"):
                self.seen[name] += 1
            return method(tensor, *args, **keys)

        return read

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            name = "nonzero"
        if name.startswith(WAITING):
            self.seen[name] += 1
        result = function(*args, **(kwargs or {}))
        if name == "randint":
            result.is_seed = True
        return result
