"""Rotary positions: queries and keys are turned by an angle that grows with their place.

The product of a query and a key then depends on their distance alone (Su et al. 2021, RoFormer,
eq. 34). Angles are formed in fp32 whatever the model runs in: bf16 cannot hold the integers above
256. What stretches them over longer texts than a model was trained on is a `Scaling`.
"""

import math
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

Layout = Literal["half", "interleaved"]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class Rotation(NamedTuple):
    """Cosines and sines of some places: (#B, 1, T, E/2) each, and which dimensions are paired."""

    cos: Float[Tensor, "#B 1 T e"]
    sin: Float[Tensor, "#B 1 T e"]
    layout: Layout


def rotate(x: Float[Tensor, "B H T E"], rotation: Rotation) -> Float[Tensor, "B H T E"]:
    """Each pair of dimensions turned by its angle.

    `half` pairs dimension i with i + E/2 (GPT-NeoX, and LLaMA in the Hugging Face format),
    `interleaved` pairs 2i with 2i + 1 (RoFormer, and LLaMA as its authors released it).
    """
    cos, sin, layout = rotation
    if layout == "half":
        first, second = x.chunk(2, dim=-1)
    else:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if layout == "half" else torch.stack(turned, -1).flatten(-2)
    return joined.to(x.dtype)


@dataclass(frozen=True, config=_STRICT)
class LinearScaling:
    """Places divided by `factor` (Chen et al. 2023, "position interpolation")."""

    factor: PositiveFloat
    type: Literal["linear"] = "linear"

    def __call__(self, frequencies: Tensor, base: float, width: int) -> tuple[Tensor, float]:
        return frequencies / self.factor, 1.0


@dataclass(frozen=True, config=_STRICT)
class NtkScaling:
    """A larger base, so that high frequencies hardly change (bloc97 2023, "NTK-aware").

    base · factor^(E / (E - 2)): the lowest frequency is divided by just `factor`.
    """

    factor: PositiveFloat
    type: Literal["ntk"] = "ntk"

    def __call__(self, frequencies: Tensor, base: float, width: int) -> tuple[Tensor, float]:
        return _frequencies(self.stretched(base, width), width), 1.0

    def stretched(self, base: float, width: int) -> float:
        """The larger base itself, which says all that this scaling does."""
        return base * self.factor ** (width / (width - 2)) if width > 2 else base


@dataclass(frozen=True, config=_STRICT)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, between them a ramp (Llama 3.1).

    Args:
        low, high: turns over the original length below and above which a frequency is low, high.
        original_length: the length that the model was trained on before.
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
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / self.factor, 1.0


@dataclass(frozen=True, config=_STRICT)
class YarnScaling:
    """Low frequencies interpolated, high ones kept, and the scores sharpened (Peng et al. 2023).

    Args:
        slow, fast: turns over the original length (α and β of eq. 18; the paper's 1 and 32 are for
            LLaMA) between which the ramp lies, taken over the index of the dimension as the
            authors' code does.
        attention_factor: what cosines and sines are multiplied by; default: 0.1 ln(factor) + 1
            (eq. 22 as it enters queries and keys).
        truncate: the ramp's ends are whole dimensions, as in the authors' code.
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
        """Where in the table a frequency turns this often over the original length."""
        return width * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))


Scaling = LinearScaling | NtkScaling | Llama3Scaling | YarnScaling
# The type of a Config's `rope_scaling`, which is written as keys: `type` and what that class takes.
RopeScaling = Annotated[Scaling, Field(discriminator="type")] | None


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021) of heads of an even width; no weights."""

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        layout: Layout = "half",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions need an even head width, not {head_dim}")
        frequencies, self.factor = _frequencies(base, head_dim), 1.0
        if scaling is not None:
            frequencies, self.factor = scaling(frequencies, base, head_dim)
        self.layout = layout
        # Not a buffer: `net.to(bfloat16)` would round it, and `to_empty` leave it without a value.
        self.table = frequencies

    def forward(self, positions: Int[Tensor, "#B T"]) -> Rotation:
        """The rotation of tokens at these positions."""
        if self.table.device != positions.device:
            self.table = self.table.to(positions.device)
        angles = positions[:, None, :, None].float() * self.table
        return Rotation(angles.cos() * self.factor, angles.sin() * self.factor, self.layout)


def _frequencies(base: float, width: int) -> Float[Tensor, "e"]:
    """base^(-2i/E), by which a place is multiplied to give the angle of pair i."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
