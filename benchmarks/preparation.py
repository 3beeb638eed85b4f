"""Preparation of large data: speed and memory by workers, equality, and resumption after a kill.

    python benchmarks/preparation.py                     # 20 million pairs, 10 GB of text
    python benchmarks/preparation.py --pairs 200000 --text-bytes 100000000 --work /tmp
    python benchmarks/preparation.py --parts texts       # keep what the page says of the rest

Made pairs of sentences, and texts for a language model, are prepared with 1 worker on one core and
with 2 workers on two cores. The main process, which reads and writes, and the training of the
tokenizer use the same cores; "tokenizer given" leaves that training out. Processor seconds and
memory are those of all processes of a preparation together; memory is the sum of their proportional
set sizes (PSS), sampled, which takes at most 1% of a core. Then a run of one step is started on the
data (translation: the default model; texts: a small one). At last a preparation is killed (SIGKILL)
when half of its rows are tokenized, and started again.

The limit of the machine: a fifth of the texts is prepared with 1 worker alone, and then twice at
once, each with 1 worker on its own core. Two workers that share all work evenly, and exchange
nothing, would be as much faster than one as these two together are than one alone.
"""

import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common import ROOT, argument_parser, command_line, table, write_results
from heedful.data.columns import PROGRESS
from heedful.data.prepared import MANIFEST, UNFINISHED

PAIRS, QUICK_PAIRS = 20_000_000, 1_000
TEXT_BYTES, QUICK_TEXT_BYTES = 10_000_000_000, 100_000
MADE_ROWS = 500_000  # of a file: more rows are copies of them, each with another word in front
SENTENCES = 10  # of a text
WORKERS = (1, 2)
PARTS = {
    "pairs": ("pairs", "pairs, tokenizer given"),
    "texts": ("texts",),
    "limit": ("limit",),
    "kill": ("killed",),
}
LIMIT_SHARE, LIMIT_ROUNDS = 5, 2  # the share of the texts is one fifth
MEBIBYTE = 1 << 20
TRAINING = {
    "max_steps": 1,
    "batch_tokens": 1_024,
    "schedule": {"name": "constant", "learning_rate": 0.001},
}
DECODER = {"architecture": "gpt2", "d_model": 64, "num_heads": 2, "num_layers": 2}
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
_INTERVAL = 0.1  # seconds between two samples of memory, at least
_SAMPLING = 0.01  # the share of a core that samples of memory take at most


def main() -> None:
    """Make data, prepare them, and write the page."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="number of sentence pairs")
    parser.add_argument("--text-bytes", type=int, default=TEXT_BYTES, help="size of the texts")
    parser.add_argument("--work", type=Path, help="folder for data and caches; default: temporary")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=[*PARTS],
        help="what to run; the page keeps the former results of the rest",
    )
    arguments = parser.parse_args()
    sizes = arguments.pairs, arguments.text_bytes
    if arguments.quick:
        sizes = QUICK_PAIRS, QUICK_TEXT_BYTES
    command = command_line({arguments.work: "WORK"})
    data = former_results(arguments.results)
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        for name, result in measure(Path(folder), arguments.parts, *sizes).items():
            data[name] = {"command": command, **result}
    write_results(
        "preparation",
        "Preparation of large data",
        page(data),
        data,
        directory=arguments.results,
        command=command,
        packages=("tokenizers", "numpy"),
    )


def former_results(results: Path) -> dict[str, Any]:
    """The results in the former page's data by name, with their commands; empty without a page."""
    path = results / "preparation.json"
    content = json.loads(path.read_text()) if path.is_file() else {}
    names = (name for part in PARTS.values() for name in part if name in content)
    return {name: {"command": content["command"], **content[name]} for name in names}


