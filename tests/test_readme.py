"""The README's commands and Python run as they are written, on small data, for a few steps."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# What makes a run short, by recipe; added to every `heedful train` of the README that starts one.
STEPS = ("training.max_steps=4", "training.evaluate_every=2", "model.d_model=16", "model.d_ff=16")
ONE_STACK = (*STEPS, "model.num_heads=2", "model.num_layers=1")
SHORT = {
    "translation": (*STEPS, "model.num_encoder_layers=1", "model.num_decoder_layers=1"),
    "rhyme": (*ONE_STACK, "objective.sample_tokens=5"),
    "language-model": (*ONE_STACK, "tokenizer.vocab_size=280", "objective.sample_tokens=5"),
    "masked-lm": (*ONE_STACK, "tokenizer.vocab_size=60"),
    "classification": (*ONE_STACK, "data.valid_size=8"),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def written() -> list[str]:
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
    labelled = "".join(f"{line}\t{'far' if 'dog' in line else 'near'}\n" for line in pairs)
    (folder / "my.tsv").write_text(labelled, encoding="utf-8")
    return folder


def shortened(command: str) -> str:
    """A command that takes long, with what makes it short; others as they are."""
    if command.startswith("heedful optimize"):
        return f"{command} --backend eager --backend ctranslate2"  # to compile takes a minute
    if command.startswith("heedful verify"):
        return f"{command} --no-overfit"
    found = re.match(r"heedful train (\S+)", command)
    if found is None or "--resume" in command:
        return command
    return " ".join([command, *(f"--set {setting}" for setting in SHORT[found[1]])])


def in_a_shell(command: str, folder: Path) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    words = ["bash", "-c", f"set -o pipefail; {command}"]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def forked(command: str, folder: Path, commands: Commands) -> str:
    """As in a shell, in a process that is forked from one that has imported torch."""
    found = re.fullmatch(r"(?:echo ('.*') \| )?heedful (.*)", command)
    assert found is not None, command
    stdin = "".join(f"{text}\n" for text in shlex.split(found[1] or ""))
    ended = commands.run(*shlex.split(found[2]), stdin=stdin.encode(), cwd=folder)
    assert ended.code == 0, f"{command}\n{ended.out}\n{ended.err}"
    return ended.out


def test_make_targets_exist() -> None:
    targets = [command for command in written() if command.startswith("make ")]
    assert {"make demo", "make test"} <= set(targets)
    for target in targets:
        in_a_shell(f"{target} --dry-run", ROOT)


def test_commands_and_library_run(folder: Path, commands: Commands) -> None:
    ours = [c for c in written() if "heedful " in c and ".venv" not in c]
    for recipe in SHORT:
        assert any(f"heedful train {recipe} " in command for command in ours), recipe
    outputs = {command: forked(shortened(command), folder, commands) for command in ours}
    for command, out in outputs.items():
        if "heedful translate" in command:
            assert out.count("\n") == 1
        elif "heedful train translation" in command:
            assert "20 of data.train" in out, "a tenth is held out of few pairs"
        elif "heedful classify" in command:
            assert out in ("far\n", "near\n")
        elif "heedful fill" in command:
            assert " rides" in out.splitlines()[0]
    assert (folder / "exported/model.safetensors").is_file()
    assert (folder / "runs/back/model.safetensors").is_file()
    (code,) = blocks("python")
    out = in_a_shell(f"{sys.executable} - <<'PYTHON'\n{code}\nPYTHON", folder)
    assert "causality" in out
    (line,) = [command for command in written() if ".venv/bin/heedful" in command]
    line = line.replace(".venv/bin/heedful", "heedful").replace("runs/demo", "runs/mine")
    assert in_a_shell(line, folder).count("\n") == 1
