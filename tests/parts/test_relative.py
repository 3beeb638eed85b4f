"""ALiBi's and T5's scores: the authors' tables, transformers', and what a stack does with them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.parts.relative import Alibi, BucketScores, RelativeBuckets, alibi_slopes
from heedful.parts.relative import relative_buckets as buckets_of
from heedful.parts.rotary import Rotary
from single_stacks import Single, decoder, encoder

# ALiBi


def authors_slopes(num_heads: int) -> list[float]:
    """The rule of the paper's sec. 3 and of its code: a power of two has a geometric sequence that
    starts at and has the ratio 2^(-8/H); others are filled up with the odd terms of 2H's."""
    if math.log2(num_heads).is_integer():
        ratio = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [ratio ** (1 + i) for i in range(num_heads)]
    below = 2 ** math.floor(math.log2(num_heads))
    return authors_slopes(below) + authors_slopes(2 * below)[0::2][: num_heads - below]


@pytest.mark.parametrize("num_heads", range(1, 41))
def test_trap_17_slopes_of_every_number_of_heads(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert slopes.shape == (num_heads,)
    torch.testing.assert_close(slopes, torch.tensor(authors_slopes(num_heads)))


def test_trap_17_golden_slopes() -> None:
    """8, 12 and 40 heads, written out."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    twelve = eight + [2.0**-i for i in (0.5, 1.5, 2.5, 3.5)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(twelve))
    forty = [2.0 ** (-i / 4) for i in range(1, 33)]
    forty += [2.0 ** (-i / 8) for i in range(1, 17, 2)]
    torch.testing.assert_close(alibi_slopes(40), torch.tensor(forty))


def test_a_single_head_has_the_gentlest_slope() -> None:
    assert alibi_slopes(1).tolist() == [2.0**-8]


def scores_of(
    scheme: Alibi | RelativeBuckets | Rotary, heads: int, queries: int, keys: int, *, causal: bool
) -> Tensor:
    module = filled(scheme.build(heads, 4, causal=causal))
    rotation, scores = module(queries, keys, None, torch.zeros(1))
    assert rotation is None
    return scores.whole()


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return module


def test_alibi_table() -> None:
    """Minus the slope for every place between; two heads have slopes 1/16 and 1/256."""
    scores = scores_of(Alibi(), 2, 2, 4, causal=True)
    assert scores.shape == (1, 2, 2, 4)
    assert (-16 * scores[0, 0]).tolist() == [[2, 1, 0, 1], [3, 2, 1, 0]]
    assert (-256 * scores[0, 1]).tolist() == [[2, 1, 0, 1], [3, 2, 1, 0]]


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12, 40])
def test_attention_weights_are_those_of_bloom(num_heads: int) -> None:
    """Their scores grow from the first key where ours fall from the query: a softmax over the past
    cannot tell."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    length = 9
    theirs = bloom.build_alibi_tensor(torch.ones(1, length), num_heads, torch.float32)
    theirs = theirs.view(1, num_heads, 1, length).expand(-1, -1, length, -1)
    ours = scores_of(Alibi(), num_heads, length, length, causal=True)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    logits = torch.randn(1, num_heads, length, length, generator=torch.Generator().manual_seed(0))
    left, right = (
        (logits + scores).masked_fill(future, -torch.inf).softmax(-1) for scores in (ours, theirs)
    )
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_alibi_extends_past_every_length_that_was_trained_on() -> None:
    """No table ends: far scores are the slope times the distance, exactly."""
    scores = scores_of(Alibi(), 4, 1, 100_001, causal=True)
    assert scores[0, :, 0, 0].tolist() == [-100_000 * 2.0 ** (-2 * i) for i in range(1, 5)]


# T5's buckets

NUMBERS = [(32, 128), (8, 20), (4, 3), (32, 64), (16, 1000), (10, 37)]


@pytest.mark.parametrize(("num_buckets", "max_distance"), NUMBERS)
@pytest.mark.parametrize("causal", [True, False])
def test_trap_20_buckets_are_those_of_transformers(
    causal: bool, num_buckets: int, max_distance: int
) -> None:
    """For every distance to well past the last bucket, to both sides; theirs are key - query."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-2 * max_distance, 2 * max_distance + 1)[None]
    theirs = t5.T5Attention._relative_position_bucket(
        -distances, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    ours = buckets_of(distances, num_buckets=num_buckets, max_distance=max_distance, causal=causal)
    assert torch.equal(ours, theirs)
    assert set(ours.unique().tolist()) <= set(range(num_buckets))


def test_golden_buckets() -> None:
    """T5's own 32 and 128, as the rule says them by hand."""
    distances = torch.tensor([[0, 1, 7, 8, 11, 12, 15, 16, 127, 128, 5000]])
    both = {"num_buckets": 32, "max_distance": 128}
    two_sided = [0, 1, 7, 8, 8, 9, 9, 10, 15, 15, 15]
    assert buckets_of(distances, **both, causal=False)[0].tolist() == two_sided
    mirrored = buckets_of(-distances, **both, causal=False)[0].tolist()
    assert mirrored == [0, *(16 + bucket for bucket in two_sided[1:])]
    causal = [0, 1, 7, 8, 11, 12, 15, 16, 31, 31, 31]
    assert buckets_of(distances, **both, causal=True)[0].tolist() == causal
    assert not buckets_of(-distances, **both, causal=True).any()


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 20), st.integers(1, 200), st.booleans())
def test_buckets_grow_with_the_distance_and_none_is_out_of_range(
    half: int, more: int, causal: bool
) -> None:
    num_buckets, max_distance = 2 * half, 2 * half + more
    distances = torch.arange(2 * max_distance)[None]
    found = buckets_of(
        distances, num_buckets=num_buckets, max_distance=max_distance, causal=causal
    )[0]
    top = num_buckets if causal else half
    steps = found.diff()
    assert (steps >= 0).all()
    assert found[: top // 2].tolist() == list(range(top // 2))
    assert (found[max_distance:] == top - 1).all()


def test_bucket_scores_are_looked_up_by_head() -> None:
    """weight[bucket, head]: a table of T5, (num_buckets, H)."""
    scheme = RelativeBuckets(8, 20)
    scores = scores_of(scheme, 3, 4, 4, causal=False)
    assert scores.shape == (1, 3, 4, 4)
    for head in range(3):
        # Distances 0, 1 and 2, 3 in buckets 0, 1, 2, 2, those to the right 4 further on.
        row = [3 * bucket + head for bucket in (0, 5, 6, 6)]
        assert scores[0, head, 0].tolist() == row
        column = [3 * bucket + head for bucket in (0, 1, 2, 2)]
        assert scores[0, head, :, 0].tolist() == column


def test_trap_20_a_bucket_table_is_trained_and_saved_and_shared_by_all_layers() -> None:
    net = decoder(Single("buckets", windows=(None, None, 2)))
    tables = [m for m in net.modules() if isinstance(m, BucketScores)]
    assert len(tables) == 1
    assert net.state_dict()["decoder.relative.weight"].shape == (8, 2)
    net(torch.arange(12)[None]).sum().backward()
    distances = torch.arange(12)[None]
    reached = buckets_of(distances, num_buckets=8, max_distance=6, causal=True).unique()
    assert reached.tolist() == [0, 1, 2, 3, 4, 6, 7]  # no whole distance falls into the sixth
    assert torch.equal(tables[0].weight.grad.abs().amax(-1).nonzero().flatten(), reached)
    assert not Alibi().build(2, 4, causal=True).state_dict()


def test_trap_20_encoders_look_both_ways_and_decoders_do_not() -> None:
    single = Single("buckets")
    assert decoder(single).decoder.relative.causal
    assert not encoder(single).encoder.relative.causal


# Both


@pytest.mark.parametrize("scheme", [Alibi(), RelativeBuckets(8, 6)], ids=["alibi", "buckets"])
@pytest.mark.parametrize("causal", [True, False])
def test_trap_6_scores_of_a_cached_step_are_the_last_rows_of_the_whole(
    scheme: Alibi | RelativeBuckets, causal: bool
) -> None:
    whole = scores_of(scheme, 3, 9, 9, causal=causal)
    for queries in (1, 2, 9):
        step = scores_of(scheme, 3, queries, 9, causal=causal)
        assert torch.equal(step, whole[:, :, 9 - queries :])


@pytest.mark.parametrize("scheme", [Alibi(), RelativeBuckets(8, 6)], ids=["alibi", "buckets"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_part_of_the_scores_is_that_part_of_the_whole(
    scheme: Alibi | RelativeBuckets, causal: bool
) -> None:
    module = filled(scheme.build(3, 4, causal=causal))
    _, scores = module(5, 9, None, torch.zeros(1))
    whole = scores.whole()
    for rows, columns in (
        (range(5), range(9)),
        (range(1, 3), range(4, 9)),
        (range(4, 5), range(1)),
    ):
        part = whole[:, :, rows.start : rows.stop, columns.start : columns.stop]
        assert torch.equal(scores.part(rows, columns), part)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_slopes_stay_in_fp32_and_move_with_the_model(dtype: torch.dtype) -> None:
    """bf16 holds no distance above 256 to the place: scores are formed in fp32."""
    module = Alibi().build(12, 4, causal=True).to(dtype)
    scores = module(1, 3000, None, torch.zeros(1, dtype=dtype))[1].whole()
    assert scores.dtype == torch.float32
    assert len(scores[0, 0].unique()) == 3000
    assert module(2, 2, None, torch.zeros(1, device="meta"))[1].whole().device.type == "meta"


@pytest.mark.parametrize("scheme", ["alibi", "buckets"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_trap_2_scores_never_outweigh_a_mask(scheme: str, dtype: torch.dtype) -> None:
    """What is blocked stays blocked beside scores, in half precision too, and nothing is NaN."""
    net = decoder(Single(scheme)).to(dtype)
    if scheme == "buckets":
        nn.init.constant_(net.decoder.relative.weight, -20000.0)
    ids = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[1, :5] = (other[1, :5] + 1) % 13
    lengths = torch.tensor([0, 4])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            said, unmoved = (net(each, lengths, padding_side="left") for each in (ids, other))
        assert said.isfinite().all()
        assert torch.equal(said[1, 5:], unmoved[1, 5:])


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_that_cannot_be_told_apart_are_refused(causal: bool) -> None:
    least = 2 if causal else 4
    RelativeBuckets(least, 2).build(3, 8, causal=causal)
    for scheme in (RelativeBuckets(least - 1, 8), RelativeBuckets(8 * least, 8)):
        with pytest.raises(UserError, match=f"{scheme.num_buckets} buckets"):
            scheme.build(3, 8, causal=causal)
