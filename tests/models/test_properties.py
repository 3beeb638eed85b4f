"""Laws of the encoder-decoder, searched over the whole option space."""

from typing import Any

import pytest
import torch
from heedful.parts.masks import padding_mask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.attention import Attention
from heedful.zoo.vaswani2017 import Config, build
from option_space import (
    EXACT,
    MAX_LENGTH,
    VOCAB,
    configs,
    lengths_of,
    pad,
    random_net,
    random_rows,
    real,
)

SEARCH = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
SIDES = st.sampled_from(["right", "left"])
BATCH = 3


def forward(
    net: EncoderDecoder, src: list[Tensor], tgt: list[Tensor], side: str, **padding: Any
) -> list[Tensor]:
    """Logits of the real positions of each row, out of one padded batch."""
    src_ids, tgt_ids = pad(src, side, **padding), pad(tgt, side, **padding)
    logits = net(
        src_ids,
        tgt_ids,
        torch.tensor([row.numel() for row in src]),
        torch.tensor([row.numel() for row in tgt]),
        padding_side=side,
    )
    width = tgt_ids.size(1)
    return [row[real(ids.numel(), width, side)] for row, ids in zip(logits, tgt, strict=True)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, **EXACT)


@SEARCH
@given(configs(), lengths_of(BATCH, 0, 6), lengths_of(BATCH, 1, 6), SIDES, st.integers(0, 99))
@torch.no_grad()
def test_a_batch_of_n_is_n_batches_of_one(
    config: Config, sources: list[int], targets: list[int], side: str, seed: int
) -> None:
    """Among them empty sources; the single ones are not padded, and are given no lengths."""
    net = random_net(config, seed)
    src, tgt = random_rows(sources, seed), random_rows(targets, seed + 1)
    singles = [net(s[None], t[None])[0] for s, t in zip(src, tgt, strict=True)]
    assert_same(forward(net, src, tgt, side), singles)


@SEARCH
@given(configs(), lengths_of(BATCH, 0, 6), lengths_of(BATCH, 1, 6), st.integers(0, 5))
@torch.no_grad()
def test_left_padding_is_right_padding_and_more_padding_changes_nothing(
    config: Config, sources: list[int], targets: list[int], more: int
) -> None:
    net = random_net(config)
    src, tgt = random_rows(sources, 0), random_rows(targets, 1)
    right = forward(net, src, tgt, "right")
    assert_same(forward(net, src, tgt, "left"), right)
    assert_same(forward(net, src, tgt, "left", width=6 + more), right)
    assert_same(forward(net, src, tgt, "right", width=6 + more), right)


@SEARCH
@given(configs(), lengths_of(BATCH, 0, 6), lengths_of(BATCH, 1, 6), SIDES, st.integers(0, 12))
@torch.no_grad()
def test_what_stands_in_the_padding_does_not_matter(
    config: Config, sources: list[int], targets: list[int], side: str, pad_id: int
) -> None:
    """Padding is told by lengths: its id may be that of EOS, or of any word in the row."""
    net = random_net(config)
    src, tgt = random_rows(sources, 0), random_rows(targets, 1)
    chosen = forward(net, src, tgt, side, width=7, pad_id=pad_id)
    assert_same(forward(net, src, tgt, side, width=7, pad_id=None), chosen)
    # The same id as a word is looked at.
    everywhere = [torch.full_like(row, pad_id) for row in tgt]
    singles = [net(s[None], t[None])[0] for s, t in zip(src, everywhere, strict=True)]
    assert_same(forward(net, src, everywhere, side, width=7, pad_id=pad_id), singles)


