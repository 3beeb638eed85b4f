"""Training steps of each family, compiled, in a process without checked shapes, which cannot be.

`main` fails where a property does not hold. The graphs are traced and differentiated as for any
backend, and run by torch's own kernels (`aot_eager`).
"""

import copy
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

import heedful.run
from architectures import tiny
from encoder_runs import PreparedTask, assert_resumes, loss_net_of, recipe_of
from heedful.data import buckets
from heedful.data.buckets import BatchShape, pad_batch
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.parts import attend_flex, attention
from heedful.parts.tokens import Tokens
from heedful.tasks import start
from heedful.training.block_compiler import BlockCompiler
from heedful.training.events import StepDone
from heedful.training.listeners import read_log
from heedful.training.step import LossNet
from option_space import VOCAB

# Of each family, with a loss of its own, and with several texts in a row.
RUNS = ("translation", "masked_lm", "rdrop-classification", "joined-language_modeling")
NUM_SHAPES = 2  # of the batches of a run: each is a graph of every block
compiler = partial(BlockCompiler, backend="aot_eager")


def main(folder: Path) -> None:
    for name in RUNS:
        has_eager_gradients(name, new_folder(folder, name))
    mixtral_has_eager_gradients()
    packs_rows_by_flex_attention()
    samples_new_dropout_masks(new_folder(folder, "dropout"))
    with mock.patch.object(start, "BlockCompiler", side_effect=compiler) as replaced:
        runs_train_and_resume(folder)
    assert replaced.call_count == 5  # of every session but the eager one


def runs_train_and_resume(folder: Path) -> None:
    """Whole runs; with Inductor, the default of `BlockCompiler`, unless it is replaced."""
    trains_as_eager(new_folder(folder, "accumulation"))
    resumes(new_folder(folder, "resumed"))


def new_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def run_of(name: str, folder: Path, **changes: Any) -> PreparedTask:
    """A task with batches for compiled steps."""
    kind, _, task = name.rpartition("-")
    keys: dict[str, Any] = {"training__compile": True, "model__dropout": 0.0}
    keys |= {"training__batch_sentences": None, "training__batch_tokens": 64}
    keys |= {"training__r_drop": 1.0} if kind == "rdrop" else {}
    keys |= {"model__attention_dropout": 0.0} if task in ("masked_lm", "classification") else {}
    keys |= {"objective": {"context": 8, "isolate": False}} if kind == "joined" else {}
    keys["training__label_smoothing"] = 0.1
    if task == "translation":  # many shapes
        keys |= {"model__num_encoder_layers": 1, "model__num_decoder_layers": 1}
    return PreparedTask(recipe_of(task, folder, **(keys | changes)), folder / "data")


def gradients(loss_net: LossNet, batch: Batch) -> list[Tensor]:
    """Loss, likelihood and the gradient of every weight."""
    loss_net.zero_grad()
    sums = loss_net(batch)
    sums.loss.backward()
    return [
        sums.loss.detach(),
        sums.nll,
        *(p.grad for p in loss_net.parameters() if p.grad is not None),
    ]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for ours, reference in zip(actual, expected, strict=True):
        scale = reference.abs().max()
        torch.testing.assert_close(ours / scale, reference / scale, rtol=0, atol=1e-6)


@mock.patch.object(buckets, "MAX_SHAPES", NUM_SHAPES)
def has_eager_gradients(name: str, folder: Path) -> None:
    """In fp64, and few graphs: none is made in the second epoch."""
    run = run_of(name, folder)
    eager = loss_net_of(run).double().train()
    loss_net = copy.deepcopy(eager)
    compiling = compiler(loss_net.net)
    shapes = run.task.batch_shapes(run.data)
    assert len(shapes) <= NUM_SHAPES
    compiled_shapes: set[Any] = set()
    for item in (*run.plan_epoch(0), *run.plan_epoch(1)):
        batch = run.load_batch(item)
        padded = pad_batch(batch, shapes)
        source = () if padded.source is None else padded.source.ids.shape
        shape = (*padded.tokens.ids.shape, *source, padded.tokens.segments is None)
        stance: Any = "fail_on_recompile" if shape in compiled_shapes else "default"
        with torch.compiler.set_stance(stance), compiling.step(padded):
            actual = gradients(loss_net, padded)
        assert_same(actual, gradients(eager, batch))
        compiled_shapes.add(shape)
    assert len(compiled_shapes) <= len(shapes)


