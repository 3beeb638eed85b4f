"""Forward and backward passes of the parts of a Transformer in NumPy, with gradients by hand.

Every function returns its output and a backward function, which takes the gradient of the loss by
the output (same shape) and returns the gradients by the inputs, in the order of the arguments.
With the loss L, `dy` is ∂L/∂y. The derivations are in the docstrings; the tests compare each with
the gradients of torch in fp64. For learning only: the nets of heedful use autograd.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

Array = Float[np.ndarray, "..."]
Backward = Callable[[Array], tuple[Array, ...]]


def layer_norm(
    x: Float[np.ndarray, "... D"],
    weight: Float[np.ndarray, " D"],
    bias: Float[np.ndarray, " D"],
    eps: float = 1e-5,
) -> tuple[Float[np.ndarray, "... D"], Backward]:
    """y = w · n + b with n = (x - μ) / σ, μ = mean(x), σ = √(var(x) + eps) (Ba et al. 2016).

    With g = w · dy, and since both μ and σ depend on every x:

        dx = (g - mean(g) - n · mean(g · n)) / σ,   dw = Σ dy · n,   db = Σ dy.

    The backward function returns dx, dw, db.
    """
    sigma = np.sqrt(x.var(-1, keepdims=True) + eps)  # the biased variance: a division by D
    normal = (x - x.mean(-1, keepdims=True)) / sigma

    def backward(dy: Array) -> tuple[Array, ...]:
        gradient = dy * weight
        mean = gradient.mean(-1, keepdims=True)
        along = (gradient * normal).mean(-1, keepdims=True)
        dx = (gradient - mean - normal * along) / sigma
        rows = tuple(range(x.ndim - 1))
        return dx, (dy * normal).sum(rows), dy.sum(rows)

    return normal * weight + bias, backward


def rms_norm(
    x: Float[np.ndarray, "... D"], weight: Float[np.ndarray, " D"], eps: float = 1e-6
) -> tuple[Float[np.ndarray, "... D"], Backward]:
    """y = w · n with n = x / r, r = √(mean(x²) + eps) (Zhang and Sennrich 2019).

    As for LayerNorm, without the mean: with g = w · dy,

        dx = (g - n · mean(g · n)) / r,   dw = Σ dy · n.

    The backward function returns dx, dw.
    """
    scale = np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    normal = x / scale

    def backward(dy: Array) -> tuple[Array, ...]:
        gradient = dy * weight
        along = (gradient * normal).mean(-1, keepdims=True)
        return (gradient - normal * along) / scale, (dy * normal).sum(tuple(range(x.ndim - 1)))

    return normal * weight, backward


def softmax(x: Float[np.ndarray, "... K"]) -> tuple[Float[np.ndarray, "... K"], Backward]:
    """p = exp(x) / Σ exp(x) over the last axis, with the largest x subtracted first.

    The Jacobian is ∂pᵢ/∂xⱼ = pᵢ (δᵢⱼ - pⱼ); its product with dp needs no matrix:

        dx = p · (dp - Σ p · dp).

    A row of -inf alone has no softmax: it is all zeros here, with a gradient of zero.
    """
    largest = x.max(-1, keepdims=True)
    exps = np.exp(x - np.where(np.isfinite(largest), largest, 0))
    total = exps.sum(-1, keepdims=True)
    shares = exps / np.where(total > 0, total, 1)

    def backward(dy: Array) -> tuple[Array, ...]:
        return (shares * (dy - (shares * dy).sum(-1, keepdims=True)),)

    return shares, backward


def attention(
    query: Float[np.ndarray, "... T E"],
    key: Float[np.ndarray, "... K E"],
    value: Float[np.ndarray, "... K E"],
    mask: Bool[np.ndarray, "... T K"] | None = None,
    dropout_mask: Bool[np.ndarray, "... T K"] | None = None,
    dropout: float = 0.0,
) -> tuple[Float[np.ndarray, "... T E"], Backward]:
    """O = A' V with A = softmax(Q Kᵀ / √E), A' = A · kept / (1 - dropout) (Vaswani et al. 2017).

    Backwards through the two products, the dropout and the softmax:

        dV = A'ᵀ dO,   dA' = dO Vᵀ,   dA = dA' · kept / (1 - dropout),
        dS = A · (dA - Σ A · dA),   dQ = dS K / √E,   dK = dSᵀ Q / √E.

    Hidden scores are -inf, so that A and dS are zero there; a query that may attend to nothing has
    an output and gradients of zero.

    Args:
        mask: True = may attend; None: all.
        dropout_mask: True = kept; None: no dropout.
        dropout: the probability that the mask was sampled with.

    The backward function returns dQ, dK, dV.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ np.swapaxes(key, -1, -2)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights, softmax_backward = softmax(scores)
    factor: Any = 1.0 if dropout_mask is None else dropout_mask / (1 - dropout)
    dropped = weights * factor

    def backward(dy: Array) -> tuple[Array, ...]:
        [d_scores] = softmax_backward(dy @ np.swapaxes(value, -1, -2) * factor)
        d_query = scale * d_scores @ key
        d_key = scale * np.swapaxes(d_scores, -1, -2) @ query
        return d_query, d_key, np.swapaxes(dropped, -1, -2) @ dy

    return dropped @ value, backward


