"""Some of the inputs of `make fuzz`, which says the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_wrong_and_hostile_input_is_one_line_and_writes_nothing() -> None:
    script = ROOT / "benchmarks" / "fuzz.py"
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, "--count", "120", "--seed", "5"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "as nobody" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "120 inputs: no fault\n", done.stdout[-4_000:] + done.stderr[-4_000:]
