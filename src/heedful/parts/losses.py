"""Losses as a sum and a count of target tokens.

A training step divides once, by the count over all of its batches.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.kernels import library as kernels
from heedful.kernels import loss_gpu
from heedful.parts.heads import LogitsFunction, MaskedTokenHead, OutputHead
from heedful.parts.helpers import has_any_hooks, kernel_device, simulated

# Logits per chunk, and least rows per chunk: each chunk reads the whole matrix of the head and
# writes its whole gradient. With the kernel of a GPU a chunk fills it: 2 x 256 MiB in bf16.
_CHUNK_ELEMENTS = 10_000_000
_GPU_CHUNK_ELEMENTS = 2**27
_LEAST_ROWS = 512
# Logits per block of a chunk on a CPU, which the loss reads several times: 2 MB of fp32.
_BLOCK_ELEMENTS = 500_000

_factor: Tensor | None = None  # in the block of `gradient_factor`


@contextmanager
def gradient_factor(factor: Float[Tensor, ""] | None) -> Iterator[None]:
    """In the block, gradients that a loss computes with it have this factor before their products.

    Gradients of a sum of losses may overflow fp16 at any loss scale, and those of one target may
    underflow. With the factor of the sum in the loss whose backward pass will run (loss scale /
    number of targets) they are those of that loss. It changes the results only by rounding.

    Args:
        factor: not zero; None: 1.
    """
    global _factor  # noqa: PLW0603
    before, _factor = _factor, factor
    try:
        yield
    finally:
        _factor = before


class LossSum(NamedTuple):
    """Sums over target tokens.

    Attributes:
        loss: the training loss, with its gradient.
        nll: negative log-likelihood, without label smoothing.
        correct: number of targets that have the highest logit; None: not counted.
        tokens: number of targets.
    """

    loss: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    correct: Int[Tensor, ""] | None
    tokens: int


def cross_entropy(
    logits: Float[Tensor, "N V"], targets: Int[Tensor, "N"], *, label_smoothing: float = 0.0
) -> LossSum:
    """-Σ q log p, where q is ε / V for each of V classes and 1 - ε more for the target.

    Label smoothing of Szegedy et al. 2016, sec. 7, as in `torch.nn.functional.cross_entropy`: the
    classes of the target and of padding have their share of ε, too.

    Args:
        logits: (N, V).
        targets: (N,), real tokens only.
        label_smoothing: ε.

    >>> result = cross_entropy(torch.zeros(3, 8), torch.tensor([1, 2, 3]))
    >>> round(result.loss.item() / result.tokens, 4)  # log 8
    2.0794
    """
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or targets.is_floating_point():
        raise UserError(
            f"the loss needs logits (N, V) and N target ids, not {tuple(logits.shape)} and "
            f"{tuple(targets.shape)} of {targets.dtype}"
        )
    if not 0 <= label_smoothing <= 1:
        raise UserError(f"label_smoothing must be from 0 to 1, not {label_smoothing}")
    log_probs = logits.float().log_softmax(-1)
    nll = -log_probs.gather(-1, targets[:, None]).sum()
    loss = nll
    if label_smoothing:
        uniform = -log_probs.sum() / log_probs.size(-1)
        loss = (1 - label_smoothing) * nll + label_smoothing * uniform
    correct = (logits.argmax(-1) == targets).sum()
    return LossSum(loss, nll.detach(), correct, targets.numel())


def sigmoid_cross_entropy(logits: Float[Tensor, "N C"], targets: Bool[Tensor, "N C"]) -> LossSum:
    """The sum over N texts of the mean binary cross-entropy over C classes, which do not exclude
    each other; `correct` counts texts all of whose classes are right.

    >>> result = sigmoid_cross_entropy(torch.zeros(3, 8), torch.ones(3, 8) > 0)
    >>> round(result.loss.item() / result.tokens, 4)  # log 2
    0.6931
    """
    logits = logits.float()
    each = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none")
    correct = ((logits >= 0) == targets).all(-1).sum()
    loss = each.mean(-1).sum()
    return LossSum(loss, loss.detach(), correct, targets.size(0))


def squared_error(values: Float[Tensor, "N C"], targets: Float[Tensor, "N C"]) -> LossSum:
    """The sum over N texts of the mean squared error over C outputs."""
    loss = F.mse_loss(values.float(), targets, reduction="none").mean(-1).sum()
    return LossSum(loss, loss.detach(), None, targets.size(0))


class ChunkLoss(NamedTuple):
    """Sums over some rows, as in `LossSum`, and d loss / d logits if it was required."""

    loss: Tensor
    nll: Tensor
    correct: Tensor | None
    grad: Tensor | None


ChunkLossFunction = Callable[[Float[Tensor, "... n V"], Int[Tensor, "n"], bool], ChunkLoss]
ChunkLossKernel = Callable[
    [Float[Tensor, "n V"], Int[Tensor, "n"], bool, Float[Tensor, ""] | None], ChunkLoss
]


def head_loss(
    head: nn.Module,
    states: Float[Tensor, "N D"],
    targets: Int[Tensor, "N"],
    *,
    label_smoothing: float = 0.0,
    count_correct: bool = False,
) -> LossSum:
    """`cross_entropy(head(states), targets)` without the (N, V) logits in memory at once.

    Args:
        head: (N, D) -> (N, V).
        states: (N, D), of real tokens only.
        label_smoothing: see `cross_entropy`.
        count_correct: count targets that have the highest logit.
    """

    def chunk_loss(logits: Tensor, target: Tensor, needs_grad: bool) -> ChunkLoss:
        """Loss, sums and gradient of a chunk of logits (N, V)."""
        index, vocab = target[:, None], logits.size(-1)
        correct = (logits.argmax(-1) == target).sum() if count_correct else None
        probs = F.softmax(logits, -1)
        # log Σ exp from the most probable token, whose probability is never small: one softmax.
        log_sums = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
        nll = (log_sums - logits.gather(-1, index)).sum()
        loss = (1 - label_smoothing) * nll
        if label_smoothing:
            loss += label_smoothing * (log_sums.sum() - logits.sum() / vocab)
        if not needs_grad:
            return ChunkLoss(loss, nll, correct, None)
        grad = probs.sub_(label_smoothing / vocab)  # d loss / d logits = softmax - q
        grad.scatter_add_(-1, index, grad.new_full((1, 1), label_smoothing - 1).expand_as(index))
        return ChunkLoss(loss, nll, correct, grad)

    def whole_chunk_loss(
        logits: Tensor, target: Tensor, needs_grad: bool, factor: Tensor | None
    ) -> ChunkLoss:
        """The same by a kernel, for logits in the type of the head."""
        smoothing = float(label_smoothing)
        if kernel_device(logits) == "cuda":
            # Only such a head gives further columns.
            is_plain = isinstance(head, OutputHead) and type(head.out) is nn.Linear
            vocab = (_vocab_of(head) if is_plain else None) or logits.size(1)
            options = smoothing, needs_grad, vocab, factor
            sums, grad = loss_gpu.cross_entropy(logits, target, *options)
        else:
            grad = None
            if needs_grad:
                grad = logits if _can_overwrite(head) else torch.empty_like(logits)
            sums = kernels.cross_entropy(logits, target, smoothing, grad)
            if grad is not None and factor is not None:  # not in fp16, which this kernel lacks
                grad.mul_(factor)
        loss, nll, correct = sums
        return ChunkLoss(loss, nll, correct.long() if count_correct else None, grad)

    return chunked_loss(head, states, targets, chunk_loss, whole_chunk_loss)


def chunked_loss(
    head: nn.Module,
    states: Float[Tensor, "... N D"],
    targets: Int[Tensor, "N"],
    chunk_loss: ChunkLossFunction,
    kernel: ChunkLossKernel | None = None,
) -> LossSum:
    """A loss of the logits of a head, computed for chunks of rows together with its gradient.

    The gradient of a chunk is computed at once, on a CPU while its logits are in the cache of the
    core (on GPUs: Hsu et al. 2024, Liger kernel). The head is called as a module, so that wrappers
    of it or of its matrix (LoRA, FSDP2) apply. Under autocast the head runs in the autocast type,
    the loss in fp32.

    If FSDP2 shards an `OutputHead` as a unit, it is called once and the chunks are computed within
    the call: its weights are gathered for one call and for the backward pass of the step, not in
    between. All logits are computed at once in a compiled step, and if FSDP2 shards a part of the
    head, or a head of another class.

    Args:
        states: (N, D), or (P, N, D) from P forward passes with the same targets.
        chunk_loss: function of logits (…, n, V) in fp32, targets (n,), and a bool: the gradient
            with respect to the logits is required.
        kernel: the same function of logits (n, V) in the type of the head, and of the factor of
            its gradient (`gradient_factor`), called where kernels run (`heedful.kernels`). On a GPU
            logits may have further columns after those of the V tokens.
    """
    units = [] if torch.compiler.is_compiling() else _sharded_units(head)
    is_called_once = isinstance(head, OutputHead) and units == [head]
    if torch.compiler.is_compiling() or (units and not is_called_once):
        return _whole_loss(head(states), targets, chunk_loss)
    needs_grad = torch.is_grad_enabled() and (
        states.requires_grad or any(p.requires_grad for p in head.parameters())
    )
    if states.dim() != 2:
        kernel = None
    is_aligned = kernel is not None and isinstance(head, OutputHead) and _has_gpu_kernel(states)
    elements = _GPU_CHUNK_ELEMENTS if is_aligned else _CHUNK_ELEMENTS
    rows = max(_LEAST_ROWS, elements // (_vocab_of(head) or 10_000))
    chunks = _Chunks(targets, chunk_loss, kernel, rows, needs_grad, is_aligned, _factor)
    result: LossSum = head(states, chunks.loss) if is_called_once else chunks.loss(head, states)
    return result


class _Chunks(NamedTuple):
    """A loss that is computed for chunks of `rows` rows.

    Attributes:
        is_aligned: the head is called for aligned logits, which the kernel takes.
        factor: see `gradient_factor`.
    """

    targets: Int[Tensor, "N"]
    chunk_loss: ChunkLossFunction
    kernel: ChunkLossKernel | None
    rows: int
    needs_grad: bool
    is_aligned: bool
    factor: Float[Tensor, ""] | None

    def loss(self, logits_of: LogitsFunction, states: Float[Tensor, "... N D"]) -> LossSum:
        """The loss of states, whose logits are formed chunk by chunk."""
        needs_grad, rows = self.needs_grad, self.rows
        if self.is_aligned:
            logits_of = partial(logits_of, aligned=True)
        sums = torch.float32 if states.device.type == "mps" else torch.float64
        loss, nll = states.new_zeros(2, dtype=sums)
        correct: Tensor | None = None
        gradients = _Gradients(states)
        chunks = zip(states.detach().split(rows, -2), self.targets.split(rows), strict=True)
        for x, target in chunks:
            with torch.set_grad_enabled(needs_grad):
                out = logits_of(x.requires_grad_(needs_grad))
            results, grad = self._of_chunk(out.detach(), target)
            for result in results:
                loss += result.loss
                nll += result.nll
                if result.correct is not None:
                    correct = result.correct if correct is None else correct + result.correct
            if grad is not None:
                gradients.add(x, out, grad)
        total = loss.float()
        if needs_grad:
            total = gradients.attach_to(total, self.factor)
        return LossSum(total, nll.float(), correct, self.targets.numel())

    def _of_chunk(
        self, out: Float[Tensor, "... n V"], target: Int[Tensor, "n"]
    ) -> tuple[list[ChunkLoss], Tensor | None]:
        """The losses of a chunk of logits, on a CPU by blocks, and its gradient in their type."""
        needs_grad = self.needs_grad
        if self.kernel is not None and (
            self.is_aligned or kernels.can_run(out) or loss_gpu.can_run(out)
        ):
            result = self.kernel(out, target, needs_grad, self.factor)
            return [result], result.grad
        is_cpu, passes = kernel_device(out) == "cpu", out.shape[:-2].numel()
        block = max(1, _BLOCK_ELEMENTS // (passes * out.size(-1))) if is_cpu else self.rows
        grad = torch.empty_like(out) if needs_grad else out
        results = []
        blocks = (out.split(block, -2), target.split(block), grad.split(block, -2))
        for logits, labels, logits_grad in zip(*blocks, strict=True):
            result = self.chunk_loss(logits.float(), labels, needs_grad)
            if result.grad is not None:
                logits_grad.copy_(_times(result.grad, self.factor))
            results.append(result._replace(grad=None))
        return results, grad if needs_grad else None


def _whole_loss(
    logits: Float[Tensor, "... N V"], targets: Int[Tensor, "N"], chunk_loss: ChunkLossFunction
) -> LossSum:
    """The loss of all logits at once; autograd continues through the head."""
    result = chunk_loss(logits.detach().float(), targets, logits.requires_grad)
    loss = result.loss.float()
    if result.grad is not None:
        grads = (_times(result.grad, _factor).to(logits.dtype),)
        loss = _AttachGradients.apply(loss, grads, _factor, logits)  # type: ignore[no-untyped-call]
    return LossSum(loss, result.nll.float(), result.correct, targets.numel())


def _times(grad: Tensor, factor: Tensor | None) -> Tensor:
    """A gradient with a factor, in the same memory; None: 1."""
    return grad if factor is None else grad.mul_(factor)


def _sharded_units(head: nn.Module) -> list[nn.Module]:
    """The head and parts of it that FSDP2 shards as units; none if they belong to the root unit."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it is not imported, nothing is sharded
    return [] if fsdp is None else [m for m in head.modules() if isinstance(m, fsdp.FSDPModule)]


