"""Training without work for padding: equal losses and gradients, and where it is used."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from architectures import ARCHITECTURES, tiny
from heedful.data.collate import Batch, collate_pairs, collate_texts
from heedful.data.columns import pack_ids
from heedful.evaluation.likelihood import batch_loss, target_states
from heedful.models.adapters import LoRA, add_lora
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.stack import Stack
from heedful.parts.attention import Attention, MultiHead, plan_attention
from heedful.parts.losses import LossSum
from heedful.parts.positions import AlibiBias, RelativePositionBias, RotaryPositions, YarnScaling
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec, Tokens
from heedful.parts.unpadding import Unpadding
from heedful.training.step import LossNet
from option_space import SEARCH, VOCAB


@pytest.fixture(autouse=True)
def exactly_the_real_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of real tokens are not filled up, as these batches are small; see the test of that."""
    monkeypatch.setattr("heedful.parts.unpadding._ROW_MULTIPLE", 1)


LENGTHS = [(3, 5), (6, 2), (1, 7), (4, 4)]  # of sources and targets


def batch_of(net: nn.Module, lengths: list[tuple[int, int]] = LENGTHS, seed: int = 0) -> Batch:
    """Padded rows, with a target at every token of the decoder or the encoder."""
    rng = np.random.default_rng(seed)
    source, target = (
        pack_ids([rng.integers(4, VOCAB, n).tolist() for n in side], VOCAB)
        for side in zip(*lengths, strict=True)
    )
    rows = np.arange(len(lengths))
    if isinstance(net, EncoderDecoder):
        return collate_pairs(source, target, rows, start_ids=[1], pad_id=0)
    batch = collate_texts(source, rows, pad_id=0)
    assert batch.tokens.real_index is not None
    places = batch.tokens.real_index
    targets = torch.from_numpy(rng.integers(4, VOCAB, len(places)))
    return replace(batch, targets=targets, target_positions=places)


def without_dropout(name: str, **keys: Any) -> nn.Module:
    """A tiny net in fp64 whose dropout drops nothing."""
    net: nn.Module = tiny(name, **keys)
    for module in net.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return net


def exact_loss(net: Any, batch: Batch) -> LossSum:
    """The cross-entropy in fp64; `batch_loss` computes it in fp32."""
    logits = net.head(target_states(net, batch))
    loss = nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    return LossSum(loss, loss.detach(), None, batch.num_targets)


def stacks_of(net: nn.Module) -> list[Stack]:
    return [module for module in net.modules() if isinstance(module, Stack)]


@contextmanager
def shapes_of_blocks(net: nn.Module) -> Any:
    """The shapes of the inputs of the blocks that are called, in order."""
    shapes: list[tuple[int, ...]] = []
    handles = [
        block.register_forward_pre_hook(lambda module, inputs: shapes.append(inputs[0].shape))
        for stack in stacks_of(net)
        for block in stack.blocks
    ]
    yield shapes
    for handle in handles:
        handle.remove()


def gradients(net: nn.Module, batch: Batch, *, skips_padding: bool, **options: Any) -> Any:
    """Loss, gradients by name, and the shapes of the inputs of blocks."""
    loss_net = LossNet(net, exact_loss, **options).train()
    for stack in stacks_of(net):
        assert stack.skips_padding
        stack.skips_padding = skips_padding
    torch.manual_seed(5)
    with shapes_of_blocks(net) as shapes:
        loss = loss_net(batch).loss
        loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    return loss.detach(), grads, shapes


