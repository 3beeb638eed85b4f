"""Record embedding lookups of a net, and get gradients at single positions."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Index and name of the arguments for ids and matrix, by function.
_LOOKUPS = {
    F.embedding: ((0, "input"), (1, "weight")),
    torch.embedding: ((1, "indices"), (0, "weight")),
}


class EmbeddingLookups(TorchFunctionMode):
    """Context manager that records all embedding lookups of any module or function.

    A tensor of zeros that requires a gradient is added to each result. Its gradient is that of the
    embedding at each position, even if the matrix is frozen or shared with the output.

    Attributes:
        records: for each lookup the ids, the matrix and the added zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in _LOOKUPS:
            return out
        ids, weight = (
            args[index] if index < len(args) else kwargs[name] for index, name in _LOOKUPS[func]
        )
        added = torch.zeros_like(out, requires_grad=True)
        self.records.append((ids, weight, added))
        return out + added

    def find(self, ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor] | None:
        """The matrix (V, D) and the added zeros (B, T, D) of the lookup of `ids`; else None."""
        for recorded, weight, added in self.records:
            if recorded.shape == ids.shape and torch.equal(recorded, ids):
                return weight, added
        return None
