"""Bulk translation: its rate beside `heedful translate`, kills and resumption, and Ray.

    python benchmarks/bulk.py                      # a million sentences
    python benchmarks/bulk.py --sentences 20000
    python benchmarks/bulk.py --parts rates        # keep what the page says of kills and Ray

A model of the tiny size with random weights is run by CTranslate2 in int8. `heedful bulk` and
`heedful translate` translate the same file in alternating rounds, from the start of the process to
its end. Their batches differ, and with them the rounding of int8, which decides between two tokens
that are about equally probable: translations that differ are counted, and in float32 there must be
none. Then a job on all sentences is killed (SIGKILL) at random moments, with its workers, and
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
from heedful.bulk.folder import LOG
from heedful.hardware import cores

SENTENCES, QUICK_SENTENCES = 1_000_000, 300
RATE_SENTENCES = 100_000  # of the rounds that measure the rate
EQUAL_SENTENCES = 10_000  # of the comparison in float32
NEW_TOKENS = 20  # of each sentence: with random weights no output ends
LENGTHS = (3, 30)  # words of a sentence
KILLS = 10
PARTS = ("rates", "kills")
BULK, TRANSLATE = "heedful bulk", "heedful translate"
INT8, FLOAT32 = ("--precision", "int8"), ("--precision", "float32")
PROGRAM = [sys.executable, "-c", "from heedful.cli import main; main()"]


def main() -> None:
    """Measure, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sentences", type=int, default=SENTENCES, help="of the killed job")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that measure the rate")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="what to run; the page keeps the former results of the rest (kills: and Ray)",
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    shape = SMALL["quick"] if quick else SHAPES["tiny"]
    num_sentences = QUICK_SENTENCES if quick else arguments.sentences
    data = former_parts(arguments.results)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_model(shape, folder)
        setting = Setting(1, max(shape.batches), mixed=True)
        tried = {"backends": ["ctranslate2"], "precisions": ["int8", "float32"]}
        tune(folder / "heedful", shape, setting, prompts(shape, setting, seed=2), words, tried)
        write_sentences(folder / "all.txt", words, num_sentences)
        if "rates" in arguments.parts:
            data["rates"] = measure_rates(folder, 1 if quick else arguments.rounds)
        if "kills" in arguments.parts:
            shard_rows = 50 if quick else 4_096
            data["kills"] = kill_and_continue(folder, shard_rows, 2 if quick else KILLS)
            data["kills"]["ray"] = ray_equal(folder, shard_rows) if installed("ray") else None
    write_results(
        "bulk",
        "Bulk translation",
        page(data),
        data,
        directory=arguments.results,
        command=command_line(),
        packages=("ctranslate2", "ray"),
    )


def former_parts(results: Path) -> dict[str, Any]:
    """The parts of the former page's data; empty if there is no page."""
    path = results / "bulk.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    return {part: content[part] for part in PARTS if part in content}


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


def translate_command(folder: Path, name: str, out: str, *flags: str) -> list[str]:
    """The command line of `heedful translate` for a file of the folder."""
    files = ["-i", str(folder / name), "-o", str(folder / out)]
    decoding = ["--beam-size", "1", "--max-new-tokens", str(NEW_TOKENS)]
    return [*PROGRAM, "translate", str(folder / "heedful"), *files, *decoding, *flags]


def measure_rates(folder: Path, rounds: int) -> dict[str, Any]:
    """Sentences per second of both commands by round, and the number of unequal translations."""
    count = write_first(folder, "rate.txt", RATE_SENTENCES)

    def bulk() -> float:
        subprocess.run(["rm", "-rf", folder / "rate"], check=True)
        subprocess.run(bulk_command(folder, "rate.txt", "rate", *INT8), check=True)
        return count

    def translate() -> float:
        subprocess.run(translate_command(folder, "rate.txt", "rate.out", *INT8), check=True)
        return count

    rates = interleaved({BULK: bulk, TRANSLATE: translate}, rounds=rounds)
    compared = write_first(folder, "equal.txt", EQUAL_SENTENCES)
    subprocess.run(bulk_command(folder, "equal.txt", "equal", *FLOAT32), check=True)
    subprocess.run(translate_command(folder, "equal.txt", "equal.out", *FLOAT32), check=True)
    if num_unequal(folder, "equal"):
        raise SystemExit("the translations of the two commands differ in float32")
    return {
        "command": command_line(),
        "sentences": count,
        "ratio": paired_ratio(rates[BULK], rates[TRANSLATE]),
        "by_round": rates,
        "unequal": num_unequal(folder, "rate"),
        "equal in float32": compared,
    }