def mixtral_has_eager_gradients() -> None:
    """With the balance loss, which does not see the added rows."""
    net = tiny("mixtral", balance_weight=0.5)
    tokens = Tokens.from_ids(torch.randint(VOCAB, (3, 6)), torch.tensor([6, 4, 2]))
    positions = tokens.real.flatten().nonzero().flatten()
    batch = Batch(
        tokens=tokens,
        targets=torch.randint(VOCAB, positions.shape),
        target_positions=positions,
        indices=np.arange(3),
        num_tokens=len(positions),
    )
    eager = LossNet(net, batch_loss).train()
    loss_net = copy.deepcopy(eager)
    compiler(loss_net.net)
    actual = gradients(loss_net, pad_batch(batch, [BatchShape(rows=4, width=8)]))
    assert_same(actual, gradients(eager, batch))


def packs_rows_by_flex_attention() -> None:
    """As on a GPU, where attention is also in the graph; other texts compile nothing."""
    net = tiny("llama", head_dim=16, max_length=200)
    batches = []
    for lengths in ([100, 50, 20], [10, 150, 10]):
        segments = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
        ids = torch.randint(VOCAB, segments.shape)
        tokens = Tokens.from_ids(ids, torch.tensor([170 - len(batches)]), segments=segments)
        positions = torch.arange(100)
        targets = torch.randint(VOCAB, positions.shape)
        sizes: dict[str, Any] = {"indices": np.arange(1), "num_tokens": 170}
        batches.append(Batch(tokens=tokens, targets=targets, target_positions=positions, **sizes))
    loss_net = LossNet(net, batch_loss).train()
    expected = [[x.clone() for x in gradients(loss_net, batch)] for batch in batches]
    patched = {
        (attend_flex, "can_skip_blocks"): lambda spec, device: True,
        (attention, "_FUSED_WEIGHTS"): 0,
        (flex_attention, "_validate_device"): lambda *tensors: None,  # which needs a GPU
    }
    compiler(loss_net.net)
    with ExitStack() as stack:
        for (module, name), value in patched.items():
            stack.enter_context(mock.patch.object(module, name, value))
        for batch, own in zip(batches, expected, strict=True):
            stance: Any = "default" if batch is batches[0] else "fail_on_recompile"
            with torch.compiler.set_stance(stance):
                assert_same(gradients(loss_net, batch), own)


def samples_new_dropout_masks(folder: Path) -> None:
    """From torch's generator: equal for equal seeds, else other elements."""
    run = run_of("translation", folder, model__dropout=0.3)
    loss_net = loss_net_of(run).train()
    compiler(loss_net.net)
    batch = pad_batch(run.load_batch(run.plan_epoch(0)[0]), run.task.batch_shapes(run.data))
    losses = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        losses.append(gradients(loss_net, batch))
    assert_same(losses[0], losses[2])
    assert (losses[0][0] - losses[1][0]).abs() > 1e-3
    checkpointed = copy.deepcopy(loss_net)
    for stack in (checkpointed.net.encoder, checkpointed.net.decoder):
        stack.activation_checkpointing = True
    torch.manual_seed(1)
    assert_same(gradients(checkpointed, batch), losses[0])


def trains_as_eager(folder: Path) -> None:
    """Whole runs with accumulated gradients, whose last step has fewer batches than others."""
    losses = []
    for is_compiled in (False, True):
        recipe = recipe_of(
            "language_modeling",
            folder,
            training__compile=is_compiled,
            training__gradient_accumulation=2,
            model__dropout=0.0,
        )
        out = folder / f"compiled-{is_compiled}"
        heedful.run.train(recipe, out)
        events = read_log(out / "log.jsonl")
        losses.append([event.loss for event in events if isinstance(event, StepDone)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(losses[0]) > 5


def resumes(folder: Path) -> None:
    """Bit-equal to an uninterrupted run, dropout included."""
    recipe = recipe_of(
        "language_modeling", folder, training__compile=True, training__gradient_accumulation=2
    )
    assert_resumes(recipe, folder, ["scores.json"])
