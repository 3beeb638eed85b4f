"""Position schemes of attention: rotary positions, and biases of the scores.

They are modules for the argument `position` of `Attention`, which layers may share; tables that are
added to the embeddings are in `embeddings.py`. Rotary positions (RoPE; Su et al. 2021, RoFormer,
eq. 34) rotate queries and keys by angles proportional to their position, so that their product
depends on the distance only; a `Scaling` changes the frequencies for texts that are longer than
those of the training. Biases are added to the scores by the distance of two tokens.
"""

import math
from typing import Annotated, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from pydantic import Field, FiniteFloat, PositiveInt
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.helpers import check_positive, checked_dataclass

Layout = Literal["half", "interleaved"]  # of the pairs of dimensions, see `rotate`
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]


class Rotation(NamedTuple):
    """Cosines and sines of positions, which broadcast to heads, and the pairing of dimensions."""

    cos: Float[Tensor, "#B 1 T e"] | Float[Tensor, "#B T 1 e"]
    sin: Float[Tensor, "#B 1 T e"] | Float[Tensor, "#B T 1 e"]
    layout: Layout


def rotate(x: Float[Tensor, "B *n E"], rotation: Rotation) -> Float[Tensor, "B *n E"]:
    """Rotate each pair of dimensions by its angle.

    Layout `half` pairs dimension i with i + E/2 (GPT-NeoX, and LLaMA in the Hugging Face format),
    `interleaved` pairs 2i with 2i + 1 (RoFormer, and LLaMA as its authors released it).
    With fewer angles than pairs, the first dimensions are rotated and the others stay (GPT-NeoX).
    """
    cos, sin, layout = rotation
    width = 2 * cos.size(-1)
    if width < x.size(-1):
        return torch.cat([rotate(x[..., :width], rotation), x[..., width:]], -1)
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(rotated, -1) if layout == "half" else torch.stack(rotated, -1).flatten(-2)
    return joined.to(x.dtype)


@checked_dataclass
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, "position interpolation")."""

    factor: PositiveFloat
    type: Literal["linear"] = "linear"

    def __call__(self, frequencies: Tensor, base: float, width: int) -> tuple[Tensor, float]:
        return frequencies / self.factor, 1.0


@checked_dataclass
class NtkScaling:
    """A larger base, which changes high frequencies little (bloc97 2023, "NTK-aware").

    The base is multiplied by factor^(E / (E - 2)), which divides the lowest frequency by `factor`.
    """

    factor: PositiveFloat
    type: Literal["ntk"] = "ntk"

    def __call__(self, frequencies: Tensor, base: float, width: int) -> tuple[Tensor, float]:
        return _frequencies(self.scaled_base(base, width), width), 1.0

    def scaled_base(self, base: float, width: int) -> float:
        """The larger base; frequencies from it are all that this scaling changes."""
        return base * self.factor ** (width / (width - 2)) if width > 2 else base


@checked_dataclass
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones unchanged, a linear ramp between (Llama 3.1).

    Args:
        low, high: a frequency is low below, high above this number of turns over the original
            length.
        original_length: longest sequence of the training before the scaling, in tokens.
    """

    factor: PositiveFloat = 8.0
    low: PositiveFloat = 1.0
    high: PositiveFloat = 4.0
    original_length: PositiveInt = 8192
    type: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")

    def __call__(self, frequencies: Tensor, base: float, width: int) -> tuple[Tensor, float]:
        turns = self.original_length * frequencies / (2 * math.pi)
        ramp = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return ramp * frequencies + (1 - ramp) * frequencies / self.factor, 1.0


