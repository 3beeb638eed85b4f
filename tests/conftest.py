"""Some tests run with the shapes of the annotated code checked (jaxtyping and beartype)."""

import os
import tempfile
from zlib import crc32

import pytest
from hypothesis import settings
from jaxtyping import config, install_import_hook

from commands import Commands

CHECKED = (
    "parts",
    "models",
    "zoo",
    "data",
    "tasks",
    "generation",
    "evaluation",
    "engines",
    "insight",
    "engines",
    "inference",
    "export",
)
# Prepared data of the tests are the tests' own.
os.environ["HEEDFUL_CACHE"] = tempfile.mkdtemp(prefix="heedful-tests-")
install_import_hook([f"heedful.{room}" for room in CHECKED], "beartype.beartype")
settings.register_profile("quick", max_examples=10)  # make quick


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Shapes are checked in a quarter of the tests, by their names: the checks double the time."""
    config.update("jaxtyping_disable", bool(crc32(item.nodeid.encode()) % 4))


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()
