"""A net that is opened or imported is built without drawing weights that are then overwritten."""

from typing import Any

import pytest
import torch

from heedful.zoo import architecture
from heedful.zoo.saved import undrawn_net
from parity_cases import CASES


def tables(net: Any) -> dict[str, torch.Tensor]:
    """All tensors of a net that are no parameters, buffers or not."""
    return {
        f"{path}.{name}": value
        for path, module in net.named_modules()
        for name, value in {**vars(module), **module._buffers}.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("name", CASES)
def test_trap_37_nothing_is_drawn_and_every_table_is_there(name: str) -> None:
    case = CASES[name]
    config = case.read(**case.hf_config(**case.sizes).to_dict())
    before = torch.get_rng_state()
    net = undrawn_net(name, config)
    assert torch.equal(torch.get_rng_state(), before)
    drawn = architecture(name).build(config)
    assert not torch.equal(torch.get_rng_state(), before)
    ours, theirs = tables(net), tables(drawn)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    tied = [list(dict(each.named_parameters())) for each in (net, drawn)]
    assert tied[0] == tied[1]
    assert all(parameter.isfinite().all() for parameter in net.parameters())