def assert_equal(net: nn.Module, batch: Batch, multiple: int = 1, **options: Any) -> None:
    """Loss and gradients without padding equal those of padded states, and padding is skipped."""
    loss, grads, padded = gradients(net, batch, skips_padding=False, **options)
    actual, actual_grads, skipped = gradients(net, batch, skips_padding=True, **options)
    sides = [side for side in (batch.source, batch.tokens) if side is not None]
    assert {shape[:2] for shape in padded} == {side.ids.shape for side in sides}
    filled = [
        (1, min(-(-int(side.lengths.sum()) // multiple) * multiple, side.ids.numel()))
        for side in sides
    ]
    assert {shape[:2] for shape in skipped} == set(filled)
    torch.testing.assert_close(actual, loss, rtol=1e-9, atol=1e-9)
    assert actual_grads.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(actual_grads[name], grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_and_gradients_equal_those_of_padded_states(name: str) -> None:
    net = without_dropout(name)
    assert_equal(net, batch_of(net))
    assert_equal(net, batch_of(net), activation_checkpointing=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 2},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"position": AlibiBias(4)},
        {"position": RelativePositionBias(4, 8, 16, causal=False)},
        {"position": RotaryPositions(4)},
        {"position": RotaryPositions(4, layout="interleaved", scaling=YarnScaling(4.0, 16))},
    ],
)
def test_attention_of_real_tokens_equals_that_of_padded_rows(
    options: dict[str, Any], kv_heads: int, causal: bool
) -> None:
    """Outputs and gradients in fp64; in bf16 to its precision."""
    torch.manual_seed(0)
    module = Attention(16, 4, num_kv_heads=kv_heads, **options).double()
    tokens = Tokens.from_ids(torch.zeros(3, 5, dtype=torch.long), torch.tensor([5, 2, 3]))
    assert tokens.real is not None
    unpadding = Unpadding(tokens.ids.shape, tokens.real.flatten().nonzero()[:, 0])
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(1, unpadding.num_tokens, 16, dtype=torch.float64)

    def results(*, skips: bool, dtype: torch.dtype) -> list[Tensor]:
        """The output at real tokens, and the gradients of input and weights."""
        attention = copy.deepcopy(module).to(dtype)
        states = x.detach().to(dtype).requires_grad_()
        spec = MaskSpec(tokens, causal=causal)
        unpaddings = (unpadding, unpadding) if skips else None
        plan = plan_attention(spec, attention, states, needs_grad=True, unpaddings=unpaddings)
        if skips:
            out = attention(unpadding.unpad(states), plan)
        else:
            out = unpadding.unpad(attention(states, plan))
        inputs = [states, *attention.parameters()]
        return [out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))]

    padded = results(skips=False, dtype=torch.float64)
    for actual, expected in zip(results(skips=True, dtype=torch.float64), padded, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = results(skips=True, dtype=torch.float32)
    for actual, expected in zip(rounded, padded, strict=True):
        assert (actual - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("name", ["vaswani2017", "bert", "t5", "llama", "qwen3"])
def test_dropout_of_attention_weights_is_the_same(name: str) -> None:
    """With the same random numbers, since weights are formed for padded rows in both cases."""
    net = without_dropout(name)
    attentions = [module for module in net.modules() if isinstance(module, MultiHead)]
    for attention in attentions:
        attention.dropout.p = 0.4
    batch = batch_of(net)
    assert_equal(net, batch)
    loss = LossNet(net, exact_loss).train()(batch).loss.detach()
    for attention in attentions:
        attention.dropout.p = 0.0
    assert abs(LossNet(net, exact_loss)(batch).loss.detach() - loss) > 1e-6  # it does act


def test_the_balance_loss_of_experts_is_included() -> None:
    net = without_dropout("mixtral", balance_weight=0.5)
    assert_equal(net, batch_of(net))


@pytest.mark.parametrize("multiple", [4, 5, 16, 100])
@pytest.mark.parametrize("name", ["vaswani2017", "bert", "llama", "gemma3", "mixtral"])
def test_rows_are_filled_up_with_padding_that_changes_nothing(
    name: str, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the loss, nor a gradient, nor the balance of experts."""
    monkeypatch.setattr("heedful.parts.unpadding._ROW_MULTIPLE", multiple)
    net = without_dropout(name, **({"balance_weight": 0.5} if name == "mixtral" else {}))
    assert_equal(net, batch_of(net), multiple)


def test_the_gradients_of_an_adapter_are_equal() -> None:
    """With frozen embeddings, whose states need no gradient."""
    net = without_dropout("vaswani2017")
    add_lora(net, LoRA(rank=2, alpha=4.0, targets=("*",)))
    for name, parameter in net.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter)
    assert_equal(net.double(), batch_of(net))


@pytest.mark.parametrize(
    "lengths",
    [
        [(4, 3), (4, 1)],  # only targets are padded
        [(4, 2), (1, 2)],  # only sources
        [(3, 2), (3, 2)],  # none
        [(5, 2), (0, 3), (2, 2)],  # a source without a token, and so without a visible key
    ],
)
def test_one_side_may_have_no_padding_and_a_source_no_tokens(
    lengths: list[tuple[int, int]],
) -> None:
    net = without_dropout("vaswani2017")
    assert_equal(net, batch_of(net, lengths))


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, "left") for name in ("gpt2", "llama", "mistral", "t5", "vaswani2017")]
    + [(name, "segments") for name in ("gpt2", "llama", "mistral")],
)
def test_padding_may_be_on_the_left_and_rows_may_hold_several_texts(name: str, case: str) -> None:
    net = without_dropout(name)
    batch = batch_of(net)
    batch = replace(batch, tokens=changed(batch.tokens, case))
    if batch.source is not None:
        batch = replace(batch, source=changed(batch.source, case))
    assert batch.tokens.real_index is not None
    places = batch.tokens.real_index
    targets = torch.randint(4, VOCAB, places.shape, generator=torch.Generator().manual_seed(1))
    assert_equal(net, replace(batch, targets=targets, target_positions=places))


def changed(tokens: Tokens, case: str) -> Tokens:
    """The tokens with padding on the left, or with a new text at every third column."""
    width = tokens.ids.size(1)
    if case == "left":
        new = Tokens.from_ids(tokens.ids, tokens.lengths, "left")
    else:
        segments = (torch.arange(width) // 3).expand_as(tokens.ids)
        new = Tokens.from_ids(tokens.ids, tokens.lengths, segments=segments)
    assert new.real is not None
    return replace(new, real_index=new.real.flatten().nonzero()[:, 0])


def test_every_dropout_of_a_block_has_its_rate_without_padding() -> None:
    """On states and hidden units of the real tokens; attention weights have their own test."""
    net = tiny("vaswani2017", dropout=0.3)
    batch = batch_of(net)
    dropped: dict[str, list[Tensor]] = {}

    def record(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        is_dropped = (output == 0)[inputs[0] != 0]
        dropped.setdefault(names[module], []).append(is_dropped.float().flatten())

    names = {
        module: name
        for name, module in net.named_modules()
        if isinstance(module, Dropout) and "blocks" in name and "attention.sublayer" not in name
    }
    handles = [module.register_forward_hook(record) for module in names]
    for seed in range(40):
        torch.manual_seed(seed)
        LossNet(net, exact_loss).train()(batch)
    for handle in handles:
        handle.remove()
    assert dropped.keys() == set(names.values())
    for name, parts in dropped.items():
        values = torch.cat(parts)
        deviation = (0.3 * 0.7 / values.numel()) ** 0.5
        assert abs(float(values.mean()) - 0.3) < 5 * deviation, name


def blocks_are_padded(net: nn.Module, batch: Batch) -> bool:
    """True if the blocks of the decoder or encoder get the padded states of a training step."""
    with shapes_of_blocks(net) as shapes:
        LossNet(net, batch_loss)(batch)
    return all(shape[0] == batch.tokens.ids.size(0) for shape in shapes)


def test_padding_is_skipped_in_training_with_indexed_tokens_only() -> None:
    net = tiny("gpt2")
    batch = batch_of(net)
    assert blocks_are_padded(net.eval(), batch)
    assert not blocks_are_padded(net.train(), batch)
    with torch.no_grad():  # the same random numbers as with gradients
        assert not blocks_are_padded(net, batch)
    assert blocks_are_padded(net, replace(batch, tokens=replace(batch.tokens, real_index=None)))
    net.decoder.compiled_block = lambda block, *inputs: block(*inputs)
    assert blocks_are_padded(net, batch)


def test_hooks_on_attention_weights_get_those_of_padded_rows() -> None:
    """Zero for queries that are padding, as without `skips_padding`."""
    net = tiny("gpt2").train()
    batch = batch_of(net)
    weights: list[Tensor] = []
    hooked = net.decoder.blocks[0].self_attention.sublayer.weights_hook
    handle = hooked.register_forward_hook(lambda module, inputs, out: weights.append(out))
    assert blocks_are_padded(net, batch)
    handle.remove()
    assert batch.tokens.real is not None
    is_visible = weights[0].sum((1, 3)) > 0
    assert torch.equal(is_visible, batch.tokens.real)


def test_the_output_is_zero_at_padding() -> None:
    net = tiny("gpt2").train()
    LossNet(net, batch_loss)
    batch = batch_of(net)
    assert batch.tokens.real is not None
    states = net.decode(batch.tokens)
    assert not states[~batch.tokens.real].any()
    assert states[batch.tokens.real].ne(0).any(-1).all()


@SEARCH
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_parts_of_a_batch_know_their_real_tokens(lengths: list[int], data: st.DataObject) -> None:
    real = torch.arange(5) < torch.tensor(lengths)[:, None]
    index = real.flatten().nonzero()[:, 0]
    tokens = replace(Tokens.from_ids(torch.zeros(real.shape).long(), real.sum(1)), real_index=index)
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    part = tokens.rows(first, last)
    assert part.real is not None
    assert part.real_index is not None
    assert torch.equal(part.real_index, part.real.flatten().nonzero()[:, 0])


@SEARCH
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
def test_unpadding_and_padding_are_inverse_with_exact_gradients(lengths: list[int]) -> None:
    """In any order of the real tokens."""
    real = torch.arange(4) < torch.tensor(lengths)[:, None]
    index = real.flatten().nonzero()[:, 0]
    index = index[torch.randperm(len(index))]
    unpadding = Unpadding(real.shape, index)
    x = torch.randn(*real.shape, 3, dtype=torch.float64, requires_grad=True)
    rows = unpadding.unpad(x)
    assert torch.equal(rows, x.flatten(0, 1)[index][None])
    assert torch.equal(unpadding.pad(rows), x * real[..., None])
    assert torch.autograd.gradcheck(unpadding.unpad, (x,))
    assert torch.autograd.gradcheck(unpadding.pad, (rows.detach().requires_grad_(),))
