"""Decoding speed: heedful eager and optimised, transformers, and CTranslate2 driven by hand.

Same random weights (a Marian of each size, and a GPT-2 of 124 M), the same prompts of a fixed
length, exactly so many new tokens. Every system runs in the threading and type that was fastest for
it in a first round, CTranslate2 in its default too; then all in turn. Greedy outputs in float32 are
compared, and the rates are held against what this machine reads and multiplies at most.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ctranslate2
import matplotlib
import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import heedful
import heedful.files
from common import (
    argument_parser,
    command_line,
    interleaved,
    paired_ratio,
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
from heedful.inference.optimizing import optimize
from heedful.zoo import gpt2, marian
from limits import measured_limits
from training_speed import QUICK, SIZES, Size

matplotlib.use("Agg")
START, END = 0, 2
SYSTEMS = ("eager", "optimised", "transformers", "ctranslate2", "ctranslate2 default")
PACKAGE = {"eager": "heedful", "optimised": "heedful"} | {
    name: name.split()[0] for name in SYSTEMS[2:]
}
Decode = Callable[[], list[list[int]]]


class Shape(NamedTuple):
    """A model and what it is given: tokens of each prompt, with the end that a source has; exactly
    so many new ones; beams and batches that are measured."""

    size: Size
    prompt: int = 16
    new: int = 20
    beams: tuple[int, ...] = (1, 4)
    batches: tuple[int, ...] = (1, 64)
    is_translator: bool = True

    @property
    def never(self) -> tuple[int, ...]:
        """What may not be written."""
        return (0, 1, 3) if self.is_translator else ()

    def work(self, beam: int) -> tuple[float, float]:
        """Multiplications for a token of the best output, and weights that a step reads."""
        size, layers = self.size, self.size.num_layers
        square, feedforward = size.d_model**2, 2 * size.d_model * size.d_ff
        block = (6 if self.is_translator else 4) * square + feedforward
        step = layers * block + size.d_model * size.vocab_size
        source = layers * ((6 if self.is_translator else 4) * square + feedforward)
        return beam * step + source * self.prompt / self.new, step


SHAPES = {name: Shape(size) for name, size in SIZES.items()} | {
    "gpt2": Shape(Size(768, 12, 12, 3072, 16, 32, 50_257), 32, 64, (1,), (1, 16), False)
}
# Seconds of a system in a round, and of all rounds. Short turns: what slows the machine for a while
# then slows two that are compared alike.
LEAST, LASTING = 0.1, 40.0
SMALL = {
    "quick": Shape(QUICK["quick"], beams=(1,)),
    "quick gpt2": Shape(QUICK["quick"], 8, 6, (1,), (1,), False),
}


class Variant(NamedTuple):
    """One way to run a system: its settings, and what decodes the batch once."""

    precision: str
    threads: int | None
    workers: int
    run: Decode
    engine: str = ""


def main() -> None:
    """Measure every size, search and batch, and write the page, the picture and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", default=",".join(SHAPES), help="by commas")
    parser.add_argument("--rounds", type=int, default=7, help="at least so many")
    known = {"engines": "ctranslate2,compiled", "precisions": "int8"}
    for name, default in known.items():
        parser.add_argument(f"--{name}", default=default, help="that optimize tries, by commas")
    arguments = parser.parse_args()
    shapes = {name: SHAPES[name] for name in arguments.sizes.split(",")}
    timing = {"rounds": arguments.rounds, "least": LEAST, "lasting": LASTING}
    asked = {name: vars(arguments)[name].split(",") for name in known}
    if arguments.quick:
        shapes, timing, asked = SMALL, {"rounds": 1}, asked | {"engines": ["ctranslate2"]}
    found = versions("transformers", "ctranslate2")
    limits = measured_limits(quick=arguments.quick)
    print(limits, flush=True)
    records: list[dict[str, Any]] = []
    agreement: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as scratch:
            words = write_model(shape, Path(scratch))
            for beam in shape.beams:
                began = time.perf_counter()
                tune(Path(scratch) / "ours", shape, beam, words, asked)
                seconds[f"{name}, {search(beam)}"] = time.perf_counter() - began
                for batch in shape.batches:
                    rows = prompts(shape, batch)
                    setting = {"size": name, "batch": batch, "beam": beam}
                    rates, chosen, same = measure(Path(scratch), shape, rows, beam, timing)
                    if beam == 1:
                        agreement[f"{name}, batch {batch}"] = same
                    for system, each in rates.items():
                        made, rate = chosen[system], median(each)
                        records.append(
                            {"system": system, "version": found[PACKAGE[system]], **setting}
                            | {"engine": made.engine or PACKAGE[system]}
                            | {"precision": made.precision, "threads": made.threads}
                            | {"workers": made.workers, "tokens/s": rate}
                            | {"tokens/s by round": each}
                            | shares(shape, beam, batch, made, rate, limits)
                        )
                        print(setting, system, made[:3], made.engine, round(rate), flush=True)
    draw(records, arguments.results / "decoding.svg")
    data = {"timing": timing, "limits": limits, "same_greedy_outputs": agreement}
    write_results(
        "decoding",
        "Decoding speed",
        sections(records, data, shapes, seconds),
        data | {"optimize_seconds": seconds, "records": records},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers", "ctranslate2"),
    )


