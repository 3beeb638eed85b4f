"""Long texts: what a sliding window costs as a text grows, and what a token costs late in a text.

Memory is the largest that a fresh process ever held, less what it held before the layer ran.
"""

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from html import escape
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common import argument_parser, command_line, table, write_results
from heedful.parts.attention import Attention
from heedful.parts.tokens import Span, Tokens
from heedful.parts.visibility import Visibility
from heedful.zoo import llama

WIDTH, HEADS, WINDOW = 256, 8, 256
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FULL_LENGTHS = (512, 1024, 2048, 4096, 8192)  # the weights of 16k would take 8 GiB a pass
CONTEXTS = (256, 1024, 4096)
DECODER = {"d_model": 512, "num_heads": 8, "num_layers": 8, "d_ff": 1408, "vocab_size": 8000}


def main() -> None:
    """Measure each layer in a process of its own, then decoding, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "LENGTH"), help="one layer, as JSON")
    parser.add_argument("--rounds", type=int, default=15, help="the median is over these")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(layer(arguments.one[0], int(arguments.one[1]), arguments.rounds)))
        return
    rounds = 1 if arguments.quick else arguments.rounds
    of = {"window": LENGTHS, "full": FULL_LENGTHS}
    if arguments.quick:
        of = {"window": (64, 128), "full": (64,)}
    layers: dict[str, dict[str, dict[str, float]]] = {"window": {}, "full": {}}
    for kind, found in layers.items():
        for length in of[kind]:
            often = rounds * min(8, max(1, 4096 // length))  # short ones are soon disturbed
            words = [sys.executable, __file__, "--one", kind, str(length), "--rounds", str(often)]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            found[str(length)] = json.loads(done.stdout)
            print(kind, length, found[str(length)])
    decoding = decode((32, 64) if arguments.quick else CONTEXTS, rounds)
    write_results(
        "long_texts",
        "Long texts",
        sections(layers, decoding, rounds),
        {"rounds": rounds, "layers": layers, "decoding": decoding},
        directory=arguments.results,
        command=command_line(),
    )
    (arguments.results / "long_texts.svg").write_text(figure(layers), encoding="utf-8")


def layer(kind: str, length: int, rounds: int) -> dict[str, float]:
    """Seconds and bytes of one causal layer, forward and backward."""
    torch.manual_seed(0)
    attention = Attention(WIDTH, HEADS, window=WINDOW if kind == "window" else None)
    x = torch.randn(1, length, WIDTH, requires_grad=True)

    def run() -> None:
        attention(x, causal(length)).sum().backward()

    warm = Attention(WIDTH, HEADS, window=WINDOW)
    warm(x[:, :512].detach().requires_grad_(), causal(min(length, 512)))
    before = peak_bytes()
    run()
    taken = peak_bytes() - before
    return {"seconds": median_seconds(run, rounds), "bytes": taken}


def causal(length: int) -> Visibility:
    """No token sees those after it."""
    places = Span(torch.arange(length)[None])
    return Visibility(places, places, causal=True)


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def median_seconds(run: Any, rounds: int) -> float:
    """Of a function, one call before not counted."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.inference_mode()
