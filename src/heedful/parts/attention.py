"""Scaled dot-product attention, and the multi-head modules for self- and cross-attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.cache import LayerCache
from heedful.parts.dropout import Dropout
from heedful.parts.rotary import RotaryPositions, rotate
from heedful.parts.visibility import Visibility

# Queries that a sliding-window layer takes at a time, at least: fewer and the loop is what costs.
_LOCAL_QUERIES = 128
# Attention weights of a head from which on the fused kernel trains faster on a CPU (docs/log.md).
_FUSED_WEIGHTS = 256 * 256


def attend(
    query: Float[Tensor, "B H T E"],
    key: Float[Tensor, "B H K E"],
    value: Float[Tensor, "B H K E"],
    bias: Float[Tensor, "#B #H #T K"] | None,
    dropout: nn.Module | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"]]:
    """softmax(scale · QKᵀ + bias) V and the weights themselves (Vaswani et al. 2017, eq. 1).

    The softmax runs in fp32 whatever the products run in. The weights are returned before
    dropout. A query that has nothing to attend to gets equal weights here, so that nothing is
    NaN: `Attention` turns what comes of them into zeros.

    Args:
        bias: of a `Visibility`, in fp32 at least.
        scale: default 1 / √E.
        softcap: scores s become softcap · tanh(s / softcap) before the bias (Gemma 2); default: no.
    """
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is None:
        weights = scores.float() if scores.dtype.itemsize < 4 else scores
        weights = weights.softmax(-1)
    else:
        weights = (scores + bias).softmax(-1)
    weights = weights.to(value.dtype)
    out = (weights if dropout is None else dropout(weights)) @ value
    return out, weights


class MultiHead(nn.Module):
    """What self- and cross-attention share: heads, their attention, and the output projection.

    Sources: Vaswani et al. 2017, sec. 3.2.2; Shazeer 2019 (G = 1); Ainslie et al. 2023 (G between 1
    and H); Beltagy et al. 2020 (windows).

    Args:
        d_model: width D of what comes in and goes out.
        num_heads: heads H.
        num_kv_heads: heads G of keys and values, each shared by H / G adjacent query heads;
            default: H.
        head_dim: width E of a head; default: D / H, which must then be whole.
        scale: of the scores; default: 1 / √E.
        window: keys that a query of a causal layer sees, its own counted; in an encoder keys less
            than this many positions away on either side; default: all.
        softcap: bound of the scores (see `attend`); default: none.
        position: a position scheme: rotary (`parts/rotary.py`), or one that adds to the scores
            (`parts/relative.py`); layers may share it. Default: positions come with the embeddings.
        dropout: on the attention weights, in training only.
        out_bias: whether the output projection has a bias.
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
        groups = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and d_model % num_heads:
            raise ValueError(f"d_model {d_model} is not divisible by num_heads {num_heads}")
        if num_heads % groups:
            raise ValueError(f"num_heads {num_heads} is not divisible by num_kv_heads {groups}")
        self.num_heads, self.num_kv_heads = num_heads, groups
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.scale, self.window, self.softcap = scale, window, softcap
        self.position = position
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias=out_bias)
        self.dropout = Dropout(dropout)

    def _split(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B H T E"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _merge(
        self, heads: Float[Tensor, "B H T E"], visible: Visibility
    ) -> Float[Tensor, "B T D"]:
        """The output projection; zeros for queries that may attend to nothing."""
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        # After the projection, whose bias would otherwise reach them.
        return out if visible.real is None else out * visible.real[..., None]

    def _attend_all(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Visibility
    ) -> Float[Tensor, "B H T E"]:
        """Attention over all keys; where a window leaves most of them out, of one block of queries
        after the other over the keys that its window reaches: linear in the length."""
        total, size = query.size(2), max(self.window or 0, _LOCAL_QUERIES)
        if self.window is None or not visible.is_sequence or total <= size:
            return self._attend(query, key, value, visible, None)
        keys, values = key.split(size, dim=2), value.split(size, dim=2)
        heads = []
        for index, part in enumerate(query.split(size, dim=2)):
            rows = range(index * size, index * size + part.size(2))
            stop = rows.stop if visible.causal else min(total, rows.stop + self.window - 1)
            reach = range(max(0, rows.start - self.window + 1), stop)
            key, value = _join(keys, reach), _join(values, reach)
            heads.append(self._attend(part, key, value, visible, (rows, reach)))
        return torch.cat(heads, dim=2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visibility,
        part: tuple[range, range] | None,
    ) -> Tensor:
        """By plain products, or by a fused kernel, which never forms the weights.

        Query heads that share a key head are further queries of that head; where the kernel knows
        by itself what may be seen, and no bias is formed, each has a copy of the key head.
        """
        length, repeats = query.size(2), self.num_heads // self.num_kv_heads
        forms_weights, dtype = self._forms_weights(query, key), query.dtype
        plain = self.position_scores is None and self.window is None and not forms_weights
        causal, bias = plain and visible.is_causal_alone, None
        if causal and repeats > 1:
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
            repeats = 1
        elif not causal:
            bias = visible.bias(
                torch.promote_types(dtype, torch.float32) if forms_weights else dtype,
                scheme=self.position_scores,
                window=self.window,
                repeats=repeats,
                part=part,
            )
        if repeats > 1:
            query = query.unflatten(1, (-1, repeats)).flatten(2, 3)
        if forms_weights:
            heads, _ = attend(query, key, value, bias, self.dropout, self.scale, self.softcap)
        else:
            dropout = self.dropout.p if self.training else 0.0
            heads = F.scaled_dot_product_attention(
                query, key, value, bias, dropout, causal, scale=self.scale
            )
        return heads if repeats == 1 else heads.unflatten(2, (repeats, length)).flatten(1, 2)

    @property
    def position_scores(self) -> nn.Module | None:
        """The position scheme, where it is one that adds to the scores."""
        return None if isinstance(self.position, RotaryPositions) else self.position

    def _forms_weights(self, query: Tensor, key: Tensor) -> bool:
        """Whether to run plain products: for capped scores, and on a CPU where they train faster.

        On a CPU the fused kernel has no backward pass of its own with dropout or for a bias that
        is learned, and for short texts its backward pass is slow in 16 bits.
        """
        if self.softcap is not None:
            return True
        if query.device.type != "cpu" or not (query.requires_grad and torch.is_grad_enabled()):
            return False
        drops = self.training and self.dropout.p > 0
        is_short = query.size(2) * key.size(2) < _FUSED_WEIGHTS
        return drops or is_short or self.position_scores is not None


