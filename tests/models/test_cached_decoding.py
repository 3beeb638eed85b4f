"""Decoding with a cache equals decoding without, for any sequence of cache operations."""

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from architectures import DECODERS, tiny
from heedful.backends.torch.cached_net import DecodingState
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.cache import Cache
from heedful.parts.cross_attention import CrossAttention
from heedful.parts.tokens import Tokens
from option_space import (
    MAX_LENGTH,
    SEARCH,
    SIDES,
    VOCAB,
    Text,
    alone,
    assert_same,
    lengths_of,
    pad,
    random_rows,
    real,
    texts_of,
    tokens_of,
)
from single_stacks import SCHEMES, WRITERS, Single, decoder, nets, two_stacks

SOURCE_WIDTH = 5


def start(net: Any, texts: list[Text], side: Any = "right", **sizes: int) -> Cache:
    """An empty cache for these texts; sources are padded to one width."""
    if isinstance(net, EncoderDecoder):
        sources = [text.source for text in texts]
        return net.start(tokens_of(sources, side, width=SOURCE_WIDTH), **sizes)
    return net.start(len(texts), **sizes)


def new_tokens(before: list[Text], rows: list[Tensor], side: Any) -> Tokens:
    """Ragged continuations of these texts as one batch, their positions those after the text."""
    tokens = tokens_of(rows, side, pad_id=None)
    lengths = torch.tensor([text.ids.numel() for text in before])
    positions = tokens.positions + lengths[:, None]
    assert tokens.real is not None
    return Tokens(tokens.ids, torch.where(tokens.real, positions, 0), tokens.real)


def extend(net: Any, cache: Cache, texts: list[Text], rows: list[Tensor], side: Any) -> list[Text]:
    """Decode more tokens of each text and compare their logits; returns the longer texts."""
    longer = [text.then(row) for text, row in zip(texts, rows, strict=True)]
    logits = net.head(net.decode(new_tokens(texts, rows, side), cache))
    assert logits.isfinite().all()
    width = logits.size(1)
    ours = [out[real(row.numel(), width, side)] for out, row in zip(logits, rows, strict=True)]
    whole = [
        out[out.size(0) - row.numel() :] for out, row in zip(_alone(net, longer), rows, strict=True)
    ]
    assert_same(ours, whole)
    return longer


def _alone(net: Any, texts: list[Text]) -> list[Tensor]:
    """As `alone`; a text without tokens has no logits."""
    logits_by_text = iter(alone(net, [text for text in texts if text.ids.numel()]))
    nothing = torch.zeros(0, VOCAB, dtype=torch.float64)
    return [next(logits_by_text) if text.ids.numel() else nothing for text in texts]


def cache_with_beams(
    net: Any, texts: list[Text], side: Any, capacity: int, beams: int
) -> tuple[Cache, list[Text]]:
    """A cache that has each text once for all its beams, and the text of every beam."""
    cache = start(net, texts, side, capacity=capacity, branches=beams)
    empty = [text._replace(ids=text.ids[:0]) for text in texts]
    if any(text.ids.numel() for text in texts):
        extend(net, cache, empty, [text.ids for text in texts], side)
    return cache, [text for text in texts for _ in range(beams)]


