"""Losses: parity with torch's, values and gradients, in any number of chunks."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from heedful.parts import losses
from heedful.parts.losses import cross_entropy, linear_cross_entropy

N, D, V = 17, 6, 11


def data(count: int = N) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets; for some targets the model is sure and right."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, D, generator=generator)
    weight = torch.randn(V, D, generator=generator)
    targets = torch.randint(V, (count,), generator=generator)
    targets[::2] = (hidden @ weight.T).argmax(-1)[::2]
    return hidden, weight, targets


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's loss in fp64 and its gradients."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.T
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    grads = torch.autograd.grad(loss, (hidden, weight))
    return loss.detach(), *grads


@pytest.fixture(params=[1, V - 1, V, 5 * V, 16 * V, 17 * V, 10**6])
def chunk_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From one row at a time to all at once, chunks that divide the rows evenly and not."""
    monkeypatch.setattr(losses, "_LEAST_ROWS", 1)
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", request.param)
    return request.param


@pytest.fixture
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(losses, "_LEAST_ROWS", 1)
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", 5 * V)
    return


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_cross_entropy_is_torchs_sum(smoothing: float) -> None:
    hidden, weight, targets = data()
    logits = (hidden @ weight.T).requires_grad_()
    result = cross_entropy(logits, targets, label_smoothing=smoothing)
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(result.loss, expected)
    (ours,) = torch.autograd.grad(result.loss, logits)
    (theirs,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(ours, theirs)


def test_smoothing_spreads_over_all_classes() -> None:
    """ε / V on each of all V classes, the target's and the padding's too: in numbers."""
    logits = torch.tensor([[2.0, 0.0, -1.0, 0.5]])
    log_probs = [value - math.log(sum(map(math.exp, logits[0].tolist()))) for value in logits[0]]
    expected = -sum(q * lp for q, lp in zip([0.1, 0.1, 0.7, 0.1], log_probs, strict=True))
    result = cross_entropy(logits, torch.tensor([2]), label_smoothing=0.4)
    assert result.loss.item() == pytest.approx(float(expected), rel=1e-6)
    assert result.nll.item() == pytest.approx(-float(log_probs[2]), rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_both_losses_report_the_likelihood_without_smoothing_and_the_right_ones(
    smoothing: float,
) -> None:
    hidden, weight, targets = data()
    nll, _, _ = reference(hidden, weight, targets, 0.0)
    right = int(((hidden @ weight.T).argmax(-1) == targets).sum())
    assert 9 <= right < N
    for result in (
        cross_entropy(hidden @ weight.T, targets, label_smoothing=smoothing),
        linear_cross_entropy(
            hidden, weight, targets, label_smoothing=smoothing, count_correct=True
        ),
    ):
        torch.testing.assert_close(result.nll.double(), nll, rtol=1e-5, atol=1e-5)
        assert int(result.correct) == right
        assert result.tokens == N


def test_the_right_ones_are_minus_one_where_not_asked_for() -> None:
    assert int(linear_cross_entropy(*data()).correct) == -1


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("chunk_elements")
def test_the_linear_loss_is_the_loss_of_the_product_in_chunks_of_any_size(
    smoothing: float,
) -> None:
    hidden, weight, targets = data()
    expected, grad_hidden, grad_weight = reference(hidden, weight, targets, smoothing)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = linear_cross_entropy(
        hidden, weight, targets, label_smoothing=smoothing, count_correct=True
    )
    plain = cross_entropy(hidden @ weight.T, targets, label_smoothing=smoothing)
    torch.testing.assert_close(result.loss.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.nll, plain.nll)
    assert int(result.correct) == int(plain.correct)
    result.loss.backward()
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), grad_weight, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(0, 9),
    width=st.integers(1, 4),
    vocab=st.integers(1, 7),
    smoothing=st.floats(0, 0.99),
    seed=st.integers(0, 2**20),
)
def test_the_linear_loss_at_any_size(
    rows: int, width: int, vocab: int, smoothing: float, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, weight = torch.randn(rows, width), torch.randn(vocab, width)
    targets = torch.randint(vocab, (rows,))
    expected, grad_hidden, grad_weight = reference(hidden, weight, targets, smoothing)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = linear_cross_entropy(hidden, weight, targets, label_smoothing=smoothing)
    result.loss.backward()
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(result.loss.double(), expected, **close)
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, **close)
    torch.testing.assert_close(weight.grad.double(), grad_weight, **close)


@pytest.mark.usefixtures("few_rows_at_a_time")
def test_the_gradient_is_the_difference_quotient_of_the_loss() -> None:
    """In a random direction, in fp64, of torch's loss: no formula shared with ours."""
    hidden, weight, targets = data()
    directions = torch.randn_like(hidden).double(), torch.randn_like(weight).double()

    def at(step: float) -> float:
        moved = (hidden.double() + step * directions[0], weight.double() + step * directions[1])
        return reference(*moved, targets, 0.1)[0].item()

    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    linear_cross_entropy(h, w, targets, label_smoothing=0.1).loss.backward()
    slope = (h.grad * directions[0]).sum() + (w.grad * directions[1]).sum()
    assert slope.item() == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-5)


