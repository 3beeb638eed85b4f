"""The kernel of `loss_gpu.py`; imported on a machine with Triton only."""

import triton
import triton.language as tl


# Triton evaluates the annotations and rejects all types but its own.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    logits_grad,
    rows,
    factor,
    num_rows,
    vocab,
    width,
    smoothing,
    needs_grad: tl.constexpr,
    has_factor: tl.constexpr,
    block: tl.constexpr,
):
    """Loss, negative log-likelihood and a correct target (1 or 0) of a row, and its gradient.

    Each lane sums over every `block`-th logit; the lanes are added at the end.

    Args:
        logits, logits_grad: (N, W).
        rows: (3, N).
        factor: (1,), of the gradient, which is rounded after it; read with `has_factor` only.
        vocab: the logits V of a row that are classes.
        width: W.
        block: logits that are read at once.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    logits_grad += row * width
    lanes = tl.arange(0, block)
    target = tl.load(targets + row)
    is_class = (target >= 0) & (target < vocab)
    of_target = tl.load(logits + target, mask=is_class, other=float("nan")).to(tl.float32)
    # The largest logit so far, the sum of exp of the differences to it, the sum of the logits, and
    # the number of logits before the target in the order of `argmax`. The start is finite, so that
    # no difference of infinities is formed.
    largest = tl.full((block,), -3.0e38, tl.float32)
    exps = tl.zeros((block,), tl.float32)
    total = tl.zeros((block,), tl.float32)
    before = tl.zeros((block,), tl.int32)
    for start in range(0, vocab, block):
        columns = start + lanes
        inside = columns < vocab
        x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, x)
        exps = exps * tl.exp(largest - new) + tl.exp(x - new)
        total += tl.where(inside, x, 0.0)
        is_before = (x > of_target) | ((x == of_target) & (columns < target))
        before += tl.where(is_before & inside, 1, 0)
        largest = new
    highest = tl.max(largest, 0)
    log_sum = highest + tl.log(tl.sum(exps * tl.exp(largest - highest), 0))
    nll = log_sum - of_target
    loss = nll
    if smoothing != 0.0:  # else a logit of -inf has no part in the loss
        loss = (1.0 - smoothing) * nll + smoothing * (log_sum - tl.sum(total, 0) / vocab)
    tl.store(rows + row, loss)
    tl.store(rows + num_rows + row, nll)
    tl.store(rows + 2 * num_rows + row, tl.where(tl.sum(before, 0) == 0, 1.0, 0.0))
    if needs_grad:
        uniform = smoothing / vocab
        scale = 1.0
        if has_factor:
            scale = tl.load(factor)
        for start in range(0, width, block):
            columns = start + lanes
            inside = columns < vocab
            x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
            grad = tl.where(inside, tl.exp(x - log_sum) - uniform, 0.0)
            grad = tl.where(columns == target, grad - (1.0 - smoothing), grad)
            kind = logits_grad.dtype.element_ty
            tl.store(logits_grad + columns, (grad * scale).to(kind), mask=columns < width)
