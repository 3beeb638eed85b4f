"""Seeing which ids a net looks up in which matrix, and the gradient of a single position."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Lookups(TorchFunctionMode):
    """Sees every embedding lookup of the calls made inside it, by whatever module or function.

    A zero that requires a gradient is added to each result, so that the gradient of a single
    position is known even where the matrix is shared with the output or is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = _lookup(func, args, kwargs or {})
        if found is None:
            return out
        ids, weight = found
        added = torch.zeros_like(out, requires_grad=True)
        self.seen.append((ids, weight, added))
        return out + added

    def of(self, ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor] | None:
        """The matrix (V, D) that `ids` were looked up in, and what was added, (B, T, D)."""
        for seen, weight, added in self.seen:
            if seen.shape == ids.shape and torch.equal(seen, ids):
                return weight, added
        return None


def _lookup(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    names: tuple[str, str]
    if func is F.embedding:
        names = ("input", "weight")
    elif func is torch.embedding:
        names = ("weight", "indices")
    else:
        return None
    first, second = (
        args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)
    )
    return (first, second) if func is F.embedding else (second, first)