def decode(contexts: tuple[int, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of one token after so many others, and of the reading that attention must do."""
    config = llama.Config(**DECODER, max_length=2 * max(contexts))
    net = llama.build(config).eval()
    found = {}
    for context in contexts:
        cache = net.start(1, capacity=context + 2)
        ids = torch.randint(8, config.vocab_size, (1, context + 1))
        net.decode(Tokens.of(ids[:, :context]), cache)
        last = Tokens(ids[:, -1:], torch.full((1, 1), context))

        def token(cache: Any = cache, last: Tokens = last, context: int = context) -> None:
            net.head(net.decode(last, cache))
            cache.rewind(context)

        shape = (1, config.num_heads, 1, config.d_model // config.num_heads)
        query = torch.randn(shape)
        stored = [store.transpose(1, 2).chunk(2, dim=1) for store in cache.stores]

        def read(stored: Any = stored, query: Tensor = query) -> None:
            for keys, values in stored:
                F.scaled_dot_product_attention(query, keys, values)

        found[str(context)] = {
            "token_seconds": median_seconds(token, 20 * rounds),
            "reading_seconds": median_seconds(read, 20 * rounds),
        }
        print("decoding", context, found[str(context)])
    return found


def sections(
    layers: dict[str, dict[str, dict[str, float]]],
    decoding: dict[str, dict[str, float]],
    rounds: int,
) -> list[str]:
    """The page."""
    rows = []
    for length, window in layers["window"].items():
        full = layers["full"].get(length)
        rows.append(
            [
                f"{int(length):,}",
                f"{1e3 * window['seconds']:.1f}",
                f"{1e6 * window['seconds'] / int(length):.2f}",
                f"{window['bytes'] / 2**20:.0f}",
                f"{1e3 * full['seconds']:.1f}" if full else "–",
                f"{full['bytes'] / 2**20:.0f}" if full else "–",
            ]
        )
    header = ["tokens", "window, ms", "µs a token", "MiB", "full, ms", "MiB"]
    contexts = list(decoding)
    first = decoding[contexts[0]]
    base = first["token_seconds"] - first["reading_seconds"]
    late = []
    for context, one in decoding.items():
        rest = one["token_seconds"] - one["reading_seconds"]
        late.append(
            [
                f"{int(context):,}",
                f"{1e3 * one['token_seconds']:.2f}",
                f"{1e3 * one['reading_seconds']:.2f}",
                f"{1e3 * rest:.2f}",
                f"{rest / base:.2f}",
            ]
        )
    return [
        f"One causal layer (width {WIDTH}, {HEADS} heads, fp32), forward and backward; window "
        f"{WINDOW} against all keys. Medians of {rounds} rounds, of more where the text is shorter "
        "than 4,096; memory is the peak of a process.",
        table(header, rows),
        "![Time and memory of a layer by length](long_texts.svg)",
        "One token after so many others, batch of 1 "
        f"({', '.join(f'{key} {value}' for key, value in DECODER.items())}). Reading is the fused "
        "attention of all layers over the same cache alone; the rest is what all else costs.",
        table(["context", "token, ms", "reading, ms", "rest, ms", "rest / first"], late),
    ]


def figure(layers: dict[str, dict[str, dict[str, float]]]) -> str:
    """Both measures by length on logarithmic axes, as a picture."""
    charts = [("seconds", "milliseconds", 1e3), ("bytes", "MiB", 1 / 2**20)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 380" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="900" height="380" fill="#ffffff"/>',
    ]
    for place, (key, unit, scale) in enumerate(charts):
        parts += chart(layers, key, unit, scale, left=70 + 440 * place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def chart(
    layers: dict[str, dict[str, dict[str, float]]], key: str, unit: str, scale: float, *, left: int
) -> list[str]:
    """One measure: a line a kind, labelled at its end."""
    lines = {
        kind: [(int(length), max(one[key] * scale, 0.01)) for length, one in found.items()]
        for kind, found in layers.items()
    }
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    low, high = (f(math.log10(y) for y in ys) for f in (min, max))
    low, high = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    span = math.log2(max(xs) / min(xs)) or 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + 300 * math.log2(x / min(xs)) / span
        return across, 320 - 270 * (math.log10(y) - low) / (high - low)

    drawn = [f'<text x="{left}" y="28" font-weight="600">{escape(unit)} by length</text>']
    for power in range(low, high + 1):
        _, y = at(min(xs), 10.0**power)
        drawn.append(f'<path d="M{left} {y:.1f}h300" stroke="#dddddd"/>')
        drawn.append(
            f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for x in sorted(set(xs)):
        across, _ = at(x, 10.0**low)
        label = f"{x // 1024}k" if x >= 1024 else str(x)
        drawn.append(f'<text x="{across:.1f}" y="342" text-anchor="middle">{label}</text>')
    for kind, color in (("full", "#c2410c"), ("window", "#1d4ed8")):
        points = [at(x, y) for x, y in lines[kind]]
        if not points:
            continue
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        drawn.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
        x, y = points[-1]
        drawn.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{color}">{kind}</text>')
    return drawn


if __name__ == "__main__":
    main()
