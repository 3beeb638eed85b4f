"""The checkpoints of a run: all state that the next step depends on, and weights to average.

`step-N/` holds the weights and, in the newest one, the state of optimizer, random number generators
and position in the data. The last few, or the best few, are kept for averaging. `interim-N/` is
written between two of these, when the run is interrupted or as often as its recipe sets; it is
never averaged, and removed once the next checkpoint is complete.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.errors import UserError
from heedful.files import read_json, read_object, remove_unfinished, write_directory, write_json
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

_TRAINING = "training.safetensors"
_STATE = "state.json"
_NAME = re.compile(r"(step|interim)-\d{8,}")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: their folder.
        keep: number of regular checkpoints whose weights are kept.
        best: keep those with the highest `value` in their state, the older of equal ones; default:
            keep the last.
    """

    directory: Path
    keep: int
    best: bool = field(default=False, kw_only=True)

    def save(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        interim: bool = False,
    ) -> Path:
        """Write a checkpoint, and then remove those that are no longer needed.

        Args:
            weights: of the net; those that are trained, if the others are read from elsewhere.
            tensors: state of optimizer, generators and averages.
        """
        path = self.directory / f"{'interim' if interim else 'step'}-{step:08d}"

        def fill(directory: Path) -> None:
            save_tensors(directory / WEIGHTS, weights)
            save_tensors(directory / _TRAINING, tensors)
            write_json(directory / _STATE, state)

        if not (path / _TRAINING).is_file():  # otherwise saved before, at the same step
            write_directory(path, fill, owns=(WEIGHTS, _TRAINING, _STATE))
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
        complete = [path for path in self._all() if (path / _TRAINING).is_file()]
        return max(complete, key=lambda path: int(path.name.split("-")[1]), default=None)

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Weights, training tensors and state of a checkpoint."""
        state = read_object(path / _STATE)
        return load_tensors(path / WEIGHTS), load_tensors(path / _TRAINING), state

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
        needed = {newest, *self.to_average()}
        for old in self.regular():
            if old not in needed:
                shutil.rmtree(old)

    def _all(self) -> list[Path]:
        """All checkpoints by name; folders with other names, such as copies, are ignored."""
        return sorted(p for p in self.directory.glob("*-*") if _NAME.fullmatch(p.name))


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


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the random number generators of the CPU and of the run's device."""
    states = {"generator.cpu": torch.get_rng_state()}
    if device.type != "cpu":
        index = [device] if device.type == "cuda" else []
        states[f"generator.{device.type}"] = torch.get_device_module(device).get_rng_state(*index)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the result of `generator_states`.

    On a device of another type, its generator is seeded by the CPU's initial seed instead.
    """
    torch.set_rng_state(states["generator.cpu"])
    if device.type == "cpu":
        return
    state, generators = states.get(f"generator.{device.type}"), torch.get_device_module(device)
    if state is None:
        generators.manual_seed(torch.initial_seed())
    else:
        generators.set_rng_state(state, *([device] if device.type == "cuda" else []))
