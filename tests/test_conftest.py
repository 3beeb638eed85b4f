"""The suite's rules: skips are listed, and shapes are checked in the files named in conftest.py."""

from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError, config

import conftest
from heedful.errors import UserError
from heedful.parts.losses import cross_entropy

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


def test_shapes_are_checked_by_the_file_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = torch.zeros(3, 5), torch.zeros(4, dtype=torch.long)
    with pytest.raises(UserError, match="the loss needs logits"):  # the function's own error
        cross_entropy(logits, targets)
    monkeypatch.setattr(config, "jaxtyping_disable", False)
    with pytest.raises(TypeCheckError):
        cross_entropy(logits, targets)


def test_every_file_with_checked_shapes_exists() -> None:
    tests = Path(__file__).parent
    assert [path for path in conftest.SHAPES_CHECKED if not (tests / path).exists()] == []
    checked = {path.split("/")[0] for path in conftest.SHAPES_CHECKED}
    assert checked == set(conftest.ANNOTATED)
