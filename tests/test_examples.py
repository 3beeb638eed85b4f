"""The scripts of examples/: each trains and exchanges a model of its own, and tunes a given one."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import heedful

FOLDER = Path(__file__).parents[1] / "examples"
# The steps that a test waits for, and a line that the trained model prints.
SCRIPTS = {
    "translator": (200, "one nine eight four"),
    "language_model": (150, " sat on the mat."),
    "classifier": (100, "label='positive'"),
}


def test_every_script_is_run() -> None:
    by_others = {"onnx_greedy"}  # tests/export/test_onnx.py
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SCRIPTS, *by_others}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(f"script_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    steps, line = SCRIPTS[name]
    script.main(tmp_path / "new", steps=steps)
    printed = capsys.readouterr().out
    assert " 0 failed" in printed
    assert line in printed
    script.main(tmp_path / "tuned", tmp_path / "new" / "hf", steps=2)
    assert " 0 failed" in capsys.readouterr().out
    assert (
        heedful.load(tmp_path / "tuned" / name).kind == heedful.load(tmp_path / "new" / name).kind
    )
