"""Speed on cores that another program uses, too: training and decoding beside busy loops.

Each system runs in a process of its own, with a thread for each core. Its speed beside a load is
compared with its speed on idle cores in the same round. The fair share of a process with c threads
on c cores beside b busy threads is c / (c + b) of the cores, so its steps may take (c + b) / c
times as long.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import heedful
from common import argument_parser, command_line, table, write_results
from decoding_systems import SHAPES, SMALL, Setting, Shape, prompts, write_model
from heedful.backends.hardware import cores
from heedful.deploy.optimize import BACKENDS, optimize
from shared_cores_systems import BATCH, DECODING, TRAINING, in_process
from training_speed import SIZES

LOADS = ("nothing", "one busy loop", "two busy loops", "a second training")
LABELS = TRAINING | DECODING
SETTLE = 1.0  # seconds of a load, and of work beside it, before the rate is measured


def main() -> None:
    """Measure every system beside every load, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--systems", default=",".join(LABELS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median is taken")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a measurement")
    parser.add_argument("--size", default="tiny", choices=SIZES, help="of the trained models")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    arguments = parser.parse_args()
    names = arguments.systems.split(",")
    rounds, seconds, settle = arguments.rounds, arguments.seconds, SETTLE
    size, shape = arguments.size, "small"
    if arguments.quick:
        rounds, seconds, settle, size, shape = 1, 0.05, 0.0, "quick", "quick"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if set(names) & set(DECODING):
            write_models(Path(folder), (SHAPES | SMALL)[shape], names)
        works = {
            name: stack.enter_context(in_process(name, size, arguments.precision, shape, folder))
            for name in names
        }
        other = None
        if set(names) & set(TRAINING):
            other = stack.enter_context(in_process("torch", size, arguments.precision, "", ""))
        rates = measure(works, other, rounds, seconds, settle)
    write_results(
        "shared_cores",
        "Speed on shared cores",
        sections(rates, rounds, seconds, size, arguments.precision, shape),
        {"rounds": rounds, "seconds": seconds, "rates_by_round": rates},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers", "ctranslate2"),
    )


def measure(
    works: Mapping[str, Connection],
    other: Connection | None,
    rounds: int,
    seconds: float,
    settle: float,
) -> dict[str, dict[str, list[float]]]:
    """Units of work per second of each system by load, in alternating rounds."""
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in works}
    for number in range(rounds):
        for load in LOADS if number % 2 else LOADS[::-1]:
            for name, work in works.items():
                if load == "a second training" and name in DECODING:
                    continue
                with beside(load, other, 3 * settle + seconds):
                    work.send((2 * settle, seconds))
                    rates[name].setdefault(load, []).append(work.recv())
            shown = {name: round(r[load][-1], 2) for name, r in rates.items() if load in r}
            print(f"round {number + 1}, beside {load}: {shown}", flush=True)
    return rates


@contextmanager
def beside(load: str, other: Connection | None, seconds: float) -> Iterator[None]:
    """In the block something else uses the cores."""
    if load == "a second training":
        assert other is not None
        other.send((0.0, seconds))
        yield
        other.recv()
        return
    count = {"nothing": 0, "one busy loop": 1, "two busy loops": 2}[load]
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def write_models(folder: Path, shape: Shape, names: Sequence[str]) -> None:
    """A random translator in each format, with its conversions for the named backends."""
    words = write_model(shape, folder)
    model = heedful.load(folder / "heedful", device="cpu", backend="eager")
    rows = prompts(shape, Setting(1, BATCH), seed=1)
    texts = [" ".join(words[token - 4] for token in row[:-1]) for row in rows]
    tried: Any = {"backends": [name for name in BACKENDS if name in names], "threads": [cores()]}
    optimize(model, folder / "heedful", texts, precisions=["float32"], uses=["latency"], **tried)


def sections(
    rates: Mapping[str, Mapping[str, Sequence[float]]],
    rounds: int,
    seconds: float,
    size: str,
    precision: str,
    shape: str,
) -> list[str]:
    """Method, slowdowns, and rates."""
    how = (
        f"Optimizer steps of the size {size} of [training_speed.md](training_speed.md) in "
        f"{precision}, and greedy decoding of {BATCH} sentences by a random translator of the size "
        f"{shape} in float32. Each system has a process and {cores()} threads (heedful's net takes "
        "one or all by the size of a step), its default settings, and no variable of OpenMP is set."
        " It runs alone, or beside the load, while the others wait. The medians of "
        f"{rounds} rounds of {seconds:g} seconds, loads alternating. The second training is "
        "torch.nn.Transformer's."
    )
    fair = {load: fair_slowdown(load) for load in LOADS}
    slow = [
        [label, *(slowdown(rates[name], load, fair[load]) for load in LOADS[1:])]
        for name, label in LABELS.items()
        if name in rates
    ]
    speeds = [
        [
            label,
            *(f"{median(rates[name][load]):.2f}" if load in rates[name] else "–" for load in LOADS),
        ]
        for name, label in LABELS.items()
        if name in rates
    ]
    shares = ", ".join(f"{fair[load]:g} for {load}" for load in LOADS[1:])
    return [
        how,
        "## Time of a step over its fair share",
        "The time beside the load over the time on idle cores in the same round, divided by the "
        f"factor of a fair share of the cores ({shares}): 1 is fair, below 1 is more than that. In "
        "brackets the time over that on idle cores.",
        table(["beside", *LOADS[1:]], slow),
        "## Steps or batches per second",
        table(["beside", *LOADS], speeds),
    ]


def fair_slowdown(load: str) -> float:
    """The time of a step with a fair share of the cores, over that on idle cores."""
    busy = {"nothing": 0, "one busy loop": 1, "two busy loops": 2, "a second training": cores()}
    return (cores() + busy[load]) / cores()


def slowdown(rates: Mapping[str, Sequence[float]], load: str, fair: float) -> str:
    """The median of the slowdowns within rounds, over that of a fair share."""
    if load not in rates:
        return "–"
    ratio = median(a / b for a, b in zip(rates["nothing"], rates[load], strict=True))
    return f"{ratio / fair:.2f} ({ratio:.2f})"


if __name__ == "__main__":
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"} & set(os.environ):
        raise SystemExit("unset the variables of OpenMP: the defaults are measured")
    main()
