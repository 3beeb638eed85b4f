"""Bulk translation: its rate beside `heedful translate`, kills and resumption, and Ray.

    python benchmarks/bulk.py                      # a million sentences
    python benchmarks/bulk.py --sentences 20000

A model of the tiny size with random weights is run by CTranslate2 in int8. `heedful bulk` and
`heedful translate` translate the same file in alternating rounds, from the start of the process to
its end. Then a job on all sentences is killed (SIGKILL) at random moments, with its workers, and
continued, and its folder is compared with that of a job without interruption, and with that of a
job by Ray on two workers, if Ray is installed.
"""

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    argument_parser,
    command_line,
    installed,
    interleaved,
    paired_ratio,
    table,
    whole,
    write_results,
)
from decoding_systems import SHAPES, SMALL, Setting, prompts, tune, write_model
from heedful.backends.hardware import cores
from heedful.bulk.folder import LOG

SENTENCES, QUICK_SENTENCES = 1_000_000, 300
RATE_SENTENCES = 100_000  # of the rounds that measure the rate
NEW_TOKENS = 20  # of each sentence: with random weights no output ends
LENGTHS = (3, 30)  # words of a sentence
KILLS = 10
BULK, TRANSLATE = "heedful bulk", "heedful translate"
PROGRAM = [sys.executable, "-c", "from heedful.cli import main; main()"]


def main() -> None:
    """Measure, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="of the killed job")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that measure the rate")
    arguments = parser.parse_args()
    quick = arguments.quick
    shape = SMALL["quick"] if quick else SHAPES["tiny"]
    num_sentences = QUICK_SENTENCES if quick else arguments.sentences
    num_kills = 2 if quick else KILLS
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_model(shape, folder)
        setting = Setting(1, max(shape.batches), mixed=True)
        tried = {"backends": ["ctranslate2"], "precisions": ["int8"]}
        tune(folder / "heedful", shape, setting, prompts(shape, setting, seed=2), words, tried)
        write_sentences(folder / "all.txt", words, num_sentences)
        lines = (folder / "all.txt").read_text().splitlines(keepends=True)
        rate_lines = lines[: min(RATE_SENTENCES, num_sentences)]
        (folder / "rate.txt").write_text("".join(rate_lines))
        rounds = 1 if quick else arguments.rounds
        rates = measure_rates(folder, len(rate_lines), rounds)
        shard_rows = 50 if quick else 4_096
        killed = kill_and_continue(folder, shard_rows, num_kills)
        ray = ray_equal(folder, shard_rows) if installed("ray") else None
    data = {
        "sentences": {"rate": len(rate_lines), "killed": num_sentences},
        "rates": rates,
        "ratio": paired_ratio(rates[BULK], rates[TRANSLATE]),
        "killed": killed,
        "ray_equal": ray,
    }
    write_results(
        "bulk",
        "Bulk translation",
        page(data),
        data,
        directory=arguments.results,
        command=command_line(),
        packages=("ctranslate2", "ray"),
    )


def write_sentences(path: Path, words: Sequence[str], count: int) -> None:
    """Write seeded sentences of random lengths."""
    source = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            file.write(" ".join(source.choices(words, k=source.randint(*LENGTHS))) + "\n")


def bulk_command(folder: Path, name: str, out: str, *flags: str) -> list[str]:
    """The command line of `heedful bulk` for a file of the folder."""
    files = ["--input", str(folder / name), "--output", str(folder / out)]
    threads = ["--workers", str(cores()), "--threads", "1", "--quiet"]
    decoding = ["--beam-size", "1", "--max-new-tokens", str(NEW_TOKENS)]
    model = str(folder / "heedful")
    return [*PROGRAM, "bulk", model, "--task", "translate", *files, *threads, *decoding, *flags]


def translate_command(folder: Path, name: str, out: str) -> list[str]:
    """The command line of `heedful translate` for a file of the folder."""
    files = ["-i", str(folder / name), "-o", str(folder / out)]
    decoding = ["--beam-size", "1", "--max-new-tokens", str(NEW_TOKENS)]
    return [*PROGRAM, "translate", str(folder / "heedful"), *files, *decoding]


def measure_rates(folder: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """Sentences per second of both commands by round; their translations must be equal."""

    def bulk() -> float:
        subprocess.run(["rm", "-rf", folder / "rate"], check=True)
        subprocess.run(bulk_command(folder, "rate.txt", "rate"), check=True)
        return count

    def translate() -> float:
        subprocess.run(translate_command(folder, "rate.txt", "rate.out"), check=True)
        return count

    rates = interleaved({BULK: bulk, TRANSLATE: translate}, rounds=rounds)
    shards = sorted((folder / "rate").glob("part-*"))
    outputs = [json.loads(line)["output"] for path in shards for line in path.open()]
    if outputs != (folder / "rate.out").read_text().splitlines():
        raise SystemExit("the translations of the two commands differ")
    return rates


def kill_and_continue(folder: Path, shard_rows: int, num_kills: int) -> dict[str, Any]:
    """A job without interruption, and one that is killed at random moments and continued."""
    command = partial(bulk_command, folder, "all.txt")
    flags = ["--shard-rows", str(shard_rows)]
    began = time.perf_counter()
    subprocess.run(command("whole", *flags), check=True)
    seconds = time.perf_counter() - began
    source, finished = random.Random(1), []
    for _ in range(num_kills):
        process = subprocess.Popen(command("killed", *flags), start_new_session=True)
        try:
            process.wait(source.uniform(0.3, 1.7) * seconds / num_kills + 2)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log = folder / "killed" / LOG
        finished.append(len(log.read_text().splitlines()) if log.is_file() else None)
    subprocess.run(command("killed", *flags), check=True)
    equal = digests(folder / "killed") == digests(folder / "whole")
    return {"kills": finished, "seconds": round(seconds, 1), "equal": equal}


def ray_equal(folder: Path, shard_rows: int) -> bool:
    """True if a job by Ray on two workers has the same files."""
    flags = ["--shard-rows", str(shard_rows), "--with", "ray", "--workers", "2"]
    subprocess.run(bulk_command(folder, "all.txt", "ray", *flags), check=True)
    return digests(folder / "ray") == digests(folder / "whole")


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file of a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def page(data: dict[str, Any]) -> list[str]:
    """The sections of the page."""
    rates, killed, ray = data["rates"], data["killed"], data["ray_equal"]
    rows = [(name, whole(statistics.median(values))) for name, values in rates.items()]
    counts = data["sentences"]
    equal = "equal, byte for byte" if killed["equal"] else "different"
    moments = ", ".join("before the first" if n is None else f"{n:,}" for n in killed["kills"])
    by_ray = "not installed" if ray is None else "equal" if ray else "different"
    return [
        f"{counts['rate']:,} sentences in each round, medians of {len(rates[BULK])} rounds; from "
        f"the start of each process to its end. Ratio: {data['ratio']:.2f}.",
        table(["command", "sentences/s"], rows),
        "## Killed and continued",
        f"A job of {counts['killed']:,} sentences ({killed['seconds']:,} s without interruption) "
        f"was killed {len(killed['kills'])} times, after these numbers of finished shards: "
        f"{moments}. Its folder and that of the job without interruption: {equal}.",
        f"By Ray on two workers of this machine: {by_ray}.",
    ]


if __name__ == "__main__":
    main()
