"""A step that several processes share: memory, bytes sent, and evenness of their batches."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int64
from torch import nn

from heedful.cost.trace import StepCost
from heedful.models.stack import Block
from heedful.zoo.saved import trainable

Parallel = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a process; see `StepCost`.

    Attributes:
        gradients: with FSDP and several micro-batches in a step those of the whole net, whose sum
            over the micro-batches each process keeps until it is sent.
        gathered: weights that FSDP gathers: of the largest unit and the next one, and the gradient
            of a unit before it is sent.
        whole_net: of the main process with FSDP alone: the whole net, to save it; the others have
            it during evaluations.
        peak: at the peak of a step. It may be less than the sum of the parts, as activations are
            freed while gradients are made, or more, by temporary tensors.
    """

    weights: int
    gradients: int
    optimizer_state: int
    averages: int
    activations: int
    gathered: int
    whole_net: int
    peak: int


def rank_memory(
    memory: StepCost,
    net: nn.Module,
    parallel: Parallel,
    count: int,
    *,
    in_bf16: bool,
    micro_batches: int = 1,
) -> RankMemory:
    """The memory of the main process.

    DDP keeps gradients in its buckets (`gradient_as_bucket_view`), so that it takes no more than
    one process. FSDP divides weights (fp32 masters), gradients, optimizer state and averages by the
    number of processes, and gathers one unit at a time (a block, or all that is in no block), the
    next one ahead (Zhao et al. 2023, sec. 3.3).

    Args:
        memory: of one process.
        count: number of processes.
        in_bf16: FSDP gathers the weights in bf16.
        micro_batches: of a process in a step.
    """
    parts = memory.weights, memory.gradients, memory.optimizer_state, memory.averages
    if parallel != "fsdp":
        return RankMemory(*parts, memory.activations, 0, 0, memory.peak)
    shards = [-(-part // count) for part in parts]
    if micro_batches > 1:
        shards[1] = memory.gradients
    weights, gradients, state, averages = shards
    gathered = 3 * max(unit_sizes(net)) * (2 if in_bf16 else 4)
    # Autocast keeps a copy in 16 bits of each matrix, which weights gathered in bf16 do not need.
    linears = {m.weight: m for m in net.modules() if isinstance(m, nn.Linear)}
    copies = 2 * sum(weight.numel() for weight in linears) if in_bf16 else 0
    activations = max(0, memory.activations - copies)
    peak = memory.peak - copies - sum(parts) + sum(shards) + gathered + memory.weights
    whole = memory.weights
    return RankMemory(weights, gradients, state, averages, activations, gathered, whole, peak)


def unit_sizes(net: nn.Module) -> list[int]:
    """Parameters of each unit that FSDP gathers at once: the blocks, and the rest of the net."""
    blocks = [module for module in net.modules() if isinstance(module, Block)]
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    return [*sizes, sum(p.numel() for p in net.parameters()) - sum(sizes)]


def bytes_sent(
    net: nn.Module, parallel: Parallel, count: int, *, in_bf16: bool, micro_batches: int = 1
) -> int:
    """Bytes that each process sends in an optimizer step, by ring algorithms.

    DDP: one all-reduce of the fp32 gradients, 2 (n - 1) / n of their bytes. FSDP: for each of the
    step's micro-batches an all-gather of the blocks' weights for the forward pass and one for the
    backward pass, and one of the other weights, which stay gathered between the two, (n - 1) / n of
    their bytes each; then a reduce-scatter of the fp32 gradients, (n - 1) / n of theirs. Activation
    checkpointing computes a block again while its weights are gathered for the backward pass, and
    sends nothing more.

    Args:
        micro_batches: of a process in a step.
    """
    if parallel == "none" or count == 1:
        return 0
    trained = 4 * sum(p.numel() for p in trainable(net).values())
    if parallel == "ddp":
        return 2 * (count - 1) * trained // count
    *blocks, others = unit_sizes(net)
    gathered = micro_batches * (2 if in_bf16 else 4) * (2 * sum(blocks) + others)
    return (count - 1) * (gathered + trained) // count


@dataclass(frozen=True)
class Evenness:
    """Tokens of the ranks in an epoch.

    A step ends when its slowest rank is ready, so others are idle meanwhile.

    Attributes:
        steps: optimizer steps.
        tokens_per_rank: mean over the ranks.
        max_ratio: tokens of the rank that has most, as a ratio to the mean.
        idle_share: share of the time of all ranks in which one waits for the slowest of its step,
            if the time of a batch is proportional to its tokens; steps without a batch for a rank
            included.
    """

    steps: int
    tokens_per_rank: float
    max_ratio: float
    idle_share: float


def evenness(tokens: Int64[np.ndarray, " N"], ranks: int, accumulation: int = 1) -> Evenness:
    """Deal the batches of an epoch to ranks.

    Args:
        tokens: tokens of each batch with padding, in the order of the plan.
        accumulation: batches of each rank in an optimizer step.
    """
    size = ranks * accumulation
    steps = -(-len(tokens) // size)
    table = np.zeros(steps * size, dtype=np.int64)
    table[: len(tokens)] = tokens
    by_step = table.reshape(steps, accumulation, ranks).sum(1)
    by_rank = by_step.sum(0)
    busy, whole = by_step.sum(), by_step.max(1).sum() * ranks
    return Evenness(
        steps, float(by_rank.mean()), float(by_rank.max() / by_rank.mean()), float(1 - busy / whole)
    )
