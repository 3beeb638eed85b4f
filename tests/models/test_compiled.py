"""Compiled nets are traced once per bucket; nets export with lengths, and with the cache as an
argument."""

import pytest

import compiled_nets
from architectures import ARCHITECTURES
from commands import Commands
from heedful.backends.aot.private import unsupported_reason

NAMES = [*ARCHITECTURES, "schemes"]


@pytest.mark.parametrize("names", [NAMES[part::2] for part in range(2)], ids="-".join)
def test_nets_compile_once_per_bucket_and_export(commands: Commands, names: list[str]) -> None:
    """Requests of random lengths recompile nothing; nets and position schemes are exported."""
    if unsupported_reason() is not None:
        pytest.skip("this torch compiles no nets ahead of time")
    commands.call(compiled_nets.main, names)
