"""Norms, feed-forward networks, residual placements, tying and initialization, by formulas."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts import init
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.embeddings import LearnedTable
from heedful.parts.feedforward import FeedForward
from heedful.parts.heads import OutputHead, Scale, tied_linear
from heedful.parts.residual import PLACEMENTS, SandwichNorm, ZeroCenteredRMSNorm
from heedful.zoo.vaswani2017 import Config, build

D, WIDE = 6, 8


def tiny(**changes: Any) -> Config:
    sizes: dict[str, Any] = {
        "src_vocab_size": 31, "tgt_vocab_size": 31, "d_model": 12, "num_heads": 3,
        "num_encoder_layers": 2, "num_decoder_layers": 2, "d_ff": 20, "max_length": 10,
    }  # fmt: skip
    return Config(**(sizes | changes))


def random(module: nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.double().eval()


def x_of(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


# Norms


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norms_match_their_formulas_with_eps_inside_the_root(
    kind: Any, scale: float, eps: float
) -> None:
    """LayerNorm uses the biased variance, with epsilon under the root, unlike some widely copied
    code; RMSNorm subtracts no mean and has no bias."""
    norm = random(kind(D, eps))
    x = x_of(2, 3, D, scale=scale) + scale  # its mean is not zero
    a = x.numpy() - (x.numpy().mean(-1, keepdims=True) if kind is nn.LayerNorm else 0)
    expected = a / np.sqrt((a**2).mean(-1, keepdims=True) + eps) * norm.weight.detach().numpy()
    if kind is nn.LayerNorm:
        expected += norm.bias.detach().numpy()
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-9, atol=1e-9)
    assert len(list(norm.parameters())) == (2 if kind is nn.LayerNorm else 1)


@pytest.mark.parametrize(
    ("theirs", "centered"),
    [
        ("llama.modeling_llama.LlamaRMSNorm", False),
        ("t5.modeling_t5.T5LayerNorm", False),
        ("gemma3.modeling_gemma3.Gemma3RMSNorm", True),
    ],
)
def test_rms_norm_equals_transformers(theirs: str, centered: bool) -> None:
    import transformers

    package, module, name = theirs.split(".")
    actual = getattr(getattr(getattr(transformers.models, package), module), name)(D, eps=1e-3)
    norm = random((ZeroCenteredRMSNorm if centered else nn.RMSNorm)(D, 1e-3)).float()
    actual.weight.data.copy_(norm.weight.data)
    x = x_of(2, 3, D).float()
    torch.testing.assert_close(norm(x), actual(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_large_states_do_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    """The square of 1,000 exceeds the range of fp16."""
    for kind in (nn.RMSNorm, ZeroCenteredRMSNorm, nn.LayerNorm):
        out = kind(4).to(dtype)(torch.tensor([[1e3, -1e3, 1e3, -1e3]], dtype=dtype))
        torch.testing.assert_close(out.abs().float(), torch.ones(1, 4), rtol=0, atol=1e-2)


# Feed-forward


def gelu_tanh(v: float) -> float:
    return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


FORMULAS: dict[str, Any] = {
    "relu": lambda v: max(v, 0.0),
    "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": gelu_tanh,
    "silu": lambda v: v / (1 + math.exp(-v)),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [*FORMULAS, *GATED])
def test_feedforward_networks_match_their_formulas(kind: Any, bias: bool) -> None:
    """act(x W + b) W₂ + d, or (act(x W + b) ⊙ (x V + c)) W₂ + d, with the activation on the first
    half, in double precision. GELU is exact, or its approximation."""
    network, x = random(FeedForward(D, WIDE, kind, bias=bias, dropout=0.25)), x_of(2, 3, D)
    assert network.dropout.p == 0.25
    up, down = network.up.weight.detach().numpy(), network.down.weight.detach().numpy()
    assert [network.up.bias is not None, network.down.bias is not None] == [bias, bias]
    hidden = x.numpy() @ up.T + (network.up.bias.detach().numpy() if bias else 0)
    expected = np.vectorize(FORMULAS[GATED.get(kind, kind)])(hidden[..., :WIDE])
    if kind in GATED:
        expected = expected * hidden[..., WIDE:]
    expected = expected @ down.T + (network.down.bias.detach().numpy() if bias else 0)
    np.testing.assert_allclose(network(x).detach().numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["swiglu", "relu"])
def test_dropout_applies_to_the_hidden_units(kind: Any) -> None:
    """Not to the outputs: each output is a sum over fewer hidden units."""
    network = random(FeedForward(1, 400, kind, dropout=0.5, bias=False))
    nn.init.ones_(network.up.weight)
    nn.init.ones_(network.down.weight)
    x = torch.ones(1, 50, 1, dtype=torch.float64)
    whole = network(x).flatten()[0]
    ratios = (network.train()(x) / whole).flatten()
    assert ((ratios > 0.7) & (ratios < 1.3)).all()
    # Of 400 units some are kept, each twice as large: the ratio is a count over 200.
    torch.testing.assert_close(ratios * 200, (ratios * 200).round(), rtol=0, atol=1e-6)
    assert len(ratios.unique()) > 5


# Residual placements


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_norm_placements_match_their_formulas(placement: Any, kind: Any) -> None:
    """Dropout is on the sub-layer's output, never on the residual path (post-norm excepted)."""
    residual, x = random(PLACEMENTS[placement](nn.Linear(D, D), kind(D))), x_of(2, 3, D)
    f, norm = residual.sublayer, residual.norm
    expected = {
        "post": lambda: norm(x + f(x)),
        "pre": lambda: x + f(norm(x)),
        "output": lambda: x + norm(f(x)),
        "sandwich": lambda: x + residual.output_norm(f(norm(x))),
    }[placement]()
    torch.testing.assert_close(residual(x), expected)
    torch.manual_seed(0)
    dropped = PLACEMENTS[placement](nn.Identity(), nn.Identity(), dropout=0.5).train()
    assert set(dropped(torch.ones(4, 5, 20)).unique().tolist()) == {1.0, 3.0}


