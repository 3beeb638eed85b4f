"""Short requests beside a long one: their latency in the server alone, and beside 8,000 tokens.

A Llama of random weights in a server with its default settings. A few clients send short requests,
each the next one after the answer to the last. In every second phase one more client asks for
8,000 new tokens again and again. Alternating phases share the slower times of a machine.
"""

import asyncio
import json
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import heedful
from common import argument_parser, command_line, table, write_results
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import llama
from serving import Case, Client, running

CLIENTS = 4
WORDS = (8, 64)
NEW_TOKENS = 32
LONG_TOKENS = 8_000
ROUND_MINUTES = 5  # of a phase without long requests and one with them
GOAL = 2.0  # times the p99 without the long request
SIZES = {"d_model": 256, "num_heads": 8, "num_kv_heads": 2, "d_ff": 704, "num_layers": 4}
VOCABULARY = 4_000


def write_model(folder: Path) -> int:
    """Save the model and a tokenizer of numbered words; returns its EOS id."""
    words = [f"w{number}" for number in range(VOCABULARY - 4)]
    tokenizer = heedful.train_tokenizer([" ".join(words)], kind="word")
    torch.manual_seed(1)
    config = llama.Config(vocab_size=tokenizer.vocab_size, max_length=LONG_TOKENS + 192, **SIZES)
    metadata = ModelMetadata(
        "llama", "benchmark", generation=GenerationIds(eos_ids=(tokenizer.eos_id,))
    )
    open_net(llama.build(config), config, metadata, tokenizer).save(folder)
    return tokenizer.eos_id


def request(rng: random.Random, eos_id: int, new_tokens: int) -> tuple[str, bytes]:
    """The route and body of a request that ends by its limit of tokens."""
    words = [f"w{rng.randrange(VOCABULARY - 4)}" for _ in range(rng.randint(*WORDS))]
    body = {"model": "llama", "prompt": " ".join(words), "temperature": 0}
    more = {"max_tokens": new_tokens, "logit_bias": {str(eos_id): -100}}
    return "/v1/completions", json.dumps(body | more).encode()


async def phase(port: int, eos_id: int, seconds: float, number: int, long_tokens: int) -> Any:
    """Milliseconds of each short request, and the answers to long ones; 0 tokens: none are sent."""
    end, latencies, num_long = time.perf_counter() + seconds, [], 0
    rng = random.Random(number)

    async def ask_short() -> None:
        client = Client(port)
        while time.perf_counter() < end:
            began = time.perf_counter()
            status, content = await client.ask(*request(rng, eos_id, NEW_TOKENS))
            assert status == 200, content
            latencies.append(1_000 * (time.perf_counter() - began))
        client.close()

    async def ask_long() -> None:
        nonlocal num_long
        client = Client(port)
        try:
            while True:
                status, content = await client.ask(*request(rng, eos_id, long_tokens))
                assert status == 200, content
                num_long += 1
        finally:
            client.close()

    long = asyncio.ensure_future(ask_long()) if long_tokens else None
    await asyncio.gather(*(ask_short() for _ in range(CLIENTS)))
    if long is not None:
        if long.done():
            long.result()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
    return latencies, num_long


async def measure(seconds: float, rounds: int, long_tokens: int) -> dict[str, Any]:
    """The latencies of all phases without and with long requests, of these seconds each."""
    latencies: dict[str, list[float]] = {"alone": [], "beside a long one": []}
    num_long = 0
    case = Case("llama", WORDS, SIZES, VOCABULARY, 0, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / case.name
        eos_id = write_model(folder)
        with running(case, folder, "eager", "--request-timeout", "3600") as (port, _):
            await phase(port, eos_id, min(2.0, seconds), 0, 0)  # to warm up
            for number in range(2 * rounds):
                is_beside = number % 2 == 1
                tokens = long_tokens if is_beside else 0
                values, count = await phase(port, eos_id, seconds, number, tokens)
                latencies["beside a long one" if is_beside else "alone"] += values
                num_long += count
    return {
        "short": {name: summary(values) for name, values in latencies.items()},
        "long answers": num_long,
    }


def summary(latencies: list[float]) -> dict[str, float]:
    """Count and percentiles."""
    ordered, count = sorted(latencies), len(latencies)
    percentiles = {
        f"p{share} ms": ordered[min(count - 1, math.ceil(share / 100 * count) - 1)]
        for share in (50, 99)
    }
    return {"requests": count, **percentiles, "longest ms": ordered[-1]}


def main() -> None:
    """Measure, and write the page."""
    parser = argument_parser(str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of all phases; at least 2")
    arguments = parser.parse_args()
    rounds = max(1, round(arguments.minutes / ROUND_MINUTES))
    seconds = 0.5 if arguments.quick else 60 * arguments.minutes / (2 * rounds)
    rounds = 1 if arguments.quick else rounds
    long_tokens = 2 * NEW_TOKENS if arguments.quick else LONG_TOKENS
    results = asyncio.run(measure(seconds, rounds, long_tokens))
    short = results["short"]
    names = ["requests", "p50 ms", "p99 ms", "longest ms"]
    rows = [[name, *(f"{short[name][key]:.0f}" for key in names)] for name in short]
    ratio = short["beside a long one"]["p99 ms"] / short["alone"]["p99 ms"]
    results["ratio of p99"] = ratio
    sizes = ", ".join(f"{name} {value}" for name, value in SIZES.items())
    sections = [
        f"Latency of requests for {NEW_TOKENS} new tokens from {CLIENTS} clients, each of which "
        "sends the next one when it has the answer, without other requests, and beside one client "
        f"that asks for {long_tokens:,} new tokens again and again. A Llama with random weights "
        f"({sizes}), the server's default settings.",
        table(["short requests", *names], rows),
        f"The p99 beside a long request is {ratio:.2f} times that without (goal: at most "
        f"{GOAL:g}). Long requests that were answered in the phases with them: "
        f"{results['long answers']}.",
    ]
    write_results(
        "beside_long",
        "Short requests beside a long one",
        sections,
        results,
        directory=arguments.results,
        command=command_line(),
        packages=("fastapi", "uvicorn", "pydantic"),
    )


if __name__ == "__main__":
    main()
