"""Some tests run with the shapes of the annotated code checked (jaxtyping and beartype)."""

import os
import tempfile
from zlib import crc32

import pytest
from hypothesis import settings
from jaxtyping import config, install_import_hook

from commands import Commands, run_whole

CHECKED = (
    "parts",
    "models",
    "zoo",
    "data",
    "tasks",
    "generation",
    "evaluation",
    "insight",
    "engines",
    "inference",
    "export",
)
# Prepared data of the tests are the tests' own.
os.environ["HEEDFUL_CACHE"] = tempfile.mkdtemp(prefix="heedful-tests-")
install_import_hook([f"heedful.{room}" for room in CHECKED], "beartype.beartype")
settings.register_profile("quick", max_examples=10)  # make quick
# Files whose tests take longest, each up to a minute.
LONGEST = (
    *("test_compiled_forms.py", "test_compiled.py", "test_benchmarks.py", "test_readme.py"),
    *("test_optimizing.py", "test_ctranslate2_spec.py", "test_fuzz.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, and stay together: workers take from each other's ends, so that none
    begins when the others have nothing left, and what a file makes once is not made twice."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A quarter of the tests, by their names, run whole, and with the shapes of what they call
    checked, which doubles the time.

    Not the longest, which call what the tests of its own room check.
    """
    is_whole = crc32(item.nodeid.encode()) % 4 == 0 and item.path.name not in LONGEST
    config.update("jaxtyping_disable", not is_whole)
    run_whole(is_whole or item.path.name in ("test_report.py", "test_files.py"))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize` measures each setting on its texts once a round, and not again for a while."""
    monkeypatch.setattr("heedful.inference.optimizing._SHORTEST", 0.0)


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    return Commands(tmp_path_factory.mktemp("commands"))