@SEARCH
@given(nets(WRITERS), lengths_of(3, 0, 5), st.integers(1, 3), SIDES, st.data())
@torch.no_grad()
def test_any_sequence_of_cache_operations_equals_uncached_decoding(
    net: Any, lengths: list[int], beams: int, side: str, data: st.DataObject
) -> None:
    """Ragged prompts padded on either side, reordered beams, several tokens at once, rows that have
    ended, rewound tokens, texts that leave, are doubled or replaced, and a growing cache, in any
    order."""
    capacity = 40
    cache, texts = cache_with_beams(net, texts_of(lengths), side, capacity, beams)
    kinds = ["extend", "extend", "select", "write", "grow", "forget"]
    kinds.append("rewind" if beams == 1 else "reorder")
    for step in range(6):
        count = cache.num_texts
        match data.draw(st.sampled_from(kinds), "what"):
            case "extend":
                # Several tokens for one beam; for many one each, or none where a beam has ended.
                counts = data.draw(lengths_of(count * beams, 0, 3 if beams == 1 else 1), "counts")
                # One position is left for the last token.
                room = [MAX_LENGTH - 1 - text.ids.numel() for text in texts]
                counts = [min(pair) for pair in zip(counts, room, strict=True)]
                if any(counts):
                    texts = extend(net, cache, texts, random_rows(counts, step), side)
            case "reorder":
                parents = torch.tensor(
                    data.draw(st.lists(lengths_of(beams, 0, beams - 1), min_size=count,
                                       max_size=count), "parents")
                )  # fmt: skip
                cache.reorder(parents)
                selected = (parents + beams * torch.arange(count)[:, None]).flatten().tolist()
                texts = [texts[i] for i in selected]
            case "rewind":
                length = data.draw(st.integers(0, 8), "length")
                cache.rewind(length)
                texts = [text._replace(ids=text.ids[:length]) for text in texts]
            case "select":
                rows = data.draw(
                    st.lists(st.integers(0, count - 1), min_size=1, max_size=4), "rows"
                )
                cache = cache.select(torch.tensor(rows))
                texts = [texts[row * beams + w] for row in rows for w in range(beams)]
            case "write":
                rows = data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
                fresh = texts_of(data.draw(lengths_of(len(rows), 0, 4), "fresh"), step + 7)
                other, reference = cache_with_beams(net, fresh, side, cache.capacity, beams)
                cache.write_rows(torch.tensor(rows), other)
                for index, row in enumerate(rows):
                    texts[row * beams : (row + 1) * beams] = reference[index * beams :][:beams]
            case "forget":  # after which nothing can be taken back
                cache.groups = [
                    group if group.window is None else group.without_hidden(group.capacity)
                    for group in cache.groups
                ]
                kinds = [kind for kind in kinds if kind != "rewind"]
            case "grow":
                capacity += data.draw(st.integers(0, 9), "more")
                cache = cache.grow(capacity)
                assert cache.capacity == capacity
    assert cache.branches == beams
    extend(net, cache, texts, random_rows([1] * len(texts), 99), side)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_rows_are_replaced_in_a_cache_while_others_continue(name: str) -> None:
    """25 texts arrive at random in a cache of four rows; a row without a text gets no token."""
    net = tiny(name)
    waiting = [texts_of([int(torch.randint(1, 6, ()))], seed)[0] for seed in range(25)]
    cache = start(net, waiting[:4], capacity=16)
    texts: dict[int, Text] = {}  # the unfinished rows, and the logits after their tokens
    messages: dict[int, list[Tensor]] = {}
    while waiting or texts:
        free = [row for row in range(4) if row not in texts]
        if waiting and free and torch.rand(()) < 0.6:
            row, text = free[int(torch.randint(len(free), ()))], waiting.pop()
            other, prompt = start(net, [text], capacity=16), Tokens.from_ids(text.ids[None])
            messages[row] = [net.head(net.decode(prompt, other))[0]]
            cache.write_rows(torch.tensor([row]), other)
            texts[row] = text
        real = torch.tensor([[row in texts] for row in range(4)])
        lengths = [texts[row].ids.numel() if row in texts else 0 for row in range(4)]
        new = Tokens(torch.randint(VOCAB, (4, 1)), torch.tensor(lengths)[:, None], real)
        before = [store.clone() for store in (cache.groups[0].stores[0], cache.groups[0].positions)]
        logits = net.head(net.decode(new, cache))
        for row in range(4):
            if row not in texts:  # it writes nothing
                assert torch.equal(cache.groups[0].stores[0][row, :-1], before[0][row, :-1])
                assert torch.equal(cache.groups[0].positions[row], before[1][row])
                continue
            messages[row].append(logits[row])
            texts[row] = texts[row].then(new.ids[row])
            if torch.rand(()) < 0.3 or texts[row].ids.numel() == 14:
                assert_same([torch.cat(messages.pop(row))], alone(net, [texts.pop(row)]))


@pytest.mark.parametrize("windows", [(None, 3), (1, 100)])
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_chunks_beyond_the_window_equal_uncached_decoding(
    scheme: str, windows: tuple[int, ...]
) -> None:
    """One fixed example of each, at lengths beyond windows, tables and buckets."""
    net = two_stacks(Single(scheme, windows=windows, embedding_norm=True))
    texts = texts_of([30, 11, 1], 3)
    for chunks in ([17, 1, 1, 11], [4] * 7 + [2], [30]):
        cache = start(net, texts, capacity=30)
        so_far = [text._replace(ids=text.ids[:0]) for text in texts]
        for begin, end in pairwise([sum(chunks[:i]) for i in range(len(chunks) + 1)]):
            so_far = extend(net, cache, so_far, [text.ids[begin:end] for text in texts], "left")


@torch.no_grad()
def test_beams_share_source_and_prompt_without_copies() -> None:
    """Sources are projected once; reordering beams moves no keys."""
    net = two_stacks(Single())
    cache, _ = cache_with_beams(net, texts_of([3, 2]), "right", 16, 3)
    stores = [*chain.from_iterable(group.stores for group in cache.groups), *cache.cross]
    before = [store.data_ptr() for store in stores]
    assert all(store.size(0) == 2 for store in stores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossAttention, "project_memory", None)  # would raise
        patch.setattr(EncoderDecoder, "encode", None)
        for step in range(3):
            copies = [store.clone() for store in stores]
            cache.reorder(torch.tensor([[0, 0, 2], [1, 2, 0]]))
            assert all(torch.equal(*pair) for pair in zip(stores, copies, strict=True))
            ids = torch.full((6, 1), step)
            net.decode(Tokens(ids, torch.tensor([3, 3, 3, 2, 2, 2])[:, None] + step), cache)
    stores = [*chain.from_iterable(group.stores for group in cache.groups), *cache.cross]
    assert [store.data_ptr() for store in stores] == before
    assert [group.used.tolist() for group in cache.groups] == [[3 + 9, 2 + 9]] * len(cache.groups)


