"""RMSNorm, gated feed-forward networks and the sandwich, against formulas and transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from heedful.parts.feedforward import GATES, Gate, Gated, Mlp, feedforward, gelu_tanh
from heedful.parts.norms import LayerNorm, RMSNorm
from heedful.parts.residual import SandwichNorm

D, WIDE = 6, 8


def random(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double().eval()


def x_of(*shape: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


# Norms


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_takes_no_mean_off_and_has_eps_inside_the_root(eps: float, scale: float) -> None:
    norm = random(RMSNorm(eps).build(D))
    x = x_of(2, 3, D, scale=scale) + scale  # its mean is not zero
    a, weight = x.numpy(), norm.weight.detach().numpy()
    expected = a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-12)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_trap_26_golden_rms_norm() -> None:
    """(3, 4): the root of the mean square is 5 / √2, and neither a deviation nor a length."""
    norm = RMSNorm(0.0).build(2)
    expected = [3 * math.sqrt(2) / 5, 4 * math.sqrt(2) / 5]
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([expected]))


@pytest.mark.parametrize(
    "theirs", ["llama.modeling_llama.LlamaRMSNorm", "t5.modeling_t5.T5LayerNorm"]
)
def test_rms_norm_is_that_of_transformers(theirs: str) -> None:
    transformers = pytest.importorskip("transformers")
    package, module, name = theirs.split(".")
    found = getattr(getattr(getattr(transformers.models, package), module), name)(D, eps=1e-3)
    norm = random(RMSNorm(1e-3).build(D)).float()
    found.weight.data.copy_(norm.weight.data)
    x = x_of(2, 3, D).float()
    torch.testing.assert_close(norm(x), found(x), rtol=1e-5, atol=1e-6)


def test_a_layer_norm_without_bias_is_one_whose_bias_is_zero() -> None:
    with_bias, without = LayerNorm().build(D), LayerNorm(bias=False).build(D)
    assert without.bias is None
    x = x_of(2, 3, D).float()
    torch.testing.assert_close(without(x), with_bias(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_large_states_do_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    """The square of 1,000 is more than fp16 holds."""
    for scheme in (RMSNorm(), LayerNorm()):
        norm = scheme.build(4).to(dtype)
        out = norm(torch.tensor([[1000.0, -1000.0, 1000.0, -1000.0]], dtype=dtype))
        torch.testing.assert_close(out.abs().float(), torch.ones(1, 4), rtol=0, atol=1e-2)


# Feed-forward


def formula(gate: Gate, a: np.ndarray) -> np.ndarray:
    """The function on the gate, one number at a time, in double precision."""
    one = {
        "swiglu": lambda v: v / (1 + math.exp(-v)),
        "geglu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
        "geglu_tanh": lambda v: (
            0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        ),
        "reglu": lambda v: max(v, 0.0),
    }[gate]
    return np.vectorize(one)(a)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_gated_networks_are_their_formulas(gate: Gate, bias: bool) -> None:
    """(act(x W + b) ⊙ (x V + c)) W₂ + d: the activation is on the first half, not the second."""
    network = random(Gated(D, WIDE, gate, bias=bias))
    x = x_of(2, 3, D)
    weight, down = network.up.weight.detach().numpy(), network.down.weight.detach().numpy()
    biases = np.zeros(2 * WIDE), np.zeros(D)
    if bias:
        biases = network.up.bias.detach().numpy(), network.down.bias.detach().numpy()
    gated = x.numpy() @ weight[:WIDE].T + biases[0][:WIDE]
    linear = x.numpy() @ weight[WIDE:].T + biases[0][WIDE:]
    expected = (formula(gate, gated) * linear) @ down.T + biases[1]
    np.testing.assert_allclose(network(x).detach().numpy(), expected, rtol=1e-9, atol=1e-9)


def test_swiglu_is_that_of_llama() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=D, num_attention_heads=1, intermediate_size=WIDE)
    theirs, ours = llama.LlamaMLP(config), random(Gated(D, WIDE, "swiglu")).float()
    with torch.no_grad():
        gate, up = ours.up.weight.split(ours.split_sizes)
        theirs.gate_proj.weight.copy_(gate)
        theirs.up_proj.weight.copy_(up)
        theirs.down_proj.weight.copy_(ours.down.weight)
    x = x_of(2, 3, D).float()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_trap_25_geglu_of_t5_has_the_tanh_approximation() -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=D, d_ff=WIDE, feed_forward_proj="gated-gelu", dropout_rate=0.0
    )
    theirs = t5.T5DenseGatedActDense(config)
    ours = {name: random(Gated(D, WIDE, name)).float() for name in ("geglu_tanh", "geglu")}
    with torch.no_grad():
        gate, up = ours["geglu"].up.weight.split(WIDE)
        theirs.wi_0.weight.copy_(gate)
        theirs.wi_1.weight.copy_(up)
        theirs.wo.weight.copy_(ours["geglu"].down.weight)
    x = x_of(2, 3, D).float()
    torch.testing.assert_close(ours["geglu_tanh"](x), theirs(x), rtol=1e-5, atol=1e-5)
    assert (ours["geglu"](x) - theirs(x)).abs().max() > 1e-4


@pytest.mark.parametrize(("activation", "function"), [("silu", F.silu), ("gelu_tanh", gelu_tanh)])
def test_the_newer_plain_networks(activation: Any, function: Any) -> None:
    network = random(Mlp(D, WIDE, activation))
    x = x_of(2, 3, D)
    torch.testing.assert_close(network(x), network.down(function(network.up(x))))


def test_trap_25_the_tanh_approximation_in_numbers() -> None:
    """At 1 and -2: 0.84119 and -0.04540, where the exact ones are 0.84134 and -0.04550."""
    found = gelu_tanh(torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(found, torch.tensor([0.841192, -0.045402]), rtol=0, atol=1e-6)


def test_a_name_says_which_network() -> None:
    assert isinstance(feedforward(D, WIDE, "swiglu"), Gated)
    assert isinstance(feedforward(D, WIDE, "silu"), Mlp)
    network = feedforward(D, WIDE, "reglu", dropout=0.25, bias=False)
    assert network.up.bias is None
    assert network.down.bias is None
    assert network.dropout.p == 0.25
    assert feedforward(D, WIDE, "relu").up.bias is not None


@pytest.mark.parametrize("kind", ["swiglu", "relu"])
def test_dropout_is_on_the_hidden_units(kind: Any) -> None:
    """Not on what comes out: every output is then a sum over fewer units."""
    network = random(feedforward(1, 400, kind, dropout=0.5, bias=False))
    nn.init.ones_(network.up.weight)
    nn.init.ones_(network.down.weight)
    x = torch.ones(1, 50, 1, dtype=torch.float64)
    whole = network(x).flatten()[0]
    ratios = (network.train()(x) / whole).flatten()
    assert ((ratios > 0.7) & (ratios < 1.3)).all()
    # Of 400 units some are kept, each twice as large: the ratio is a count over 200.
    torch.testing.assert_close(ratios * 200, (ratios * 200).round(), rtol=0, atol=1e-6)
    assert len(ratios.unique()) > 5


# The sandwich


@pytest.mark.parametrize("kind", [LayerNorm(), RMSNorm()])
def test_the_sandwich_is_its_formula_with_two_norms_of_its_own(kind: Any) -> None:
    """x + norm₂(f(norm₁(x)))."""
    residual = random(SandwichNorm(nn.Linear(D, D), kind.build(D)))
    x = x_of(2, 3, D)
    inner = residual.sublayer(residual.norm(x))
    torch.testing.assert_close(residual(x), x + residual.output_norm(inner))
    assert residual.norm is not residual.output_norm
    pairs = zip(residual.norm.parameters(), residual.output_norm.parameters(), strict=True)
    for first, second in pairs:
        assert first is not second
        assert not torch.equal(first, second)
    assert "output_norm.weight" in residual.state_dict()


def test_the_sandwich_bounds_what_the_sublayer_adds() -> None:
    residual = SandwichNorm(nn.Linear(D, D), RMSNorm().build(D))
    nn.init.constant_(residual.sublayer.weight, 1e6)
    x = x_of(2, 3, D).float()
    added = residual(x) - x
    assert added.pow(2).mean(-1).sqrt().max() < 1.001


def test_dropout_of_the_sandwich_is_on_what_is_added() -> None:
    residual = SandwichNorm(nn.Identity(), nn.Identity(), dropout=0.5).train()
    torch.manual_seed(0)
    assert set(residual(torch.ones(4, 5, 20)).unique().tolist()) == {1.0, 3.0}
