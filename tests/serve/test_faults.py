"""Hostile requests, limits, and clients that go: the answer is one line, and nobody else waits."""

import asyncio
import errno
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

import httpx

from heedful.cli.serve import LogLines
from heedful.errors import UserError
from heedful.serve.connections import report_loop_errors
from heedful.serve.errors import HttpError
from heedful.serve.guard import Guard, info_of
from heedful.serve.hosts import AllowedHosts
from heedful.serve.metrics import Metrics
from heedful.serve.models import ServedModel
from running_server import Keys, Server, Settings, model_of, running

COMPLETION = {"model": "gpt", "prompt": "the cat", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def client(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=20) as opened:
        yield opened


def raw(served: Any, data: bytes, wait: float = 10) -> bytes:
    """All that the server answers to some bytes, until it closes the connection."""
    with socket.create_connection((served.host, served.port), timeout=wait) as connection:
        connection.sendall(data)
        answer = b""
        try:
            while chunk := connection.recv(65_536):
                answer += chunk
        except ConnectionResetError:  # the server did not read all
            pass
        return answer


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if not any(line.lower().startswith(("content-length", "transfer")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not JSON"),
        (b"", "send JSON"),
        (b"[1]", "the body"),
        (b"null", "the body"),
        (b"\xff\xfe", ""),
        (b"[" * 100_000, ""),
        (b'{"a":' * 50_000, ""),
        (b'{"model": "gpt", "prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"model": "gpt", "prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"model": "gpt", "prompt": "a", "max_tokens": 1%s}' % (b"0" * 5_000), "not JSON"),
        (b'{"model": "gpt", "prompt": "\\ud800"}', "prompt"),
        (b'{"model": "\\udfff", "prompt": "a"}', "model"),
        (b'{"model": "gpt", "prompt": "a", "stop": ["\\ud800"]}', "stop"),
        (b'{"model": "gpt", "prompt": ["a", 1]}', "prompt[1]: "),
        (b'{"model": "gpt", "prompt": []}', "at least 1 item"),
        (b'{"model": "gpt", "prompt": [-1]}', "prompt"),
        (b'{"model": "gpt", "prompt": [true]}', "prompt"),
        (b'{"model": "../gpt", "prompt": "a"}', "no model"),
        (b'{"model": "gpt", "prompt": "a", "n": "2"}', "n: "),
    ],
)
def test_a_bad_body_is_one_line(served: Any, body: bytes, reason: str) -> None:
    head, _, content = raw(served, post(body)).partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"404"), head
    message = json.loads(content)["error"]["message"]
    assert reason in message
    assert "\n" not in message
    assert len(message) < 300


def test_control_characters_are_read_as_texts(client: httpx.Client) -> None:
    for text in ("\0", "\x1b[31m", "a\r\nb", "\u202e", "\x7f"):
        answer = client.post("/v1/completions", json={**COMPLETION, "prompt": text})
        assert answer.status_code == 200


def test_a_body_is_counted_while_it_comes(served: Any) -> None:
    with running({"gpt": served.models["gpt"]}, max_body=1_000) as small:
        declared = post(b"", "Content-Length: 2000000000")
        assert b" 413 " in raw(small, declared).splitlines()[0]
        chunk = b"400\r\n" + b" " * 1_024 + b"\r\n"
        endless = post(chunk * 3, "Transfer-Encoding: chunked")
        assert b" 413 " in raw(small, endless).splitlines()[0]
        assert httpx.post(f"{small.url}/v1/completions", json=COMPLETION).status_code == 200


def test_slow_clients_are_left(served: Any) -> None:
    """Headers, a body, and the headers of a second request that do not end."""
    whole = post(json.dumps(COMPLETION).encode()).replace(b"Connection: close\r\n", b"")
    with running({"gpt": served.models["gpt"]}, read_timeout=0.5) as hasty:
        begin = time.monotonic()
        assert raw(hasty, b"GET /v1/models HTTP/1.1\r\nHost:") == b""
        assert b" 408 " in raw(hasty, post(b"{", "Content-Length: 20")).splitlines()[0]
        answer = raw(hasty, whole + b"GET / HT")
        assert b" 200 " in answer.splitlines()[0]
        assert time.monotonic() - begin < 9