@checked_dataclass
class YarnScaling:
    """YaRN: low frequencies interpolated, high ones unchanged, scores scaled (Peng et al. 2023).

    Args:
        factor: low frequencies are divided by it.
        original_length: longest sequence of the training before the scaling, in tokens.
        slow, fast: turns over the original length at the ends of the ramp (α and β of eq. 18; 1 and
            32 in the paper, for LLaMA). The ramp is linear in the index of the dimension, as in the
            authors' code.
        attention_factor: factor of cosines and sines; default: 0.1 ln(factor) + 1 (eq. 22, applied
            to queries and keys).
        truncate: round the ends of the ramp to whole dimensions, as in the authors' code.
    """

    factor: PositiveFloat
    original_length: PositiveInt
    slow: PositiveFloat = 1.0
    fast: PositiveFloat = 32.0
    attention_factor: PositiveFloat | None = None
    truncate: bool = True
    type: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        if self.slow >= self.fast:
            raise ValueError(f"slow {self.slow} must be below fast {self.fast}")

    def __call__(self, frequencies: Tensor, base: float, width: int) -> tuple[Tensor, float]:
        low, high = (self._dimension(turns, base, width) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        steps = torch.arange(width // 2, dtype=torch.float32)
        ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return frequencies / self.factor * ramp + frequencies * (1 - ramp), factor

    def _dimension(self, turns: float, base: float, width: int) -> float:
        """Fractional index of the frequency with this number of turns over the original length."""
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


Scaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling
# The type of `rope_scaling` in a Config: keys `type` and the arguments of that class.
RopeScaling = Annotated[Scaling, Field(discriminator="type")] | None


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021); no weights.

    Angles are computed in fp32 in any model: bf16 cannot represent integers above 256.

    Args:
        head_dim: width E of a head, even; or of its first dimensions, which alone are rotated.
        base: frequencies are base^(-2i/E).
        layout: pairing of dimensions, see `rotate`.
        scaling: change of the frequencies for longer texts; default: none.

    Raises:
        UserError: `head_dim` is odd; an unknown layout.

    >>> attention = Attention(16, 2, position=RotaryPositions(8))
    >>> attention(torch.randn(1, 5, 16), causal=True).shape
    torch.Size([1, 5, 16])
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        layout: Layout = "half",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        check_positive(head_dim=head_dim, base=base)
        if head_dim % 2:
            raise UserError(f"rotary positions need an even head width, not {head_dim}")
        if layout not in get_args(Layout):
            raise UserError(f"layout must be {' or '.join(get_args(Layout))}, not {layout!r}")
        frequencies, self.factor = _frequencies(base, head_dim), 1.0
        if scaling is not None:
            frequencies, self.factor = scaling(frequencies, base, head_dim)
        self.layout = layout
        # A plain attribute: `net.to(bfloat16)` would round a buffer, and `to_empty` would erase it.
        self.table = frequencies

    def forward(self, positions: Int[Tensor, "#B T"]) -> Rotation:
        """Cosines and sines (#B, 1, T, E/2) for tokens at these positions."""
        if self.table.device != positions.device:
            self.table = self.table.to(positions.device)
        angles = positions[:, None, :, None].float() * self.table
        return Rotation(angles.cos() * self.factor, angles.sin() * self.factor, self.layout)


def _frequencies(base: float, width: int) -> Float[Tensor, "e"]:
    """base^(-2i/E) for i < E/2: position · frequency i is the angle of pair i."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)


def alibi_slopes(num_heads: int) -> Float[Tensor, "{num_heads}"]:
    """Slopes of the heads: 2^(-8/H), 2^(-16/H), … if H is a power of two.

    Otherwise, as in the authors' code, the slopes of the next lower power of two, and then every
    second slope of the next higher one.
    """
    check_positive(num_heads=num_heads)
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    finer = [2 ** (-4 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return torch.tensor(slopes + finer[: num_heads - below])


def relative_buckets(
    distances: Int[Tensor, "*n"], *, num_buckets: int, max_distance: int, causal: bool
) -> Int[Tensor, "*n"]:
    """Bucket index of each distance query - key (Raffel et al. 2020, the authors' code).

    Distances below num_buckets / 4 (causal: num_buckets / 2) have a bucket each; wider buckets
    grow logarithmically up to `max_distance`. Keys after the query have the second half of the
    buckets; with `causal` they share the bucket of distance 0.
    """
    offset = torch.zeros_like(distances)
    if causal:
        distances = distances.clamp(min=0)
    else:
        num_buckets //= 2
        offset = (distances < 0) * num_buckets
        distances = distances.abs()
    exact = num_buckets // 2
    ratio = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distances < exact, distances, wide)


class AlibiBias(nn.Module):
    """ALiBi, attention with linear biases (Press et al. 2022, sec. 3): -slope · |distance|.

    It has no weights. In a stack that is not causal, the bias is symmetric.

    >>> attention = Attention(16, 2, position=AlibiBias(2))
    >>> attention(torch.randn(1, 5, 16), causal=True).shape
    torch.Size([1, 5, 16])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads)  # not a buffer, see `RotaryPositions`
        self._on_device = self.slopes  # on the device of the last call

    def forward(
        self, queries: Int[Tensor, "#B t"], keys: Int[Tensor, "#B k"]
    ) -> Float[Tensor, "#B H t k"]:
        """Biases (#B, H, t, k) from positions of queries and keys."""
        distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        if self._on_device.device != queries.device:
            self._on_device = self.slopes.to(queries.device)
        return -self._on_device[:, None, None] * distance


class RelativePositionBias(nn.Module):
    """A trained bias per head and bucket of distances (T5; Raffel et al. 2020, sec. 2.1).

    Args:
        num_heads: H.
        num_buckets: half of them for single distances, half logarithmically wider; without
            `causal`, half of each kind for keys before the query and half for keys after it.
        max_distance: distances from this one on share the last bucket.
        causal: the stack is causal.

    Raises:
        UserError: too few buckets, or `max_distance` within the buckets of single distances.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, *, causal: bool
    ) -> None:
        super().__init__()
        exact = num_buckets // (2 if causal else 4)  # distances with one bucket each
        if exact < 1 or max_distance <= exact:
            raise UserError(
                f"num_buckets {num_buckets} with max_distance {max_distance}: num_buckets must be "
                f"at least {2 if causal else 4}, and max_distance above {max(exact, 1)}"
            )
        self.max_distance, self.causal = max_distance, causal
        self.weight = nn.Parameter(torch.zeros(num_buckets, num_heads))

    def forward(
        self, queries: Int[Tensor, "#B t"], keys: Int[Tensor, "#B k"]
    ) -> Float[Tensor, "#B H t k"]:
        """Biases (#B, H, t, k) from positions of queries and keys."""
        buckets = relative_buckets(
            queries[:, :, None] - keys[:, None, :],
            num_buckets=self.weight.size(0),
            max_distance=self.max_distance,
            causal=self.causal,
        )
        return self.weight[buckets].permute(0, 3, 1, 2)
