"""Scales by layer: against passes of single rows and `backward`, and over checkpoints."""

import copy
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from backend_models import model_of
from encoder_runs import NET, tiny
from heedful import insight
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.evaluation.likelihood import batch_loss
from heedful.insight.notes import Note
from heedful.insight.run_views import _chart, views_of_run
from heedful.insight.scales import layer_of, weight_scales
from heedful.parts.tokens import Tokens
from heedful.run_scales import scales_of_run
from heedful.training.events import Evaluated, StepDone
from heedful.training.listeners import read_log

ROWS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]
NET2 = {"num_encoder_layers": 1, "num_decoder_layers": 1,
        **{key: NET[key] for key in ("d_model", "num_heads", "d_ff")}}  # fmt: skip
TEXTS = [f"the {color} {noun} runs" for color in ("red", "big", "old") for noun in ("dog", "cat")]
RUNS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "translation": (
        {"model": {"architecture": "vaswani2017", **NET2},
         "evaluation__decode_sentences": 1, "evaluation__final_beam_size": 1},
        [(text, text) for text in TEXTS] * 4,
    ),
    "language_modeling": (
        {"model": {"architecture": "gpt2", "d_model": 16, "num_heads": 2, "num_layers": 1},
         "objective": {"context": 8, "sample_tokens": 3}},
        TEXTS * 4,
    ),
    "classification": ({}, [(text, "dog" if "dog" in text else "cat") for text in TEXTS] * 4),
}  # fmt: skip


def tokens_of(rows: list[list[int]]) -> Tokens:
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[1] * (width - len(row))] for row in rows])
    return Tokens.from_ids(ids, torch.tensor([len(row) for row in rows]))


def batch_of(rows: list[list[int]], source: bool) -> Batch:
    """A padded batch whose targets are the ids themselves."""
    tokens = tokens_of(rows)
    places = tokens.real.flatten().nonzero()[:, 0]
    return Batch(
        tokens=tokens, targets=tokens.ids.flatten()[places], target_positions=places,
        source=tokens_of([row[::-1] for row in rows]) if source else None,
        indices=np.arange(len(rows)), num_tokens=len(places),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["vaswani2017", "gpt2", "bert"])
def test_scales_equal_those_of_rows_without_padding(name: str) -> None:
    net = model_of(name, **({"head": "mlm"} if name == "bert" else {})).net.double()
    is_pair, before = name == "vaswani2017", copy.deepcopy(net.state_dict())
    batch, more = batch_of(ROWS, is_pair), batch_of(ROWS[1:], is_pair)
    actual = insight.layer_scales(net, [batch, more])
    own = copy.deepcopy(net).eval()
    states: dict[str, list[torch.Tensor]] = {}
    rows = [*ROWS, *ROWS[1:]]
    count = sum(map(len, rows))
    for row in rows:  # one at a time: there is no padding
        with insight.watch(own, "*.embedding.state", "*.feedforward.state") as watched:
            (batch_loss(own, batch_of([row], is_pair)).loss / count).backward()
        for key, state in watched.items():
            states.setdefault(key, []).append(state[0])
    norms: dict[str, float] = {}
    for key, weight in own.named_parameters():
        assert weight.grad is not None
        layer = layer_of(key)
        norms[layer] = norms.get(layer, 0) + float(weight.grad.square().sum())
    assert actual.gradients == pytest.approx({k: v**0.5 for k, v in norms.items()}, rel=1e-6)
    scales = [torch.cat(parts).square().mean().sqrt().item() for parts in states.values()]
    assert [*actual.states.values()] == pytest.approx(scales, rel=1e-6)
    stack = "encoder" if name == "bert" else "decoder"
    assert {f"{stack} 0", f"{stack} 1"} <= actual.states.keys() & actual.gradients.keys()
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert all(weight.grad is None for weight in net.parameters())