@torch.no_grad()
def test_a_cache_has_the_dtype_and_sizes_of_the_model() -> None:
    single = Single(num_heads=4, num_kv_heads=2, windows=(None,))
    for dtype in (torch.float32, torch.bfloat16):
        cache = decoder(single).to(dtype).start(3, capacity=5 + 2 * 4, branches=4)
        assert cache.groups[0].stores[0].shape == (3, 13 + 1, 2 * 2, single.head_dim)
        assert cache.groups[0].stores[0].dtype == dtype
        assert (cache.num_texts, cache.branches, cache.capacity) == (3, 4, 13)


@torch.no_grad()
def test_decoding_under_autocast_is_close_to_fp32() -> None:
    net = two_stacks(Single()).float()
    source, ids = texts_of([5, 5])[1].source[None], torch.tensor([[1, 2, 3]])
    with torch.autocast("cpu", torch.bfloat16):
        cache = net.start(Tokens.from_ids(source), capacity=3)
        steps = [net.head(net.decode(Tokens(ids[:, [i]], torch.tensor([[i]])), cache)) for i in
                 range(3)]  # fmt: skip
    actual, expected = torch.cat(steps, 1).float(), net(source, ids)
    assert 0 < (actual - expected).norm() < 0.03 * expected.norm()


@torch.no_grad()
def test_more_tokens_than_slots_are_an_error() -> None:
    net = decoder(Single())
    cache, texts = cache_with_beams(net, texts_of([3]), "right", 4, 1)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        extend(net, cache, texts, random_rows([3], 1), "right")


@torch.no_grad()
def test_rows_must_be_one_per_text_or_one_per_beam() -> None:
    net = decoder(Single())
    cache = net.start(2, capacity=4, branches=3)
    with pytest.raises(AssertionError):
        net.decode(Tokens.from_ids(pad(random_rows([1] * 3, 0), "right")), cache)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_layers_with_a_window_drop_tokens_outside_of_it(
    name: str, beams: int, padded: bool
) -> None:
    """Their slots are bounded by the window, and each step equals a whole pass.

    Prompts are short or long: of any three of these four properties there is every combination.
    """
    prompt = 36 if (name == "gemma3") ^ (beams == 2) ^ padded else 4
    net = tiny(name, max_length=80)
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (3, prompt))
    left = torch.tensor([0, 2, 1]) if padded else None
    cache = net.start(3, capacity=16, branches=beams)
    decoding = DecodingState(net, cache, longest=80, left_padding=left)
    decoding.next_log_probs(ids, decoding)
    rows = ids.repeat_interleave(beams, 0)
    for step in range(40):
        rows = torch.cat([rows, torch.randint(VOCAB, (3 * beams, 1))], 1)
        actual = decoding.next_log_probs(rows, decoding)
        if step % 3 == 0:
            for number, (row, log_probs) in enumerate(zip(rows, actual, strict=True)):
                first = 0 if left is None else int(left[number // beams])
                expected = net(row[None, first:])[0, -1].log_softmax(-1)
                torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
        if step == 20:
            decoding.select(torch.tensor([2, 0, 0]))
            left = None if left is None else left[[2, 0, 0]]
            rows = rows.view(3, beams, -1)[[2, 0, 0]].flatten(0, 1)
        parents = torch.randint(beams, (3, beams))
        decoding.reorder(parents)
        rows = rows.view(3, beams, -1).gather(1, parents[..., None].expand(-1, -1, rows.size(1)))
        rows = rows.flatten(0, 1)
        local = [group for group in decoding.cache.groups if group.window is not None]
        assert [group.capacity for group in local] == [16]  # of 4 · window · beams = 24 at most
    whole = [group.capacity for group in decoding.cache.groups if group.window is None]
    assert all(capacity >= prompt + 40 for capacity in whole)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@torch.no_grad()
def test_a_cache_that_can_be_rewound_drops_no_token(name: str) -> None:
    """A text is rewound to any length, however short the window is."""
    net = tiny(name)
    decoding = DecodingState(net, net.start(1, capacity=16), longest=48)
    ids = torch.randint(VOCAB, (40,))
    decoding.feed(ids[:30])
    decoding.feed(ids[30:])
    decoding.rewind(7)
    actual = decoding.feed(ids[7:12])
    expected = net(ids[None, :12])[0, 7:].log_softmax(-1)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_first_tokens_of_a_cache_use_the_causal_kernel() -> None:
    """With the kernel's own causal mask, in blocks of a window; later or padded tokens do not."""
    net, ids = tiny("gemma3"), torch.randint(VOCAB, (2, 4))
    real = torch.tensor([[True] * 4, [False, *[True] * 3]])
    for beams, padded in ((1, False), (3, False), (1, True)):
        cache = net.start(2, capacity=32, branches=beams)
        actual = []
        for step in range(2):
            cache.reserve(4, drops_hidden=True)
            at = torch.arange(4)[None] + 4 * step
            _, masks, _ = cache.begin(Tokens(ids, at, real if padded else None))
            actual.append({spec.is_self_attention for spec in masks})
        assert actual == [{not padded}, {False}]
