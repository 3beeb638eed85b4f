"""The server under load: capacity, latency, a burst, disconnecting clients, single requests.

Models with random weights: a tiny translator, and GPT-2 of 124M parameters. The server is a
separate process; the clients are coroutines of this one, without an HTTP library.

* Offline: `generate` of all texts at once, in this process before the server starts.
* Capacity: answers a second, with enough clients that send requests without pause to saturate the
  server.
* Load: requests at a constant rate, 80% of the capacity, whether or not earlier ones are answered.
* Burst: 700 requests at the same moment, more than the queue holds.
* Lone: one request at a time, alternating with calls of the model in this process.
"""

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import heedful
from common import argument_parser, command_line, table, write_results
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import gpt2, marian

SHARE = 0.8  # of the capacity
NEW_TOKENS = 32
CLIENTS = 512  # also the limit of the queue; the translator's offline rate is of 512 texts
BURST = 700  # requests at the same moment: more than the queue holds


@dataclass(frozen=True)
class Case:
    """A model and the requests that it gets.

    Attributes:
        words: of a text.
        sizes: keys of the Config.
        num_offline: texts of the offline rate.
        num_lone: requests one after the other.
    """

    name: str
    words: tuple[int, int]
    sizes: dict[str, int]
    vocab_size: int
    num_offline: int
    num_lone: int

    def write(self, folder: Path) -> None:
        """Save the model with random weights and a tokenizer of numbered words."""
        words = [f"w{number}" for number in range(self.vocab_size - 4)]
        tokenizer = heedful.train_tokenizer([" ".join(words)], kind="word")
        torch.manual_seed(1)
        config: Any
        if self.name == "gpt2":
            config = gpt2.Config(vocab_size=tokenizer.vocab_size, **self.sizes)
            net: Any = gpt2.build(config)
            ids = GenerationIds(eos_ids=(tokenizer.eos_id,))
        else:
            sizes = {f"{side}_vocab_size": tokenizer.vocab_size for side in ("src", "tgt")}
            config = marian.Config(max_length=128, **sizes, **self.sizes)
            net = marian.build(config)
            ids = GenerationIds((tokenizer.bos_id,), (tokenizer.eos_id,))
        metadata = ModelMetadata(
            "gpt2" if self.name == "gpt2" else "marian",
            "benchmark",
            "de",
            "en",
            generation=ids,
            options={"beam_size": 1},
        )
        open_net(net, config, metadata, tokenizer).save(folder)

    def text(self, rng: random.Random) -> str:
        """A text of random words."""
        count = rng.randint(*self.words)
        return " ".join(f"w{rng.randrange(self.vocab_size - 4)}" for _ in range(count))

    def request(self, text: str, **more: Any) -> tuple[str, bytes]:
        """The route and body of a request."""
        if self.name != "gpt2":
            return "/translate", json.dumps({"q": text, "source": "de", "target": "en"}).encode()
        body = {"model": self.name, "prompt": text, "temperature": 0, "max_tokens": NEW_TOKENS}
        return "/v1/completions", json.dumps(body | more).encode()

    def options(self) -> dict[str, Any]:
        """Options of `generate` for the same answers."""
        return {"max_new_tokens": NEW_TOKENS} if self.name == "gpt2" else {}


TRANSLATOR = Case(
    "translator",
    (5, 30),
    {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3}
    | {"num_decoder_layers": 3},
    8_000,
    num_offline=512,
    num_lone=60,
)
GPT2 = Case(
    "gpt2",
    (8, 64),
    {"d_model": 768, "num_heads": 12, "d_ff": 3072, "num_layers": 12},
    50_257,
    num_offline=128,
    num_lone=20,
)
SMALL = {"d_model": 16, "num_heads": 2, "d_ff": 32}


