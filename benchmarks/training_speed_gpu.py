"""Training speed on a GPU in tokens/s: heedful, torch.nn.Transformer and transformers.

As `training_speed.py`: whole optimizer steps in bf16 autocast with fused Adam, the same batches, in
one process in alternating rounds. Every system runs uncompiled and compiled by torch, peers also
with CUDA graphs at the smallest size, whose steps the host bounds; its fastest way is compared.
Transformers uses torch's fused attention (sdpa).
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import (
    command_line,
    facts,
    gpu_parser,
    interleaved,
    medians,
    paired_ratio,
    ratio,
    table,
    whole,
    write_results,
)
from heedful.cost.flops import ProductCounter
from heedful.data.buckets import BatchShape, pad_batch
from heedful.data.collate import Batch
from heedful.kernels import library as kernels
from heedful.parts.tokens import Tokens
from heedful.zoo import gpt2
from training_speed import (
    LABELS,
    SMOOTHING,
    Marian,
    Size,
    TorchTransformer,
    heedful_model,
    heedful_step,
    make_batches,
    plain_step,
    take_steps,
)

PRECISION = "bf16"
PAIRS = {
    "base": Size(512, 8, 6, 2048, 768, 32, 32_000),
    "big": Size(1024, 16, 6, 4096, 768, 32, 32_000),
}
TEXTS = {
    "gpt2": Size(768, 12, 12, 3072, 32, 1024, 50_304),
    "gpt2, own vocabulary": Size(768, 12, 12, 3072, 32, 1024, 50_257),
}
QUICK_PAIRS = {"base": Size(16, 2, 1, 32, 4, 8, 50)}
QUICK_TEXTS = {"gpt2": Size(16, 2, 1, 64, 2, 16, 50)}
SMOOTHINGS = {True: SMOOTHING, False: 0.0}  # of pairs and of texts
GRAPHED = ("base",)
WAYS = ("eager", "compiled", "graphs")  # the last one for peers only
MODES = {"compiled": None, "graphs": "reduce-overhead"}  # of torch.compile
LARGE = 8192  # width of the product whose rate is the limit


@dataclass
class Measured:
    """The figures of a size.

    Attributes:
        tokens_per_second: of each round, by system and way.
        peak: bytes allocated at the peak of a step, by system and way; of CUDA graphs, whose
            memory torch does not count, and on a CPU 0.
        flops: of the products of a step, per token.
    """

    tokens_per_second: dict[str, list[float]]
    peak: dict[str, int]
    flops: float
    parameters: int


def main() -> None:
    """Measure every size and write the page."""
    parser = gpu_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="steps of a case in a round")
    parser.add_argument("--sizes", help="those to measure, comma-separated; default: all")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    pairs, texts = (QUICK_PAIRS, QUICK_TEXTS) if arguments.quick else (PAIRS, TEXTS)
    sizes = {name: (size, name in pairs) for name, size in (pairs | texts).items()}
    if arguments.sizes:
        sizes = {name: sizes[name] for name in arguments.sizes.split(",")}
    measured = {}
    for name, size in sizes.items():
        cases = prepare(*size, name in GRAPHED and device.type == "cuda", device, steps)
        measured[name] = measure(*cases, rounds)
        del cases
        torch._dynamo.reset()  # its compiled steps hold the nets of a size
        gc.collect()
        torch.cuda.empty_cache()
    limit = product_rate(device, 64 if arguments.quick else LARGE)
    write_results(
        "training_speed_gpu",
        "Training speed on a GPU",
        sections(measured, pairs | texts, limit, rounds, steps, device),
        {"limit": limit, "sizes": {name: vars(found) for name, found in measured.items()}},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers",),
    )


def prepare(
    size: Size, has_pairs: bool, has_graphs: bool, device: torch.device, steps: int
) -> tuple[dict[str, Callable[[], float]], Measured]:
    """Functions that take steps, by system and way, all of which are compiled; and what is known
    before they are timed."""
    torch.manual_seed(1)
    batches = make_batches(size, seed=1) if has_pairs else text_batches(size)
    batches = [batch.to(device) for batch in batches]
    source_width = size.width if has_pairs else None
    shape = BatchShape(size.rows, size.width, source_width)
    padded = [pad_batch(batch, [shape]) for batch in batches]
    cases: dict[str, Callable[[], float]] = {}
    peak: dict[str, int] = {}
    flops, parameters = 0.0, 0
    smoothing = SMOOTHINGS[has_pairs]
    for name, make in (PAIR_SYSTEMS if has_pairs else TEXT_SYSTEMS).items():
        for way in WAYS[: 3 if has_graphs and name != "heedful" else 2]:
            net = make(size).to(device)
            if name == "heedful":
                parameters = sum(parameter.numel() for parameter in net.parameters())
                compiled = way == "compiled"
                step = heedful_step(net, PRECISION, compiled=compiled, smoothing=smoothing)
                if not compiled:
                    with kernels.unused(), ProductCounter() as products:
                        for batch in batches:
                            step(batch)
                    flops = products.flops / sum(batch.num_tokens for batch in batches)
            else:
                step = peer_step(net, way, smoothing)
            own = padded if name == "heedful" and way == "compiled" else batches
            case = partial(finished, step, cycle(own), steps, device)
            try:
                used = peak_of(case, device)
            except RuntimeError as error:
                if way != "graphs":
                    raise
                print(f"{name} does not run in CUDA graphs: {str(error).splitlines()[0]}")
                continue
            peak[f"{name} {way}"] = 0 if way == "graphs" else used
            cases[f"{name} {way}"] = case
    return cases, Measured({}, peak, flops, parameters)


def measure(cases: dict[str, Callable[[], float]], known: Measured, rounds: int) -> Measured:
    """The rates of the systems of a size."""
    rates = interleaved(cases, rounds=rounds)
    print({case: round(rate) for case, rate in medians(rates).items()}, flush=True)
    return replace(known, tokens_per_second=rates)


def peer_step(net: Any, way: str, smoothing: float) -> Callable[[Batch], None]:
    """A step of a peer: stacks and loss compiled, or neither."""
    if way == "eager":
        return plain_step(net, PRECISION, smoothing=smoothing)
    net.compile_body(MODES[way])
    step = plain_step(net, PRECISION, smoothing=smoothing, loss_of=torch.compile(F.cross_entropy))

    def marked(batch: Batch) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        step(batch)

    return marked


def finished(
    step: Callable[[Batch], None], batches: Iterator[Batch], count: int, device: torch.device
) -> int:
    """Take some steps and wait for the device; returns the tokens."""
    tokens = take_steps(step, batches, count)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tokens


def peak_of(case: Callable[[], float], device: torch.device) -> int:
    """Bytes that a case allocates at its peak, beyond what other cases hold; 0 on a CPU.

    The first call compiles and makes the optimizer's state, which belong to the case.
    """
    if device.type != "cuda":
        case()
        return 0
    before = torch.cuda.memory_allocated(device)
    case()
    torch.cuda.reset_peak_memory_stats(device)
    case()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def text_batches(size: Size) -> list[Batch]:
    """Rows of random ids without padding; the targets are the next ids."""
    rng = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(4):
        ids = torch.randint(size.vocab_size, (size.rows, size.width + 1), generator=rng)
        count = size.rows * size.width
        batches.append(
            Batch(
                tokens=Tokens.from_ids(ids[:, :-1].contiguous()),
                targets=ids[:, 1:].flatten(),
                target_positions=torch.arange(count),
                indices=np.arange(size.rows),
                num_tokens=count,
            )
        )
    return batches


class PeerTransformer(TorchTransformer):
    """torch.nn.Transformer, whose stacks may be compiled."""

    def compile_body(self, mode: str | None) -> None:
        """Compile what does not depend on the number of targets."""
        self.transformer.compile(dynamic=False, mode=mode)


class PeerMarian(Marian):
    """transformers' Marian, whose stacks may be compiled."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, "sdpa")

    def compile_body(self, mode: str | None) -> None:
        """Compile what does not depend on the number of targets."""
        self.net.model.compile(dynamic=False, mode=mode)