def write_model(shape: Shape, folder: Path) -> list[str]:
    """Random weights as ours, for transformers, and for CTranslate2 by hand; the known words."""
    size = shape.size
    words = [f"w{number}" for number in range(size.vocab_size - 4)]
    tokenizer = train_tokenizer([" ".join(words)], kind="word")
    assert tokenizer.vocab_size == size.vocab_size
    torch.manual_seed(1)
    sizes = {"d_model": size.d_model, "num_heads": size.num_heads, "d_ff": size.d_ff}
    config: Any
    if shape.is_translator:
        config = marian.Config(
            src_vocab_size=size.vocab_size,
            tgt_vocab_size=size.vocab_size,
            num_encoder_layers=size.num_layers,
            num_decoder_layers=size.num_layers,
            activation="relu",
            max_length=64,
            **sizes,
        )
        ids = GenerationIds(start=(START,), end=(END,), never=shape.never)
        name, net = "marian", marian.build(config)
    else:
        config = gpt2.Config(vocab_size=size.vocab_size, num_layers=size.num_layers, **sizes)
        ids = GenerationIds(end=(END,))
        name, net = "gpt2", gpt2.build(config)
    model = open_net(net, config, ModelCard(name, "b", generation=ids), tokenizer)
    model.save(folder / "ours")
    export_hf(model, folder / "theirs")
    for precision in ("float32", "int8"):
        make_form(model, folder / "by_hand", precision)
    return words


def tune(
    folder: Path, shape: Shape, beam: int, words: list[str], asked: dict[str, list[str]]
) -> None:
    """`heedful optimize` for one search, on texts of the prompts' length."""
    model = heedful.load(folder, device="cpu", engine="eager")
    model.card.options.update(beam_size=beam, max_new_tokens=shape.new)
    count = shape.prompt - shape.is_translator
    texts = [
        " ".join(words[(at + k) % len(words)] for k in range(count))
        for at in range(max(shape.batches))
    ]
    optimize(model, folder, texts, **asked)


def prompts(shape: Shape, batch: int) -> list[list[int]]:
    """Random ids; of sources with the end."""
    torch.manual_seed(2)
    end = [END] if shape.is_translator else []
    ids = torch.randint(4, shape.size.vocab_size, (batch, shape.prompt - len(end))).tolist()
    return [[*row, *end] for row in ids]


def measure(
    folder: Path, shape: Shape, rows: list[list[int]], beam: int, timing: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, Variant], float]:
    """Rates in turn of the best variant of each system, these, and the share of equal outputs.

    `timing` is what `interleaved` takes.
    """
    chosen, written, cases = {}, {}, {}
    for system, variants in systems(folder, shape, rows, beam).items():
        written[system] = variants[0].run()
        found = [seconds_of(each.run) for each in variants] if len(variants) > 1 else [0.0]
        chosen[system] = variants[found.index(min(found))]
        cases[system] = partial(counted, chosen[system].run, shape.new)
    rates = interleaved(cases, **timing)
    pairs = [(written["eager"], written[each]) for each in ("transformers", "ctranslate2")]
    same = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    return rates, chosen, sum(same) / len(same)


def seconds_of(run: Decode) -> float:
    """Of the fastest of five calls, or of as many as a second has room for."""
    found: list[float] = []
    while len(found) < 5 and sum(found) < 1:
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def counted(run: Decode, new: int) -> float:
    """Decode once: the tokens of the best outputs."""
    found = run()
    assert {len(ids) for ids in found} == {new}
    return len(found) * new


