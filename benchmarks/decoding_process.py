"""Systems of the benchmark of decoding speed, in processes of their own.

Libraries in one process slow each other down: GPT-2 compiled by heedful generates about half as
many tokens per second next to a model of CTranslate2 (docs/log.md).
"""

import gc
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from common import fastest
from decoding_systems import Decode, Rows, Setting, Shape, Variant, prompts, systems
from heedful.hardware import cores

LEAST = 0.1  # seconds of a system in a round: short, so that a slowdown affects all systems
MEASURED, TUNED = 2, 3  # seeds of the prompts for measuring and for selecting settings


class Workload(NamedTuple):
    """The model, the prompts and the search that systems are measured on.

    Attributes:
        folder: of `write_model`.
        quick: select settings in one short round.
    """

    folder: Path
    shape: Shape
    setting: Setting
    quick: bool


class SystemProcess:
    """A process that runs systems one at a time, each with the settings that are fastest for it.

    Attributes:
        best: the variant selected for each system; its `on` cannot be called.
    """

    def __init__(self, names: tuple[str, ...], workload: Workload) -> None:
        context = get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, names, workload), daemon=True)
        self._process.start()
        other.close()
        self.best: dict[str, Variant] = self._connection.recv()  # EOFError if the process fails

    def count_tokens(self, name: str) -> int:
        """Decode the prompts once by a system; returns the tokens of the best outputs."""
        self._connection.send(name)
        count: int = self._connection.recv()
        return count

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, names: tuple[str, ...], workload: Workload) -> None:
    """Select the settings of each system, then decode by the systems that are named."""
    folder, shape, setting, quick = workload
    tuning_rows, rows = (prompts(shape, setting, seed) for seed in (TUNED, MEASURED))
    counts = (1,) if quick else sorted({1, cores()})
    best, runs = {}, {}
    for name, variants in systems(folder, shape, setting, counts, names).items():
        cases = [partial(_count, variant.on(tuning_rows), shape.new) for variant in variants]
        index = fastest(cases, rounds=1 if quick else None, least=0 if quick else LEAST)
        best[name] = variants[index]._replace(on=None)
        runs[name] = variants[index].on(rows)
        del cases, variants
        gc.collect()  # contexts and nets of other variants
    connection.send(best)
    while True:
        try:
            name = connection.recv()
        except EOFError:
            return
        connection.send(_count(runs[name], shape.new))


def _count(run: Decode, new: int) -> int:
    outputs: Rows = run()
    assert {len(ids) for ids in outputs} == {new}
    return len(outputs) * new
