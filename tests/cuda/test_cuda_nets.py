"""Nets on a GPU have the values and gradients that they have on the CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import DECODERS, tiny
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.residual import Dropout
from heedful.parts.tokens import Tokens
from heedful.training.step import LossNet
from heedful.zoo import ARCHITECTURES
from option_space import VOCAB
from trainers import batch_for

SIDES: tuple[Any, ...] = ("right", "left")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)


def without_dropout(net: Any) -> Any:
    for module in net.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
    return net


def batch_of(net: Any) -> Batch:
    """Padded rows; of texts, all real tokens are predicted."""
    batch = batch_for(net)
    if isinstance(net, EncoderDecoder):
        return batch
    assert batch.tokens.real is not None
    positions = batch.tokens.real.flatten().nonzero().flatten()
    return replace(batch, targets=positions % VOCAB, target_positions=positions)


def loss_and_gradients(net: Any, batch: Batch, device: str, **keys: Any) -> dict[str, Tensor]:
    loss_net = LossNet(net.to(device), batch_loss, **keys)
    loss_net.train().zero_grad()
    sums = loss_net(batch.to(device))
    sums.loss.backward()
    # Copies: `Module.to` moves the gradients in place.
    grads = {key: p.grad.cpu().clone() for key, p in net.named_parameters() if p.grad is not None}
    return grads | {"loss": sums.loss.detach().cpu(), "nll": sums.nll.cpu()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], within: float) -> None:
    assert set(actual) == set(expected)
    for key, value in expected.items():
        scale = value.abs().max().clamp_min(1e-30)
        torch.testing.assert_close(
            actual[key].double() / scale,
            value.double() / scale,
            rtol=0,
            atol=within,
            msg=lambda m, key=key: f"{key}: {m}",
        )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_and_gradients_equal_those_on_the_cpu(name: str, checkpointing: bool) -> None:
    """Padded rows, in fp64, where angles of positions are in fp32, and in fp32."""
    for dtype, within in ((torch.float64, 1e-5), (torch.float32, 1e-4)):
        net = without_dropout(tiny(name)).to(dtype)
        batch = batch_of(net)
        expected = loss_and_gradients(net, batch, "cpu")
        actual = loss_and_gradients(net, batch, "cuda", activation_checkpointing=checkpointing)
        assert_close(actual, expected, within)


@pytest.mark.parametrize("name", ["llama", "gemma3", "vaswani2017", "t5", "modernbert"])
def test_losses_in_bf16_are_near(name: str) -> None:
    net = without_dropout(tiny(name)).float()
    batch = batch_of(net)
    expected = loss_and_gradients(net, batch, "cpu")["nll"]
    with torch.autocast("cuda", torch.bfloat16):
        actual = loss_and_gradients(net, batch, "cuda")["nll"]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_states_of_padded_rows_equal_those_on_the_cpu(name: str) -> None:
    """Rows padded on either side, as of batches and of prompts."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (3, 9), generator=generator)
    lengths = torch.tensor([9, 4, 6])
    for side in SIDES[: 1 if isinstance(tiny(name), EncoderDecoder) else 2]:
        tokens = Tokens.from_ids(ids, lengths, side)
        results = []
        for device in ("cpu", "cuda"):
            net = tiny(name).to(device)
            own = tokens.to(device)
            states = (
                net.decode(own, memory=net.encode(own))
                if isinstance(net, EncoderDecoder)
                else net.decode(own)
            )
            results.append((states * (1 if own.real is None else own.real[..., None])).cpu())
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
