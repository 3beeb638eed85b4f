"""Scaled dot-product attention, and the multi-head modules for self- and cross-attention."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.cache import LayerCache
from heedful.parts.dropout import Dropout
from heedful.parts.masks import AttentionMask, MaskBlock, MaskSpec
from heedful.parts.rotary import RotaryPositions, rotate

# Queries that a sliding-window layer takes at a time, at least: fewer and the loop is what costs.
_LOCAL_QUERIES = 128
# Attention weights of a head from which on the fused kernel trains faster on a CPU (docs/log.md).
_FUSED_WEIGHTS = 256 * 256
_AUTOCAST = frozenset({"cpu", "cuda", "mps"})  # devices that have it; meta, for one, has not


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
        bias: of a `MaskSpec`, in fp32 at least.
        scale: default 1 / √E.
        softcap: scores s become softcap · tanh(s / softcap) before the bias (Gemma 2); default: no.
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
    """softmax(scale · QKᵀ + bias), in fp32 at least; the arguments are those of `attend`."""
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

    Attributes:
        pattern: an identity over the attention weights (B, H, T, K) after the softmax and before
            dropout, for forward hooks: a hook reads them, and those that it returns take their
            place. Of a cached step with W beams they are (B, H, W · T, K), and K counts the slots
            of the cache. A layer forms its weights, and those of a window whole, only while
            `pattern` has hooks.
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
        self.pattern = nn.Identity()
        self.out = nn.Linear(num_heads * self.head_dim, d_model, bias=out_bias)
        self.dropout = Dropout(dropout)

    def _split(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B H T E"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def mask(
        self,
        visible: MaskSpec,
        x: Float[Tensor, "N T D"],
        *,
        trains: bool,
        shows_weights: bool = False,
    ) -> AttentionMask:
        """All that `forward` needs to know of a pass besides its states.

        Args:
            visible: what each query may attend to.
            x: states of the pass, for their type and device.
            trains: whether gradients are asked for.
            shows_weights: whether the weights are asked for.
        """
        device, dtype = x.device.type, x.dtype
        if dtype == torch.float32 and device in _AUTOCAST and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        whole = shows_weights or has_hooks(self.pattern)
        parts = [None] if whole else self._parts(visible)
        forms_weights = whole or self._forms_weights(visible, parts[0], x, trains)
        rotation = None
        if isinstance(self.position, RotaryPositions):
            rotation = self.position(visible.queries.positions)
        is_plain = self.position_scores is None and self.window is None and not forms_weights
        if is_plain and visible.is_causal_alone:
            everything = MaskBlock(queries=None, keys=None, bias=None)
            return AttentionMask(
                visible.real, rotation, (everything,), forms_weights=False, is_causal=True
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
            blocks.append(MaskBlock(queries, keys, visible.bias(dtype, part=part, **options)))
        return AttentionMask(visible.real, rotation, tuple(blocks), forms_weights, is_causal=False)

    @property
    def mask_key(self) -> tuple[Any, ...]:
        """Equal for attentions of a stack whose masks are equal."""
        numbers = (self.window, self.softcap, self.num_heads, self.num_kv_heads)
        return (id(self.position), has_hooks(self.pattern), *numbers)

    def _parts(self, visible: MaskSpec) -> Sequence[tuple[range, range] | None]:
        """Columns of queries that attend together, and of the keys that are within their reach.

        Where a window, or texts that are shorter than a packed row, leave most keys out, these are
        blocks along the diagonal: linear in the length. None: all columns.
        """
        reach = self.window
        if (longest := visible.queries.longest_text) is not None:
            reach = longest if reach is None else min(reach, longest)
        total = visible.queries.positions.size(1)
        # A traced length would fix the number of blocks.
        if reach is None or not visible.is_sequence or torch.compiler.is_exporting():
            return [None]
        size = max(reach, _LOCAL_QUERIES)
        if total <= size:
            return [None]
        parts = []
        for start in range(0, total, size):
            rows = range(start, min(start + size, total))
            stop = rows.stop if visible.causal else min(total, rows.stop + reach - 1)
            parts.append((rows, range(max(0, start - reach + 1), stop)))
        return parts

    def _merge(
        self, heads: Float[Tensor, "B H T E"], real: Bool[Tensor, "#B #T"] | None
    ) -> Float[Tensor, "B T D"]:
        """The output projection; zeros for queries that may attend to nothing."""
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        # After the projection, whose bias would otherwise reach them.
        return out if real is None else out * real[..., None]

    def _attend_all(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"] | None]:
        """Attention by the blocks of the mask, and its weights where one block has formed them."""
        if len(mask.blocks) == 1:
            return self._attend(query, key, value, mask, mask.blocks[0].bias)
        first = mask.blocks[0].queries
        assert first is not None
        keys, values = key.split(len(first), dim=2), value.split(len(first), dim=2)
        heads = []
        for part, block in zip(query.split(len(first), dim=2), mask.blocks, strict=True):
            assert block.keys is not None
            near = _join(keys, block.keys), _join(values, block.keys)
            heads.append(self._attend(part, *near, mask, block.bias)[0])
        return torch.cat(heads, dim=2), None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, bias: Tensor | None
    ) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B H T K"] | None]:
        """By plain products, or by a fused kernel, which never forms the weights.

        Query heads that share a key head are further queries of that head; where the kernel knows
        by itself what may be seen, and no bias is formed, each has a copy of the key head.
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
            heads = F.scaled_dot_product_attention(
                query, key, value, bias, dropout, mask.is_causal, scale=self.scale
            )
        elif has_hooks(self.pattern):
            weights = attention_weights(query, key, bias, self.scale, self.softcap)
            weights = self.pattern(_of_real(_of_heads(weights.to(value.dtype), repeats), mask.real))
            folded = weights if repeats == 1 else weights.unflatten(1, (-1, repeats)).flatten(2, 3)
            heads = self.dropout(folded) @ value
        else:
            heads, weights = attend(query, key, value, bias, self.dropout, self.scale, self.softcap)
            weights = _of_heads(weights, repeats)
        return _of_heads(heads, repeats), weights

    @property
    def position_scores(self) -> nn.Module | None:
        """The position scheme, where it is one that adds to the scores."""
        return None if isinstance(self.position, RotaryPositions) else self.position

    def _forms_weights(
        self, visible: MaskSpec, part: tuple[range, range] | None, x: Tensor, trains: bool
    ) -> bool:
        """Whether to run plain products: for capped scores, and on a CPU where they train faster.

        On a CPU the fused kernel has no backward pass of its own with dropout or for a bias that
        is learned, and for short texts its backward pass is slow in 16 bits.
        """
        if self.softcap is not None:
            return True
        if x.device.type != "cpu" or not trains:
            return False
        if (self.training and self.dropout.p > 0) or self.position_scores is not None:
            return True
        spans = (visible.queries, visible.keys)
        rows, reach = [span.positions.size(1) for span in spans] if part is None else map(len, part)
        return rows * reach < _FUSED_WEIGHTS

    def _mask_of(
        self, visible: MaskSpec | AttentionMask, x: Tensor, shows_weights: bool
    ) -> AttentionMask:
        if isinstance(visible, AttentionMask):
            assert not shows_weights, "weights are returned of a MaskSpec, not of a mask"
            return visible
        return self.mask(visible, x, trains=self._trains(x), shows_weights=shows_weights)

    def _output(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, shows_weights: bool
    ) -> Any:
        """The output (B, T, D), with the weights where they are to be shown."""
        heads, weights = self._attend_all(query, key, value, mask)
        out = self._merge(heads, mask.real)
        if not shows_weights:
            return out
        assert weights is not None
        return out, _of_real(weights, mask.real)

    def _trains(self, x: Tensor) -> bool:
        """Whether gradients are asked for of an attention that is called by itself."""
        wants = x.requires_grad or any(p.requires_grad for p in self.parameters())
        return torch.is_grad_enabled() and wants


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
        self,
        x: Float[Tensor, "B T D"],
        visible: MaskSpec | AttentionMask,
        cache: LayerCache | None = None,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Attention output (B, T, D); zero where no key is visible.

        Args:
            visible: what each token may attend to, or the mask that is formed of it.
            cache: the keys and values of `x` are written to it, and attention is over all it holds.
            return_weights: return (output, weights (B, H, T, K)), the weights before dropout and
                zero where no key is visible; `visible` is then a `MaskSpec`.
        """
        mask = self._mask_of(visible, x, return_weights)
        heads, groups = self.num_heads, self.num_kv_heads
        both, value = self._split(self.qkv(x)).split([heads + groups, groups], dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = both.split([heads, groups], dim=1)
            both = torch.cat([self.query_norm(query), self.key_norm(key)], dim=1)
        if mask.rotation is not None:
            both = rotate(both, mask.rotation)
        query, key = both.split([heads, groups], dim=1)
        if cache is not None:
            key, value = cache.update(key, value)
        return self._output(query, key, value, mask, return_weights)


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
        visible: MaskSpec | AttentionMask,
        memory: Float[Tensor, "B S D"] | None = None,
        projected: Float[Tensor, "B both S E"] | None = None,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Attention output (B, T, D); zero where nothing of the source is visible.

        Args:
            visible: what of the source each token may attend to, or the mask that is formed of it.
            memory: states of the sources; or
            projected: their keys and values, by `project_memory`.
            return_weights: as in `Attention.forward`; the weights are (B, H, T, S).
        """
        mask = self._mask_of(visible, x, return_weights)
        if projected is None:
            assert memory is not None, "give the source's states, or its keys and values"
            projected = self.project_memory(memory)
        key, value = projected.chunk(2, dim=1)
        return self._output(self._split(self.q(x)), key, value, mask, return_weights)

    def project_memory(self, memory: Float[Tensor, "B S D"]) -> Float[Tensor, "B both S E"]:
        """Keys and, behind them, values of a source, computed once for a whole decoding."""
        return self._split(self.kv(memory))


def has_hooks(module: nn.Module) -> bool:
    """Whether forward hooks, before or after it, are set on a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _of_heads(x: Float[Tensor, "B G folded *n"], repeats: int) -> Float[Tensor, "B H T *n"]:
    """Queries (repeats · T) of each key head as those (T) of each of their own heads."""
    return x if repeats == 1 else x.unflatten(2, (repeats, -1)).flatten(1, 2)


def _of_real(
    weights: Float[Tensor, "B H T K"], real: Bool[Tensor, "#B #T"] | None
) -> Float[Tensor, "B H T K"]:
    """The weights, and zeros for queries that attend to nothing."""
    return weights if real is None else weights * real[:, None, :, None]


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
