"""Speed on cores that another program uses, too: training, decoding and commands beside busy loops.

Each system runs in a process of its own, with a thread for each core. Its speed beside a load is
compared with its speed on idle cores in the same round. The fair share of a process with c threads
on c cores beside b busy threads is c / (c + b) of the cores, so its steps may take (c + b) / c
times as long.
"""

import os
import shutil
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
from heedful.deploy.optimize import BACKENDS, optimize
from heedful.hardware import cores
from shared_cores_commands import CLIENTS, COMMANDS, LAST, SENTENCES, optimized, write_pairs
from shared_cores_systems import BATCH, DECODING, TRAINING, in_process
from training_speed import SIZES

LOADS = ("nothing", "one busy loop", "two busy loops", "a second training")
LABELS = TRAINING | DECODING | COMMANDS
OPTIMIZE = "optimize"
STEPS = ("heedful", "no kernels")  # have more rounds
SETTLE = 1.0  # seconds of a load, and of work beside it, before the rate is measured


def main() -> None:
    """Measure every system beside every load, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--systems", default=",".join([*LABELS, OPTIMIZE]), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is taken")
    parser.add_argument(
        "--step-rounds", type=int, default=7, help="of heedful's steps, whose rounds differ most"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of a measurement")
    parser.add_argument("--size", default="tiny", choices=SIZES, help="of the trained models")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16"))
    arguments = parser.parse_args()
    systems = arguments.systems.split(",")
    names = [name for name in systems if name != OPTIMIZE]
    rounds, seconds, settle = arguments.rounds, arguments.seconds, SETTLE
    step_rounds = arguments.step_rounds
    size, shape = arguments.size, "small"
    if arguments.quick:
        rounds, step_rounds, seconds, settle, size, shape = 1, 1, 0.05, 0.0, "quick", "quick"
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_models(Path(folder), (SHAPES | SMALL)[shape], systems)
        works = {
            name: stack.enter_context(in_process(name, size, arguments.precision, shape, folder))
            for name in names
        }
        other = None
        if set(names) & set(TRAINING):
            other = stack.enter_context(in_process("torch", size, arguments.precision, "", ""))
        counts = {name: step_rounds if name in STEPS else rounds for name in names}
        rates = measure(works, other, counts, seconds, settle)
        chosen = choices(Path(folder), rounds) if OPTIMIZE in systems else {}
    write_results(
        "shared_cores",
        "Speed on shared cores",
        [
            *sections(rates, seconds, size, arguments.precision, shape),
            *choice_section(chosen),
        ],
        {"seconds": seconds, "rates_by_round": rates, "choices": chosen},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers", "ctranslate2"),
    )


def measure(
    works: Mapping[str, Connection],
    other: Connection | None,
    rounds: Mapping[str, int],
    seconds: float,
    settle: float,
) -> dict[str, dict[str, list[float]]]:
    """Units of work per second of each system by load, in alternating rounds.

    Args:
        rounds: of each system.
    """
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in works}
    for number in range(max(rounds.values(), default=0)):
        for name, work in works.items():
            if number >= rounds[name]:
                continue
            # A system's loads follow each other, since the speed of a machine drifts.
            for load in LOADS if number % 2 else LOADS[::-1]:
                if load == "a second training" and name not in TRAINING:
                    continue
                with beside(load, other, 3 * settle + seconds):
                    work.send((2 * settle, seconds))
                    rates[name].setdefault(load, []).append(work.recv())
            shown = {load: round(found[-1], 2) for load, found in rates[name].items()}
            print(f"round {number + 1}, {name}: {shown}", flush=True)
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


def choices(folder: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The output of `heedful optimize` beside each load, in alternating rounds."""
    optimized(folder)  # makes the conversions
    chosen: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for load in LOADS[:3] if number % 2 else LOADS[2::-1]:
            with beside(load, None, 0.0):
                chosen.setdefault(load, []).append(optimized(folder))
    return chosen


