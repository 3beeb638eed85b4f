"""Output heads: hidden states to logits of tokens or of classes."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError, describe
from heedful.parts.feedforward import FUNCTIONS, Activation
from heedful.parts.helpers import has_any_hooks
from heedful.parts.residual import Dropout

_ALIGNED = 64
LogitsFunction = Callable[..., Float[Tensor, "... V"]]  # of states (…, D)


class Scale(nn.Module):
    """Multiplies by a constant: 1/√D in T5, whose output matrix is its embedding."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return x * self.factor


class MaskedTokenTransform(nn.Module):
    """norm(act(x W + b)), the first layer of BERT's masked-token head (its authors' code).

    Args:
        norm: norm of width D.
        bias: bias b of the matrix.
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
    """Logits over the vocabulary: transform(x) Wᵀ + b, (…, D) -> (…, V).

    Args:
        out: linear layer (V, D); its weight may be that of an embedding (Press and Wolf 2017).
        transform: module applied to the states first; default: none.
        softcap: logits z are replaced by softcap · tanh(z / softcap) (Gemma 2); default: no cap.

    >>> head = OutputHead(nn.Linear(16, 100))
    >>> head(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 100])
    >>> head.restrict_vocabulary(torch.tensor([3, 7]))(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 2])
    """

    def __init__(
        self, out: nn.Linear, transform: nn.Module | None = None, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.transform = nn.Identity() if transform is None else transform
        self.out = out
        self.softcap = softcap

    def forward(
        self,
        x: Float[Tensor, "... D"],
        reduce: Callable[[LogitsFunction, Tensor], Any] | None = None,
        *,
        aligned: bool = False,
    ) -> Any:
        """Logits (…, V) of all states, or the result of `reduce`, which computes them itself.

        Args:
            reduce: function of a function from states to logits, and of the states. It is part of
                one call of the module, during which FSDP2 holds the whole matrix.
            aligned: logits may have further columns, whose values have no meaning, up to the next
                multiple of 64: half of a training step of GPT-2, with its 50,257 tokens, is slow
                products of rows that do not begin at multiples of 16 bytes (on an H200).
        """
        if reduce is not None:
            return reduce(self.forward, x)
        return self.logits(self.transform(x), aligned=aligned)

    def restrict_vocabulary(self, ids: Int[Tensor, "U"]) -> "OutputHead":
        """A head with logits (…, U) of these token ids only; the rows of W are copied.

        `out` must be a plain `nn.Linear`, not a wrapped one.
        """
        assert type(self.out) is nn.Linear, type(self.out)
        out = nn.Linear(1, 1, device="meta")
        out.weight = nn.Parameter(self.out.weight.detach()[ids])
        bias = self.out.bias
        out.bias = None if bias is None else nn.Parameter(bias.detach()[ids])
        return OutputHead(out, self.transform, self.softcap)

    def logits(self, x: Float[Tensor, "... D"], *, aligned: bool = False) -> Float[Tensor, "... V"]:
        """Logits from states after `transform`."""
        out = self.out
        missing = -out.out_features % _ALIGNED if type(out) is nn.Linear else 0
        if aligned and missing and not has_any_hooks(out):
            weight = F.pad(out.weight, (0, 0, 0, missing))
            logits = F.linear(
                x, weight, None if out.bias is None else F.pad(out.bias, (0, missing))
            )
        else:
            logits = out(x)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class MaskedTokenHead(OutputHead):
    """An `OutputHead` that predicts the token at each position, not the next token."""


def tied_linear(weight: Tensor, *, bias: bool = False, tied: bool = True) -> nn.Linear:
    """The output layer (V, D) of a net, to be initialized by `init_weights`.

    Args:
        weight: the weight (V, D) of the embedding.
        tied: share that weight; otherwise a new one of the same size.
    """
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UserError(f"weight must be a matrix (V, D), not {describe(weight)}")
    size, width = weight.shape
    # Without initialization; `torch.nn.utils.skip_init` would import sympy, which takes a second.
    out = nn.Linear(width, size, bias=bias, device="meta")
    if tied:
        assert isinstance(weight, nn.Parameter)
    out.weight = weight if tied else nn.Parameter(torch.empty_like(weight))
    if bias:
        out.bias = nn.Parameter(weight.new_empty(size))
    return out


class ClassificationHead(nn.Module):
    """Logits of C classes from the state of the first token: act(x₀ W + b), dropout, linear.

    BERT and RoBERTa use tanh ("pooler" in their code), DistilBERT ReLU, ModernBERT GELU and a
    `norm` before the dropout.

    Args:
        d_model: width D of the states.
        num_labels: C.
        activation: act.
        bias: bias b of the first matrix.
        norm: before the dropout; default: none.
        dropout: before the linear layer of the classes.
        input_dropout: on x₀.
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
