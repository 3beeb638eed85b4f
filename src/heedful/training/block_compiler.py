"""Compilation of training steps: the blocks of a net by `torch.compile`, once per batch shape."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from heedful.data.buckets import MAX_SHAPES
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.kernels.build import has_cpp_compiler, use_own_inductor_cache
from heedful.models.stack import Stack
from heedful.parts.attention import MultiHead
from heedful.progress import track

# Upper bound of graphs per shape: encoder and decoder, local and global layers, packed or not.
_BLOCK_KINDS = 8
_PART_SIZES = 2  # numbers of rows of the parts of a batch (`training.batch_parts`)
_TURN_OFF = "set training.compile to false"


def _call(block: nn.Module, *inputs: Any) -> Any:
    """The function that is compiled, once for all blocks: its graphs differ by block and shape."""
    return block(*inputs)


class BlockCompiler:
    """Compiles the blocks of a net's stacks for training; evaluation runs them uncompiled.

    Each block is one graph of fixed shapes (`fullgraph`, not dynamic), shared by equal blocks of a
    stack. Embeddings, masks, and the head with its chunked loss stay uncompiled: a graph would form
    the logits of all chunks at once (`heedful.parts.losses`).

    Args:
        backend: of `torch.compile`.

    Raises:
        UserError: the CPU's backend finds no C++ compiler; other users can write in the cache.
    """

    def __init__(self, net: nn.Module, backend: str = "inductor") -> None:
        is_cpu = next(net.parameters()).device.type == "cpu"
        if backend == "inductor" and is_cpu and not has_cpp_compiler():
            raise UserError(
                "training.compile needs a C++ compiler: install one, for example by "
                f"`apt install g++`, or {_TURN_OFF}"
            )
        use_own_inductor_cache()
        # Limits on all graphs of `_call` in the process, those of other nets included.
        from torch import _dynamo  # takes a second, for which errors in a recipe need not wait

        config: Any = _dynamo.config
        config.recompile_limit += _PART_SIZES * MAX_SHAPES * _BLOCK_KINDS
        config.accumulated_recompile_limit += _PART_SIZES * MAX_SHAPES * _BLOCK_KINDS
        self._compiled_shapes: set[Any] = set()
        run = torch.compile(_call, fullgraph=True, dynamic=False, backend=backend)
        for module in net.modules():
            if isinstance(module, Stack):
                module.compiled_block = run
            if isinstance(module, MultiHead):
                module.preferred_kernel = "flex"

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """A context for the forward and backward pass of a batch; a new shape is compiled in it.

        Raises:
            UserError: torch cannot compile the net.
        """
        source = None if batch.source is None else batch.source.ids.shape
        shape = (batch.tokens.ids.shape, source, batch.tokens.segments is None)
        if shape in self._compiled_shapes:
            yield
            return
        rows, width = batch.tokens.ids.shape
        name = f"compiling the training step for {rows:,} rows of {width:,} tokens"
        try:
            with track(name, 1) as advance:
                yield
                advance(1)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"torch cannot compile the net: {reason}; {_TURN_OFF}") from error
        self._compiled_shapes.add(shape)
