"""Decoding speed: heedful eager and optimised, transformers, and CTranslate2 driven by hand.

Same random weights (a Marian of each size, exported), same sources of a fixed length, exactly so
many new tokens. Every system runs in the threading and type that was fastest for it in a first
round, CTranslate2 in its default too; then all in turn. Greedy outputs in float32 are compared.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import matplotlib
import matplotlib.pyplot as plt
import torch
from transformers import MarianMTModel

import heedful
import heedful.files
from common import (
    argument_parser,
    command_line,
    interleaved,
    ratio,
    table,
    versions,
    whole,
    write_results,
)
from heedful.data.tokenizer import train_tokenizer
from heedful.engines.folder import cores
from heedful.engines.threads import run_with
from heedful.export.hf import export_hf
from heedful.inference import GenerationIds, ModelCard, open_net
from heedful.inference.forms import make_form
from heedful.inference.optimizing import ENGINES, optimize
from heedful.zoo import marian
from training_speed import QUICK, SIZES, Size

matplotlib.use("Agg")
SOURCE_TOKENS, NEW_TOKENS, START, END = 16, 20, 0, 2
NEVER = (0, 1, 3)
BATCHES = (1, 64)
BEAMS = (1, 4)
SYSTEMS = ("eager", "optimised", "transformers", "ctranslate2", "ctranslate2 default")
PACKAGE = {"eager": "heedful", "optimised": "heedful"} | {
    name: name.split()[0] for name in SYSTEMS[2:]
}


class Variant(NamedTuple):
    """One way to run a system: its settings, and what decodes the batch once."""

    precision: str
    threads: int | None
    workers: int
    run: Callable[[], list[list[int]]]


def main() -> None:
    """Measure every size, search and batch, and write the page, the picture and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", default=",".join(SIZES), help="by commas")
    parser.add_argument("--rounds", type=int, default=7, help="the median is over these")
    every = ",".join(ENGINES)
    parser.add_argument("--engines", default=every, help="that optimize tries, by commas")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else {name: SIZES[name] for name in arguments.sizes.split(",")}
    rounds = 1 if arguments.quick else arguments.rounds
    # What compiles takes minutes a size, once for all searches.
    engines = ENGINES[:2] if arguments.quick else arguments.engines.split(",")
    found = versions("transformers", "ctranslate2")
    records: list[dict[str, Any]] = []
    agreement: dict[str, float] = {}
    for name, size in sizes.items():
        with tempfile.TemporaryDirectory() as scratch:
            words = write_model(size, Path(scratch))
            for beam in BEAMS[:1] if arguments.quick else BEAMS:
                tune(Path(scratch) / "ours", beam, words, engines)
                for batch in BATCHES:
                    rows = sources(size, batch)
                    setting = {"size": name, "batch": batch, "beam": beam}
                    rates, chosen, same = measure(Path(scratch), rows, beam, rounds)
                    if beam == 1:
                        agreement[f"{name}, batch {batch}"] = same
                    for system, rate in rates.items():
                        made = chosen[system]
                        records.append(
                            {"system": system, "version": found[PACKAGE[system]], **setting}
                            | {"precision": made.precision, "threads": made.threads}
                            | {"workers": made.workers, "tokens/s": rate}
                        )
                        print(setting, system, made[:3], round(rate), flush=True)
    draw(records, arguments.results / "decoding.svg")
    write_results(
        "decoding",
        "Decoding speed",
        sections(records, agreement, rounds),
        {"rounds": rounds, "same_greedy_outputs": agreement, "records": records},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers", "ctranslate2"),
    )


def write_model(size: Size, folder: Path) -> list[str]:
    """Random weights as ours, for transformers, and for CTranslate2 by hand; the known words."""
    words = [f"w{number}" for number in range(size.vocab_size - 4)]
    tokenizer = train_tokenizer([" ".join(words)], kind="word")
    assert tokenizer.vocab_size == size.vocab_size
    torch.manual_seed(1)
    config = marian.Config(
        src_vocab_size=size.vocab_size,
        tgt_vocab_size=size.vocab_size,
        d_model=size.d_model,
        num_heads=size.num_heads,
        num_encoder_layers=size.num_layers,
        num_decoder_layers=size.num_layers,
        d_ff=size.d_ff,
        activation="relu",
        max_length=64,
    )
    ids = GenerationIds(start=(START,), end=(END,), never=NEVER)
    model = open_net(
        marian.build(config), config, ModelCard("marian", "b", generation=ids), tokenizer
    )
    model.save(folder / "ours")
    export_hf(model, folder / "theirs")
    for precision in ("float32", "int8"):
        make_form(model, folder / "by_hand", precision)
    return words