class PeerGPT2(nn.Module):
    """transformers' GPT2LMHeadModel, randomly initialized, without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=size.vocab_size,
            n_positions=size.width,
            n_embd=size.d_model,
            n_layer=size.num_layers,
            n_head=size.num_heads,
            n_inner=size.d_ff,
            use_cache=False,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            **dict.fromkeys(("bos_token_id", "eos_token_id")),
        )
        self.net = GPT2LMHeadModel(config)
        self.net.set_attn_implementation("sdpa")

    def compile_body(self, mode: str | None) -> None:
        """Compile the whole net."""
        self.compile(dynamic=False, mode=mode)

    def forward(self, source: None, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (M, V)."""
        logits: Tensor = self.net(input_ids=ids).logits
        return logits.flatten(0, 1)


def heedful_gpt2(size: Size) -> Any:
    """heedful's GPT-2 of the same size."""
    config = gpt2.Config(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        num_heads=size.num_heads,
        num_layers=size.num_layers,
        d_ff=size.d_ff,
        max_length=size.width,
        dropout=0.0,
    )
    return gpt2.build(config)


PAIR_SYSTEMS: dict[str, Callable[[Size], Any]] = {
    "heedful": heedful_model,
    "torch": PeerTransformer,
    "transformers": PeerMarian,
}
TEXT_SYSTEMS: dict[str, Callable[[Size], Any]] = {"heedful": heedful_gpt2, "transformers": PeerGPT2}


