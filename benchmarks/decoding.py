"""Decoding speed: heedful eager and optimized, transformers, CTranslate2 by hand, and llama.cpp.

All have the same random weights (a Marian of each size, and a GPT-2 of 124 M), the same prompts and
a fixed number of new tokens. Threads, precision and batches of each system are selected by
`common.fastest` (for heedful by `heedful optimize`) on other prompts than those measured; then all
run in alternating rounds. Greedy outputs in float32 are compared, and rates are related to the
memory bandwidth and arithmetic throughput of the machine.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    argument_parser,
    command_line,
    interleaved,
    medians,
    ratio,
    table,
    versions,
    whole,
    write_results,
)
from decoding_process import LEAST, MEASURED, TUNED, SystemProcess, Workload
from decoding_systems import (
    SHAPES,
    SMALL,
    SYSTEMS,
    Rows,
    Setting,
    Shape,
    Variant,
    prompts,
    references,
    separate_systems,
    tune,
    write_model,
)
from heedful.extras import import_matplotlib
from limits import measured_limits

PACKAGES = ("transformers", "ctranslate2", "llama-cpp-python", "gguf")


def main() -> None:
    """Measure every size, search and batch, and write the page, the chart and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", default=",".join(SHAPES), help="model sizes, comma-separated")
    parser.add_argument("--rounds", type=int, default=5, help="the minimum number of rounds")
    parser.add_argument(
        "--seconds", type=float, default=20, help="minimum seconds of all rounds of a setting"
    )
    known = {"backends": "ctranslate2,compiled", "precisions": "int8"}
    for name, default in known.items():
        parser.add_argument(
            f"--{name}", default=default, help=f"{name} that optimize measures, comma-separated"
        )
    arguments = parser.parse_args()
    shapes = {name: SHAPES[name] for name in arguments.sizes.split(",")}
    timing = {"rounds": arguments.rounds, "least": LEAST, "lasting": arguments.seconds}
    tried = {name: vars(arguments)[name].split(",") for name in known}
    if arguments.quick:
        shapes, timing, tried = SMALL, {"rounds": 1}, tried | {"backends": ["ctranslate2"]}
    limits = measured_limits(quick=arguments.quick)
    print(limits, flush=True)
    records: list[dict[str, Any]] = []
    agreement: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            words = write_model(shape, folder)
            tuned = None
            for setting in shape.settings():
                began = time.perf_counter()
                largest = setting._replace(batch=max(shape.batches))
                if largest != tuned:
                    tuned = largest
                    tune(
                        folder / "heedful", shape, tuned, prompts(shape, tuned, TUNED), words, tried
                    )
                    seconds[f"{name}, {tuned.search}"] = time.perf_counter() - began
                if setting.beam == 1:
                    rows = prompts(shape, setting, MEASURED)
                    agreement[f"{name}, {setting}"] = greedy_agreement(folder, shape, rows)
                rates, variants = measure(folder, shape, setting, timing)
                records += make_records(name, shape, setting, rates, variants, limits)
                took = time.perf_counter() - began
                print(name, setting, {s: round(r) for s, r in medians(rates).items()}, flush=True)
                print({s: str(v) for s, v in variants.items()}, f"{took:.0f} s", flush=True)
    draw_chart(records, arguments.results / "decoding.svg")
    data = {"timing": timing, "limits": limits, "same_greedy_outputs": agreement}
    write_results(
        "decoding",
        "Decoding speed",
        sections(records, data, shapes, seconds),
        data | {"optimize_seconds": seconds, "records": records},
        directory=arguments.results,
        command=command_line(),
        packages=PACKAGES,
    )


def greedy_agreement(folder: Path, shape: Shape, rows: Rows) -> dict[str, float]:
    """For each peer the fraction of its greedy outputs in float32 that equal heedful eager's."""
    written = {name: on(rows)() for name, on in references(folder, shape, beam=1).items()}
    expected = written.pop("eager")
    return {
        name: sum(a == b for a, b in zip(expected, actual, strict=True)) / len(rows)
        for name, actual in written.items()
    }


