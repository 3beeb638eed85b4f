"""Compiled nets are compiled once a bucket, and nets export with the cache as an argument."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "support" / "compiled_nets.py"


@pytest.mark.parametrize("kind", ["decoder", "two_stacks"])
@pytest.mark.parametrize("what", ["serve", "export"])
def test_trap_32_nets_compile_once_a_bucket_and_export(what: str, kind: str) -> None:
    """200 requests of random lengths recompile nothing; every position scheme exports."""
    command = [sys.executable, str(PROGRAM), what, kind]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
