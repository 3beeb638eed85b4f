"""Cross-attention with several heads."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.attention import AttentionPlan, MultiHead, zero_hidden_queries
from heedful.parts.positions import RotaryPositions
from heedful.parts.tokens import MaskSpec


class CrossAttention(MultiHead):
    """Attention from a target to a source.

    `q` (H·E, D) projects the target to queries, `kv` (2·G·E, D) the source to keys and values.

    Args:
        bias: bias of both matrices.
        options: see `MultiHead`; no window, and no rotary positions: positions of a source and of
            a target are those of different texts.

    Raises:
        UserError: a window or rotary positions; as in `MultiHead`.

    >>> attention = CrossAttention(16, 2)
    >>> target, source = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    >>> attention(target, source).shape
    torch.Size([3, 5, 16])
    """

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = True, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        if self.window is not None:
            raise UserError("cross-attention has no window: leave out window")
        if isinstance(self.position, RotaryPositions):
            raise UserError(
                "cross-attention has no rotary positions; leave out position, or give a scheme "
                "that adds to the scores (parts/positions.py)"
            )
        self.q = nn.Linear(d_model, num_heads * self.head_dim, bias=bias)
        self.kv = nn.Linear(d_model, 2 * self.num_kv_heads * self.head_dim, bias=bias)
        # Initialized like parts of one matrix, as in self-attention (`parts/init.py`).
        joint_rows: Any = self.q.out_features + self.kv.out_features
        self.q.joint_rows = self.kv.joint_rows = joint_rows

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"] | None = None,
        mask: MaskSpec | AttentionPlan | Tensor | None = None,
        *,
        projected: Float[Tensor, "B both S E"] | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attention output (B, T, D); zero where no key is visible.

        Args:
            memory: encoder states of the source.
            mask: source tokens that each target token may attend to: as in `Attention.forward`,
                (T, S) or (B, T, S). Default: all.
            projected: keys and values of the source by `project_memory`, in place of `memory`.
            return_weights: as in `Attention.forward`; the weights are (B, H, T, S).

        Raises:
            UserError: neither `memory` nor `projected` is given, the width is not D, or `mask` has
                another type or shape.
        """
        keys = memory if projected is None else projected
        if keys is None:
            raise UserError("cross-attention needs `memory`, the states of the source")
        if projected is None and keys.size(0) != x.size(0):
            raise UserError(f"memory has {keys.size(0)} rows, but x has {x.size(0)}")
        plan = mask
        if not isinstance(plan, AttentionPlan):
            plan = self.plan(plan, x, keys, causal=False, returns_weights=return_weights)
        if projected is None:
            projected = self.project_memory(keys)
        query = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        key, value = projected.chunk(2, dim=1)
        heads, weights = plan.attend(query, key, value, dropout=self.dropout)
        out = self.project_heads(heads, plan.has_key)
        if not return_weights:
            return out
        assert weights is not None, "weights are returned for a mask, not for a plan"
        return out, zero_hidden_queries(weights, plan.has_key)

    def project_memory(self, memory: Float[Tensor, "B S D"]) -> Float[Tensor, "B both S E"]:
        """Keys and then values of a source; in decoding they are computed once."""
        return self.kv(memory).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
