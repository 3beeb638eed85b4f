"""Norms, feed-forward, residual placements, embeddings and first weights, against formulas."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts import init
from heedful.parts.embeddings import TokenEmbedding
from heedful.parts.feedforward import ACTIVATIONS, Activation, Mlp
from heedful.parts.heads import OutputProjection
from heedful.parts.norms import LayerNorm
from heedful.parts.positions import LearnedTable, NoPositions, Sinusoidal, sinusoidal_table
from heedful.parts.residual import OutputNorm, PostNorm, PreNorm, Residual
from heedful.zoo.vaswani2017 import Config, build

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def tiny(**changes: Any) -> Config:
    sizes: dict[str, Any] = {
        "src_vocab_size": 31,
        "tgt_vocab_size": 31,
        "d_model": 12,
        "num_heads": 3,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "d_ff": 20,
        "max_length": 10,
    }
    return Config(**(sizes | changes))


# Norms


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-2])
def test_layer_norm_divides_by_the_biased_deviation_with_eps_inside_the_root(eps: float) -> None:
    """Not by the unbiased one, nor by root + eps, as in widely copied code."""
    torch.manual_seed(0)
    norm = LayerNorm(eps).build(5)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    x = torch.randn(3, 4, 5) * 0.1
    a = x.double().numpy()
    deviation = np.sqrt(((a - a.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + eps)
    expected = (a - a.mean(-1, keepdims=True)) / deviation
    expected = expected * norm.weight.detach().numpy() + norm.bias.detach().numpy()
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


# Feed-forward


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_its_formula(activation: Activation, bias: bool) -> None:
    torch.manual_seed(0)
    mlp = Mlp(4, 9, activation, bias=bias).eval()
    assert (mlp.up.bias is not None, mlp.down.bias is not None) == (bias, bias)
    x = torch.randn(2, 3, 4)
    a = x.double().numpy() @ mlp.up.weight.detach().double().numpy().T
    if bias:
        a = a + mlp.up.bias.detach().numpy()
    normal = np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))))
    a = np.maximum(a, 0) if activation == "relu" else a * normal(a)
    a = a @ mlp.down.weight.detach().double().numpy().T
    if bias:
        a = a + mlp.down.bias.detach().numpy()
    np.testing.assert_allclose(mlp(x).detach().numpy(), a, rtol=1e-4, atol=1e-6)


def test_gelu_is_the_exact_one_and_not_its_tanh_approximation() -> None:
    x = torch.tensor([1.0, -2.0])
    exact = [0.841344746, -0.045500264]
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), torch.tensor(exact), rtol=0, atol=1e-6)
    approximate = nn.functional.gelu(x, approximate="tanh")
    assert (ACTIVATIONS["gelu"](x) - approximate).abs().max() > 1e-4


# Residual placements


@pytest.mark.parametrize(
    ("placement", "formula"),
    [
        (PostNorm, lambda x, f, norm: norm(x + f(x))),
        (PreNorm, lambda x, f, norm: x + f(norm(x))),
        (OutputNorm, lambda x, f, norm: x + norm(f(x))),
    ],
)
def test_the_three_placements(placement: type[Residual], formula: Any) -> None:
    torch.manual_seed(0)
    f, norm = nn.Linear(6, 6), nn.LayerNorm(6)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(placement(f, norm)(x), formula(x, f, norm))


@pytest.mark.parametrize("placement", [PostNorm, PreNorm, OutputNorm])
def test_dropout_is_on_what_the_sublayer_adds_and_never_on_the_way_around(
    placement: type[Residual],
) -> None:
    residual = placement(nn.Identity(), nn.Identity(), dropout=0.5).train()
    torch.manual_seed(0)
    out = residual(torch.ones(4, 5, 20))
    assert set(out.unique().tolist()) == {1.0, 3.0}


# Embeddings


def test_embeddings_are_scaled_before_positions_are_added() -> None:
    tokens = nn.Embedding(7, 4)
    module = TokenEmbedding(tokens, Sinusoidal().build(6, 4), scale=2.0, dropout=0.0)
    ids = torch.tensor([[1, 6, 0], [2, 2, 2]])
    table = sinusoidal_table(6, 4)
    torch.testing.assert_close(module(ids), tokens.weight[ids] * 2 + table[:3])
    torch.testing.assert_close(module(ids, 2), tokens.weight[ids] * 2 + table[2:5])
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    torch.testing.assert_close(
        module(ids, positions=positions), tokens.weight[ids] * 2 + table[positions]
    )


def test_dropout_is_on_the_sum_of_embeddings_and_positions() -> None:
    torch.manual_seed(0)
    plain = TokenEmbedding(nn.Embedding(7, 4), Sinusoidal().build(60, 4), scale=2.0, dropout=0.0)
    dropped = TokenEmbedding(plain.tokens, plain.positions, scale=2.0, dropout=0.5).train()
    ids = torch.randint(7, (3, 50))
    out, whole = dropped(ids), plain(ids)
    kept = out != 0
    assert 200 < kept.sum() < 400
    torch.testing.assert_close(out[kept], 2 * whole[kept])


@pytest.mark.parametrize(("scaled", "factor"), [(True, math.sqrt(12)), (False, 1.0)])
def test_the_scale_is_the_root_of_the_width(scaled: bool, factor: float) -> None:
    net = build(tiny(scale_embeddings=scaled, positions="none")).eval()
    ids = torch.tensor([[3, 4]])
    for embedding in (net.src_embedding, net.tgt_embedding):
        torch.testing.assert_close(embedding(ids), embedding.tokens.weight[ids] * factor)


def test_the_output_is_a_product_without_bias() -> None:
    weight = nn.Parameter(torch.randn(5, 3))
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(OutputProjection(weight)(x), x @ weight.T)


# Tying


def matrices(net: EncoderDecoder) -> tuple[Tensor, Tensor, Tensor]:
    return net.src_embedding.tokens.weight, net.tgt_embedding.tokens.weight, net.head.weight


SAME = {"none": (False, False), "decoder": (False, True), "all": (True, True)}


def check_tied(net: EncoderDecoder, tie: str) -> None:
    source, target, head = matrices(net)
    assert (source is target, target is head) == SAME[tie]


@pytest.mark.parametrize(("tie", "distinct"), [("none", 3), ("decoder", 2), ("all", 1)])
def test_tied_is_one_and_the_same_parameter(tie: str, distinct: int) -> None:
    """Also after a load, a copy and a change of type: an alias that broke trains apart unseen."""
    config = tiny(tie_embeddings=tie)
    net = build(config)
    check_tied(net, tie)
    assert len({id(matrix) for matrix in matrices(net)}) == distinct
    net.load_state_dict(build(config).state_dict())
    check_tied(net, tie)
    check_tied(copy.deepcopy(net), tie)
    check_tied(net.double(), tie)


def test_each_tie_saves_one_matrix() -> None:
    counts = {
        tie: sum(p.numel() for p in build(tiny(tie_embeddings=tie)).parameters()) for tie in SAME
    }
    assert counts["none"] - counts["decoder"] == counts["decoder"] - counts["all"] == 31 * 12


@pytest.mark.parametrize("tie", ["decoder", "all"])
def test_a_tied_gradient_is_the_sum_over_all_uses(tie: str) -> None:
    net, free = (build(tiny(tie_embeddings=t, dropout=0.0)) for t in (tie, "none"))
    free.load_state_dict(net.state_dict())
    torch.manual_seed(0)
    src, tgt = torch.randint(31, (2, 5)), torch.randint(31, (2, 4))
    upstream = torch.randn(2, 4, 31)
    for each in (net, free):
        each(src, tgt).backward(upstream)
    source, target, head = (matrix.grad for matrix in matrices(free))
    assert source.any()
    assert target.any()
    assert head.any()
    if tie == "all":
        torch.testing.assert_close(matrices(net)[0].grad, source + target + head, **CLOSE)
    else:
        torch.testing.assert_close(matrices(net)[0].grad, source, **CLOSE)
        torch.testing.assert_close(matrices(net)[1].grad, target + head, **CLOSE)


# First weights


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
def test_every_weight_is_drawn_once_after_tying(tie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied matrix drawn again as a linear map would have the deviation of one."""
    drawn: list[int] = []
    for name in ("normal_", "xavier_uniform_", "constant_"):
        draw = getattr(nn.init, name)

        def once(parameter: Tensor, *args: Any, draw: Any = draw, **named: Any) -> Tensor:
            drawn.append(id(parameter))
            return draw(parameter, *args, **named)

        monkeypatch.setattr(nn.init, name, once)
    net = build(tiny(tie_embeddings=tie, positions="learned"))
    drawn.clear()
    init.init_weights(net)
    assert sorted(drawn) == sorted(id(parameter) for parameter in net.parameters())


