"""The position-wise feed-forward network."""

from collections.abc import Callable
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.parts.dropout import Dropout

Activation = Literal["relu", "gelu"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}
assert set(ACTIVATIONS) == set(get_args(Activation))


class Mlp(nn.Module):
    """act(x W₁ + b₁) W₂ + b₂ (Vaswani et al. 2017, eq. 2, where act is ReLU).

    `gelu` is the exact one, x Φ(x) (Hendrycks and Gimpel 2016), not its tanh approximation.
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

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        hidden = self.dropout(self.activation(self.up(x)))
        return self.down(hidden)