def measure(folder: Path, parts: Sequence[str], num_pairs: int, text_bytes: int) -> dict[str, Any]:
    """The results of the preparations of some parts by name, as JSON."""
    results: dict[str, Any] = {}
    if "pairs" in parts or "kill" in parts:
        pairs = [folder / "pairs.src", folder / "pairs.tgt"]
        write_pairs(pairs, num_pairs)
        recipe = {
            "task": "translation",
            "data": {"train": {"src": str(pairs[0]), "tgt": str(pairs[1])}},
            "training": TRAINING,
        }
        files = None
        if "pairs" in parts:
            results["pairs"], files = compare(folder, "pairs", recipe, num_pairs)
            given = {**recipe, "tokenizer": {"path": str(folder / "tokenizer.json")}}
            results["pairs, tokenizer given"], _ = compare(folder, "given", given, num_pairs)
        if "kill" in parts:
            results["killed"] = kill_and_resume(folder, recipe, files)
        for path in pairs:
            path.unlink()
    texts = folder / "texts.txt"
    recipe = {
        "task": "language_modeling",
        "data": {"train": {"text": str(texts)}, "valid_size": 50},
        "model": DECODER,
        "training": TRAINING,
    }
    if "texts" in parts:
        num_texts = write_texts(texts, text_bytes)
        results["texts"], _ = compare(folder, "texts", recipe, num_texts)
    if "limit" in parts:
        num_texts = write_texts(texts, max(text_bytes // LIMIT_SHARE, QUICK_TEXT_BYTES))
        results["limit"] = measure_limit(folder, recipe, num_texts)
    return results


def measure_limit(folder: Path, recipe: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """The rate of two preparations at once, each on its own core, relative to that of one alone.

    The median of `LIMIT_ROUNDS` rounds, as JSON.
    """

    def seconds(core: int) -> float:
        cache = folder / f"core-{core}"
        used = execute(cache, ["prepare"], recipe, 1, first_core=core).seconds
        shutil.rmtree(cache)
        return used

    cores, rounds = range(WORKERS[-1]), list[dict[str, Any]]()
    for _ in range(LIMIT_ROUNDS):
        alone = seconds(0)
        with ThreadPoolExecutor(len(cores)) as pool:
            together = [*pool.map(seconds, cores)]
        speedup = sum(alone / one for one in together)
        rounds.append({"alone": alone, "together": together, "speedup": speedup})
    result = {
        "rows": num_rows,
        "rounds": rounds,
        "speedup": statistics.median(one["speedup"] for one in rounds),
    }
    print(json.dumps({"limit": result}, indent=2))
    return result


def compare(
    folder: Path, name: str, recipe: dict[str, Any], num_rows: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Prepare data with each number of workers, and start a run on them.

    The tokenizer is left as `tokenizer.json` in the folder. Returns the results as JSON, and the
    digests of the prepared files.
    """
    runs = {}
    for workers in WORKERS:
        cache = folder / f"{name}-{workers}"
        runs[workers] = prepare(cache, recipe, workers)
        if workers == WORKERS[-1]:
            training = execute(cache, ["train", "--out", str(cache / "run")], recipe, workers)
            source = cache / "data" / runs[workers].files["folder"] / "src.json"
            shutil.copy(source, folder / "tokenizer.json")
        shutil.rmtree(cache)
    files = runs[WORKERS[0]].files
    result = {
        "rows": num_rows,
        "workers": {str(workers): run.to_json(num_rows) for workers, run in runs.items()},
        "speedup": runs[WORKERS[0]].seconds / runs[WORKERS[-1]].seconds,
        "equal": all(run.files == files for run in runs.values()),
        "training peak MiB": round(training.peak / MEBIBYTE, 1),
    }
    print(json.dumps({name: result}, indent=2))
    return result, files


@dataclass
class Run:
    """A finished command: its seconds, those of processors, its peak memory in bytes, digests."""

    seconds: float
    processor_seconds: float
    peak: int
    files: dict[str, str]

    def to_json(self, num_rows: int) -> dict[str, float]:
        return {
            "seconds": round(self.seconds, 2),
            "processor seconds": round(self.processor_seconds, 2),
            "rows/s": round(num_rows / self.seconds, 1),
            "peak MiB": round(self.peak / MEBIBYTE, 1),
        }


def start(
    cache: Path, words: Sequence[str], recipe: dict[str, Any], workers: int, first_core: int = 0
) -> "subprocess.Popen[bytes]":
    """Start a command of heedful with a separate cache, on one core per worker."""
    cache.mkdir(exist_ok=True)
    path = cache / "recipe.json"
    path.write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "heedful", words[0], str(path), *words[1:], "--quiet"]
    environment = {
        **os.environ,
        "HEEDFUL_CACHE": str(cache),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
    }
    cores = sorted(os.sched_getaffinity(0))
    # The affinity of this thread, which the new process inherits.
    os.sched_setaffinity(0, cores[first_core : first_core + workers])
    try:
        return subprocess.Popen(
            [*command, "--set", f"data.workers={workers}"],
            env=environment,
            stderr=subprocess.PIPE,
        )
    finally:
        os.sched_setaffinity(0, cores)


def prepare(cache: Path, recipe: dict[str, Any], workers: int) -> Run:
    """Prepare data and measure; `cache` may hold an unfinished preparation."""
    run = execute(cache, ["prepare"], recipe, workers)
    [manifest] = (cache / "data").glob(f"*/{MANIFEST}")
    digests = json.loads(manifest.read_text())["files"]
    return replace(run, files={"folder": manifest.parent.name, **digests})


def execute(
    cache: Path, words: Sequence[str], recipe: dict[str, Any], workers: int, first_core: int = 0
) -> Run:
    """Run a command and measure it; arguments as in `start`."""
    began, used = time.perf_counter(), processor_seconds()
    process = start(cache, words, recipe, workers, first_core)
    peak = [0]
    watcher = threading.Thread(target=watch_memory, args=(process, peak))
    watcher.start()
    errors = process.communicate()[1]
    seconds = time.perf_counter() - began
    watcher.join()
    if process.returncode:
        raise SystemExit(f"heedful {words[0]} failed: {errors.decode()}")
    return Run(seconds, processor_seconds() - used, peak[0], {})


def processor_seconds() -> float:
    """The processor time of all child processes that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def kill_and_resume(
    folder: Path, recipe: dict[str, Any], expected: dict[str, str] | None
) -> dict[str, Any]:
    """Kill a preparation by two workers when half is done, and start it again.

    Args:
        expected: the digests of the prepared files; None: of a preparation without interruption,
            which is made first.
    """
    if expected is None:
        expected = prepare(folder / "whole", recipe, WORKERS[-1]).files
        shutil.rmtree(folder / "whole")
    cache, name = folder / "killed", expected["folder"]
    began = time.perf_counter()
    process = start(cache, ["prepare"], recipe, WORKERS[-1])
    half = progress_at_half(cache, name)
    while process.poll() is None and position(cache, name) < half():
        time.sleep(0.02)
    was_running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed_after = time.perf_counter() - began
    at = position(cache, name)
    resumed = prepare(cache, recipe, WORKERS[-1])
    shutil.rmtree(cache)
    result = {
        "was running": was_running,
        "chunks done": at,
        "seconds before": round(killed_after, 2),
        "seconds after": round(resumed.seconds, 2),
        "equal": resumed.files == expected,
    }
    print(json.dumps({"killed": result}, indent=2))
    return result


def position(cache: Path, name: str) -> int:
    """The chunks that an unfinished preparation has committed."""
    path = cache / "data" / f"{name}{UNFINISHED}" / "train" / PROGRESS
    try:
        return int(json.loads(path.read_text())["position"])
    except FileNotFoundError:
        return 0


def progress_at_half(cache: Path, name: str) -> Any:
    """A function that returns half of the number of chunks, once the first pass is done."""
    path = cache / "data" / f"{name}{UNFINISHED}" / "training_rows.json"

    def half() -> float:
        try:
            return max(1, len(json.loads(path.read_text())["chunks"]) // 2)
        except FileNotFoundError:
            return float("inf")

    return half


def watch_memory(process: "subprocess.Popen[bytes]", peak: list[int]) -> None:
    """Store in `peak` the largest memory of a process and its descendants together, in bytes.

    Linux reads the page tables for a sample, on a core that the workers need.
    """
    while process.poll() is None:
        began = time.thread_time()
        peak[0] = max(peak[0], sum(map(proportional_set_size, descendants(process.pid))))
        time.sleep(max(_INTERVAL, (time.thread_time() - began) / _SAMPLING))


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
    rows = [*sentences(min(count, MADE_ROWS), seed=0)]
    lines = ([" ".join([sides[0][i] for i in indices]) for indices in rows],)
    lines += ([" ".join([sides[1][i] for i in reversed(indices)]) for indices in rows],)
    for path, side in zip(paths, lines, strict=True):
        with path.open("w") as file:
            for number, part in copies(side, count):
                file.writelines(f"w{number} {line}\n" for line in part)


def write_texts(path: Path, size: int) -> int:
    """Write seeded texts of several sentences, one a line, up to a size; returns their number."""
    words, count = made_words(3), 0
    rows = sentences(min(MADE_ROWS, size // 50), seed=1)
    lines = [" ".join([words[i] for i in indices]) for indices in rows]
    texts = [". ".join(lines[i : i + SENTENCES]) for i in range(0, len(lines), SENTENCES)]
    with path.open("w") as file:
        for number, part in copies(texts, size):
            file.writelines(f"w{number} {text}\n" for text in part)
            count += len(part)
            if file.tell() >= size:
                break
    return count


def copies(lines: list[str], count: int) -> Iterator[tuple[int, list[str]]]:
    """The lines again and again, `count` in all, with the number of the copy."""
    for number, done in enumerate(range(0, count, len(lines))):
        yield number, lines[: count - done]


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
    cases = {name: case for name, case in data.items() if name not in ("killed", "limit")}
    rows = [
        [f"{case['rows']:,} {name}", workers, *run.values()]
        for name, case in cases.items()
        for workers, run in case["workers"].items()
    ]
    header = ["data", "workers", "seconds", "processor seconds", "rows/s"]
    lines = [
        f"* {name}: {case['speedup']:.2f} times as fast with {WORKERS[-1]} workers as with one;"
        f" the prepared data are {'equal, byte for byte' if case['equal'] else 'NOT EQUAL'}. A run"
        f" on them takes {case['training peak MiB']:,} MiB at its start (`{case['command']}`)."
        for name, case in cases.items()
    ]
    if limit := data.get("limit"):
        lines.append(
            f"* The limit of the machine for texts: two preparations of {limit['rows']:,} of them"
            f" at once are together {limit['speedup']:.2f} times as fast as one alone, since cores"
            f" share caches and memory (`{limit['command']}`)."
        )
    if killed := data.get("killed"):
        lines.append(
            f"* Killed after {killed['seconds before']} s and started again:"
            f" {killed['seconds after']} s to the end; the result is"
            f" {'equal' if killed['equal'] else 'NOT EQUAL'} (`{killed['command']}`)."
        )
    _, _, method, of_limit = str(__doc__).split("\n\n")
    sections = [method, *([of_limit.strip()] if limit else [])]
    if rows:
        sections.append(table([*header, "peak MiB, all processes"], rows))
    return [*sections, "\n".join(lines)]


if __name__ == "__main__":
    if not Path("/proc/self/smaps_rollup").is_file():
        raise SystemExit("this benchmark reads the memory of processes from Linux's /proc")
    main()
