"""Column-major weights: equal values, outputs and tying."""

from pathlib import Path

import pytest
import torch
from torch import nn

import heedful
from backend_models import model_of
from heedful.parts.helpers import make_weights_column_major
from heedful.zoo import vaswani2017


def test_column_major_weights_keep_outputs_and_tied_parameters() -> None:
    config = vaswani2017.Config(
        src_vocab_size=11, tgt_vocab_size=11, d_model=8, num_heads=2, d_ff=12,
        num_encoder_layers=1, num_decoder_layers=1, tie_embeddings="all",
    )  # fmt: skip
    net = vaswani2017.build(config).eval()
    src, tgt = torch.randint(4, 11, (3, 5)), torch.randint(4, 11, (3, 4))
    before, names = net(src, tgt), {name: value.clone() for name, value in net.named_parameters()}
    make_weights_column_major(net)
    linears = [module for module in net.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(module.weight.t().is_contiguous() for module in linears)
    assert {name for name, _ in net.named_parameters()} == set(names)
    for name, value in net.named_parameters():
        assert torch.equal(value, names[name]), name
    torch.testing.assert_close(net(src, tgt), before, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_the_layout_of_a_loaded_net_follows_from_its_final_dtype(
    tmp_path: Path, precision: str
) -> None:
    model_of("vaswani2017").save(tmp_path)
    net = heedful.load(tmp_path, device="cpu", backend="eager", precision=precision).net
    weights = [module.weight for module in net.modules() if isinstance(module, nn.Linear)]
    if precision == "bfloat16":
        assert all(weight.is_contiguous() for weight in weights)
    else:
        assert all(weight.t().is_contiguous() for weight in weights)
