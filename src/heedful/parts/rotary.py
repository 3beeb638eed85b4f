"""Rotary positions (RoPE): queries and keys are rotated by angles proportional to their position.

The product of a query and a key then depends on their distance only (Su et al. 2021, RoFormer,
eq. 34). Angles are computed in fp32 in any model: bf16 cannot represent integers above 256. A
`Scaling` changes the frequencies for texts that are longer than those of the training.
"""

import math
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import Field, FiniteFloat, PositiveInt
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.checked import check_positive, checked_dataclass

Layout = Literal["half", "interleaved"]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]


class Rotation(NamedTuple):
    """Cosines and sines of positions, (#B, 1, T, E/2) each, and the pairing of dimensions."""

    cos: Float[Tensor, "#B 1 T e"]
    sin: Float[Tensor, "#B 1 T e"]
    layout: Layout


def rotate(x: Float[Tensor, "B H T E"], rotation: Rotation) -> Float[Tensor, "B H T E"]:
    """Rotate each pair of dimensions by its angle.

    Layout `half` pairs dimension i with i + E/2 (GPT-NeoX, and LLaMA in the Hugging Face format),
    `interleaved` pairs 2i with 2i + 1 (RoFormer, and LLaMA as its authors released it).
    """
    cos, sin, layout = rotation
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

    Args:
        head_dim: width E of a head, even.
        base: frequencies are base^(-2i/E).
        layout: pairing of dimensions, see `rotate`.
        scaling: change of the frequencies for longer texts; default: none.

    Raises:
        UserError: `head_dim` is odd.

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
        frequencies, self.factor = _frequencies(base, head_dim), 1.0
        if scaling is not None:
            frequencies, self.factor = scaling(frequencies, base, head_dim)
        self.layout = layout
        # A plain attribute: `net.to(bfloat16)` would round a buffer, and `to_empty` would erase it.
        self.table = frequencies

    def forward(self, positions: Int[Tensor, "#B T"]) -> Rotation:
        """Cosines and sines for tokens at these positions."""
        if self.table.device != positions.device:
            self.table = self.table.to(positions.device)
        angles = positions[:, None, :, None].float() * self.table
        return Rotation(angles.cos() * self.factor, angles.sin() * self.factor, self.layout)


def _frequencies(base: float, width: int) -> Float[Tensor, "e"]:
    """base^(-2i/E) for i < E/2: position · frequency i is the angle of pair i."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
