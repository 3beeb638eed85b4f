"""Properties of all model families, over the whole option space."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts import attend_blocks, attention
from heedful.parts.attention import MultiHead
from heedful.parts.embeddings import LearnedTable
from heedful.parts.positions import RelativePositionBias
from heedful.parts.tokens import Tokens, padding_mask
from heedful.zoo.vaswani2017 import Config, build
from option_space import (
    EXACT,
    MAX_LENGTH,
    SEARCH,
    SIDES,
    VOCAB,
    Text,
    alone,
    assert_same,
    lengths_of,
    outputs,
    pad,
    random_net,
    random_rows,
    real,
    texts_of,
    tokens_of,
)
from single_stacks import (
    SCHEMES,
    Single,
    decoder,
    encoder,
    nets,
    singles,
    two_stacks,
)

LENGTHS = lengths_of(3, 1, 7)
TINY = Config(VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.0)


@pytest.fixture(autouse=True, scope="module")
def windows_in_parts() -> Iterator[None]:
    """Windowed layers take two queries at a time, so that short texts have several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_blocks, "_LOCAL_QUERIES", 2)
        yield


# Batches and padding


@SEARCH
@given(nets(), LENGTHS, SIDES, st.integers(0, 3), st.none() | st.integers(0, VOCAB - 1))
@torch.no_grad()
def test_a_batch_of_n_equals_n_batches_of_one_for_any_padding(
    net: Any, lengths: list[int], side: str, more: int, pad_id: int | None
) -> None:
    """Left padding equals right padding; neither its amount nor its ids matter, even EOS or a word
    of the row. Some sources are empty."""
    texts = texts_of(lengths)
    texts[0] = Text(torch.full_like(texts[0].ids, pad_id or 0), texts[0].source)
    assert_same(outputs(net, texts, side, width=7 + more, pad_id=pad_id), alone(net, texts))


@SEARCH
@given(nets(), lengths_of(4, 1, 6), st.permutations(range(4)), SIDES)
@torch.no_grad()
def test_a_permuted_batch_gives_the_permuted_result(
    net: Any, lengths: list[int], order: list[int], side: str
) -> None:
    texts = texts_of(lengths)
    result = outputs(net, texts, side)
    assert_same(outputs(net, [texts[i] for i in order], side), [result[i] for i in order])


@SEARCH
@given(nets(), st.integers(2, 7), SIDES)
@torch.no_grad()
def test_an_empty_row_is_finite_and_does_not_affect_others(
    net: Any, length: int, side: str
) -> None:
    texts = texts_of([length, 0, 1])
    actual = outputs(net, texts, side, width=7)
    assert all(row.isfinite().all() for row in actual)
    assert_same([actual[0], actual[2]], alone(net, [texts[0], texts[2]]))


