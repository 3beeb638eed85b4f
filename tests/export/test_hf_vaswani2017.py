"""Export of the Transformer of 2017 as Marian and PEGASUS: equal logits in transformers."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.export.hf import export_hf, import_hf
from heedful.pipelines import GenerationIds, ModelMetadata, open_net
from heedful.zoo import architecture
from heedful.zoo.saved import make_config
from hf_parity import CLOSE, randomized
from seq2seq_parity import heedful_logits, hf_outputs, random_pairs

LINES = ["the cat sat on the mat", "a dog runs in the park", "hello world and more"] * 20
TEXTS = ["the dog sat", "hello cat in the park and the world", "a"]
CLASSES = {"post": transformers.MarianMTModel, "pre": transformers.PegasusForConditionalGeneration}


def tokenizer_of(size: int) -> Tokenizer:
    return train_tokenizer(LINES, kind="bpe", vocab_size=size)


def random_translator(
    src: Tokenizer | None, tgt: Tokenizer | None, seed: int = 0, **keys: Any
) -> Any:
    """A random tiny translator whose attention matters more than its embeddings."""
    sizes = [30 if item is None else item.vocab_size for item in (src, tgt)]
    tiny = {"src_vocab_size": sizes[0], "tgt_vocab_size": sizes[1], "max_length": 40}
    tiny |= {"d_model": 12, "num_heads": 3, "num_encoder_layers": 1, "num_decoder_layers": 1}
    config: Any = make_config("vaswani2017", tiny | {"d_ff": 16} | keys)
    net = randomized(architecture("vaswani2017").build(config), seed)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith(("attention.sublayer.out.weight", "kv.weight")):
                weight.mul_(5)
    ids = GenerationIds() if src else GenerationIds(decoder_start_ids=(1,), eos_ids=(2,))
    metadata = ModelMetadata("vaswani2017", "translation", generation=ids)
    return open_net(net, config, metadata, src, tgt)


def any_config(placement: str, tying: str, seed: int) -> dict[str, Any]:
    """Sizes and choices of one configuration."""
    draw = random.Random(f"{placement} {tying} {seed}")
    heads = draw.choice([1, 3, 5])
    return {
        "norm_placement": placement,
        "tie_embeddings": tying,
        "num_heads": heads,
        "d_model": heads * draw.choice([3, 4, 7]),  # odd: a sine more than cosines
        "d_ff": draw.choice([8, 20]),
        "num_encoder_layers": draw.choice([1, 2]),
        "num_decoder_layers": draw.choice([1, 3]),
        "activation": draw.choice(["relu", "gelu", "gelu_tanh", "silu"]),
        "bias": draw.random() < 0.7,
        "scale_embeddings": draw.random() < 0.7,
        "attention_dropout": draw.choice([None, 0.2]),
    }


@pytest.mark.parametrize("tying", ["none", "decoder", "all"])
@pytest.mark.parametrize("placement", ["post", "pre"])
@torch.no_grad()
def test_transformers_gives_the_same_logits(placement: str, tying: str, tmp_path: Path) -> None:
    for seed, tokenizer in enumerate((tokenizer_of(40), None)):
        model = random_translator(tokenizer, tokenizer, seed, **any_config(placement, tying, seed))
        folder = tmp_path / str(seed)
        messages: list[str] = []
        export_hf(model, folder / "hf", on_notice=messages.append)
        assert messages[0].startswith(
            f"vaswani2017 is exported as {'marian' if placement == 'post' else 'pegasus'}"
        )
        auto, cls = transformers.AutoModelForSeq2SeqLM, CLASSES[placement]
        reference, report = auto.from_pretrained(folder / "hf", output_loading_info=True)
        assert type(reference) is cls
        assert not any(report.values()), report
        back = import_hf(folder / "hf", folder / "back")
        nets = (model.net, back.net, reference.eval())
        pairs = random_pairs(30, 30, "right", seed)
        real = pairs.tgt_mask.bool()
        ours, reread, hf_net = (net.double() for net in nets)  # their logits are large
        expected = heedful_logits(ours, pairs, "right")[real]
        assert expected.std() > 0.1
        torch.testing.assert_close(hf_outputs(hf_net, pairs).logits[real], expected, **CLOSE)
        torch.testing.assert_close(heedful_logits(reread, pairs, "right")[real], expected, **CLOSE)
        assert back.options() == model.options()
        assert back.ids == model.ids


@torch.no_grad()
def test_two_vocabularies_are_exported_as_marian(tmp_path: Path) -> None:
    src, tgt = tokenizer_of(40), tokenizer_of(33)
    model = random_translator(src, tgt, tie_embeddings="decoder")
    messages: list[str] = []
    export_hf(model, tmp_path / "hf", on_notice=messages.append)
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    read = transformers.AutoTokenizer.from_pretrained
    batch = read(tmp_path / "hf")(TEXTS, return_tensors="pt", padding=True)
    ids = reference.generate(**batch, num_beams=1, max_new_tokens=11)
    text = read(tmp_path / "hf/tokenizer_target").batch_decode(ids, skip_special_tokens=True)
    assert text == model.translate(TEXTS, beam_size=1, max_new_tokens=11)
    assert any("tokenizer_target/" in line for line in messages)
    back = import_hf(tmp_path / "hf", tmp_path / "back")
    assert back.src_tokenizer.encode(TEXTS[0]) == src.encode(TEXTS[0])
    assert back.tgt_tokenizer.encode(TEXTS[0]) == tgt.encode(TEXTS[0])


@pytest.mark.parametrize(
    ("keys", "message", "instead"),
    [
        ({"norm_placement": "output"}, "norm_placement output", "model.norm_placement=pre"),
        ({"norm_placement": "sandwich"}, "norm_placement sandwich", "model.norm_placement=pre"),
        ({"positions": "learned"}, "positions learned", "model.positions=sinusoidal"),
        ({"positions": "rotary"}, "positions rotary", "model.positions=sinusoidal"),
        ({"positions": "none"}, "positions none", "model.positions=sinusoidal"),
        ({"final_norm": True}, "final_norm true", "model.final_norm=false"),
        (
            {"norm_placement": "pre", "final_norm": False},
            "final_norm false",
            "model.final_norm=true",
        ),
        ({"norm_eps": 1e-6}, "norm_eps 1e-06", "model.norm_eps=1e-05"),
        (
            {"norm_placement": "pre", "tgt_vocab_size": 31, "tie_embeddings": "none"},
            "joint false",
            "tokenizer.joint=true",
        ),
        (
            {"norm_placement": "output", "positions": "none", "norm_eps": 1e-3},
            "model.norm_placement output, model.positions none, model.norm_eps 0.001",
            "model.norm_placement=pre model.positions=sinusoidal model.norm_eps=1e-05",
        ),
    ],
)
def test_unsupported_settings_are_refused_with_the_supported_ones(
    keys: dict[str, Any], message: str, instead: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        export_hf(random_translator(None, None, **keys), tmp_path / "hf")
    assert message in str(error.value)
    assert str(error.value).endswith(f"train it with {instead}")
    assert list(tmp_path.iterdir()) == []
