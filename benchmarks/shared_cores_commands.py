"""Commands of heedful as systems of the benchmark of shared cores."""

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

from serving import Client

COMMANDS = {
    "train": "heedful train, which measures the cores",
    "two processes": "heedful train in two processes",
    "serve": "heedful serve",
    "bulk": "heedful bulk",
}
CLIENTS = 4  # that ask without a pause
SENTENCES = 512  # of the job of `heedful bulk`
NEW_TOKENS = 32
FIRST, LAST = 20, 60  # steps between which the speed of a training is measured
_LIMIT = 300.0  # seconds of a training
_PROGRAM = ["-c", "from heedful.cli import main; main()"]
Measurement = Callable[[float], float]  # from seconds to units per second


def command_work(name: str, folder: Path, is_quick: bool, stack: ExitStack) -> Measurement:
    """A function that measures a command, until `stack` is closed.

    Args:
        folder: has the model `plain`, which is not optimized, and `texts.txt`.
    """
    if name == "serve":
        return _serve(folder, stack)
    if name == "bulk":
        return lambda seconds: _bulk(folder, 16 if is_quick else SENTENCES)
    return lambda seconds: _train(folder, name == "two processes", is_quick)


def write_pairs(folder: Path, words: Sequence[str], count: int) -> None:
    """Write random pairs for a training of the recipe `translation`."""
    source = random.Random(1)
    lines = [" ".join(source.choices(words, k=source.randint(5, 30))) for _ in range(count)]
    pairs = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines]
    (folder / "pairs.tsv").write_text("\n".join(pairs) + "\n")


def _train(folder: Path, in_two: bool, is_quick: bool) -> float:
    """Optimizer steps per second of a training, without preparation and first steps."""
    out = folder / f"run-{os.getpid()}"
    shutil.rmtree(out, ignore_errors=True)
    first, last = (1, 2) if is_quick else (FIRST, LAST)
    # One process is to believe that the run is long: it then measures how many threads to use.
    steps = last if in_two else 10**6
    settings = [
        f"data.train.file={folder / 'pairs.tsv'}",
        "data.valid_size=32",
        f"training.max_steps={steps}",
        "training.max_epochs=null",
        f"training.log_every={first}",
        "evaluation.decode_sentences=0",
        "evaluation.metric=loss",
        "evaluation.final_beam_size=1",
    ]
    if is_quick:
        settings += ["model.d_model=16", "model.num_heads=2", "model.d_ff=16"]
    changes = [part for setting in settings for part in ("--set", setting)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*torchrun, "-m", "heedful"] if in_two else _PROGRAM
    command = [sys.executable, *program, "train", "translation", "--quiet", "--out", str(out)]
    process = subprocess.Popen([*command, *changes])
    times = _logged(out / "log.jsonl", last, process)
    process.terminate()  # jobs of a shell in the background ignore SIGINT
    process.wait()
    return (last - first) / (times[last] - times[first])


def _logged(log: Path, last: int, process: "subprocess.Popen[bytes]") -> Mapping[int, float]:
    """The seconds of the run at each logged step, once `last` is among them."""
    deadline = time.monotonic() + _LIMIT
    while time.monotonic() < deadline:
        complete = (log.read_text() if log.is_file() else "").rpartition("\n")[0]
        events = [json.loads(line) for line in complete.splitlines()]
        times = {
            event["step"]: event["seconds"] for event in events if event["event"] == "step_done"
        }
        if last in times:
            return times
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with {process.returncode}")
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the training took more than {_LIMIT:g} seconds")


def _bulk(folder: Path, count: int) -> float:
    """Sentences per second of a job, from the start of the command to its end."""
    texts, out = folder / f"bulk-{os.getpid()}.txt", folder / f"bulk-{os.getpid()}"
    lines = cycle((folder / "texts.txt").read_text().splitlines())
    texts.write_text("".join(f"{next(lines)}\n" for _ in range(count)))
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, *_PROGRAM, "bulk", str(folder / "plain"), "--task", "translate"]
    options = ["--beam-size", "1", "--max-new-tokens", str(NEW_TOKENS), "--quiet"]
    began = time.perf_counter()
    subprocess.run([*command, "--input", str(texts), "--output", str(out), *options], check=True)
    return count / (time.perf_counter() - began)


def optimized(folder: Path) -> dict[str, Any]:
    """The JSON output of `heedful optimize` for throughput; conversions are reused."""
    command = [sys.executable, *_PROGRAM, "optimize", str(folder / "optimized"), "--json"]
    options = ["--src", str(folder / "texts.txt"), "--for", "throughput"]
    shown = subprocess.run(
        [*command, *options, "--precision", "float32"], check=True, capture_output=True, text=True
    )
    content: dict[str, Any] = json.loads(shown.stdout)
    return content


def _serve(folder: Path, stack: ExitStack) -> Measurement:
    """Start a server; the function measures its answers per second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = [sys.executable, *_PROGRAM, "serve", f"m={folder / 'plain'}", "--port", str(port)]
    log = stack.enter_context((folder / "serve.log").open("w"))
    process = subprocess.Popen(server, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    bodies = [
        json.dumps({"q": line}).encode() for line in (folder / "texts.txt").read_text().splitlines()
    ]
    asyncio.run(_is_ready(port, bodies[0], process))
    return lambda seconds: asyncio.run(_answers_per_second(port, bodies, seconds))


async def _is_ready(port: int, body: bytes, process: "subprocess.Popen[Any]") -> None:
    client = Client(port)
    while (await client.ask("/translate", body))[0] != 200:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        await asyncio.sleep(0.2)
    client.close()


async def _answers_per_second(port: int, bodies: Sequence[bytes], seconds: float) -> float:
    """The rate of clients that ask without a pause."""
    texts, began = cycle(bodies), time.perf_counter()

    async def ask() -> int:
        client, count = Client(port), 0
        while count == 0 or time.perf_counter() - began < seconds:
            status, content = await client.ask("/translate", next(texts))
            if status != 200:
                raise RuntimeError(f"the server answered {status}: {content.decode()}")
            count += 1
        client.close()
        return count

    counts = await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    return sum(counts) / (time.perf_counter() - began)