def shares(
    shape: Shape, beam: int, batch: int, made: Variant, rate: float, limits: dict[str, float]
) -> dict[str, float]:
    """Of the machine's limits: bytes of weights that are read, and multiplications."""
    products, weights = shape.work(beam)
    is_int8 = made.precision.startswith("int8")
    read = weights * (1 if is_int8 else 4) * min(made.workers, batch) / batch
    most = limits["int8 products/s" if is_int8 else "float32 products/s"]
    return {
        "share of reading": rate * read / limits["bytes/s"],
        "share of products": rate * products / most,
    }


def systems(
    folder: Path, shape: Shape, rows: list[list[int]], beam: int
) -> dict[str, list[Variant]]:
    """Of each system every way to run it; the first is float32, whose outputs are compared."""
    counts = sorted({1, cores()})
    options: dict[str, Any] = {"beam_size": beam, "stop_rule": "beam_full"} if beam > 1 else {}
    options |= {"beam_size": beam, "min_new_tokens": shape.new, "max_new_tokens": shape.new}

    def ours(model: Any) -> list[list[int]]:
        return list(model.generate(rows, **options))

    eager = []
    for count in counts:
        model = heedful.load(folder / "ours", device="cpu", engine="eager", threads=count)
        eager.append(Variant("float32", count, 1, partial(ours, model)))
    use: Any = "latency" if len(rows) == 1 else "throughput"
    model = heedful.load(folder / "ours", use=use)
    engine = model.engine or model.eager
    settings = engine.settings
    found = (engine.precision, settings.threads, settings.workers, partial(ours, model))
    kind: Any = AutoModelForSeq2SeqLM if shape.is_translator else AutoModelForCausalLM
    theirs = kind.from_pretrained(folder / "theirs").eval()
    theirs.generation_config.max_length = None  # max_new_tokens says it
    run = partial(transformers_decode, theirs, shape, torch.tensor(rows), beam)
    default = decode_by_hand(folder, shape, "float32", rows, beam)
    return {
        "eager": eager,
        "transformers": [Variant("float32", n, 1, partial(run, n)) for n in counts],
        "optimised": [Variant(*found, engine.name)],
        "ctranslate2": by_hand(folder, shape, rows, beam, engine),
        "ctranslate2 default": [Variant("float32", None, 1, default)],
    }


@torch.inference_mode()
def transformers_decode(
    net: Any, shape: Shape, ids: torch.Tensor, beam: int, threads: int
) -> list[list[int]]:
    """`generate` with its cache and the same search."""
    with run_with(threads):
        found = net.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            num_beams=beam,
            do_sample=False,
            max_new_tokens=shape.new,
            min_new_tokens=shape.new,
            length_penalty=1.0,
            bad_words_ids=[[token] for token in shape.never] or None,
            forced_eos_token_id=None,
        )
    return [row[-shape.new :] for row in found.tolist()]


def by_hand(
    folder: Path, shape: Shape, rows: list[list[int]], beam: int, engine: Any
) -> list[Variant]:
    """CTranslate2 with one worker or a worker a core, in int8; in float32 as is likely best.

    What our engine has opened in a setting is what is called: two that read the same files differ
    by some percent, by where their weights come to lie.
    """
    chosen = engine.precision, (engine.settings.workers, engine.settings.threads)
    ours = {chosen: engine._model} if engine.name == "ctranslate2" else {}
    layouts = {(1, 1), (1, cores())} | ({(cores(), 1)} if len(rows) > 1 else set())
    likely = (cores(), 1) if len(rows) > 1 else (1, 1)
    ways = [("float32", likely), *(("int8", layout) for layout in sorted(layouts))]
    return [
        Variant(
            precision,
            threads,
            workers,
            decode_by_hand(
                folder,
                shape,
                precision,
                rows,
                beam,
                ours.get((precision, (workers, threads))),
                inter_threads=workers,
                intra_threads=threads,
            ),
        )
        for precision, (workers, threads) in ways
    ]


