"""Every linear layer is called as a module, so that its wrappers (LoRA, int8) apply."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from architectures import decodes, tiny
from compiled_nets import NETS
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.losses import cross_entropy, head_loss
from option_space import EXACT, VOCAB, texts_of, tokens_of
from single_stacks import Single, decoder


class LowRank(nn.Module):
    """A linear layer with a low-rank term (Hu et al. 2021), which counts its calls."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.calls = linear, 0
        self.down = nn.Parameter(torch.randn(2, linear.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.zeros(linear.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) + F.linear(F.linear(x, self.down), self.up)


def wrapped(net: Any) -> list[LowRank]:
    """All linear layers of a net, each wrapped."""
    actual = []
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, LowRank(child))
                actual.append(getattr(module, name))
    return actual


def run(net: Any) -> Tensor:
    texts = texts_of([5, 5], 1)
    ids, sources = (torch.stack([text.ids for text in texts]) for _ in range(2))
    return net(sources, ids) if isinstance(net, EncoderDecoder) else net(ids)


def run_cached(net: Any) -> Tensor:
    ids = torch.stack([text.ids for text in texts_of([5, 5], 1)])
    whole = tokens_of(list(ids))
    cache = net.start(whole if isinstance(net, EncoderDecoder) else 2, capacity=5)
    return net.head(net.decode(whole, cache))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", [*NETS, "bert classes"])
def test_every_linear_layer_is_called_as_a_module(name: str, grad: bool) -> None:
    """The other nets have no module and no option beside those of `NETS` (test_compiled.py)."""
    name, *classes = name.split()
    net = tiny(name, **({"head": "classify"} if classes else {}))
    runs = [run, run_cached] if decodes(name) else [run]
    with torch.set_grad_enabled(grad):
        plain = run(net)
        linears = wrapped(net)
        assert not [m for m in net.modules() if type(m) is nn.Linear and m not in
                    [w.linear for w in linears]]  # fmt: skip
        for run_once in runs:
            for linear in linears:
                linear.calls = 0
            torch.testing.assert_close(run_once(net), plain, **EXACT)
            assert [linear.calls for linear in linears] == [1] * len(linears)
            for linear in linears:
                with torch.no_grad():
                    linear.up.normal_()
                assert (run_once(net) - plain).abs().max() > 1e-6
                nn.init.zeros_(linear.up)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_calls_the_head_as_a_module(smoothing: float, bias: bool) -> None:
    net = decoder(Single(bias=bias, tied=False))
    torch.manual_seed(0)
    states = torch.randn(1100, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (1100,))

    def gradients(parameters: Any) -> list[Tensor]:
        return torch.autograd.grad(parameters.loss, [states, *plain.parameters()])

    plain = net.head.out
    fused = head_loss(net.head, states, targets, label_smoothing=smoothing, count_correct=True)
    expected = gradients(fused)
    (head,) = wrapped(net.head)
    called = head_loss(net.head, states, targets, label_smoothing=smoothing, count_correct=True)
    assert head.calls == 2  # chunks of 1,000 rows
    for ours, reference in zip(called, fused, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(reference),
                                   check_dtype=False, rtol=1e-5, atol=1e-5)  # fmt: skip
    for ours, reference in zip(gradients(called), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    nn.init.normal_(head.up)
    changed = head_loss(net.head, states, targets, label_smoothing=smoothing)
    whole = cross_entropy(net.head(states), targets, label_smoothing=smoothing)
    torch.testing.assert_close(changed.loss, whole.loss)
    assert (changed.loss - called.loss).abs() > 1


def test_a_head_with_a_hook_or_a_cap_is_called() -> None:
    states, targets = torch.randn(7, 6, dtype=torch.float64), torch.randint(VOCAB, (7,))
    net = decoder(Single())
    calls: list[Any] = []
    net.head.out.register_forward_hook(lambda *arguments: calls.append(arguments))
    head_loss(net.head, states, targets)
    assert calls
    capped = decoder(Single()).head
    capped.softcap = 0.5
    expected = cross_entropy(capped(states), targets)
    torch.testing.assert_close(head_loss(capped, states, targets).loss, expected.loss)
    assert capped(states).abs().max() < 0.5