@SEARCH
@given(configs(), lengths_of(4, 0, 5), lengths_of(4, 1, 5), st.permutations(range(4)), SIDES)
@torch.no_grad()
def test_a_permuted_batch_gives_the_permuted_result(
    config: Config, sources: list[int], targets: list[int], order: list[int], side: str
) -> None:
    net = random_net(config)
    src, tgt = random_rows(sources, 0), random_rows(targets, 1)
    result = forward(net, src, tgt, side)
    permuted = forward(net, [src[i] for i in order], [tgt[i] for i in order], side)
    assert_same(permuted, [result[i] for i in order])


@SEARCH
@given(configs(), st.integers(2, 6), st.data(), SIDES)
@torch.no_grad()
def test_no_position_knows_what_comes_after_it(
    config: Config, length: int, data: st.DataObject, side: str
) -> None:
    net = random_net(config)
    changed = data.draw(st.integers(1, length - 1))
    src, tgt = random_rows([4, 2], 0), random_rows([length, length], 1)
    other = [row.clone() for row in tgt]
    for row in other:
        row[changed:] = (row[changed:] + 1) % VOCAB
    before, after = (forward(net, src, rows, side, width=7) for rows in (tgt, other))
    assert_same([row[:changed] for row in after], [row[:changed] for row in before])


@pytest.mark.parametrize("placement", ["post", "pre", "output"])
@torch.no_grad()
def test_every_position_knows_its_source_itself_and_what_came_before(placement: str) -> None:
    """What causality and padding leave: without it the laws above would hold for a constant."""
    net = random_net(Config(VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.0, norm_placement=placement))
    src, tgt = torch.stack(random_rows([4, 4], 0)), torch.stack(random_rows([5, 5], 1))
    result = net(src, tgt)
    for position in range(4):
        other = src.clone()
        other[:, position] = (other[:, position] + 1) % VOCAB
        assert ((net(other, tgt) - result).abs().amax(-1) > 1e-6).all()
    for position in range(5):
        other = tgt.clone()
        other[:, position] = (other[:, position] + 1) % VOCAB
        assert ((net(src, other) - result).abs().amax(-1)[:, position:] > 1e-6).all()


@SEARCH
@given(configs(dropout=0.3), lengths_of(BATCH, 0, 5), lengths_of(BATCH, 1, 5), SIDES)
def test_padding_gives_no_gradient_and_everything_is_finite(
    config: Config, sources: list[int], targets: list[int], side: str
) -> None:
    """In training, dropout and empty sources included. One id stands in the padding alone."""
    net = random_net(config).train()
    src, tgt = ([row % (VOCAB - 1) for row in random_rows(n, 0)] for n in (sources, targets))
    width = 7
    hidden = net.hidden(
        pad(src, side, width=width, pad_id=VOCAB - 1),
        pad(tgt, side, width=width, pad_id=VOCAB - 1),
        torch.tensor(sources),
        torch.tensor(targets),
        padding_side=side,
    )
    parts = [row[real(n, width, side)] for row, n in zip(hidden, targets, strict=True)]
    (torch.cat(parts) * torch.randn(1, config.d_model)).sum().backward()
    for embedding in (net.src_embedding, net.tgt_embedding):
        assert not embedding.tokens.weight.grad[VOCAB - 1].any()
    if config.positions == "learned":
        for embedding, lengths in ((net.src_embedding, sources), (net.tgt_embedding, targets)):
            assert not embedding.positions.weight.grad[max(lengths) :].any()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


@SEARCH
@given(configs(), lengths_of(BATCH, 0, 5), lengths_of(BATCH, 1, 5), SIDES)
def test_training_without_dropout_computes_what_evaluation_does(
    config: Config, sources: list[int], targets: list[int], side: str
) -> None:
    """The eager path and the fused one agree for every option."""
    net = random_net(config).train()
    src, tgt = random_rows(sources, 0), random_rows(targets, 1)
    trained = [row.detach() for row in forward(net, src, tgt, side)]
    with torch.no_grad():
        evaluated = forward(net.eval(), src, tgt, side)
    for left, right in zip(trained, evaluated, strict=True):
        torch.testing.assert_close(left, right, **EXACT)


