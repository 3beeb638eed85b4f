"""The command where a model was optimised: how soon it answers, and what memory long files take.

A model of the tiny size with random weights, run by CTranslate2 in int8. One sentence is translated
from the start of the process to its end, by `heedful translate`, by CTranslate2 in a script of its
own, and by nothing but `import torch`; then files of sentences of random lengths are.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import argument_parser, command_line, table, whole, write_results
from decoding import SHAPES, SMALL, Shape, tune, write_model

BY_HAND = """
import json, sys, ctranslate2, tokenizers
model, form = sys.argv[1:]
with open(f"{model}/tokenizer.json") as file:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(json.load(file)["tokenizer"]))
translator = ctranslate2.Translator(form, compute_type="int8", intra_threads=1)
tokens = tokenizer.encode(sys.stdin.read(), add_special_tokens=False).tokens
source = [*tokens, tokenizer.id_to_token(2)]
[found] = translator.translate_batch([source], beam_size=1, max_decoding_length=20)
ids = [tokenizer.token_to_id(token) for token in found.hypotheses[0]]
print(tokenizer.decode(ids))
"""
# Starts a command, from a process that is small: a child is counted with what its parent held.
START = """
import json, os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
seconds = time.perf_counter() - began
process.returncode = os.waitstatus_to_exitcode(status)
most = used.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
found = {"seconds": seconds, "processor seconds": used.ru_utime + used.ru_stime, "MiB": most}
print(json.dumps(found))
sys.exit(process.returncode)
"""
NEW_TOKENS = 4  # of each sentence of a file


def main() -> None:
    """Measure, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9, help="the median is over these")
    arguments = parser.parse_args()
    quick = arguments.quick
    rounds, shape = (1, SMALL["quick"]) if quick else (arguments.rounds, SHAPES["tiny"])
    sizes = (10, 100) if quick else (10_000, 100_000)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_model(shape, folder)
        asked = {"engines": ["ctranslate2"], "precisions": ["int8"]}
        tune(folder / "ours", shape, 1, words, asked)
        starts = measured_starts(folder, words, rounds, unmeasured=0 if quick else 1)
        files = {size: measured_file(folder, shape, words, size) for size in sizes}
    write_results(
        "command",
        "The command: its start, and its memory",
        sections(starts, files, rounds),
        {"rounds": rounds, "starts": starts, "files": {str(n): each for n, each in files.items()}},
        directory=arguments.results,
        command=command_line(),
        packages=("ctranslate2", "tokenizers"),
    )


def measured_starts(
    folder: Path, words: list[str], rounds: int, unmeasured: int
) -> dict[str, dict[str, float]]:
    """Of each command the medians, all of them in turn, after rounds that are not measured."""
    model, form = folder / "ours", folder / "by_hand" / "engines" / "ctranslate2" / "int8"
    python = sys.executable
    cases = {
        "heedful translate": [python, "-c", "from heedful.cli import main; main()", "translate"],
        "CTranslate2 by hand": [python, "-c", BY_HAND, str(model), str(form)],
        "import torch": [python, "-c", "import torch"],
    }
    cases["heedful translate"] += [str(model), "--beam", "1", "--max-new-tokens", "20"]
    sentence = " ".join(words[:15])  # and 20 new tokens
    found: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(unmeasured + rounds):
        for name, case in cases.items():
            found[name].append(resources(case, sentence))
    return {
        name: {key: statistics.median(each[key] for each in some[unmeasured:]) for key in some[0]}
        for name, some in found.items()
    }


def measured_file(folder: Path, shape: Shape, words: list[str], size: int) -> dict[str, float]:
    """What so many sentences take, from file to file."""
    draw = random.Random(1)
    lines = (
        " ".join(draw.choices(words, k=draw.randint(1, shape.prompt - 1))) for _ in range(size)
    )
    (folder / "in").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    verb = ["translate", str(folder / "ours"), "--max-new-tokens", str(NEW_TOKENS)]
    files = ["-i", str(folder / "in"), "-o", str(folder / "out")]
    code = "from heedful.cli import main; main()"
    found = resources([sys.executable, "-c", code, *verb, *files], "")
    with (folder / "out").open(encoding="utf-8") as out:
        assert sum(1 for _ in out) == size
    return found


def resources(command: list[str], given: str) -> dict[str, float]:
    """Of a process from its start to its end: seconds, those of the processor, most MiB held."""
    started = [sys.executable, "-c", START, *command]
    done = subprocess.run(started, input=f"{given}\n", capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def sections(
    starts: dict[str, dict[str, float]], files: dict[int, dict[str, float]], rounds: int
) -> list[str]:
    """The page."""
    heads = ["", "seconds", "of the processor", "MiB at most"]

    def row(name: str, each: dict[str, float]) -> list[Any]:
        values = each["seconds"], each["processor seconds"]
        return [name, *(f"{value:.2f}" for value in values), whole(each["MiB"])]

    return [
        "A model of the tiny size with random weights, optimised: CTranslate2 in int8.",
        "## One sentence, from the start of the process to its end",
        table(heads, [row(name, each) for name, each in starts.items()]),
        f"Medians of {rounds} rounds, all in turn; files were read before.",
        "## Files of sentences of random lengths",
        table(heads, [row(f"{size:,} sentences", each) for size, each in files.items()]),
        f"From file to file, {NEW_TOKENS} new tokens each.",
    ]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
