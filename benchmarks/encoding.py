"""Encoding speed: heedful eager and optimised, transformers, and CTranslate2 driven by hand.

BERT's base shape with random weights, the same for all, and texts of any length from 8 to 128
tokens, of each of which the mean of its states is wanted. Every system runs in the threading and
with the batches that were fastest for it in a first round; then all in turn. Vectors are compared.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import numpy as np
import torch
from transformers import BertModel

import heedful
from common import (
    argument_parser,
    command_line,
    median_rates,
    ratio,
    table,
    versions,
    whole,
    write_results,
)
from heedful.data.tokenizer import train_tokenizer
from heedful.engines.engine import Settings
from heedful.engines.folder import cores
from heedful.engines.threads import run_with
from heedful.export.hf import export_hf
from heedful.files import read_json
from heedful.inference import ModelCard, open_net
from heedful.inference.forms import make_form
from heedful.inference.model import by_length
from heedful.inference.optimizing import ENGINES, optimize
from heedful.zoo import bert

SHORTEST, LONGEST, TEXTS, SIXTEEN = 8, 128, 64, 16
BUDGETS = (512, 1024)  # padded tokens of a batch
PRECISIONS = ("bfloat16", "int8")
QUICK = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "vocab_size": 60}
Rows = list[list[int]]
Vectors = np.ndarray


class Variant(NamedTuple):
    """One way to run a system: its settings, and what encodes all texts once."""

    precision: str
    threads: int | None
    workers: int
    batches: str
    run: Callable[[], Vectors]


def main() -> None:
    """Measure every system, and write the page and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="the median is over these")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        words = write_model(folder, QUICK if arguments.quick else {})
        rows = [
            [draw.randrange(4, 4 + len(words)) for _ in range(draw.randint(SHORTEST, LONGEST))]
            for _ in range(TEXTS)
        ]
        # Quick, nothing is compiled, which takes long.
        asked = (ENGINES[:2], PRECISIONS[1:]) if arguments.quick else (ENGINES, PRECISIONS)
        tune(folder / "ours", words, rows[::2], *asked)
        chosen = {name: fastest(name, ways) for name, ways in systems(folder, rows).items()}
        wanted = chosen["heedful eager, float32"].run()
        likeness = {name: least_cosine(each.run(), wanted) for name, each in chosen.items()}
        count = sum(map(len, rows))
        cases = {name: partial(counted, each.run, count) for name, each in chosen.items()}
        rates = median_rates(cases, rounds=rounds)
    found = versions("transformers", "ctranslate2")
    records = [
        {"system": name, "version": found[name.split()[0].strip(",").lower()]}
        | {key: value for key, value in chosen[name]._asdict().items() if key != "run"}
        | {"tokens/s": rate, "least_cosine": likeness[name]}
        for name, rate in rates.items()
    ]
    write_results(
        "encoding",
        "Encoding speed",
        sections(records, rounds),
        {"rounds": rounds, "texts": TEXTS, "tokens": count, "records": records},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers", "ctranslate2"),
    )


def write_model(folder: Path, keys: dict[str, Any]) -> list[str]:
    """Random weights as ours, for transformers, and for CTranslate2 by hand; the known words."""
    config = bert.Config(head="none", **keys)
    words = [f"w{number}" for number in range(config.vocab_size - 4)]
    tokenizer = train_tokenizer([" ".join(words)], kind="word")
    torch.manual_seed(1)
    model = open_net(bert.build(config).eval(), config, ModelCard("bert", "b"), tokenizer)
    model.save(folder / "ours")
    export_hf(model, folder / "theirs")
    make_form(model, folder / "by_hand", "int8")
    return words


def tune(
    folder: Path, words: list[str], rows: Rows, engines: Sequence[str], precisions: Sequence[str]
) -> None:
    """`heedful optimize` for many texts, on some of them."""
    model = heedful.load(folder, device="cpu", engine="eager")
    texts = [" ".join(words[token - 4] for token in row) for row in rows]
    asked = {"engines": engines, "precisions": precisions}
    optimize(model, folder, texts, uses=["throughput"], **asked)


def fastest(name: str, ways: list[Variant]) -> Variant:
    """The variant that took the least time once."""
    seconds = []
    for each in ways:
        began = time.perf_counter()
        each.run()
        seconds.append(time.perf_counter() - began)
        print(name, each[:4], f"{seconds[-1]:.2f} s", flush=True)
    return ways[int(np.argmin(seconds))]


def counted(run: Callable[[], Vectors], tokens: int) -> float:
    """Encode once: the tokens of the texts, without padding."""
    run()
    return tokens


def least_cosine(found: Vectors, wanted: Vectors) -> float:
    """Of the vectors of each text."""
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((found * wanted).sum(1) / norms).min())


