"""Parity tests of all encoder-decoder models: pairs of texts, padded on either side."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import Tokens
from heedful.zoo.hf import HfDirectory, net_from_hf
from hf_parity import CLOSE, Case, ParityTests, by_key, imported, padded, random_rows

SOURCE_LENGTHS = [7, 3, 11, 1]
TARGET_LENGTHS = [5, 9, 2, 1]

# Of BART and Marian, which have the same file format.
BART_UNSUPPORTED = by_key(
    tie_word_embeddings=False,
    encoder_layerdrop=0.1,
    decoder_layerdrop=0.1,
    is_decoder=True,
    is_encoder_decoder=False,
    normalize_before=True,
    add_final_layer_norm=True,
    activation_function="tanh",
)
BART_SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 12,
}


def tied_to(stored: str, prefix: str = "") -> dict[str, str]:
    """Names in older files of the matrix that source, target and output share."""
    both = (f"{prefix}{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    return dict.fromkeys([*both, "lm_head.weight"], stored)


@dataclass(frozen=True, kw_only=True)
class Seq2SeqCase(Case):
    """An encoder-decoder architecture to test.

    Args:
        base_class: class of transformers without a head.
        base_configs: as `configs`, for models without a head.
    """

    base_class: Any
    base_configs: tuple[dict[str, Any], ...] = ({},)


class Seq2SeqParityTests(ParityTests):
    case: Seq2SeqCase

    def assert_same(self, model: Any, net: Any, seed: int = 0) -> None:
        assert_same_logits(model, net, seed)

    @torch.no_grad()
    def test_a_base_models_file_is_read(self, tmp_path: Path) -> None:
        for number, keys in enumerate(self.case.base_configs):
            model = self.case.model(self.case.base_class, **keys)
            actual = imported(model, tmp_path / str(number))
            pairs = pairs_for(actual.net, "right")
            real = pairs.tgt_mask.bool()
            reference = hf_outputs(model, pairs).last_hidden_state[real]
            ours = actual.net.states(
                Tokens.from_ids(pairs.src, pairs.src_lengths),
                Tokens.from_ids(pairs.tgt, pairs.tgt_lengths),
            )
            torch.testing.assert_close(ours[real], reference, **CLOSE)


class BartParityTests(Seq2SeqParityTests):
    """BART and Marian."""

    @torch.no_grad()
    def test_a_file_without_a_bias_of_the_logits_is_read(self) -> None:
        model = self.case.model()
        model.final_logits_bias.zero_()
        tensors = {k: v for k, v in model.state_dict().items() if k != "final_logits_bias"}
        actual = net_from_hf(HfDirectory(model.config.to_dict(), {}, tensors), "here")
        assert actual.notices == ["here lacks head.out.bias: left as initialized"]
        assert not actual.net.head.out.bias.any()
        assert_same_logits(model, actual.net)


class Pairs(NamedTuple):
    """Sources and targets padded on one side, their lengths, and transformers' masks."""

    src: Tensor
    tgt: Tensor
    src_lengths: Tensor
    tgt_lengths: Tensor
    src_mask: Tensor
    tgt_mask: Tensor


def random_pairs(src_vocab: int, tgt_vocab: int, side: str, seed: int = 0) -> Pairs:
    """Random pairs of texts, equal for either padding side.

    Without the ids 0 and 1, which are padding where positions are counted by it (M2M100).
    """
    sources = random_rows(src_vocab, SOURCE_LENGTHS, seed, low=2)
    targets = random_rows(tgt_vocab, TARGET_LENGTHS, seed + 1, low=2)
    src, src_lengths, src_mask = padded(sources, side, pad_id=5)
    tgt, tgt_lengths, tgt_mask = padded(targets, side, pad_id=5)
    return Pairs(src, tgt, src_lengths, tgt_lengths, src_mask, tgt_mask)


def pairs_for(net: EncoderDecoder, side: str, seed: int = 0) -> Pairs:
    """`random_pairs` for the vocabularies of a net."""
    both = (net.src_embedding, net.tgt_embedding)
    return random_pairs(*(part.tokens.num_embeddings for part in both), side, seed)


def heedful_logits(net: EncoderDecoder, pairs: Pairs, side: Any) -> Tensor:
    return net(pairs.src, pairs.tgt, pairs.src_lengths, pairs.tgt_lengths, padding_side=side)


def hf_outputs(model: Any, pairs: Pairs) -> Any:
    return model(
        input_ids=pairs.src,
        attention_mask=pairs.src_mask,
        decoder_input_ids=pairs.tgt,
        decoder_attention_mask=pairs.tgt_mask,
        use_cache=False,
    )


def assert_same_logits(model: Any, net: EncoderDecoder, seed: int = 0) -> None:
    """Logits are equal at every real target position, padded on either side in heedful.

    In transformers pairs are padded on the right: left padding shifts added positions.
    """
    right = pairs_for(net, "right", seed)
    reference = hf_outputs(model, right).logits[right.tgt_mask.bool()]
    assert reference.std() > 0.1
    for side in ("right", "left"):
        pairs = pairs_for(net, side, seed)
        ours = heedful_logits(net, pairs, side)[pairs.tgt_mask.bool()]
        torch.testing.assert_close(ours, reference, **CLOSE)


def random_bias(model: Any, keys: dict[str, Any]) -> None:
    """On the logits, where a model has any."""
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
