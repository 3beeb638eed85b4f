"""Start-up time and memory of `heedful translate` with an optimized model: a sentence, and files.

A model of the tiny size with random weights is run by CTranslate2 in int8, by `heedful translate`
and by a script with CTranslate2 only. Measured from the start of the process to its end are one
sentence, and files of sentences of random lengths. Workers, threads and batches of the script for
files are selected by `common.fastest` on a file of other sentences.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    argument_parser,
    command_line,
    fastest,
    paired_ratio,
    table,
    whole,
    write_results,
)
from decoding_systems import SHAPES, SMALL, Setting, Shape, prompts, tune, write_model
from heedful.hardware import cores

# From standard input to standard output; CTranslate2 sorts the lines of the whole file.
BY_HAND = """
import json, sys, ctranslate2, tokenizers
model, form, new, workers, threads, unit, size = sys.argv[1:]
with open(f"{model}/tokenizer.json") as file:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(json.load(file)["tokenizer"]))
layout = {"inter_threads": int(workers), "intra_threads": int(threads)}
translator = ctranslate2.Translator(form, compute_type="int8", **layout)
lines = sys.stdin.read().splitlines()
encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
end = tokenizer.id_to_token(2)
batches = {"max_batch_size": int(size), "batch_type": unit}
options = {"beam_size": 1, "max_decoding_length": int(new)}
results = translator.translate_batch([[*e.tokens, end] for e in encoded], **options, **batches)
ids = [[tokenizer.token_to_id(token) for token in result.hypotheses[0]] for result in results]
print("\\n".join(tokenizer.decode_batch(ids)))
"""
# Starts a command from a small process: the peak memory of a child includes that of its parent.
START = """
import json, os, subprocess, sys, time
began = time.perf_counter()
with open(sys.argv[1], "w") as out:
    process = subprocess.Popen(sys.argv[2:], stdout=out, stderr=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
seconds = time.perf_counter() - began
process.returncode = os.waitstatus_to_exitcode(status)
peak = used.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
resources = {"seconds": seconds, "processor seconds": used.ru_utime + used.ru_stime, "MiB": peak}
print(json.dumps(resources))
sys.exit(process.returncode)
"""
NEW_TOKENS = 4  # for each sentence of a file
OURS, BY_SCRIPT = "heedful translate", "CTranslate2 by hand"
BATCHES = (("examples", 16), ("examples", 32), ("examples", 64), ("tokens", 512), ("tokens", 1024))
Used = dict[str, float]  # resources of a process


def main() -> None:
    """Measure, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that measure start-up")
    parser.add_argument("--file-rounds", type=int, default=3, help="rounds that measure files")
    arguments = parser.parse_args()
    quick = arguments.quick
    shape = SMALL["quick"] if quick else SHAPES["tiny"]
    rounds = (1, 1) if quick else (arguments.rounds, arguments.file_rounds)
    sizes = (10, 100) if quick else (10_000, 100_000)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_model(shape, folder)
        tried = {"backends": ["ctranslate2"], "precisions": ["int8"]}
        setting = Setting(1, max(shape.batches), mixed=True)
        tune(folder / "heedful", shape, setting, prompts(shape, setting, seed=2), words, tried)
        starts = measure_starts(folder, words, rounds[0], unmeasured=0 if quick else 1)
        layout = choose_layout(folder, shape, words, quick=quick)
        files = {
            size: measure_files(folder, shape, words, size, layout, rounds[1]) for size in sizes
        }
    content = {"starts": starts, "files": {str(size): cases for size, cases in files.items()}}
    write_results(
        "command",
        "The command: its start, and its memory",
        sections(starts, files, rounds, layout),
        {"rounds": rounds, "by_hand_on_files": layout, **content},
        directory=arguments.results,
        command=command_line(),
        packages=("ctranslate2", "tokenizers"),
    )


def heedful_command(folder: Path, *flags: str) -> list[str]:
    """The command line of `heedful translate`, which searches greedily, as the script does."""
    words = [sys.executable, "-c", "from heedful.cli import main; main()", "translate"]
    return [*words, str(folder / "heedful"), "--beam-size", "1", *flags]


def script_command(folder: Path, new: int, layout: list[str]) -> list[str]:
    """The command line of the script; `layout` is workers, threads, unit and size of batches."""
    form = folder / "by_hand" / "backends" / "ctranslate2" / "int8"
    return [sys.executable, "-c", BY_HAND, str(folder / "heedful"), str(form), str(new), *layout]


def measure_starts(
    folder: Path, words: list[str], rounds: int, unmeasured: int
) -> dict[str, list[Used]]:
    """Resources of each command by round, in alternating rounds, after unmeasured ones."""
    cases = {
        OURS: heedful_command(folder, "--max-new-tokens", "20"),
        # One thread is fastest for one sentence at the tiny size (docs/results/decoding.md).
        BY_SCRIPT: script_command(folder, 20, ["1", "1", "examples", "1"]),
    }
    source = folder / "sentence"
    source.write_text(" ".join(words[:15]) + "\n", encoding="utf-8")  # and 20 new tokens
    records: dict[str, list[Used]] = {name: [] for name in cases}
    for _ in range(unmeasured + rounds):
        for name, case in cases.items():
            records[name].append(run_measured(case, source))
    return {name: round_records[unmeasured:] for name, round_records in records.items()}


def choose_layout(folder: Path, shape: Shape, words: list[str], *, quick: bool) -> list[str]:
    """The fastest workers, threads and batches of the script for a file."""
    source = folder / "others"
    write_sentences(source, shape, words, 20 if quick else 4_000, seed=2)
    layouts = sorted({(cores(), 1), (1, cores())})
    tried = [
        [str(workers), str(threads), unit, str(size)]
        for workers, threads in layouts[: 1 if quick else None]
        for unit, size in BATCHES[: 1 if quick else None]
    ]

    def run(layout: list[str]) -> float:
        run_measured(script_command(folder, NEW_TOKENS, layout), source)
        return 1.0

    return tried[fastest([partial(run, layout) for layout in tried])]


def measure_files(
    folder: Path, shape: Shape, words: list[str], size: int, layout: list[str], rounds: int
) -> dict[str, list[Used]]:
    """Resources of each command by round for a file of `size` sentences."""
    source = folder / "in"
    write_sentences(source, shape, words, size, seed=1)
    cases = {
        OURS: heedful_command(folder, "--max-new-tokens", str(NEW_TOKENS)),
        BY_SCRIPT: script_command(folder, NEW_TOKENS, layout),
    }
    records: dict[str, list[Used]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases)[:: 1 if number % 2 else -1]:
            records[name].append(run_measured(cases[name], source, folder / "out"))
            with (folder / "out").open(encoding="utf-8") as out:
                assert sum(1 for _ in out) == size
    return records


def write_sentences(path: Path, shape: Shape, words: list[str], count: int, seed: int) -> None:
    """Write a file of sentences of random lengths."""
    draw = random.Random(seed)
    lines = (
        " ".join(draw.choices(words, k=draw.randint(1, shape.prompt - 1))) for _ in range(count)
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def run_measured(command: list[str], source: Path, out: Path = Path(os.devnull)) -> Used:
    """Seconds, processor seconds and peak MiB of a process from start to end."""
    words = [sys.executable, "-c", START, str(out), *command]
    with source.open(encoding="utf-8") as stdin:
        process = subprocess.run(words, stdin=stdin, capture_output=True, text=True, check=True)
    resources: Used = json.loads(process.stdout)
    return resources


def sections(
    starts: dict[str, list[Used]],
    files: dict[int, dict[str, list[Used]]],
    rounds: tuple[int, int],
    layout: list[str],
) -> list[str]:
    """The sections of the page."""
    heads = ["", "seconds", "processor seconds", "peak MiB", "heedful's seconds / these"]

    def row(name: str, records: list[Used], ours: list[Used]) -> list[Any]:
        seconds, processor, memory = (
            statistics.median(one[key] for one in records)
            for key in ("seconds", "processor seconds", "MiB")
        )
        times = paired_ratio([one["seconds"] for one in ours], [one["seconds"] for one in records])
        return [name, f"{seconds:.2f}", f"{processor:.2f}", whole(memory), f"{times:.2f}"]

    return [
        "A model of the tiny size with random weights, optimized: CTranslate2 in int8.",
        "## One sentence, from the start of the process to its end",
        table(heads, [row(name, records, starts[OURS]) for name, records in starts.items()]),
        f"Medians of {rounds[0]} alternating rounds with files in the disk cache. The ratio is the "
        "median of the ratios within a round.",
        "## Files of sentences of random lengths",
        table(
            heads,
            [
                row(f"{size:,} sentences, {name}", records, cases[OURS])
                for size, cases in files.items()
                for name, records in cases.items()
            ],
        ),
        f"From file to file by greedy search, {NEW_TOKENS} new tokens per sentence, medians of "
        f"{rounds[1]} rounds. By hand: the tokenizer's `encode_batch`, one call of "
        "`translate_batch` with all lines, "
        f"`decode_batch`; {layout[0]}×{layout[1]} workers × threads and batches of {layout[3]} "
        f"{layout[2]}, which were fastest on other sentences.",
    ]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
