"""Decoding speed on a GPU in tokens/s: heedful, transformers and CTranslate2.

Random models with a fixed number of new tokens. Heedful runs with and without recorded steps,
transformers with a growing cache and with a static one, whose steps it compiles, CTranslate2 in
bf16 and in fp16; of each the fastest way is compared. Outputs of greedy search in fp32 are
compared. CTranslate2's wheels need `libcublas.so.12`: where only another version of cuBLAS is
installed, a folder of LD_LIBRARY_PATH can hold links of that name to it, and the page states the
library that was loaded. vLLM is not measured.
"""

import argparse
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ctranslate2
import torch

import heedful
from common import (
    command_line,
    facts,
    gpu_parser,
    interleaved,
    medians,
    ratio,
    table,
    whole,
    write_results,
)
from heedful.backends.base import Settings
from heedful.data.tokenizer import train_tokenizer
from heedful.deploy.convert import convert_model
from heedful.export.hf import export_hf
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import gpt2, marian

START, END = 0, 2
NEVER = (0, 1, 3)  # ids that a translator does not write: padding, BOS and the unknown token
SYSTEMS = ("heedful", "transformers", "CTranslate2")
Rows = list[list[int]]


class Workload(NamedTuple):
    """A model and its workload: `new` tokens after prompts of `prompt` tokens."""

    name: str
    d_model: int
    num_heads: int
    num_layers: int
    d_ff: int
    vocab_size: int
    prompt: int
    new: int
    settings: tuple[tuple[int, int], ...]  # beams and prompts at once

    @property
    def is_translator(self) -> bool:
        return self.name == "marian"


WORKLOADS = (
    Workload("marian", 512, 8, 6, 2048, 32_000, 32, 32, ((1, 1), (1, 64), (4, 1), (4, 64))),
    Workload("gpt2", 768, 12, 12, 3072, 50_257, 128, 128, ((1, 1), (1, 64))),
)
QUICK = (
    Workload("marian", 16, 2, 1, 32, 50, 4, 4, ((1, 2), (2, 1))),
    Workload("gpt2", 16, 2, 1, 32, 50, 4, 4, ((1, 2),)),
)


def main() -> None:
    """Measure all workloads and write the page."""
    parser = gpu_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--static",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure static caches",
    )
    parser.add_argument("--workloads", help="those to measure, comma-separated; default: all")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    torch._dynamo.config.automatic_dynamic_shapes = False  # graphs of one shape are faster
    torch._dynamo.config.recompile_limit = 64
    cases: dict[str, dict[str, Callable[[], float]]] = {}
    equal: dict[str, dict[str, float]] = {}
    for workload in QUICK if arguments.quick else WORKLOADS:
        if arguments.workloads and workload.name not in arguments.workloads.split(","):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_model(workload, folder)
            for beam, batch in workload.settings:
                search = "greedy" if beam == 1 else f"beam {beam}"
                setting = f"{workload.name}, {search}, batch {batch}"
                cases[setting] = prepare(
                    workload, beam, batch, folder, arguments.device, arguments.static
                )
                if beam == 1:
                    equal[setting] = equal_shares(workload, batch, folder, arguments.device)
                print(f"{setting} is compiled", flush=True)
    data = {}
    for setting, systems in cases.items():
        data[setting] = interleaved(systems, rounds=rounds)
        print(setting, {k: round(v) for k, v in medians(data[setting]).items()}, flush=True)
    write_results(
        "decoding_gpu",
        "Decoding speed on a GPU",
        sections(data, equal, rounds, arguments.device),
        {"tokens_per_second": data, "equal_outputs": equal},
        directory=arguments.results,
        command=command_line(),
        packages=("transformers", "ctranslate2"),
    )


def prepare(
    workload: Workload, beam: int, batch: int, folder: Path, device: str, has_static: bool
) -> dict[str, Callable[[], float]]:
    """Functions that decode and return the number of new tokens, by system; all have run once."""
    ids = prompts(workload, batch)
    runs: dict[str, Callable[[], Any]] = {}
    for records in (False, True):
        run = heedful_run(workload, beam, ids, folder, device, "bfloat16", records)
        runs["heedful, recorded" if records else "heedful"] = run
    caches = [None, "static"] if has_static else [None]
    for cache in caches:
        name = "transformers" if cache is None else "transformers, static cache"
        net = transformers_net(workload, folder, device, torch.bfloat16)
        runs[name] = partial(transformers_run, net, workload, beam, ids.to(device), cache)
    for label, compute_type in compute_types(device).items():
        name = f"CTranslate2, {label}"
        runs[name] = ctranslate2_run(workload, beam, ids, folder, device, compute_type)
    outputs = {name: run() for name, run in runs.items()}
    for name, rows in outputs.items():
        assert [len(row) for row in rows] == [workload.new] * batch, name
    return {name: partial(counted, run, batch * workload.new) for name, run in runs.items()}


