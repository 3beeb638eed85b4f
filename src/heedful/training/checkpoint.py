"""The checkpoints of a run: all state that the next step depends on, and weights to average.

`step-N/` holds the weights and, in the newest one, the state of the optimizer and the position in
the data, of which random numbers are functions. A state that is sharded over processes is a folder
with a file of each process, any other state one file. The last few, or the best few, are kept for
averaging. `interim-N/` is written between two of these, when the run is interrupted or as often as
its recipe sets; it is never averaged, and removed once the next checkpoint is complete.
`best.safetensors` holds the weights that `model.safetensors` of the run is a link to.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, with_config
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.files import (
    atomic_replace,
    read_json,
    read_object,
    remove_unfinished,
    write_directory,
    write_json,
)
from heedful.processes import Processes
from heedful.training.events import CheckpointSaved
from heedful.training.shards import load_shards, save_shards
from heedful.zoo.saved import WEIGHTS, load_tensors, read_metadata, save_tensors

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


class CheckpointWriter:
    """Saves checkpoints, one at a time: at once, or in a thread from a copy in host memory.

    Args:
        is_asynchronous: copy the tensors, and write them in a thread.
    """

    def __init__(self, checkpoints: Checkpoints, *, is_asynchronous: bool) -> None:
        self._checkpoints, self._is_asynchronous = checkpoints, is_asynchronous
        # Those of the last checkpoint are kept: copies to memory that is already mapped are faster.
        self._copies: dict[str, Tensor] = {}
        self._pending: Future[CheckpointSaved] | None = None

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        tensors: Mapping[str, Tensor],
        state: dict[str, Any],
        *,
        interim: bool,
        is_sharded: bool,
        is_urgent: bool = False,
    ) -> None:
        """Begin a checkpoint of the state at this moment; the last one must have been waited for.

        Args:
            weights, tensors, state, interim, is_sharded: as in `Checkpoints.save`.
            is_urgent: write it before this returns.
        """
        assert self._pending is None, "one checkpoint at a time"
        self._pending = pending = Future[CheckpointSaved]()
        own = weights if self._checkpoints.processes.is_main else {}
        if self._is_asynchronous and not is_urgent:
            own, tensors = self._copy("weights", own), self._copy("tensors", tensors)

        def write() -> None:
            try:
                path = self._checkpoints.save(
                    step, own, tensors, state, interim=interim, is_sharded=is_sharded
                )
                kind = "interim" if interim else "regular"
                pending.set_result(CheckpointSaved(step, str(path), kind))
            except BaseException as error:  # raised again in the main thread
                pending.set_exception(error)

        if self._is_asynchronous and not is_urgent:
            # A daemon: a second Ctrl-C ends the program at once.
            Thread(target=write, name="checkpoint", daemon=True).start()
        else:
            write()

    def finished(
        self, *, wait: bool = False, timeout: float | None = None
    ) -> CheckpointSaved | None:
        """The event of a checkpoint that is complete since the last call.

        Args:
            wait: wait for a checkpoint that is being written.
            timeout: most seconds to wait; None: no limit.

        Raises:
            UserError: it could not be written; other errors of the thread.
            TimeoutError: it takes longer.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return None
        pending, self._pending = self._pending, None
        return pending.result(timeout)

    @torch.no_grad()
    def _copy(self, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors, or of the shards of this process, in host memory."""
        copies = {}
        for name, tensor in tensors.items():
            kept = self._copies.get(f"{prefix}.{name}")
            if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                kept.copy_(tensor)
            else:
                kept = tensor.detach().to("cpu", copy=True)
            copies[name] = self._copies[f"{prefix}.{name}"] = kept
        return copies


class BestModel:
    """The weights with the highest value of the evaluation metric: of one step, or an average.

    They are in `checkpoints/best.safetensors` of the run's folder, with their value and a
    description. Until the run is finished `model.safetensors` has the same content, as a hard link
    where the file system supports these.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "checkpoints" / "best.safetensors"
        self._model = run / WEIGHTS

    @property
    def value(self) -> float:
        """The value of the stored weights, higher is better; the lowest float without weights."""
        return float(read_metadata(self.path).get("value", -sys.float_info.max))

    def save(self, weights: Mapping[str, Tensor], *, value: float, step: int, source: str) -> None:
        """Store weights, unless the stored ones have a higher value.

        Args:
            step: the training step of the weights.
            source: a description of the weights, for the report.
        """
        if value < self.value:
            return
        facts = {"step": step, "value": value, "source": source}
        # One entry, because safetensors writes several in no fixed order.
        save_tensors(self.path, weights, metadata={"training": json.dumps(facts)})
        self.publish()

    def publish(self) -> None:
        """Make the stored weights `model.safetensors`, with their step in its metadata."""
        with atomic_replace(self._model) as temporary:
            try:
                os.link(self.path, temporary)
            except OSError:  # a file system without hard links
                shutil.copyfile(self.path, temporary)

    def write_final(self) -> tuple[dict[str, Tensor], str]:
        """Write the final `model.safetensors`: the stored weights without metadata.

        Returns:
            The weights and their description.

        Raises:
            UserError: the stored weights are missing or damaged.
        """
        weights = load_tensors(self.path)
        save_tensors(self._model, weights)
        return weights, str(read_metadata(self.path)["source"])
