"""Implementation choices of the parts on a CPU: the speed of each against its alternative."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import (
    argument_parser,
    command_line,
    interleaved,
    medians,
    ratio,
    table,
    write_results,
)
from heedful.parts.attention import attend
from heedful.parts.heads import OutputHead
from heedful.parts.losses import head_loss
from heedful.parts.residual import Dropout
from heedful.parts.tokens import MaskSpec, Span

# A batch of Transformer-Tiny: 128 sentences of 16 tokens, width 128 in 4 heads, 10,000 entries.
BATCH, LENGTH, WIDTH, HEADS, VOCAB = 128, 16, 128, 4, 10_000


def main() -> None:
    parser = argument_parser(__doc__ or "")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, data = [], {}
    for name, cases in choices().items():
        rates = interleaved(cases, rounds=2 if arguments.quick else 51)
        milliseconds = {case: 1000 / rate for case, rate in medians(rates).items()}
        data[name] = milliseconds
        (ours, our_time), *others = milliseconds.items()
        for other, time in others:
            times = ratio(rates[ours], rates[other])
            rows.append((name, ours, f"{our_time:.2f}", other, f"{time:.2f}", times))
    header = ("operation", "implementation", "ms", "alternative", "ms", "alternative's time / ours")
    write_results(
        "choices",
        "Implementation choices of the parts on a CPU",
        [
            f"Medians at the sizes of a small model: {BATCH} sentences of {LENGTH} tokens, width "
            f"{WIDTH} in {HEADS} heads, {VOCAB:,} vocabulary entries; forward and backward unless "
            "stated otherwise. The last column is the median of the ratios of paired rounds: below "
            "1, the implementation is slower than its alternative.",
            table(header, rows),
        ],
        {"milliseconds": data},
        directory=arguments.results,
        command=command_line(),
    )


def choices() -> dict[str, dict[str, Callable[[], float]]]:
    """For each operation its implementations, heedful's first."""
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    ours, theirs = Dropout(0.3), torch.nn.Dropout(0.3)
    cases: dict[str, dict[str, Callable[[], float]]] = {
        "dropout's random numbers": {
            "16 bits an element": lambda: backward(ours(x)),
            "torch.nn.Dropout": lambda: backward(theirs(x)),
        }
    }
    places = Span(torch.arange(LENGTH)[None])
    mask = MaskSpec(places, places, causal=True)
    for dtype, p in ((torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.0)):
        q, k, v = (
            torch.randn(BATCH, HEADS, LENGTH, WIDTH // HEADS, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        drop = Dropout(p)

        def plain(q: Tensor = q, k: Tensor = k, v: Tensor = v, drop: Dropout = drop) -> float:
            return backward(attend(q, k, v, mask.bias(torch.float32), drop)[0])

        def fused(q: Tensor = q, k: Tensor = k, v: Tensor = v, p: float = p) -> float:
            return backward(F.scaled_dot_product_attention(q, k, v, None, p, is_causal=True))

        name = f"attention in training, {str(dtype).removeprefix('torch.')}, dropout {p:g}"
        cases[name] = {"plain products": plain, "fused kernel": fused}
    scores = torch.randn(BATCH, HEADS, LENGTH, LENGTH)
    low = scores.bfloat16()
    cases["softmax of bf16 scores, forward"] = {
        "in fp32 and back": lambda: forward(low.float().softmax(-1).bfloat16()),
        "in bf16": lambda: forward(low.softmax(-1)),
    }
    hidden = torch.randn(BATCH * LENGTH, WIDTH, requires_grad=True)
    head = OutputHead(nn.Linear(WIDTH, VOCAB, bias=False))
    targets = torch.randint(VOCAB, (BATCH * LENGTH,))

    def chunked() -> float:
        return backward(head_loss(head, hidden, targets, label_smoothing=0.1).loss)

    def whole() -> float:
        logits = head(hidden)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=0.1, reduction="sum")
        return backward(loss)

    def in_bf16(case: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            with torch.autocast("cpu", torch.bfloat16):
                return case()

        return run

    for name, wrap in (("fp32", lambda case: case), ("bf16 products", in_bf16)):
        cases[f"output and loss, {name}"] = {
            "in chunks": wrap(chunked),
            "all logits at once": wrap(whole),
        }
    return cases


def backward(out: Tensor) -> float:
    """Run the backward pass; one unit of work."""
    out.sum().backward()
    return 1.0


def forward(out: Tensor) -> float:
    """One unit of work, without a backward pass."""
    return 1.0


if __name__ == "__main__":
    main()
