"""Plans beside measurements on this machine, and plans of a GPT for many GPUs.

Three recipes are planned (`heedful plan`) and run for a few steps (`heedful train --dry-run`), in
turn, and the medians compared. Parameters, FLOPs and bytes are exact; the time of a step on a CPU
is measured with random weights. GPUs are planned by their data sheets.
"""

import statistics
from dataclasses import asdict
from typing import Any

from common import argument_parser, command_line, table, write_results
from heedful.config import Recipe, parse_recipe
from heedful.dry_run import estimate_run
from heedful.plan import Plan, PlanOptions, make_plan
from heedful.recipe_files import load_recipe, read_settings

RECIPES = ("copy", "dates", "rhyme")
QUICK = ("copy",)
SMALL = ["data.generated.num_train=500", "data.generated.num_test=100"]
# GPT-3 XL (Brown et al. 2020, table 2.1) on 20 billion tokens.
GPT = {
    "task": "language_modeling",
    "model": {
        "architecture": "gpt3",
        "d_model": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "d_ff": 8192,
    },
    "objective": {"context": 2048},
    "tokenizer": {"vocab_size": 50_257},
    "training": {
        "batch_tokens": 2**17,
        "gradient_accumulation": 16,
        "activation_checkpointing": True,
        "schedule": {"learning_rate": 0.0002},
        "max_steps": 10_000,
    },
    "data": {"train": {"text": "missing.txt"}},
}
TOKENS = 20_000_000_000


def main() -> None:
    """Plan, measure, and write the page."""
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians are taken")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    settings = SMALL if arguments.quick else []
    names = QUICK if arguments.quick else RECIPES
    measured = {name: compare(load_recipe(name, read_settings(settings)), rounds) for name in names}
    gpt = GPT | {"model": {**GPT["model"], "num_layers": 1}} if arguments.quick else GPT  # type: ignore[dict-item]
    plans = {gpus: plan_gpt(parse_recipe(gpt), gpus) for gpus in (8, 1024)}
    write_results(
        "plan",
        "Plans of runs",
        sections(measured, plans),
        {"recipes": measured, "gpt": {str(gpus): asdict(plan) for gpus, plan in plans.items()}},
        directory=arguments.results,
        command=command_line(),
    )


def compare(recipe: Recipe, rounds: int) -> dict[str, float]:
    """Tokens/s as planned and as measured, medians of alternating rounds."""
    planned, actual = [], []
    for _ in range(rounds):
        planned.append(make_plan(recipe, PlanOptions(), print))
        actual.append(estimate_run(recipe, print))
    rates = [e.tokens_per_step / e.seconds_per_step for e in actual]
    return {
        "parameters": planned[0].num_parameters["total"],
        "planned_tokens_per_second": statistics.median(p.tokens_per_second for p in planned),
        "measured_tokens_per_second": statistics.median(rates),
        "planned_flops_per_token": planned[0].flops_per_token,
        "measured_flops_per_token": actual[0].flops_per_token,
    }


def plan_gpt(recipe: Recipe, gpus: int) -> Plan:
    """The plan of the GPT for H100 GPUs, with FSDP."""
    options = PlanOptions(gpu="h100", gpus=gpus, parallel="fsdp", tokens=TOKENS)
    return make_plan(recipe, options, print)


def sections(measured: dict[str, dict[str, float]], plans: dict[int, Plan]) -> list[str]:
    """The tables of the page."""
    rows = [
        [
            name,
            f"{values['parameters']:,.0f}",
            f"{values['planned_flops_per_token']:,.0f}",
            f"{values['planned_tokens_per_second']:,.0f}",
            f"{values['measured_tokens_per_second']:,.0f}",
            f"{values['planned_tokens_per_second'] / values['measured_tokens_per_second']:.2f}",
        ]
        for name, values in measured.items()
    ]
    header = ["recipe", "parameters", "FLOPs/token", "planned tokens/s", "measured", "ratio"]
    facts: dict[str, Any] = {
        "parameters": lambda plan: f"{plan.num_parameters['total']:,}",
        "memory of rank 0, GB": lambda plan: f"{plan.memory_peak / 1e9:.1f}",
        "sent by a rank in a step, GB": lambda plan: f"{plan.bytes_sent / 1e9:.2f}",
        "steps": lambda plan: f"{plan.total_steps:,}",
        "hours": lambda plan: f"{plan.seconds / 3600:.2f}",
        "tokens of a rank, largest / mean": lambda plan: f"{plan.ranks.max_ratio:.4f}",
        "idle share": lambda plan: f"{plan.ranks.idle_share:.2%}",
    }
    lines = [[name, *(show(plan) for plan in plans.values())] for name, show in facts.items()]
    gpus = [f"{count:,} H100" for count in plans]
    return [
        "## Plans and measurements on this CPU",
        table(header, rows),
        "## A GPT of 1.3 billion parameters on 20 billion tokens (planned)",
        table(["", *gpus], lines),
    ]


if __name__ == "__main__":
    main()
