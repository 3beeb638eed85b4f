"""Memory of training steps on a GPU: as `heedful plan` computes it, and as torch counts it.

All batches of a recipe have one shape. Each recipe is planned (`heedful plan --gpu h100`, without
its data sheet's rate) and run for a few steps (`heedful train --dry-run`), in fp32 and in bf16.
"""

import gc
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from common import command_line, facts, gpu_parser, table, write_results
from heedful.config import parse_recipe
from heedful.dry_run import estimate_run
from heedful.plan import PlanOptions, make_plan

PRECISIONS = ("fp32", "bf16")
TRAINING: dict[str, Any] = {
    "max_steps": 100,
    "schedule": {"name": "constant", "learning_rate": 0.0001, "warmup_steps": 0},
}
WORDS = 30_000


def main() -> None:
    """Plan, measure, and write the page."""
    parser = gpu_parser(__doc__ or "")
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in recipes(Path(folder), is_quick=arguments.quick).items():
            for precision in PRECISIONS:
                found[f"{name}, {precision}"] = compare(recipe, precision, arguments.device)
                print(name, precision, found[f"{name}, {precision}"], flush=True)
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    how = (
        "GB at the peak of a training step: planned without the GPU, and as torch's allocator "
        "counted on it (`torch.cuda.max_memory_allocated`), without CUDA's own memory."
    )
    rows = [
        [
            case,
            f"{values['parameters']:,}",
            f"{values['planned'] / 1e9:.3f}",
            f"{values['measured'] / 1e9:.3f}",
            f"{values['planned'] / values['measured']:.2f}",
        ]
        for case, values in found.items()
    ]
    write_results(
        "plan_gpu",
        "Planned memory on a GPU",
        [
            facts({"GPU": name}),
            how,
            table(["", "parameters", "planned", "measured", "ratio"], rows),
        ],
        {"cases": found},
        directory=arguments.results,
        command=command_line(),
    )


def recipes(folder: Path, *, is_quick: bool) -> dict[str, dict[str, Any]]:
    """A translator and a GPT, the GPT also with activation checkpointing and Muon."""
    words, width, batch = (50, 16, 256) if is_quick else (WORDS, 512, 16_384)
    rng = random.Random(1)
    names = [f"w{number}" for number in range(words)]
    lines = [" ".join(rng.choices(names, k=32)) for _ in range(max(words, 400))]
    (folder / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    model = {"d_model": 16 if is_quick else 512, "num_heads": 2 if is_quick else 8}
    gpt: dict[str, Any] = {
        "task": "language_modeling",
        "data": {"train": {"text": str(folder / "text")}},
        "tokenizer": {"kind": "word", "vocab_size": None},
        "objective": {"context": width},
        "model": {"architecture": "gpt2", "num_layers": 1 if is_quick else 8, **model},
        "training": {**TRAINING, "batch_tokens": batch},
    }
    less = {**TRAINING, "batch_tokens": batch, "activation_checkpointing": True}
    translator: dict[str, Any] = {
        "task": "translation",
        "data": {
            "train": {"src": str(folder / "text"), "tgt": str(folder / "text")},
            "valid_size": 100,
        },
        "tokenizer": {"kind": "word", "vocab_size": None},
        "model": {
            "architecture": "vaswani2017",
            **model,
            **({"num_encoder_layers": 1, "num_decoder_layers": 1} if is_quick else {}),
        },
        "training": {**TRAINING, "batch_tokens": batch},
    }
    return {
        "translator": translator,
        "gpt": gpt,
        "gpt, checkpointed, muon": gpt | {"training": {**less, "optimizer": {"name": "muon"}}},
    }


def compare(content: dict[str, Any], precision: str, device: str) -> dict[str, float]:
    """Bytes as planned and as measured."""
    training = {**content["training"], "precision": precision, "device": device}
    recipe = parse_recipe(content | {"training": training})
    plan = make_plan(recipe, PlanOptions(gpu="h100"), print)
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    estimate = estimate_run(recipe, print)
    return {
        "parameters": plan.num_parameters["total"],
        "planned": plan.memory_peak,
        "measured": estimate.peak_bytes,
        "planned_state": plan.memory.weights + plan.memory.gradients + plan.memory.optimizer_state,
        "measured_state": estimate.state_bytes,
    }


if __name__ == "__main__":
    main()
