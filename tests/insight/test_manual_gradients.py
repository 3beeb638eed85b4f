"""Gradients by hand against autograd and the modules of torch, in fp64."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.insight import manual_gradients as manual

MASK = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(1)) < 0.7
MASK[0, 0, 1] = False  # a query without a visible key
KEPT = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(2)) < 0.8
IDS = torch.tensor([3, 1, 3, 0, 6])
TARGETS = torch.tensor([1, 3, 2, 6, 0])


def own_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention under MASK and KEPT; `nan_to_num` alone would leave NaN gradients."""
    scores = query @ key.mT / math.sqrt(query.size(-1))
    weights = scores.masked_fill(~MASK, -1e300).softmax(-1) * MASK.any(-1, keepdim=True)
    return (weights * KEPT / 0.8) @ value


def tied(matrix: Tensor, smoothing: float) -> Tensor:
    states = 2.0 * F.embedding(IDS, matrix)
    return F.cross_entropy(states @ matrix.T, TARGETS, reduction="sum", label_smoothing=smoothing)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "layer_norm": (
        manual.layer_norm,
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        [(2, 3, 6), (6,), (6,)],
    ),
    "rms_norm": (manual.rms_norm, lambda x, w: F.rms_norm(x, (6,), w, 1e-6), [(2, 3, 6), (6,)]),
    "softmax": (manual.softmax, lambda x: x.softmax(-1), [(2, 3, 5)]),
    "attention": (
        manual.attention,
        F.scaled_dot_product_attention,
        [(2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6)],
    ),
    "attention with masks": (
        lambda q, k, v: manual.attention(q, k, v, MASK.numpy(), KEPT.numpy(), 0.2),
        own_attention,
        [(2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6)],
    ),
    "linear": (manual.linear, F.linear, [(2, 3, 6), (4, 6), (4,)]),
    "feedforward": (
        manual.feedforward,
        lambda x, a, b, c, d: F.linear(F.linear(x, a, b).relu(), c, d),
        [(2, 3, 6), (8, 6), (8,), (6, 8), (6,)],
    ),
    "cross_entropy": (
        lambda x: manual.cross_entropy(x, TARGETS.numpy()),
        lambda x: F.cross_entropy(x, TARGETS, reduction="sum"),
        [(5, 7)],
    ),
    "cross_entropy with smoothing": (
        lambda x: manual.cross_entropy(x, TARGETS.numpy(), 0.3),
        lambda x: F.cross_entropy(x, TARGETS, reduction="sum", label_smoothing=0.3),
        [(5, 7)],
    ),
    "embedding": (
        lambda matrix: manual.embedding(IDS.numpy(), matrix, 3.0),
        lambda matrix: 3.0 * F.embedding(IDS, matrix),
        [(7, 6)],
    ),
    "tied embedding": (
        lambda m: manual.tied_language_model_loss(IDS.numpy(), TARGETS.numpy(), m, 2.0, 0.1),
        lambda m: tied(m, 0.1),
        [(7, 6)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_autograd(name: str) -> None:
    function, reference, shapes = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]
    expected = reference(*inputs)
    gradient = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(gradient)
    actual, backward = function(*(x.detach().numpy() for x in inputs))
    np.testing.assert_allclose(actual, expected.detach(), rtol=1e-11, atol=1e-12)
    gradients = backward(gradient.numpy())
    assert len(gradients) == len(inputs)
    for own, x in zip(gradients, inputs, strict=True):
        assert own.shape == x.shape
        np.testing.assert_allclose(own, x.grad, rtol=1e-10, atol=1e-12)


def test_a_query_without_keys_has_zeros() -> None:
    query, key, value = (np.ones((1, n, 2)) for n in (2, 3, 3))
    mask = np.array([[[True] * 3, [False] * 3]])
    out, backward = manual.attention(query, key, value, mask)
    assert out[0].tolist() == [[1, 1], [0, 0]]
    gradients = backward(np.ones_like(out))
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert gradients[0][0, 1].tolist() == [0, 0]


def test_large_scores_do_not_overflow() -> None:
    shares, _ = manual.softmax(np.array([[1e4, 1e4, -1e4], [-np.inf, -np.inf, -np.inf]]))
    assert shares.tolist() == [[0.5, 0.5, 0], [0, 0, 0]]
    loss, _ = manual.cross_entropy(np.array([[1e4, 0.0]]), np.array([0]))
    assert loss == 0
