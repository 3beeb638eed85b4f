"""FLOPs and memory of a step without data, against real steps of every architecture."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import compiled_nets
from architectures import ARCHITECTURES, SIZES, config_of, one_layer
from heedful.config import Training
from heedful.cost.batches import first_rows, full_batch, padded_tokens
from heedful.cost.flops import ProductCounter
from heedful.cost.parameters import active_parameters, parameters_by_part
from heedful.cost.timing import StepTimer
from heedful.cost.trace import (
    StepCost,
    StorageCounter,
    count_step,
    trace_step,
    with_random_weights,
)
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.kernels import library as kernels
from heedful.models.adapters import LoRA, add_lora, freeze
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.tokens import Tokens
from heedful.training import step
from heedful.training.step import LossNet
from heedful.zoo import architecture
from heedful.zoo.architectures import meta_net

LOSS = partial(batch_loss, label_smoothing=0.1)


def training(optimizer: str = "adam", **keys: Any) -> Training:
    return Training.model_validate(
        {"max_steps": 1, "schedule": {"learning_rate": 0.1}, "optimizer": {"name": optimizer}}
        | keys
    )


def batch_of(net: nn.Module, rows: int = 3, width: int = 9) -> Batch:
    """A padded batch; an encoder has a target at every third token."""
    generator = torch.Generator().manual_seed(0)

    def tokens(width: int) -> Tokens:
        ids = torch.randint(0, 10, (rows, width), generator=generator)
        return Tokens.from_ids(ids, width - torch.arange(rows) % 3)

    target = tokens(width)
    assert target.real is not None
    positions = target.real.flatten().nonzero().flatten()
    positions = positions[::3] if isinstance(net, EncoderOnly) else positions
    return Batch(
        tokens=target,
        source=tokens(width - 2) if isinstance(net, EncoderDecoder) else None,
        targets=torch.zeros(len(positions), dtype=torch.long),
        target_positions=positions,
        indices=np.arange(rows),
        num_tokens=rows * width,
    )


def net_of(name: str, **keys: Any) -> nn.Module:
    torch.manual_seed(0)
    return architecture(name).build(config_of(name, SIZES, keys))


def executed_flops(loss_net: LossNet, batch: Batch) -> int:
    with ProductCounter() as counter:
        loss_net.train()(batch).loss.backward()
    return counter.flops


def traced_flops(loss_net: LossNet, batch: Batch) -> int:
    """Of a step whose net is on the meta device."""
    cost = trace_step(loss_net, [batch], training(), "fp32")
    return cost.forward_flops + cost.backward_flops


# Those with modules or options that the others lack, from which steps are traced (`options_of` in
# tests/models/test_compiled.py); the rest run in `make test-benchmarks`.
DISTINCT = compiled_nets.NETS
# All layers are equal: one is traced; two in an architecture of each family, and where they differ.
ALIKE = ("roberta", "distilbert", "bart", "marian", "pegasus", "llama", "mistral", "qwen3")
ALIKE += ("mixtral", "gpt", "m2m100", "mbart", "qwen2", "xlm_roberta")
OF_MAKE_TEST = ("t5", "gemma3", "mixtral", "modernbert")  # one of each kind


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name in OF_MAKE_TEST:
        return []
    return [pytest.mark.slow if name in DISTINCT else pytest.mark.benchmarks]


@pytest.mark.parametrize(
    ("index", "name"),
    [pytest.param(index, name, marks=marks_of(name)) for index, name in enumerate(ARCHITECTURES)],
)
def test_flops_and_memory_are_those_of_a_real_step(index: int, name: str) -> None:
    """With activation checkpointing in every second architecture."""
    checkpointed, optimizer = (False, "muon") if index % 2 else (True, "adamw")
    settings = training(optimizer, ema_decay=0.9 if checkpointed else None)
    keys = one_layer(name) if name in ALIKE else {}
    net = net_of(name, **keys)
    batch = batch_of(net)
    loss_net = LossNet(net, LOSS, activation_checkpointing=checkpointed)
    with kernels.unused():  # plans count what torch allocates
        real = count_step(loss_net, [batch, batch], settings, "fp32")
    meta = meta_net(name, config_of(name, SIZES, keys), "model")
    loss_net = LossNet(meta, LOSS, activation_checkpointing=checkpointed)
    assert trace_step(loss_net, [batch, batch], settings, "fp32") == real
    assert parameters_by_part(meta)["total"] == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "keys", "width", "checkpointed"),
    [
        ("llama", {"num_kv_heads": 2, "tie_embeddings": True}, 9, False),
        # Blocks along the diagonal, which are built again.
        ("mistral", {"window": 5, "max_length": 300}, 290, False),
        ("mistral", {"window": 5, "max_length": 300}, 290, True),
        ("vaswani2017", {"dropout": 0.0, "norm_placement": "pre"}, 9, True),
        ("gpt2", {"dropout": 0.1}, 9, True),
        ("bert", {"head": "classify", "num_labels": 3}, 9, False),
        ("mixtral", {"num_experts": 3, "top_k": 2}, 9, True),
    ],
)
def test_flops_with_settings(
    name: str, keys: dict[str, Any], width: int, checkpointed: bool
) -> None:
    net = net_of(name, **keys)
    batch = batch_of(net, rows=2, width=width)
    loss_net = LossNet(net, LOSS, activation_checkpointing=checkpointed)
    meta = meta_net(name, config_of(name, SIZES, keys), "model")
    planned = LossNet(meta, LOSS, activation_checkpointing=checkpointed)
    assert traced_flops(planned, batch) == executed_flops(loss_net, batch)


def test_flops_of_frozen_nets_and_adapters() -> None:
    for patterns in ([], ["embedding"], ["blocks.0", "embedding"], ["encoder", "src_embedding"]):
        name = "vaswani2017" if "encoder" in patterns else "llama"
        keys = {"tie_embeddings": "none" if name == "vaswani2017" else False}
        net, meta = net_of(name, **keys), meta_net(name, config_of(name, SIZES, keys), "model")
        for own in (net, meta) if patterns else ():
            freeze(own, patterns, "training.freeze")
        batch = batch_of(net)
        planned = traced_flops(LossNet(meta, LOSS), batch)
        assert planned == executed_flops(LossNet(net, LOSS), batch), patterns
    keys = {"tie_embeddings": False}
    net, meta = net_of("llama", **keys), meta_net("llama", config_of("llama", SIZES, keys), "model")
    for own in (net, meta):
        add_lora(own, LoRA(2, 4.0, 0.0, ("q", "v", "down")))
    batch = batch_of(net)
    planned = traced_flops(LossNet(meta, LOSS), batch)
    assert planned == executed_flops(LossNet(net, LOSS), batch)


def test_activations_are_what_autograd_saves() -> None:
    """Of a real forward pass; the head's gradients, which the chunked loss keeps, are added."""
    net = net_of("llama", d_model=64, d_ff=256, head_dim=32, tie_embeddings=False)
    batch = batch_of(net, rows=8, width=40)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    loss_net = LossNet(net, LOSS).train()
    others = [*net.parameters(), *net.buffers(), batch.tokens.ids, batch.target_positions]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sums = loss_net(batch)
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    for tensor in others:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    del sums
    head = 4 * 64 * (batch.num_targets + int(str(SIZES["vocab_size"])))
    planned = count_step(loss_net, [batch], training(), "fp32").activations
    # A few tensors more live until the backward pass, such as the states before the head.
    assert planned / 1.1 < sum(sizes.values()) + head <= planned