def tune(folder: Path, beam: int, words: list[str], engines: Sequence[str]) -> None:
    """`heedful optimize` for one search, on texts of the sources' length."""
    model = heedful.load(folder, device="cpu", engine="eager")
    model.card.options["beam_size"] = beam
    count = SOURCE_TOKENS - 1
    texts = [
        " ".join(words[(at + k) % len(words)] for k in range(count)) for at in range(0, 512, 2)
    ]
    optimize(model, folder, texts, engines=engines)


def sources(size: Size, batch: int) -> list[list[int]]:
    """Random ids, with the end that a source has."""
    torch.manual_seed(2)
    ids = torch.randint(4, size.vocab_size, (batch, SOURCE_TOKENS - 1)).tolist()
    return [[*row, END] for row in ids]


def measure(
    folder: Path, rows: list[list[int]], beam: int, rounds: int
) -> tuple[dict[str, float], dict[str, Variant], float]:
    """Rates in turn of the best variant of each system, these, and the share of equal outputs."""
    chosen, written = {}, {}
    for system, variants in systems(folder, rows, beam).items():
        cases = {number: partial(counted, each.run) for number, each in enumerate(variants)}
        first = interleaved({str(number): case for number, case in cases.items()}, rounds=1)
        chosen[system] = variants[int(max(first, key=lambda number: first[number]))]
        written[system] = variants[0].run()
    rates = interleaved({s: partial(counted, v.run) for s, v in chosen.items()}, rounds=rounds)
    pairs = [(written["eager"], written[each]) for each in ("transformers", "ctranslate2")]
    same = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    return rates, chosen, sum(same) / len(same)


def counted(run: Callable[[], list[list[int]]]) -> float:
    """Decode once: the tokens of the best outputs."""
    found = run()
    assert {len(ids) for ids in found} == {NEW_TOKENS}
    return len(found) * NEW_TOKENS


