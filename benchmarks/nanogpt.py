"""A peer: nanoGPT's training loop and loss estimate, with the GPT-2 of transformers.

nanoGPT's settings for a CPU: batches of 12 windows of 64 characters at random positions, AdamW,
a cosine schedule, and the checkpoint with the lowest validation loss.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONTEXT, WINDOWS, STEPS, WARMUP, PEAK, END = 64, 12, 2000, 100, 1e-3, 1e-4
EVALUATE_EVERY = 250
ESTIMATE_BATCHES = 20  # batches of a loss estimate


def split_text(text: str) -> tuple[str, str, str]:
    """Test (the first tenth of the characters), training and validation text (the last tenth)."""
    first, last = len(text) // 10, len(text) - len(text) // 10
    return text[:first], text[first:last], text[last:]


def losses_of_peer(
    text: str, seed: int, cache: Path, count: int, *, steps: int = STEPS
) -> dict[str, Any]:
    """Test losses of transformers' GPT-2 after nanoGPT's loop; stored in the file `cache`."""
    if cache.is_file():
        losses: dict[str, Any] = json.loads(cache.read_text(encoding="utf-8"))
        return losses
    torch.manual_seed(seed)
    index = {character: number for number, character in enumerate(sorted(set(text)))}
    test, training, valid = (
        torch.tensor([index[character] for character in part]) for part in split_text(text)
    )
    net = peer(len(index))
    train(net, training, valid, steps)
    losses = {"loss": mean_loss(net, test), "estimates": loss_estimates(net, test, count)}
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(losses), encoding="utf-8")
    return losses


def peer(vocab_size: int) -> nn.Module:
    """A GPT-2 with four layers of width 128 without biases, initialized by transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.model(ids).logits
            return logits

    sizes = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=vocab_size, activation_function="gelu", **sizes, **none, **ids)
    model = GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # initialized as zeros
            parameter.requires_grad_(False)
    return Logits(model)


def train(net: nn.Module, ids: Tensor, valid: Tensor, steps: int) -> None:
    """nanoGPT's loop; afterwards the net has the weights with the lowest validation loss."""
    weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in weights if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99))
    lowest, best = math.inf, net.state_dict()
    for step in range(steps):
        net.train()
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        loss(net, *random_batch(ids)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
            valid_loss = mean_loss(net, valid)
            if valid_loss < lowest:
                lowest, best = valid_loss, copy.deepcopy(net.state_dict())
    net.load_state_dict(best)


def rate(step: int) -> float:
    """Learning rate: linear warm-up, then a cosine to a tenth of the peak."""
    if step < WARMUP:
        return PEAK * (step + 1) / (WARMUP + 1)
    share = (step - WARMUP) / (STEPS - WARMUP)
    return END + (PEAK - END) * (1 + math.cos(math.pi * share)) / 2


def random_batch(ids: Tensor) -> tuple[Tensor, Tensor]:
    """A batch of windows at random positions: inputs and targets."""
    starts = torch.randint(len(ids) - CONTEXT, (WINDOWS,))
    windows = torch.stack([ids[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def loss(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def mean_loss(net: nn.Module, ids: Tensor) -> float:
    """Mean loss over a text, in windows that do not overlap."""
    net.eval()
    count = (len(ids) - 1) // CONTEXT
    inputs, targets = (ids[first : first + count * CONTEXT].view(count, -1) for first in (0, 1))
    losses = [
        float(loss(net, *batch)) * len(batch[0])
        for batch in zip(inputs.split(256), targets.split(256), strict=True)
    ]
    return sum(losses) / count


@torch.no_grad()
def loss_estimates(net: nn.Module, ids: Tensor, count: int) -> list[float]:
    """nanoGPT's loss estimate, from `count` random samples of batches."""
    net.eval()
    return [
        float(np.mean([float(loss(net, *random_batch(ids))) for _ in range(ESTIMATE_BATCHES)]))
        for _ in range(count)
    ]
