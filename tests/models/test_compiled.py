"""Compiled nets are traced once per bucket; nets export with lengths, and with the cache as an
argument."""

import pytest

import compiled_nets
from architectures import ARCHITECTURES
from commands import Commands

NAMES = [*ARCHITECTURES, "schemes"]


@pytest.mark.parametrize("names", [NAMES[part::2] for part in range(2)], ids="-".join)
def test_nets_compile_once_per_bucket_and_export(commands: Commands, names: list[str]) -> None:
    """Requests of random lengths recompile nothing; nets and position schemes are exported."""
    commands.call(compiled_nets.main, names)
