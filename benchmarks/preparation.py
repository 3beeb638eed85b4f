"""Preparation of large data: speed and memory by workers, equality, and resumption after a kill.

    python benchmarks/preparation.py                     # 20 million pairs, 5 million texts
    python benchmarks/preparation.py --pairs 200000

Made pairs of sentences, and texts for a language model, are prepared with 1 and with 2 workers,
each on one core. The memory is that of all processes of a preparation together: the sum of their
proportional set sizes (PSS), sampled. Then a preparation is killed (SIGKILL) when half of its rows
are tokenized, and started again.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, argument_parser, command_line, table, write_results
from heedful.data.column_writer import PROGRESS
from heedful.data.prepared import MANIFEST, UNFINISHED

PAIRS, QUICK_PAIRS = 20_000_000, 1_000
TEXTS_SHARE = 4  # pairs for each text of the language model
WORKERS = (1, 2)
MEBIBYTE = 1 << 20
TRAINING = {"max_steps": 1, "schedule": {"name": "constant", "learning_rate": 0.001}}
_SYLLABLES = (
    "ka",
    "lo",
    "mi",
    "ten",
    "ra",
    "su",
    "vor",
    "el",
    "gan",
    "ti",
    "pre",
    "no",
    "che",
    "ün",
)
_NUM_WORDS = 50_000
_INTERVAL = 0.1  # seconds between two samples of memory


def main() -> None:
    """Make data, prepare them, and write the page."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="number of sentence pairs")
    parser.add_argument("--work", type=Path, help="folder for data and caches; default: temporary")
    arguments = parser.parse_args()
    num_pairs = QUICK_PAIRS if arguments.quick else arguments.pairs
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        data = measure(Path(folder), num_pairs, max(1, num_pairs // TEXTS_SHARE))
    write_results(
        "preparation",
        "Preparation of large data",
        page(data),
        data,
        directory=arguments.results,
        command=command_line({arguments.work: "WORK"}),
        packages=("tokenizers", "numpy"),
    )


def measure(folder: Path, num_pairs: int, num_texts: int) -> dict[str, Any]:
    """The results of all preparations, as JSON."""
    pairs = [folder / "pairs.src", folder / "pairs.tgt"]
    write_pairs(pairs, num_pairs)
    texts = folder / "texts.txt"
    write_texts(texts, num_texts)
    translation = {
        "task": "translation",
        "data": {"train": {"src": str(pairs[0]), "tgt": str(pairs[1])}},
        "training": TRAINING,
    }
    language_model = {
        "task": "language_modeling",
        "data": {"train": {"text": str(texts)}, "valid_size": 0.01},
        "training": TRAINING,
    }
    cases = {"pairs": (translation, num_pairs), "texts": (language_model, num_texts)}
    results: dict[str, Any] = {}
    for name, (recipe, num_rows) in cases.items():
        runs = {
            workers: prepare(folder / f"{name}-{workers}", recipe, workers) for workers in WORKERS
        }
        digests = [run.files for run in runs.values()]
        results[name] = {
            "rows": num_rows,
            "workers": {str(workers): run.to_json(num_rows) for workers, run in runs.items()},
            "speedup": runs[WORKERS[0]].seconds / runs[WORKERS[-1]].seconds,
            "equal": all(files == digests[0] for files in digests),
        }
        print(json.dumps({name: results[name]}, indent=2))
    results["killed"] = kill_and_resume(folder / "killed", translation, digests_of(folder, "pairs"))
    print(json.dumps({"killed": results["killed"]}, indent=2))
    return results


@dataclass
class Run:
    """A finished preparation: its seconds, its peak memory in bytes, digests of its files."""

    seconds: float
    peak: int
    files: dict[str, str]

    def to_json(self, num_rows: int) -> dict[str, float]:
        return {
            "seconds": round(self.seconds, 2),
            "rows/s": round(num_rows / self.seconds, 1),
            "peak MiB": round(self.peak / MEBIBYTE, 1),
        }


def start(cache: Path, recipe: dict[str, Any], workers: int) -> "subprocess.Popen[bytes]":
    """Start `heedful prepare` with a separate cache."""
    cache.mkdir(exist_ok=True)
    path = cache / "recipe.json"
    path.write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "heedful", "prepare", str(path), "--quiet"]
    environment = {
        **os.environ,
        "HEEDFUL_CACHE": str(cache),
        "PYTHONPATH": str(ROOT / "src"),
        # One core for each worker, and one for the training of the tokenizer.
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [*command, "--set", f"data.workers={workers}"], env=environment, stderr=subprocess.PIPE
    )


def prepare(cache: Path, recipe: dict[str, Any], workers: int) -> Run:
    """Prepare data and measure; `cache` may hold an unfinished preparation."""
    began = time.perf_counter()
    process = start(cache, recipe, workers)
    peak = [0]
    watcher = threading.Thread(target=watch_memory, args=(process, peak))
    watcher.start()
    errors = process.communicate()[1]
    seconds = time.perf_counter() - began
    watcher.join()
    if process.returncode:
        raise SystemExit(f"heedful prepare failed: {errors.decode()}")
    return Run(seconds, peak[0], digests_of(cache.parent, cache.name))


def digests_of(folder: Path, name: str) -> dict[str, str]:
    """The digests of the prepared files, of which the manifest has a list."""
    caches = [folder / name, *(folder / f"{name}-{workers}" for workers in WORKERS)]
    cache = next(path for path in caches if path.is_dir())
    [manifest] = (cache / "data").glob(f"*/{MANIFEST}")
    content = json.loads(manifest.read_text())
    return {"folder": manifest.parent.name, **content["files"]}


def kill_and_resume(
    cache: Path, recipe: dict[str, Any], expected: dict[str, str]
) -> dict[str, Any]:
    """Kill a preparation by two workers when half is done, and start it again."""
    whole = (expected["folder"], json.dumps(expected, sort_keys=True))
    began = time.perf_counter()
    process = start(cache, recipe, WORKERS[-1])
    half = progress_at_half(cache, whole[0])
    while process.poll() is None and position(cache, whole[0]) < half():
        time.sleep(0.02)
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed_after = time.perf_counter() - began
    at = position(cache, whole[0])
    resumed = prepare(cache, recipe, WORKERS[-1])
    return {
        "was running": was_running,
        "chunks done": at,
        "seconds before": round(killed_after, 2),
        "seconds after": round(resumed.seconds, 2),
        "equal": json.dumps(resumed.files, sort_keys=True) == whole[1],
    }


def position(cache: Path, name: str) -> int:
    """The chunks that an unfinished preparation has committed."""
    path = cache / "data" / f"{name}{UNFINISHED}" / "train" / PROGRESS
    try:
        return int(json.loads(path.read_text())["position"])
    except FileNotFoundError:
        return 0


def progress_at_half(cache: Path, name: str) -> Any:
    """A function that returns half of the number of chunks, once the first pass is done."""
    path = cache / "data" / f"{name}{UNFINISHED}" / "plan.json"

    def half() -> float:
        try:
            return max(1, len(json.loads(path.read_text())["chunks"]["num_rows"]) // 2)
        except FileNotFoundError:
            return float("inf")

    return half


def watch_memory(process: "subprocess.Popen[bytes]", peak: list[int]) -> None:
    """Store in `peak` the largest memory of a process and its descendants together, in bytes."""
    while process.poll() is None:
        peak[0] = max(peak[0], sum(map(proportional_set_size, descendants(process.pid))))
        time.sleep(_INTERVAL)


def descendants(pid: int) -> Iterator[int]:
    """The ids of a process and of all its descendants."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield from descendants(int(child))


def proportional_set_size(pid: int) -> int:
    """The memory of a process in bytes; pages that several processes share are divided."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def write_pairs(paths: Sequence[Path], count: int) -> None:
    """Write seeded pairs: words by Zipf's law, of which the targets are others in other order."""
    sides = (made_words(1), made_words(2))
    with paths[0].open("w") as src, paths[1].open("w") as tgt:
        for indices in sentences(count, seed=0):
            src.write(" ".join([sides[0][i] for i in indices]) + "\n")
            tgt.write(" ".join([sides[1][i] for i in reversed(indices)]) + "\n")


def write_texts(path: Path, count: int) -> None:
    """Write seeded texts, one a line."""
    words = made_words(3)
    with path.open("w") as file:
        for indices in sentences(count, seed=1):
            file.write(" ".join([words[i] for i in indices]) + "\n")


def made_words(seed: int) -> list[str]:
    """Words made of syllables."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, _NUM_WORDS).tolist()
    return ["".join(rng.choice(_SYLLABLES, size)) for size in sizes]


def sentences(count: int, *, seed: int) -> Iterator[list[int]]:
    """Indices of the words of sentences: 3 to 27 words, about 14."""
    rng = np.random.default_rng(seed)
    while count > 0:
        size = min(count, 10_000)
        lengths = rng.binomial(24, 0.45, size) + 3
        indices = (_NUM_WORDS ** rng.random(int(lengths.sum()))).astype(int) - 1
        for sentence in np.split(indices, np.cumsum(lengths)[:-1]):
            yield sentence.tolist()
        count -= size


def page(data: dict[str, Any]) -> list[str]:
    """The sections of the page."""
    rows = [
        [f"{case['rows']:,} {name}", workers, *run.values()]
        for name, case in data.items()
        if name != "killed"
        for workers, run in case["workers"].items()
    ]
    header = ["data", "workers", "seconds", "rows/s", "peak MiB, all processes"]
    lines = [
        f"* {name}: {case['speedup']:.2f} times as fast with {WORKERS[-1]} workers as with one;"
        f" the prepared data are {'equal, byte for byte' if case['equal'] else 'NOT EQUAL'}."
        for name, case in data.items()
        if name != "killed"
    ]
    killed = data["killed"]
    lines.append(
        f"* Killed after {killed['seconds before']} s and started again: {killed['seconds after']}"
        f" s to the end; the result is {'equal' if killed['equal'] else 'NOT EQUAL'}."
    )
    return [
        str(__doc__).partition("\n\n")[2].rpartition("\n\n")[2],
        table(header, rows),
        "\n".join(lines),
    ]


if __name__ == "__main__":
    if not Path("/proc/self/smaps_rollup").is_file():
        raise SystemExit("this benchmark reads the memory of processes from Linux's /proc")
    main()
