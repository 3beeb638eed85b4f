"""`torch.export` of whole nets with lengths, for batches and widths of any size."""

from typing import Any

import pytest
import torch

from architectures import tiny
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.zoo import ARCHITECTURES
from option_space import EXACT, VOCAB

ROWS, WIDTH = torch.export.Dim.AUTO, torch.export.Dim.AUTO


def inputs(net: Any, rows: int, width: int) -> tuple[Any, ...]:
    """Random ids and lengths, with an empty row, as arguments of `net`."""
    lengths = torch.randint(width + 1, (rows,))
    lengths[0], lengths[-1] = width, 0
    ids = torch.randint(VOCAB, (rows, width))
    if isinstance(net, EncoderDecoder):
        return torch.randint(VOCAB, (rows, width)), ids, lengths, lengths
    return ids, lengths


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_exported_net_accepts_other_batch_sizes(name: str) -> None:
    net = tiny(name)
    torch.manual_seed(0)
    example = inputs(net, 3, 6)
    shapes = tuple({0: ROWS, 1: WIDTH} if item.dim() == 2 else {0: ROWS} for item in example)
    exported = torch.export.export(net, example, dynamic_shapes=shapes).module()
    for rows, width in ((3, 6), (5, 9), (2, 4)):
        other = inputs(net, rows, width)
        torch.testing.assert_close(exported(*other), net(*other), **EXACT)
