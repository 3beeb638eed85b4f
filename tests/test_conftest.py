"""The suite's rules: skips are listed, and shapes are checked in the files of `SHAPES_CHECKED`."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

from checked_shapes import CHECKED_CALLS, SHAPES_CHECKED, check_shapes
from heedful.errors import UserError
from heedful.parts.attention import Attention
from heedful.parts.losses import cross_entropy
from heedful.parts.tokens import Tokens

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("code", "outcomes"),
    [
        ("def test_a(): pytest.skip('root may write anywhere')", {"skipped": 1}),
        ("def test_a(): pytest.skip('no time')", {"failed": 1}),
        ("@pytest.mark.skipif(True, reason='no time')\ndef test_a(): pass", {"errors": 1}),
        ("def test_a(): pytest.importorskip('no_such_package')", {"failed": 1}),
        ("pytest.importorskip('no_such_package')\ndef test_a(): pass", {"errors": 1}),
        ("@pytest.mark.xfail\ndef test_a(): assert False", {"xfailed": 1}),
    ],
)
def test_a_skip_that_is_not_listed_fails(
    pytester: pytest.Pytester, code: str, outcomes: dict[str, int]
) -> None:
    pytester.makepyfile(f"import pytest\n{code}")
    pytester.runpytest_inprocess("-p", "listed_skips").assert_outcomes(**outcomes)


def test_shapes_are_checked_by_the_file_of_a_test() -> None:
    """In functions, wherever they were imported, in methods and in dataclasses."""
    ids, positions = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    attention = Attention(4, 2)
    for enabled in (False, True, False):
        check_shapes(enabled)
        # Without the checks, the functions' own errors.
        kind: type[Exception] = TypeCheckError if enabled else UserError
        with pytest.raises(kind):
            cross_entropy(torch.zeros(3, 5), torch.zeros(4, dtype=torch.long))
        with pytest.raises(kind):
            attention(torch.zeros(3, 4))
        with pytest.raises(TypeCheckError) if enabled else nullcontext():
            Tokens(ids, positions)


def test_shapes_of_the_first_calls_of_each_test_are_checked() -> None:
    logits, wrong = torch.zeros(3, 5), torch.zeros(2, dtype=torch.long)
    for _ in range(2):  # tests
        check_shapes(True)
        for number in range(CHECKED_CALLS + 2):
            with pytest.raises(TypeCheckError if number < CHECKED_CALLS else UserError):
                cross_entropy(logits, wrong)
    check_shapes(False)


def test_every_file_with_checked_shapes_exists() -> None:
    tests = Path(__file__).parent
    assert [path for path in SHAPES_CHECKED if not (tests / path).exists()] == []
    checked = {path.split("/")[0] for path in SHAPES_CHECKED}
    assert checked >= {"parts", "models", "zoo", "data", "tasks", "generation", "evaluation"}
