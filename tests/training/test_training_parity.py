"""Parity of training: equal losses from equal weights and batches, over many steps.

Dropout is off, as its random numbers differ; everything else that a step depends on is heedful's on
one side and that of transformers and torch on the other.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.config import Optimizer, Schedule
from heedful.training.optimizer import make_optimizer
from heedful.training.schedules import make_schedule
from hf_parity import imported, random_hf, transformers

STEPS, WARMUP, PEAK, VOCAB = 25, 5, 3e-3, 31
EPS = 1e-4  # not torch's default, and large enough to change the steps
ONE = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
OTHER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "LlamaForCausalLM": (
        "LlamaConfig",
        {**OTHER, "intermediate_size": 40, "num_key_value_heads": 2},
    ),
    "BertForMaskedLM": (
        "BertConfig",
        {**OTHER, "intermediate_size": 40, "max_position_embeddings": 16, "pad_token_id": 0}
        | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_training_equals_that_of_torch_and_transformers(name: str, tmp_path: Path) -> None:
    config, settings = NETS[name]
    reference = random_hf(
        getattr(transformers, name), getattr(transformers, config)(**ONE, **settings)
    )
    ours = imported(reference, tmp_path / "theirs").net
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCAB, (STEPS, 4, 1), generator=generator)
    # There is something to learn; and no 0, whose row transformers does not train in BERT.
    batches = 1 + (starts + torch.arange(13)) % (VOCAB - 1)

    optimizer = make_optimizer(
        ours, Optimizer(name="adamw", betas=(0.9, 0.99), eps=EPS, weight_decay=0.1)
    )
    rate = make_schedule(
        Schedule(name="cosine", learning_rate=PEAK, warmup_steps=WARMUP, min_lr_ratio=0.1),
        d_model=16,
        max_steps=STEPS,
    )
    actual = losses(ours, ours, optimizer, rate, batches)

    decayed = [p for p in reference.parameters() if p.dim() > 1]
    others = [p for p in reference.parameters() if p.dim() <= 1]
    expected = losses(
        reference,
        lambda ids: reference(ids).logits,
        torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=PEAK,
            betas=(0.9, 0.99),
            eps=EPS,
        ),
        cosine,
        batches,
    )
    assert expected[-1] < 0.9 * expected[0]
    assert actual == pytest.approx(expected, rel=1e-4)


def losses(
    net: nn.Module,
    logits_of: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    rate: Callable[[int], float],
    batches: Tensor,
) -> list[float]:
    """The loss of every step, before the step."""
    net.train()
    actual = []
    for step, ids in enumerate(batches, 1):
        loss = F.cross_entropy(logits_of(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        actual.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return actual


def cosine(step: int) -> float:
    """By hand: a linear rise to the peak at WARMUP, half a cosine to a tenth at the last step."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2)
