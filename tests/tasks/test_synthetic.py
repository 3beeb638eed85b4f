"""Copy, reverse and sort: targets by the rule, distinct and unseen sources."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import tiny
from heedful.config import parse_recipe
from heedful.errors import UserError
from heedful.tasks.synthetic import Pair, Synthetic


def generate(name: str, count: int, *, exclude: Any = (), **sizes: Any) -> list[Pair]:
    """The training pairs of a recipe with these sizes."""
    recipe = parse_recipe(tiny(task=name, data={"generated": sizes}))
    return Synthetic(recipe).generate_pairs("train", count, set(exclude))


@given(
    name=st.sampled_from(["copy", "reverse", "sort"]),
    count=st.integers(0, 60),
    num_symbols=st.integers(4, 30),
    min_length=st.integers(1, 5),
    spread=st.integers(2, 6),
    seed=st.integers(0, 2**32),
)
def test_sources_keep_to_the_sizes_and_targets_to_the_rule(
    name: str, count: int, num_symbols: int, min_length: int, spread: int, seed: int
) -> None:
    sizes: dict[str, Any] = {"num_symbols": num_symbols, "min_length": min_length}
    max_length = min_length + spread
    pairs = generate(name, count, **sizes, max_length=max_length, seed=seed)
    assert len({src for src, _ in pairs}) == len(pairs) == count
    for src, tgt in pairs:
        source = [int(word) for word in src.split(" ")]
        assert src == " ".join(str(symbol) for symbol in source)
        assert min_length <= len(source) <= max_length
        assert all(0 <= symbol < num_symbols for symbol in source)
        expected = {"copy": source, "reverse": source[::-1], "sort": sorted(source)}[name]
        assert [int(word) for word in tgt.split(" ")] == expected
    assert pairs == generate(name, count, **sizes, max_length=max_length, seed=seed)


def test_every_symbol_and_every_length_is_sampled() -> None:
    pairs = generate("copy", 2_000, min_length=5, max_length=30, seed=0)
    assert {len(src.split()) for src, _ in pairs} == set(range(5, 31))
    assert {word for src, _ in pairs for word in src.split()} == {str(i) for i in range(10)}


def test_other_seeds_give_other_pairs() -> None:
    assert generate("copy", 50, seed=1) != generate("copy", 50, seed=2)


def test_pairs_stay_the_same_from_version_to_version() -> None:
    pairs = generate("reverse", 2, min_length=4, max_length=5, seed=0)
    assert pairs == [("7 4 2 5 4", "4 5 2 4 7"), ("9 3 8 2 1", "1 2 8 3 9")]


@given(seed=st.integers(0, 1000), num_train=st.integers(0, 14))
def test_excluded_sources_are_never_sampled_even_when_all_others_are(
    seed: int, num_train: int
) -> None:
    sizes: dict[str, Any] = {"num_symbols": 2, "min_length": 1, "max_length": 3}
    train = {src for src, _ in generate("copy", num_train, **sizes, seed=seed)}
    held_out = {src for src, _ in generate("copy", 14 - num_train, **sizes, seed=0, exclude=train)}
    assert not train & held_out
    assert len(train | held_out) == 2 + 4 + 8


def test_a_space_that_is_too_small_is_refused_with_the_numbers() -> None:
    sizes: dict[str, Any] = {"num_symbols": 2, "min_length": 3, "max_length": 3}
    with pytest.raises(UserError, match=r"9 unseen .* 2 symbols at lengths 3 to 3 make 8.* 0 are"):
        generate("copy", 9, **sizes, seed=0)
    exclude = {"0 0 0", "1 1 1"}
    with pytest.raises(UserError, match=r"7 unseen .* make 8, of which 2 are excluded"):
        generate("copy", 7, **sizes, seed=0, exclude=exclude)
    assert len(generate("copy", 6, **sizes, seed=0, exclude=exclude)) == 6
    with pytest.raises(UserError, match="is above max_length"):
        generate("copy", 1, min_length=5, max_length=4)
