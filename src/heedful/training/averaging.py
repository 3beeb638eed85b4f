"""Averaging the weights of several checkpoints (Vaswani et al. 2017, sec. 6.1)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from heedful.errors import UserError
from heedful.zoo.saved import load_tensors


def average_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over safetensors files, summed in fp64, in the first file's types.

    Raises UserError where the files do not hold the same tensors.
    """
    if not files:
        raise UserError("there is nothing to average: give at least one checkpoint")
    first = load_tensors(files[0])
    total = {name: tensor.to(torch.float64) for name, tensor in first.items()}
    for file in files[1:]:
        tensors = load_tensors(file)
        for name in sorted(total.keys() | tensors.keys()):
            shapes = [tuple(t[name].shape) if name in t else "absent" for t in (total, tensors)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"{files[0]} and {file} are not of one model: {name} is "
                    f"{shapes[0]} and {shapes[1]}"
                )
            total[name] += tensors[name].to(torch.float64)
    return {name: (total[name] / len(files)).to(first[name].dtype) for name in total}