def test_sandwich_norm_has_a_separate_output_norm() -> None:
    residual = SandwichNorm(nn.Linear(D, D), nn.RMSNorm(D))
    nn.init.constant_(residual.sublayer.weight, 1e6)
    x = x_of(2, 3, D).float()
    assert (residual(x) - x).pow(2).mean(-1).sqrt().max() < 1.001
    assert residual.norm.weight is not residual.output_norm.weight
    assert "output_norm.weight" in residual.state_dict()


# Output and tying


@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_a_transform_and_a_product(bias: bool) -> None:
    weight, x = nn.Parameter(torch.randn(5, 3)), torch.randn(2, 4, 3)
    tied, free = (tied_linear(weight, bias=bias, tied=tied) for tied in (True, False))
    assert tied.weight is weight
    assert free.weight is not weight
    assert free.weight.shape == weight.shape
    for out in (tied, free):
        random(out).float()
        expected = F.linear(0.5 * x, out.weight, out.bias)
        torch.testing.assert_close(OutputHead(out, Scale(0.5))(x), expected)
        capped = OutputHead(out, Scale(0.5), softcap=2.0)(x)
        torch.testing.assert_close(capped, 2 * torch.tanh(expected / 2))


def matrices(net: EncoderDecoder) -> tuple[Tensor, Tensor, Tensor]:
    return net.src_embedding.tokens.weight, net.tgt_embedding.tokens.weight, net.head.out.weight


SAME = {"none": (False, False), "decoder": (False, True), "all": (True, True)}


@pytest.mark.parametrize("tie", SAME)
def test_tied_matrices_are_the_same_parameter(tie: Any) -> None:
    """Also after loading, copying and a change of dtype. The gradient is the sum over all uses."""
    net, free = (build(tiny(tie_embeddings=item, dropout=0.0)) for item in (tie, "none"))
    net.load_state_dict(build(tiny(tie_embeddings=tie)).state_dict())
    free.load_state_dict(net.state_dict())
    saved = 31 * 12 * sum(SAME[tie])
    sizes = [sum(p.numel() for p in item.parameters()) for item in (free, net)]
    assert sizes[0] - sizes[1] == saved
    for item in (net, copy.deepcopy(net), copy.deepcopy(net).double()):
        source, target, head = matrices(item)
        assert (source is target, target is head) == SAME[tie]
    torch.manual_seed(0)
    src, tgt = torch.randint(31, (2, 5)), torch.randint(31, (2, 4))
    upstream = torch.randn(2, 4, 31)
    for item in (net, free):
        item(src, tgt).backward(upstream)
    source, target, head = (matrix.grad for matrix in matrices(free))
    assert source.any()
    assert target.any()
    assert head.any()
    target = target + head if SAME[tie][1] else target
    source = source + target if SAME[tie][0] else source
    torch.testing.assert_close(matrices(net)[0].grad, source, rtol=1e-5, atol=1e-6)
    if not SAME[tie][0]:
        torch.testing.assert_close(matrices(net)[1].grad, target, rtol=1e-5, atol=1e-6)