def test_scales_of_weights_by_layer() -> None:
    tensors = {
        "encoder.blocks.0.a.weight": torch.full((2, 2), 3.0),
        "encoder.blocks.0.b.weight": torch.full((2, 4), 1.0),
        "embedding.weight": torch.ones(2, 2),
        "encoder.blocks.0.a.bias": torch.ones(9),
    }
    actual = weight_scales(tensors)
    assert actual == {"embedding": 1.0, "encoder 0": pytest.approx(((4 * 9 + 8) / 12) ** 0.5)}
    assert layer_of("decoder.final_norm.weight") == "decoder final_norm"
    order = ["src_embedding", "encoder 2", "encoder 10", "encoder final_norm", "tgt_embedding",
             "decoder position_bias", "decoder 0", "head"]  # fmt: skip
    assert insight.RunScales.create([1], [dict.fromkeys(sorted(order), 1.0)], []).layers == (
        *order,
    )


def test_long_curves_are_thinned_to_both_ends() -> None:
    for count in (1, 400, 401, 402, 1_234):
        points = [(step, float(step)) for step in range(count)] + [(count, math.nan)]
        [series] = _chart("loss", train=points)["series"]
        found = [step for step, _ in series["points"]]
        assert (found[0], found[-1]) == (0, count - 1)
        assert len(found) == count if count <= 400 else 150 < len(found) <= 401
        assert len({b - a for a, b in pairwise(found[:-1])}) <= 1, "evenly"
    assert _chart("loss", train=[], valid=[(1, math.inf)]) == {"name": "loss", "series": []}


@pytest.mark.parametrize("task", RUNS)
def test_scales_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    keys, rows = RUNS[task]
    folder = tmp_path / "run"
    recipe = tiny(task, data__valid_size=4, training__max_steps=6, training__evaluate_every=2,
                  training__average_checkpoints=3, **keys)  # fmt: skip
    heedful.train(recipe, folder, data=rows, progress=False)
    scales = scales_of_run(folder, "cpu")
    assert scales.steps == (2, 4, 6)
    assert scales.states is not None
    assert scales.gradients is not None
    shape = (3, len(scales.layers))
    assert scales.weights.shape == scales.states.shape == scales.gradients.shape == shape
    for table in (scales.weights, scales.states, scales.gradients):
        for column in table.T[np.isfinite(table).all(0)]:
            assert len(set(column)) == 3  # each row is of another checkpoint
    blocks = [index for index, layer in enumerate(scales.layers) if layer[-1].isdigit()]
    assert blocks
    for measured in (scales.weights, scales.states, scales.gradients):
        assert np.isfinite(measured[:, blocks]).all()
    views, notes = views_of_run(folder, scales)
    charts = {chart["name"]: chart for chart in views["training"]}
    assert {"loss", "scale_gradients", "scale_weights", "scale_states"} <= charts.keys()
    events = read_log(folder / "log.jsonl")
    steps = [event for event in events if isinstance(event, StepDone)]
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    for chart, series, expected in (
        ("loss", "train", [(e.step, e.nll) for e in steps]),
        ("loss", "valid", [(e.step, e.loss) for e in evaluations]),
        ("rate", "rate", [(e.step, e.learning_rate) for e in steps]),
        ("gradient", "gradient", [(e.step, e.grad_norm) for e in steps]),
    ):
        [found] = [own for own in charts[chart]["series"] if own["name"] == series]
        assert len(expected) > 2
        np.testing.assert_allclose(found["points"], expected, rtol=1e-5)
    last = charts["scale_gradients"]["series"][-1]
    assert last["name"] == 6
    finite = scales.gradients[-1][np.isfinite(scales.gradients[-1])]
    assert [y for _, y in last["points"]] == pytest.approx(finite, rel=1e-5)
    assert notes == []
    if task != "translation":
        return
    assert len(scales.plot().axes) == 3
    tables = {"weights": scales.weights[:2], "states": scales.states[:2]}
    two = replace(scales, steps=(2, 4), gradients=scales.gradients[:2], **tables)
    assert views_of_run(folder, two)[1] == [Note("note_checkpoints", (2,))]
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "none"))
    without = scales_of_run(folder, "cpu")
    assert without.states is without.gradients is None
    _, [note] = views_of_run(folder, without)
    assert "prepared data are no longer in the cache" in str(note)
    for path in (folder / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        scales_of_run(folder, "cpu")