def systems(folder: Path, rows: list[list[int]], beam: int) -> dict[str, list[Variant]]:
    """Of each system every way to run it; the first is float32, whose outputs are compared."""
    counts = sorted({1, cores()})
    options: dict[str, Any] = {"beam_size": beam, "stop_rule": "beam_full"} if beam > 1 else {}
    options |= {"beam_size": beam, "min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS}

    def ours(model: Any) -> list[list[int]]:
        return list(model.generate(rows, **options))

    eager = []
    for count in (None, *counts):
        model = heedful.load(folder / "ours", device="cpu", engine="eager", threads=count)
        eager.append(Variant("float32", count, 1, partial(ours, model)))
    use: Any = "latency" if len(rows) == 1 else "throughput"
    model = heedful.load(folder / "ours", use=use)
    engine = model.engine or model.eager
    settings = engine.settings
    optimised = Variant(engine.precision, settings.threads, settings.workers, partial(ours, model))
    theirs = MarianMTModel.from_pretrained(folder / "theirs").eval()
    theirs.generation_config.max_length = None  # max_new_tokens says it
    run = partial(transformers_decode, theirs, torch.tensor(rows), beam)
    return {
        "eager": eager,
        "optimised": [optimised],
        "transformers": [Variant("float32", n, 1, partial(run, n)) for n in counts],
        "ctranslate2": by_hand(folder, rows, beam),
        "ctranslate2 default": [
            Variant("float32", None, 1, decode_by_hand(folder, "float32", rows, beam))
        ],
    }


@torch.inference_mode()
def transformers_decode(net: Any, src: torch.Tensor, beam: int, threads: int) -> list[list[int]]:
    """`generate` with its cache and the same search."""
    with run_with(threads):
        found = net.generate(
            input_ids=src,
            attention_mask=torch.ones_like(src),
            num_beams=beam,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            length_penalty=1.0,
            bad_words_ids=[[token] for token in NEVER],
            forced_eos_token_id=None,
        )
    return [row[1:] for row in found.tolist()]


def by_hand(folder: Path, rows: list[list[int]], beam: int) -> list[Variant]:
    """CTranslate2 with one worker or a worker a core, in float32 and int8."""
    layouts = {(1, 1), (1, cores())} | ({(cores(), 1)} if len(rows) > 1 else set())
    return [
        Variant(
            precision,
            threads,
            workers,
            decode_by_hand(
                folder, precision, rows, beam, inter_threads=workers, intra_threads=threads
            ),
        )
        for precision in ("float32", "int8")
        for workers, threads in sorted(layouts)
    ]


def decode_by_hand(
    folder: Path, precision: str, rows: list[list[int]], beam: int, **layout: int
) -> Callable[[], list[list[int]]]:
    """`translate_batch` of a directory, the batch divided among the workers."""
    place = folder / "by_hand" / "engines" / "ctranslate2" / precision
    opened = ctranslate2.Translator(str(place), compute_type=precision, **layout)
    vocabulary = place / "shared_vocabulary.json"
    tokens = heedful.files.read_json(vocabulary)
    number = {token: place for place, token in enumerate(tokens)}
    words = [[tokens[i] for i in row] for row in rows]

    def run() -> list[list[int]]:
        found = opened.translate_batch(
            words,
            max_batch_size=-(-len(rows) // layout.get("inter_threads", 1)),
            beam_size=beam,
            min_decoding_length=NEW_TOKENS,
            max_decoding_length=NEW_TOKENS,
            suppress_sequences=[[tokens[i]] for i in NEVER],
            return_end_token=True,
        )
        return [[number[token] for token in each.hypotheses[0]] for each in found]

    return run


def sections(records: list[dict[str, Any]], agreement: dict[str, float], rounds: int) -> list[str]:
    """The page: how, the rates, the ratios, the settings."""
    rates: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in records:
        rates.setdefault((each["size"], each["beam"], each["batch"]), {})[each["system"]] = each
    rows, ratios, settings = [], [], []
    others = [system for system in SYSTEMS if system != "optimised"]
    for (size, beam, batch), of in rates.items():
        name = f"{size}, {'greedy' if beam == 1 else f'beam {beam}'}, batch {batch}"
        rate = {system: of[system]["tokens/s"] for system in SYSTEMS}
        rows.append([name, *(whole(rate[system]) for system in SYSTEMS)])
        ratios.append(
            [name, *(ratio(rate["optimised"], rate[s]) for s in SYSTEMS if s != "optimised")]
        )
        told = (of[system] for system in SYSTEMS)
        settings.append(
            [name, *(f"{e['precision']} {e['workers']}×{e['threads'] or 'own'}" for e in told)]
        )
    how = (
        f"Generated tokens in a second, random weights: sources of {SOURCE_TOKENS} tokens, exactly "
        f"{NEW_TOKENS} new ones, encoding included. The tokens of the best output count, not those "
        "of every beam. Each system runs in its best threading and type, found in a first round; "
        f"then all run in one process in turn, and each figure is the median of {rounds} rounds."
    )
    same = ", ".join(f"{name}: {100 * share:.4g}%" for name, share in agreement.items())
    return [
        how,
        "![Rates of every system](decoding.svg)",
        "## Tokens per second",
        table(["", *SYSTEMS], rows),
        "## heedful optimised, as so many times the rate of",
        table(["", *others], ratios),
        "## Settings: precision, workers × threads",
        table(["", *SYSTEMS], settings),
        f"Greedy outputs in float32 that are those of heedful eager, to the token: {same}.",
    ]


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Bars on a logarithmic scale, a group for each size, search and batch."""
    names = list(dict.fromkeys((r["size"], r["beam"], r["batch"]) for r in records))
    figure, axes = plt.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / len(SYSTEMS)
    for number, system in enumerate(SYSTEMS):
        heights = [r["tokens/s"] for r in records if r["system"] == system]
        places = [place + number * width for place in range(len(names))]
        axes.bar(places, heights, width, label=system)
    axes.set_yscale("log")
    axes.set_ylabel("tokens a second")
    labels = [
        f"{size}\n{'greedy' if beam == 1 else f'beam {beam}'}\nB{batch}"
        for size, beam, batch in names
    ]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], labels, fontsize=8)
    axes.legend(fontsize=8, ncols=len(SYSTEMS), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
