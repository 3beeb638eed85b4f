"""Laws of decoders and encoders, searched over the option space of single stacks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_only import EncoderOnly
from heedful.parts import attention as attention_module
from heedful.parts.attention import attend, attend_fused
from heedful.parts.cache import Cache
from option_space import EXACT, VOCAB, lengths_of, pad, random_rows, real
from single_stacks import MAX_LENGTH, SCHEMES, Single, decoder, encoder, singles

SEARCH = settings(
    deadline=None, max_examples=18, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
SIDES = st.sampled_from(["right", "left"])
CHUNKS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
BATCH = 3


@pytest.fixture(autouse=True, scope="module")
def windows_in_parts() -> Iterator[None]:
    """Windowed layers take two queries at a time, so that short texts have several parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "_LOCAL_QUERIES", 2)
        yield


def forward(
    net: DecoderOnly | EncoderOnly, rows: list[Tensor], side: str, **padding: Any
) -> list[Tensor]:
    """What the net says at the real positions of each row, out of one padded batch."""
    ids = pad(rows, side, **padding)
    lengths = torch.tensor([row.numel() for row in rows])
    said = net(ids, lengths, padding_side=side)
    if said.dim() == 2:
        return list(said)
    width = ids.size(1)
    return [out[real(row.numel(), width, side)] for out, row in zip(said, rows, strict=True)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, **EXACT)


def alone(net: DecoderOnly | EncoderOnly, rows: list[Tensor]) -> list[Tensor]:
    """Each row in a batch of its own, without padding and without lengths."""
    return [net(row[None])[0] for row in rows]


# Batches and padding, decoders and encoders


@st.composite
def nets(draw: st.DrawFn) -> DecoderOnly | EncoderOnly:
    """Decoders and, with every head, encoders."""
    single, seed = draw(singles()), draw(st.integers(0, 99))
    kind = draw(st.sampled_from(["decoder", "decoder", "none", "tokens", "classes"]))
    return decoder(single, seed) if kind == "decoder" else encoder(single, kind, seed)


@SEARCH
@given(nets(), lengths_of(BATCH, 1, 7), SIDES, st.integers(0, 3))
@torch.no_grad()
def test_a_batch_of_n_is_n_batches_of_one_however_it_is_padded(
    net: Any, lengths: list[int], side: str, more: int
) -> None:
    """So left padding is right padding, and more padding changes nothing."""
    rows = random_rows(lengths, 0)
    assert_same(forward(net, rows, side, width=7 + more), alone(net, rows))


@SEARCH
@given(nets(), lengths_of(BATCH, 1, 6), SIDES, st.integers(0, VOCAB - 1))
@torch.no_grad()
def test_what_stands_in_the_padding_does_not_matter(
    net: Any, lengths: list[int], side: str, pad_id: int
) -> None:
    rows = random_rows(lengths, 0)
    chosen = forward(net, rows, side, width=7, pad_id=pad_id)
    assert_same(forward(net, rows, side, width=7, pad_id=None), chosen)


@SEARCH
@given(nets(), lengths_of(4, 1, 6), st.permutations(range(4)), SIDES)
@torch.no_grad()
def test_a_permuted_batch_gives_the_permuted_result(
    net: Any, lengths: list[int], order: list[int], side: str
) -> None:
    rows = random_rows(lengths, 0)
    result = forward(net, rows, side)
    assert_same(forward(net, [rows[i] for i in order], side), [result[i] for i in order])


@SEARCH
@given(nets(), st.integers(2, 7), SIDES)
@torch.no_grad()
def test_an_empty_row_is_finite_and_disturbs_nobody(net: Any, length: int, side: str) -> None:
    rows = random_rows([length, 0, 1], 0)
    said = forward(net, rows, side, width=7)
    assert all(row.isfinite().all() for row in said)
    assert_same([said[0], said[2]], alone(net, [rows[0], rows[2]]))


