"""Relative position biases of ALiBi and T5: reference tables, transformers, precision."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.errors import UserError
from heedful.parts.positions import AlibiBias, RelativePositionBias, alibi_slopes
from heedful.parts.positions import relative_buckets as buckets_of


def filled(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return module


def scores_of(module: nn.Module, queries: range, keys: int) -> Tensor:
    return filled(module)(torch.tensor([list(queries)]), torch.arange(keys)[None]).detach()


# ALiBi


def authors_slopes(num_heads: int) -> list[float]:
    """The rule of the paper's sec.

    3 and of its code: for a power of two H, a geometric sequence with first term and ratio
    2^(-8/H); other numbers of heads add odd terms of the next power's sequence.
    """
    if math.log2(num_heads).is_integer():
        ratio = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [ratio ** (1 + i) for i in range(num_heads)]
    below = 2 ** math.floor(math.log2(num_heads))
    return authors_slopes(below) + authors_slopes(2 * below)[0::2][: num_heads - below]


def test_alibi_slopes_of_any_number_of_heads() -> None:
    """8, 12 and 40 heads written out, and all up to 40 by the authors' rule."""
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(8).tolist() == eight
    twelve = eight + [2.0**-i for i in (0.5, 1.5, 2.5, 3.5)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(twelve))
    forty = [2.0 ** (-i / 4) for i in range(1, 33)] + [2.0 ** (-i / 8) for i in range(1, 17, 2)]
    torch.testing.assert_close(alibi_slopes(40), torch.tensor(forty))
    for num_heads in range(1, 41):
        expected = torch.tensor(authors_slopes(num_heads))
        torch.testing.assert_close(alibi_slopes(num_heads), expected)


def test_alibi_is_linear_in_the_distance_without_limit() -> None:
    """Two heads have slopes 1/16 and 1/256."""
    scores = scores_of(AlibiBias(2), range(2, 4), 4)
    assert scores.shape == (1, 2, 2, 4)
    for head, slope in ((0, 16), (1, 256)):
        assert (-slope * scores[0, head]).tolist() == [[2, 1, 0, 1], [3, 2, 1, 0]]
    far = scores_of(AlibiBias(4), range(100_000, 100_001), 100_001)
    assert far[0, :, 0, 0].tolist() == [-100_000 * 2.0 ** (-2 * i) for i in range(1, 5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_slopes_stay_in_fp32_and_move_with_the_positions(dtype: torch.dtype) -> None:
    """bf16 cannot represent distances above 256 exactly, so scores are in fp32.

    Slopes are no buffer: `to_empty` would leave them without values, and files would contain them.
    """
    module = AlibiBias(12).to(dtype)
    scores = module(torch.tensor([[2999]]), torch.arange(3000)[None])
    assert scores.dtype == torch.float32
    assert len(scores[0, 0].unique()) == 3000
    assert not module.state_dict()
    places = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    assert module(places, places).device.type == "meta"


def test_alibi_slopes_are_copied_to_a_device_once() -> None:
    copies: list[Any] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            copies.extend([func] if "_to_copy" in str(func) else [])
            return func(*args, **(kwargs or {}))

    module, places = AlibiBias(4), torch.arange(2)[None]
    with Recorded():
        for _ in range(3):
            module(places.to("meta"), places.to("meta"))
    assert len(copies) == 6 + 1  # of the places, and of the slopes
    assert module(places, places).isfinite().all()


# T5's buckets


@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (32, 64), (16, 1000), (10, 37)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_buckets_equal_transformers(causal: bool, num_buckets: int, max_distance: int) -> None:
    """For all distances beyond the last bucket, on both sides; in transformers they are key -
    query."""
    from transformers.models.t5 import modeling_t5 as t5

    distances = torch.arange(-2 * max_distance, 2 * max_distance + 1)[None]
    reference = t5.T5Attention._relative_position_bucket(
        -distances, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    ours = buckets_of(distances, num_buckets=num_buckets, max_distance=max_distance, causal=causal)
    assert torch.equal(ours, reference)
    assert set(ours.unique().tolist()) <= set(range(num_buckets))


def test_bucket_biases_are_per_head_trained_and_saved() -> None:
    """weight[bucket, head]: a table of T5, (num_buckets, H)."""
    module = RelativePositionBias(3, 8, 20, causal=False)
    scores = scores_of(module, range(4), 4)
    assert scores.shape == (1, 3, 4, 4)
    for head in range(3):
        # Distances 0, 1 and 2, 3 in buckets 0, 1, 2, 2, those to the right 4 further on.
        assert scores[0, head, 0].tolist() == [3 * bucket + head for bucket in (0, 5, 6, 6)]
        assert scores[0, head, :, 0].tolist() == [3 * bucket + head for bucket in (0, 1, 2, 2)]
    assert module.state_dict()["weight"].shape == (8, 3)
    module(torch.arange(4)[None], torch.arange(4)[None]).sum().backward()
    assert module.weight.grad[:, 0].tolist() == [4, 3, 3, 0, 0, 3, 3, 0]


@pytest.mark.parametrize("causal", [True, False])
def test_numbers_of_buckets_that_are_too_small_or_large_are_refused(causal: bool) -> None:
    least = 2 if causal else 4
    RelativePositionBias(3, least, 2, causal=causal)
    for count in (least - 1, 8 * least):
        with pytest.raises(UserError, match=f"num_buckets {count} with"):
            RelativePositionBias(3, count, 8, causal=causal)


@pytest.mark.parametrize("kind", ["alibi", "causal", "both ways"])
def test_biases_of_some_queries_are_rows_of_the_full_bias(kind: str) -> None:
    buckets = RelativePositionBias(3, 8, 6, causal=kind == "causal")
    module = AlibiBias(3) if kind == "alibi" else buckets
    whole = scores_of(module, range(9), 9)
    for queries in (range(8, 9), range(5, 9), range(2, 4)):
        part = scores_of(module, queries, 9)
        assert torch.equal(part, whole[:, :, queries.start : queries.stop])
