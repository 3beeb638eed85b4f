"""The command `heedful serve`: refused arguments, and a process that is killed and reloaded."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib import error, request

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from backend_models import model_of
from commands import Commands, assert_refused, default_signals


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "gpt"
    model_of("gpt2").save(directory)
    return directory


def test_what_cannot_be_served_is_refused(commands: Commands, model: Path, tmp_path: Path) -> None:
    keys, empty = tmp_path / "keys", tmp_path / "empty"
    empty.mkdir()
    assert_refused(commands.run("serve", tmp_path / "none"), "is not a directory")
    assert_refused(commands.run("serve", model, model), "two models are named gpt")
    assert_refused(commands.run("serve", f"a={empty}", "--check"), "config.json does not exist")
    assert_refused(commands.run("serve", empty, "--port", 0), "config.json does not exist")
    assert_refused(commands.run("serve", model, "--keys", keys), "cannot read the keys")
    for text, reason in (("", "has no key"), ("short", "line 1: not a key"), ("a b", "line 1")):
        keys.write_text(text)
        assert_refused(commands.run("serve", model, "--keys", keys, "--check"), reason)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = commands.run("serve", model, "--port", port)
        assert_refused(refused, f"cannot listen to 127.0.0.1 port {port}")
    assert_refused(commands.run("serve", model, "--host", "no such host"), "cannot listen")
    assert_refused(commands.run("serve", model, "--backend", "ctranslate2"), "has no backend")
    done = commands.run("serve", model, f"b={model}", "--check")
    assert (done.code, done.out.count("LanguageModel(gpt2")) == (0, 2)


def start(model: Path, port: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "heedful", "serve", str(model), "--port", str(port)]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,  # noqa: PLW1509
    )


def ask(port: int) -> str:
    """An answer, by a client that tries again."""
    body = {"model": "gpt", "prompt": "the cat", "temperature": 0, "max_tokens": 5}
    sent = request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    for _ in range(400):
        try:
            with request.urlopen(sent, timeout=20) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])
        except OSError as refused:  # no connection, or an answer that is none
            if isinstance(refused, error.HTTPError) and refused.code != 503:
                raise
        time.sleep(0.05)
    raise AssertionError("no answer")


def test_a_killed_server_is_started_again_and_ends_when_told(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    first = start(model, port)
    text = ask(port)
    first.kill()
    first.communicate()
    second = start(model, port)
    assert ask(port) == text == model_of("gpt2").generate("the cat", max_new_tokens=5)
    second.send_signal(signal.SIGHUP)
    assert second.stderr is not None
    lines = []
    for line in second.stderr:
        lines.append(line)
        if "opened again: gpt" in line:
            break
    assert ask(port) == text
    second.send_signal(signal.SIGTERM)
    _, err = second.communicate(timeout=20)
    lines += err.splitlines()
    assert second.returncode == 0
    assert "Traceback" not in "".join(lines)
    assert any("POST /v1/completions 200 model=gpt prompt=2 new=5" in line for line in lines)
    assert "the cat" not in "".join(lines)