@SEARCH
@given(nets(), lengths_of(BATCH, 1, 7), SIDES)
def test_the_training_path_computes_what_the_inference_path_does(
    net: Any, lengths: list[int], side: str
) -> None:
    """Plain products where gradients are formed, fused kernels where not."""
    taken: set[str] = set()

    def spy(name: str, function: Any) -> Any:
        return lambda *given, **named: (taken.add(name), function(*given, **named))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "attend", spy("eager", attend))
        patch.setattr(attention_module, "attend_fused", spy("fused", attend_fused))
        rows = random_rows(lengths, 0)
        trained = [row.detach() for row in forward(net.train(), rows, side)]
        assert taken == {"eager"}
        taken.clear()
        with torch.no_grad():
            assert_same(forward(net.eval(), rows, side), trained)
        assert taken == {"fused"}


@SEARCH
@given(singles(), st.booleans(), st.integers(0, 99))
def test_gradients_flow_to_every_parameter(single: Single, decodes: bool, seed: int) -> None:
    net = decoder(single, seed) if decodes else encoder(single, "tokens", seed)
    ids = torch.stack(random_rows([7] * 6, seed))
    ids[0, 0] = VOCAB - 1
    logits = net(ids)
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in net.named_parameters():
        if "relative" in name and all(window == 1 for window in single.windows):
            continue  # who sees one key alone gives it all weight, whatever its score
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@SEARCH
@given(singles(dropout=0.3), st.booleans(), lengths_of(BATCH, 0, 6), SIDES)
def test_padding_gives_no_gradient_and_everything_is_finite(
    single: Single, decodes: bool, lengths: list[int], side: str
) -> None:
    """In training, dropout and empty rows included. One id stands in the padding alone."""
    net = (decoder(single) if decodes else encoder(single)).train()
    rows = [row % (VOCAB - 1) for row in random_rows(lengths, 0)]
    ids = pad(rows, side, width=7, pad_id=VOCAB - 1)
    hidden = net.hidden(ids, torch.tensor(lengths), padding_side=side)
    parts = [row[real(n, 7, side)] for row, n in zip(hidden, lengths, strict=True)]
    (torch.cat(parts) * torch.randn(1, single.d_model)).sum().backward()
    assert not net.embedding.tokens.weight.grad[VOCAB - 1].any()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


@SEARCH
@given(singles(), lengths_of(BATCH, 1, 6), SIDES, st.integers(0, 99))
@torch.no_grad()
def test_a_class_is_told_from_the_first_real_token(
    single: Single, lengths: list[int], side: str, seed: int
) -> None:
    """Not from the first column, which is padding where rows are padded on the left."""
    net = encoder(single, "classes", seed)
    rows = random_rows(lengths, seed)
    states = [net.hidden(row[None])[0, 0] for row in rows]
    assert_same(forward(net, rows, side, width=7), [net.head(state[None])[0] for state in states])


@SEARCH
@given(singles(), st.integers(2, 6))
@torch.no_grad()
def test_two_texts_in_one_are_told_apart_by_their_types(single: Single, length: int) -> None:
    net = encoder(single)
    ids = torch.stack(random_rows([length], 0))
    types = torch.zeros_like(ids)
    torch.testing.assert_close(net(ids, types=types), net(ids), **EXACT)
    types[:, -1] = 1
    assert (net(ids, types=types) - net(ids))[0, -1].abs().max() > 1e-6


# Who sees whom


def sees(single: Single, length: int, *, causal: bool) -> Tensor:
    """(T, T), True where a layer after another lets row know of column."""
    places = torch.arange(length)
    distances = places[:, None] - places
    known = torch.eye(length, dtype=torch.bool)
    for window in single.windows:
        near = torch.ones_like(known) if window is None else distances.abs() < window
        step = near & (distances >= 0) if causal else near
        known = (step.int() @ known.int()) > 0
    return known


