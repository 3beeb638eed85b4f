"""Tensors that are sharded over processes: `DTensor` of FSDP2 in memory, safetensors files on disk.

The files, one for each process, are those of `torch.distributed.checkpoint`, and can be read by any
number of processes. Nothing is pickled.
"""

import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.processes import Processes


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of `like`, and sharded as it is if it has the same shape.

    A tensor that is sharded already is returned unchanged.
    """
    mesh = getattr(like, "device_mesh", None)
    if mesh is None or full.shape != like.shape:
        return full.to(like.device)
    if hasattr(full, "device_mesh"):
        return full
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(full.to(like.device), mesh, sharded.placements, src_data_rank=None)


def whole_tensor(tensor: Tensor) -> Tensor:
    """The value of a tensor that may be a sum or a norm over shards."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def save_shards(folder: Path, tensors: Mapping[str, Tensor], processes: Processes) -> None:
    """Write the tensors of a checkpoint, sharded or whole; called by all with the same names.

    Raises:
        UserError: a process cannot write, in every process.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {name: tensor.detach() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with warnings.catch_warnings():  # torch before 2.13 uses a deprecated class of torch
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            save(state, storage_writer=writer, process_group=processes.host_group)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise UserError(
            f"rank {rank} cannot write its part of a checkpoint in {folder.parent.parent}: "
            f"{reason}; make room, and continue with resume=True"
        ) from None


def load_shards(folder: Path, net: nn.Module) -> dict[str, Tensor]:
    """Read tensors; those with the name and shape of a parameter of the net are sharded like it.

    A name is that of a parameter with a prefix or a suffix.

    Raises:
        UserError: files that are missing or damaged.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    parameters = dict(net.named_parameters())
    try:
        entries: Any = reader.read_metadata().state_dict_metadata
        state = {
            name: _empty(entry, parameters.get(_parameter_of(name, parameters) or ""))
            for name, entry in entries.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, storage_reader=reader, no_dist=True)  # each process reads its part
    except Exception as error:  # of many kinds, one for each way in which files can be damaged
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{folder} is damaged or incomplete: {reason}") from None
    return state


def _empty(entry: Any, parameter: Tensor | None) -> Tensor:
    dtype = entry.properties.dtype
    if parameter is not None and parameter.shape == entry.size:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(entry.size, dtype=dtype)


def _parameter_of(name: str, parameters: Container[str]) -> str | None:
    """The parameter to which the state of a name belongs: of `average.NAME`, `NAME.exp_avg`."""
    names = (name.partition(".")[2], name.rpartition(".")[0])
    return next((candidate for candidate in names if candidate in parameters), None)
