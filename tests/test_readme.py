"""The README's commands and Python run as they are written, on small data, for a few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What makes a run short; added to every `heedful train` of the README that starts one.
SHORT = (
    "--set training.max_steps=4 --set training.evaluate_every=2 --set tokenizer.vocab_size=60 "
    "--set data.hold_out=8 --set model.d_model=16 --set model.d_ff=16 "
    "--set model.num_encoder_layers=1 --set model.num_decoder_layers=1"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("bash")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README speaks of, and the demo's as a copy of the run."""
    folder = tmp_path_factory.mktemp("readme")
    words = ["a", "man", "dog", "rides", "runs", "bicycle", "the", "one", "two", "red"]
    pairs = [f"{a} {b} {c}." for a in words for b in words for c in words[:2]]
    for name in ("my.en", "test.en"):
        (folder / name).write_text("".join(f"{line}\n" for line in pairs), encoding="utf-8")
    for name in ("my.de", "test.de"):
        (folder / name).write_text("".join(f"{line[::-1]}\n" for line in pairs), encoding="utf-8")
    return folder


def run(command: str, folder: Path) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_make_targets_exist() -> None:
    targets = [command for command in commands() if command.startswith("make ")]
    assert {"make demo", "make test"} <= set(targets)
    for target in targets:
        run(f"{target} --dry-run", ROOT)


def test_commands_and_library_run(folder: Path) -> None:
    ours = [c for c in commands() if "heedful " in c and ".venv" not in c]
    assert any("heedful train translation" in command for command in ours)
    for command in ours:
        if "heedful train" in command and "--resume" not in command:
            command = f"{command} {SHORT}"
        out = run(command, folder)
        if "heedful translate" in command:
            assert out.count("\n") == 1
    (code,) = blocks("python")
    out = run(f"{sys.executable} - <<'PYTHON'\n{code}\nPYTHON", folder)
    assert "causality" in out


def test_the_demos_own_line_runs_on_any_model(folder: Path) -> None:
    (line,) = [command for command in commands() if ".venv/bin/heedful" in command]
    line = line.replace(".venv/bin/heedful", "heedful").replace("runs/demo", "runs/mine")
    assert run(line, folder).count("\n") == 1


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`(tests/\S+\.py)`", README):
        assert (ROOT / target).exists(), target