def test_storages_are_counted_while_they_live() -> None:
    with StorageCounter() as counter:
        x = torch.zeros(10)
        y = x[2:]
        assert (counter.live, counter.peak) == (40, 40)
        z = torch.zeros(5, dtype=torch.int64)
        del x
        assert counter.live == 80
        del y, z
    assert (counter.live, counter.peak) == (0, 80)


def test_an_accelerator_keeps_no_attention_weights_and_calls_all_experts() -> None:
    net = net_of("gpt2", dropout=0.1)
    batch = batch_of(net, width=40)

    def activations(*, on_accelerator: bool) -> int:
        meta = meta_net("gpt2", config_of("gpt2", SIZES, {"dropout": 0.1}), "model")
        loss_net = LossNet(meta, LOSS)
        traced = trace_step(loss_net, [batch], training(), "bf16", on_accelerator=on_accelerator)
        return traced.activations

    weights = 2 * 2 * 3 * 40 * 40  # elements in two layers, two heads, three rows
    assert activations(on_accelerator=False) - activations(on_accelerator=True) >= 2 * weights
    batch = batch_of(net_of("mixtral"))
    flops = []
    for on_accelerator in (False, True):
        loss_net = LossNet(meta_net("mixtral", config_of("mixtral", SIZES, {}), "model"), LOSS)
        traced = trace_step(loss_net, [batch], training(), "bf16", on_accelerator=on_accelerator)
        flops.append(traced.forward_flops)
    assert flops[0] < flops[1]


