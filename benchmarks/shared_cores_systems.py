"""Systems of the benchmark of shared cores, each in a process of its own."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import heedful
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
)
from heedful.config import Training
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.hardware import cores
from heedful.kernels import library as kernels
from heedful.processes import Processes
from heedful.training.step import LossNet, TrainedNet, WeightUpdates, step_batches
from shared_cores_commands import COMMANDS, command_work
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
TRAINING = {
    "heedful": "heedful",
    "no kernels": "heedful, without kernels",
    "torch": "torch.nn.Transformer",
    "transformers": "transformers MarianMTModel",
}
DECODING = {
    "eager": "heedful, the net",
    "compiled": "heedful, compiled",
    "ctranslate2": "heedful, CTranslate2",
    "generate": "transformers generate",
}
BATCH = 16  # sentences that are decoded together


@contextmanager
def in_process(*arguments: Any) -> Iterator[Connection]:
    """In the block a system waits in its process for (seconds to settle, seconds to measure)."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_system, args=(theirs, *arguments))
    process.start()
    assert ours.recv() == "ready"
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def _run_system(
    commands: Connection, name: str, size: str, precision: str, shape: str, folder: str
) -> None:
    """Repeat a system's work for the seconds of each command, and send its rate."""
    with ExitStack() as stack:
        if name in COMMANDS:
            measure = command_work(name, Path(folder), size == "quick", stack)
            measure(0.0)
            commands.send("ready")
            while (command := commands.recv()) is not None:
                commands.send(measure(command[-1]))
            return
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
    if name == "no kernels":
        stack.enter_context(kernels.unused())
    return trained(size, precision, batches)


def trained(size: str, precision: str, batches: Sequence[Batch]) -> Work:
    """A function that takes an optimizer step of heedful's trainer."""
    torch.manual_seed(1)
    settings = Training.model_validate({"label_smoothing": SMOOTHING})
    net = heedful_model((SIZES | QUICK)[size])
    loss_net = LossNet(net, partial(batch_loss, label_smoothing=SMOOTHING))
    alone = Processes()
    updates = WeightUpdates(
        TrainedNet(loss_net), settings, alone, precision=precision, compiler=None
    )
    batches_of_steps = step_batches(
        lambda epoch: range(len(batches)),
        lambda epoch, index: batches[index],
        alone,
        num_batches=1,
        num_parts=1,
        seed=1,
        device=torch.device("cpu"),
        start=(1, 0),
        num_epochs=2,
    )
    steps = cycle([step for step, _ in batches_of_steps])
    return lambda: updates.take(next(steps), 1e-4, 1)


def decoding_work(name: str, folder: Path, shape: Shape) -> Work:
    """A function that decodes a batch greedily."""
    rows = prompts(shape, Setting(1, BATCH), seed=1)
    if name == "generate":
        net = transformers_net(folder, shape, "float32")
        return transformers_run(net, shape, 1, cores(), rows)
    # The number of threads of conversions is that of `write_models`; the net chooses by itself.
    model = heedful.load(folder / "heedful", device="cpu", backend=name, precision="float32")
    return heedful_generate(model, options_of(shape, 1), rows)