class Client:
    """A connection that asks one request after the other."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._reader: Any = None
        self._writer: Any = None

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of an answer; status 0: the connection was lost."""
        if self._reader is not None and self._reader.at_eof():
            self.close()  # the server has closed it after a time without requests
        try:
            if self._writer is None:
                opened = await asyncio.open_connection("127.0.0.1", self.port)
                self._reader, self._writer = opened
            self._writer.write(_head(path, len(body)) + body)
            status, headers = await self.read_head()
            content = await self._reader.readexactly(int(headers["content-length"]))
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return 0, b""
        if headers.get("connection") == "close":
            self.close()
        return status, content

    async def read_head(self) -> tuple[int, dict[str, str]]:
        """The status and headers of an answer."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = (line.partition(": ") for line in head[1:] if line)
        return int(head[0].split()[1]), {name.lower(): value for name, _, value in pairs}

    async def stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The lines of a streamed answer."""
        opened = await asyncio.open_connection("127.0.0.1", self.port)
        self._reader, self._writer = opened
        self._writer.write(_head(path, len(body)) + body)
        while line := await self._reader.readline():
            yield line

    def close(self) -> None:
        """Close the connection at once."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None


def _head(path: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


@contextlib.contextmanager
def running(case: Case, folder: Path, backend: str, *options: str) -> Any:
    """A server process with further options; yields its port and process id."""
    command = [sys.executable, "-m", "heedful", "serve", f"{case.name}={folder}", "--port", "0"]
    command += ["--backend", backend, "--max-queue", str(CLIENTS), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        port = 0
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("ready at"):
                port = int(line.rsplit(":", 1)[1])
                break
        drain = asyncio.get_event_loop().run_in_executor(None, process.stderr.read)
        yield port, process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        del drain
    finally:
        process.kill()


def resident(pid: int) -> float:
    """MiB of memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def capacity(case: Case, port: int, seconds: float) -> float:
    """Answers a second of `CLIENTS` clients that ask without a pause."""
    rng, end = random.Random(1), time.perf_counter() + seconds
    done = 0

    async def ask() -> None:
        nonlocal done
        client = Client(port)
        while time.perf_counter() < end:
            status, _ = await client.ask(*case.request(case.text(rng)))
            assert status == 200, status
            done += 1
        client.close()

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    return done / (time.perf_counter() - began)


