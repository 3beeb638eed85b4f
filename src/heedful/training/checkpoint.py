"""A run's checkpoints: everything that the next step depends on, and the weights to average.

`step-N/` holds the weights and, in the newest, the state of optimizer, random numbers and place in
the data. The last few, or the best, are kept for averaging. `interim-N/` is written between two
regular checkpoints, when a run is interrupted or as often as its recipe says, and removed once the
next checkpoint stands: it is there to resume from, and never averaged.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.files import read_json, read_object, remove_unfinished, write_directory, write_json
from heedful.zoo.added_weights import load_weights
from heedful.zoo.names import weights_of
from heedful.zoo.saved import WEIGHTS, load_tensors, save_tensors

_TRAINING = "training.safetensors"
_STATE = "state.json"
_NAME = re.compile(r"(step|interim)-\d{8,}")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run in `directory`; the weights of `keep` of them stay.

    Those are the last, or with `best` those of the highest `value` in their state, of equals the
    older.
    """

    directory: Path
    keep: int
    best: bool = field(default=False, kw_only=True)

    def save(
        self,
        step: int,
        net: nn.Module,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        *,
        interim: bool = False,
    ) -> Path:
        """Write one; those that it makes superfluous are removed only once it stands."""
        path = self.directory / f"{'interim' if interim else 'step'}-{step:08d}"

        def fill(directory: Path) -> None:
            save_tensors(directory / WEIGHTS, weights_of(net))
            save_tensors(directory / _TRAINING, tensors)
            write_json(directory / _STATE, state)

        if not (path / _TRAINING).is_file():  # else saved again before the next step
            write_directory(path, fill, owns=(WEIGHTS, _TRAINING, _STATE))
        self._prune(path)
        return path

    def regular(self) -> list[Path]:
        """The kept regular checkpoints, oldest first."""
        return [path for path in self._all() if path.name.startswith("step")]

    def to_average(self) -> list[Path]:
        """Those of the regular ones that stay when more come, oldest first."""
        if not self.best:
            return self.regular()[-self.keep :]
        ranked = sorted(self.regular(), key=lambda path: -float(read_json(path / _STATE)["value"]))
        return sorted(ranked[: self.keep])

    def newest(self) -> Path | None:
        """The newest whole checkpoint that a run can go on from."""
        whole = [path for path in self._all() if (path / _TRAINING).is_file()]
        return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Weights, training tensors and state of one."""
        state = read_object(path / _STATE)
        return load_tensors(path / WEIGHTS), load_tensors(path / _TRAINING), state

    def clean(self) -> None:
        """Remove what a killed run left half-written, or was about to remove."""
        if self.directory.is_dir():
            remove_unfinished(self.directory)
        newest = self.newest()
        if newest is not None:
            self._prune(newest)

    def _prune(self, newest: Path) -> None:
        """Remove what the newest checkpoint makes superfluous."""
        for other in self._all():
            if other == newest:
                continue
            if other.name.startswith("interim"):
                shutil.rmtree(other)
            else:
                (other / _TRAINING).unlink(missing_ok=True)
        kept = {newest, *self.to_average()}  # a run goes on from the newest, however good
        for old in self.regular():
            if old not in kept:
                shutil.rmtree(old)

    def _all(self) -> list[Path]:
        """Those that a run wrote: a copy under another name is none."""
        return sorted(p for p in self.directory.glob("*-*") if _NAME.fullmatch(p.name))


def average_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over safetensors files (Vaswani et al. 2017, sec. 6.1).

    Summed in fp64, in the first file's types.

    Raises UserError where the files do not hold the same tensors.
    """
    if not files:
        raise UserError("there is nothing to average: give at least one checkpoint")
    first = load_weights(files[0])
    total = {name: tensor.to(torch.float64) for name, tensor in first.items()}
    for file in files[1:]:
        tensors = load_weights(file)
        for name in sorted(total.keys() | tensors.keys()):
            shapes = [tuple(t[name].shape) if name in t else "absent" for t in (total, tensors)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{files[0]} and {file} are not of one model: {name} is "
                    f"{shapes[0]} and {shapes[1]}"
                )
            total[name] += tensors[name].to(torch.float64)
    return {name: (total[name] / len(files)).to(first[name].dtype) for name in total}


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The random numbers to come, of the CPU and of the run's device."""
    states = {"generator.cpu": torch.get_rng_state()}
    if device.type != "cpu":
        index = [device] if device.type == "cuda" else []
        states[f"generator.{device.type}"] = torch.get_device_module(device).get_rng_state(*index)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `generator_states` gave.

    On a device of another kind than the run was on, its numbers begin anew from the CPU's.
    """
    torch.set_rng_state(states["generator.cpu"])
    if device.type == "cpu":
        return
    state, generators = states.get(f"generator.{device.type}"), torch.get_device_module(device)
    if state is None:
        generators.manual_seed(torch.initial_seed())
    else:
        generators.set_rng_state(state, *([device] if device.type == "cuda" else []))
