"""Adapters for peft and from it, whose logits are those of heedful."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heedful
from backend_models import model_of
from heedful.errors import UserError
from heedful.export.hf import export_hf
from heedful.export.peft import export_peft, import_peft
from heedful.models import LoRA
from heedful.models.adapters import lora_layers
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.zoo.names import trainable

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CASES = {
    "llama": {},
    "gpt2": {},  # whose format joins queries, keys and values
    "mistral": {},
    "t5": {},
    "bart": {},
    "bert": {"head": "classify", "num_labels": 2},
    "modernbert": {"head": "classify", "num_labels": 2},  # joins them and the gate
}
IDS = torch.tensor([[5, 9, 11, 7, 3], [6, 8, 10, 4, 2]])


def logits_of(net: nn.Module) -> Tensor:
    with torch.inference_mode():
        return net(IDS, IDS) if isinstance(net, EncoderDecoder) else net(IDS)


def hf_logits_of(net: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if net.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return net.eval()(input_ids=IDS, **more).logits


def base_in_both_formats(name: str, folder: Path) -> tuple[Any, Any]:
    """A base model at `folder/base`, and as a model of transformers."""
    model = model_of(name, **CASES[name])
    model.save(folder / "base")
    export_hf(model, folder / "hf")
    kind = "AutoModelForSequenceClassification" if "head" in CASES[name] else None
    kind = kind or ("AutoModelForSeq2SeqLM" if name in ("t5", "bart") else "AutoModelForCausalLM")
    return model, getattr(transformers, kind).from_pretrained(folder / "hf")


@pytest.mark.parametrize(
    ("name", "targets"),
    [*((name, ("*",)) for name in CASES), ("gpt2", ("q", "v")), ("llama", ("q", "v"))],
)
def test_peft_opens_an_exported_adapter_with_equal_logits(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model, hf_model = base_in_both_formats(name, tmp_path)
    plain = logits_of(model.net)
    trained = tuple(key for key in dict(model.net.named_parameters()) if key.startswith("head."))
    trained = trained if "head" in CASES[name] else ()
    model.add_adapter(LoRA(3, 5.0, targets=targets, trained=trained))
    torch.manual_seed(1)
    for weight in trainable(model.net).values():
        nn.init.normal_(weight, std=0.3)
    expected = logits_of(model.net)
    assert (expected - plain).abs().max() > 1e-2
    model.save(tmp_path / "adapted", base=tmp_path / "base")
    export_peft(tmp_path / "adapted", tmp_path / "peft")
    adapted = peft.PeftModel.from_pretrained(hf_model, tmp_path / "peft")
    torch.testing.assert_close(hf_logits_of(adapted), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits_of(heedful.load(tmp_path / "adapted", device="cpu").net),
        expected,
        rtol=1e-5,
        atol=1e-5,
    )
    again = import_peft(tmp_path / "peft", tmp_path / "again", base=tmp_path / "base")
    torch.testing.assert_close(logits_of(again.net), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 8}),
        ("llama", {"target_modules": "all-linear", "r": 4, "use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_fc"], "r": 4, "fan_in_fan_out": True}),
        (
            "llama",
            {
                "target_modules": ["q_proj", "k_proj", "down_proj"],
                "r": 4,
                "rank_pattern": {"q_proj": 2},
                "alpha_pattern": {"down_proj": 1.0},
            },
        ),
        ("bert", {"target_modules": ["query", "value"], "r": 2, "task_type": "SEQ_CLS"}),
        ("t5", {"target_modules": ["q", "v", "wo"], "r": 2, "task_type": "SEQ_2_SEQ_LM"}),
    ],
)
def test_adapters_of_peft_open_with_equal_logits(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    _, hf_model = base_in_both_formats(name, tmp_path)
    torch.manual_seed(2)
    adapted = peft.get_peft_model(hf_model, peft.LoraConfig(**settings))
    for key, weight in adapted.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            nn.init.normal_(weight, std=0.3)
    expected = hf_logits_of(adapted)
    adapted.save_pretrained(tmp_path / "peft")
    model = import_peft(tmp_path / "peft", tmp_path / "ours", base=tmp_path / "base")
    assert lora_layers(model.net)
    torch.testing.assert_close(logits_of(model.net), expected, rtol=1e-4, atol=1e-4)
    opened = heedful.load(tmp_path / "ours", device="cpu")
    torch.testing.assert_close(logits_of(opened.net), expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_lora_is_one_line(tmp_path: Path) -> None:
    _, hf_model = base_in_both_formats("llama", tmp_path)
    with pytest.raises(UserError, match=r"holds no adapter_config\.json"):
        import_peft(tmp_path / "hf", tmp_path / "out", base=tmp_path / "base")
    settings = peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    peft.get_peft_model(hf_model, settings).save_pretrained(tmp_path / "dora")
    with pytest.raises(UserError, match="use_dora is True; supported: False"):
        import_peft(tmp_path / "dora", tmp_path / "out", base=tmp_path / "base")
    with pytest.raises(UserError, match="has no adapter; export the whole model"):
        export_peft(tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_one_line(tmp_path: Path) -> None:
    _, hf_model = base_in_both_formats("llama", tmp_path)
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2)
    peft.get_peft_model(hf_model, settings).save_pretrained(tmp_path / "peft")
    model_of("gpt2").save(tmp_path / "gpt2")
    with pytest.raises(UserError, match="holds tensors that the base model does not have: model"):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "gpt2")
    model_of("llama", d_model=8).save(tmp_path / "small")
    with pytest.raises(UserError, match="the adapter is of another model"):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "small")
    assert not (tmp_path / "out").exists()
