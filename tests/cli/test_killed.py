"""Killed at random moments: old files remain, none is partial, and a repeated command succeeds.

Training has separate tests (training/test_resume.py). HEEDFUL_KILLS is the number of kills of each
command; twenty-five make more than two hundred kills.
"""

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import tree, write_recipe

KILLS = int(os.environ.get("HEEDFUL_KILLS", "2"))
COMMANDS = {
    "average": "average run out --overwrite",
    "export": "export hf marian out --overwrite",
    "import": "import hf theirs out --overwrite",
    "translate": "translate run -i lines -o out",
    "evaluate": "evaluate run --src lines --ref lines -o out",
    "embed": "embed run -i lines -o out.npy",
    "distill": "distill run small.json --out out --quiet",
    "optimize": "optimize out --src lines --backend ctranslate2 --precision int8 --threads 1 "
    "--for latency",
}


@pytest.fixture(scope="module")
def workdir(commands, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    write_recipe(folder / "recipe.json", training__max_steps=6)
    net = {"architecture": "marian", "num_encoder_layers": 1, "num_decoder_layers": 1}
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 32}
    write_recipe(folder / "marian.json", training__max_steps=1, model=net | sizes)
    write_recipe(folder / "small.json", training__max_steps=4, training__evaluate_every=2)
    (folder / "lines").write_text("1 2 3\n4 5\n" * 40)
    for line in (
        "train recipe.json --out run --quiet",
        "train marian.json --out marian --quiet",
        "export hf marian theirs",
    ):
        done = commands.run(*line.split(), cwd=folder)
        assert done.code == 0, done.err
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_killed_at_random_moments_of_every_command(
    commands, workdir, tmp_path, command: str
) -> None:
    words = COMMANDS[command].split()
    makes_run = command == "distill"
    out = tmp_path / next(word for word in words if word.startswith("out"))
    for entry in workdir.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    if command == "optimize":  # it writes into its model
        shutil.copytree(workdir / "run", out)
    whole = commands.run(*words, cwd=tmp_path)
    assert whole.code == 0, whole.err
    new = _content(out)
    draw = random.Random(f"{command} 1")
    for _ in range(KILLS):
        if makes_run:
            shutil.rmtree(out)
        before = tree(tmp_path / "run")
        killed = commands.run(
            *words, cwd=tmp_path, kill={"seconds": draw.uniform(0, whole.seconds)}
        )
        assert killed.signal or killed.code == 0, killed
        assert tree(tmp_path / "run") == before
        if makes_run:
            again = words
            if (out / "checkpoints").exists() or (out / "model.safetensors").exists():
                again = ["train", str(out), "--resume", "--quiet"]
        else:
            assert _content(out) == new, "old and new are alike, so all that there may be"
            again = words
        done = commands.run(*again, cwd=tmp_path)
        assert done.code == 0, done.err
        if not makes_run:
            assert _content(out) == new
        left = [path.name for path in tmp_path.rglob(".*.tmp")]
        assert left == []


def _content(path: Path) -> Any:
    """The files of a folder, without times and temporary files of killed processes."""
    if not path.is_dir():
        return path.read_bytes()
    return {
        name: content and re.sub(rb'"mtime_ns": \d+', b"", content)
        for name, content in tree(path).items()
        if ".tmp" not in name
    }
