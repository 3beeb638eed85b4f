"""Losses: values and gradients equal torch, in any number of chunks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.evaluation.likelihood import sum_losses, token_metrics
from heedful.parts import losses
from heedful.parts.heads import OutputHead
from heedful.parts.losses import cross_entropy, gradient_factor, head_loss

N, D, V = 17, 6, 11


def data(count: int = N, width: int = D, vocab: int = V, seed: int = 0) -> list[Tensor]:
    """States, weights, targets and biases; some targets have a high probability."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (count, vocab))
    bias = torch.randn(vocab, generator=generator)
    targets = torch.randint(vocab, (count,), generator=generator)
    targets[::2] = (hidden @ weight.T + bias).argmax(-1)[::2]
    return [hidden.requires_grad_(), nn.Parameter(weight), targets, nn.Parameter(bias)]


def reference(tensors: list[Tensor], smoothing: float) -> tuple[Tensor, list[Tensor]]:
    """torch's loss in fp64 and its gradients."""
    hidden, weight, targets, bias = (
        t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors
    )
    logits = hidden @ weight.T + bias
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    return loss.detach(), list(torch.autograd.grad(loss, (hidden, weight, bias)))


def check(result: Any, tensors: list[Tensor], smoothing: float, *, scale: float = 1.0,
          **close: float) -> None:  # fmt: skip
    """Against torch's loss, divided as in the trainer by the count of a whole step."""
    close = close or {"rtol": 1e-4, "atol": 1e-4}
    expected, grads = reference(tensors, smoothing)
    torch.testing.assert_close(result.loss.double(), expected, **close)
    (result.loss * scale).backward()
    for tensor, grad in zip([tensors[0], tensors[1], tensors[3]], grads, strict=True):
        torch.testing.assert_close(tensor.grad.double(), grad * scale, **close)


def plain(tensors: list[Tensor], smoothing: float) -> Any:
    hidden, weight, targets, bias = tensors
    return cross_entropy(hidden @ weight.T + bias, targets, label_smoothing=smoothing)


def chunked(hidden: Tensor, weight: Any, targets: Tensor, bias: Any = None, **options: Any) -> Any:
    """The loss of a head with these weights."""
    out = nn.Linear(weight.size(1), weight.size(0), bias=bias is not None)
    out.weight, out.bias = weight, bias
    return head_loss(OutputHead(out), hidden, targets, **options)


def linear(
    tensors: list[Tensor], smoothing: float, *, rows: int = 5, block: int = 2, **options: Any
) -> Any:
    """The chunked loss with `rows` of logits at a time, in blocks of `block`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "_LEAST_ROWS", rows)
        patch.setattr(losses, "_CHUNK_ELEMENTS", 1)
        patch.setattr(losses, "_BLOCK_ELEMENTS", block * tensors[1].size(0))
        return chunked(*tensors, label_smoothing=smoothing, **options)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 7)),
    rows=st.integers(1, 10),
    block=st.integers(1, 10),
    smoothing=st.just(0.0) | st.floats(0, 0.99),
    scale=st.sampled_from([1.0, 1 / 64]),
    seed=st.integers(0, 2**20),
)
def test_losses_equal_torch_cross_entropy_for_any_chunk_size(
    count: int,
    sizes: tuple[int, int],
    rows: int,
    block: int,
    smoothing: float,
    scale: float,
    seed: int,
) -> None:
    """Without targets the sum and its gradients are zero."""
    fused = partial(linear, rows=rows, block=block, count_correct=True)
    for function in (plain, fused):
        tensors = data(count, *sizes, seed)
        result = function(tensors, smoothing)
        check(result, tensors, smoothing, scale=scale)
        hidden, weight, targets, bias = (tensor.detach() for tensor in tensors)
        nll, _ = reference(tensors, 0.0)
        torch.testing.assert_close(result.nll.double(), nll, rtol=1e-4, atol=1e-4)
        right = ((hidden @ weight.T + bias).argmax(-1) == targets).sum()
        assert (int(result.correct), result.tokens) == (int(right), count)


@pytest.mark.parametrize("elements", [1, V, 5 * V, 10**6])
def test_rows_per_chunk_depend_on_the_vocabulary_with_a_minimum(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_LEAST_ROWS", 2)
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", elements)
    sizes: list[int] = []
    softmax = F.softmax

    def counted(x: Tensor, dim: int) -> Tensor:
        sizes.append(len(x))
        return softmax(x, dim)

    monkeypatch.setattr(losses.F, "softmax", counted)
    chunked(*data())
    assert max(sizes) == min(N, max(2, elements // V))


def test_label_smoothing_covers_all_classes() -> None:
    """ε / V for each of V classes, target and padding included, by explicit numbers."""
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.5]])
    log_probs = [value - math.log(sum(map(math.exp, logits[0].tolist()))) for value in logits[0]]
    expected = -sum(q * lp for q, lp in zip([0.1, 0.1, 0.7, 0.1], log_probs, strict=True))
    result = cross_entropy(logits, torch.tensor([2]), label_smoothing=0.4)
    assert result.loss.item() == pytest.approx(float(expected), rel=1e-6)
    assert result.nll.item() == pytest.approx(-float(log_probs[2]), rel=1e-6)


def test_the_backward_pass_can_run_twice() -> None:
    tensors = data()
    loss = linear(tensors, 0.0).loss
    (first,) = torch.autograd.grad(loss, tensors[1], retain_graph=True)
    (second,) = torch.autograd.grad(3 * loss, tensors[1])
    torch.testing.assert_close(second, 3 * first)


def test_reported_sums_have_no_graph_and_correct_targets_are_optional() -> None:
    """Otherwise sums over a run would keep every step's graph in memory."""
    for result in (linear(data(), 0.1, count_correct=True), plain(data(), 0.1)):
        assert result.loss.requires_grad
        assert not result.nll.requires_grad
        assert not result.correct.requires_grad
    not_asked = linear(data(), 0.0)
    assert not_asked.correct is None
    assert sum_losses([not_asked, not_asked]).correct is None
    assert token_metrics(sum_losses([not_asked, not_asked])).keys() == {"perplexity", "loss"}


