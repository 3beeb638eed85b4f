"""GPT-2 against transformers: logits, padding, both ways of the weights, the paper's sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.bundle import parameter_count
from heedful.zoo import gpt2
from hf_parity import (
    CLOSE,
    assert_round_trips,
    imported,
    padded,
    positions_of,
    random_hf,
    random_rows,
    transformers,
)

CONFIGS: list[dict[str, Any]] = [
    {"n_embd": 12, "n_head": 3, "n_layer": 2},
    {"n_embd": 10, "n_head": 5, "n_layer": 1, "n_inner": 7, "activation_function": "relu"},
    {"n_embd": 8, "n_head": 1, "n_layer": 3, "tie_word_embeddings": False},
    {"n_embd": 14, "n_head": 7, "n_layer": 2, "layer_norm_epsilon": 1e-3, "n_positions": 11},
]


def hf_model(keys: dict[str, Any], seed: int = 0) -> Any:
    config = transformers.GPT2Config(**{"vocab_size": 23, "n_positions": 16, **keys})
    return random_hf(transformers.GPT2LMHeadModel, config, seed)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_logits_with_either_padding(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    rows = random_rows(23, [7, 3, 11, 1], number)
    for side in ("right", "left"):
        ids, lengths, mask = padded(rows, side, pad_id=5)
        theirs = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
        ours = found.net(ids, lengths, padding_side=side)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@torch.no_grad()
def test_weights_go_both_ways(number: int, tmp_path: Path) -> None:
    model = hf_model(CONFIGS[number], number)
    found = imported(model, tmp_path)
    back = assert_round_trips(model, found, tmp_path, transformers.GPT2LMHeadModel)
    ids = torch.stack(random_rows(23, [9, 9], number))
    torch.testing.assert_close(back(ids).logits, model(ids).logits, **CLOSE)


@pytest.mark.parametrize(
    ("size", "millions"), [("small", 124.4), ("medium", 354.8), ("large", 774.0), ("xl", 1557.6)]
)
def test_the_sizes_have_the_published_parameters(size: str, millions: float) -> None:
    with torch.device("meta"):
        net = gpt2.build(gpt2.Config(**gpt2.SIZES[size]))
    assert parameter_count(net) / 1e6 == pytest.approx(millions, abs=0.1)
