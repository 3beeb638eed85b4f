"""Scaled dot-product attention and `MultiHead`, the base of self- and cross-attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.parts.dropout import Dropout
from heedful.parts.fused_kernels import fused_kernels
from heedful.parts.helpers import check_positive, has_hooks, kernel_device
from heedful.parts.masks import AttentionMask, MaskBlock, MaskSpec
from heedful.parts.packed_attention import can_skip_blocks, packed_attention, packed_block_mask
from heedful.parts.positions import RotaryPositions
from heedful.parts.tokens import Span
from heedful.parts.trained_attention import HeadRows, trained_attention
from heedful.parts.unpadding import Unpadding

# Least number of queries in a block of a sliding-window layer: with fewer, the loop dominates.
_LOCAL_QUERIES = 128
# Attention weights of a head from which on the fused kernel trains faster on a CPU (docs/log.md).
_FUSED_WEIGHTS = 256 * 256
_AUTOCAST = frozenset({"cpu", "cuda", "mps"})  # device types with autocast (meta has none)


def attend(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None = None,
    dropout: nn.Module | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
    """softmax(scale · QKᵀ + bias) V, and the weights (Vaswani et al. 2017, eq. 1).

    The softmax runs in fp32 at least; the weights are returned before dropout. A query without a
    visible key gets equal weights, so that nothing is NaN; `Attention` then zeroes its output.

    Args:
        bias: `MaskSpec.bias`, in fp32 at least.
        scale: default 1 / √E.
        softcap: scores s are replaced by softcap · tanh(s / softcap) before the bias is added
            (Gemma 2); default: no cap.

    >>> query, key, value = (torch.ones(1, 2, n, 8) for n in (3, 5, 5))
    >>> output, weights = attend(query, key, value)
    >>> output.shape, weights.shape
    (torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 3, 5]))
    """
    weights = attention_weights(query, key, bias, scale, softcap).to(value.dtype)
    out = (weights if dropout is None else dropout(weights)) @ value
    return out, weights


def attention_weights(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H T K"]:
    """softmax(scale · QKᵀ + bias) in fp32 at least; arguments as in `attend`."""
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    elif scores.dtype.itemsize < 4:
        scores = scores.float()
    return scores.softmax(-1)


class MultiHead(nn.Module):
    """Base of self- and cross-attention: heads, masks, the attention itself, output projection.

    Sources: Vaswani et al. 2017, sec. 3.2.2; multi-query attention (G = 1), Shazeer 2019;
    grouped-query attention (1 < G < H), Ainslie et al. 2023; sliding windows, Beltagy et al. 2020.

    Args:
        d_model: width D of the input and the output.
        num_heads: query heads H.
        num_kv_heads: key/value heads G, each shared by H / G adjacent query heads; default: H.
        head_dim: width E of a head; default: D / H, which must be an integer.
        scale: factor of the scores; default: 1 / √E.
        window: number of keys that a causal query attends to, itself included; without `causal`,
            keys less than this many positions away on either side; default: all keys.
        softcap: bound of the scores (see `attend`); default: none.
        position: position scheme, rotary (`parts/positions.py`) or added to the scores
            (`parts/positions.py`); layers may share it. Default: none.
        dropout: on the attention weights, in training only.
        out_bias: bias of the output projection.

    Attributes:
        pattern: identity over the attention weights (B, H, T, K), after the softmax and before
            dropout, for forward hooks: they read the weights, and a tensor that they return
            replaces them. In a cached step with W beams the shape is (B, H, W · T, K), with K slots
            of the cache. Weights are formed (with a window: the whole matrix) only while `pattern`
            has hooks.

    Raises:
        UserError: `num_heads` does not divide `d_model` (without `head_dim`), or `num_kv_heads`
            does not divide `num_heads`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        position: nn.Module | None = None,
        dropout: float = 0.0,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        check_positive(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_positive(head_dim=head_dim, window=window, scale=scale, softcap=softcap)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and d_model % num_heads:
            raise UserError(
                f"d_model {d_model} is not divisible by num_heads {num_heads}; change one of them, "
                "or give head_dim"
            )
        if num_heads % kv_heads:
            raise UserError(
                f"num_heads {num_heads} is not divisible by num_kv_heads {kv_heads}; change one of "
                "them"
            )
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.position = position
        self.pattern = nn.Identity()
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias=out_bias)
        self.dropout = Dropout(dropout)
        self.uses_flex_attention = False  # set for compiled training (`training/block_compiler.py`)

    def prepare_mask(
        self,
        spec: MaskSpec,
        x: Float[Tensor, "N T D"],
        *,
        needs_grad: bool,
        return_weights: bool = False,
    ) -> AttentionMask:
        """Compute the tensors of a mask for one forward pass of this module.

        Args:
            spec: keys that each query may attend to.
            x: any hidden states of the pass, for their dtype and device.
            needs_grad: the pass needs gradients.
            return_weights: the attention weights will be returned.
        """
        device, dtype = x.device.type, x.dtype
        if dtype == torch.float32 and device in _AUTOCAST and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        whole = return_weights or has_hooks(self.pattern)
        parts = [None] if whole else self.block_ranges(spec)
        forms_weights = whole or self.forms_weights(spec, parts[0], x, needs_grad)
        rotation = None
        if isinstance(self.position, RotaryPositions):
            rotation = self.position(spec.queries.positions)
        is_plain = self.position_scores is None and self.window is None and not forms_weights
        if is_plain and spec.is_causal_alone:
            everything = MaskBlock(queries=None, keys=None, bias=None)
            return AttentionMask(
                spec.real, rotation, (everything,), forms_weights=False, is_causal=True
            )
        if not forms_weights and self._use_flex_attention(spec, x, needs_grad):
            block_mask = packed_block_mask(spec, self.window)
            return AttentionMask(
                spec.real, rotation, (), forms_weights=False, is_causal=False, block_mask=block_mask
            )
        options: dict[str, Any] = {
            "scheme": self.position_scores,
            "window": self.window,
            "repeats": self.num_heads // self.num_kv_heads,
        }
        if forms_weights:
            dtype = torch.promote_types(dtype, torch.float32)

        blocks = []
        for part in parts:
            queries, keys = part or (None, None)
            blocks.append(MaskBlock(queries, keys, spec.bias(dtype, part=part, **options)))
        return AttentionMask(spec.real, rotation, tuple(blocks), forms_weights, is_causal=False)

    def unpadded_mask(
        self, mask: AttentionMask, queries: Unpadding, keys: Unpadding
    ) -> AttentionMask:
        """A prepared mask for states without padding in a training step on a CPU."""
        # In self-attention the query itself is visible.
        real = None if queries is keys or mask.real is None else mask.real.expand(queries.shape)
        if real is not None:
            real = queries.unpad(real[..., None])[..., 0]
        rows = None
        if self._can_use_trained_attention(mask):
            rows = HeadRows.of_unpaddings(queries, keys, self.num_heads, self.num_kv_heads)
        return mask._replace(real=real, queries=queries, keys=keys, rows=rows)

    def _can_use_trained_attention(self, mask: AttentionMask) -> bool:
        """True where the attention is what `trained_attention` computes."""
        return mask.forms_weights and len(mask.blocks) == 1 and self.softcap is None

    def _attend_rows(
        self, projected: Tensor, memory: Tensor | None, mask: AttentionMask
    ) -> Float[Tensor, "1 N D"]:
        """The output for the real tokens, from the projections of `trained_attention`."""
        assert mask.rows is not None
        scale = 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        heads = trained_attention(
            projected,
            memory,
            mask.rows,
            mask.blocks[0].bias,
            self.dropout,
            scale,
            self.head_dim,
            mask.rotation,
        )
        return self._project_heads(heads, mask.real)

    @property
    def mask_key(self) -> tuple[Any, ...]:
        """Hashable key: modules with equal keys can share one prepared mask."""
        numbers = (self.window, self.softcap, self.num_heads, self.num_kv_heads)
        return (id(self.position), has_hooks(self.pattern), *numbers)

    @property
    def position_scores(self) -> nn.Module | None:
        """The position scheme if it adds to the scores; None for rotary positions or no scheme."""
        return None if isinstance(self.position, RotaryPositions) else self.position

    def block_ranges(self, spec: MaskSpec) -> Sequence[tuple[range, range] | None]:
        """Ranges of queries and of the keys that they can reach; None: all columns.

        Where a window, or segments shorter than a packed row, hide most keys, these are blocks
        along the diagonal, so that the work is linear in the length.
        """
        reach = self.window
        if (longest := spec.queries.longest_text) is not None:
            reach = longest if reach is None else min(reach, longest)
        total = spec.queries.positions.size(1)
        # An exported graph has a variable length, but a fixed number of blocks.
        if reach is None or not spec.is_sequence or torch.compiler.is_exporting():
            return [None]
        size = max(reach, _LOCAL_QUERIES)
        if total <= size:
            return [None]
        parts = []
        for start in range(0, total, size):
            queries = range(start, min(start + size, total))
            stop = queries.stop if spec.causal else min(total, queries.stop + reach - 1)
            parts.append((queries, range(max(0, start - reach + 1), stop)))
        return parts

    def _use_flex_attention(self, spec: MaskSpec, x: Tensor, needs_grad: bool) -> bool:
        """True in compiled training with packed rows, for attention that FlexAttention can compute.

        FlexAttention has no dropout, and its kernel is compiled for one shape: evaluation, with
        batches of many shapes, does not use it.
        """
        has_dropout = self.training and self.dropout.p > 0
        is_plain = self.position_scores is None and not has_dropout
        can_use = self.uses_flex_attention and needs_grad and is_plain
        return can_use and can_skip_blocks(spec, x.device)

    def forms_weights(
        self, spec: MaskSpec, part: tuple[range, range] | None, x: Tensor, needs_grad: bool
    ) -> bool:
        """True for plain matrix products: capped scores, and CPU training where they are faster.

        On a CPU the fused kernel has no backward pass with dropout or for a trained bias, and its
        backward pass is slow in 16 bits for short sequences.
        """
        if self.softcap is not None:
            return True
        if kernel_device(x) != "cpu" or not needs_grad:
            return False
        if (self.training and self.dropout.p > 0) or self.position_scores is not None:
            return True
        spans = (spec.queries, spec.keys)
        rows, reach = [span.positions.size(1) for span in spans] if part is None else map(len, part)
        return rows * reach < _FUSED_WEIGHTS

    def _resolve_mask(
        self,
        mask: MaskSpec | AttentionMask | Tensor | None,
        x: Tensor,
        keys: Tensor,
        *,
        causal: bool,
        return_weights: bool,
    ) -> AttentionMask:
        """The prepared mask of a call; a mask that the caller prepared is used as it is.

        Args:
            keys: states (B, K, D) that are attended to, or their projected keys (B, G, K, E).

        Raises:
            UserError: a wrong width, type or shape. Calls with a prepared mask, as those of
                `Stack`, are not checked.
        """
        if isinstance(mask, AttentionMask):
            assert not return_weights, "weights are returned for a MaskSpec, not an AttentionMask"
            return mask
        for states in (x, keys):
            # Projected keys have four dimensions.
            if states.dim() < 4 and (states.dim() < 3 or states.size(-1) != self.d_model):
                raise UserError(
                    f"attention needs states of shape (batch, length, {self.d_model}), "
                    f"not {tuple(states.shape)}"
                )
        if isinstance(mask, MaskSpec):
            if causal:
                raise UserError("causal is a property of the MaskSpec; give it there")
        elif mask is None:
            queries, other = (
                Span(torch.arange(states.size(-2), device=x.device)[None], is_aligned=True)
                for states in (x, keys)
            )
            mask = MaskSpec(queries, queries if keys is x else other, causal=causal)
        else:
            shape = (x.size(0), x.size(1), keys.size(-2))
            mask = MaskSpec.from_bool(mask, shape, causal=causal, window=self.window)
        needs_grad = torch.is_grad_enabled() and (
            x.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        return self.prepare_mask(mask, x, needs_grad=needs_grad, return_weights=return_weights)

    def _split_heads(
        self, x: Float[Tensor, "rows tokens W"], unpadding: Unpadding | None
    ) -> Float[Tensor, "B H T E"]:
        """Heads of padded states, or of states without padding, which are padded here."""
        if unpadding is not None:
            x = unpadding.pad(x)
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _attend_and_project(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, return_weights: bool
    ) -> Any:
        """The output (B, T, D), or (output, weights)."""
        heads, weights = self._attend_blocks(query, key, value, mask)
        x = heads.transpose(1, 2).flatten(2)
        out = self._project_heads(x if mask.queries is None else mask.queries.unpad(x), mask.real)
        if not return_weights:
            return out
        assert weights is not None
        return out, _zero_hidden_queries(weights, mask.real)

    def _attend_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"] | None]:
        """Attention over each block of the mask; weights only if there is one block."""
        if mask.block_mask is not None:
            return packed_attention(query, key, value, mask.block_mask, self.scale), None
        if len(mask.blocks) == 1:
            return self._attend(query, key, value, mask, mask.blocks[0].bias)
        first = mask.blocks[0].queries
        assert first is not None
        keys, values = key.split(len(first), dim=2), value.split(len(first), dim=2)
        heads = []
        for part, block in zip(query.split(len(first), dim=2), mask.blocks, strict=True):
            assert block.keys is not None
            visible = _slice_pieces(keys, block.keys), _slice_pieces(values, block.keys)
            heads.append(self._attend(part, *visible, mask, block.bias)[0])
        return torch.cat(heads, dim=2), None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, bias: Tensor | None
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"] | None]:
        """Attention by plain products, or by a fused kernel, which never forms the weights.

        Query heads that share a key head are computed as more queries of that head. With the causal
        mask of the kernel that is not possible: there each query head has a copy of its key head.
        """
        repeats = self.num_heads // self.num_kv_heads
        if mask.is_causal and repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
            repeats = 1
        if repeats > 1:
            query = query.unflatten(1, (-1, repeats)).flatten(2, 3)

        weights: Tensor | None = None
        if not mask.forms_weights:
            dropout = self.dropout.p if self.training else 0.0
            with fused_kernels(key):
                heads = F.scaled_dot_product_attention(
                    query, key, value, bias, dropout, mask.is_causal, scale=self.scale
                )
        elif has_hooks(self.pattern):
            weights = attention_weights(query, key, bias, self.scale, self.softcap)
            weights = _unfold_heads(weights.to(value.dtype), repeats)
            weights = self.pattern(_zero_hidden_queries(weights, mask.real))
            folded = weights if repeats == 1 else weights.unflatten(1, (-1, repeats)).flatten(2, 3)
            heads = self.dropout(folded) @ value
        else:
            heads, weights = attend(query, key, value, bias, self.dropout, self.scale, self.softcap)
            weights = _unfold_heads(weights, repeats)
        return _unfold_heads(heads, repeats), weights

    def _project_heads(
        self, x: Float[Tensor, "B T HE"], real: Bool[Tensor, "#B #T"] | None
    ) -> Float[Tensor, "B T D"]:
        """The output projection of heads side by side; zeros for queries without a visible key."""
        out: Tensor = self.out(x)
        # After the projection, whose bias would otherwise be added to the zeros.
        return out if real is None else out * real[..., None]


def _unfold_heads(x: Float[Tensor, "B G folded *n"], repeats: int) -> Float[Tensor, "B H T *n"]:
    """From (repeats · T) queries of each key head to T queries of each query head."""
    return x if repeats == 1 else x.unflatten(2, (repeats, -1)).flatten(1, 2)


def _zero_hidden_queries(
    weights: Float[Tensor, "B H T K"], real: Bool[Tensor, "#B #T"] | None
) -> Float[Tensor, "B H T K"]:
    """The weights, with zeros for queries without a visible key."""
    return weights if real is None else weights * real[:, None, :, None]


def _slice_pieces(pieces: Sequence[Tensor], columns: range) -> Tensor:
    """Columns of a (B, G, K, E) tensor that was split along K into pieces of one size.

    Only the pieces that hold them are sliced: the gradient of a slice is as large as the tensor
    that it was cut from, so slices of the whole would make the backward pass quadratic.
    """
    size = pieces[0].size(2)
    slices = [
        pieces[index][:, :, max(columns.start - index * size, 0) : columns.stop - index * size]
        for index in range(columns.start // size, -(-columns.stop // size))
    ]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=2)