# First weights


@pytest.mark.parametrize("tie", SAME)
def test_every_weight_is_initialized_once_after_tying(
    tie: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied matrix initialized again as a linear layer would have another deviation."""
    samples: list[int] = []
    for name in ("normal_", "uniform_", "constant_"):
        draw = getattr(nn.init, name)

        def once(parameter: Tensor, *args: Any, draw: Any = draw, **options: Any) -> Tensor:
            samples.append(id(parameter))
            return draw(parameter, *args, **options)

        monkeypatch.setattr(nn.init, name, once)
    net = build(tiny(tie_embeddings=tie, positions="learned"))
    samples.clear()
    init.init_weights(net)
    assert sorted(samples) == sorted(id(parameter) for parameter in net.parameters())


@pytest.mark.parametrize("tie", SAME)
def test_initial_weights_have_the_documented_deviations_and_bounds(tie: Any) -> None:
    """Equal for equal seeds; logits are of about unit size, so that training starts near the
    uniform distribution."""
    nets = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        nets.append(build(tiny(tie_embeddings=tie, positions="learned", d_model=48, d_ff=96,
                               src_vocab_size=500, tgt_vocab_size=500,
                               max_length=300)))  # fmt: skip
    first, again, other = (nn.utils.parameters_to_vector(net.parameters()) for net in nets)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    net = nets[0].eval()
    source, target, head = matrices(net)
    embeddings = [source, target, *([] if tie == "none" else [head])]
    embeddings += [m.weight for m in net.modules() if isinstance(m, LearnedTable)]
    for weight in embeddings:
        assert weight.std().item() == pytest.approx(48**-0.5, rel=0.05)
        assert abs(weight.mean().item()) < 0.01
    linear = [m for m in net.modules() if isinstance(m, nn.Linear)]
    for module in (m for m in linear if m.weight is not head or tie == "none"):
        weight = module.weight  # queries, keys and values are initialized as one matrix
        bound = math.sqrt(6 / (weight.size(1) + getattr(module, "joint_rows", weight.size(0))))
        assert 0.98 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    crosses = [m for m in net.modules() if isinstance(m, CrossAttention)]
    assert {m.q.joint_rows for m in crosses} == {m.kv.joint_rows for m in crosses} == {3 * 48}
    assert not any(m.bias.any() for m in linear if m.bias is not None)
    for norm in (m for m in net.modules() if isinstance(m, nn.LayerNorm)):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()
    if tie != "none":
        logits = net(torch.randint(500, (8, 10)), torch.randint(500, (8, 10)))
        nll = F.cross_entropy(logits.flatten(0, 1), torch.randint(500, (80,))).item()
        assert abs(nll - math.log(500)) < 1.0


@pytest.mark.parametrize(("scaled", "factor"), [(True, math.sqrt(12)), (False, 1.0)])
def test_embeddings_are_scaled_by_the_root_of_the_width(scaled: bool, factor: float) -> None:
    net = build(tiny(scale_embeddings=scaled))
    assert [net.src_embedding.scale, net.tgt_embedding.scale] == pytest.approx([factor] * 2)


@pytest.mark.parametrize("vocab", [64, 65, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_aligned_logits_are_logits_with_further_columns(vocab, bias):
    """With the same gradients; a hook on the matrix is called for the logits alone."""
    head = OutputHead(nn.Linear(8, vocab, bias=bias), softcap=3.0).double()
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    expected, wide = head(x), head(x, aligned=True)
    assert wide.shape == (5, 128 if vocab > 64 else 64)
    torch.testing.assert_close(wide[:, :vocab], expected)
    weight = torch.randn_like(expected)
    grads = [
        torch.autograd.grad((logits * weight).sum(), [x, *head.parameters()])
        for logits in (expected, wide[:, :vocab])
    ]
    for ours, reference in zip(*grads, strict=True):
        torch.testing.assert_close(ours, reference)
    with head.out.register_forward_hook(lambda *of: None):
        assert head(x, aligned=True).shape == expected.shape
