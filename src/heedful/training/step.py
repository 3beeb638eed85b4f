"""A net with the loss that it is trained on, as one module."""

from collections.abc import Callable
from typing import Any

from torch import nn

from heedful.data.collate import Batch
from heedful.models.stack import Stack
from heedful.parts.experts import Experts, balance_loss, record_router_logits
from heedful.parts.losses import LossSum

LossFunction = Callable[[Any, Batch], LossSum]


class TrainStep(nn.Module):
    """A net and what it is trained on: what DDP, FSDP2 and `torch.compile` wrap.

    Where the net has experts, their balance loss is added: a mean over the batch's tokens, so once
    for each target, by whose number the sum is divided.

    Args:
        loss: (net, batch) -> sums over the batch's targets, differentiable.
        activation_checkpointing: keep the input of each block, and compute its activations again
            in the backward pass.
    """

    def __init__(
        self, net: nn.Module, loss: LossFunction, *, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        experts = [each for each in net.modules() if isinstance(each, Experts)]
        for module in net.modules():
            if isinstance(module, Stack):
                module.activation_checkpointing = activation_checkpointing
        self._balanced = [each for each in experts if each.balance_weight]

    def forward(self, batch: Batch) -> LossSum:
        """Sums over the targets of a batch, which is on the net's device."""
        if not self._balanced:
            return self.loss(self.net, batch)
        with record_router_logits(self._balanced) as logits:
            found = self.loss(self.net, batch)
        like = self._balanced[0]
        balance = like.balance_weight * balance_loss(logits, like.top_k, batch.tokens.real)
        return found._replace(loss=found.loss + found.tokens * balance)