@pytest.mark.parametrize("tie", ["none", "decoder", "all"])
def test_first_weights_have_the_deviations_and_bounds_that_they_are_named_by(tie: str) -> None:
    torch.manual_seed(0)
    config = tiny(
        tie_embeddings=tie,
        positions="learned",
        d_model=48,
        d_ff=96,
        src_vocab_size=500,
        tgt_vocab_size=500,
        max_length=300,
    )
    net = build(config)
    embeddings = [matrix for matrix, tied in zip(matrices(net), (1, 1, tie != "none"), strict=True)
                  if tied]  # fmt: skip
    embeddings += [m.weight for m in net.modules() if isinstance(m, LearnedTable)]
    assert len(embeddings) == (4 if tie == "none" else 5)
    for weight in embeddings:
        assert weight.std().item() == pytest.approx(48**-0.5, rel=0.05)
        assert abs(weight.mean().item()) < 0.01
    linear = [m for m in net.modules() if isinstance(m, nn.Linear)]
    maps = [m.weight for m in linear] + ([net.head.weight] if tie == "none" else [])
    for weight in maps:
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.98 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not any(m.bias.any() for m in linear)
    for norm in (m for m in net.modules() if isinstance(m, nn.LayerNorm)):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()


def test_the_same_seed_gives_the_same_weights() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build(tiny()).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_first_model_looks_at_every_word_alike() -> None:
    """Embeddings drawn with deviation 1/√D give logits of about unit size, so that training
    starts near the uniform distribution."""
    torch.manual_seed(0)
    net = build(tiny(d_model=48, src_vocab_size=400, tgt_vocab_size=400)).eval()
    ids = torch.randint(400, (8, 10))
    logits = net(ids, torch.randint(400, (8, 10)))
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(400, (80,))).item()
    assert abs(nll - math.log(400)) < 1.0


def test_no_positions_leave_the_encoder_without_order() -> None:
    """And the other schemes give it one."""
    ids, turned = torch.tensor([[3, 4, 5]]), torch.tensor([[5, 4, 3]])
    for positions, same in (("none", True), ("sinusoidal", False), ("learned", False)):
        torch.manual_seed(0)
        net = build(tiny(positions=positions)).eval()
        states, others = net.encode(ids).states, net.encode(turned).states.flip(1)
        assert torch.allclose(states, others, atol=1e-5) == same
    assert isinstance(NoPositions().build(3, 4)(2), Tensor)