class Attention(MultiHead):
    """Self-attention. One matrix holds its input projections, ((H + 2G)·E, D): query, key, value.

    Args:
        bias: whether that matrix has a bias.
        query_norm, key_norm: over the width of each head, before the rotation (Qwen 3, Gemma 3);
            default: none.
        options: as of `MultiHead`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        bias: bool = True,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, num_heads, **options)
        self.qkv = nn.Linear(d_model, sum(self.split_sizes), bias=bias)
        self.query_norm, self.key_norm = query_norm, key_norm

    @property
    def split_sizes(self) -> tuple[int, int, int]:
        """Rows of the joint matrix that are the query's, the key's and the value's."""
        of_keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, of_keys, of_keys

    def forward(
        self, x: Float[Tensor, "B T D"], visible: Visibility, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T D"]:
        """Attention output; zero where no key is visible.

        Args:
            visible: what each token may attend to.
            cache: the keys and values of `x` are written to it, and attention is over all it holds.
        """
        heads, groups = self.num_heads, self.num_kv_heads
        both, value = self._split(self.qkv(x)).split([heads + groups, groups], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split([heads, groups], dim=1)
            both = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if isinstance(self.position, RotaryPositions):
            both = rotate(both, visible.rotation(self.position))
        query, key = both.split([heads, groups], dim=1)
        if cache is not None:
            key, value = cache.update(key, value)
        return self._merge(self._attend_all(query, key, value, visible), visible)


class CrossAttention(MultiHead):
    """Attention to a source: `q` (H·E, D) projects the target, `kv` (2·G·E, D) the source.

    Args:
        bias: whether these two have a bias.
        options: as of `MultiHead`.
    """

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = True, **options: Any) -> None:
        super().__init__(d_model, num_heads, **options)
        self.q = nn.Linear(d_model, num_heads * self.head_dim, bias=bias)
        self.kv = nn.Linear(d_model, 2 * self.num_kv_heads * self.head_dim, bias=bias)
        # Drawn as parts of one matrix, as those of self-attention are (`parts/init.py`).
        joint_rows: Any = self.q.out_features + self.kv.out_features
        self.q.joint_rows = self.kv.joint_rows = joint_rows

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        visible: Visibility,
        memory: Float[Tensor, "B S D"] | None = None,
        projected: Float[Tensor, "B both S E"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attention output; zero where nothing of the source is visible.

        Args:
            visible: what of the source each token may attend to.
            memory: states of the sources; or
            projected: their keys and values, by `project_memory`.
        """
        if projected is None:
            assert memory is not None, "give the source's states, or its keys and values"
            projected = self.project_memory(memory)
        key, value = projected.chunk(2, dim=1)
        heads = self._attend_all(self._split(self.q(x)), key, value, visible)
        return self._merge(heads, visible)

    def weights(
        self, x: Float[Tensor, "B T D"], visible: Visibility, projected: Float[Tensor, "B both S E"]
    ) -> Float[Tensor, "B H T S"]:
        """The attention weights of `forward`; any where nothing of the source is visible."""
        key, _ = projected.repeat_interleave(self.num_heads // self.num_kv_heads, 1).chunk(2, 1)
        query = self._split(self.q(x))
        bias = visible.bias(torch.promote_types(query.dtype, torch.float32))
        return attend(query, key, key, bias, None, self.scale, self.softcap)[1]

    def project_memory(self, memory: Float[Tensor, "B S D"]) -> Float[Tensor, "B both S E"]:
        """Keys and, behind them, values of a source, computed once for a whole decoding."""
        return self._split(self.kv(memory))


def _join(pieces: Sequence[Tensor], places: range) -> Tensor:
    """Some places of a (B, G, K, E) tensor that was split into pieces of one size.

    Cut from the pieces that hold them: the gradient of a slice is as large as what it was cut from,
    and one of the whole for every block of queries would make the backward pass quadratic.
    """
    size = pieces[0].size(2)
    found = [
        pieces[index][:, :, max(places.start - index * size, 0) : places.stop - index * size]
        for index in range(places.start // size, -(-places.stop // size))
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