def product_rate(device: torch.device, width: int) -> float:
    """FLOP/s of a large product in bf16 of random numbers, median of some rounds."""
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))

    def run() -> float:
        for _ in range(20):
            F.linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 20 * 2.0 * width**3

    return medians(interleaved({"product": run}, rounds=5))["product"]


def sections(
    measured: dict[str, Measured],
    sizes: dict[str, Size],
    limit: float,
    rounds: int,
    steps: int,
    device: torch.device,
) -> list[str]:
    """Method, rates, ratios and memory."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    how = (
        "Tokens per second without padding, in whole optimizer steps: forward, loss, backward, "
        "clipping, fused Adam; bf16 autocast, batches on the GPU beforehand. Pairs have dropout "
        "0.1 and label smoothing 0.1, lengths uniform in the last quarter of the width; texts have "
        f"full rows and neither. Rates are medians of {rounds} rounds of {steps} steps in one "
        "process, ratios medians of the ratios within a round. Compiled: heedful's blocks by "
        "training.compile, the peers' stacks and loss by torch.compile; graphs: the peers' stacks "
        "by its mode reduce-overhead, in CUDA graphs, at base, whose steps the host bounds. "
        "Transformers uses sdpa."
    )
    header = ["size", "D", "heads", "layers", "F", "rows", "width", "vocabulary", "parameters"]
    rows = [
        [key, *(f"{number:,}" for number in vars(sizes[key]).values()), whole(found.parameters)]
        for key, found in measured.items()
    ]
    return [
        facts({"GPU": name, "its rate of a large product in bf16": f"{limit / 1e12:.0f} TFLOP/s"}),
        how,
        table(header, rows),
        "## Tokens per second, and their share of the rate of a large product",
        table(["", *measured], rate_rows(measured, limit)),
        "## heedful's rate / peer's rate, each in its fastest way",
        table(["", *measured], ratio_rows(measured)),
        "## Memory at the peak of a step, GB",
        table(["", *measured], peak_rows(measured)),
    ]


def all_cases(measured: dict[str, Measured]) -> list[str]:
    """The names of the cases of all sizes."""
    return [*dict.fromkeys(case for found in measured.values() for case in found.peak)]


def label(case: str) -> str:
    """A case in words."""
    name, way = case.split()
    return f"{LABELS[name].removesuffix(' MarianMTModel')}, {way}"


def rate_rows(measured: dict[str, Measured], limit: float) -> list[list[str]]:
    """Rates and shares of the limit."""
    rows = []
    for case in all_cases(measured):
        cells = []
        for found in measured.values():
            rate = medians(found.tokens_per_second).get(case)
            cells.append(
                "" if rate is None else f"{whole(rate)} ({rate * found.flops / limit:.0%})"
            )
        rows.append([label(case), *cells])
    return rows


def ratio_rows(measured: dict[str, Measured]) -> list[list[str]]:
    """Ratios of the fastest ways."""
    rows = []
    for name in ("torch", "transformers"):
        cells = []
        for found in measured.values():
            ours, theirs = (fastest_way(found, system) for system in ("heedful", name))
            cells.append(ratio(ours, theirs) if theirs else "")
        rows.append([label(f"{name} x").split(",")[0], *cells])
    return rows


def fastest_way(found: Measured, system: str) -> list[float] | None:
    """The rates of a system's fastest way; None: it was not measured."""
    ways = [rates for case, rates in found.tokens_per_second.items() if case.startswith(system)]
    return max(ways, key=lambda rates: paired_ratio(rates, ways[0]), default=None)


def peak_rows(measured: dict[str, Measured]) -> list[list[str]]:
    """Peaks of memory."""
    return [
        [label(case), *(gigabytes(found.peak.get(case)) for found in measured.values())]
        for case in all_cases(measured)
        if any(found.peak.get(case) for found in measured.values())
    ]


def gigabytes(count: int | None) -> str:
    """Bytes in GB; "" for none."""
    return f"{count / 1e9:.1f}" if count else ""


if __name__ == "__main__":
    main()
