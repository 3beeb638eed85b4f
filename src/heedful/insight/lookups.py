"""Seeing which ids a net looks up in which matrix, and the gradient of a single position."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Where each function takes the ids and the matrix: place and name.
_LOOKUPS = {
    F.embedding: ((0, "input"), (1, "weight")),
    torch.embedding: ((1, "indices"), (0, "weight")),
}


class Lookups(TorchFunctionMode):
    """Sees every embedding lookup of the calls made inside it, by whatever module or function.

    A zero that requires a gradient is added to each result, so that the gradient of a single
    position is known even where the matrix is shared with the output or is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in _LOOKUPS:
            return out
        ids, weight = (
            args[place] if place < len(args) else kwargs[name] for place, name in _LOOKUPS[func]
        )
        added = torch.zeros_like(out, requires_grad=True)
        self.seen.append((ids, weight, added))
        return out + added

    def of(self, ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor] | None:
        """The matrix (V, D) that `ids` were looked up in, and what was added, (B, T, D)."""
        for seen, weight, added in self.seen:
            if seen.shape == ids.shape and torch.equal(seen, ids):
                return weight, added
        return None
