"""`heedful plan`: plans of recipes with and without data, what fits, and wrong input."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from backend_models import model_of
from commands import Commands, assert_refused, write_recipe
from heedful.cli.app import make_app
from heedful.cli.plan import _si, rows
from heedful.cost.devices import ACCELERATORS
from heedful.cost.parallelism import bytes_sent, evenness, unit_sizes
from heedful.cost.timing import ProductTimer, StepTimer
from heedful.data.collate import Batch
from heedful.data.tokenizer import train_tokenizer
from heedful.plan import planner
from heedful.plan.planner import PlanOptions, make_plan
from heedful.recipe_files import load_recipe
from heedful.zoo.architectures import meta_net
from heedful.zoo.gpt2 import ARCHITECTURE

GPT = {
    "task": "language_modeling",
    "model": {"architecture": "gpt2", "d_model": 64, "num_layers": 3, "num_heads": 4},
    "objective": {"context": 128},
    "tokenizer": {"vocab_size": 1_000},
    "training": {"max_steps": 10, "schedule": {"learning_rate": 0.1}, "batch_tokens": 1024},
}


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    path = tmp_path / "gpt.yaml"
    path.write_text(json.dumps(GPT))
    return path


def planned(recipe: Path | str, *words: str) -> dict[str, Any]:
    result = CliRunner().invoke(make_app(["plan"]), ["plan", str(recipe), "--json", *words])
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_a_plan_without_data(gpt: Path) -> None:
    one = planned(gpt, "--gpu", "h100")
    assert one["lengths"] == "maximum lengths"
    assert one["tokens_per_step"] == 1024
    assert one["fits"]
    assert one["total_steps"] == 10
    assert one["ranks"] is None
    blocks = 3 * (12 * 64 * 64)
    products = 6 * (blocks + 64 * 1024)  # on a GPU the head's rows are a multiple of 64
    scores = 3 * (4 + 10) * 128 * 64  # forward, and backward of a fused kernel
    assert one["flops_per_token"] == pytest.approx(products + scores)
    flops = one["flops_per_token"] * 1024
    assert one["seconds_per_step"] == pytest.approx(flops / (0.4 * ACCELERATORS["h100"].flops))
    faster = planned(gpt, "--gpu", "h100", "--utilization", "0.8")
    assert faster["seconds_per_step"] == pytest.approx(one["seconds_per_step"] / 2)
    tokens = planned(gpt, "--gpu", "h100", "--tokens", "1024000")
    assert tokens["total_steps"] == 1000
    keys = ("--set", "training.activation_checkpointing=true", "--gpu", "h100")
    checkpointed = planned(gpt, *keys)
    assert checkpointed["backward_per_token"] > one["backward_per_token"]
    assert checkpointed["memory_peak"] < one["memory_peak"]


def test_the_lines_of_a_plan_have_its_figures(gpt: Path) -> None:
    options = PlanOptions(gpu="h100", gpus=2, parallel="fsdp")
    plan = make_plan(load_recipe(gpt), options, lambda line: None)
    lines, count = rows(plan), plan.num_parameters
    parts = ", ".join(f"{name} {size:,}" for name, size in count.items() if name != "total")
    assert lines["model"] == f"gpt2, {count['total']:,} parameters ({parts})"
    assert lines["device"] == "2 x h100, bf16, 989 TFLOP/s of products (data sheet)"
    names = ("weights", "gradients", "optimizer state", "activations", "gathered")
    found = re.findall(r"([a-z ]+?) [\d.]+ [kM]?B", lines["memory"].split(": ")[1])
    assert [name.strip() for name in found] == [*names, "whole net"]
    assert "at the peak, fits in 80.0 GB" in lines["memory"]
    assert lines["sent"].endswith("by each rank in a step (fsdp)")
    assert lines["steps"] == "10 steps, 1,024 tokens each, lengths: maximum lengths"
    assert f"({plan.tokens_per_second:,.0f} tokens/s, " in lines["time"]
    assert lines["ranks"].startswith("5,120 tokens each in 10 steps, at most 1.000 times")
    assert "change" not in lines
    numbers = {0: "0 ", 0.5: "0.5 ", 999.4: "999 ", 999.6: "1 k", 12_345: "12.3 k", 2e15: "2 P"}
    assert {number: _si(number) for number in numbers} == numbers


def test_frozen_weights_and_those_under_an_adapter_have_no_gradients(
    gpt: Path, tmp_path: Path
) -> None:
    whole = planned(gpt, "--gpu", "h100")
    frozen = planned(gpt, "--gpu", "h100", "--set", "training.freeze=[embedding]")
    trained = whole["num_parameters"]["total"] - whole["num_parameters"]["embedding"]
    assert frozen["memory"]["gradients"] == 4 * trained
    model_of("gpt2").save(tmp_path / "model")
    keys = (f"init_from={tmp_path / 'model'}", "model={}", "objective.context=16")
    keys += ("tokenizer={}", "adapter.rank=2", "adapter.targets=[q, v]")
    adapted = planned(gpt, "--gpu", "h100", *(word for key in keys for word in ("--set", key)))
    assert adapted["memory"]["gradients"] == 4 * 2 * 2 * 2 * (16 + 16)  # layers, targets, rank


def test_a_plan_with_data_has_their_lengths(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=2)
    content = planned(recipe, "--gpus", "3")
    assert content["lengths"] == "data"
    assert content["product_rate"] > 0
    assert content["seconds_per_step"] > 0
    assert content["ranks"]["max_ratio"] >= 1
    assert 0 <= content["ranks"]["idle_share"] < 1
    assert content["product_share"] > 0


def test_steps_that_this_machine_cannot_hold_are_not_timed(
    gpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_USED_MEMORY", 0.0)
    plan = make_plan(load_recipe(gpt), PlanOptions(), lambda line: None)
    assert (plan.seconds_per_step, plan.seconds, plan.product_rate) == (None, None, None)
    lines = rows(plan)
    assert lines["time"] == "not measured: a step needs more memory than this machine has"
    assert lines["device"] == f"cpu, {plan.precision}"


def test_the_steps_of_a_plan_are_those_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(timer: StepTimer, batches: Sequence[Batch]) -> float:
        """Most of the time does not depend on the size."""
        return 0.002 + 1e-6 * sum(batch.num_tokens for batch in batches)

    monkeypatch.setattr(StepTimer, "take", take)
    monkeypatch.setattr(ProductTimer, "rate", 1e9)
    plan = make_plan(load_recipe("rhyme"), PlanOptions(), lambda line: None)
    assert plan.tokens_per_step == 160, "batches of 64 and 256 tokens"
    assert plan.seconds_per_step == pytest.approx(0.002 + 160e-6, rel=0.02)


def test_what_does_not_fit_is_said_with_changes_that_do(gpt: Path) -> None:
    peak = planned(gpt, "--gpu", "h100")["memory_peak"]
    content = planned(gpt, "--gpu", "h100", "--memory", str(0.7 * peak / 1e9))
    assert not content["fits"]
    assert min(content["remedies"].values()) <= 0.7 * peak
    assert "training.activation_checkpointing=true" in content["remedies"]
    words = ["plan", str(gpt), "--gpu", "h100", "--gpus", "2", "--memory", "0.001"]
    words += ["--set", "training.batch_tokens=256"]
    text = CliRunner().invoke(make_app(["plan"]), words).output
    assert "DOES NOT FIT" in text
    assert "--parallel fsdp -> " in text


def test_a_run_that_fsdp_refuses_is_not_planned_with_it(gpt: Path, commands: Commands) -> None:
    muon = ("--set", "training.optimizer.name=muon", "--gpu", "h100", "--gpus", "2")
    refused = commands.run("plan", gpt, *muon, "--parallel", "fsdp")
    assert_refused(refused, "--parallel fsdp: training.optimizer.name muon needs whole matrices")
    remedies = planned(gpt, *muon, "--memory", "0.001")["remedies"]
    assert remedies
    assert not any("fsdp" in change for change in remedies)
    alone = planned(gpt, *muon[:4], "--memory", "0.001")["remedies"]
    assert not any("fsdp" in change for change in alone)


def test_a_gpu_without_bf16_is_planned_in_fp16(gpt: Path, commands: Commands) -> None:
    """As a run on it, which FSDP refuses."""
    assert planned(gpt, "--gpu", "h100")["precision"] == "bf16"
    old = planned(gpt, "--gpu", "v100", "--gpus", "2", "--memory", "0.001")
    assert old["precision"] == "fp16"
    assert not any("fsdp" in change for change in old["remedies"])
    bf16 = ("--set", "training.precision=bf16")
    assert_refused(
        commands.run("plan", gpt, "--gpu", "t4", *bf16), "--gpu t4 does not support bf16"
    )


def test_parts_of_batches_take_less_memory(gpt: Path) -> None:
    whole = planned(gpt, "--gpu", "h100")
    parts = planned(gpt, "--gpu", "h100", "--set", "training.batch_parts=4")
    assert parts["memory"]["activations"] < 0.5 * whole["memory"]["activations"]
    assert parts["seconds_per_step"] == pytest.approx(whole["seconds_per_step"])
    two = planned(gpt, "--gpu", "h100", "--gpus", "2", "--set", "training.batch_parts=3")
    assert two["ranks"]["max_ratio"] == 5 / 4, "of 8 rows 3 and 2, or 3"
    assert two["ranks"]["steps"] == 10
    flops = two["flops_per_token"] * 1024 * 2 / 3  # of the process that has two of three parts
    assert two["seconds_per_step"] == pytest.approx(flops / (0.4 * ACCELERATORS["h100"].flops))


def test_fsdp_keeps_whole_gradients_over_micro_batches(gpt: Path) -> None:
    words = ("--gpu", "h100", "--gpus", "2", "--parallel", "fsdp")
    one = planned(gpt, *words, "--set", "training.gradient_accumulation=2")
    three = planned(gpt, *words, "--set", "training.gradient_accumulation=6")
    assert three["memory"]["gradients"] == 2 * one["memory"]["gradients"]
    gradients = 4 * one["num_parameters"]["total"] // 2
    assert one["memory"]["gradients"] == pytest.approx(gradients, rel=0.01)
    assert three["bytes_sent"] - gradients == 3 * (one["bytes_sent"] - gradients)
    assert three["memory_peak"] >= one["memory_peak"] + gradients


def test_a_plan_ends_with_the_minutes_of_the_run(gpt: Path) -> None:
    step = planned(gpt, "--gpu", "h100")["seconds_per_step"]
    limit = ("--set", f"training.max_minutes={3.5 * step / 60}")
    timed = planned(gpt, "--gpu", "h100", *limit)
    assert timed["total_steps"] == 3
    assert timed["seconds"] == pytest.approx(3 * step)
    assert planned(gpt, "--gpu", "h100", *limit, "--tokens", "1024000")["total_steps"] == 1000


def test_a_batch_has_as_many_rows_as_both_limits_allow(gpt: Path) -> None:
    for size, tokens in ((2, 256), (100, 1024)):
        keys = ("--gpu", "h100", "--set", f"training.batch_sentences={size}")
        assert planned(gpt, *keys)["tokens_per_step"] == tokens
    few = ("--set", "training.batch_sentences=4", "--memory", "0.001", "--gpu", "h100")
    remedies = planned(gpt, *few)["remedies"]
    assert "training.batch_tokens=128" in remedies, "a quarter of the 512 tokens of a batch"


def test_vocabularies_that_need_no_data(gpt: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    train_tokenizer(["a b", "c"], kind="word").save(path)
    own = planned(
        gpt,
        "--gpu",
        "h100",
        "--set",
        "tokenizer.vocab_size=auto",
        "--set",
        f"tokenizer.path={path}",
    )
    assert own["num_parameters"]["embedding"] == 64 * (7 + 128)
    keys = ("--set", "tokenizer.kind=byte", "--set", "tokenizer.vocab_size=auto")
    assert planned(gpt, "--gpu", "h100", *keys)["num_parameters"]["embedding"] == 64 * (260 + 128)
    apart = load_recipe("translation", {"tokenizer.joint": False, "tokenizer.vocab_size": 100})
    plan = make_plan(apart, PlanOptions(gpu="h100"), lambda line: None)
    joint = load_recipe("translation", {"tokenizer.vocab_size": 100})
    tied = make_plan(joint, PlanOptions(gpu="h100"), lambda line: None)
    width = tied.num_parameters["src_embedding"] // 100
    assert plan.num_parameters["total"] == tied.num_parameters["total"] + 100 * width


def test_a_net_that_no_machine_holds_is_planned(gpt: Path) -> None:
    sizes = {"architecture": "llama", "size": "3-70b", "num_layers": 2, "d_ff": 1_400_000}
    recipe = load_recipe(gpt, {"model": sizes})
    options = PlanOptions(gpu="h100", gpus=64, parallel="fsdp", tokens=10**12)
    plan = make_plan(recipe, options, lambda line: None)
    assert plan.num_parameters["total"] > 68e9
    assert plan.memory.weights == pytest.approx(4 * plan.num_parameters["total"] / 64, rel=1e-3)
    total, others = plan.num_parameters["total"], 2 * 1000 * 8192 + 8192
    assert plan.bytes_sent == pytest.approx(63 / 64 * ((2 * 2 + 4) * total - 2 * others), rel=1e-9)


def test_bytes_sent() -> None:
    config = ARCHITECTURE.config(vocab_size=50, d_model=16, num_heads=2, num_layers=2, max_length=8)
    net = meta_net("gpt2", config, "model")
    count = sum(p.numel() for p in net.parameters())
    assert sum(unit_sizes(net)) == count
    assert bytes_sent(net, "ddp", 4, in_bf16=False) == 2 * 3 * 4 * count // 4
    others = unit_sizes(net)[-1]  # stay gathered from the forward to the backward pass
    assert bytes_sent(net, "fsdp", 4, in_bf16=False) == 3 * (3 * 4 * count - 4 * others) // 4
    assert (
        bytes_sent(net, "fsdp", 4, in_bf16=True)
        == 3 * (2 * 2 * count - 2 * others + 4 * count) // 4
    )
    assert bytes_sent(net, "ddp", 1, in_bf16=False) == 0


def test_evenness_of_ranks() -> None:
    result = evenness(np.array([4, 2, 4, 2, 4]), 2)  # ranks 4 + 4 + 4 and 2 + 2
    assert (result.steps, result.tokens_per_rank) == (3, 8)
    assert result.max_ratio == 1.5
    assert result.idle_share == pytest.approx(1 - 16 / 24)
    even = evenness(np.full(2048, 7), 1024, 2)
    assert (even.steps, even.max_ratio, even.idle_share) == (1, 1, 0)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("--gpu", "h10"), ("--gpu h10", "h100", "l40s")),
        (("--gpus", "0"), ("--gpus 0",)),
        (("--memory", "-1"), ("--memory",)),
        (("--tokens", "0"), ("--tokens 0",)),
        (("--utilization", "2"), ("--utilization 2",)),
        (("--utilization", "0.5"), ("--utilization 0.5", "--gpu")),
        (("--gpus", "2", "--parallel", "none"), ("--parallel none",)),
        (("--gpus", "2", "--set", "training.parallel=none"), ("--parallel none",)),
        (("--gpu", "h100", "--parallel", "fsdp"), ("--parallel fsdp", "--gpus")),
        (("--gpu", "h100", "--set", "tokenizer.vocab_size=null"), ("tokenizer.vocab_size",)),
        (("--gpu", "h100", "--set", "model.size=9t"), ("model.size",)),
    ],
)
def test_wrong_input_is_one_line(
    commands: Commands, gpt: Path, words: tuple[str, ...], messages: tuple[str, ...]
) -> None:
    assert_refused(commands.run("plan", gpt, *words), *messages)
