"""What the parity tests of all decoder-only models share."""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from heedful.models.decoder_only import DecoderOnly
from heedful.zoo import architecture
from heedful.zoo.hf import config_keys_from_hf
from heedful.zoo.saved import make_config
from hf_parity import CLOSE, padded, positions_of, random_rows


@torch.no_grad()
def assert_same_logits(model: Any, net: Any, rows: list[Tensor], pad_id: int = 0) -> None:
    """Our net says what theirs says at every real token, with padding on either side."""
    for side in ("right", "left"):
        ids, lengths, mask = padded(rows, side, pad_id)
        theirs = model(ids, attention_mask=mask, position_ids=positions_of(mask)).logits
        ours = net(ids, lengths, padding_side=side)
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], **CLOSE)


@torch.no_grad()
def assert_cached_is_uncached(
    net: DecoderOnly, lengths: list[int], chunks: list[int], seed: int = 0
) -> None:
    """Left-padded rows in steps of these sizes give what they give at once, and padded right."""
    assert max(lengths) == sum(chunks)
    rows = random_rows(net.embedding.tokens.num_embeddings, lengths, seed)
    ids, sizes, mask = padded(rows, "left")
    cache = net.start(len(rows), capacity=ids.size(1), starts=ids.size(1) - sizes)
    ends = accumulate(chunks, initial=0)
    stepped = [net.step(ids[:, start:end], cache) for start, end in pairwise(ends)]
    logits = torch.cat(stepped, dim=1)[mask.bool()]
    torch.testing.assert_close(logits, net(ids, sizes, padding_side="left")[mask.bool()], **CLOSE)
    ids, sizes, mask = padded(rows, "right")
    torch.testing.assert_close(logits, net(ids, sizes)[mask.bool()], **CLOSE)


def random_net(name: str, seed: int = 0, **keys: Any) -> tuple[DecoderOnly, Any]:
    """A net of ours in eval mode, no weight as its initialisation left it, and its Config."""
    config = make_config(name, keys)
    torch.manual_seed(seed)
    net: DecoderOnly = architecture(name).build(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return net, config


def read_config(name: str, content: dict[str, Any], **keys: object) -> Any:
    """Our Config of a `config.json`."""
    found = config_keys_from_hf(architecture(name).HF, content, "config.json")
    return make_config(name, found | keys, "config.json")
