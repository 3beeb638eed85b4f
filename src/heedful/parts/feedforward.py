"""The position-wise feed-forward networks: plain and gated."""

from collections.abc import Callable
from typing import Literal, cast, get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.dropout import Dropout

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Gate = Literal["swiglu", "geglu", "geglu_tanh", "reglu"]


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, as GPT, GPT-2 and T5 1.1 were trained with."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
}
GATES: dict[Gate, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "reglu": F.relu,
}
assert set(ACTIVATIONS) == set(get_args(Activation))
assert set(GATES) == set(get_args(Gate))


class Mlp(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, eq. 2, where act is ReLU).

    `gelu` is the exact one, x Φ(x) (Hendrycks and Gimpel 2016), `gelu_tanh` its approximation.
    `dropout` acts on the hidden units.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Activation = "relu",
        *,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        hidden = self.dropout(self.activation(self.up(x)))
        return self.down(hidden)


class Gated(nn.Module):
    """(act(x W) ⊙ x V) W₂ (Shazeer 2020, "GLU Variants Improve Transformer", eqs. 5 and 6).

    One matrix `up` (2·F, D) holds W, the gate, above V, so that both are a single product.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        gate: Gate = "swiglu",
        *,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.split_sizes = (d_ff, d_ff)
        self.up = nn.Linear(d_model, 2 * d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = GATES[gate]
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        gate, hidden = self.up(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * hidden))


def feedforward(
    d_model: int, d_ff: int, kind: Activation | Gate, *, dropout: float = 0.0, bias: bool = True
) -> Mlp | Gated:
    """The network whose activation or gate has this name."""
    if kind in get_args(Gate):
        return Gated(d_model, d_ff, cast(Gate, kind), dropout=dropout, bias=bias)
    return Mlp(d_model, d_ff, cast(Activation, kind), dropout=dropout, bias=bias)