async def load(case: Case, port: int, pid: int, rate: float, seconds: float) -> dict[str, Any]:
    """Latencies, statuses and memory under constant arrival."""
    rng, idle = random.Random(2), [Client(port) for _ in range(8)]
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    memory = [resident(pid)]

    async def ask(due: float) -> None:
        client = idle.pop() if idle else Client(port)
        status, _ = await client.ask(*case.request(case.text(rng)))
        latencies.append(time.perf_counter() - due)
        statuses[status] += 1
        idle.append(client)

    began, tasks = time.perf_counter(), []
    count = max(1, int(rate * seconds))
    for number in range(count):
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask(due)))
        if number % max(1, count // 20) == 0:
            memory.append(resident(pid))
    await asyncio.gather(*tasks)
    memory.append(resident(pid))
    for client in idle:
        client.close()
    ordered = sorted(latencies)
    return {
        "requests": count,
        "rate": rate,
        "p50 ms": 1_000 * ordered[count // 2],
        "p99 ms": 1_000 * ordered[math.ceil(0.99 * count) - 1],
        "lost": count - statuses[200],
        "statuses": {str(status): number for status, number in statuses.items()},
        "MiB": [round(value, 1) for value in memory],
    }


async def burst(case: Case, port: int, count: int) -> dict[str, int]:
    """Statuses of requests that are sent at the same moment."""
    rng = random.Random(3)
    requests = [case.request(case.text(rng)) for _ in range(count)]
    clients = [Client(port) for _ in range(count)]
    answers = await asyncio.gather(
        *(client.ask(*request) for client, request in zip(clients, requests, strict=True))
    )
    for client in clients:
        client.close()
    return {str(status): number for status, number in Counter(s for s, _ in answers).items()}


async def killed(case: Case, port: int) -> dict[str, float] | None:
    """Milliseconds from the loss of a streaming client to its free slot, and of a step."""
    if case.name != "gpt2":
        return None
    client, stamps = Client(port), []
    request = case.request(case.text(random.Random(4)), max_tokens=900, stream=True)
    async for line in client.stream(*request):
        if line.startswith(b"data:"):
            stamps.append(time.perf_counter())
        if len(stamps) == 12:
            break
    client.close()
    began = time.perf_counter()
    while await _num_texts(port):
        await asyncio.sleep(0.001)
    steps = [b - a for a, b in itertools.pairwise(stamps)]
    free = time.perf_counter() - began
    return {"free after ms": 1_000 * free, "step ms": 1_000 * statistics.median(steps)}


async def _num_texts(port: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    content = (await reader.read()).decode()
    writer.close()
    lines = [line for line in content.splitlines() if line.startswith("heedful_texts{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def lone(case: Case, port: int, model: Any, count: int) -> dict[str, float]:
    """Medians of a request over HTTP and of the same call in this process, in turn."""
    rng, client = random.Random(5), Client(port)
    over_http, in_process = [], []
    for _ in range(count):
        text = case.text(rng)
        began = time.perf_counter()
        model.generate(text, **case.options())
        in_process.append(time.perf_counter() - began)
        began = time.perf_counter()
        status, _ = await client.ask(*case.request(text))
        assert status == 200
        over_http.append(time.perf_counter() - began)
    client.close()
    pairs = zip(over_http, in_process, strict=True)
    return {
        "request ms": 1_000 * statistics.median(over_http),
        "model ms": 1_000 * statistics.median(in_process),
        "difference ms": 1_000 * statistics.median(a - b for a, b in pairs),
    }


async def measure(case: Case, backend: str, quick: bool, minutes: float) -> dict[str, Any]:
    """All figures of one model."""
    seconds, count = (1.0, 16) if quick else (20.0, case.num_offline)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / case.name
        case.write(folder)
        model: Any = heedful.load(folder, backend=backend, use="throughput")
        rng = random.Random(6)
        texts = [case.text(rng) for _ in range(count)]
        model.generate(texts[:8], **case.options())
        began = time.perf_counter()
        model.generate(texts, **case.options())
        offline = count / (time.perf_counter() - began)
        with running(case, folder, backend) as (port, pid):
            alone = await lone(case, port, model, 4 if quick else case.num_lone)
            await capacity(case, port, seconds / 4)
            most = await capacity(case, port, seconds)
            rates = {"offline": offline, "capacity": most, "ratio": most / offline}
            duration = 2.0 if quick else 60 * minutes
            loaded = await load(case, port, pid, SHARE * most, duration)
            kill = await killed(case, port)
            return {
                "rates": rates,
                "load": loaded,
                "burst": await burst(case, port, BURST),
                "lone": alone,
                "killed": kill,
            }


def main() -> None:
    """Measure both models, and write the page."""
    parser = argument_parser(str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of constant arrival")
    parser.add_argument("--backend", default="eager", help="of both models")
    arguments = parser.parse_args()
    cases = [TRANSLATOR, GPT2]
    if arguments.quick:
        cases = [
            replace(case, vocab_size=60, sizes=case.sizes | SMALL | dict.fromkeys(
                (key for key in case.sizes if "layers" in key), 1
            ))
            for case in cases
        ]  # fmt: skip
    results_by_case = {
        case.name: asyncio.run(measure(case, arguments.backend, arguments.quick, arguments.minutes))
        for case in cases
    }
    header = ["model", "offline /s", "capacity /s", "ratio", "lone ms", "over the model ms"]
    rates, loads = [], []
    for name, case in results_by_case.items():
        values, alone, entry = case["rates"], case["lone"], case["load"]
        numbers = [f"{values[key]:.3g}" for key in ("offline", "capacity", "ratio")]
        numbers += [f"{alone[key]:.1f}" for key in ("request ms", "difference ms")]
        rates.append([name, *numbers])
        numbers = [f"{entry[key]:.0f}" for key in ("p50 ms", "p99 ms")]
        memory = f"{entry['MiB'][1]:.0f} to {entry['MiB'][-1]:.0f}"
        rate = f"{entry['rate']:.3g}"
        loads.append([name, entry["requests"], rate, *numbers, entry["lost"], memory])
    load_header = ["model", "requests", "/s", "p50 ms", "p99 ms", "lost", "MiB, first to last"]
    bursts = [
        [name, ", ".join(f"{number} × {status}" for status, number in case["burst"].items())]
        for name, case in results_by_case.items()
    ]
    kill = results_by_case["gpt2"]["killed"]
    sections = [
        "Models with random weights: a tiny translator, and GPT-2 of 124M parameters, on the "
        f"backend {arguments.backend}. Offline: texts a second of `generate` with all texts at "
        f"once. Capacity: answers a second to {CLIENTS} clients that ask without a pause. Lone: "
        "milliseconds of a request when there is no other one, and how many of them are beyond "
        "those of the same call in a process.",
        table(header, rates),
        f"## Constant arrival at {SHARE:.0%} of the capacity\n\n" + table(load_header, loads),
        f"## {BURST} requests at once\n\n" + table(["model", "answers by status"], bursts),
        "## A streaming client that goes\n\n"
        f"Its slot was free after {kill['free after ms']:.0f} ms; a step takes "
        f"{kill['step ms']:.0f} ms.",
    ]
    write_results(
        "serving",
        "The server under load",
        sections,
        {"models": results_by_case},
        directory=arguments.results,
        command=command_line(),
        packages=("fastapi", "uvicorn", "pydantic"),
    )


if __name__ == "__main__":
    main()
