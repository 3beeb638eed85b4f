"""Compiled nets are traced once per bucket, and nets export with the cache as an argument."""

import subprocess
import sys
from pathlib import Path

import pytest

from architectures import ARCHITECTURES

PROGRAM = Path(__file__).parent.parent / "support" / "compiled_nets.py"
NAMES = [*ARCHITECTURES, "schemes"]


@pytest.mark.parametrize("names", [NAMES[part::2] for part in range(2)], ids="-".join)
def test_nets_compile_once_a_bucket_and_export(names: list[str]) -> None:
    """Requests of random lengths recompile nothing; every position scheme exports."""
    command = [sys.executable, str(PROGRAM), *names]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
