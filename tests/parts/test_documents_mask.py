"""Packed rows: documents that share a row know nothing of one another, in any position scheme."""

import pytest
import torch
from heedful.models.padding import Rows
from heedful.parts.masks import AttentionMask, MaskRule
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from option_space import EXACT, VOCAB, random_rows
from single_stacks import SCHEMES, Single, decoder, singles

SEARCH = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
LENGTHS = [4, 1, 6, 3]


def packed(lengths: list[int], seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Documents, the row that they make, and which of them each token is of."""
    texts = random_rows(lengths, seed)
    numbers = [torch.full_like(text, index) for index, text in enumerate(texts)]
    return texts, torch.cat(texts)[None], torch.cat(numbers)[None]


def test_positions_begin_anew_and_the_table_is_made_of_blocks() -> None:
    documents = torch.tensor([[0, 0, 1, 2, 2], [5, 5, 5, 5, 5]])
    rows = Rows.of(torch.zeros(2, 5, dtype=torch.int64), documents=documents)
    assert rows.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    causal = rows.attention(causal=True).allowed
    table = ["".join("x" if each else "." for each in row) for row in causal[0, 0]]
    assert table == ["x....", "xx...", "..x..", "...x.", "...xx"]
    assert torch.equal(causal[1, 0], torch.ones(5, 5, dtype=torch.bool).tril())
    both = rows.attention(causal=False).allowed
    assert torch.equal(both[:, 0], documents[:, :, None] == documents[:, None, :])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("number", [0, 2, 9, -1])
def test_the_number_that_stands_in_the_padding_does_not_matter(side: str, number: int) -> None:
    """It may be that of the document beside it: positions begin at the first real token."""
    real = torch.tensor([[0, 0, 1, 2, 2]])
    padding = torch.full((1, 2), number)
    documents = torch.cat([real, padding] if side == "right" else [padding, real], 1)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    rows = Rows.of(ids, torch.tensor([5]), side, documents)
    assert rows.positions[rows.real].tolist() == [0, 1, 0, 0, 1]
    allowed = rows.attention(causal=True).allowed[0, 0]
    assert not allowed[~rows.real[0]].any()
    assert not allowed[:, ~rows.real[0]].any()


@pytest.mark.parametrize("windows", [(None, None), (2, None), (3, 1)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_row_is_its_documents_alone(scheme: str, windows: tuple[int | None, ...]) -> None:
    """In training and out of it, and in what every weight learns."""
    net = decoder(Single(scheme, windows=windows))
    texts, ids, documents = packed(LENGTHS)
    upstream = torch.randn(ids.size(1), VOCAB, dtype=torch.float64)
    together = net(ids, documents=documents)[0]
    together.backward(upstream)
    learned = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    apart = torch.cat([net(text[None])[0] for text in texts])
    torch.testing.assert_close(together, apart, **EXACT)
    apart.backward(upstream)
    for (name, parameter), grad in zip(net.named_parameters(), learned, strict=True):
        torch.testing.assert_close(grad, parameter.grad, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
    with torch.no_grad():
        torch.testing.assert_close(net(ids, documents=documents)[0], apart, **EXACT)
        # Without the documents they do leak, so that the equality above says something.
        assert (net(ids)[0] - apart).abs().max() > 1e-3


@SEARCH
@given(
    singles(), st.lists(st.integers(1, 4), min_size=2, max_size=4), st.data(), st.integers(0, 99)
)
def test_trap_30_no_document_leaks_into_another(
    single: Single, lengths: list[int], data: st.DataObject, seed: int
) -> None:
    """Other words in one change nothing in the others, and their losses give it no gradient."""
    net = decoder(single, seed)
    texts, ids, documents = packed(lengths, seed)
    changed = data.draw(st.integers(0, len(texts) - 1), "changed")
    inside = documents[0] == changed
    other = torch.where(inside, (ids + 1) % VOCAB, ids)
    with torch.no_grad():
        before, after = (net(each, documents=documents)[0] for each in (ids, other))
    assert torch.equal(after[~inside], before[~inside])
    assert (after[inside] != before[inside]).any()
    # One id stands in this document alone.
    marked = torch.where(inside, VOCAB - 1, ids % (VOCAB - 1))
    states = net.hidden(marked, documents=documents)[0]
    (states[~inside] * torch.randn(1, single.d_model)).sum().backward()
    assert not net.embedding.tokens.weight.grad[VOCAB - 1].any()


@torch.no_grad()
def test_rows_of_a_batch_are_packed_each_in_its_own_way() -> None:
    net = decoder(Single(windows=(3, None)))
    rows = [packed(lengths, seed) for seed, lengths in enumerate(([5, 3], [1, 1, 6], [8]))]
    ids, documents = (torch.cat([row[i] for row in rows]) for i in (1, 2))
    said = net(ids, documents=documents)
    for out, (texts, _, _) in zip(said, rows, strict=True):
        expected = torch.cat([net(text[None])[0] for text in texts])
        torch.testing.assert_close(out, expected, **EXACT)


@torch.no_grad()
def test_one_document_a_row_is_no_packing_at_all() -> None:
    for scheme in SCHEMES:
        net = decoder(Single(scheme))
        ids = torch.stack(random_rows([7, 7], 0))
        torch.testing.assert_close(net(ids, documents=torch.zeros_like(ids)), net(ids), **EXACT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_stay_finite_in_half_precision(scheme: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        net = decoder(Single(scheme, windows=(2, None))).to(dtype)
        _, ids, documents = packed(LENGTHS)
        net(ids, torch.tensor([10]), documents=documents).float().logsumexp(-1).sum().backward()
        assert all(p.grad.isfinite().all() for p in net.parameters())


def test_a_part_of_the_table_alone() -> None:
    """What windowed layers ask for: some queries and some keys of a packed row."""
    documents = torch.tensor([[0, 0, 0, 1, 1, 2]])
    rule = MaskRule(6, 6, causal=True, query_documents=documents, key_documents=documents)
    whole = AttentionMask(rule).allowed
    part = rule.table(range(2, 5), range(1, 6), None)
    assert torch.equal(part, whole[:, :, 2:5, 1:6])
    assert not AttentionMask(rule).is_causal_alone
