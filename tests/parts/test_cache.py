"""Cache: cached decoding equals uncached, through reorders, for every option."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.attention import Attention
from heedful.parts.cache import Cache
from heedful.zoo.vaswani2017 import Config
from option_space import EXACT, MAX_LENGTH, VOCAB, configs, lengths_of, pad, random_net, random_rows

SEARCH = settings(deadline=None, max_examples=40, print_blob=True)
SIDES = st.sampled_from(["right", "left"])
SIZES: dict[str, Any] = {
    "src_vocab_size": VOCAB,
    "tgt_vocab_size": VOCAB,
    "d_model": 6,
    "num_heads": 2,
    "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "d_ff": 5,
    "max_length": MAX_LENGTH,
}


def small_net() -> EncoderDecoder:
    return random_net(Config(**SIZES))


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@SEARCH
@given(
    config=configs(),
    sources=lengths_of(3, 0, 5),
    chunks=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    side=SIDES,
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_cached_is_uncached_however_many_tokens_a_step_has(
    config: Config, sources: list[int], chunks: list[int], side: str, seed: int
) -> None:
    net = random_net(config, seed)
    src, lengths = pad(random_rows(sources, seed), side), torch.tensor(sources)
    tgt = ids(3, sum(chunks), seed=seed)
    expected = net(src, tgt, lengths, padding_side=side)
    cache = net.start(src, lengths, capacity=sum(chunks), padding_side=side)
    logits = [net.step(part, cache) for part in tgt.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, **EXACT)
    assert cache.filled == int(cache.length) == sum(chunks)


@SEARCH
@given(
    config=configs(),
    sources=lengths_of(3, 1, 5),
    beams=st.integers(1, 3),
    data=st.data(),
    side=SIDES,
)
@torch.no_grad()
def test_a_reordered_cache_is_one_that_was_filled_in_the_new_order(
    config: Config, sources: list[int], beams: int, data: st.DataObject, side: str
) -> None:
    """Each start copied for its beams; then beams that take one another's place, and finished
    sources that leave, at every step. In all layers, sources included."""
    net = random_net(config)
    src, lengths = pad(random_rows(sources, 0), side), torch.tensor(sources)
    cache = net.start(src, lengths, capacity=8, padding_side=side)
    prefixes = ids(3, 2)
    net.step(prefixes, cache)
    owners = torch.arange(3).repeat_interleave(beams)  # which source each row is of
    cache.reorder(owners)
    prefixes = prefixes[owners]
    for step in range(3):
        left = sorted(set(owners.tolist()))
        stay = data.draw(st.lists(st.sampled_from(left), unique=True, min_size=1), "sources")
        rows = [
            data.draw(st.sampled_from((owners == source).nonzero().flatten().tolist()), "row")
            for source in stay
            for _ in range(beams)
        ]
        cache.reorder(torch.tensor(rows))
        owners, prefixes = owners[rows], prefixes[rows]
        new = ids(len(rows), 1 + step % 2, seed=step)
        logits = net.step(new, cache)
        prefixes = torch.cat([prefixes, new], dim=1)
        assert cache.rows == len(rows)
        expected = net(src[owners], prefixes, lengths[owners], padding_side=side)
        torch.testing.assert_close(logits, expected[:, -new.size(1) :], **EXACT)


@torch.no_grad()
def test_beams_share_the_keys_and_values_of_their_source() -> None:
    """Projected once for a decoding, and never copied for beams."""
    net = small_net()
    cache = net.start(ids(2, 4), capacity=4)
    before = [(k.data_ptr(), v.data_ptr()) for k, v in cache.cross]
    net.step(ids(2, 1), cache)
    cache.reorder(torch.tensor([0, 0, 0, 1, 1, 1]))
    net.step(ids(6, 1), cache)
    cache.reorder(torch.tensor([2, 0, 1, 5, 5, 3]))
    net.step(ids(6, 1), cache)
    assert len(cache.cross) == 2
    assert all(k.shape == v.shape == (2, 2, 4, 3) for k, v in cache.cross)
    assert [(k.data_ptr(), v.data_ptr()) for k, v in cache.cross] == before


@torch.no_grad()
def test_the_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_net()
    cache = net.start(ids(2, 4), capacity=3)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the source was projected or encoded again")

    monkeypatch.setattr(Attention, "project_memory", never)
    monkeypatch.setattr(EncoderDecoder, "encode", never)
    for _ in range(3):
        net.step(ids(2, 1), cache)


@torch.no_grad()
def test_sources_that_leave_free_their_keys_and_values() -> None:
    net = small_net()
    cache = net.start(ids(3, 4), torch.tensor([4, 2, 3]), capacity=4)
    cache.reorder(torch.tensor([2, 2, 0, 0]))
    assert all(k.size(0) == v.size(0) == 2 for k, v in cache.cross)
    assert cache.source_mask.allowed[:, 0, 0].sum(-1).tolist() == [3, 4]
    assert cache.rows == 4


@torch.no_grad()
def test_a_cache_that_all_rows_leave_is_empty() -> None:
    net = small_net()
    cache = net.start(ids(2, 4), capacity=4)
    net.step(ids(2, 1), cache)
    cache.reorder(torch.zeros(0, dtype=torch.int64))
    assert cache.rows == 0


@torch.no_grad()
def test_more_tokens_than_the_capacity_are_refused_with_both_numbers() -> None:
    net = small_net()
    cache = net.start(ids(2, 4), capacity=3)
    net.step(ids(2, 2), cache)
    with pytest.raises(UserError, match="4 tokens do not fit a cache made for 3"):
        net.step(ids(2, 2), cache)
    net.step(ids(2, 1), cache)
    with pytest.raises(UserError, match="4 tokens do not fit a cache made for 3"):
        net.step(ids(2, 1), cache)


@torch.no_grad()
def test_a_refused_step_leaves_the_cache_as_it_was() -> None:
    net = small_net()
    src, tgt = ids(2, 4), ids(2, 3, seed=1)
    cache = net.start(src, capacity=3)
    net.step(tgt[:, :2], cache)
    with pytest.raises(UserError):
        net.step(tgt, cache)
    torch.testing.assert_close(net.step(tgt[:, 2:], cache), net(src, tgt)[:, 2:], **EXACT)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
@torch.no_grad()
def test_steps_past_the_longest_sequence_of_the_model_are_refused(positions: Any) -> None:
    net = random_net(Config(**SIZES | {"positions": positions}))
    cache = net.start(ids(1, 4), capacity=MAX_LENGTH + 1)
    net.step(ids(1, MAX_LENGTH), cache)
    with pytest.raises(UserError, match=r"17 tokens.*max_length 16"):
        net.step(ids(1, 1), cache)


@torch.no_grad()
def test_a_step_of_other_rows_than_the_cache_is_refused() -> None:
    net = small_net()
    cache = net.start(ids(2, 4), capacity=3)
    with pytest.raises(UserError, match="a step of 3 rows for a cache of 2"):
        net.step(ids(3, 1), cache)


@torch.no_grad()
def test_modules_keep_nothing_between_calls() -> None:
    """Two decodings in turn, and a whole forward pass between, do not touch each other."""
    net = small_net()
    sources, targets = [ids(2, 4, seed=s) for s in (0, 1)], [ids(2, 3, seed=s) for s in (2, 3)]
    caches = [net.start(src, capacity=3) for src in sources]
    logits: list[list[Tensor]] = [[], []]
    for start, end in pairwise(range(4)):
        for index, cache in enumerate(caches):
            logits[index].append(net.step(targets[index][:, start:end], cache))
            net(sources[0], targets[1])
    for src, tgt, parts in zip(sources, targets, logits, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim=1), net(src, tgt), **EXACT)


@torch.no_grad()
def test_a_cache_is_of_the_type_that_its_model_computes_in() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        net = small_net().to(dtype)
        cache = net.start(ids(2, 4), capacity=3)
        assert net.step(ids(2, 2), cache).dtype == dtype
    net = small_net().float()
    with torch.autocast("cpu", torch.bfloat16):
        cache = net.start(ids(2, 4), capacity=3)
        autocast = [net.step(part, cache) for part in ids(2, 3, seed=1).split(1, dim=1)]
    expected = net(ids(2, 4), ids(2, 3, seed=1))
    torch.testing.assert_close(torch.cat(autocast, 1).float(), expected, rtol=0.2, atol=0.5)


@torch.no_grad()
def test_a_decoding_may_start_again_from_a_reordered_copy_of_one_row() -> None:
    """Rows are copied, not shared: writing to one leaves the others."""
    net = small_net()
    src = ids(1, 4)
    cache = net.start(src, capacity=4)
    prefix = ids(1, 2, seed=1)
    net.step(prefix, cache)
    cache.reorder(torch.tensor([0, 0]))
    new = torch.tensor([[1], [2]])
    net.step(new, cache)
    last = torch.tensor([[3], [3]])
    whole = torch.cat([prefix.expand(2, -1), new, last], dim=1)
    expected = net(src.expand(2, -1), whole)[:, -1:]
    torch.testing.assert_close(net.step(last, cache), expected, **EXACT)


def test_the_store_has_the_capacity_from_the_start() -> None:
    """A step never allocates it anew."""
    cache = Cache((1, 3, 5), rows=2, capacity=6, like=torch.zeros(1))
    keys = torch.randn(2, 3, 2, 5)
    stored, _ = cache.layer(0).update(keys, keys)
    cache.advance(2)
    later, values = cache.layer(0).update(-keys, -keys)
    assert stored.data_ptr() == later.data_ptr()
    assert later.shape == values.shape == (2, 3, 4, 5)
    assert torch.equal(later, torch.cat([keys, -keys], dim=2))
