"""Where shapes are checked and the disk is waited for, in which order tests run, and the fixtures.

Skips that are not listed fail (support/listed_skips.py).
"""

import gc
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Torch is imported by the functions below: the process that deals tests to workers needs none of
# it, and begins with this file.
gc.disable()  # until all tests are collected: imports leave nothing to be freed
pytest_plugins = ["listed_skips"]
# Prepared data of the tests are the tests' own.
os.environ["HEEDFUL_CACHE"] = tempfile.mkdtemp(prefix="heedful-tests-")
# What is compiled is kept from one run of the tests to the next: by Inductor, and the kernels of
# trainings, whose names are hashes of all that they depend on.
_KEPT = Path.home() / ".cache" / "heedful-tests"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_KEPT / "inductor"))
_KERNELS = Path(os.environ["HEEDFUL_CACHE"]) / "kernels"
if (_KEPT / "kernels").is_dir():
    shutil.copytree(_KEPT / "kernels", _KERNELS)
settings.register_profile("quick", max_examples=10)  # make quick
# Files whose tests take longest, each up to a minute.
LONGEST = (
    *("test_compiled_forms.py", "test_compiled.py", "test_benchmarks.py", "test_readme.py"),
    *("test_block_compiler.py", "test_optimize.py", "test_hostile_input.py"),
)


def pytest_collection(session: pytest.Session) -> None:
    """Where all tests run, one of two workers imports their files from the last to the first.

    Python and pytest compile a file where that was not done before, and keep the result: each
    worker then compiles a half of the files, and reads those that the other has compiled.
    """
    tests = Path(__file__).parent
    odd = os.environ.get("PYTEST_XDIST_WORKER", "gw0").endswith(tuple("13579"))
    if not odd or [Path(p).absolute() for p in session.config.args] != [tests]:
        return
    files = sorted(tests.rglob("test_*.py"), reverse=True)
    for folder in {file.parent for file in files}:
        sys.path.insert(0, str(folder))
    for file in files:
        with suppress(Exception, pytest.skip.Exception):  # the collection meets them again
            importlib.import_module(file.stem)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest come first, and stay together: workers take from each other's ends, so that none
    begins when the others have nothing left, and what a file makes once is not made twice."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Later garbage collections do not visit what imports and the collection of tests have made."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Keep kernels that were compiled, where there is a home for them."""
    kept = _KEPT / "kernels"
    with suppress(OSError):
        for built in _KERNELS.glob("*.so"):
            if not (kept / built.name).exists():
                kept.mkdir(parents=True, exist_ok=True)
                copy = shutil.copy(built, _KEPT / f"{os.getpid()}.so")  # others may do the same
                Path(copy).replace(kept / built.name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes in tests of `SHAPES_CHECKED`; sync files in those marked `whole`."""
    from checked_shapes import SHAPES_CHECKED, check_shapes
    from commands import run_whole

    file = item.path.relative_to(Path(__file__).parent).as_posix()
    listed = any(file == path or file.startswith(f"{path}/") for path in SHAPES_CHECKED)
    check_shapes(listed)
    run_whole(item.get_closest_marker("whole") is not None)


_libraries: list[Any] = []  # kernels that a test has loaded


@pytest.fixture(autouse=True)
def _kernels_from_the_first_training_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test uses kernels if it trains, and not because another one did before."""
    from heedful.kernels import library as kernels

    if kernels.loaded is not None:
        _libraries[:] = [kernels.loaded]
        kernels.loaded = None
    if _libraries:
        monkeypatch.setattr(kernels, "_open", lambda: _libraries[0])


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize` measures each setting on its texts once a round, and not again for a while."""
    monkeypatch.setattr("heedful.deploy.measure._MIN_SECONDS", 0.0)


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    from commands import Commands

    return Commands(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="session")
def served() -> Iterator[Any]:
    """One server for all tests of the routes."""
    from running_server import running, tiny_models

    with running(tiny_models(), max_queue=64) as server:
        yield server
