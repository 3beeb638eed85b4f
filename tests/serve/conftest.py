"""One server for all tests of the routes."""

from collections.abc import Iterator
from typing import Any

import pytest

from running_server import running, tiny_models


@pytest.fixture(scope="package")
def served() -> Iterator[Any]:
    with running(tiny_models(), max_queue=64) as server:
        yield server
