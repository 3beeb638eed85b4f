"""Gradients of nets sharded with FSDP2; called by tests/training/test_train_step.py."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from architectures import tiny
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts import losses
from heedful.parts.losses import LossSum, head_loss
from heedful.parts.positions import RelativePositionBias
from heedful.parts.tokens import Tokens
from heedful.training.step import LossNet
from option_space import VOCAB

NETS: dict[str, dict[str, Any]] = {
    "vaswani2017": {"tie_embeddings": "all"},
    "gpt2": {},
    # The balance loss is a mean over the tokens of a process, so that shares of it do not add up.
    "mixtral": {"balance_weight": None},
    "llama": {"tie_embeddings": False},
    "bert": {},
    "t5": {},
}
ROWS, WIDTH = 4, 6


def batch(first: int, last: int) -> Any:
    """Some rows of one batch, the same in every process."""
    torch.manual_seed(1)
    ids, lengths = torch.randint(VOCAB, (ROWS, WIDTH)), torch.tensor([6, 2, 4, 5])
    ids, lengths = ids[first:last], lengths[first:last]
    return SimpleNamespace(tokens=Tokens.from_ids(ids, lengths))


def objective(net: Any, inputs: Any) -> LossSum:
    """The chunked loss of every real token."""
    tokens = inputs.tokens
    if isinstance(net, EncoderDecoder):
        states = net.states(tokens, tokens)
    else:
        states = net.encode(tokens) if isinstance(net, EncoderOnly) else net.decode(tokens)
    return head_loss(net.head, states[tokens.real], tokens.ids[tokens.real])


def gradients(loss_net: LossNet) -> dict[str, Tensor]:
    """The whole gradient of each parameter, by its name."""
    actual = {n: p.grad for n, p in loss_net.net.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in actual.items()}


def net_of(name: str) -> Any:
    """The net of a name of `NETS`, the same in every process."""
    return tiny(name, **NETS[name])


def save_gradients(rank: int, folder: Path, world: int) -> None:
    """One step of each net, checkpointed or not; the first process writes the gradients."""
    losses._LEAST_ROWS, losses._CHUNK_ELEMENTS = 2, 2 * VOCAB  # several chunks
    losses._whole_loss = None  # all logits at once are never formed
    mesh = init_device_mesh("cpu", (world,))
    targets = int(batch(0, ROWS).tokens.real.sum())
    share = ROWS // world
    for name, checkpointed in product(NETS, (False, True)):
        loss_net = LossNet(net_of(name), objective, activation_checkpointing=checkpointed)
        for module in loss_net.net.modules():
            if isinstance(module, RelativePositionBias):  # blocks share it
                fully_shard(module, mesh=mesh)
        for stack in (getattr(loss_net.net, side, None) for side in ("encoder", "decoder")):
            for block in [] if stack is None else stack.blocks:
                fully_shard(block, mesh=mesh)
        if name == "llama":  # a head with untied weights may be sharded separately
            fully_shard(loss_net.net.head, mesh=mesh)
        fully_shard(loss_net, mesh=mesh)
        actual = loss_net(batch(rank * share, (rank + 1) * share))
        # FSDP2 takes the mean over the processes; the loss is of all their targets.
        (actual.loss * world / targets).backward()
        grads = gradients(loss_net)
        if rank == 0:
            save_file(grads, folder / f"{name}-{checkpointed}.safetensors")
    distributed.barrier()
