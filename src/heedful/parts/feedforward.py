"""The position-wise feed-forward network, plain or gated."""

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.parts.helpers import check_positive
from heedful.parts.residual import Dropout, relu_dropped

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Gate = Literal["swiglu", "geglu", "geglu_tanh", "reglu"]


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, used by GPT, GPT-2 and T5 1.1."""
    return F.gelu(x, approximate="tanh")


FUNCTIONS: dict[Activation | Gate, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": gelu_tanh,
    "reglu": F.relu,
}
assert set(FUNCTIONS) == {*get_args(Activation), *get_args(Gate)}


class FeedForward(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, eq. 2, with ReLU), or a gated variant.

    Gated: (act(x W) ⊙ x V) W₂ (Shazeer 2020, "GLU Variants Improve Transformer", eqs. 5 and 6). One
    matrix `up` (2·F, D) holds the gate W above V, so that both are one product.

    Args:
        d_model: width D of the input and the output.
        d_ff: width F of the hidden units; default: 4 · D.
        kind: activation or gate. `gelu` is exact, x Φ(x) (Hendrycks and Gimpel 2016), `gelu_tanh`
            is its tanh approximation.
        dropout: on the hidden units, in training only.
        bias: of both matrices.

    >>> FeedForward(16)(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    >>> FeedForward(16, 64, "swiglu", bias=False).up
    Linear(in_features=16, out_features=128, bias=False)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        kind: Activation | Gate = "relu",
        *,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if kind not in FUNCTIONS:
            raise UserError(f"no feed-forward {kind!r}; choose from {', '.join(FUNCTIONS)}")
        check_positive(d_model=d_model, d_ff=d_ff)
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.is_gated = kind in get_args(Gate)
        self.up = nn.Linear(d_model, 2 * d_ff if self.is_gated else d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)
        self.activation = FUNCTIONS[kind]
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        hidden = self.up(x)
        if self.is_gated:
            gate, hidden = hidden.chunk(2, dim=-1)
            hidden = self.activation(gate) * hidden
        elif self.activation is F.relu:
            return self.down(relu_dropped(hidden, self.dropout))
        else:
            hidden = self.activation(hidden)
        return self.down(self.dropout(hidden))
