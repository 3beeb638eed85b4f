"""Tensors that may be sharded over processes: `DTensor` of FSDP2."""

from typing import Any

from torch import Tensor


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
