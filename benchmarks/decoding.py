"""Decoding speed: heedful eager and optimised, transformers, CTranslate2 by hand, and llama.cpp.

Same random weights (a Marian of each size, and a GPT-2 of 124 M), the same prompts, exactly so many
new tokens. Each system's threading, precision and batches are chosen by `common.fastest` on other
prompts than those measured (ours: by `heedful optimize`, on the same others); then all run in turn.
Greedy outputs in float32 are compared, and the rates are held against what this machine reads and
multiplies at most.
"""

import gc
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

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
from decoding_systems import (
    SHAPES,
    SMALL,
    SYSTEMS,
    Decode,
    Rows,
    Setting,
    Shape,
    Variant,
    prompts,
    references,
    systems,
    tune,
    write_model,
)
from heedful.backends.hardware import cores
from limits import measured_limits

matplotlib.use("Agg")
# Seconds of a system in a round, and of all rounds. Short turns: what slows the machine for a while
# then slows two that are compared alike.
LEAST = 0.1
MEASURED, TUNED = 2, 3  # seeds of prompts
PACKAGES = ("transformers", "ctranslate2", "llama-cpp-python", "gguf")


def main() -> None:
    """Measure every size, search and batch, and write the page, the picture and the records."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", default=",".join(SHAPES), help="by commas")
    parser.add_argument("--rounds", type=int, default=5, help="the minimum number of rounds")
    parser.add_argument("--seconds", type=float, default=20, help="of all rounds of a setting")
    known = {"backends": "ctranslate2,compiled", "precisions": "int8"}
    for name, default in known.items():
        parser.add_argument(f"--{name}", default=default, help="that optimize tries, by commas")
    arguments = parser.parse_args()
    shapes = {name: SHAPES[name] for name in arguments.sizes.split(",")}
    timing = {"rounds": arguments.rounds, "least": LEAST, "lasting": arguments.seconds}
    asked = {name: vars(arguments)[name].split(",") for name in known}
    if arguments.quick:
        shapes, timing, asked = SMALL, {"rounds": 1}, asked | {"backends": ["ctranslate2"]}
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
                    tune(folder / "ours", shape, tuned, prompts(shape, tuned, TUNED), words, asked)
                    seconds[f"{name}, {tuned.search}"] = time.perf_counter() - began
                rows = prompts(shape, setting, MEASURED)
                if setting.beam == 1:
                    agreement[f"{name}, {setting}"] = agreements(folder, shape, rows)
                rates, chosen = measure(folder, shape, setting, rows, timing)
                records += recorded(name, shape, setting, rates, chosen, limits)
                took = time.perf_counter() - began
                print(name, setting, {s: round(r) for s, r in medians(rates).items()}, flush=True)
                print({s: str(v) for s, v in chosen.items()}, f"{took:.0f} s", flush=True)
    draw(records, arguments.results / "decoding.svg")
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


def agreements(folder: Path, shape: Shape, rows: Rows) -> dict[str, float]:
    """For each peer the share of its greedy outputs in float32 that are those of heedful eager."""
    written = {name: on(rows)() for name, on in references(folder, shape, beam=1).items()}
    wanted = written.pop("eager")
    return {
        name: sum(a == b for a, b in zip(wanted, found, strict=True)) / len(rows)
        for name, found in written.items()
    }


def measure(
    folder: Path, shape: Shape, setting: Setting, rows: Rows, timing: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, Variant]]:
    """Rates in turn of the best variant of each system, and these variants.

    `timing` is what `interleaved` takes.
    """
    is_quick = timing["rounds"] == 1
    others = prompts(shape, setting, TUNED)
    chosen, cases = {}, {}
    counts = (1,) if is_quick else sorted({1, cores()})
    for system, variants in systems(folder, shape, setting, counts).items():
        tried = [partial(counted, each.on(others), shape.new) for each in variants]
        index = fastest(tried, rounds=1 if is_quick else None, least=0 if is_quick else LEAST)
        chosen[system] = variants[index]
        del tried, variants
        gc.collect()  # contexts and nets that were not chosen
        cases[system] = partial(counted, chosen[system].on(rows), shape.new)
    return interleaved(cases, **timing), chosen


def counted(run: Decode, new: int) -> float:
    """Decode once: the tokens of the best outputs."""
    found = run()
    assert {len(ids) for ids in found} == {new}
    return len(found) * new


def recorded(
    name: str,
    shape: Shape,
    setting: Setting,
    rates: dict[str, list[float]],
    chosen: dict[str, Variant],
    limits: dict[str, float],
) -> list[dict[str, Any]]:
    """A record of each system in one setting."""
    version = versions(*PACKAGES)
    return [
        {
            "system": system,
            "version": version[SYSTEMS[system]],
            "size": name,
            **setting._asdict(),
            "backend": chosen[system].backend or SYSTEMS[system],
            "precision": chosen[system].precision,
            "threads": chosen[system].threads,
            "workers": chosen[system].workers,
            "detail": chosen[system].detail,
            "setting": str(chosen[system]),
            "tokens/s": rate,
            "tokens/s by round": rates[system],
            **shares(shape, setting, chosen[system], rate, limits),
        }
        for system, rate in medians(rates).items()
    ]


def shares(
    shape: Shape, setting: Setting, made: Variant, rate: float, limits: dict[str, float]
) -> dict[str, float]:
    """Shares of the machine's limits: bytes of weights read, and multiplications."""
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
    """The page: how, the rates, the ratios, the settings, the limits."""
    by_setting: dict[str, dict[str, Any]] = {}
    for each in records:
        setting = Setting(each["beam"], each["batch"], each["mixed"])
        by_setting.setdefault(f"{each['size']}, {setting}", {})[each["system"]] = each
    columns = [system for system in SYSTEMS if any(system in of for of in by_setting.values())]
    others = [system for system in columns if system != "optimised"]
    rows, ratios, settings, reached = [], [], [], []
    for name, of in by_setting.items():
        rates = {system: of.get(system, {}).get("tokens/s by round") for system in columns}
        rows.append([name, *(whole(of.get(each, {}).get("tokens/s")) for each in columns)])
        ratios.append([name, *(ratio(rates["optimised"], rates[each]) for each in others)])
        settings.append([name, *(of[each]["setting"] if each in of else "–" for each in columns)])
        both = (of["optimised"], of["ctranslate2"])
        kinds = ("share of reading", "share of products")
        reached.append([name, *(f"{100 * e[kind]:.0f}%" for e in both for kind in kinds)])
    compared = ("optimised", "ctranslate2")
    heads = [f"{system}: {kind}" for system in compared for kind in ("reading", "products")]
    limits = ", ".join(f"{value / 1e9:,.1f} G {name}" for name, value in data["limits"].items())
    took = ", ".join(f"{name}: {value:,.0f} s" for name, value in seconds.items())
    return [
        how(data["timing"], shapes),
        "![Rates of every system](decoding.svg)",
        "## Tokens per second",
        table(["", *columns], rows),
        "## heedful optimised, as so many times the rate of",
        table(["", *others], ratios),
        "## Settings: precision, workers × threads",
        table(["", *columns], settings),
        "`by n`: batches of n prompts. llama.cpp: with flash attention or without, keys and values "
        "of the sequences in one buffer (unified) or apart. "
        f"{agreement_sentence(data['same_greedy_outputs'])} `heedful optimize` took, with what it "
        f"compiled: {took}.",
        "## Share of what this machine reads and multiplies at most",
        table(["", *heads], reached),
        f"Measured with all cores: {limits}. Reading counts the weights of a step, once for each "
        "worker (those that stay in the processor's caches are read faster than that); products "
        "those of the linear layers. Attention is left out.",
    ]


