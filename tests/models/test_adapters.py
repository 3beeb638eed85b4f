"""Low-rank adapters: every projection of every architecture, against the formula of the paper."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from architectures import ARCHITECTURES, decodes, tiny
from heedful.errors import UserError
from heedful.models.adapters import (
    LoRA,
    add_lora,
    freeze,
    linear_parts,
    lora_layers,
    matches,
    merge_lora,
    without_factors,
)
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.lora import LoRALinear
from heedful.zoo.saved import trainable, weights_of
from option_space import EXACT, texts_of, tokens_of


def outputs(net: Any) -> Tensor:
    texts = texts_of([5, 5], 1)
    ids = torch.stack([text.ids for text in texts])
    return net(ids, ids) if isinstance(net, EncoderDecoder) else net(ids)


def cached_outputs(net: Any) -> Tensor:
    ids = torch.stack([text.ids for text in texts_of([5, 5], 1)])
    whole = tokens_of(list(ids))
    cache = net.start(whole if isinstance(net, EncoderDecoder) else 2, capacity=5)
    return net.head(net.decode(whole, cache))


def randomize_factors(net: nn.Module) -> None:
    torch.manual_seed(1)
    for layer in lora_layers(net).values():
        nn.init.normal_(layer.lora_a)
        nn.init.normal_(layer.lora_b)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_adapted_nets_begin_unchanged_and_equal_their_merged_form(name: str) -> None:
    net = tiny(name)
    before = {key: weight.clone() for key, weight in weights_of(net).items()}
    expected = outputs(net)
    add_lora(net, LoRA(rank=3, alpha=6.0, targets=("*",)))
    assert torch.equal(outputs(net), expected)
    assert trainable(net).keys() == weights_of(net).keys() - without_factors(net, before).keys()
    randomize_factors(net)
    adapted = outputs(net)
    assert (adapted - expected).abs().max() > 1e-3
    if decodes(name):
        torch.testing.assert_close(cached_outputs(net), adapted, **EXACT)
    adapted.sum().backward()
    assert all(weight.grad is not None for weight in trainable(net).values())
    assert without_factors(net, weights_of(net)).keys() == before.keys()
    for key, weight in before.items():
        assert torch.equal(weight, weights_of(net)[key]), key
    merge_lora(net)
    assert not lora_layers(net)
    assert trainable(net).keys() == before.keys()
    torch.testing.assert_close(outputs(net), adapted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_projection_alone_changes_its_rows_alone(name: str) -> None:
    net = tiny(name)
    for target, (path, part, sizes) in linear_parts(net).items():
        before = net.get_submodule(path).weight.detach().clone()
        add_lora(net, LoRA(rank=2, alpha=3.0, targets=(target,)))
        assert [*lora_layers(net)] == [path], target
        randomize_factors(net)
        layer = net.get_submodule(path)
        assert layer.lora_a.shape == (1, 2, before.size(1))
        update = (1.5 * layer.lora_b @ layer.lora_a[0]).detach()
        expected = before.clone()
        expected.split(list(sizes))[part].add_(update)
        x = torch.randn(4, before.size(1), dtype=before.dtype)
        torch.testing.assert_close(layer(x), F.linear(x, expected, layer.bias))
        merge_lora(net)
        torch.testing.assert_close(net.get_submodule(path).weight, expected, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            net.get_submodule(path).weight.copy_(before)


def test_projections_have_the_names_of_their_kind() -> None:
    names = [
        *linear_parts(
            tiny("t5", activation="geglu_tanh", num_encoder_layers=1, num_decoder_layers=1)
        )
    ]
    assert sorted(names) == sorted(
        [f"encoder.blocks.0.self_attention.{part}" for part in ("q", "k", "v", "out")]
        + [f"decoder.blocks.0.self_attention.{part}" for part in ("q", "k", "v", "out")]
        + [f"decoder.blocks.0.cross_attention.{part}" for part in ("q", "k", "v", "out")]
        + [f"encoder.blocks.0.feedforward.{part}" for part in ("gate", "up", "down")]
        + [f"decoder.blocks.0.feedforward.{part}" for part in ("gate", "up", "down")]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("q", True),
        ("self_attention", True),
        ("self_attention.q", True),
        ("blocks.1", True),
        ("blocks.*.self_attention", True),
        ("*", True),
        ("self_*", True),
        ("blocks.11", False),
        ("attention", False),
        ("blocks.q", False),
        ("Q", False),
        ("self.attention", False),
    ],
)
def test_patterns_are_runs_of_whole_parts(pattern: str, is_match: bool) -> None:
    assert matches("decoder.blocks.1.self_attention.q", pattern) is is_match


def test_dropout_is_on_the_update_alone_and_off_in_eval_mode() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(8, 6), [6], [0], rank=2, alpha=2.0, dropout=0.5)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer.train()(x), F.linear(x, layer.weight, layer.bias))
    nn.init.normal_(layer.lora_b)
    assert not torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer.eval()(x), layer.merged()(x))


def test_wrong_targets_are_refused_with_the_names_there_are() -> None:
    net = tiny("gpt2")
    problem = "adapter.targets: q_proj matches nothing; names: decoder.blocks.*.self_attention."
    with pytest.raises(UserError, match=re.escape(problem)):
        add_lora(net, LoRA(targets=("v", "q_proj")))
    with pytest.raises(UserError, match="targets is empty"):
        add_lora(net, LoRA(targets=()))
    assert all(weight.requires_grad for weight in net.parameters())
    add_lora(net, LoRA())
    with pytest.raises(UserError, match="has an adapter already"):
        add_lora(net, LoRA())


def test_freezing_by_pattern() -> None:
    net = tiny("bart")
    freeze(net, ["encoder", "*embedding", "blocks.1.feedforward"], "training.freeze")
    names = {*trainable(net)}
    assert names
    assert not any(name.startswith("encoder") or "embedding" in name for name in names)
    assert not any("blocks.1.feedforward" in name for name in names)
    assert any("decoder.blocks.0.feedforward.sublayer.up.weight" in name for name in names)
    with pytest.raises(UserError, match=r"training\.freeze: embeddings matches nothing"):
        freeze(net, ["embeddings"], "training.freeze")
    with pytest.raises(UserError, match="freezes all parameters"):
        freeze(net, ["*"], "training.freeze")
