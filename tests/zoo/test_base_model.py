"""Models on disk with only the trained weights, and a reference to a base model for the others."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from backend_models import TEXTS, model_of
from heedful.cli.app import make_app
from heedful.deploy.optimize import optimize
from heedful.errors import UserError
from heedful.pipelines import load
from heedful.zoo.saved import trainable, weights_of

WEIGHTS = "model.safetensors"


def added_to(base: Path, out: Path, change: float = 0.5) -> Any:
    """A model of which only biases were trained, saved with a base."""
    model = load(base, device="cpu")
    for name, weight in model.net.named_parameters():
        weight.requires_grad_(name.endswith("bias"))
    with torch.no_grad():
        for weight in trainable(model.net).values():
            weight += change
    model.save(out, base=base)
    return model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model_of("gpt2").save(tmp_path / "base")
    return tmp_path / "base"


def test_only_trained_weights_are_written_and_the_loaded_model_is_complete(base: Path) -> None:
    out = base.parent / "added"
    model = added_to(base, out)
    assert load_file(out / WEIGHTS).keys() == trainable(model.net).keys()
    ours, reference = weights_of(load(out, device="cpu").net), weights_of(model.net)
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
    moved = shutil.move(base.parent, base.parent.parent / "elsewhere")  # both together
    assert load(moved / "added", device="cpu").score(TEXTS) == model.score(TEXTS)
    load(moved / "added", device="cpu").save(moved / "whole")
    shutil.rmtree(moved / "base")
    assert load(moved / "whole", device="cpu").score(TEXTS) == model.score(TEXTS)


def test_a_base_with_another_head_is_used_for_frozen_weights_only(tmp_path: Path) -> None:
    model_of("bert", head="mlm").save(tmp_path / "base")
    model = model_of("bert", head="classify")
    reference = weights_of(load(tmp_path / "base", device="cpu").net)
    for name, weight in model.net.named_parameters():
        if not name.startswith("head"):
            weight.requires_grad_(False).copy_(reference[name].detach())
    model.save(tmp_path / "added", base=tmp_path / "base")
    ours, reference = weights_of(load(tmp_path / "added", device="cpu").net), weights_of(model.net)
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


def test_a_base_that_moved_or_changed_is_one_line(base: Path) -> None:
    out = base.parent / "added"
    added_to(base, out)
    base_bytes = (base / WEIGHTS).read_bytes()
    save_file({n: t + 1 for n, t in load_file(base / WEIGHTS).items()}, base / WEIGHTS)
    with pytest.raises(UserError, match="which has changed; restore the former file"):
        load(out, device="cpu")
    (base / WEIGHTS).write_bytes(base_bytes)
    load(out, device="cpu")
    shutil.move(base, base.parent / "other")
    with pytest.raises(
        UserError, match=r"needs its base .*base/model.safetensors, which does not exist"
    ):
        load(out, device="cpu")


@pytest.mark.parametrize("entry", [3, {"path": "../base"}, {"path": 3, "sha256": "x"}])
def test_a_damaged_entry_is_one_line(base: Path, entry: Any) -> None:
    added_to(base, base.parent / "added")
    path = base.parent / "added" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base": entry}))
    with pytest.raises(UserError, match="its entry `base` is damaged"):
        load(path.parent, device="cpu")


def test_a_base_that_lacks_a_weight_is_one_line(base: Path) -> None:
    added_to(base, base.parent / "added")
    tensors = load_file(base.parent / "added" / WEIGHTS)
    del tensors[min(tensors)]
    save_file(tensors, base.parent / "added" / WEIGHTS)
    load(base.parent / "added", device="cpu")  # the base has it
    kept = load_file(base / WEIGHTS)
    save_file({n: t for n, t in kept.items() if n != min(kept)}, base / WEIGHTS)
    path = base.parent / "added" / "config.json"
    content = json.loads(path.read_text())
    content["base"]["sha256"] = hashlib.sha256((base / WEIGHTS).read_bytes()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="lacks the tensor"):
        load(base.parent / "added", device="cpu")


def test_what_cannot_be_a_base_is_refused(base: Path) -> None:
    out = base.parent / "added"
    model = added_to(base, out)
    before = (base / WEIGHTS).read_bytes()
    with pytest.raises(UserError, match="cannot be its own base"):
        model.save(base, base=base)
    with pytest.raises(UserError, match="has a base itself"):
        model.save(base.parent / "more", base=out)
    with pytest.raises(UserError, match=r"holds no model\.safetensors; a base is"):
        model.save(base.parent / "more", base=base.parent / "none")
    with torch.no_grad():
        next(w for w in model.net.parameters() if not w.requires_grad).add_(1)
    with pytest.raises(UserError, match="require no gradient, but differ"):
        model.save(base.parent / "more", base=base)
    model.net.requires_grad_(True)
    with pytest.raises(UserError, match="all weights of the net require a gradient"):
        model.save(base.parent / "more", base=base)
    assert not (base.parent / "more").exists()
    assert (base / WEIGHTS).read_bytes() == before


def test_an_average_is_a_whole_model_and_backends_need_one(base: Path) -> None:
    parts = [base.parent / "one", base.parent / "two"]
    nets = [weights_of(added_to(base, out, i).net) for i, out in enumerate(parts)]
    command = ["average", str(parts[0]), str(base.parent / "mean")]
    command += [word for part in parts for word in ("-c", str(part))]
    assert CliRunner().invoke(make_app(), command).exit_code == 0
    mean = weights_of(load(base.parent / "mean", device="cpu").net)
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (nets[0][name] + nets[1][name]) / 2)
    with pytest.raises(UserError, match=r"holds only what was added to.*heedful merge /"):
        optimize(load(parts[0], device="cpu"), parts[0], TEXTS)


def test_info_shows_the_base(base: Path) -> None:
    added_to(base, base.parent / "added")
    rows = [
        CliRunner().invoke(make_app(), ["info", str(path)]).output.splitlines()
        for path in (base, base.parent / "added")
    ]
    assert [[row.split()[1] for row in item if row.startswith("base ")] for item in rows] == [
        [],
        ["../base,"],
    ]