def how(timing: dict[str, Any], shapes: dict[str, Shape]) -> str:
    """What is measured, and in what order."""
    given = "; ".join(
        f"{name}: prompts of {shape.prompt} tokens, of {shape.shortest} to {shape.longest} where "
        f"lengths are mixed, exactly {shape.new} new ones"
        for name, shape in shapes.items()
    )
    return (
        "Generated tokens in a second, random weights, the reading of prompts included "
        f"({given}). The tokens of the best output count, not those of every beam. Each system "
        "runs in the threading, precision and batches that were fastest for it on other prompts, "
        "in as many warm rounds as `heedful optimize` takes for ours: eager and transformers in "
        "float32 and bfloat16, CTranslate2 in 8 bits with one worker or a worker a core and "
        "batches of several sizes, llama.cpp (which has no translators and no beam search) in "
        "Q8_0. Then all run in turn, there and back, llama.cpp in a process of its own and the "
        f"others in one, each for {timing.get('least', 0):g} seconds "
        f"of a round at least, in {timing['rounds']} rounds or more, until "
        f"{timing.get('lasting', 0):g} seconds are over. Rates are medians of the rounds, ratios "
        "medians of the ratios within a round. Where optimize chose CTranslate2 in the setting "
        "that is best by hand, both call the same opened model: two of the same files differ by "
        "some percent."
    )


def agreement_sentence(agreement: dict[str, dict[str, float]]) -> str:
    """How many outputs in float32 are those of heedful eager."""
    lowest: dict[str, float] = {}
    for of in agreement.values():
        for peer, share in of.items():
            lowest[peer] = min(share, lowest.get(peer, 1.0))
    told = ", ".join(f"{peer} {100 * share:.4g}%" for peer, share in lowest.items())
    return (
        "Greedy outputs in float32 that are those of heedful eager to the token, the lowest share "
        f"of any setting: {told}."
    )


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Bars on a logarithmic scale, a group for each size, search and batch."""
    names = list(
        dict.fromkeys((r["size"], Setting(r["beam"], r["batch"], r["mixed"])) for r in records)
    )
    figure, axes = plt.subplots(figsize=(12, 4.5), layout="constrained")
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
    plt.close(figure)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
