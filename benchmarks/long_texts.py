"""Long texts: cost of a layer with a sliding window by length, and of a token by context length.

Compared are a causal layer of heedful with a window and without, and one with torch's fused causal
kernel (`scaled_dot_product_attention(is_causal=True)`). Times are measured in alternating rounds in
one process; memory is the peak of a fresh process, minus its peak before the layer runs.
"""

import math
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common import (
    argument_parser,
    command_line,
    interleaved,
    medians,
    paired_ratio,
    table,
    write_results,
)
from heedful.parts.attention import Attention
from heedful.parts.tokens import MaskSpec, Span, Tokens
from heedful.zoo import llama

WIDTH, HEADS, WINDOW = 256, 8, 256
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
KINDS = {"window": "window", "full": "full", "fused": "full by torch's fused causal kernel"}
CONTEXTS = (256, 1024, 4096)
DECODER = {"d_model": 512, "num_heads": 8, "num_layers": 8, "d_ff": 1408, "vocab_size": 8000}
Layers = dict[str, dict[str, dict[str, Any]]]  # kind, length, measure


def main() -> None:
    """Measure the layers and decoding, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "LENGTH"), help="memory of one layer")
    parser.add_argument("--rounds", type=int, default=5, help="the minimum number of rounds")
    parser.add_argument(
        "--seconds", type=float, default=10, help="minimum seconds of all rounds of a length"
    )
    arguments = parser.parse_args()
    if arguments.one:
        print(memory(arguments.one[0], int(arguments.one[1])))
        return
    timing = {"rounds": arguments.rounds, "lasting": arguments.seconds}
    lengths, contexts = LENGTHS, CONTEXTS
    if arguments.quick:
        timing = {"rounds": 1}
        lengths, contexts = (64, 128), (32, 64)
    layers: Layers = {kind: {} for kind in KINDS}
    for length in lengths:
        rates = interleaved({kind: layer(kind, length) for kind in KINDS}, **timing)
        for kind in KINDS:
            layers[kind][str(length)] = {
                "seconds": 1 / medians(rates)[kind],
                "seconds_by_round": [1 / rate for rate in rates[kind]],
                "bytes": memory_of_process(kind, length),
            }
        print(length, {kind: layers[kind][str(length)]["seconds"] for kind in KINDS}, flush=True)
    decoding = decode(contexts, timing)
    write_results(
        "long_texts",
        "Long texts",
        sections(layers, decoding, timing),
        {"timing": timing, "layers": layers, "decoding": decoding},
        directory=arguments.results,
        command=command_line(),
    )
    (arguments.results / "long_texts.svg").write_text(figure(layers), encoding="utf-8")


class FusedAttention(nn.Module):
    """A layer with the same projections and torch's fused causal kernel."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Attention output (B, T, D)."""
        split = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


def layer(kind: str, length: int) -> Callable[[], float]:
    """A function that runs forward and backward of a causal layer on a text; one unit of work."""
    torch.manual_seed(0)
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    if kind == "fused":
        net: Any = FusedAttention(WIDTH, HEADS)
    else:
        attention = Attention(WIDTH, HEADS, window=WINDOW if kind == "window" else None)
        span = Span(torch.arange(length)[None])

        def net(x: Tensor) -> Tensor:
            return attention(x, MaskSpec(span, span, causal=True))

    def run() -> float:
        net(x).sum().backward()
        return 1.0

    return run