def test_large_and_bad_headers_are_refused(served: Any) -> None:
    flood = [f"X-{n}: {'a' * 100}" for n in range(2_000)]
    assert raw(served, post(b"{}", *flood)).split()[1:2] in ([b"431"], [])
    for request in (
        post(b"{}", f"X: {'a' * 20_000}"),
        b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        answer = raw(served, request.replace(b"%b", b"a" * 20_000))
        assert b" 431 " in answer.splitlines()[0]
        assert b"headers may have" in answer
    assert b" 415 " in raw(served, post(b"\x1f\x8b", "Content-Encoding: gzip")).splitlines()[0]
    assert (
        b" 400 "
        in raw(served, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \0\r\n\r\n").splitlines()[0]
    )
    tls, *_, content = raw(served, b"\x16\x03\x01\x02\0\1\0").splitlines()
    assert b" 400 " in tls
    assert "not HTTP/1.1: " in json.loads(content)["error"]["message"]
    answer = raw(served, post(b"{}", "Content-Length: 2", "X-Request-ID: a b\tc"))
    assert b"x-request-id: a b" not in answer.lower()


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/..%2f..%2fetc", "/%00", "/%ff"],
)
def test_paths_lead_to_no_file(served: Any, path: str) -> None:
    answer = raw(
        served, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert b" 404 " in answer.splitlines()[0]
    assert b"root:" not in answer


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    assert client.get("/nothing").json()["error"]["message"].startswith("no such route")
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/openapi.json").json()["paths"]["/translate"]


class SlowSteps:
    """A language model whose steps take a while, and the rows of each."""

    def __init__(self, seconds: float) -> None:
        self.model = model_of("gpt2")
        self.rows: list[int] = []
        decode = self.model.net.decode

        def slow(tokens: Any, cache: Any) -> Any:
            self.rows.append(len(tokens.ids))
            time.sleep(seconds)
            return decode(tokens, cache)

        self.model.net.decode = slow


def test_a_full_queue_refuses_whole_requests() -> None:
    with running({"gpt": SlowSteps(0.03).model}, max_queue=4) as small:
        slow = {**COMPLETION, "max_tokens": 40, "prompt": ["a", "b", "c", "d"], "stream": True}
        with (
            httpx.stream("POST", f"{small.url}/v1/completions", json=slow) as stream,
            small.server.registry.models["gpt"].slots(1),
        ):
            lines = stream.iter_lines()
            next(lines)
            two = {**COMPLETION, "prompt": ["a", "b"]}
            answer = httpx.post(f"{small.url}/v1/completions", json=two)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert httpx.post(f"{small.url}/v1/completions", json=COMPLETION).status_code == 200
            for _ in lines:
                pass
        # The place of an answer is free when its end has been read.
        assert httpx.post(f"{small.url}/v1/completions", json=two).status_code == 200
        too_many = {**COMPLETION, "prompt": ["a"] * 5}
        assert httpx.post(f"{small.url}/v1/completions", json=too_many).status_code == 400


_WITHOUT_ROOM = {
    "/translate": {"q": ["the cat", "<b>a</b>"], "source": "de", "target": "en", "format": "html"},
    "/translate_file": {"file": "dGhlIGNhdA==", "filename": "a.txt", "target": "en"},
    "/classify": {"model": "sentiment", "texts": "the cat"},
    "/fill": {"model": "bert", "texts": "the <mask>"},
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"model": "chat", "messages": [{"role": "user", "content": "the"}]},
    "/v1/embeddings": {"model": "bert", "input": "the cat"},
}


def test_a_request_without_room_is_refused_before_it_is_tokenized(
    served: Any, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full server is kept busy by what it refuses."""
    from heedful.serve import documents

    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(ServedModel, "on_tokenizer_thread", never)
    monkeypatch.setattr(documents, "translate_document", never)
    with ExitStack() as taken:
        for model in served.server.registry.models.values():
            for _ in range(2):
                taken.enter_context(model.slots(model.settings.max_queue // 2))
        for path, body in _WITHOUT_ROOM.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 429, (path, answer.text)
        streamed = {**_WITHOUT_ROOM["/translate_file"], "stream": True}
        assert client.post("/translate_file", json=streamed).status_code == 429


@pytest.mark.parametrize("most", [1, 2, 3, 256])
def test_a_request_of_many_texts_leaves_places_for_others(most: int) -> None:
    """It takes half of the queue at most, so that others are not refused for its whole duration."""

    async def test() -> None:
        settings = Settings(max_queue=most)
        served = ServedModel("gpt", model_of("gpt2"), settings, Metrics(), 0)
        with served.slots(most), ExitStack() as others:
            for _ in range(most // 2):
                others.enter_context(served.slots(1))
            assert served.num_texts == most + most // 2
            with pytest.raises(HttpError, match="try again"), served.slots(1):
                pass
        assert not served.num_texts
        with served.slots(most):
            pass
        served.retire()

    asyncio.run(test())


def test_a_place_is_free_before_the_end_of_the_answer_is_sent() -> None:
    """Else as many clients as the queue takes would be refused when many answers end at once."""
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        info_of(scope).resources.callback(events.append, "free")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    messages: list[dict[str, Any]] = [{"type": "http.request", "body": b""}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Future()

    async def send(message: Any) -> None:
        events.append(message.get("body", b"start").decode())

    guard = Guard(app, Settings(), Keys(None), Metrics())
    scope: dict[str, Any] = {"type": "http", "path": "/translate", "method": "POST"}
    scope |= {"headers": [], "raw_path": b"/translate", "query_string": b""}
    asyncio.run(guard(scope, receive, send))
    assert events == ["start", "a", "free", "b"]


def test_a_client_that_goes_frees_its_slot_within_a_step() -> None:
    """While its answer is streamed, and while it waits for a whole one; another one goes on."""
    slow = SlowSteps(0.03)
    long = {**COMPLETION, "max_tokens": 40, "seed": 1, "stop": None}
    with running({"gpt": slow.model}) as served:
        model = served.server.registry.models["gpt"]
        answers = []
        other = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{served.url}/v1/completions", json=long, timeout=20).json()
            )
        )
        for stream in (True, False):
            if not stream:
                other.start()
                time.sleep(0.1)
            body = json.dumps({**long, "prompt": ["a", "b"], "stream": stream}).encode()
            with socket.create_connection((served.host, served.port)) as connection:
                connection.sendall(post(body))
                while max(slow.rows, default=0) < 2 + (not stream):
                    time.sleep(0.005)
                assert model.num_texts == 2 + (not stream)
            count = len(slow.rows)
            while model.num_texts > (not stream):
                time.sleep(0.002)
            time.sleep(0.1)
            assert all(rows < 2 for rows in slow.rows[count + 2 :])
            slow.rows.clear()
        other.join()
    [choice] = answers[0]["choices"]
    assert choice["text"] == model_of("gpt2").generate("the cat", max_new_tokens=40)


def test_a_request_has_a_time_limit() -> None:
    slow = SlowSteps(0.1)
    long = {**COMPLETION, "max_tokens": 40}
    with running({"gpt": slow.model}, request_timeout=0.4) as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=long)
        assert answer.status_code == 504
        assert "0.4 seconds" in answer.json()["error"]["message"]
        answer = httpx.post(f"{served.url}/v1/completions", json={**long, "stream": True})
        assert answer.status_code == 200
        *_, last, end = answer.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert end == "data: [DONE]"


def test_numbers_above_the_limits_of_the_server_are_refused(served: Any) -> None:
    models = {name: served.models[name] for name in ("gpt", "de-en")}
    pair = {"q": "a dog", "source": "de", "target": "en"}
    with running(models, max_outputs=2, max_stop=1) as small:
        for path, body, name, most, message in (
            ("/v1/completions", COMPLETION, "n", 2, "n may be at most 2"),
            ("/v1/completions", COMPLETION, "stop", ["§"], "stop may have 1 texts, not 2"),
            ("/translate", pair, "alternatives", 1, "alternatives may be at most 1 here, not 2"),
        ):
            url = small.url + path
            assert httpx.post(url, json={**body, name: most}).status_code == 200
            more = [*most, "¶"] if isinstance(most, list) else most + 1
            refused = httpx.post(url, json={**body, name: more})
            assert refused.status_code == 400
            assert message in refused.text


def test_a_defect_is_a_500_of_one_request_alone() -> None:
    """A token that the net fails on, in a prompt and in a batch of texts."""
    model, bert = model_of("gpt2"), model_of("bert")
    [bad] = model.tokenizer.encode("dog")[:1]
    decode, encode = model.net.decode, bert.net.encode

    def broken(run: Any) -> Any:
        def checked(tokens: Any, *more: Any) -> Any:
            if (tokens.ids == bad).any():
                raise RuntimeError("secret")
            return run(tokens, *more)

        return checked

    model.net.decode, bert.net.encode = broken(decode), broken(encode)
    with running({"gpt": model, "bert": bert}) as ill, ThreadPoolExecutor(8) as pool:
        prompts = ["the cat", "dog", "cats and"] * 3

        def ask(prompt: str) -> httpx.Response:
            body = {**COMPLETION, "prompt": prompt}
            return httpx.post(f"{ill.url}/v1/completions", json=body, timeout=20)

        def embed(text: str) -> httpx.Response:
            body = {"model": "bert", "input": text}
            return httpx.post(f"{ill.url}/v1/embeddings", json=body, timeout=20)

        for function in (ask, embed):
            for prompt, answer in zip(prompts, pool.map(function, prompts), strict=True):
                assert answer.status_code == (500 if prompt == "dog" else 200)
                assert "secret" not in answer.text
                assert answer.headers["x-request-id"]
        both = ask(["the cat", "dog"])  # type: ignore[arg-type]
        assert both.status_code == 500
        assert httpx.get(f"{ill.url}/health/ready").status_code == 200


def test_all_who_ask_for_health_share_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no key, and takes time from requests."""
    readings, held = [], threading.Event()

    def read(model: Any) -> None:
        readings.append(model)
        held.wait(10)
        if len(readings) > 1:
            raise RuntimeError("secret of /srv")

    monkeypatch.setattr("heedful.serve.models._read_one_token", read)
    model = model_of("gpt2")
    with running({"gpt": model}) as server, ThreadPoolExecutor(8) as pool:
        paths = ["/health/ready", "/health"] * 4
        answers = [pool.submit(httpx.get, f"{server.url}{path}") for path in paths]
        while not readings:
            time.sleep(0.002)
        held.set()
        assert {answer.result().status_code for answer in answers} == {200}
        assert httpx.get(f"{server.url}/health/ready").status_code == 200
        assert readings == [model]
        monkeypatch.setattr("heedful.serve.models._PROBE_SECONDS", 0.0)
        server.server.registry.models["gpt"]._reading = None
        failed = httpx.get(f"{server.url}/health/ready")
        assert failed.status_code == 503
        assert "gpt fails" in failed.json()["error"]["message"]
        assert "secret" not in failed.text
        assert httpx.get(f"{server.url}/health/ready").status_code == 503
        assert len(readings) == 3  # the former result is too old


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        (["Content-Length: 2", "Transfer-Encoding: chunked"], "1.1"),
        (["Transfer-Encoding: chunked", "Content-Length: 2"], "1.1"),
        (["Transfer-Encoding: chunked"], "1.0"),
    ],
)
def test_a_body_with_two_lengths_is_refused_and_the_connection_ends(
    served: Any, headers: list[str], version: str
) -> None:
    """What follows would be a request of its own to a proxy that reads the other length."""
    for path in ("/v1/completions", "/nothing"):
        request = post(b"0\r\n\r\n", *headers, path=path).replace(b"Connection: close\r\n", b"")
        request = request.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
        answer = raw(served, request + b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        head, _, content = answer.partition(b"\r\n\r\n")
        assert b" 400 " in head.splitlines()[0]
        assert b"connection: close" in head.lower()
        assert "Transfer-Encoding" in json.loads(content)["error"]["message"]
        assert answer.count(b"HTTP/1.1 ") == 1


def test_logged_bodies_have_no_keys(
    served: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user-key-1\nadmin boss-key-1\n")
    models = {name: served.models[name] for name in ("gpt", "de-en")}
    caplog.set_level("INFO", "heedful.serve")
    with running(models, keys, log_texts=True) as server, httpx.Client(base_url=server.url) as own:
        text = {"q": "a dog", "source": "de", "target": "en", "api_key": "user-key-1"}
        assert own.post("/translate", json=text).status_code == 200
        assert own.post("/translate", data=text).status_code == 200
        assert own.post("/detect", json={"q": 5, "api_key": "user-key-1"}).status_code == 400
        own.headers["Authorization"] = "Bearer boss-key-1"
        quoted = {**COMPLETION, "prompt": "my key is boss-key-1"}
        assert own.post("/v1/completions", json=quoted).status_code == 200
        others = {"api_key": "sk-of-another", "metadata": {"Authorization": "sk-of-another"}}
        assert own.post("/v1/completions", json={**COMPLETION, **others}).status_code == 400
        twice = b'{"api\\u005fkey": "sk-of-another", "api_key": ["sk-of-another"]}'
        for content in (twice, b"api_key=sk-of-another", b'{"api_key": "sk-of-another"', b"\xff"):
            assert own.post("/v1/completions", content=content).status_code == 400
        assert own.get("/v1/models?api_key=sk-of-another").status_code == 200
    assert caplog.text.count("a dog") == 2
    assert "my key is ***" in caplog.text
    for key in ("user-key-1", "boss-key-1", "sk-of-another"):
        assert key not in caplog.text


def test_no_log_line_has_a_key_of_the_file(
    served: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one of another client, one that JSON escapes, and in an address or a request's id."""
    keys = tmp_path / "keys"
    keys.write_text('user-key-1\nuser-key-1-long\nuser"key\\2/e\n')
    caplog.set_level("INFO", "heedful.serve")
    headers = {"Authorization": "Bearer user-key-1"}
    inner = json.dumps({"a": 'user"key\\2/e'})
    prompts = ["of user-key-1-long.", 'of user"key\\2/e.', inner]
    models = {"gpt": served.models["gpt"]}
    with (
        running(models, keys, log_texts=True) as server,
        httpx.Client(base_url=server.url, headers=headers) as own,
    ):
        for prompt in prompts:
            body = {**COMPLETION, "prompt": prompt}
            assert own.post("/v1/completions", json=body).status_code == 200
        for path in ("/user-key-1-long", "/user%22key%5C2/e", "/a/user%2Dkey-1"):
            assert own.get(path).status_code == 404
        for number in ("user-key-1", "a.user-key-1-long"):
            answer = own.get("/v1/models", headers={"X-Request-ID": number})
            assert answer.headers["X-Request-ID"] != number
    assert caplog.text.count("of ***.") == 2
    assert "GET /*** 404" in caplog.text
    assert "GET /a/*** 404" in caplog.text
    for part in ("user-key", "-long", 'user"', 'user\\"', "user%22", "2/e"):
        assert part not in caplog.text


@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\x9b", "\u2028", "\u202e"])
def test_no_request_writes_a_log_line_of_its_own(letter: str) -> None:
    forged = f"a{letter}2026-01-01T00:00:00Z INFO forged"
    try:
        raise ValueError(forged)
    except ValueError:
        fault = sys.exc_info()
    for error in (None, fault):
        record = logging.LogRecord("heedful.serve", 20, "", 0, "of %s", (forged,), error)
        first, *others = LogLines().format(record).split("\n")
        assert letter not in f"{first}{''.join(others)}"
        assert forged.replace(letter, letter.encode("unicode_escape").decode()) in first
        assert all(line.startswith("    ") for line in others)
        assert (error is None) == (not others)


def test_the_client_that_a_proxy_names_is_one_field_of_the_log(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "heedful.serve")
    client = b"X-Forwarded-For: 1.2.3.4 GET /forged\x1b[2J"
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    raw(served, head + client + b"\r\n\r\n")
    deadline = time.monotonic() + 10  # the server writes the line behind the answer
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    [line] = caplog.messages
    assert line.split()[1:4] == ["1.2.3.4%20GET%20%2Fforged%1B%5B2J", "GET", "/health"]


def test_a_fault_of_a_backends_files_is_no_fault_of_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the answer has no path of the server; the log has it."""
    pytest.importorskip("ctranslate2")
    import heedful
    from backend_models import saved

    saved("gpt2", tmp_path / "gpt")
    model: Any = heedful.load(tmp_path / "gpt", backend="ctranslate2", precision="float32")
    with running({"gpt": model}) as server:
        url = f"{server.url}/v1/completions"
        sampled = {**COMPLETION, "temperature": 1, "top_k": 100_000}
        for stream in (False, True):
            answer = httpx.post(url, json={**sampled, "stream": stream})
            assert answer.status_code == 200
            assert "error" not in answer.text
        model.backend._target = ["no token of it"] * 500
        model.backend._last = None
        failed = httpx.post(url, json=COMPLETION)
        streamed = httpx.post(url, json={**COMPLETION, "stream": True})
    assert failed.status_code == 500
    for answer in (failed, streamed):
        assert "the server failed" in answer.text
        assert str(tmp_path) not in answer.text
    assert str(tmp_path) in caplog.text


def test_models_have_the_time_of_their_weights(tmp_path: Path, served: Any) -> None:
    served.models["gpt"].save(tmp_path / "gpt")
    os.utime(tmp_path / "gpt" / "model.safetensors", (5_000, 1_234_567))
    with running({}) as server:
        registry = server.server.registry
        registry.directories["gpt"] = tmp_path / "gpt"
        asyncio.run_coroutine_threadsafe(registry.open_all(), server.loop).result(20)
        [entry] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert entry["created"] == 1_234_567


@pytest.mark.parametrize("stream", [False, True])
def test_a_task_that_raises_fails_its_request_alone(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect while a request is queued: 500 under its id in the log, and the thread goes on."""
    with running({"gpt": model_of("gpt2"), "bert": model_of("bert")}) as ill:
        models = ill.server.registry.models

        def broken(job: Any) -> None:
            raise RuntimeError("secret")

        for engine in (models["gpt"].generator, models["bert"].engine):
            engine.add = broken
        body = {**COMPLETION, "stream": stream}
        url, headers = f"{ill.url}/v1/completions", {"X-Request-ID": "number-1"}
        answer = httpx.post(url, json=body, headers=headers, timeout=5)
        assert answer.status_code == (200 if stream else 500)
        assert "the server failed" in answer.text
        assert "secret" not in answer.text
        records = [r for r in caplog.records if "number-1 failed" in r.getMessage()]
        assert "secret" in str(records[0].exc_info)
        texts = {"model": "bert", "input": "the cat"}
        answer = httpx.post(f"{ill.url}/v1/embeddings", json=texts, timeout=5)
        assert answer.status_code == 500
        for engine in (models["gpt"].generator, models["bert"].engine):
            del engine.add
        assert httpx.get(f"{ill.url}/health/ready").status_code == 200
        assert httpx.post(url, json=COMPLETION, timeout=5).status_code == 200
        assert httpx.post(f"{ill.url}/v1/embeddings", json=texts, timeout=5).status_code == 200
        assert not models["gpt"]._jobs


def test_a_thread_that_ends_is_reported_and_nothing_waits_for_it() -> None:
    """Requests in progress, streamed and whole, those that wait for it, and later ones: 503."""
    slow = SlowSteps(0.02)
    with running({"gpt": slow.model}) as ill, ThreadPoolExecutor(2) as pool:
        model, url = ill.server.registry.models["gpt"], f"{ill.url}/v1/completions"
        bodies = [{**COMPLETION, "max_tokens": 40, "stream": stream} for stream in (True, False)]
        answers = [pool.submit(httpx.post, url, json=body, timeout=10) for body in bodies]
        while len(model.generator.queue) < 2:
            time.sleep(0.002)

        def broken(*error: Exception) -> bool:
            raise RuntimeError("secret")

        model.generator.turn = model.generator.fail = broken
        streamed, whole = (answer.result() for answer in answers)
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "model_failed"
        assert "has stopped" in streamed.text
        model.worker.join(5)
        assert not model.worker.is_alive
        for answer in (
            httpx.post(url, json=COMPLETION, timeout=5),
            httpx.post(f"{ill.url}/v1/embeddings", json={"model": "gpt", "input": "a"}, timeout=5),
            httpx.get(f"{ill.url}/health/ready", timeout=5),
        ):
            assert answer.status_code == 503
            assert "has stopped" in answer.text
        assert not model.num_texts


def test_keys_do_not_share_what_was_read(tmp_path: Path) -> None:
    """The speed of an answer would tell one client what another has asked."""
    model, read = model_of("gpt2"), []
    decode = model.net.decode

    def counting(tokens: Any, cache: Any) -> Any:
        read.append(tokens.ids.size(1))
        return decode(tokens, cache)

    keys = tmp_path / "keys"
    keys.write_text("user-key-1\nuser-key-2\nadmin boss-key-1\n")
    prompt = [*range(4, 24)]

    def tokens_read(url: str, **headers: str) -> int:
        read.clear()
        body = {**COMPLETION, "prompt": prompt, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        return sum(read)

    model.net.decode = counting
    try:
        with running({"gpt": model}, keys) as closed:
            for key in ("user-key-1", "user-key-2", "boss-key-1"):
                assert tokens_read(closed.url, authorization=f"Bearer {key}") == 20
                assert tokens_read(closed.url, **{"x-api-key": key}) == 1
        with running({"gpt": model}) as opened:
            assert tokens_read(opened.url) == 20
            assert tokens_read(opened.url, **{"x-api-key": "anything"}) == 1
    finally:
        del model.net.decode


def test_keys_cover_every_route_but_health(tmp_path: Path, served: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nuser-key-1\n\nadmin boss-key-1\n")
    models = {name: served.models[name] for name in ("gpt", "de-en")}
    with running(models, keys) as closed, httpx.Client(base_url=closed.url) as client:
        for path in ("/health/live", "/health/ready"):
            assert client.get(path).status_code == 200
        paths = client.get("/openapi.json", headers={"Authorization": "Bearer user-key-1"}).json()
        for path, methods in paths["paths"].items():
            # Addresses of translated files cannot be guessed; Weblate sends no key for languages.
            open_paths = path in ("/frontend/settings", "/languages")
            if not open_paths and not path.startswith(("/health", "/download_file")):
                for method in methods:
                    answer = client.request(method, path.replace("{name}", "gpt"))
                    assert answer.status_code == 401, path
        for path in ("/openapi.json", "/nothing"):
            assert client.get(path).status_code == 401
        for header in (("Authorization", "Bearer user-key-1"), ("X-API-Key", "boss-key-1")):
            assert client.get("/v1/models", headers=[header]).status_code == 200
        for key in ("user-key-", "user-key-12", "é", "-"):
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
            assert client.get("/v1/models", headers=headers).status_code == 401
        body = {"q": "a", "source": "de", "target": "en", "api_key": "user-key-1"}
        assert client.post("/translate", data=body).status_code == 200
        assert client.post("/translate", json=body).status_code == 200
        assert client.post("/translate", json={**body, "api_key": "x"}).status_code == 401
        user = {"Authorization": "Bearer user-key-1"}
        assert client.post("/admin/reload", json={}, headers=user).status_code == 403


def test_pages_of_other_origins_are_refused(served: Any) -> None:
    headers = {"Origin": "https://example.org"}
    assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 403
    own = {"Origin": served.url}
    assert httpx.get(f"{served.url}/v1/models", headers=own).status_code == 200
    models = {"gpt": served.models["gpt"]}
    with running(models, cors=("https://example.org",)) as opened:
        answer = httpx.get(f"{opened.url}/v1/models", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://example.org"
        ask = {**headers, "Access-Control-Request-Method": "POST"}
        ask["Access-Control-Request-Headers"] = "x-api-key, x-stainless-lang"
        assert httpx.options(f"{opened.url}/v1/completions", headers=ask).status_code == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_foreign_name_that_points_to_this_machine_is_refused(served: Any, address: str) -> None:
    """DNS rebinding: the page of another site is of the server's own origin to the browser."""
    models = {"gpt": served.models["gpt"]}
    with running(models, address=address) as opened, httpx.Client(base_url=opened.url) as client:
        for path in ("/v1/models", "/", "/docs", "/health/live", "/metrics", "/nothing"):
            named = {"Host": "evil.example", "Origin": "http://evil.example"}
            answer = client.get(path, headers=named)
            assert answer.status_code == 403, path
            assert "--allowed-host" in answer.json()["error"]["message"]
        for host in ("127.0.0.1.evil.example", "evil.example:80", "evillocalhost", "a@b", ""):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 403, host
        body, evil = {**COMPLETION, "stream": True}, {"Host": "evil.example"}
        assert client.post("/v1/completions", json=body, headers=evil).status_code == 403
        upgrade = {**evil, "Connection": "Upgrade", "Upgrade": "websocket"}
        assert client.get("/", headers=upgrade).status_code == 403


def test_own_names_and_addresses_are_answered(served: Any, client: httpx.Client) -> None:
    name = socket.gethostname()
    hosts = (
        "localhost",
        "LOCALHOST.",
        "a.localhost",
        "127.0.0.1",
        "10.1.2.3",
        "[::1]",
        "[fe80::1]",
    )
    for host in (*hosts, name, f"{name.partition('.')[0]}.local"):
        for named in (host, f"{host}:{served.port}"):
            headers = {"Host": named, "Origin": f"http://{named}"}
            assert client.get("/v1/models", headers=headers).status_code == 200, named


def test_a_probe_without_the_header_host_is_answered(served: Any) -> None:
    with socket.create_connection((served.host, served.port)) as connection:
        connection.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_hosts": ("other", "models.example.org")},
        {"allowed_hosts": ("*.example.org",)},
        {"allowed_hosts": ("*",)},
        {"cors": ("https://models.example.org",)},
    ],
)
def test_a_proxy_calls_the_server_by_an_allowed_name(served: Any, settings: Any) -> None:
    origin = {"Host": "models.example.org", "Origin": "https://models.example.org"}
    with running({"gpt": served.models["gpt"]}, **settings) as opened:
        assert httpx.get(f"{opened.url}/v1/models", headers=origin).status_code == 200
        evil = {"Host": "evilexample.org"}
        expected = 200 if "*" in settings.get("allowed_hosts", ()) else 403
        assert httpx.get(f"{opened.url}/v1/models", headers=evil).status_code == expected


def test_a_foreign_name_is_refused_with_a_key_too(served: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user-key-1\n")
    headers = {"Host": "models.example.org", "X-API-Key": "user-key-1"}
    with running({"gpt": served.models["gpt"]}, keys) as opened:
        assert httpx.get(f"{opened.url}/v1/models", headers=headers).status_code == 403


@pytest.mark.parametrize("name", ["https://models.example.org", "models:8000", "a b", "", "*.*"])
def test_an_allowed_host_that_is_no_name_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match="is no name of a host; give one such as"):
        AllowedHosts([name])


def test_health_answers_head(client: httpx.Client) -> None:
    for path in ("/health/live", "/health/ready"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_metrics_have_nothing_of_a_request(client: httpx.Client, served: Any) -> None:
    client.post("/v1/completions", json={**COMPLETION, "prompt": "zebra"})
    client.get("/zebra/secret")
    client.post("/v1/completions", json={**COMPLETION, "model": "zebra"})
    text = client.get("/metrics").text
    assert 'heedful_requests_total{model="gpt",route="/v1/completions",status="200"}' in text
    assert 'route="other",status="404"' in text
    assert 'heedful_tokens_total{kind="generated",model="gpt"}' in text
    assert "zebra" not in text
    for line in text.splitlines():
        assert line.startswith("#") or line.rsplit(" ", 1)[1]


def test_a_model_is_replaced_while_it_is_used(tmp_path: Path) -> None:
    """Requests in progress end with the former model; later ones have the new one."""
    slow, keys = SlowSteps(0.02), tmp_path / "keys"
    keys.write_text("admin boss-key-1\n")
    directory = tmp_path / "gpt"
    model_of("gpt2").save(directory)
    headers = {"Authorization": "Bearer boss-key-1"}
    with (
        running({"gpt": slow.model}, keys) as served,
        httpx.Client(base_url=served.url, headers=headers, timeout=20) as client,
    ):
        served.server.registry.directories["gpt"] = directory
        former = served.server.registry.models["gpt"]
        long = {**COMPLETION, "max_tokens": 40, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert client.post("/admin/reload", json={"model": "gpt"}).status_code == 200
            assert served.server.registry.models["gpt"] is not former
            assert client.post("/v1/completions", json=COMPLETION).status_code == 200
            assert former.worker.is_alive
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert "length" in events[-2] or "stop" in events[-2]
        former.worker.join(5)
        assert not former.worker.is_alive
        (directory / "config.json").write_text("{}")
        refused = client.post("/admin/reload", json={})
        assert refused.status_code == 409
        assert "stays as it was" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_broken_model_does_not_keep_others_from_being_replaced(tmp_path: Path) -> None:
    keys, model = tmp_path / "keys", model_of("gpt2")
    keys.write_text("admin boss-key-1\n")
    for name in ("first", "second"):
        model.save(tmp_path / name)
    with running({"first": model, "second": model}, keys) as served:
        registry = served.server.registry
        registry.directories.update({name: tmp_path / name for name in ("first", "second")})
        former = dict(registry.models)
        (tmp_path / "first" / "config.json").write_text("{}")
        headers = {"Authorization": "Bearer boss-key-1"}
        refused = httpx.post(f"{served.url}/admin/reload", json={}, headers=headers, timeout=20)
        assert refused.status_code == 409
        message = refused.json()["error"]["message"]
        assert message.startswith("first stays as it was: first/config.json")
        assert str(tmp_path) not in refused.text
        assert registry.models["first"] is former["first"]
        assert registry.models["second"] is not former["second"]


def test_a_glossary_is_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At a reload no request was answered while a large one was read."""
    from heedful.serve import glossaries
    from heedful.serve.models import Registry

    path, threads = tmp_path / "terms.tsv", []
    read = glossaries.GlossaryFile

    def noted(path: Path) -> Any:
        threads.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(glossaries, "GlossaryFile", noted)
    path.write_text("cat\tmat\n")
    model_of("vaswani2017").save(tmp_path / "m")

    async def test() -> None:
        registry = Registry({"m": tmp_path / "m"}, Settings(glossary=path), Metrics())
        await registry.open_all()
        own = registry.models["m"].glossaries
        terms = None if own is None else own.of(None, None)
        assert terms is not None
        assert [term.sources for term in terms.terms] == [("cat",)]
        registry.close()

    asyncio.run(test())
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_models_that_are_replaced_while_they_are_asked_are_ready() -> None:
    """One whose worker has the question, and one that would be asked next."""
    first, second, held = model_of("gpt2"), model_of("bert"), threading.Event()
    with running({"first": first, "second": second}) as server, ThreadPoolExecutor(1) as pool:
        registry = server.server.registry
        worker = registry.models["first"].worker
        worker.submit(held.wait)
        answer = pool.submit(httpx.get, f"{server.url}/health/ready")
        while not worker._tasks:
            time.sleep(0.002)
        replaced = threading.Event()
        for name, model in (("first", first), ("second", second)):
            server.loop.call_soon_threadsafe(registry.add, name, model)
        server.loop.call_soon_threadsafe(replaced.set)
        assert replaced.wait(10)
        held.set()
        assert answer.result().status_code == 200


def test_a_reload_during_a_reload_is_not_lost() -> None:
    """The files may have changed since the first one read them."""
    begun: list[asyncio.Event] = []

    async def slow(names: list[str]) -> None:
        begun.append(asyncio.Event())
        await begun[-1].wait()

    async def reload() -> None:
        server = Server({}, Settings(), Keys(None))
        server.registry.replace = slow  # type: ignore[method-assign,assignment]
        for _ in range(3):
            server.reload()
            await asyncio.sleep(0)
        while server._reloading and not server._reloading.done():
            for event in begun:
                event.set()
            await asyncio.sleep(0)

    asyncio.run(reload())
    assert len(begun) == 2


def test_keys_and_models_are_opened_again_each_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad keys file keeps no model from being replaced, nor the reverse; the log has both."""
    path = tmp_path / "keys"
    path.write_text("user-key-1\n")
    caplog.set_level("INFO", "heedful.serve")
    replaced: list[list[str]] = []

    async def replace(names: list[str]) -> None:
        replaced.append(names)
        if len(replaced) > 1:
            raise UserError("gpt stays as it was: damaged")

    async def reload() -> None:
        keys = Keys(path)
        server = Server({}, Settings(keys=path), keys)
        server.registry.replace = replace  # type: ignore[method-assign,assignment]
        path.write_text("short\n")
        await server._open_again()
        assert keys.role("user-key-1") == "user"
        path.write_text("user-key-2\n")
        await server._open_again()
        assert keys.role("user-key-2") == "user"

    asyncio.run(reload())
    assert len(replaced) == 2
    first, second, third, fourth = caplog.messages
    assert first.startswith(f"the keys stay as they were: {path}, line 1: not a key")
    assert second.startswith("opened again: ")
    assert third == f"keys read again: {path}"
    assert fourth == "not replaced: gpt stays as it was: damaged"


def test_a_lack_of_open_files_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio reports it for each connection that waits."""
    loop = asyncio.new_event_loop()
    report = report_loop_errors()
    for _ in range(100):
        report(loop, {"exception": OSError(errno.EMFILE, "Too many open files")})
    loop.close()
    [record] = caplog.records
    assert "Too many open files; raise the limit" in record.getMessage()


def test_a_draining_server_answers_what_it_has_begun() -> None:
    slow = SlowSteps(0.02)
    with running({"gpt": slow.model}) as served, httpx.Client(base_url=served.url) as client:
        long = {**COMPLETION, "max_tokens": 40, "stream": True}
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.loop.call_soon_threadsafe(served.server.stop)
            while not served.server.guard.is_draining:
                time.sleep(0.005)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        with pytest.raises(httpx.TransportError):
            client.get("/health/live")


def test_a_draining_server_waits_for_a_request_no_longer_than_its_limit() -> None:
    slow = SlowSteps(0.1)
    with running({"gpt": slow.model}, drain_timeout=1.0) as served:
        long = {**COMPLETION, "max_tokens": 45, "stream": True, "stop": None}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            served.loop.call_soon_threadsafe(served.server.stop)
            events = []
            with suppress(httpx.TransportError):
                events.extend(line for line in lines if line)
        assert "data: [DONE]" not in events


def test_models_that_are_loaded_answer_503() -> None:
    with running({}) as served:
        assert httpx.get(f"{served.url}/health/ready").json()["models"] == []
        served.server.registry.directories["gpt"] = Path("gpt")
        for path, status in (("/health/live", 200), ("/health/ready", 503)):
            assert httpx.get(served.url + path).status_code == status
        answer = httpx.post(f"{served.url}/v1/completions", json=COMPLETION)
        assert answer.status_code == 503
        assert "loading" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]


def test_a_compiled_backend_serves_by_batches(tmp_path: Path) -> None:
    """A language model whose backend has no continuous batches: whole and streamed answers."""
    pytest.importorskip("ctranslate2")
    import heedful
    from backend_models import saved

    saved("gpt2", tmp_path / "gpt")
    model: Any = heedful.load(tmp_path / "gpt", backend="ctranslate2", precision="float32")
    with running({"gpt": model}) as served:
        assert not served.server.registry.models["gpt"].is_continuous
        body = {**COMPLETION, "prompt": ["the cat", "a"], "max_tokens": 9}
        answer = httpx.post(f"{served.url}/v1/completions", json=body).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == model.generate(["the cat", "a"], max_new_tokens=9)
        streamed = httpx.post(
            f"{served.url}/v1/completions", json={**body, "prompt": "a", "stream": True}
        )
        parts = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(part)["choices"][0]["text"] for part in parts) == texts[1]
        answer = httpx.post(f"{served.url}/v1/completions", json={**COMPLETION, "logprobs": 1})
        assert answer.status_code == 400
        assert "--backend eager" in answer.json()["error"]["message"]
