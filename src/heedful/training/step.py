"""A net and its training loss as one module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from heedful.data.collate import Batch
from heedful.models.stack import Stack
from heedful.parts.experts import Experts, balance_loss, record_router_logits
from heedful.parts.losses import LossSum

LossFunction = Callable[[Any, Batch], LossSum]


class TrainStep(nn.Module):
    """A net and its training loss: the module that DDP, FSDP2 and `torch.compile` wrap.

    For a net with experts, their load-balancing loss is added. It is a mean over the tokens of the
    batch, multiplied by the number of targets, since the trainer divides the sum by that number.

    Args:
        loss: (net, batch) -> sums over the targets of the batch, differentiable.
        activation_checkpointing: store only the input of each block, and compute its activations
            again in the backward pass.
    """

    def __init__(
        self, net: nn.Module, loss: LossFunction, *, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self._activation_checkpointing = activation_checkpointing
        for module in net.modules():
            if isinstance(module, Stack):
                module.activation_checkpointing = activation_checkpointing
                module.skips_padding = True
        experts = [module for module in net.modules() if isinstance(module, Experts)]
        self._balanced = [module for module in experts if module.balance_weight]

    def with_net(self, net: nn.Module) -> "TrainStep":
        """The same step of another net."""
        return TrainStep(net, self.loss, activation_checkpointing=self._activation_checkpointing)

    def forward(self, batch: Batch) -> LossSum:
        """Sums over the targets of a batch on the net's device."""
        if not self._balanced:
            return self.loss(self.net, batch)
        with record_router_logits(self._balanced) as logits:
            sums = self.loss(self.net, batch)
        experts, real = self._balanced[0], batch.tokens.real
        if logits[0].shape[:2] != batch.tokens.ids.shape and batch.tokens.real_index is not None:
            # The stack skips padding: one row of the real tokens and then some padding.
            columns = torch.arange(logits[0].size(1), device=logits[0].device)
            real = columns[None] < batch.tokens.real_index.size(0)
        balance = experts.balance_weight * balance_loss(logits, experts.top_k, real)
        return sums._replace(loss=sums.loss + sums.tokens * balance)