@pytest.mark.parametrize("indices", [[], [0], [1], [0, 1]])
def test_gradients_are_computed_only_where_required(indices: list[int]) -> None:
    tensors = data()
    _, grads = reference(tensors, 0.0)
    for index in (0, 1, 3):
        tensors[index].requires_grad_(index in indices)
    loss = linear(tensors, 0.0).loss
    assert loss.requires_grad == bool(indices)
    if indices:
        loss.backward()
    for index in (0, 1):
        assert (tensors[index].grad is not None) == (index in indices)
        if index in indices:
            torch.testing.assert_close(tensors[index].grad.double(), grads[index], rtol=1e-4,
                                       atol=1e-5)  # fmt: skip


def test_extreme_logits_give_a_finite_loss() -> None:
    hidden, weight = (
        torch.full((1, 1), 1e4, requires_grad=True),
        nn.Parameter(torch.tensor([[1.0], [-1.0]])),
    )
    result = chunked(hidden, weight, torch.tensor([1]))
    assert result.loss.item() == pytest.approx(2e4)
    result.loss.backward()
    assert hidden.grad.tolist() == [[2.0]]


def test_autocast_applies_to_the_products_only() -> None:
    tensors = data()
    with torch.autocast("cpu", torch.bfloat16):
        result, other = linear(tensors, 0.1), plain(tensors, 0.1)
    assert result.loss.dtype == torch.float32
    # Nearly the same rounded logits, so nearly the same loss; both some way off the exact one.
    torch.testing.assert_close(result.loss, other.loss, rtol=1e-2, atol=1e-2)
    assert abs(result.loss.item() - reference(tensors, 0.1)[0].item()) > 1e-5
    check(result, tensors, 0.1, rtol=0.05, atol=0.05)
    assert tensors[1].grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_of_half_precision_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """In 16 bits later chunks would be lost beside the sum of earlier ones."""
    tensors = data(3000)
    for tensor in (tensors[0], tensors[1], tensors[3]):
        tensor.data = tensor.data.to(dtype)
    tensors[0].data.abs_()  # gradients that add up
    tensors[2][:] = 3
    result = linear(tensors, 0.1, rows=1)
    assert result.loss.dtype == torch.float32
    expected, grads = reference(tensors, 0.1)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-2)
    result.loss.backward()
    assert tensors[0].grad.dtype == tensors[1].grad.dtype == dtype
    torch.testing.assert_close(tensors[0].grad.double(), grads[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(tensors[1].grad.double(), grads[1], rtol=0.02, atol=3.0)


def scaled_gradients(loss: Any, tensors: list[Tensor], scale: float) -> list[Tensor]:
    """The gradients of a scaled mean loss, without the scale, as `GradScaler` computes them."""
    for tensor in tensors:
        tensor.grad = None
    result = loss()
    (result.loss / result.tokens * scale).backward()
    return [tensor.grad / scale for tensor in tensors]  # type: ignore[operator]


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_the_sum_may_overflow_fp16_where_that_of_the_mean_does_not(
    is_compiling: bool, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One channel of the states is large, and half of the targets are one token."""
    tensors, scale = data(8192), 128.0
    hidden, weight, targets, bias = tensors
    hidden.data[:, 0], weight.data[:, 0] = 40.0, 0.0
    targets[::2] = 3
    learned = [hidden, weight, bias]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)

    def whole() -> Any:
        return linear(tensors, smoothing, rows=8192, block=500)

    with torch.autocast("cpu", torch.float16):
        factor = torch.tensor(scale / len(targets))
        with gradient_factor(factor):
            actual = scaled_gradients(whole, learned, scale)
        expected = scaled_gradients(lambda: plain(tensors, smoothing), learned, scale)
        sums = scaled_gradients(whole, learned, scale)
    if not is_compiling:
        assert not sums[1].isfinite().all()  # the check above can fail
    assert expected[1].abs().max() > 10
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(other.abs().max()))


@pytest.mark.parametrize("factor", [2.0**-10, 3e-4, 7.0])
def test_a_gradient_factor_changes_rounding_only(factor: float) -> None:
    tensors = data(40)
    with gradient_factor(torch.tensor(factor)):
        result = linear(tensors, 0.1, rows=7)
    check(result, tensors, 0.1, scale=factor / 2)
