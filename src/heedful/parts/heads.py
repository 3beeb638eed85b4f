"""What stands on a stack: states in, logits (or nothing else than the states) out."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.parts.dropout import Dropout
from heedful.parts.feedforward import ACTIVATIONS, Activation


class OutputProjection(nn.Module):
    """Logits scale · x Wᵀ + b of the next token.

    Args:
        weight: (V, D); may be an embedding's (Press and Wolf 2017).
        bias: (V,), as Marian has it; default: none.
        scale: 1/√D where T5's embedding is also its output; default: 1.
    """

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.scale = scale

    def states(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """What `weight` and `bias` are applied to: losses that never form all logits start here."""
        return x if self.scale == 1.0 else x * self.scale

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return nn.functional.linear(self.states(x), self.weight, self.bias)


class MaskedTokenHead(OutputProjection):
    """BERT's head for masked tokens: norm(act(x W + b)) Eᵀ + c (Devlin et al. 2019, their code).

    Args:
        weight: (V, D), the embedding's where tied.
        bias: (V,).
        norm: over the transformed states.
        activation: of the transform.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        norm: nn.Module,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__(weight, bias=bias)
        width = weight.size(-1)
        self.transform = nn.Linear(width, width)
        self.activation = ACTIVATIONS[activation]
        self.norm = norm

    def states(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.norm(self.activation(self.transform(x)))


POOL_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}


class ClassificationHead(nn.Module):
    """Logits of C classes from a sequence's first state: act(x₀ W + b), dropout, and a matrix.

    BERT and RoBERTa use tanh (Devlin et al. 2019, their code's "pooler"), DistilBERT ReLU.
    """

    def __init__(
        self,
        d_model: int,
        num_labels: int,
        *,
        activation: Literal["tanh", "relu"] = "tanh",
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.input_dropout = Dropout(input_dropout)
        self.dense = nn.Linear(d_model, d_model)
        self.activation = POOL_ACTIVATIONS[activation]
        self.dropout = Dropout(dropout)
        self.out = nn.Linear(d_model, num_labels)

    def forward(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B C"]:
        hidden = self.activation(self.dense(self.input_dropout(x)))
        return self.out(self.dropout(hidden))
