"""Encoding speed: heedful eager and optimized, transformers, ONNX Runtime, OpenVINO, CTranslate2.

All have the same random weights in the size of BERT base, and compute the mean state of texts of 8
to 128 tokens. Threads and batches of each system are selected by `common.fastest` (for heedful by
`heedful optimize`) on other texts than those measured; then all run in alternating rounds. Vectors
are compared.
"""

import os
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heedful
from common import (
    argument_parser,
    command_line,
    fastest,
    interleaved,
    medians,
    ratio,
    table,
    versions,
    whole,
    write_results,
)
from encoding_systems import Encode, Rows, Variant, Vectors, systems, write_forms
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.optimize import BACKENDS, optimize
from heedful.hardware import cores
from heedful.pipelines import ModelMetadata, open_net
from heedful.zoo import bert

SHORTEST, LONGEST, TEXTS = 8, 128, 64
PRECISIONS = ("bfloat16", "int8")
PACKAGES = ("transformers", "ctranslate2", "onnxruntime", "openvino", "nncf")
REFERENCE = "heedful eager, float32"
QUICK = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "vocab_size": 60}


def main() -> None:
    """Measure every system, and write the page and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds, of which the median is taken"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    rounds = 1 if quick else arguments.rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_model(folder, QUICK if quick else {})
        measured, tuning_texts = texts(len(words), seed=1), texts(len(words), seed=2)[::2]
        # A quick run compiles nothing.
        tried = (BACKENDS[:2], PRECISIONS[1:]) if quick else (BACKENDS, PRECISIONS)
        tune(folder / "heedful", words, tuning_texts, *tried)
        counts = (1,) if quick else sorted({1, cores()})
        best: dict[str, Variant] = {}
        for name, variants in systems(folder, counts, compiles=not quick).items():
            best[name] = choose(variants, tuning_texts, quick=quick)
            print(name, best[name], flush=True)
        runs = {name: variant.on(measured) for name, variant in best.items()}
        expected = runs[REFERENCE]()
        likeness = {name: least_cosine(run(), expected) for name, run in runs.items()}
        count = sum(map(len, measured))
        rates = interleaved(
            {name: partial(count_tokens, run, count) for name, run in runs.items()}, rounds=rounds
        )
    package_versions = versions(*PACKAGES)
    records = [
        {"system": name, "version": package_versions[name.split()[0].strip(",")]}
        | {key: value for key, value in best[name]._asdict().items() if key != "on"}
        | {"tokens/s": rate, "tokens/s by round": rates[name], "least_cosine": likeness[name]}
        for name, rate in medians(rates).items()
    ]
    write_results(
        "encoding",
        "Encoding speed",
        sections(records, rounds),
        {"rounds": rounds, "texts": TEXTS, "tokens": count, "records": records},
        directory=arguments.results,
        command=command_line(),
        packages=PACKAGES,
    )


def write_model(folder: Path, keys: dict[str, Any]) -> list[str]:
    """Write a random model for all systems; returns the words of the vocabulary."""
    config = bert.Config(head="none", **keys)
    words = [f"w{number}" for number in range(config.vocab_size - 4)]
    tokenizer = train_tokenizer([" ".join(words)], kind="word")
    torch.manual_seed(1)
    model = open_net(bert.build(config).eval(), config, ModelMetadata("bert", "b"), tokenizer)
    model.save(folder / "heedful")
    write_forms(model, folder)
    return words


def texts(num_words: int, seed: int) -> Rows:
    """Texts of random ids and random lengths."""
    rng = random.Random(seed)
    return [
        [rng.randrange(4, 4 + num_words) for _ in range(rng.randint(SHORTEST, LONGEST))]
        for _ in range(TEXTS)
    ]


def tune(
    folder: Path, words: list[str], rows: Rows, backends: Sequence[str], precisions: Sequence[str]
) -> None:
    """Run `heedful optimize` for throughput."""
    model = heedful.load(folder, device="cpu", backend="eager")
    lines = [" ".join(words[token - 4] for token in row) for row in rows]
    tried = {"backends": backends, "precisions": precisions}
    optimize(model, folder, lines, uses=["throughput"], **tried)


def choose(variants: list[Variant], rows: Rows, *, quick: bool) -> Variant:
    """The fastest variant on some texts."""
    count = sum(map(len, rows))
    cases = [partial(count_tokens, variant.on(rows), count) for variant in variants]
    return variants[fastest(cases, rounds=1 if quick else None, least=0.0 if quick else 0.1)]


def count_tokens(run: Encode, tokens: int) -> float:
    """Encode once; returns the number of tokens without padding."""
    run()
    return tokens


def least_cosine(actual: Vectors, expected: Vectors) -> float:
    """The lowest cosine similarity between a text's vector and the expected one."""
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((actual * expected).sum(1) / norms).min())


def sections(records: list[dict[str, Any]], rounds: int) -> list[str]:
    """The sections of the page: method, and rates with settings."""
    best = records[0]["tokens/s by round"]
    lines = [
        [
            record["system"],
            record["precision"],
            f"{record['workers']}×{record['threads']}",
            record["batches"],
            whole(record["tokens/s"]),
            ratio(best, record["tokens/s by round"]),
            f"{record['least_cosine']:.4f}",
        ]
        for record in records
    ]
    how = (
        f"Tokens per second, without padding, of {TEXTS} texts of {SHORTEST} to {LONGEST} tokens; "
        "random weights in the size of BERT base. Each system runs with the threads, workers and "
        "batches that were fastest for it on other texts, in the same number of warm rounds as "
        "`heedful optimize` uses; then all run in one process in alternating rounds. "
        f"Rates are medians of {rounds} rounds, ratios medians of the ratios within a round. ONNX "
        "Runtime runs the graph with its fused operators, in int8 with dynamic quantization of "
        "activations; OpenVINO multiplies in bfloat16, with weights in bfloat16 or in 8 bits. The "
        "cosine is the lowest one between a text's vector and that of heedful eager in float32."
    )
    header = ["", "precision", "workers × threads", "batches", "tokens/s"]
    return [how, table([*header, "optimized rate / this rate", "lowest cosine"], lines)]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