def linear(
    x: Float[np.ndarray, "... I"],
    weight: Float[np.ndarray, "O I"],
    bias: Float[np.ndarray, " O"],
) -> tuple[Float[np.ndarray, "... O"], Backward]:
    """y = x Wᵀ + b, so that dx = dy W, dW = Σ dyᵀ x, db = Σ dy, with sums over all rows.

    The backward function returns dx, dW, db.
    """

    def backward(dy: Array) -> tuple[Array, ...]:
        rows, gradients = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return dy @ weight, gradients.T @ rows, gradients.sum(0)

    return x @ weight.T + bias, backward


def feedforward(
    x: Float[np.ndarray, "... D"],
    up: Float[np.ndarray, "F D"],
    up_bias: Float[np.ndarray, " F"],
    down: Float[np.ndarray, "D F"],
    down_bias: Float[np.ndarray, " D"],
) -> tuple[Float[np.ndarray, "... D"], Backward]:
    """y = max(0, x W₁ᵀ + b₁) W₂ᵀ + b₂ (Vaswani et al. 2017, eq. 2); the slope at 0 counts as 0.

    The backward function returns dx, dW₁, db₁, dW₂, db₂.
    """
    hidden, up_backward = linear(x, up, up_bias)
    out, down_backward = linear(np.maximum(hidden, 0), down, down_bias)

    def backward(dy: Array) -> tuple[Array, ...]:
        d_active, d_down, d_down_bias = down_backward(dy)
        d_x, d_up, d_up_bias = up_backward(d_active * (hidden > 0))
        return d_x, d_up, d_up_bias, d_down, d_down_bias

    return out, backward


def cross_entropy(
    logits: Float[np.ndarray, "N V"],
    targets: Int[np.ndarray, " N"],
    smoothing: float = 0.0,
) -> tuple[Float[np.ndarray, ""], Backward]:
    """L = -Σ q · log p summed over rows, with q = (1 - ε) onehot + ε / V (Szegedy et al. 2016).

    The gradient by the logits is p - q: softmax and logarithm cancel. The backward function takes
    the gradient by the sum (1 at the end of a net, 1 / N for a mean), and returns that by the
    logits.
    """
    rows, size = np.arange(len(logits)), logits.shape[1]
    target_probs = np.full_like(logits, smoothing / size)
    target_probs[rows, targets] += 1 - smoothing
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    def backward(dy: Array) -> tuple[Array, ...]:
        return (dy * (np.exp(log_probs) - target_probs),)

    return -(target_probs * log_probs).sum(), backward


def embedding(
    ids: Int[np.ndarray, "..."], matrix: Float[np.ndarray, "V D"], scale: float = 1.0
) -> tuple[Float[np.ndarray, "... D"], Backward]:
    """y = scale · E[ids]; a row of dE is the sum of the gradients wherever its id occurs.

    The backward function returns dE.
    """

    def backward(dy: Array) -> tuple[Array, ...]:
        gradient = np.zeros_like(matrix)
        np.add.at(gradient, ids, scale * dy)
        return (gradient,)

    return scale * matrix[ids], backward


def tied_language_model_loss(
    ids: Int[np.ndarray, " N"],
    targets: Int[np.ndarray, " N"],
    matrix: Float[np.ndarray, "V D"],
    scale: float = 1.0,
    smoothing: float = 0.0,
) -> tuple[Float[np.ndarray, ""], Backward]:
    """The loss of a model whose states are its embeddings, with tying (Press and Wolf 2017).

    The matrix is used twice, as input embedding and as output layer (logits = x Eᵀ), so that its
    gradient is the sum of both uses. The backward function returns dE.
    """
    states, embedding_backward = embedding(ids, matrix, scale)
    logits, output_backward = linear(states, matrix, np.zeros(len(matrix)))
    loss, loss_backward = cross_entropy(logits, targets, smoothing)

    def backward(dy: Array) -> tuple[Array, ...]:
        d_states, d_output, _ = output_backward(loss_backward(dy)[0])
        return (d_output + embedding_backward(d_states)[0],)

    return loss, backward