@SEARCH
@given(singles(), st.booleans(), st.integers(2, 8), st.data(), SIDES)
@torch.no_grad()
def test_a_token_knows_those_that_windows_and_causality_leave_it_and_no_others(
    single: Single, causal: bool, length: int, data: st.DataObject, side: str
) -> None:
    """Windows of layers add up. Whom it may know it does know: a constant would not pass."""
    net = decoder(single) if causal else encoder(single)
    changed = data.draw(st.integers(0, length - 1), "changed")
    row = random_rows([length], 0)[0]
    other = row.clone()
    other[changed] = (other[changed] + 1) % VOCAB
    before, after = (forward(net, [each], side, width=9)[0] for each in (row, other))
    differ = (after - before).abs().amax(-1)
    known = sees(single, length, causal=causal)[:, changed]
    torch.testing.assert_close(after[~known], before[~known], **EXACT)
    # Deep in a ReLU's dead side a token may be blind: it is enough that the token itself differs
    # and, of the others, not all are blind.
    assert differ[changed] > 0
    if known.sum() > 1 and single.network in ("gelu", "silu", "swiglu", "geglu"):
        assert differ[known].count_nonzero() > 1


# Caches


@SEARCH
@given(singles(), CHUNKS, st.integers(0, 99))
@torch.no_grad()
def test_cached_is_uncached_however_many_tokens_a_step_has(
    single: Single, chunks: list[int], seed: int
) -> None:
    net = decoder(single, seed)
    ids = torch.stack(random_rows([sum(chunks)] * BATCH, seed))
    cache = net.start(BATCH, capacity=sum(chunks))
    logits = [net.step(part, cache) for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), net(ids), **EXACT)
    assert cache.filled == int(cache.length) == sum(chunks)


def padded_cache(net: DecoderOnly, lengths: list[int], width: int, more: int = 0) -> Cache:
    """For rows of these lengths, padded on the left to `width`, and more tokens after them."""
    return net.start(len(lengths), capacity=width + more, starts=width - torch.tensor(lengths))


@SEARCH
@given(singles(), st.data(), CHUNKS, st.sampled_from([0, None]))
@torch.no_grad()
def test_left_padded_rows_in_a_cache_are_each_row_alone(
    single: Single, data: st.DataObject, chunks: list[int], pad_id: int | None
) -> None:
    """Also where the first chunks of a row are nothing but padding."""
    net, width = decoder(single), sum(chunks)
    lengths = data.draw(lengths_of(BATCH, 1, width), "lengths")
    rows = random_rows(lengths, 0)
    cache = padded_cache(net, lengths, width)
    ids = pad(rows, "left", width=width, pad_id=pad_id)
    logits = torch.cat([net.step(part, cache) for part in ids.split(chunks, dim=1)], dim=1)
    assert logits.isfinite().all()
    found = [out[real(n, width, "left")] for out, n in zip(logits, lengths, strict=True)]
    assert_same(found, alone(net, rows))


@SEARCH
@given(singles(), st.data(), CHUNKS, st.booleans())
@torch.no_grad()
def test_to_rewind_and_go_on_is_to_go_straight(
    single: Single, data: st.DataObject, chunks: list[int], padded: bool
) -> None:
    """What was tried and given up leaves no trace, as often as it happens."""
    net, width = decoder(single), sum(chunks)
    lengths = data.draw(lengths_of(BATCH, 1, width), "lengths") if padded else [width] * BATCH
    rows = random_rows(lengths, 0)
    ids = pad(rows, "left", width=width)
    capacity = width + 4
    cache = padded_cache(net, lengths, width, 4) if padded else net.start(BATCH, capacity=capacity)
    logits = []
    for part in ids.split(chunks, dim=1):
        before = cache.filled
        tried = data.draw(st.integers(0, 4), "tried")
        if tried:
            net.step(torch.stack(random_rows([tried] * BATCH, before + 5)), cache)
            cache.rewind(before)
            assert cache.filled == int(cache.length) == before
        # All of the chunk, and then its end anew.
        whole = net.step(part, cache)
        keep = data.draw(st.integers(0, part.size(1)), "keep")
        cache.rewind(before + keep)
        again = [net.step(part[:, keep:], cache)] if keep < part.size(1) else []
        logits.append(torch.cat([whole[:, :keep], *again], dim=1))
    found = [
        out[real(n, width, "left")] for out, n in zip(torch.cat(logits, 1), lengths, strict=True)
    ]
    assert_same(found, alone(net, rows))


