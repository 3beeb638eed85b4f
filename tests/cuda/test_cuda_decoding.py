"""Searches on a GPU have the outputs of those on the CPU, with recorded steps and without."""

from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from architectures import DECODERS
from backend_models import TEXTS, model_of
from heedful.backends.base import Settings
from heedful.backends.torch import captured

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
ROWS = [[5, 6, 7, 8], [9, 4], [6]]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"beam_size": 1},
    "beams": {"beam_size": 3, "num_return": 2},
    "long": {"beam_size": 2, "max_new_tokens": 40},
}


def on_gpu(name: str, *, records: bool) -> Any:
    model = model_of(name)
    model.net.to("cuda")
    model.settings = Settings(records_steps=records)
    return model


@pytest.mark.parametrize("records", [False, True], ids=["plain", "recorded"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", DECODERS)
def test_outputs_equal_those_on_the_cpu(name: str, options: dict[str, Any], records: bool) -> None:
    options = {"max_new_tokens": 20} | options
    expected = model_of(name).generate(ROWS, **options, return_details=True)
    actual = on_gpu(name, records=records).generate(ROWS, **options, return_details=True)
    for one, other in zip(actual, expected, strict=True):
        assert [o.ids for o in one] == [o.ids for o in other]
        assert [o.score for o in one] == pytest.approx([o.score for o in other], rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "marian", "t5"])
def test_steps_are_recorded_in_graphs_and_samples_stay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []
    record = captured.record_on_cuda
    monkeypatch.setattr(
        captured, "record_on_cuda", lambda run: graphs.append(record(run)) or graphs[-1]
    )
    options = {"beam_size": 1, "temperature": 1.0, "num_return": 2, "seed": 3}
    outputs = [
        on_gpu(name, records=records).generate(ROWS, **options, max_new_tokens=24)
        for records in (False, True)
    ]
    assert outputs[0] == outputs[1]
    assert graphs


@pytest.mark.parametrize("name", ["marian", "gpt2", "bert"])
def test_a_saved_model_answers_on_the_gpu_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Scores, embeddings and texts of the public methods."""
    model_of(name).save(tmp_path / "model")
    cpu, gpu = (heedful.load(tmp_path / "model", device=d) for d in ("cpu", "cuda"))
    assert gpu.device.type == "cuda"
    if name == "marian":
        assert gpu.translate(TEXTS) == cpu.translate(TEXTS)
        scores = [[*model.score(TEXTS, TEXTS)] for model in (gpu, cpu)]
    elif name == "gpt2":
        assert gpu.generate(TEXTS, max_new_tokens=8) == cpu.generate(TEXTS, max_new_tokens=8)
        scores = [[*model.score(TEXTS)] for model in (gpu, cpu)]
    else:
        scores = [model.embed(TEXTS).flatten().tolist() for model in (gpu, cpu)]
    values = [[getattr(s, "log_prob", s) for s in item] for item in scores]
    assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)
