"""The loss by Triton has the values and gradients of torch's, for every type and size."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from heedful.kernels import library as kernels
from heedful.kernels import loss_gpu
from heedful.parts import losses
from heedful.parts.heads import OutputHead
from heedful.parts.losses import LossSum, head_loss

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", loss_gpu.ELEMENT_TYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 2), (5, 4096), (7, 4097), (300, 50_257)])
def test_values_and_gradients_equal_those_of_torch(
    rows: int, vocab: int, dtype: torch.dtype, smoothing: float
) -> None:
    torch.manual_seed(0)
    wide = (5 * torch.randn(rows, vocab + 3, device="cuda")).to(dtype)
    targets = torch.randint(vocab, (rows,), device="cuda")
    for logits in (wide, wide[:, :vocab].contiguous()):
        assert loss_gpu.can_run(logits)
        sums, grad = loss_gpu.cross_entropy(logits, targets, smoothing, True, vocab)
        expected = logits[:, :vocab].double().requires_grad_()
        loss = F.cross_entropy(expected, targets, label_smoothing=smoothing, reduction="sum")
        loss.backward()
        nll = F.cross_entropy(expected, targets, reduction="sum")
        correct = (logits[:, :vocab].argmax(1) == targets).sum()
        actual = torch.stack([loss, nll, correct]).double()
        torch.testing.assert_close(sums, actual, rtol=1e-5, atol=1e-5)
        assert grad is not None
        assert grad.dtype == dtype
        assert not grad[:, vocab:].any()
        within = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(
            grad[:, :vocab].double(), expected.grad, rtol=within, atol=within
        )


@pytest.mark.parametrize("dtype", loss_gpu.ELEMENT_TYPES)
def test_the_gradient_has_its_factor_before_it_is_rounded(dtype: torch.dtype) -> None:
    """A gradient that is 0 in fp16 is not after a large factor."""
    logits = torch.tensor([[0.0, 18.0, -3.0]], device="cuda", dtype=dtype)
    targets = torch.tensor([1], device="cuda")
    factor = torch.tensor(1e4, device="cuda")
    _, grad = loss_gpu.cross_entropy(logits, targets, 0.0, True, 3, factor)
    expected = logits.double().softmax(1)
    expected[0, 1] -= 1
    expected *= 1e4
    others = torch.tensor([0, 2], device="cuda")
    torch.testing.assert_close(grad.double()[0, others], expected[0, others], rtol=5e-3, atol=1e-7)
    # A probability near 1 in fp32, less 1.
    torch.testing.assert_close(grad.double()[0, 1], expected[0, 1], rtol=0, atol=1e4 * 2**-24)


def test_logits_without_a_finite_value_and_wrong_targets() -> None:
    """As torch: -inf has no part in the loss; NaN stays; a target that is no class gives NaN."""
    logits = torch.randn(6, 9000, device="cuda")
    logits[0, :5000] = -torch.inf
    logits[1, 17] = torch.nan
    logits[2] = torch.inf
    targets = torch.tensor([6000, 3, 3, -1, 9000, 8999], device="cuda")
    losses_of_rows = [
        float(loss_gpu.cross_entropy(logits[i : i + 1], targets[i : i + 1], 0.0, True, 9000)[0][0])
        for i in range(6)
    ]
    expected = F.cross_entropy(logits[[0, 5]].double(), targets[[0, 5]], reduction="none")
    assert [losses_of_rows[0], losses_of_rows[5]] == pytest.approx(expected.tolist(), rel=1e-5)
    assert all(torch.tensor(losses_of_rows[1:5]).isnan())


def test_equal_logits_have_the_first_as_their_highest() -> None:
    logits = torch.zeros(3, 5000, device="cuda")
    targets = torch.tensor([0, 1, 4999], device="cuda")
    assert loss_gpu.cross_entropy(logits, targets, 0.0, False, 5000)[0][2] == 1


@pytest.mark.parametrize("vocab", [64, 1001])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_loss_of_a_head_in_chunks_equals_that_of_torch(
    vocab: int, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vocabulary whose rows are not aligned, a bias, and several chunks."""
    monkeypatch.setattr(losses, "_LEAST_ROWS", 7)
    monkeypatch.setattr(losses, "_GPU_CHUNK_ELEMENTS", 1)
    torch.manual_seed(0)
    head = OutputHead(nn.Linear(32, vocab)).to("cuda")
    states = torch.randn(30, 32, device="cuda", requires_grad=True)
    targets = torch.randint(vocab, (30,), device="cuda")

    def results() -> list[torch.Tensor]:
        head.zero_grad()
        states.grad = None
        with torch.autocast("cuda", precision, enabled=precision == torch.bfloat16):
            sums: LossSum = head_loss(
                head, states, targets, label_smoothing=0.1, count_correct=True
            )
        (sums.loss / sums.tokens).backward()
        assert sums.correct is not None
        grads = [parameter.grad for parameter in head.parameters()]
        return [sums.loss, sums.nll, sums.correct, states.grad, *grads]  # type: ignore[list-item]

    counted = mock.patch.object(loss_gpu, "_run", side_effect=loss_gpu._run)
    with counted as calls:
        actual = results()
    assert calls.call_count == 5
    with kernels.unused():
        expected = results()
    within = 1e-5 if precision == torch.float32 else 2e-2
    for ours, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=within, atol=within * 0.1)