@SEARCH
@given(singles(), lengths_of(BATCH, 1, 4), st.data())
@torch.no_grad()
def test_a_reordered_cache_is_one_that_was_filled_in_the_new_order(
    single: Single, lengths: list[int], data: st.DataObject
) -> None:
    """Rows leave, are copied and change places at every step, their padding with them."""
    net, width = decoder(single), max(lengths)
    texts = random_rows(lengths, 0)
    cache = padded_cache(net, lengths, width, 6)
    net.step(pad(texts, "left"), cache)
    for step in range(3):
        order = data.draw(st.lists(st.integers(0, cache.rows - 1), min_size=1, max_size=4), "rows")
        cache.reorder(torch.tensor(order))
        new = random_rows([1 + step % 2] * len(order), step + 7)
        texts = [torch.cat([texts[i], more]) for i, more in zip(order, new, strict=True)]
        logits = net.step(torch.stack(new), cache)
        expected = [row[-new[0].numel() :] for row in alone(net, texts)]
        assert_same(list(logits), expected)


# Packed documents


@SEARCH
@given(singles(), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 3), SIDES)
@torch.no_grad()
def test_documents_packed_are_documents_apart(
    single: Single, lengths: list[int], padding: int, side: str
) -> None:
    net = decoder(single)
    texts = random_rows(lengths, 0)
    documents = torch.cat([torch.full_like(text, i) for i, text in enumerate(texts)])
    ids, numbers = (
        pad([t], side, width=t.numel() + padding) for t in (torch.cat(texts), documents)
    )
    said = net(ids, torch.tensor([documents.numel()]), padding_side=side, documents=numbers)[0]
    packed = said[real(documents.numel(), ids.size(1), side)].split(lengths)
    assert_same(list(packed), alone(net, texts))


# One example a scheme that is sure to run


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_at_lengths_past_its_window(scheme: str) -> None:
    """In training, padded on either side, and in a cache that begins with padding."""
    net = decoder(Single(scheme, windows=(3, None), embedding_norm=True))
    rows = random_rows([30, 11, 1], 3)
    trained = [row.detach() for row in forward(net, rows, "right")]
    with torch.no_grad():
        cache = padded_cache(net, [30, 11, 1], 30)
        logits = torch.cat(
            [net.step(part, cache) for part in pad(rows, "left").split([17, 1, 1, 11], 1)], 1
        )
        found = [out[real(row.numel(), 30, "left")] for out, row in zip(logits, rows, strict=True)]
        expected = alone(net, rows)
        assert_same(found, expected)
        assert_same(trained, expected)
        assert_same(forward(net, rows, "left"), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_every_scheme_tells_the_order_of_tokens(scheme: str) -> None:
    """What the laws leave: they hold for a scheme that says nothing."""
    row = torch.stack(random_rows([9], 0))
    net = encoder(Single(scheme, windows=(None,)))
    turned = (net(row.flip(1)).flip(1) - net(row)).abs().max()
    # Scores of ALiBi fall off alike to either side: turned, all distances stay what they were.
    assert (turned < 1e-9) == (scheme in ("none", "alibi"))
    shuffled = row[:, [0, 2, 4, 6, 8, 1, 3, 5, 7]]
    states = net(shuffled)[:, [0, 5, 1, 6, 2, 7, 3, 8, 4]]
    assert ((states - net(row)).abs().max() < 1e-9) == (scheme == "none")


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("windows", [(None,), (2, None)])
@torch.no_grad()
def test_a_batch_without_tokens_gives_no_logits(
    decodes: bool, windows: tuple[int | None, ...]
) -> None:
    single = Single(windows=windows)
    net = decoder(single) if decodes else encoder(single, "tokens")
    assert net(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, VOCAB)


def test_the_space_fits_its_longest_text() -> None:
    assert MAX_LENGTH >= 30