def prompts(workload: Workload, batch: int) -> torch.Tensor:
    """Random prompts (batch, prompt)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, workload.vocab_size, (batch, workload.prompt), generator=generator)
    if workload.is_translator:
        ids[:, -1] = END
    return ids


def heedful_run(
    workload: Workload,
    beam: int,
    ids: torch.Tensor,
    folder: Path,
    device: str,
    precision: str,
    records: bool,
) -> Callable[[], Rows]:
    """Decoding by heedful."""
    model: Any = heedful.load(folder / "heedful", device=device, precision=precision)
    model.settings = Settings(records_steps=records)
    options: dict[str, Any] = {"stop_rule": "beam_full"} if beam > 1 else {}
    options |= {"beam_size": beam, "length_penalty": 1.0}
    options |= dict.fromkeys(("min_new_tokens", "max_new_tokens"), workload.new)
    return partial(model.generate, ids.tolist(), **options)


def equal_shares(workload: Workload, batch: int, folder: Path, device: str) -> dict[str, float]:
    """The share of outputs of greedy search that are heedful's, of each peer, in fp32.

    Beams differ at the limit of tokens, where heedful puts outputs that have ended first.
    """
    ids = prompts(workload, batch)
    ours = heedful_run(workload, 1, ids, folder, device, "float32", True)()
    net = transformers_net(workload, folder, device, torch.float32)
    peers = {
        "transformers": transformers_run(net, workload, 1, ids.to(device), None),
        "CTranslate2": ctranslate2_run(workload, 1, ids, folder, device, "float32")(),
    }
    return {
        name: sum(a == b for a, b in zip(ours, rows, strict=True)) / batch
        for name, rows in peers.items()
    }


def counted(run: Callable[[], Any], tokens: int) -> int:
    """Decode; outputs are on the host, so that the device has finished."""
    run()
    return tokens


def write_model(workload: Workload, folder: Path) -> None:
    """Write a random model for heedful and transformers."""
    words = [f"w{number}" for number in range(workload.vocab_size - 4)]
    tokenizer = train_tokenizer([" ".join(words)], kind="word")
    torch.manual_seed(1)
    sizes: dict[str, int] = {
        "d_model": workload.d_model,
        "num_heads": workload.num_heads,
        "d_ff": workload.d_ff,
    }
    config: Any
    if workload.is_translator:
        config = marian.Config(
            src_vocab_size=workload.vocab_size,
            tgt_vocab_size=workload.vocab_size,
            num_encoder_layers=workload.num_layers,
            num_decoder_layers=workload.num_layers,
            activation="relu",
            max_length=64,
            **sizes,
        )
        ids = GenerationIds(decoder_start_ids=(START,), eos_ids=(END,), suppressed_ids=NEVER)
        net: Any = marian.build(config)
    else:
        config = gpt2.Config(
            vocab_size=workload.vocab_size, num_layers=workload.num_layers, **sizes
        )
        ids = GenerationIds(eos_ids=(END,))
        net = gpt2.build(config)
    metadata = ModelMetadata(workload.name, "b", generation=ids)
    model = open_net(net, config, metadata, tokenizer)
    model.save(folder / "heedful")
    export_hf(model, folder / "hf")
    convert_model(model, folder / "by_hand", "float32")


def transformers_net(workload: Workload, folder: Path, device: str, dtype: torch.dtype) -> Any:
    """The exported model, loaded by transformers."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if workload.is_translator else AutoModelForCausalLM
    net = kind.from_pretrained(folder / "hf", dtype=dtype).eval().to(device)
    net.generation_config.max_length = None
    return net


@torch.inference_mode()
def transformers_run(
    net: Any, workload: Workload, beam: int, ids: torch.Tensor, cache: str | None
) -> Rows:
    """Decoding by transformers' `generate`."""
    options = {} if cache is None else {"cache_implementation": cache}
    outputs = net.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beam,
        do_sample=False,
        max_new_tokens=workload.new,
        min_new_tokens=workload.new,
        length_penalty=1.0,
        bad_words_ids=[[token] for token in NEVER] if workload.is_translator else None,
        renormalize_logits=True,
        forced_eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    rows: Rows = outputs[:, -workload.new :].tolist()
    return rows