def memory_of_process(kind: str, length: int) -> int:
    """`memory` in a separate process."""
    command = [sys.executable, __file__, "--one", kind, str(length)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(process.stdout)


def memory(kind: str, length: int) -> int:
    """Bytes by which the first run of a layer raises the peak memory of this process."""
    layer(kind, min(length, 512))()  # memory of torch itself
    run = layer(kind, length)
    before = peak_bytes()
    run()
    return peak_bytes() - before


def peak_bytes() -> int:
    """Peak memory of this process, in bytes.

    On Linux `ru_maxrss` includes the memory of the process that started this one.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    [kibibytes] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(kibibytes) * 1024


@torch.inference_mode()
def decode(contexts: tuple[int, ...], timing: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Seconds of decoding one token after each context, and of attention over its cache alone."""
    config = llama.Config(**DECODER, max_length=2 * max(contexts))
    net = llama.build(config).eval()
    cases: dict[str, Callable[[], float]] = {}
    for context in contexts:
        cache = net.start(1, capacity=context + 2)
        ids = torch.randint(8, config.vocab_size, (1, context + 1))
        net.decode(Tokens.from_ids(ids[:, :context]), cache)
        last = Tokens(ids[:, -1:], torch.full((1, 1), context))

        def token(cache: Any = cache, last: Tokens = last, context: int = context) -> float:
            net.head(net.decode(last, cache))
            cache.rewind(context)
            return 1.0

        shape = (1, config.num_heads, 1, config.d_model // config.num_heads)
        query = torch.randn(shape)
        stores = chain.from_iterable(group.stores for group in cache.groups)
        stored = [store.transpose(1, 2).chunk(2, dim=1) for store in stores]

        def read(stored: Any = stored, query: Tensor = query) -> float:
            for keys, values in stored:
                F.scaled_dot_product_attention(query, keys, values)
            return 1.0

        cases |= {f"token {context}": token, f"reading {context}": read}
    least = 0.0 if timing["rounds"] == 1 else 0.1
    rates = interleaved(cases, least=least, **timing)
    measurements: dict[str, dict[str, Any]] = {}
    for context in contexts:
        token_rates, reading_rates = rates[f"token {context}"], rates[f"reading {context}"]
        pairs = zip(token_rates, reading_rates, strict=True)
        measurements[str(context)] = {
            "token_seconds": 1 / statistics.median(token_rates),
            "reading_seconds": 1 / statistics.median(reading_rates),
            "rest_seconds_by_round": [1 / token - 1 / reading for token, reading in pairs],
        }
        print("decoding", context, measurements[str(context)]["token_seconds"], flush=True)
    return measurements


def sections(
    layers: Layers, decoding: dict[str, dict[str, Any]], timing: dict[str, Any]
) -> list[str]:
    """The sections of the page."""
    rows, ratios = [], window_ratios(layers)
    for length, window in layers["window"].items():
        of = [layers[kind][length] for kind in KINDS]
        rows.append(
            [
                f"{int(length):,}",
                *(f"{1e3 * one['seconds']:.1f}" for one in of),
                f"{ratios[length]:.2f}",
                f"{1e6 * window['seconds'] / int(length):.2f}",
                *(f"{one['bytes'] / 2**20:.0f}" for one in of),
            ]
        )
    header = ["tokens", *(f"{name}, ms" for name in KINDS.values())]
    header += ["window's rate / best full rate", "window, µs per token"]
    header += [f"{name}, MiB" for name in KINDS.values()]
    first = next(iter(decoding.values()))["rest_seconds_by_round"]
    late = []
    for context, one in decoding.items():
        rest = one["rest_seconds_by_round"]
        late.append(
            [
                f"{int(context):,}",
                f"{1e3 * one['token_seconds']:.2f}",
                f"{1e3 * one['reading_seconds']:.2f}",
                f"{1e3 * statistics.median(rest):.2f}",
                f"{paired_ratio(rest, first):.2f}",
            ]
        )
    return [
        f"One causal layer (width {WIDTH}, {HEADS} heads, fp32, no dropout), forward and backward; "
        f"with a window of {WINDOW} and with full attention, by heedful's layer and by one with "
        "torch's fused causal kernel. All run in one process in alternating rounds, at least "
        f"{timing['rounds']} rounds and {timing.get('lasting', 0):g} seconds. "
        "Times are medians of the rounds, ratios medians of the ratios within a round; memory is "
        "the peak of a separate process.",
        verdict(ratios),
        table(header, rows),
        "![Time and memory of a layer by length](long_texts.svg)",
        "Decoding of one token by length of its context, batch of 1 "
        f"({', '.join(f'{key} {value}' for key, value in DECODER.items())}). Reading: fused "
        "attention of all layers over the same cache, without anything else; rest: the difference.",
        table(["context", "token, ms", "reading, ms", "rest, ms", "rest / first"], late),
    ]


def window_ratios(layers: Layers) -> dict[str, float]:
    """By length, the rate of the window divided by that of the fastest full attention."""
    ratios = {}
    for length, window in layers["window"].items():
        full = [layers[kind][length] for kind in ("full", "fused")]
        best = min(full, key=lambda one: one["seconds"])
        ratios[length] = paired_ratio(best["seconds_by_round"], window["seconds_by_round"])
    return ratios


def verdict(ratios: dict[str, float]) -> str:
    """A sentence on the lengths at which the window is faster than full attention."""
    slower = [f"{int(length):,} ({value:.2f})" for length, value in ratios.items() if value < 1]
    faster = [f"{int(length):,} ({value:.2f})" for length, value in ratios.items() if value >= 1]
    kinds = {"slower": slower, "as fast or faster": faster}
    parts = [f"{kind} at {', '.join(some)}" for kind, some in kinds.items() if some]
    return (
        "Compared with the fastest full attention at each length, the window is "
        f"{' and '.join(parts)} tokens (in parentheses its rate divided by that of full attention)."
    )


def figure(layers: Layers) -> str:
    """An SVG with both measures by length, on logarithmic axes."""
    charts = [("seconds", "milliseconds", 1e3), ("bytes", "MiB", 1 / 2**20)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 380" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="900" height="380" fill="#ffffff"/>',
    ]
    for place, (key, unit, scale) in enumerate(charts):
        parts += chart(layers, key, unit, scale, left=70 + 440 * place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def chart(layers: Layers, key: str, unit: str, scale: float, *, left: int) -> list[str]:
    """SVG elements of a chart of one measure, with a labeled line for each kind."""
    lines = {
        kind: [(int(length), max(one[key] * scale, 0.01)) for length, one in by_length.items()]
        for kind, by_length in layers.items()
    }
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    low, high = (f(math.log10(y) for y in ys) for f in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    span = math.log2(max(xs) / min(xs)) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + 300 * math.log2(x / min(xs)) / span
        return across, 320 - 270 * (math.log10(y) - low) / (high - low)

    elements = [f'<text x="{left}" y="28" font-weight="600">{escape(unit)} by length</text>']
    for power in range(low, high + 1):
        _, y = at(min(xs), 10.0**power)
        elements.append(f'<path d="M{left} {y:.1f}h300" stroke="#dddddd"/>')
        elements.append(
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for x in sorted(set(xs)):
        across, _ = at(x, 10.0**low)
        label = f"{x // 1024}k" if x >= 1024 else str(x)
        elements.append(f'<text x="{across:.1f}" y="342" text-anchor="middle">{label}</text>')
    for kind, color in (("full", "#c2410c"), ("fused", "#15803d"), ("window", "#1d4ed8")):
        points = [at(x, y) for x, y in lines[kind]]
        if not points:
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        elements.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        elements += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points
        ]
        x, y = points[-1]
        elements.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{color}">{kind}</text>')
    return elements


if __name__ == "__main__":
    main()
