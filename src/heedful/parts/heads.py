"""What stands on a stack: states in, logits (or nothing else than the states) out."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.parts.dropout import Dropout
from heedful.parts.feedforward import FUNCTIONS, Activation


class Scale(nn.Module):
    """Multiplies by a number: 1/√D where T5's embedding is also its output."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return x * self.factor


class MaskedTokenTransform(nn.Module):
    """norm(act(x W + b)), before BERT's output for masked tokens (Devlin et al. 2019, their code).

    Args:
        norm: over the transformed states.
        bias: of the matrix.
    """

    def __init__(
        self, d_model: int, norm: nn.Module, activation: Activation = "gelu", *, bias: bool = True
    ) -> None:
        super().__init__()
        self.dense = nn.Linear(d_model, d_model, bias=bias)
        self.activation = FUNCTIONS[activation]
        self.norm = norm

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.norm(self.activation(self.dense(x)))


class OutputHead(nn.Module):
    """Logits of the vocabulary's entries: transform(x) Wᵀ + b.

    Args:
        out: (V, D); its weight may be an embedding's (Press and Wolf 2017).
        transform: of the states before it; default: none.
        softcap: logits z become softcap · tanh(z / softcap) (Gemma 2); default: they do not.
    """

    def __init__(
        self, out: nn.Linear, transform: nn.Module | None = None, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.transform = nn.Identity() if transform is None else transform
        self.out = out
        self.softcap = softcap

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return self.logits(self.transform(x))

    def restrict_vocabulary(self, entries: Int[Tensor, "U"]) -> "OutputHead":
        """A head of these entries of the vocabulary alone, with a copy of their rows of Wᵀ.

        As in the chunked loss, `out` must be a plain `nn.Linear`.
        """
        assert type(self.out) is nn.Linear, type(self.out)
        out = nn.Linear(1, 1, device="meta")
        out.weight = nn.Parameter(self.out.weight.detach()[entries])
        bias = self.out.bias
        out.bias = None if bias is None else nn.Parameter(bias.detach()[entries])
        return OutputHead(out, self.transform, self.softcap)

    def logits(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Logits of states that `transform` has been applied to."""
        logits = self.out(x)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class MaskedTokenHead(OutputHead):
    """An `OutputHead` whose logits are of the token that stands at a place, not of the next one."""


def tied_linear(weight: Tensor, *, bias: bool = False, tied: bool = True) -> nn.Linear:
    """The (V, D) output of a net: with an embedding's own weight, or one of its size."""
    size, width = weight.shape
    # Nothing is drawn; `skip_init` would import all that torch has for symbols, a second's work.
    out = nn.Linear(width, size, bias=bias, device="meta")
    if tied:
        assert isinstance(weight, nn.Parameter)
    out.weight = weight if tied else nn.Parameter(torch.empty_like(weight))
    if bias:
        out.bias = nn.Parameter(weight.new_empty(size))
    return out


class ClassificationHead(nn.Module):
    """Logits of C classes from a sequence's first state: act(x₀ W + b), dropout, and a matrix.

    BERT and RoBERTa use tanh (Devlin et al. 2019, their code's "pooler"), DistilBERT ReLU,
    ModernBERT GELU and a `norm` before the dropout.
    """

    def __init__(
        self,
        d_model: int,
        num_labels: int,
        *,
        activation: Literal["tanh"] | Activation = "tanh",
        bias: bool = True,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.input_dropout = Dropout(input_dropout)
        self.dense = nn.Linear(d_model, d_model, bias=bias)
        self.activation = torch.tanh if activation == "tanh" else FUNCTIONS[activation]
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = Dropout(dropout)
        self.labels = nn.Linear(d_model, num_labels)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... C"]:
        hidden = self.activation(self.dense(self.input_dropout(x)))
        return self.labels(self.dropout(self.norm(hidden)))
