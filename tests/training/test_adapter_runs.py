"""Runs that train an adapter: the base stays as it is, resuming is bit-equal, models open whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from commands import assert_refused, tiny
from heedful.config import parse_recipe
from heedful.errors import UserError
from heedful.run import train
from heedful.zoo.saved import load_tensors, weights_of

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of the task copy."""
    folder = tmp_path_factory.mktemp("source") / "run"
    train(parse_recipe(tiny(training__max_steps=3)), folder)
    return folder


def adapted(source: Path, **changes: Any) -> Any:
    keys = {"adapter__rank": 2, "adapter__targets": ["*"], "adapter__dropout": 0.2}
    return parse_recipe(tiny(**({"init_from": str(source), "model": {}} | keys | changes)))


def test_only_factors_are_stored_and_the_base_is_unchanged(source: Path, tmp_path: Path) -> None:
    before = (source / WEIGHTS).read_bytes()
    lines: list[str] = []
    run = train(adapted(source), tmp_path / "run", print_line=lines.append)
    assert (source / WEIGHTS).read_bytes() == before
    own, base = load_tensors(tmp_path / "run" / WEIGHTS), load_tensors(source / WEIGHTS)
    assert all(name.endswith(("lora_a", "lora_b")) for name in own)
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert load_tensors(checkpoint / WEIGHTS).keys() == own.keys()
    opened = weights_of(run.model.net)
    assert opened.keys() == base.keys()
    assert all(weight.requires_grad for weight in opened.values()), "free to be trained again"
    changed = {name for name in base if not torch.equal(opened[name], base[name])}
    assert changed == {name.replace("lora_b", "weight") for name in own if name.endswith("lora_b")}
    trained, total = sum(t.numel() for t in own.values()), 0
    total = trained + sum(weight.numel() for weight in opened.values())
    line = f"{trained:,} of {total:,} parameters are trained ({trained / total:.1%})"
    assert any(line in each for each in lines)
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert content["adapter"] == {
        "rank": 2,
        "alpha": 16.0,
        "dropout": 0.2,
        "targets": ["*"],
        "trained": [],
    }


@pytest.mark.parametrize("changes", [{}, {"training__ema_decay": 0.9}])
def test_a_resumed_run_is_bit_equal(source: Path, tmp_path: Path, changes: Any) -> None:
    train(adapted(source, **changes), tmp_path / "whole")
    train(adapted(source, training__max_steps=6, **changes), tmp_path / "parts")
    train(adapted(source, **changes), tmp_path / "parts", resume=True)
    whole, parts = (load_tensors(tmp_path / name / WEIGHTS) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_weights_that_the_base_lacks_are_trained_too(source: Path, tmp_path: Path) -> None:
    recipe = adapted(source, adapter__targets=["decoder"])
    recipe = recipe.replace({"model.num_encoder_layers": 2, "training.schedule.warmup_steps": 0})
    run = train(recipe, tmp_path / "run")
    own, base = load_tensors(tmp_path / "run" / WEIGHTS), load_tensors(source / WEIGHTS)
    plain = {name for name in own if "lora" not in name}
    assert plain
    assert all(name.startswith("encoder.blocks.1.") for name in plain)
    assert plain == weights_of(run.model.net).keys() - base.keys()


def test_merge_writes_a_whole_model(source: Path, tmp_path: Path, commands: Any) -> None:
    base = shutil.copytree(source, tmp_path / "base")
    weights = weights_of(train(adapted(base), tmp_path / "run").model.net)
    outcome = commands.run("merge", tmp_path / "run", tmp_path / "merged")
    assert outcome.code == 0, outcome.stderr
    shutil.rmtree(base)
    merged = weights_of(heedful.load(tmp_path / "merged", device="cpu").net)
    for name, weight in weights.items():
        assert torch.equal(merged[name], weight), name
    refused = commands.run("translate", tmp_path / "run", "a b")
    assert_refused(refused, "needs its base", "base/model.safetensors, which does not exist")
    whole = commands.run("merge", tmp_path / "merged", tmp_path / "again")
    assert_refused(whole, "has no base: it is a whole model already")


def test_a_changed_base_ends_a_resumed_run(source: Path, tmp_path: Path) -> None:
    base = shutil.copytree(source, tmp_path / "base")
    train(adapted(base, training__max_steps=6), tmp_path / "run")
    train(parse_recipe(tiny(training__max_steps=4)), tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS, base / WEIGHTS)
    with pytest.raises(UserError, match="which has changed"):
        train(adapted(base), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"adapter__targets": ["query"]}, r"adapter\.targets: query matches nothing; names: "),
        ({"init_from": None}, r"adapter\.rank needs a model .* init_from"),
        ({"adapter__rank": None}, "no effect without adapter.rank"),
        ({"adapter__rank": 0}, r"adapter\.rank: .*greater than or equal to 1"),
        ({"training__freeze": ["nowhere"]}, r"training\.freeze: nowhere matches nothing"),
        ({"training__freeze": ["*"]}, r"training\.freeze freezes all parameters"),
    ],
)
def test_wrong_keys_are_one_line(source: Path, tmp_path: Path, changes: Any, match: str) -> None:
    with pytest.raises(UserError, match=match):
        train(adapted(source, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_adapter_of_a_model_with_a_base_is_refused(source: Path, tmp_path: Path) -> None:
    train(adapted(source, training__max_steps=1), tmp_path / "first")
    with pytest.raises(UserError, match="has a base itself; make it a whole model first"):
        train(adapted(tmp_path / "first", training__max_steps=1), tmp_path / "second")


def test_frozen_weights_stay_and_rates_fall_with_depth(source: Path, tmp_path: Path) -> None:
    schedule = {"name": "constant", "learning_rate": 1e-3, "warmup_steps": 0}
    keys = {"training__layer_lr_decay": 0.5, "training__max_steps": 1, "training__seed": 3}
    keys |= {"training__freeze": ["encoder"], "training__schedule": schedule}
    model = {"num_encoder_layers": 2, "num_decoder_layers": 2, "dropout": 0.0}
    recipe = parse_recipe(tiny(model=model | {"d_model": 16, "num_heads": 2, "d_ff": 32}, **keys))
    start = train(recipe.replace({"training.schedule.learning_rate": 1e-12}), tmp_path / "start")
    step = train(recipe, tmp_path / "step")
    moved = {
        name: (weight - weights_of(start.model.net)[name]).abs().max().item()
        for name, weight in weights_of(step.model.net).items()
    }
    # The first step of Adam is the learning rate, for every weight with a gradient.
    for name, distance in moved.items():
        factor = 1.0
        if name.startswith("encoder"):
            factor = 0.0
        elif "embedding" in name:
            factor = 0.25
        elif "blocks.0" in name:
            factor = 0.5
        assert distance == pytest.approx(1e-3 * factor, rel=0.02, abs=1e-8), name