def measure(
    folder: Path, shape: Shape, setting: Setting, timing: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, Variant]]:
    """Rates of the fastest variant of each system, in alternating rounds, and these variants.

    Args:
        timing: keyword arguments of `interleaved`.
    """
    workload = Workload(folder, shape, setting, quick=timing["rounds"] == 1)
    best: dict[str, Variant] = {}
    cases = {}
    processes = []
    for names in separate_systems(folder, shape, setting):
        process = SystemProcess(names, workload)
        processes.append(process)
        best |= process.best
        cases |= {name: partial(process.count_tokens, name) for name in names}
    rates = interleaved({name: cases[name] for name in SYSTEMS if name in cases}, **timing)
    for process in processes:
        process.close()
    return rates, best


def make_records(
    name: str,
    shape: Shape,
    setting: Setting,
    rates: dict[str, list[float]],
    variants: dict[str, Variant],
    limits: dict[str, float],
) -> list[dict[str, Any]]:
    """The records of all systems in a setting."""
    version = versions(*PACKAGES)
    return [
        {
            "system": system,
            "version": version[SYSTEMS[system]],
            "size": name,
            **setting._asdict(),
            "backend": variants[system].backend or SYSTEMS[system],
            "precision": variants[system].precision,
            "threads": variants[system].threads,
            "workers": variants[system].workers,
            "detail": variants[system].detail,
            "setting": str(variants[system]),
            "tokens/s": rate,
            "tokens/s by round": rates[system],
            **shares(shape, setting, variants[system], rate, limits),
        }
        for system, rate in medians(rates).items()
    ]


def shares(
    shape: Shape, setting: Setting, made: Variant, rate: float, limits: dict[str, float]
) -> dict[str, float]:
    """Memory reads of weights and multiplications, as fractions of the machine's limits."""
    products, weights = shape.work(setting.beam)
    bytes_of_a_weight = {"float32": 4, "bfloat16": 2}.get(made.precision, 1)
    read = weights * bytes_of_a_weight * min(made.workers, setting.batch) / setting.batch
    most = limits["int8 products/s" if bytes_of_a_weight == 1 else "float32 products/s"]
    return {
        "share of reading": rate * read / limits["bytes/s"],
        "share of products": rate * products / most,
    }


def sections(
    records: list[dict[str, Any]],
    data: dict[str, Any],
    shapes: dict[str, Shape],
    seconds: dict[str, float],
) -> list[str]:
    """The sections of the page: method, rates, ratios, settings, limits."""
    by_setting: dict[str, dict[str, Any]] = {}
    for record in records:
        setting = Setting(record["beam"], record["batch"], record["mixed"])
        by_setting.setdefault(f"{record['size']}, {setting}", {})[record["system"]] = record
    columns = [system for system in SYSTEMS if any(system in of for of in by_setting.values())]
    others = [system for system in columns if system != "optimized"]
    rows, ratios, settings, reached = [], [], [], []
    for name, of in by_setting.items():
        rates = {system: of.get(system, {}).get("tokens/s by round") for system in columns}
        rows.append([name, *(whole(of.get(record, {}).get("tokens/s")) for record in columns)])
        ratios.append([name, *(ratio(rates["optimized"], rates[record]) for record in others)])
        settings.append(
            [name, *(of[record]["setting"] if record in of else "–" for record in columns)]
        )
        both = (of["optimized"], of["ctranslate2"])
        kinds = ("share of reading", "share of products")
        reached.append([name, *(f"{100 * e[kind]:.0f}%" for e in both for kind in kinds)])
    compared = ("optimized", "ctranslate2")
    heads = [f"{system}: {kind}" for system in compared for kind in ("reading", "products")]
    limits = ", ".join(f"{value / 1e9:,.1f} G {name}" for name, value in data["limits"].items())
    took = ", ".join(f"{name}: {value:,.0f} s" for name, value in seconds.items())
    return [
        method_text(data["timing"], shapes),
        "![Rates of every system](decoding.svg)",
        "## Tokens per second",
        table(["", *columns], rows),
        "## Rate of heedful optimized, divided by that of",
        table(["", *others], ratios),
        "## Settings: precision, workers × threads",
        table(["", *columns], settings),
        "`by n`: batches of n prompts. llama.cpp: with or without flash attention, keys and values "
        "of the sequences in one buffer (unified) or in separate ones. "
        f"{agreement_sentence(data['same_greedy_outputs'])} Time of `heedful optimize`, "
        f"compilation included: {took}.",
        "## Fraction of the machine's memory bandwidth and arithmetic throughput",
        table(["", *heads], reached),
        f"Limits measured with all cores: {limits}. Reading: the weights of a step, once for each "
        "worker (weights in the processor's caches are read faster); products: those of the linear "
        "layers, without attention.",
    ]