@pytest.mark.parametrize("side", ["right", "left"])
def test_pad_queries_get_zeros_in_every_layer(side: Any) -> None:
    """Of the source's own, the target's own and the cross-attention; empty sources likewise."""
    net = random_net(Config(VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.0))
    outputs: dict[str, Tensor] = {}
    for name, module in net.named_modules():
        if isinstance(module, Attention):
            module.register_forward_hook(
                lambda _, __, out, name=name: outputs.__setitem__(name, out)
            )
    sources, targets = torch.tensor([4, 2, 0]), torch.tensor([1, 3, 2])
    src, tgt = (pad(random_rows(n.tolist(), 0), side, width=4) for n in (sources, targets))
    net(src, tgt, sources, targets, padding_side=side)
    assert len(outputs) == 6
    for name, out in outputs.items():
        written = padding_mask(sources if name.startswith("encoder") else targets, 4, side)
        if "cross" in name:
            written = written & (sources > 0)[:, None]
        assert torch.equal(out.abs().amax(-1) > 0, written), name


def test_every_sample_empty_is_finite_forward_and_backward() -> None:
    config = Config(VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        net = build(config).to(dtype).train()
        src, tgt = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
        logits = net(src, tgt, torch.tensor([0, 0]), torch.tensor([4, 0]))
        assert logits.dtype == dtype
        assert logits.isfinite().all()
        logits.float().logsumexp(-1).sum().backward()
        assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)


@pytest.mark.parametrize("lengths", [[4, 2], [-1, 2]])
def test_lengths_that_the_batch_cannot_have_are_refused(lengths: list[int]) -> None:
    net = random_net(Config(VOCAB, VOCAB, 4, 1, 1, 1, 4))
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(UserError, match="lengths must be from 0 to 3, the width of the batch"):
        net(ids, ids, torch.tensor(lengths))
    with pytest.raises(UserError, match=f"not {min(lengths)} to {max(lengths)}"):
        net(ids, ids, None, torch.tensor(lengths))


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_a_sequence_longer_than_the_model_allows_is_refused_with_both_lengths(
    positions: Any,
) -> None:
    net = random_net(
        Config(VOCAB, VOCAB, 4, 1, 1, 1, 4, max_length=MAX_LENGTH, positions=positions)
    )
    fits, too_long = (torch.zeros(1, n, dtype=torch.int64) for n in (MAX_LENGTH, MAX_LENGTH + 1))
    assert net(fits, fits).shape == (1, MAX_LENGTH, VOCAB)
    for src, tgt in ((too_long, fits), (fits, too_long)):
        with pytest.raises(UserError, match=r"sequence of 17 tokens.*max_length 16"):
            net(src, tgt)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_nothing_stays_behind_when_a_model_moves(positions: Any) -> None:
    """The meta device refuses any tensor of another device, as an accelerator does."""
    config = Config(VOCAB, VOCAB, 12, 3, 1, 1, 8, positions=positions)
    net = build(config).to("meta").train()
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    assert net(ids, ids).device.type == "meta"


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
@pytest.mark.parametrize("placement", ["post", "pre", "output"])
def test_every_weight_learns(placement: Any, positions: Any) -> None:
    config = Config(
        VOCAB, VOCAB, 12, 3, 2, 2, 8, 0.0, 6,
        norm_placement=placement, positions=positions, activation="gelu", tie_embeddings="none",
    )  # fmt: skip
    net = random_net(config)
    ids = torch.arange(VOCAB)[:, None] + torch.arange(6)
    torch.manual_seed(0)
    logits = net(ids % VOCAB, ids % VOCAB)
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in net.named_parameters():
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
        learns = rows.abs().amax(-1) > 1e-12
        if name.endswith("qkv.bias"):  # a bias on all keys alike moves no weight of a softmax
            learns = torch.cat([learns[:12], learns[24:]])
        assert learns.all(), name