@SEARCH
@given(nets(), LENGTHS, SIDES)
def test_training_and_inference_paths_are_equal(net: Any, lengths: list[int], side: str) -> None:
    """Plain products with gradients, fused kernels without."""
    called: set[str] = set()

    def spy(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (called.add(name), function(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend", spy("eager", attention.attend))
        fused = F.scaled_dot_product_attention
        patch.setattr(F, "scaled_dot_product_attention", spy("fused", fused))
        texts = texts_of(lengths)
        trained = [row.detach() for row in outputs(net.train(), texts, side)]
        assert called == {"eager"}
        called.clear()
        with torch.no_grad():
            assert_same(outputs(net.eval(), texts, side), trained)
        assert called == {"fused"}


def states_of(net: Any, rows: list[Tensor], side: Any, **padding: Any) -> Tensor:
    """States before the head; each row is its own source."""
    tokens = tokens_of(rows, side, **padding)
    if isinstance(net, EncoderDecoder):
        return net.states(tokens, tokens)
    return net.encode(tokens) if isinstance(net, EncoderOnly) else net.decode(tokens)


@SEARCH
@given(singles(dropout=0.3), st.sampled_from([decoder, encoder, two_stacks]), lengths_of(3, 0, 6),
       SIDES)  # fmt: skip
def test_padding_has_no_gradient_and_all_values_are_finite(
    single: Single, build: Any, lengths: list[int], side: str
) -> None:
    """In training, with dropout and empty rows. One id occurs in padding only."""
    net = build(single).train()
    rows = [row % (VOCAB - 1) for row in random_rows(lengths, 0)]
    states = states_of(net, rows, side, width=7, pad_id=VOCAB - 1)
    parts = [row[real(n, 7, side)] for row, n in zip(states, lengths, strict=True)]
    (torch.cat(parts) * torch.randn(1, single.d_model)).sum().backward()
    for module in net.modules():
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == VOCAB:
            assert not module.weight.grad[VOCAB - 1].any()
        if isinstance(module, LearnedTable):
            assert not module.weight.grad[max(lengths) + module.offset :].any()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


@SEARCH
@given(singles(), st.sampled_from(["decoder", "tokens", "two stacks"]), st.integers(0, 99))
def test_gradients_flow_to_every_parameter(single: Single, kind: str, seed: int) -> None:
    # All of a few ReLU units can be zero at all of a few tokens.
    assume(single.network not in ("relu", "reglu") or single.d_ff > 8)
    net = {"decoder": decoder, "two stacks": two_stacks}.get(kind, lambda s, n: encoder(s, kind, n))
    net = net(single, seed)
    ids = torch.stack(random_rows([7] * 6, seed))
    ids[0, 0] = VOCAB - 1
    logits = net(ids, ids) if kind == "two stacks" else net(ids)
    (logits * torch.randn_like(logits)).sum().backward()
    one_key = all(window == 1 for window in single.windows)
    for name, parameter in net.named_parameters():
        if "position.weight" in name and one_key:
            continue  # a query with a single key has all its weight on that key, whatever the score
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
@pytest.mark.parametrize("placement", ["post", "pre", "output"])
def test_every_row_of_every_weight_has_a_gradient(placement: Any, positions: Any) -> None:
    config = Config(
        VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.0, 6,
        norm_placement=placement, positions=positions, activation="gelu", tie_embeddings="none",
    )  # fmt: skip
    net = random_net(config)
    ids = (torch.arange(VOCAB)[:, None] + torch.arange(6)) % VOCAB
    torch.manual_seed(0)
    logits = net(ids, ids)
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in net.named_parameters():
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
        learns = rows.abs().amax(-1) > 1e-12
        if name.endswith("qkv.bias"):  # an equal bias on all keys does not change a softmax
            learns = torch.cat([learns[:12], learns[24:]])
        if name.endswith("kv.bias") and "cross" in name:
            learns = learns[12:]
        assert learns.all(), name


# Dependencies between positions


def layer_dependencies(single: Single, length: int, *, causal: bool) -> Tensor:
    """(T, T), True where the layers let the state of a row depend on a column."""
    places = torch.arange(length)
    distances = places[:, None] - places
    known = torch.eye(length, dtype=torch.bool)
    for window in single.windows:
        near = torch.ones_like(known) if window is None else distances.abs() < window
        step = near & (distances >= 0) if causal else near
        known = (step.int() @ known.int()) > 0
    return known


@SEARCH
@given(singles(), st.sampled_from([decoder, encoder, two_stacks]), st.integers(2, 8), st.data(),
       SIDES)  # fmt: skip
@torch.no_grad()
def test_a_token_depends_on_exactly_its_visible_tokens(
    single: Single, build: Any, length: int, data: st.DataObject, side: str
) -> None:
    """Windows of layers add up. Visible tokens must have an effect: a constant would not pass."""
    net = build(single)
    changed = data.draw(st.integers(0, length - 1), "changed")
    (text,) = texts_of([length])
    other = text.ids.clone()
    other[changed] = (other[changed] + 1) % VOCAB
    both = [text, text._replace(ids=other)]
    before, after = (outputs(net, [item], side, width=9)[0] for item in both)
    differ = (after - before).abs().amax(-1)
    known = layer_dependencies(single, length, causal=build is not encoder)[:, changed]
    torch.testing.assert_close(after[~known], before[~known], **EXACT)
    # Deep in a ReLU's dead side a token may be blind: it is enough that the token itself differs
    # and, of the others, not all are blind.
    assert differ[changed] > 0
    if known.sum() > 1 and single.network in ("gelu", "silu", "swiglu", "geglu"):
        assert differ[known].count_nonzero() > 1


@pytest.mark.parametrize("placement", ["post", "pre", "output"])
@torch.no_grad()
def test_every_target_position_depends_on_the_source_and_earlier_tokens(placement: Any) -> None:
    net = random_net(Config(VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.0, norm_placement=placement))
    src, tgt = torch.stack(random_rows([4, 4], 0)), torch.stack(random_rows([5, 5], 1))
    result = net(src, tgt)
    for ids, first in ((src, lambda _: 0), (tgt, lambda position: position)):
        for position in range(ids.size(1)):
            other = ids.clone()
            other[:, position] = (other[:, position] + 1) % VOCAB
            changed = net(other, tgt) if ids is src else net(src, other)
            differ = (changed - result).abs().amax(-1) > 1e-6
            assert torch.equal(differ, (torch.arange(5) >= first(position)).expand(2, 5))


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_queries_have_zero_attention_outputs(side: Any) -> None:
    """In self-attention of source and target and in cross-attention; empty sources likewise."""
    net = random_net(TINY)
    actual: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, MultiHead):
            module.register_forward_hook(lambda _, __, out, name=name: actual.update({name: out}))
    sources, targets = torch.tensor([4, 2, 0]), torch.tensor([1, 3, 2])
    src, tgt = (pad(random_rows(n.tolist(), 0), side, width=4) for n in (sources, targets))
    net(src, tgt, sources, targets, padding_side=side)
    assert len(actual) == 6
    for name, out in actual.items():
        written = padding_mask(sources if name.startswith("encoder") else targets, 4, side)
        if "cross" in name:
            written = written & (sources > 0)[:, None]
        assert torch.equal(out.abs().amax(-1) > 0, written), name


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_every_position_scheme_depends_on_the_order_of_tokens(scheme: str) -> None:
    """The other properties would also hold for a scheme without effect."""
    row = torch.stack(random_rows([9], 0))
    net = encoder(Single(scheme, windows=(None,)))
    turned = (net(row.flip(1)).flip(1) - net(row)).abs().max()
    # ALiBi is symmetric: reversed, all distances are the same.
    assert (turned < 1e-9) == (scheme in ("none", "alibi"))
    shuffled = row[:, [0, 2, 4, 6, 8, 1, 3, 5, 7]]
    states = net(shuffled)[:, [0, 5, 1, 6, 2, 7, 3, 8, 4]]
    assert ((states - net(row)).abs().max() < 1e-9) == (scheme == "none")
    # A learned table is one for all layers of a stack; encoders look both ways.
    tables = [
        m for m in two_stacks(Single(scheme)).modules() if isinstance(m, RelativePositionBias)
    ]
    assert [m.causal for m in tables] == ([False, True] if scheme.startswith("buckets") else [])


# Precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_without_visible_keys_are_finite_in_half_precision(
    scheme: str, dtype: torch.dtype
) -> None:
    """Forward and backward: empty sources, empty targets, packed rows, windows.

    Hidden keys have weight zero next to scores of any size.
    """
    net = two_stacks(Single(scheme, windows=(2, None))).to(dtype).train()
    ids = torch.stack(random_rows([6, 6], 0))
    lengths = torch.tensor([4, 0])
    logits = net(ids, ids, torch.tensor([0, 0]), lengths)
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    logits.float().logsumexp(-1).sum().backward()
    net = decoder(Single(scheme)).to(dtype).train()
    for module in net.modules():
        if isinstance(module, RelativePositionBias):
            torch.nn.init.constant_(module.weight, -20000.0)
    segments = torch.tensor([[0, 0, 1, 1, 1, 2]] * 2)
    unmoved = net(ids, lengths, segments=segments, padding_side="left")
    unmoved.float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    moved = ids.clone()
    moved[:, :2] = (ids[:, :2] + 1) % VOCAB
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            actual = net(moved, lengths, segments=segments, padding_side="left")
            before = net(ids, lengths, segments=segments, padding_side="left")
        assert actual.isfinite().all()
        assert torch.equal(actual[0, 2:], before[0, 2:])


# Heads, token types and refused input


@SEARCH
@given(singles(), lengths_of(3, 1, 6), SIDES, st.integers(0, 99))
@torch.no_grad()
def test_class_logits_use_the_first_real_token(
    single: Single, lengths: list[int], side: str, seed: int
) -> None:
    """Not the first column, which is padding in rows padded on the left."""
    net, texts = encoder(single, "classes", seed), texts_of(lengths, seed)
    states = [net.encode(Tokens.from_ids(text.ids[None]))[0, 0] for text in texts]
    assert_same(outputs(net, texts, side, width=7), [net.head(state[None])[0] for state in states])


@SEARCH
@given(singles(), st.integers(2, 6))
@torch.no_grad()
def test_token_types_change_the_output(single: Single, length: int) -> None:
    net = encoder(single)
    ids = torch.stack(random_rows([length], 0))
    types = torch.zeros_like(ids)
    torch.testing.assert_close(net(ids, types=types), net(ids), **EXACT)
    types[:, -1] = 1
    assert (net(ids, types=types) - net(ids))[0, -1].abs().max() > 1e-6


@pytest.mark.parametrize("build", [decoder, lambda single: encoder(single, "tokens")])
@pytest.mark.parametrize("windows", [(None,), (2, None)])
@torch.no_grad()
def test_a_batch_without_tokens_gives_no_logits(build: Any, windows: Any) -> None:
    net = build(Single(windows=windows))
    assert net(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, VOCAB)


@pytest.mark.parametrize("lengths", [[4, 2], [-1, 2]])
def test_lengths_out_of_range_are_refused(lengths: list[int]) -> None:
    net, ids = random_net(TINY), torch.zeros(2, 3, dtype=torch.int64)
    match = f"lengths must be from 0 to 3, the width of the batch, not {min(lengths)} to"
    with pytest.raises(UserError, match=match):
        net(ids, ids, torch.tensor(lengths))
    with pytest.raises(UserError, match=match):
        net(ids, ids, None, torch.tensor(lengths))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_too_long_sequences_are_refused_with_both_lengths(positions: Any) -> None:
    """A row may be wider because of padding or of other texts in it."""
    config = Config(VOCAB, VOCAB, 4, 1, 1, 1, 4, max_length=MAX_LENGTH, positions=positions)
    net = random_net(config)
    fits, too_long = (torch.zeros(1, n, dtype=torch.int64) for n in (MAX_LENGTH, MAX_LENGTH + 1))
    assert net(fits, fits).shape == (1, MAX_LENGTH, VOCAB)
    for src, tgt in ((too_long, fits), (fits, too_long)):
        with pytest.raises(UserError, match=r"sequence of 17 tokens.*max_length 16"):
            net(src, tgt)
    for side in ("right", "left"):
        lengths = torch.tensor([MAX_LENGTH])
        assert net(too_long, too_long, lengths, lengths, padding_side=side).isfinite().all()


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_all_tensors_move_with_the_model(positions: Any) -> None:
    """The meta device refuses tensors of other devices, as an accelerator does."""
    net = build(Config(VOCAB, VOCAB, 12, 3, 1, 1, 8, positions=positions)).to("meta").train()
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    assert net(ids, ids).device.type == "meta"
