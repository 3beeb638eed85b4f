"""Commands, checkpoints, batches of the server and Muon on a GPU, compared with the CPU."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_models import TEXTS, model_of
from commands import write_recipe
from encoder_runs import Stop, StopAt, recipe_of
from heedful.cli import main
from heedful.run import train
from heedful.training import optimizer as optimizers
from heedful.training.events import Evaluated, StepDone
from heedful.training.listeners import read_log

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
MUON: dict[str, Any] = {"training__optimizer": {"name": "muon"}, "model__dropout": 0.0}


def losses_in(folder: Path) -> list[float]:
    return [event.loss for event in read_log(folder / "log.jsonl") if isinstance(event, StepDone)]


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_continues_on_the_other_device(first: str, then: str, tmp_path: Path) -> None:
    """With the state of Adam and of the moving average, without dropout.

    Weights are not compared: Adam moves those without a gradient, as biases of keys, by rounding.
    """
    keys = {"model__dropout": 0.0, "training__ema_decay": 0.9}
    recipe = recipe_of("translation", tmp_path, training__device="cpu", **keys)
    train(recipe, tmp_path / "whole")
    moved = tmp_path / "moved"
    with pytest.raises(Stop):
        train(
            recipe_of("translation", tmp_path, training__device=first, **keys),
            moved,
            on_event=StopAt(6),
        )
    recipe = recipe_of("translation", tmp_path, training__device=then, **keys)
    train(recipe, moved, resume=True, changes=["training.device"])
    assert losses_in(moved) == pytest.approx(losses_in(tmp_path / "whole"), rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_muon_takes_the_steps_of_a_cpu(precision: str, tmp_path: Path) -> None:
    cpu = recipe_of("translation", tmp_path, training__device="cpu", **MUON)
    train(cpu, tmp_path / "cpu")
    keys = {"training__device": "cuda", "training__precision": precision}
    train(recipe_of("translation", tmp_path, **keys, **MUON), tmp_path / "gpu")
    expected = losses_in(tmp_path / "cpu")
    assert losses_in(tmp_path / "gpu") == pytest.approx(expected, rel=0.03)


def test_stacked_updates_of_muon_are_those_of_each_matrix() -> None:
    torch.manual_seed(0)
    for shape in ((7, 40, 16), (3, 16, 40)):
        matrices = torch.randn(shape, device="cuda")
        each = torch.stack([optimizers._orthogonal(matrix) for matrix in matrices])
        torch.testing.assert_close(optimizers._orthogonal(matrices), each, rtol=0, atol=1e-4)
    parameters = [torch.nn.Parameter(torch.randn(4, 6, device="cuda")) for _ in range(5)]
    for parameter in parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    assert [len(stack) for stack in optimizers._stacks(parameters)] == [4]


@pytest.mark.parametrize("precision", ["auto", "fp16"])
def test_commands_train_translate_and_evaluate(
    precision: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The outputs on the GPU are those on the CPU."""
    recipe = write_recipe(
        tmp_path / "recipe.yaml", training__device="auto", training__precision=precision
    )
    call(monkeypatch, "train", recipe, "--out", tmp_path / "run")
    events = read_log(tmp_path / "run" / "log.jsonl")
    assert any(isinstance(event, Evaluated) for event in events)
    assert "on cuda" in "".join(capfd.readouterr())
    outputs = []
    for device in ("cpu", "cuda"):
        call(monkeypatch, "translate", tmp_path / "run", "a b c", "--device", device)
        outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1]


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """A command in this process."""
    monkeypatch.setattr(sys, "argv", ["heedful", *map(str, arguments)])
    with suppress(SystemExit):  # with another code no output is written
        main()


def take_turn(batch: Any) -> None:
    batch.remove([output for output in batch.outputs if output.reason])
    if batch.outputs:
        batch.step()


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_continuous_batches_on_the_gpu_have_the_outputs_of_the_cpu(name: str) -> None:
    """In fp64, so that rounding does not decide between two tokens."""
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    from heedful.serve.batches import call_all
    from heedful.serve.continuous import ContinuousBatch
    from heedful.serve.outputs import GenerationJob

    cpu, gpu = model_of(name), model_of(name)
    cpu.net.double()
    gpu.net.double().to("cuda")
    rows = [gpu.tokenizer.encode(text) for text in TEXTS]
    options: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 5}, {"top_k": 3, "seed": 6}]
    batch = ContinuousBatch(gpu.eager, 1_000_000, call_all, prefix_tokens=100)
    opened = []
    for number, row in enumerate(rows * len(options)):
        own = {"beam_size": 1, "max_new_tokens": 12, **options[number % len(options)]}
        output = batch.open(GenerationJob([row], gpu.request([row], **own)), 0)
        opened.append((row, own, output))
        batch.begin([output])
        take_turn(batch)
    while batch.outputs:
        take_turn(batch)
    for row, own, output in opened:
        [[expected]] = cpu.generate([row], return_details=True, **own)
        assert output.ids == expected.ids


@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_outputs_in_bf16_have_likely_tokens(name: str) -> None:
    """Every greedy token of the GPU in bf16 is nearly the most probable one in fp32."""
    gpu = model_of(name)
    gpu.net.to("cuda", torch.bfloat16)
    options: dict[str, Any] = {"beam_size": 1, "max_new_tokens": 12, "return_details": True}
    exact = model_of(name).generate([[5, 6, 7, 8], [9, 4]], **options)
    for one, other in zip(gpu.generate([[5, 6, 7, 8], [9, 4]], **options), exact, strict=True):
        assert one[0].score == pytest.approx(other[0].score, rel=0.1)