def method_text(timing: dict[str, Any], shapes: dict[str, Shape]) -> str:
    """The paragraph on the method of measurement."""
    prompt_lengths = "; ".join(
        f"{name}: prompts of {shape.prompt} tokens, of {shape.shortest} to {shape.longest} for "
        f"mixed lengths, exactly {shape.new} new tokens"
        for name, shape in shapes.items()
    )
    return (
        "Generated tokens per second with random weights, processing of prompts included "
        f"({prompt_lengths}). Only tokens of the best output are counted, not those of all beams. "
        "Each system runs with the threads, precision and batches that were fastest for it on "
        "other prompts, in the same number of warm rounds as `heedful optimize` uses: eager and "
        "transformers in float32 and bfloat16, CTranslate2 in 8 bits with one worker or a worker "
        "per core and batches of several sizes, llama.cpp (decoder-only and greedy only) in "
        "Q8_0. Then all run in alternating order, each in its own process, for at least "
        f"{timing.get('least', 0):g} seconds per round, in at least {timing['rounds']} rounds and "
        f"{timing.get('lasting', 0):g} seconds. Rates are medians of the rounds, ratios "
        "medians of the ratios within a round. If optimize selected CTranslate2 with the settings "
        "that are fastest by hand, both are one process and use the same loaded model: the "
        "speed of two copies differs by some percent. All outputs end at the length limit, where "
        "beam searches of CTranslate2 are not those of the net, and heedful runs them on compiled "
        "graphs; those of a trained translator, which end before it, may run in CTranslate2."
    )


def agreement_sentence(agreement: dict[str, dict[str, float]]) -> str:
    """A sentence on the fraction of outputs in float32 that equal heedful eager's."""
    lowest: dict[str, float] = {}
    for of in agreement.values():
        for peer, share in of.items():
            lowest[peer] = min(share, lowest.get(peer, 1.0))
    shares = ", ".join(f"{peer} {100 * share:.4g}%" for peer, share in lowest.items())
    return (
        "Greedy outputs in float32 with the same tokens as heedful eager, lowest fraction of all "
        f"settings: {shares}."
    )


def draw_chart(records: list[dict[str, Any]], path: Path) -> None:
    """A bar chart on a logarithmic scale, with a group for each size, search and batch."""
    names = list(
        dict.fromkeys((r["size"], Setting(r["beam"], r["batch"], r["mixed"])) for r in records)
    )
    import_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(SYSTEMS)
    for number, system in enumerate(SYSTEMS):
        of = [r for r in records if r["system"] == system]
        places = [names.index((r["size"], Setting(r["beam"], r["batch"], r["mixed"]))) for r in of]
        left = [place + number * width for place in places]
        axes.bar(left, [r["tokens/s"] for r in of], width, label=system)
    axes.set_yscale("log")
    axes.set_ylabel("tokens a second")
    labels = [f"{size}\n{str(setting).replace(', ', chr(10))}" for size, setting in names]
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], labels, fontsize=7)
    axes.legend(fontsize=8, ncols=len(SYSTEMS), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