def systems(folder: Path, rows: Rows) -> dict[str, list[Variant]]:
    """Of each system every way to run it."""
    counts = sorted({1, cores()})
    eager: dict[str, list[Variant]] = {}
    for precision in ("float32", "bfloat16"):
        model = heedful.load(folder / "ours", device="cpu", engine="eager", precision=precision)
        eager[precision] = []
        for count in counts[-1:] if precision == "float32" else counts:
            run = partial(ours, model, rows, count)
            eager[precision].append(Variant(precision, count, 1, "sorted, 1024 tokens", run))
    best = heedful.load(folder / "ours", use="throughput")
    runs = best.engine or best.eager
    settings, told = runs.settings, f"{runs.name}, sorted, {runs.settings.batch_tokens} tokens"
    optimised = Variant(runs.precision, settings.threads, 1, told, partial(best.vectors, rows))
    theirs = BertModel.from_pretrained(folder / "theirs", add_pooling_layer=False)
    theirs = theirs.to(torch.bfloat16).eval()
    by_order = {
        f"as they come, {SIXTEEN} texts": parts([*range(len(rows))]),
        f"sorted, {SIXTEEN} texts": parts(sorted(range(len(rows)), key=lambda r: -len(rows[r]))),
    } | {f"sorted, {budget} tokens": [*by_length(rows, budget)] for budget in BUDGETS}
    batched = {
        told: [
            Variant("bfloat16", n, 1, told, partial(transformers_encode, theirs, rows, batches, n))
            for n in counts
        ]
        for told, batches in by_order.items()
    }
    usual = next(iter(batched))
    return {
        "heedful optimised": [optimised],
        "heedful eager, float32": eager["float32"],
        "heedful eager, bfloat16": eager["bfloat16"],
        "transformers": [each for ways in batched.values() for each in ways],
        f"transformers, {usual}": batched[usual],
        "ctranslate2": by_hand(folder, rows),
    }


def parts(order: list[int]) -> list[list[int]]:
    """Batches of as many texts."""
    return [order[first : first + SIXTEEN] for first in range(0, len(order), SIXTEEN)]


def ours(model: Any, rows: Rows, threads: int) -> Vectors:
    """The net itself with so many threads."""
    model.settings = Settings(threads)
    found: Vectors = model.vectors(rows, batch_tokens=BUDGETS[-1])
    return found


@torch.inference_mode()
def transformers_encode(net: Any, rows: Rows, batches: list[list[int]], threads: int) -> Vectors:
    """Padded batches and their mask, by fused attention."""
    found = np.zeros((len(rows), net.config.hidden_size), np.float32)
    with run_with(threads):
        for chosen in batches:
            lengths = torch.tensor([len(rows[row]) for row in chosen])
            ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)
            for place, row in enumerate(chosen):
                ids[place, : len(rows[row])] = torch.tensor(rows[row])
            real = torch.arange(ids.size(1)) < lengths[:, None]
            states = net(input_ids=ids, attention_mask=real.long()).last_hidden_state.float()
            found[chosen] = ((states * real[..., None]).sum(1) / lengths[:, None]).numpy()
    return found


def by_hand(folder: Path, rows: Rows) -> list[Variant]:
    """CTranslate2 in int8, by one worker or a worker a core."""
    place = folder / "by_hand" / "engines" / "ctranslate2" / "int8"
    tokens = read_json(place / "vocabulary.json")
    words = [[tokens[token] for token in row] for row in rows]
    found = []
    for workers, threads in sorted({(1, 1), (1, cores()), (cores(), 1)}):
        layout = {"inter_threads": workers, "intra_threads": threads}
        opened = ctranslate2.Encoder(str(place), compute_type="int8", **layout)
        for budget in BUDGETS:
            batches = [*by_length(rows, budget)]
            run = partial(encode_by_hand, opened, words, batches, workers)
            found.append(Variant("int8", threads, workers, f"sorted, {budget} tokens", run))
    return found


def encode_by_hand(
    opened: Any, words: list[list[str]], batches: list[list[int]], workers: int
) -> Vectors:
    """`forward_batch` of each batch, from as many threads as there are workers."""

    def run(chosen: list[int]) -> list[Vectors]:
        states = np.array(opened.forward_batch([words[row] for row in chosen]).last_hidden_state)
        return [each[: len(words[row])].mean(0) for each, row in zip(states, chosen, strict=True)]

    with ThreadPoolExecutor(workers) as pool:
        vectors = [each for of_batch in pool.map(run, batches) for each in of_batch]
    order = [row for chosen in batches for row in chosen]
    return np.stack(vectors)[np.argsort(order)]


def sections(records: list[dict[str, Any]], rounds: int) -> list[str]:
    """The page: how, and the rates with their settings."""
    best = records[0]["tokens/s"]
    lines = [
        [
            each["system"],
            each["precision"],
            f"{each['workers']}×{each['threads']}",
            each["batches"],
            whole(each["tokens/s"]),
            ratio(best, each["tokens/s"]),
            f"{each['least_cosine']:.4f}",
        ]
        for each in records
    ]
    how = (
        f"Tokens read in a second, padding not counted, of {TEXTS} texts of any length from "
        f"{SHORTEST} to {LONGEST} tokens; random weights of BERT's base shape. Each system runs in "
        "its best threading and with its best batches, found in a first round; then all run in one "
        f"process in turn, and each figure is the median of {rounds} rounds. The cosine is the "
        "least one between a text's vector and that of heedful eager in float32."
    )
    header = ["", "precision", "workers × threads", "batches", "tokens/s"]
    return [how, table([*header, "optimised is so many times as fast", "least cosine"], lines)]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
