"""Mixtral against transformers: experts and their balance, import and export, sizes."""

from typing import Any

import pytest
import torch

from decoder_parity import HF_SIZES, TINY, DecoderCase, RotaryParityTests, random_net
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import batch_loss
from heedful.parts.experts import Experts, balance_loss, record_router_logits
from heedful.parts.tokens import Tokens
from heedful.training.step import LossNet
from hf_parity import by_key, imported, padded, random_rows, transformers

OURS = TINY | {"num_experts": 4, "d_ff": 8}  # what transformers joins: multiples of 4
MIXTRAL = DecoderCase(
    name="mixtral",
    hf_config=transformers.MixtralConfig,
    hf_class=transformers.MixtralForCausalLM,
    sizes=HF_SIZES | {"intermediate_size": 8, "num_local_experts": 4},
    configs=[
        {},
        {"num_experts_per_tok": 1, "tie_word_embeddings": True, "router_aux_loss_coef": 0.0},
        {
            "hidden_size": 20,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 3,
            "hidden_act": "gelu",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
        },
    ],
    ours=OURS,
    kept=("sliding_window", "router_aux_loss_coef"),
    missing_key_values={"head_dim": None, "max_length": 131072, "balance_weight": 0.001},
    unsupported=by_key(hidden_act="tanh", router_jitter_noise=0.1),
    own_dropouts=("dropout",),
    other_class="MixtralForSequenceClassification",
    invalid={"top_k 9 is above num_experts 8": {"top_k": 9}},
    published={"8x7b": 46_702_792_704, "8x22b": 140_620_634_112},
    counted=transformers.MixtralForCausalLM,
    tying={"tie_word_embeddings": True},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


class TestParity(RotaryParityTests):
    case = MIXTRAL


# The balance of experts


def experts_of(net: Any) -> list[Experts]:
    return [part for part in net.modules() if isinstance(part, Experts)]


def hf_loss(logits: list[torch.Tensor], top_k: int, mask: Any) -> torch.Tensor:
    function = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
    flat = tuple(logit.flatten(0, 1) for logit in logits)
    return function(flat, logits[0].size(-1), top_k, mask)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_the_balance_loss_equals_transformers(side: str | None, top_k: int) -> None:
    """Value and gradient, with padding and without."""
    lengths = torch.tensor([5, 2, 1]) if side else None
    tokens = Tokens.from_ids(torch.zeros(3, 5, dtype=torch.long), lengths, side or "right")
    mask = None if tokens.real is None else tokens.real.long()
    torch.manual_seed(0)
    logits = [torch.randn(3, 5, 4, requires_grad=True) for _ in range(3)]
    actual, expected = balance_loss(logits, top_k, tokens.real), hf_loss(logits, top_k, mask)
    torch.testing.assert_close(actual, expected)
    for ours, reference in zip(*(torch.autograd.grad(x, logits) for x in (actual, expected)),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(ours, reference)


def batch_of(ids: torch.Tensor, lengths: torch.Tensor) -> Batch:
    tokens = Tokens.from_ids(ids, lengths, "right")
    assert tokens.real is not None
    real = tokens.real.clone()
    real[:, 0] = False  # the first token of a row is predicted by nothing
    places = real.flatten().nonzero()[:, 0]
    return Batch(tokens=tokens, targets=ids.flatten()[places], target_positions=places - 1,
                 indices=torch.arange(len(ids)).numpy(), num_tokens=int(lengths.sum()))  # fmt: skip


def test_the_loss_of_a_training_step_equals_transformers(tmp_path: Any) -> None:
    """With its auxiliary loss, which likelihoods, evaluation and the net itself do not include."""
    model = MIXTRAL.model(output_router_logits=True, router_aux_loss_coef=0.5)
    net = imported(model, tmp_path).net
    ids, lengths, mask = padded(random_rows(23, [7, 9, 4]), "right")
    reference = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    batch = batch_of(ids, lengths)
    loss_net = LossNet(net, batch_loss)
    actual = loss_net(batch)
    torch.testing.assert_close(actual.loss / actual.tokens, reference.loss, rtol=1e-5, atol=1e-5)
    plain = batch_loss(net, batch)
    torch.testing.assert_close(actual.nll, plain.nll)
    expected = 0.5 * actual.tokens * reference.aux_loss
    torch.testing.assert_close(actual.loss - plain.loss, expected, rtol=1e-4, atol=1e-4)
    (actual.loss / actual.tokens).backward()
    reference.loss.backward()
    for layer, block in zip(model.model.layers, net.decoder.blocks, strict=True):
        router = block.feedforward.sublayer.router
        torch.testing.assert_close(router.weight.grad, layer.mlp.gate.weight.grad)
    assert all(item.collected is None for item in experts_of(net))  # nothing stays on the net
    without = imported(MIXTRAL.model(router_aux_loss_coef=0.0), tmp_path / "without").net
    assert torch.equal(LossNet(without, batch_loss)(batch).loss, batch_loss(without, batch).loss)


# Experts


@pytest.mark.parametrize("grad", [True, False])
def test_experts_are_called_with_their_tokens_only(grad: bool) -> None:
    """In training each has a gradient, possibly of zeros."""
    net, _ = random_net("mixtral", **OURS | {"num_experts": 8, "num_layers": 1})
    experts = net.decoder.blocks[0].feedforward.sublayer
    met: list[int] = []
    for expert in experts.experts:
        expert.register_forward_hook(lambda module, inputs, out: met.append(inputs[0].size(0)))
    ids = torch.stack(random_rows(19, [2]))
    with torch.set_grad_enabled(grad), record_router_logits([experts]) as logits:
        net(ids).sum()
        out = net(ids).sum()
    assert [logit.shape for logit in logits] == [(1, 2, 8)] * 2
    assert sum(met) == 2 * 2 * 2
    assert len(met) == (16 if grad else sum(1 for count in met if count))
    if grad:
        out.backward()
        assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_batch_without_tokens_has_logits_of_its_shape(shape: tuple[int, int], grad: bool) -> None:
    """As of nets without experts; no expert had an output to join."""
    net, _ = random_net("mixtral", **OURS)
    with torch.set_grad_enabled(grad):
        assert net(torch.zeros(shape, dtype=torch.long)).shape[:2] == shape


def test_calling_every_expert_with_all_tokens_gives_the_same_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a graph of fixed shapes; gradients included."""
    net, _ = random_net("mixtral", **OURS)
    ids = torch.stack(random_rows(19, [7, 7]))

    def found() -> list[torch.Tensor]:
        logits = net(ids)
        return [logits, *torch.autograd.grad(logits.square().sum(), list(net.parameters()))]

    eager = found()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for one, other in zip(found(), eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
