"""A linear layer with a low-rank update (LoRA)."""

import math
from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.residual import Dropout


class LoRALinear(nn.Linear):
    """W x + b + (α / r) B A x, with W and b frozen and A, B trained (Hu et al. 2022, eq. 3).

    The rows of W may be those of several projections, as queries, keys and values in one matrix.
    Each projection is a part with factors A (r, D) and B (its rows, r), or without factors. B is
    initialized to zero, so that the layer computes W x + b.

    Args:
        linear: the layer with W (N, D) and b, whose parameters are used and frozen.
        part_sizes: numbers of rows of the parts, N in total.
        parts: indices of the parts that have factors, ascending.
        rank: r.
        alpha: α.
        dropout: on the input of A, in training only.

    Attributes:
        lora_a: A of each part (P, r, D).
        lora_b: B of each part, below each other (rows of the parts, r).
    """

    def __init__(
        self,
        linear: nn.Linear,
        part_sizes: Sequence[int],
        parts: Collection[int],
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
    ) -> None:
        rows, width = linear.weight.shape
        assert sum(part_sizes) == rows, f"{part_sizes} are not the {rows} rows of the layer"
        super().__init__(width, rows, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.part_sizes, self.parts = tuple(part_sizes), tuple(parts)
        self.rank, self.scale = rank, alpha / rank
        self.dropout = Dropout(dropout)
        sizes = sum(part_sizes[part] for part in parts)
        self.lora_a = nn.Parameter(linear.weight.new_empty(len(self.parts), rank, width))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(sizes, rank))
        for factor in self.lora_a:
            nn.init.kaiming_uniform_(factor, a=math.sqrt(5))
        linear.requires_grad_(False)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... N"]:
        low = F.linear(self.dropout(x), self.lora_a.flatten(0, 1)) * self.scale
        updates = dict(zip(self.parts, self._updates(low), strict=True))
        zeros = low.new_zeros(())
        columns = [
            updates.get(part, zeros.expand(*low.shape[:-1], size))
            for part, size in enumerate(self.part_sizes)
        ]
        update = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
        return F.linear(x, self.weight, self.bias) + update

    def _updates(self, low: Float[Tensor, "... ranks"]) -> list[Tensor]:
        """B of each part times its columns of A x."""
        return [
            F.linear(columns, factor)
            for columns, factor in zip(low.split(self.rank, -1), self.factors_b(), strict=True)
        ]

    def factors_b(self) -> tuple[Tensor, ...]:
        """B of each part (its rows, r)."""
        return self.lora_b.split([self.part_sizes[part] for part in self.parts])

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer with W + (α / r) B A, in new memory, computed in float32 or wider."""
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta"
        )
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight = self.weight.to(wide)
        rows = list(weight.clone().split(list(self.part_sizes)))
        for part, a, b in zip(self.parts, self.lora_a, self.factors_b(), strict=True):
            rows[part] = rows[part] + self.scale * (b.to(wide) @ a.to(wide))
        linear.weight = nn.Parameter(torch.cat(rows).to(self.weight.dtype))
        linear.bias = self.bias
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, scale={self.scale:g}"
