"""M2M100 and NLLB against transformers: logits, padding, import and export, sizes."""

from typing import Any

from test_marian import ODD

from heedful.zoo.hf import HfDirectory, net_from_hf
from hf_parity import by_key, millions, transformers
from seq2seq_parity import BART_SIZES, BART_UNSUPPORTED, Seq2SeqCase, Seq2SeqParityTests, tied_to

SIZES: dict[str, Any] = BART_SIZES | {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
M2M100 = Seq2SeqCase(
    name="m2m100",
    hf_config=transformers.M2M100Config,
    hf_class=transformers.M2M100ForConditionalGeneration,
    base_class=transformers.M2M100Model,
    sizes=SIZES,
    configs=[
        {},
        ODD | {"d_model": 30, "activation_function": "gelu", "pad_token_id": 0},
    ],
    kept=("pad_token_id", "scale_embedding"),
    unsupported={
        message: keys
        for message, keys in BART_UNSUPPORTED.items()
        if keys.keys() & {"tie_word_embeddings", "is_decoder", "activation_function"}
    }
    | by_key(is_encoder_decoder=False)
    | {"pad_token_id is null": {"pad_token_id": None}},
    other_class="M2M100Encoder",
    invalid={"d_model must be even and at least 4, not 2": {"d_model": 2, "num_heads": 1}},
    published={
        "418m": millions(483.9),
        "1.2b": millions(1239.5),
        "nllb-600m": millions(615.1),
        "nllb-1.3b": millions(1370.6),
        "nllb-3.3b": millions(3344.9),
    },
    counted=transformers.M2M100ForConditionalGeneration,
    tied=tied_to("model.shared.weight", "model."),
)


class TestParity(Seq2SeqParityTests):
    case = M2M100


def test_dropped_layers_of_the_training_are_a_notice() -> None:
    """The published files have a probability of 0.05, with which heedful does not train."""
    model = M2M100.model(encoder_layerdrop=0.05)
    actual = net_from_hf(HfDirectory(model.config.to_dict(), {}, model.state_dict()), "here")
    assert actual.notices == ["not imported, it changes training only: encoder_layerdrop 0.05"]
