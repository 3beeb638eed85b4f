"""The checkpoints of a run: all state that the next step depends on, and weights to average.

`step-N/` holds the weights and, in the newest one, the state of the optimizer and the position in
the data, of which random numbers are functions. A state that is sharded over processes is a folder
with a file of each process, any other state one file. The last few, or the best few, are kept for
averaging. `interim-N/` is written between two of these, when the run is interrupted or as often as
its recipe sets; it is never averaged, and removed once the next checkpoint is complete.
"""

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, with_config
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.files import read_json, read_object, remove_unfinished, write_directory, write_json
from heedful.processes import Processes
from heedful.training.shards import load_shards, save_shards
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

_TRAINING = "training.safetensors"
_SHARDS = "training"  # a folder in place of that file
_STATE = "state.json"
Count = Annotated[int, Field(ge=0, lt=2**31)]
_NAME = re.compile(r"(step|interim)-\d{8,}")


@with_config(ConfigDict(extra="forbid"))
@dataclass
class TrainerState:
    """The progress of a run: with weights and optimizer state, all that later steps depend on."""

    step: Count = 0
    epoch: Count = 0
    batch: Count = 0
    seconds: float = 0.0
    evaluated_step: int = -1
    value: float = -sys.float_info.max  # `EvaluationResult.value` at `evaluated_step`
    best_step: int = -1
    best: dict[str, float] = field(default_factory=dict)
    best_value: float = -sys.float_info.max  # not -inf, which JSON lacks
    evaluations_since_best: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: their folder.
        keep: number of regular checkpoints whose weights are kept.
        best: keep those with the highest `value` in their state, the older of equal ones; default:
            keep the last.
        processes: those of the run, of which the main one writes; with a sharded state all. For a
            thread that writes, `Processes.for_thread`.
    """

    directory: Path
    keep: int
    best: bool = field(default=False, kw_only=True)
    processes: Processes = field(default_factory=Processes, kw_only=True)

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        interim: bool = False,
        is_sharded: bool = False,
    ) -> Path:
        """Write a checkpoint, and then remove those that are no longer needed.

        Called by all processes; the main one has the weights, and writes all unless each has a
        shard.

        Args:
            weights: of the net; those that are trained, if the others are read from elsewhere.
            tensors: state of optimizer and averages.
            is_sharded: each process has a shard of `tensors`.
        """
        path = self.directory / f"{'interim' if interim else 'step'}-{step:08d}"
        processes = self.processes

        def fill(directory: Path) -> None:
            if is_sharded:  # first, so that no other process waits for one that has failed
                save_shards(processes.from_main(lambda: directory) / _SHARDS, tensors, processes)
            else:
                save_tensors(directory / _TRAINING, tensors)
            save_tensors(directory / WEIGHTS, weights)
            write_json(directory / _STATE, state)

        # An old one was saved before, at the same step.
        is_new = processes.is_main and not _is_complete(path)
        if is_sharded:
            is_new = processes.from_main(lambda: is_new)
        if is_new and processes.is_main:
            write_directory(path, fill, owns=(WEIGHTS, _TRAINING, _SHARDS, _STATE))
        elif is_new and is_sharded:
            save_shards(processes.from_main(Path) / _SHARDS, tensors, processes)
        if processes.is_main:
            self._prune(path)
        return path

    def regular(self) -> list[Path]:
        """The kept regular checkpoints, oldest first."""
        return [path for path in self._all() if path.name.startswith("step")]

    def to_average(self) -> list[Path]:
        """The regular checkpoints whose weights are averaged, oldest first."""
        if not self.best:
            return self.regular()[-self.keep :]
        ranked = sorted(self.regular(), key=lambda path: -float(read_json(path / _STATE)["value"]))
        return sorted(ranked[: self.keep])

    def newest(self) -> Path | None:
        """The newest complete checkpoint that a run can resume from."""
        complete = [path for path in self._all() if _is_complete(path)]
        return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)

    def load(self, path: Path, net: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Training tensors and state of a checkpoint, but not its weights.

        Args:
            net: the trained net; a sharded state is read as its parameters are sharded.
        """
        shards = path / _SHARDS
        tensors = load_shards(shards, net) if shards.is_dir() else load_tensors(path / _TRAINING)
        return tensors, read_object(path / _STATE)

    def clean(self) -> None:
        """Remove incomplete checkpoints of a killed run, and those that are no longer needed."""
        if self.directory.is_dir():
            remove_unfinished(self.directory)
        newest = self.newest()
        if newest is not None:
            self._prune(newest)

    def _prune(self, newest: Path) -> None:
        """Remove the checkpoints, and the training state of others, that `newest` replaces."""
        for other in self._all():
            if other == newest:
                continue
            if other.name.startswith("interim"):
                shutil.rmtree(other)
            else:
                (other / _TRAINING).unlink(missing_ok=True)
                _remove_shards(other / _SHARDS)
        needed = {newest, *self.to_average()}
        for old in self.regular():
            if old not in needed:
                shutil.rmtree(old)

    def _all(self) -> list[Path]:
        """All checkpoints by name; folders with other names, such as copies, are ignored."""
        return sorted(p for p in self.directory.glob("*-*") if _NAME.fullmatch(p.name))


def _is_complete(path: Path) -> bool:
    """True for a checkpoint that a run can resume from."""
    return (path / _TRAINING).is_file() or (path / _SHARDS).is_dir()


def _remove_shards(shards: Path) -> None:
    """Remove a folder, so that it is missing or whole if the process is killed meanwhile."""
    if shards.is_dir():
        left = shards.with_name(f".{shards.name}.{os.getpid()}.tmp")
        shards.rename(left)
        shutil.rmtree(left)


def average_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over safetensors files (Vaswani et al. 2017, sec. 6.1).

    Sums are in fp64; the means have the dtypes of the first file.

    Raises:
        UserError: no files; files with different tensors.
    """
    if not files:
        raise UserError("nothing to average: give at least one checkpoint")
    first = load_tensors(files[0])
    total = {name: tensor.to(torch.float64) for name, tensor in first.items()}
    for file in files[1:]:
        tensors = load_tensors(file)
        for name in sorted(total.keys() | tensors.keys()):
            shapes = [tuple(t[name].shape) if name in t else "absent" for t in (total, tensors)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{files[0]} and {file} are of different models: {name} is "
                    f"{shapes[0]} and {shapes[1]}"
                )
            total[name] += tensors[name].to(torch.float64)
    return {name: (total[name] / len(files)).to(first[name].dtype) for name in total}
