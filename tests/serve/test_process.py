"""The command `heedful serve`: refused arguments, and a process that is killed and reloaded."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from types import SimpleNamespace
from urllib import error, request

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from backend_models import model_of
from commands import Commands, assert_refused, default_signals
from heedful.cli.serve import _directories_by_name, serve
from heedful.serve.settings import Settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "gpt"
    model_of("gpt2").save(directory)
    return directory


def test_a_directory_may_have_an_equals_sign_in_its_name(tmp_path: Path) -> None:
    """It was read as NAME=DIR, of which there is no DIR."""
    directory = tmp_path / "size=2"
    directory.mkdir()
    assert _directories_by_name([str(directory)]) == {"size=2": directory}
    assert _directories_by_name([f"a={directory}"]) == {"a": directory}
    assert _directories_by_name([f"a={tmp_path}"]) == {"a": tmp_path}


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


@pytest.mark.parametrize(("given", "keeps"), [(None, False), (5, True), (5, False)])
def test_prefix_tokens_without_a_model_that_keeps_them_are_noted(
    given: int | None,
    keeps: bool,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry = SimpleNamespace(models={"a": SimpleNamespace(keeps_prefixes=keeps)})
    monkeypatch.setattr("heedful.serve.server.serve", lambda *a: a[-1]("the address", registry))
    monkeypatch.setattr("heedful.cli.serve._log_to_stderr", lambda: None)
    settings = Settings(prefix_tokens=given)
    serve(models=[str(model)], host="127.0.0.1", port=0, check=False, settings=settings)
    has_note = "note: --prefix-tokens has no effect" in capsys.readouterr().err
    assert has_note == (given is not None and not keeps)


def start(model: Path, port: int, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "heedful", "serve", str(model), "--port", str(port), *options]
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
    for _ in range(1_000):
        try:
            with request.urlopen(sent, timeout=20) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])
        except (OSError, HTTPException) as refused:  # no connection, or a part of an answer
            if isinstance(refused, error.HTTPError) and refused.code != 503:
                raise
        time.sleep(0.05)
    raise AssertionError("no answer")


def test_a_server_is_reloaded_and_ends_when_told(model: Path) -> None:
    port = free_port()
    process = start(model, port, "--cors", "https://a.example", "--cors", "https://b.example")
    text = ask(port)
    assert text == model_of("gpt2").generate("the cat", max_new_tokens=5)
    for origin in ("https://a.example", "https://b.example"):
        page = request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Origin": origin})
        with request.urlopen(page, timeout=20) as answer:
            assert answer.headers["Access-Control-Allow-Origin"] == origin
    process.send_signal(signal.SIGHUP)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "opened again: gpt" in line:
            break
    assert ask(port) == text
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    lines += err.splitlines()
    assert process.returncode == 0
    assert "Traceback" not in "".join(lines)
    assert any("POST /v1/completions 200 model=gpt prompt=2 new=5" in line for line in lines)
    assert "the cat" not in "".join(lines)


@pytest.mark.benchmarks
def test_clients_that_try_again_lose_nothing_when_a_server_is_killed(model: Path) -> None:
    port, stop = free_port(), threading.Event()
    expected = model_of("gpt2").generate("the cat", max_new_tokens=5)
    process, count = start(model, port), 0
    ask(port)

    def client() -> list[str]:
        texts = []
        while not stop.is_set():
            texts.append(ask(port))
        return texts

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        for _ in range(3):
            time.sleep(1)
            process.kill()
            process.communicate()
            process = start(model, port)
            ask(port)
        stop.set()
        texts = [text for answers in clients for text in answers.result()]
        count = len(texts)
    process.terminate()
    process.communicate(timeout=20)
    assert count > 20
    assert {*texts} == {expected}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