def write_models(folder: Path, shape: Shape, systems: Sequence[str]) -> None:
    """Random translators: in each format, with conversions for the named backends; for commands."""
    words = write_model(shape, folder)
    shutil.copytree(folder / "heedful", folder / "plain")
    model = heedful.load(folder / "heedful", device="cpu", backend="eager")
    rows = prompts(shape, Setting(1, BATCH), seed=1)
    texts = [" ".join(words[token - 4] for token in row[:-1]) for row in rows]
    named = [name for name in BACKENDS if name in systems]
    tried: Any = {"backends": named, "threads": [cores()]}
    if named:
        uses: Any = {"precisions": ["float32"], "uses": ["latency"]}
        optimize(model, folder / "heedful", texts, **uses, **tried)
    write_pairs(folder, words[:1000], 3_000)
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts))
    if OPTIMIZE in systems:
        small = SHAPES["tiny"] if shape != SMALL["quick"] else shape
        (folder / "small").mkdir()
        write_model(small, folder / "small")
        (folder / "small" / "heedful").rename(folder / "optimized")


def sections(
    rates: Mapping[str, Mapping[str, Sequence[float]]],
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
        " It runs alone, or beside the load, while the others wait. The medians of rounds of "
        f"{seconds:g} seconds, loads alternating. The second training is torch.nn.Transformer's."
    )
    if set(rates) & set(COMMANDS):
        how += (
            f" Commands are measured as users run them: a training up to step {LAST} (without its "
            "start; one process first measures how many threads to use, as for a long run), the "
            f"server with {CLIENTS} clients that ask without a pause, and a job of {SENTENCES} "
            "sentences from the start of the command to its end."
        )
    fair = {load: fair_slowdown(load) for load in LOADS}
    slow = [
        [
            label,
            str(len(rates[name]["nothing"])),
            *(slowdown(rates[name], load, fair[load]) for load in LOADS[1:]),
        ]
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
        "brackets the least and the largest of all rounds.",
        table(["beside", "rounds", *LOADS[1:]], slow),
        "## Steps, batches, answers or sentences per second",
        table(["beside", *LOADS], speeds),
    ]


def choice_section(chosen: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The choices of `heedful optimize` beside loads, and their rates on idle cores."""
    if not chosen:
        return []
    idle: dict[str, list[float]] = {}
    for found in chosen["nothing"]:
        for item in found["rates"]:
            idle.setdefault(setting_name(item), []).append(item["tokens_per_second"])
    medians = {name: median(values) for name, values in idle.items()}
    best = max(medians.values())
    rows = []
    for load in LOADS[:3]:
        for found in chosen[load]:
            name = setting_name(found["rates"][0])
            said = "yes" if found["undecided"] else "no"
            share = f"{medians[name] / best:.2f}" if name in medians else "–"
            rows.append([load, name, share, said])
    return [
        "## What `heedful optimize` chooses",
        "For a random translator of the size tiny, batches of many sentences in float32. The rate "
        "of the chosen setting is that of runs on idle cores, over the best one there. The last "
        "column: whether the command says that the machine is too busy to decide.",
        table(["beside", "chosen", "rate over the best", "says too busy"], rows),
    ]


def setting_name(item: Mapping[str, Any]) -> str:
    """The backend and settings of a choice."""
    parts = [
        f"{item[key]} {key if item[key] > 1 else key[:-1]}"
        for key in ("threads", "workers")
        if item.get(key)
    ]
    batch = [f"{item['batch_tokens']} tokens"] if item.get("batch_tokens") else []
    return ", ".join([item["backend"], *parts, *batch])


def fair_slowdown(load: str) -> float:
    """The time of a step with a fair share of the cores, over that on idle cores."""
    busy = {"nothing": 0, "one busy loop": 1, "two busy loops": 2, "a second training": cores()}
    return (cores() + busy[load]) / cores()


def slowdown(rates: Mapping[str, Sequence[float]], load: str, fair: float) -> str:
    """The median of the slowdowns within rounds, over that of a fair share, and their range."""
    if load not in rates:
        return "–"
    ratios = [a / b / fair for a, b in zip(rates["nothing"], rates[load], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


if __name__ == "__main__":
    if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"} & set(os.environ):
        raise SystemExit("unset the variables of OpenMP: the defaults are measured")
    main()