def test_active_parameters_leave_out_experts() -> None:
    net = net_of("mixtral", num_experts=3, top_k=2)
    expert = 3 * 8 * 12  # matrices of a gated network
    total = sum(p.numel() for p in net.parameters())
    assert active_parameters(net) == total - 2 * expert  # two layers, one idle expert each
    assert active_parameters(net_of("llama")) == parameters_by_part(net_of("llama"))["total"]


def test_first_rows_of_a_batch() -> None:
    batch = full_batch(4, 6, source_width=5, targets_per_row=6)
    part = first_rows(batch, 2)
    assert padded_tokens(batch) == 4 * 11
    assert padded_tokens(part) == part.num_tokens == 2 * 11
    assert part.num_targets == 12
    assert int(part.target_positions.max()) < 12


def test_the_optimizers_state_is_counted() -> None:
    net = net_of("llama")
    count = sum(p.numel() for p in net.parameters())
    memory = {
        name: count_step(LossNet(net, LOSS), [batch_of(net)], training(name), "fp32")
        for name in ("adam", "muon")
    }
    assert memory["adam"].gradients == memory["adam"].weights == 4 * count
    steps = 4 * len([*net.parameters()])
    assert memory["adam"].optimizer_state == 8 * count + steps
    assert memory["muon"].optimizer_state < memory["adam"].optimizer_state
    assert isinstance(memory["adam"], StepCost)


@pytest.mark.parametrize("name", ["vaswani2017", "gemma3"])
def test_a_net_with_random_weights_takes_the_steps_of_the_planned_one(name: str) -> None:
    planned = meta_net(name, config_of(name, SIZES, {}), "model")
    net = with_random_weights(planned)
    shared = [len({id(p) for p in n.parameters()}) for n in (planned, net)]
    assert shared[0] == shared[1]  # tied embeddings stay tied
    timer = StepTimer(LossNet(net, LOSS), training(), "fp32", torch.device("cpu"))
    assert timer.take([batch_of(net)]) > 0
    parameters = [*net.parameters()]
    assert {id(p) for p in parameters} == {id(p) for p in timer.optimizer.state}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
    timer.clear()
    assert all(p.grad is None for p in net.parameters())


def test_steps_are_timed_as_a_run_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    monkeypatch.setattr(step, "keep_freed_memory", lambda: prepared.append("memory"))
    monkeypatch.setattr(step.kernels, "load", lambda: prepared.append("kernels"))
    monkeypatch.setattr(step.openmp, "watch", lambda: prepared.append("threads"))
    StepTimer(LossNet(net_of("gpt2"), LOSS), training(), "fp32", torch.device("cpu"))
    assert prepared == ["memory", "kernels", "threads"]