def decode_by_hand(
    folder: Path,
    shape: Shape,
    precision: str,
    rows: list[list[int]],
    beam: int,
    opened: Any = None,
    **layout: int,
) -> Decode:
    """One call with a directory, the batch divided among the workers."""
    place = folder / "by_hand" / "engines" / "ctranslate2" / precision
    kind = ctranslate2.Translator if shape.is_translator else ctranslate2.Generator
    opened = opened or kind(str(place), compute_type=precision, **layout)
    name = "shared_vocabulary" if shape.is_translator else "vocabulary"
    tokens = heedful.files.read_json(place / f"{name}.json")
    number = {token: place for place, token in enumerate(tokens)}
    words = [[tokens[i] for i in row] for row in rows]
    options: dict[str, Any] = {
        "max_batch_size": -(-len(rows) // layout.get("inter_threads", 1)),
        "beam_size": beam,
        "return_end_token": True,
    }

    def translate() -> list[list[int]]:
        found = opened.translate_batch(
            words,
            min_decoding_length=shape.new,
            max_decoding_length=shape.new,
            suppress_sequences=[[tokens[i]] for i in shape.never],
            **options,
        )
        return [[number[token] for token in each.hypotheses[0]] for each in found]

    def go_on() -> list[list[int]]:
        found = opened.generate_batch(
            words,
            min_length=shape.new,
            max_length=shape.new,
            include_prompt_in_result=False,
            **options,
        )
        return [each.sequences_ids[0] for each in found]

    return translate if shape.is_translator else go_on


def search(beam: int) -> str:
    """What a search is called."""
    return "greedy" if beam == 1 else f"beam {beam}"


def sections(
    records: list[dict[str, Any]],
    data: dict[str, Any],
    shapes: dict[str, Shape],
    seconds: dict[str, float],
) -> list[str]:
    """The page: how, the rates, the ratios, the settings, the limits."""
    rates: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in records:
        rates.setdefault((each["size"], each["beam"], each["batch"]), {})[each["system"]] = each
    rows, ratios, settings, reached = [], [], [], []
    others = [system for system in SYSTEMS if system != "optimised"]
    for (size, beam, batch), of in rates.items():
        name = f"{size}, {search(beam)}, batch {batch}"
        rate = {system: of[system]["tokens/s"] for system in SYSTEMS}
        rows.append([name, *(whole(rate[system]) for system in SYSTEMS)])
        each_round = {system: of[system]["tokens/s by round"] for system in SYSTEMS}
        ours = each_round["optimised"]
        ratios.append([name, *(paired_ratio(ours, each_round[each]) for each in others)])
        told = [of[system] for system in SYSTEMS]
        cells = [f"{e['precision']} {e['workers']}×{e['threads'] or 'own'}" for e in told]
        cells[1] = f"{of['optimised']['engine']} {cells[1]}"
        settings.append([name, *cells])
        both = (of["optimised"], of["ctranslate2"])
        kinds = ("share of reading", "share of products")
        reached.append([name, *(f"{100 * e[kind]:.0f}%" for e in both for kind in kinds)])
    given = "; ".join(
        f"{name}: prompts of {shape.prompt} tokens, exactly {shape.new} new ones"
        for name, shape in shapes.items()
    )
    how = (
        f"Generated tokens in a second, random weights, the reading of prompts included ({given}). "
        "The tokens of the best output count, not those of every beam. Each system runs in its "
        "best threading and type, found in a first round; then all run in one process in turn, "
        f"there and back, {LEAST} seconds a system in each round at least, in "
        f"{data['timing']['rounds']} rounds or more, until {LASTING:g} seconds are over. Rates are "
        "medians of the rounds, ratios medians of the ratios within a round. "
        "Where optimize chose CTranslate2 in the setting that is best by hand, both call the same "
        "opened model: two of the same files differ by some percent."
    )
    agreement = data["same_greedy_outputs"].items()
    same = ", ".join(f"{name}: {100 * share:.4g}%" for name, share in agreement)
    took = ", ".join(f"{name}: {value:,.0f} s" for name, value in seconds.items())
    heads = [f"{s}: {kind}" for s in SYSTEMS[1:4:2] for kind in ("reading", "products")]
    limits = ", ".join(f"{value / 1e9:,.1f} G {name}" for name, value in data["limits"].items())
    return [
        how,
        "![Rates of every system](decoding.svg)",
        "## Tokens per second",
        table(["", *SYSTEMS], rows),
        "## heedful optimised, as so many times the rate of",
        table(["", *others], ratios),
        "## Settings: precision, workers × threads",
        table(["", *SYSTEMS], settings),
        f"Greedy outputs in float32 that are those of heedful eager, to the token: {same}. "
        f"`heedful optimize` took, with what it compiled: {took}.",
        "## Share of what this machine reads and multiplies at most",
        table(["", *heads], reached),
        f"Measured with all cores: {limits}. Reading counts the weights of a step, once for each "
        "worker (those that stay in the processor's caches are read faster than that); products "
        "those of the linear layers. Attention is left out.",
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
    labels = [f"{size}\n{search(beam)}\nB{batch}" for size, beam, batch in names]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], labels, fontsize=8)
    axes.legend(fontsize=8, ncols=len(SYSTEMS), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
