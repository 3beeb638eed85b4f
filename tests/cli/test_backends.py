"""Backends on the command line: chosen automatically, by name, or refused in one line."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from backend_models import TEXTS, saved
from commands import Commands, assert_refused
from heedful.backends.manifest import Manifest

LINES = ("\n".join(TEXTS) + "\n").encode()


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Path:
    """Directories of three kinds of models, with their conversions."""
    root: Path = tmp_path_factory.mktemp("models")
    saved("vaswani2017", root / "translator", ("float32", "int8"))
    saved("gpt2", root / "novel")
    saved("bert", root / "classes", head="classify")
    return root


@pytest.mark.parametrize(
    ("command", "name", "more"),
    [
        ("translate", "translator", ("--beam-size", 1, "--max-new-tokens", 12, "--scores")),
        ("generate", "novel", ("--max-new-tokens", 12, "--json")),
        ("generate", "novel", ("--max-new-tokens", 12)),
        ("classify", "classes", ("--scores",)),
    ],
)
def test_a_command_prints_the_same_with_every_backend(
    commands: Commands, models: Path, command: str, name: str, more: tuple[Any, ...]
) -> None:
    messages = []
    for backend in ("auto", "ctranslate2", "eager"):
        done = commands.run(command, models / name, *more, "--backend", backend, stdin=LINES)
        assert done.code == 0, done.err
        assert "eager" not in done.err
        # The last digits of scores may differ.
        messages.append(re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.2f}", done.out))
    assert messages[0] == messages[1] == messages[2]
    assert len(set(messages[0].splitlines())) > 1


def test_embeddings_are_close(commands: Commands, models: Path, tmp_path: Path) -> None:
    import numpy as np

    for backend in ("auto", "eager"):
        out = tmp_path / f"{backend}.npy"
        done = commands.run(
            "embed", models / "classes", "-o", out, "--backend", backend, stdin=LINES
        )
        assert done.code == 0, done.err
    actual = [np.load(tmp_path / f"{backend}.npy") for backend in ("auto", "eager")]
    assert np.allclose(*actual, atol=1e-4)


def test_unsupported_requests_run_eager_with_one_note(commands: Commands, models: Path) -> None:
    options = ("--min-p", 0.1, "--seed", 1, "--max-new-tokens", 8)
    done = commands.run("generate", models / "novel", *options, stdin=LINES)
    eager = commands.run("generate", models / "novel", *options, "--backend", "eager", stdin=LINES)
    assert done.out == eager.out
    assert done.err.count("--min-p") == 1
    outcome = commands.run(
        "generate", models / "novel", "--temperature", 1, "--max-new-tokens", 8, stdin=LINES
    )
    assert (outcome.code, outcome.err) == (0, "")  # without a seed the backend samples


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "compiled"), "has no backend compiled"),
        (("--backend", "quick"), "backend must be auto, eager"),
        (("--precision", "bfloat16", "--backend", "ctranslate2"), "only in float32, int8"),
        (("--threads", 9_999), "threads must be from 1 to"),
    ],
)
def test_a_missing_backend_is_one_line(
    commands: Commands, models: Path, options: tuple[Any, ...], words: str
) -> None:
    done = commands.run("translate", models / "translator", *options, stdin=LINES)
    assert_refused(done, words)


def test_a_damaged_conversion_is_reported_and_auto_runs_the_net(commands, models, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models / "translator", model)
    vocabulary = model / "backends" / "ctranslate2" / "int8" / "shared_vocabulary.json"
    arguments = ("translate", model, "--beam-size", 1, "--precision", "int8")
    for text in ("[", "[]", '["a"]'):
        vocabulary.write_text(text)
        assert_refused(commands.run(*arguments, stdin=LINES), "int8")
    manifest = Manifest.read(models / "translator")
    manifest.with_files(models / "translator" / "backends").write(model)
    assert_refused(commands.run(*arguments, stdin=LINES), vocabulary, "is missing or has changed")
    weights = model / "backends" / "ctranslate2" / "float32" / "model.bin"
    assert "eager" not in commands.run(*arguments[:4], stdin=LINES).err
    weights.write_bytes(weights.read_bytes()[:-1])
    done = commands.run(*arguments[:4], stdin=LINES)
    assert done.code == 0
    assert "runs eager" in done.err


def test_info_shows_the_backends(commands: Commands, models: Path) -> None:
    done = commands.run("info", models / "translator")
    assert "ctranslate2 4" in done.out
    assert "(float32, int8)" in done.out


def test_a_manifest_without_required_facts_is_refused(commands: Commands, tmp_path: Path) -> None:
    saved("vaswani2017", tmp_path)
    path = tmp_path / "config.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    del description["model"]["max_length"]
    path.write_text(json.dumps(description), encoding="utf-8")
    refused = commands.run("translate", tmp_path, stdin=b"a\n")
    assert_refused(refused, "not written by heedful: no model.max_length")
