"""Speed on cores that another program uses, too: training and decoding beside busy loops.

Each system runs in a process of its own, with a thread for each core. Its speed beside a load is
compared with its speed on idle cores in the same round. The fair share of a process with c threads
on c cores beside b busy threads is c / (c + b) of the cores, so its steps may take (c + b) / c
times as long.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import argument_parser, command_line, table, write_results
from decoding_systems import (
    SHAPES,
    SMALL,
    Setting,
    Shape,
    heedful_generate,
    options_of,
    prompts,
    transformers_net,
    transformers_run,
    write_model,
)
from heedful import processes
from heedful.backends.hardware import cores
from heedful.config import Training
from heedful.data.collate import Batch
from heedful.deploy.optimize import optimize
from heedful.evaluation.likelihood import batch_loss
from heedful.kernels import training as kernels
from heedful.processes import Processes
from heedful.training.micro_batches import MicroBatches
from heedful.training.parallel import share_net
from heedful.training.step import TrainStep
from heedful.training.updates import WeightUpdates
from training_speed import (
    QUICK,
    SIZES,
    SMOOTHING,
    Marian,
    TorchTransformer,
    heedful_model,
    make_batches,
    plain_step,
)

Work = Callable[[], object]
LOADS = ("nothing", "one busy loop", "two busy loops", "a second training")
TRAINING = {
    "heedful": "heedful",
    "no kernels": "heedful, without kernels",
    "two processes": "heedful, a process for each core",
    "torch": "torch.nn.Transformer",
    "transformers": "transformers MarianMTModel",
}
DECODING = {
    "eager": "heedful, the net",
    "compiled": "heedful, compiled",
    "ctranslate2": "heedful, CTranslate2",
    "generate": "transformers generate",
}
LABELS = TRAINING | DECODING
SETTLE = 1.5  # seconds of a load, and of work beside it, before the rate is measured
BATCH = 16  # sentences that are decoded together


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
            write_models(Path(folder), (SHAPES | SMALL)[shape])
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
    loops = [multiprocessing.get_context("spawn").Process(target=spin) for _ in range(count)]
    for loop in loops:
        loop.start()
    time.sleep(0.5 if count else 0.0)  # until they run
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def spin() -> None:
    """Use one core."""
    while True:
        pass


@contextmanager
def in_process(*arguments: Any) -> Iterator[Connection]:
    """In the block a system waits in its process for (seconds to settle, seconds to measure)."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_system, args=(theirs, *arguments))
    process.start()
    assert ours.recv() == "ready"
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def run_system(
    commands: Connection, name: str, size: str, precision: str, shape: str, folder: str
) -> None:
    """Repeat a system's work for the seconds of each command, and send its rate."""
    with ExitStack() as stack:
        if name in DECODING:
            work = decoding_work(name, Path(folder), (SHAPES | SMALL)[shape])
        else:
            work = training_work(name, size, precision, stack)
        for _ in range(3):
            work()
        commands.send("ready")
        while (command := commands.recv()) is not None:
            for seconds in command:
                count, began = 0, time.perf_counter()
                while count == 0 or time.perf_counter() - began < seconds:
                    work()
                    count += 1
                rate = count / (time.perf_counter() - began)
            commands.send(rate)


def training_work(name: str, size: str, precision: str, stack: ExitStack) -> Work:
    """A function that takes an optimizer step."""
    shape = (SIZES | QUICK)[size]
    batches = make_batches(shape, seed=1)
    if name in ("torch", "transformers"):
        net = TorchTransformer(shape) if name == "torch" else Marian(shape, "sdpa")
        step, upcoming = plain_step(net, precision), cycle(batches)
        return lambda: step(next(upcoming))
    if name == "two processes":
        group = stack.enter_context(processes.start_others(cores(), follow, size, precision))
        stack.callback(group.from_main, lambda: False)
        take = trained(size, precision, batches, group)

        def together() -> None:
            group.from_main(lambda: True)
            take()

        return together
    if name == "no kernels":
        stack.enter_context(kernels.unused())
    return trained(size, precision, batches, Processes())


def follow(size: str, precision: str) -> None:
    """Take the steps of the main process, as long as it takes one."""
    with processes.join() as group:
        take = trained(size, precision, make_batches((SIZES | QUICK)[size], seed=1), group)
        while group.from_main(lambda: True):
            take()


def trained(size: str, precision: str, batches: Sequence[Batch], group: Processes) -> Work:
    """A function that takes an optimizer step of heedful's trainer in each process of a group."""
    torch.manual_seed(1)
    settings = Training.model_validate({"label_smoothing": SMOOTHING})
    net = heedful_model((SIZES | QUICK)[size])
    step = TrainStep(net, partial(batch_loss, label_smoothing=SMOOTHING))
    shared = share_net(step, settings, group, precision)
    updates = WeightUpdates(shared, settings, group, precision=precision, compiler=None)
    micro_batches = MicroBatches(
        lambda epoch: range(len(batches)),
        lambda index: batches[index],
        group,
        num_batches=1,
        num_parts=group.count,
        seed=1,
        device=torch.device("cpu"),
    )
    steps = cycle([micro_batches.of_step(1, number)[0] for number in range(len(batches))])
    return lambda: updates.take(next(steps), 1e-4, 1)


def write_models(folder: Path, shape: Shape) -> None:
    """A random translator in each format, with its conversions for heedful."""
    words = write_model(shape, folder)
    import heedful

    model = heedful.load(folder / "heedful", device="cpu", backend="eager")
    rows = prompts(shape, Setting(1, BATCH), seed=1)
    texts = [" ".join(words[token - 4] for token in row[:-1]) for row in rows]
    tried: Any = {"backends": ["compiled", "ctranslate2"], "precisions": ["float32"]}
    optimize(model, folder / "heedful", texts, uses=["latency"], threads=[cores()], **tried)


def decoding_work(name: str, folder: Path, shape: Shape) -> Work:
    """A function that decodes a batch greedily."""
    import heedful

    rows = prompts(shape, Setting(1, BATCH), seed=1)
    if name == "generate":
        net = transformers_net(folder, shape, "float32")
        return transformers_run(net, shape, 1, cores(), rows)
    model = heedful.load(
        folder / "heedful", device="cpu", backend=name, precision="float32", threads=cores()
    )
    return heedful_generate(model, options_of(shape, 1), rows)


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
        f"{shape} in float32. Each system has a process and {cores()} threads ({cores()} processes "
        "of one thread in one row), its default settings, and no variable of OpenMP is set. It "
        "runs alone, or beside the load, while the others wait. The medians of "
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
