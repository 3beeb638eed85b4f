"""Attention weights of every architecture: read, replaced and returned; no cost without hooks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from architectures import DECODERS, tiny
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.attention import Attention, MultiHead
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.tokens import MaskSpec, Tokens
from heedful.zoo import ARCHITECTURES
from option_space import EXACT, VOCAB

LENGTHS = torch.tensor([5, 0, 3])


def attentions(net: nn.Module) -> dict[str, MultiHead]:
    return {name: part for name, part in net.named_modules() if isinstance(part, MultiHead)}


def call(net: Any, ids: Tensor, source: Tensor | None = None) -> Tensor:
    """Logits at all positions, padding on the right."""
    if isinstance(net, EncoderDecoder):
        return net(ids if source is None else source, ids, LENGTHS, LENGTHS)
    return net(ids, LENGTHS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hooks_read_the_weights_without_changing_the_output(name: str) -> None:
    """Rows of weights sum to one, or are zero for queries without a visible key."""
    net = tiny(name)
    ids = torch.randint(VOCAB, (3, 5))
    before, keys = call(net, ids), list(net.state_dict())
    actual: dict[str, Tensor] = {}
    hooks = []
    for path, attention in attentions(net).items():

        def keep(module: nn.Module, inputs: Any, weights: Tensor, path: str = path) -> None:
            actual[path] = weights

        hooks.append(attention.weights_hook.register_forward_hook(keep))
    torch.testing.assert_close(call(net, ids), before, **EXACT)
    assert list(net.state_dict()) == keys
    assert set(actual) == set(attentions(net)) != set()
    for path, attention in attentions(net).items():
        assert actual[path].shape == (3, attention.num_heads, 5, 5)
        sums = actual[path].sum(-1)[:, 0]
        expected = (torch.arange(5) < LENGTHS[:, None]).double()
        torch.testing.assert_close(sums, expected, **EXACT)
    for hook in hooks:
        hook.remove()
    actual.clear()
    assert torch.equal(call(net, ids), before)
    assert not actual


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_returned_by_a_hook_replace_the_weights(name: str) -> None:
    """With zero weights in every attention only the output biases remain."""
    net = tiny(name)
    hooks = [
        value.weights_hook.register_forward_hook(lambda module, inputs, weights: weights * 0)
        for value in attentions(net).values()
    ]
    ids = torch.randint(VOCAB, (3, 5))
    changed = call(net, ids)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        for attention in attentions(net).values():
            attention.out.weight.zero_()
    torch.testing.assert_close(changed, call(net, ids), **EXACT)


@pytest.mark.parametrize("name", DECODERS)
def test_weights_of_cached_steps_are_rows_of_the_full_weights(name: str) -> None:
    net = tiny(name)
    ids = torch.randint(VOCAB, (2, 6))
    source = Tokens.from_ids(torch.randint(VOCAB, (2, 4)))
    whole = list_weights(net)
    if isinstance(net, EncoderDecoder):
        net.states(source, Tokens.from_ids(ids))
        cache = net.start(source, capacity=16)
    else:
        net.decode(Tokens.from_ids(ids))
        cache = net.start(2, capacity=16)
    expected = dict(whole)
    for place in range(6):
        net.decode(Tokens(ids[:, [place]], torch.tensor([[place]])), cache)
        for path, weights in expected.items():
            if path.startswith("encoder"):
                continue
            row, step = weights[:, :, place], whole[path][:, :, 0]
            width = min(row.size(-1), step.size(-1))
            torch.testing.assert_close(step[..., :width], row[..., :width], **EXACT)
            assert not step[..., width:].any()  # slots that are free


def list_weights(net: nn.Module) -> dict[str, Tensor]:
    """The newest weights of each attention, by its name."""
    actual: dict[str, Tensor] = {}
    for path, attention in attentions(net).items():

        def keep(module: nn.Module, inputs: Any, weights: Tensor, path: str = path) -> None:
            actual[path] = weights

        attention.weights_hook.register_forward_hook(keep)
    return actual


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_returned_weights_reproduce_the_output(groups: int, window: int | None) -> None:
    torch.manual_seed(0)
    attention = Attention(12, 4, num_kv_heads=groups, window=window, bias=False).double()
    x = torch.randn(3, 150, 12, dtype=torch.float64)
    tokens = Tokens.from_ids(torch.zeros(3, 150, dtype=torch.long), torch.tensor([150, 9, 0]))
    visible = MaskSpec(tokens, causal=True)
    out, weights = attention(x, visible, return_weights=True)
    assert weights.shape == (3, 4, 150, 150)
    torch.testing.assert_close(out, attention(x, visible), **EXACT)
    value = attention.qkv(x).split(attention.split_sizes, -1)[2]
    value = value.unflatten(-1, (groups, 3)).transpose(1, 2).repeat_interleave(4 // groups, 1)
    heads = (weights @ value).transpose(1, 2).flatten(2)
    real = tokens.real
    assert real is not None
    torch.testing.assert_close(out, attention.out(heads) * real[..., None], **EXACT)
    assert not weights.triu(1).any()
    assert not weights[2].any()


def test_weights_equal_torch_multihead_attention() -> None:
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(12, 3, batch_first=True).double()
    ours = CrossAttention(12, 3).double()
    with torch.no_grad():
        weight, bias = reference.in_proj_weight, reference.in_proj_bias
        ours.q.weight.copy_(weight[:12])
        ours.q.bias.copy_(bias[:12])
        ours.kv.weight.copy_(weight[12:])
        ours.kv.bias.copy_(bias[12:])
        ours.out.load_state_dict(reference.out_proj.state_dict())
    x, memory = (torch.randn(2, size, 12, dtype=torch.float64) for size in (4, 5))
    source = Tokens.from_ids(torch.zeros(2, 5).long(), torch.tensor([5, 2]))
    target = Tokens.from_ids(torch.zeros(2, 4).long())
    visible = MaskSpec(target, source, causal=False)
    out, weights = ours(x, memory, visible, return_weights=True)
    real = source.real
    assert real is not None
    expected, of_heads = reference(
        x, memory, memory, key_padding_mask=~real, average_attn_weights=False
    )
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(weights, of_heads, **EXACT)