def _vocab_of(head: nn.Module) -> int | None:
    """The number of logits per row; None: not known of a wrapper."""
    vocab: int | None = getattr(getattr(head, "out", head), "out_features", None)
    return vocab


def _can_overwrite(head: nn.Module) -> bool:
    """True if nothing but the loss reads the logits of a head: its backward pass does not.

    Their gradient in the same memory stays in the cache of a CPU.
    """
    return (
        type(head) in (OutputHead, MaskedTokenHead)
        and type(head.out) is nn.Linear
        and not has_any_hooks(head)
        and not has_any_hooks(head.out)
    )


def _has_gpu_kernel(states: Tensor) -> bool:
    """True if a kernel computes the loss of these states on their GPU, or on a planned one."""
    if simulated:
        return kernel_device(states) == "cuda"
    if states.device.type != "cuda":
        return False
    is_autocast = torch.is_autocast_enabled("cuda")
    return loss_gpu.are_supported(torch.get_autocast_dtype("cuda") if is_autocast else states.dtype)


class _Gradients:
    """Gradients of a chunked loss with respect to the states and the weights of the head.

    The weights are the leaves of the autograd graph of a chunk, not the parameters of the head:
    FSDP2 replaces the parameters of a module during a call.
    """

    def __init__(self, states: Tensor) -> None:
        self.states = states
        self.state_grads: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.weight_grads: list[Tensor] = []

    def add(self, x: Tensor, out: Tensor, grad: Tensor) -> None:
        """Add the gradients of a chunk: states `x`, logits `out` and their gradient `grad`."""
        if not self.state_grads:
            self.weights = [leaf for leaf in _leaves(out) if leaf is not x]
        state_grad, *parts = torch.autograd.grad(out, (x, *self.weights), grad)
        # Summed in fp32 at least: a sum in 16 bits would lose small chunks.
        parts = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        if self.state_grads:
            parts = [total + part for total, part in zip(self.weight_grads, parts, strict=True)]
        self.weight_grads = parts
        self.state_grads.append(state_grad)

    def attach_to(self, loss: Tensor, factor: Tensor | None) -> Tensor:
        """The loss, with a backward pass that returns these gradients, which have the factor."""
        state_grad = torch.cat(self.state_grads, -2)
        weight_grads = [g.to(w.dtype) for g, w in zip(self.weight_grads, self.weights, strict=True)]
        attached: Tensor = _AttachGradients.apply(  # type: ignore[no-untyped-call]
            loss, (state_grad, *weight_grads), factor, self.states, *self.weights
        )
        return attached


class _AttachGradients(torch.autograd.Function):
    """A loss whose gradients with respect to `inputs`, times a factor, were computed before."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        grads: tuple[Tensor, ...],
        factor: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.grads, ctx.factor = grads, factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor | None, ...]:
        scale = scales[0] if ctx.factor is None else scales[0] / ctx.factor
        return None, None, None, *(grad * scale for grad in ctx.grads)


def _leaves(out: Tensor) -> list[Tensor]:
    """Leaves of the autograd graph of a tensor that require a gradient, each once."""
    leaves: list[Tensor] = []
    visited: set[Any] = set()
    stack = [out.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        stack += [parent for parent, _ in node.next_functions]
    return leaves