def compute_types(device: str) -> dict[str, str]:
    """Types of CTranslate2's numbers that are measured, by label; fp32 where it has no other."""
    known = ctranslate2.get_supported_compute_types(torch.device(device).type)
    types = {"bf16": "bfloat16", "fp16": "float16"}
    return {label: name for label, name in types.items() if name in known} or {"fp32": "float32"}


def ctranslate2_run(
    workload: Workload, beam: int, ids: torch.Tensor, folder: Path, device: str, compute_type: str
) -> Callable[[], Rows]:
    """Decoding by CTranslate2, the whole batch at once."""
    place = folder / "by_hand" / "backends" / "ctranslate2" / "float32"
    name = "shared_vocabulary" if workload.is_translator else "vocabulary"
    tokens: list[str] = heedful.files.read_json(place / f"{name}.json")
    number = {token: place for place, token in enumerate(tokens)}
    words = [[tokens[i] for i in row] for row in ids.tolist()]
    kind = ctranslate2.Translator if workload.is_translator else ctranslate2.Generator
    model = kind(str(place), device=torch.device(device).type, compute_type=compute_type)
    options: dict[str, Any] = {"beam_size": beam, "length_penalty": 1.0}

    def translate() -> Rows:
        results = model.translate_batch(
            words,
            min_decoding_length=workload.new,
            max_decoding_length=workload.new,
            suppress_sequences=[[tokens[i]] for i in NEVER],
            return_end_token=True,
            **options,
        )
        return [[number[token] for token in result.hypotheses[0]] for result in results]

    def continue_prompts() -> Rows:
        results = model.generate_batch(
            words,
            min_length=workload.new,
            max_length=workload.new,
            include_prompt_in_result=False,
            **options,
        )
        return [result.sequences_ids[0] for result in results]

    return translate if workload.is_translator else continue_prompts


def loaded_cublas() -> str:
    """The file of cuBLAS that CTranslate2 has loaded; "none" on a CPU."""
    maps = Path("/proc/self/maps")
    text = maps.read_text() if maps.is_file() else ""
    found = sorted({*re.findall(r"libcublas\.so[.\d]*", text)})
    return ", ".join(found) or "none"


def sections(
    data: dict[str, dict[str, list[float]]],
    equal: dict[str, dict[str, float]],
    rounds: int,
    device: str,
) -> list[str]:
    """Method, rates and ratios."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    systems = [*dict.fromkeys(system for rates in data.values() for system in rates)]
    rows = [
        [
            setting,
            *(whole(medians(rates).get(system)) for system in systems),
            *(best_ratio(rates, peer) for peer in SYSTEMS[1:]),
            *(f"{equal[setting][peer]:.0%}" if setting in equal else "" for peer in SYSTEMS[1:]),
        ]
        for setting, rates in data.items()
    ]
    shapes = "; ".join(
        f"{w.name}: {w.num_layers} layers of width {w.d_model}, {w.vocab_size:,} tokens, "
        f"{w.new} new tokens after {w.prompt}"
        for w in WORKLOADS
    )
    how = (
        "New tokens per second, prompts and encoder included, in bf16, random weights "
        f"({shapes}). Medians of {rounds} alternating rounds in one process. Recorded: decoding "
        "steps in CUDA graphs. Transformers: a growing cache"
        + (
            ", and a static one whose steps it compiles."
            if any("static" in s for s in systems)
            else "."
        )
        + " CTranslate2: the whole batch at once. Equal: the share of greedy outputs that heedful "
        "and a peer have in common, in fp32. Not measured: vLLM, which needs an environment of its "
        "own."
    )
    ratios = [f"heedful / {peer}" for peer in SYSTEMS[1:]]
    shares = [f"outputs as by {peer} in fp32" for peer in SYSTEMS[1:]]
    return [
        facts({"GPU": name, "cuBLAS": loaded_cublas()}),
        how,
        table(["", *systems, *ratios, *shares], rows),
    ]


def best_ratio(rates: dict[str, list[float]], peer: str) -> str:
    """The rate of heedful over that of a peer, each in its fastest way; "" without the peer."""
    middle = medians(rates)
    ways = {
        system: [way for way in rates if way.startswith(system)] for system in ("heedful", peer)
    }
    if not ways[peer]:
        return ""
    ours, theirs = (max(found, key=middle.__getitem__) for found in ways.values())
    return ratio(rates[ours], rates[theirs])


if __name__ == "__main__":
    main()
