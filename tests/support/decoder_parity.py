"""Parity tests of all decoder-only models."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.zoo import architecture
from heedful.zoo.hf import ImportedNet, net_from_hf, net_to_hf, read_hf_directory
from heedful.zoo.rotary import to_layout
from heedful.zoo.saved import make_config
from hf_parity import (
    CLOSE,
    Case,
    ParityTests,
    assert_initialized,
    assert_same_net,
    exported,
    imported,
    random_rows,
    randomized,
)
from hf_parity import assert_same_outputs as assert_same_logits

# Of LLaMA and its descendants: keys of a tiny config of transformers, and of one of heedful.
HF_SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "intermediate_size": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40,
}
TINY: dict[str, Any] = {
    "vocab_size": 19,
    "d_model": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": None,
    "num_layers": 2,
    "d_ff": 5,
    "max_length": 32,
}


@dataclass(frozen=True, kw_only=True)
class DecoderCase(Case):
    """A decoder-only architecture to test.

    Args:
        ours: keys of our Config for a tiny net with untied embeddings.
        by_rule: values in a file for keys of `ours` that are None.
        shrinks: new weights that end a residual branch are smaller.
    """

    ours: dict[str, Any]
    by_rule: dict[str, Any] = field(default_factory=dict)
    shrinks: bool = True


class DecoderParityTests(ParityTests):
    case: DecoderCase

    def test_a_file_without_a_head_is_read_if_embeddings_are_tied(self, tmp_path: Path) -> None:
        model = self.case.model(**self.case.tying)
        assert model.base_model is not model
        self.assert_same(model, imported(model.base_model, tmp_path).net)

    @torch.no_grad()
    def test_an_exported_net_equals_ours_in_transformers(self, tmp_path: Path) -> None:
        """Also for sizes with a default rule."""
        net, config = random_net(self.case.name, **self.case.ours)
        model = exported(ImportedNet(self.case.name, config, net, []), tmp_path, self.case.hf_class)
        assert_same_logits(model, net, random_rows(net.head.out.weight.size(0), [12, 5]))
        again = net_from_hf(read_hf_directory(tmp_path), "file")
        assert again.config == replace(config, **self.case.by_rule)
        assert_same_net(again.net, net)

    def test_initial_weights_keep_the_scale_of_the_residual_stream(self) -> None:
        """N(0, 0.02²), from GPT-2 on less by √(2L) where a branch ends; norms are the identity."""
        torch.manual_seed(0)
        keys = self.case.ours | {
            "vocab_size": 99,
            "d_model": 96,
            "d_ff": 99,
            "num_layers": 2,
        }
        net = self.case.architecture.build(make_config(self.case.name, keys))
        assert_initialized(net, 0.02, 0.02 / 2 if self.case.shrinks else None)


class RotaryParityTests(DecoderParityTests):
    """LLaMA and its descendants."""

    @pytest.mark.parametrize("bias", [False, True])
    @torch.no_grad()
    def test_an_interleaved_layout_is_converted_to_half(self, bias: bool, tmp_path: Path) -> None:
        """The rows of query and key change places, those of the value do not; so do their norms'.

        Logits are the same; without the change they are not.
        """
        name, fields = self.case.name, self.case.architecture.config.__dataclass_fields__
        keys = self.case.ours | {"d_model": 32, "rope_layout": "interleaved"}
        keys |= {"attention_bias": bias} if "attention_bias" in fields else {}
        net, config = random_net(name, **keys)
        with pytest.raises(UserError, match=r"rope_layout interleaved; .*rotary\.to_layout"):
            net_to_hf(name, config, net)
        before = {name: weight.clone() for name, weight in net.named_parameters()}
        half, changed = to_layout(net, config, "half")
        assert changed == replace(config, rope_layout="half")
        ids = torch.stack(random_rows(19, [12]))
        torch.testing.assert_close(half(ids), net(ids), **CLOSE)
        model = exported(ImportedNet(name, changed, half, []), tmp_path, self.case.hf_class)
        assert_same_logits(model, net, random_rows(19, [12, 5, 9]))
        assert all(torch.equal(weight, before[name]) for name, weight in net.named_parameters())
        unchanged = self.case.architecture.build(changed).eval()
        unchanged.load_state_dict(net.state_dict())
        assert (unchanged(ids) - net(ids)).abs().max() > 1e-2
        assert to_layout(half, changed, "half") == (half, changed)


def random_net(name: str, seed: int = 0, **keys: Any) -> tuple[DecoderOnly, Any]:
    """A heedful net in eval mode, with no weight at its initial value, and its Config."""
    config = make_config(name, keys)
    return randomized(architecture(name).build(config), seed), config