@pytest.mark.usefixtures("few_rows_at_a_time")
def test_the_gradient_is_scaled_by_what_the_loss_is_scaled_by() -> None:
    """Divided by the count of a whole step, as the trainer does."""
    hidden, weight, targets = (t.requires_grad_() if t.is_floating_point() else t for t in data())
    _, grad_hidden, grad_weight = reference(hidden, weight, targets, 0.1)
    (linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1).loss / 64).backward()
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(hidden.grad.double(), grad_hidden / 64, **close)
    torch.testing.assert_close(weight.grad.double(), grad_weight / 64, **close)


def test_two_halves_of_a_batch_add_up_to_the_whole() -> None:
    """(sum, count): accumulated and divided once, the gradient is that of one large batch."""
    hidden, weight, targets = data()
    weight.requires_grad_()
    whole = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1)
    whole.loss.backward()
    expected, weight.grad = weight.grad, None
    parts = [
        linear_cross_entropy(hidden[rows], weight, targets[rows], label_smoothing=0.1)
        for rows in (slice(0, 5), slice(5, N))
    ]
    for part in parts:
        part.loss.backward()
    assert sum(part.tokens for part in parts) == whole.tokens
    torch.testing.assert_close(sum(part.loss.detach() for part in parts), whole.loss.detach())
    torch.testing.assert_close(weight.grad, expected)


def test_the_graph_may_be_walked_twice() -> None:
    hidden, weight, targets = data()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets).loss
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(3 * loss, weight)
    torch.testing.assert_close(second, 3 * first)


def test_what_is_reported_holds_no_graph() -> None:
    """Summed up over a run it would hold every step's gradients in memory."""
    hidden, weight, targets = data()
    weight.requires_grad_()
    for result in (
        linear_cross_entropy(hidden, weight, targets, count_correct=True),
        cross_entropy(hidden @ weight.T, targets),
    ):
        assert result.loss.requires_grad
        assert not result.nll.requires_grad
        assert not result.correct.requires_grad


@pytest.mark.parametrize("wanted", ["hidden", "weight", "neither"])
def test_only_the_wanted_gradients_are_given(wanted: str) -> None:
    hidden, weight, targets = data()
    _, grad_hidden, grad_weight = reference(hidden, weight, targets, 0.0)
    hidden.requires_grad_(wanted == "hidden")
    weight.requires_grad_(wanted == "weight")
    loss = linear_cross_entropy(hidden, weight, targets).loss
    assert loss.requires_grad == (wanted != "neither")
    if wanted == "hidden":
        loss.backward()
        torch.testing.assert_close(hidden.grad, grad_hidden.float(), rtol=1e-4, atol=1e-5)
    if wanted == "weight":
        loss.backward()
        torch.testing.assert_close(weight.grad, grad_weight.float(), rtol=1e-4, atol=1e-5)


def test_no_targets_are_a_sum_of_zero() -> None:
    """A batch may have nothing to learn from: zero, no error, zero gradients."""
    hidden, weight, targets = data(0)
    hidden.requires_grad_()
    weight.requires_grad_()
    result = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1, count_correct=True)
    assert (result.loss.item(), result.nll.item(), int(result.correct), result.tokens) == (0,) * 4
    result.loss.backward()
    assert hidden.grad.shape == (0, D)
    assert not weight.grad.any()
    plain = cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1)
    assert (plain.loss.item(), plain.tokens) == (0.0, 0)


def test_a_sure_and_wrong_model_gives_no_infinity() -> None:
    hidden, weight = torch.full((1, 1), 1e4), torch.tensor([[1.0], [-1.0]])
    hidden.requires_grad_()
    result = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    assert result.loss.item() == pytest.approx(2e4)
    result.loss.backward()
    assert hidden.grad.tolist() == [[2.0]]


@pytest.mark.usefixtures("few_rows_at_a_time")
def test_autocast_runs_the_products_in_its_type_and_the_rest_in_fp32() -> None:
    hidden, weight, targets = (t.requires_grad_() if t.is_floating_point() else t for t in data())
    expected, grad_hidden, grad_weight = reference(hidden, weight, targets, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        result = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1)
        plain = cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1)
    assert result.loss.dtype == torch.float32
    # The same rounded logits, so nearly the same loss; both some way off the exact one.
    torch.testing.assert_close(result.loss, plain.loss, rtol=1e-5, atol=1e-5)
    assert 1e-5 < abs(result.loss.item() - expected.item()) / expected.item() < 1e-2
    result.loss.backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, rtol=0.05, atol=0.05)
    torch.testing.assert_close(weight.grad.double(), grad_weight, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_are_summed_in_fp32(dtype: torch.dtype) -> None:
    hidden, weight, targets = data()
    hidden, weight = (t.to(dtype).requires_grad_() for t in (hidden, weight))
    expected, grad_hidden, _ = reference(hidden, weight, targets, 0.1)
    result = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-2)
    result.loss.backward()
    assert hidden.grad.dtype == dtype
    torch.testing.assert_close(hidden.grad.double(), grad_hidden, rtol=0.05, atol=0.05)