def write_first(folder: Path, name: str, most: int) -> int:
    """Write the first sentences, at most `most`, to another file; returns their number."""
    lines = (folder / "all.txt").read_text().splitlines(keepends=True)[:most]
    (folder / name).write_text("".join(lines))
    return len(lines)


def num_unequal(folder: Path, name: str) -> int:
    """The number of lines of `name`.out that differ from the output of bulk in the folder `name`.

    Raises:
        ValueError: one of them has more lines.
    """
    shards = sorted((folder / name).glob("part-*"))
    outputs = [json.loads(line)["output"] for path in shards for line in path.open()]
    lines = (folder / f"{name}.out").read_text().splitlines()
    return sum(output != line for output, line in zip(outputs, lines, strict=True))


def kill_and_continue(folder: Path, shard_rows: int, num_kills: int) -> dict[str, Any]:
    """A job without interruption, and one that is killed at random moments and continued."""
    command = partial(bulk_command, folder, "all.txt")
    flags = ["--shard-rows", str(shard_rows)]
    subprocess.run(command("whole", *flags), check=True)
    num_shards = len([*(folder / "whole").glob("part-*")])
    source, finished = random.Random(1), []
    for moment in sorted(source.sample(range(num_shards - 2), num_kills)):
        process = subprocess.Popen(command("killed", *flags), start_new_session=True)
        while num_finished(folder / "killed") < moment and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is not None:
            raise SystemExit("the job ended before it was killed")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        finished.append(num_finished(folder / "killed"))
    subprocess.run(command("killed", *flags), check=True)
    equal = digests(folder / "killed") == digests(folder / "whole")
    count = len((folder / "all.txt").read_bytes().splitlines())
    return {"command": command_line(), "sentences": count, "after": finished, "equal": equal}


def num_finished(folder: Path) -> int:
    """The number of shards that an unfinished job has written."""
    log = folder / LOG
    return len(log.read_text().splitlines()) if log.is_file() else 0


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
    sections: list[str] = []
    if rates := data.get("rates"):
        by_round = rates["by_round"]
        rows = [(name, whole(statistics.median(values))) for name, values in by_round.items()]
        sections += [
            f"{rates['sentences']:,} sentences in each round, medians of {len(by_round[BULK])} "
            "rounds; from the start of each process to its end. Ratio: "
            f"{rates['ratio']:.2f} (`{rates['command']}`). Of the translations {rates['unequal']} "
            "differ, as the commands form other batches, and the rounding of int8 depends on them; "
            f"in float32 {rates['equal in float32']:,} of {rates['equal in float32']:,} are equal.",
            table(["command", "sentences/s"], rows),
        ]
    if kills := data.get("kills"):
        equal = "equal, byte for byte" if kills["equal"] else "different"
        moments = ", ".join(f"{number:,}" for number in kills["after"])
        ray = kills["ray"]
        by_ray = "not installed" if ray is None else "equal" if ray else "different"
        sections += [
            "## Killed and continued",
            f"A job of {kills['sentences']:,} sentences was killed {len(kills['after'])} times, "
            f"after these numbers of finished shards: {moments}. Its folder and that of the job "
            f"without interruption: {equal} (`{kills['command']}`).",
            f"By Ray on two workers of this machine: {by_ray}.",
        ]
    return sections


if __name__ == "__main__":
    main()
