"""Adapters for peft and from it, whose logits are those of heedful."""

import dataclasses
import json
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
    "distilbert": {"head": "classify", "num_labels": 2},  # has two modules of the head
}
# Bases with one matrix for embeddings and output, and the modules of it in the format.
TIED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "tied llama": ("llama", {"tie_embeddings": True}, ("model.embed_tokens", "lm_head")),
    "gpt2": ("gpt2", {}, ("transformer.wte", "lm_head")),
    "gemma3": ("gemma3", {}, ("model.embed_tokens", "lm_head")),
    "t5": ("t5", {}, ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")),
    "bart": (
        "bart",
        {},
        ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"),
    ),
    "masked bert": (
        "bert",
        {"head": "mlm"},
        ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ),
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
    architecture, keys, _ = TIED.get(name) or (name, CASES[name], ())
    model = model_of(architecture, **CASES.get(name, keys))
    model.save(folder / "base")
    export_hf(model, folder / "hf")
    [kind] = transformers.AutoConfig.from_pretrained(folder / "hf").architectures
    return model, getattr(transformers, kind).from_pretrained(folder / "hf")


def adapter_of_peft(hf_model: Any, folder: Path, **settings: Any) -> Tensor:
    """Save a random adapter of peft at `folder`; returns its logits."""
    torch.manual_seed(2)
    adapted = peft.get_peft_model(hf_model, peft.LoraConfig(**settings))
    for key, weight in adapted.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(folder)
    return hf_logits_of(adapted)


@pytest.mark.parametrize(
    ("name", "targets", "head_is_trained"),
    [
        *((name, ("*",), True) for name in CASES),
        *((name, ("q", "v"), False) for name in ("gpt2", "llama")),
        *((name, ("q", "v"), False) for name in ("bert", "modernbert", "distilbert")),
    ],
)
def test_peft_opens_an_exported_adapter_with_equal_logits(
    name: str, targets: tuple[str, ...], head_is_trained: bool, tmp_path: Path
) -> None:
    """Also where a classifier's head, which peft always reads, is that of the base."""
    model, hf_model = base_in_both_formats(name, tmp_path)
    plain = logits_of(model.net)
    trained = tuple(key for key in dict(model.net.named_parameters()) if key.startswith("head."))
    trained = trained if "head" in CASES[name] and head_is_trained else ()
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
        *(
            ("llama", {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": init})
            for init in (False, "gaussian", "eva", "orthogonal", "mica")
        ),
        ("bert", {"target_modules": ["query", "value"], "r": 2, "task_type": "SEQ_CLS"}),
        ("t5", {"target_modules": ["q", "v", "wo"], "r": 2, "task_type": "SEQ_2_SEQ_LM"}),
    ],
)
def test_adapters_of_peft_open_with_equal_logits(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    _, hf_model = base_in_both_formats(name, tmp_path)
    expected = adapter_of_peft(hf_model, tmp_path / "peft", **settings)
    model = import_peft(tmp_path / "peft", tmp_path / "ours", base=tmp_path / "base")
    assert lora_layers(model.net)
    torch.testing.assert_close(logits_of(model.net), expected, rtol=1e-4, atol=1e-4)
    opened = heedful.load(tmp_path / "ours", device="cpu")
    torch.testing.assert_close(logits_of(opened.net), expected, rtol=1e-4, atol=1e-4)


OVERLAPPING = {"layers.1.self_attn.q_proj": 64.0, "q_proj": 2.0, r".*\.1\..*": 7.0}


def rewrite_settings(adapter: Path, **changes: Any) -> None:
    """Change settings of a saved adapter; peft itself writes them in the order of their names."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("patterns", [OVERLAPPING, dict([*OVERLAPPING.items()][::-1])])
def test_the_first_pattern_that_matches_decides_as_in_peft(
    patterns: dict[str, float], tmp_path: Path
) -> None:
    _, hf_model = base_in_both_formats("llama", tmp_path)
    targets = ["q_proj", "k_proj", "down_proj"]
    adapter_of_peft(hf_model, tmp_path / "peft", target_modules=targets, r=4, lora_alpha=3)
    rewrite_settings(tmp_path / "peft", alpha_pattern=patterns)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    expected = hf_logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "peft"))
    model = import_peft(tmp_path / "peft", tmp_path / "ours", base=tmp_path / "base")
    torch.testing.assert_close(logits_of(model.net), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("base", TIED)
def test_trained_embeddings_of_a_tied_base_reach_the_output_in_peft(
    base: str, tmp_path: Path
) -> None:
    model, hf_model = base_in_both_formats(base, tmp_path)
    plain = logits_of(model.net)
    [trained] = {key for key in dict(model.net.named_parameters()) if "tokens" in key}
    model.add_adapter(LoRA(3, 5.0, targets=("q", "v"), trained=(trained,)))
    torch.manual_seed(1)
    for weight in trainable(model.net).values():
        nn.init.normal_(weight, std=0.3)
    expected = logits_of(model.net)
    assert (expected - plain).abs().max() > 1e-2
    model.save(tmp_path / "adapted", base=tmp_path / "base")
    export_peft(tmp_path / "adapted", tmp_path / "peft")
    adapted = peft.PeftModel.from_pretrained(hf_model, tmp_path / "peft")
    torch.testing.assert_close(hf_logits_of(adapted), expected, rtol=1e-4, atol=1e-4)
    assert adapted.peft_config["default"].modules_to_save == sorted(TIED[base][2])
    again = import_peft(tmp_path / "peft", tmp_path / "again", base=tmp_path / "base")
    torch.testing.assert_close(logits_of(again.net), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", TIED)
def test_embeddings_that_peft_trained_on_a_tied_base_open_where_they_stay_tied(
    base: str, tmp_path: Path
) -> None:
    _, hf_model = base_in_both_formats(base, tmp_path)
    first, *others = TIED[base][2]
    settings: dict[str, Any] = {"target_modules": "all-linear", "r": 2, "modules_to_save": [first]}
    if base in ("masked bert", "bart"):  # `all-linear` contains the output
        settings["target_modules"] = r".*(query|value|q_proj)"
    adapter_of_peft(hf_model, tmp_path / "alone", **settings)
    message = f"trains {first}.weight without {', '.join(sorted(others))}".replace(
        ", ", ".weight, "
    )
    with pytest.raises(UserError, match=f"{message}.weight, for which the base has the same"):
        import_peft(tmp_path / "alone", tmp_path / "out", base=tmp_path / "base")
    hf_model = type(hf_model).from_pretrained(tmp_path / "hf")
    settings["modules_to_save"] = [first, *others]
    adapter_of_peft(hf_model, tmp_path / "apart", **settings)
    with pytest.raises(UserError, match="differ, but the base has one matrix for both"):
        import_peft(tmp_path / "apart", tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()
    hf_model = type(hf_model).from_pretrained(tmp_path / "hf")
    if base in ("t5", "bart"):  # which peft 0.21 cannot tie
        return
    tied = settings | {"modules_to_save": ["lm_head"], "ensure_weight_tying": True}
    if base == "masked bert":
        adapter_of_peft(hf_model, tmp_path / "tied", **tied)
        with pytest.raises(UserError, match="peft leaves out the bias of the base's output"):
            import_peft(tmp_path / "tied", tmp_path / "out", base=tmp_path / "base")
        return
    expected = adapter_of_peft(hf_model, tmp_path / "tied", **tied)
    model = import_peft(tmp_path / "tied", tmp_path / "ours", base=tmp_path / "base")
    torch.testing.assert_close(logits_of(model.net), expected, rtol=1e-4, atol=1e-4)


def test_a_grown_vocabulary_is_said_and_needs_a_resized_base(tmp_path: Path) -> None:
    _, hf_model = base_in_both_formats("tied llama", tmp_path)
    grown = model_of("llama", tie_embeddings=True)
    grown = heedful.from_net(*resized(grown), grown.tokenizer)
    grown.add_adapter(LoRA(3, 5.0, targets=("q",), trained=("embedding.tokens.weight",)))
    for weight in trainable(grown.net).values():
        nn.init.normal_(weight, std=0.3)
    expected = logits_of(grown.net)
    grown.save(tmp_path / "adapted", base=tmp_path / "base")
    said: list[str] = []
    export_peft(tmp_path / "adapted", tmp_path / "peft", say=said.append)
    assert "has 43 tokens, that of the base 40: before" in said[0]
    assert "resize_token_embeddings(43)" in said[0]
    hf_model.resize_token_embeddings(43)
    adapted = peft.PeftModel.from_pretrained(hf_model, tmp_path / "peft")
    torch.testing.assert_close(hf_logits_of(adapted), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        UserError, match=r"is \(43, 16\), that of the base \(40, 16\).* resize_token"
    ):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "base")


def resized(model: Any) -> tuple[nn.Module, Any]:
    """The net of a model with 3 more tokens, and its Config."""
    config = dataclasses.replace(model.config, vocab_size=43)
    net = heedful.zoo.architecture(model.metadata.architecture).build(config)
    own = dict(net.named_parameters())
    with torch.no_grad():
        for name, weight in model.net.named_parameters():
            own[name][: len(weight)] = weight
    return net, config


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora", "OLoRA", "corda", "loftq"])
def test_an_initialization_that_changes_the_base_is_refused(init: str, tmp_path: Path) -> None:
    _, hf_model = base_in_both_formats("llama", tmp_path)
    settings = {"target_modules": ["q_proj"], "r": 2}
    adapter_of_peft(hf_model, tmp_path / "peft", **settings)
    rewrite_settings(tmp_path / "peft", init_lora_weights=init)
    with pytest.raises(
        UserError, match=f"is '{init}', which .* path_initial_model_for_weight_conv"
    ):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "base")


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_peft_converted_to_plain_lora_opens(init: str, tmp_path: Path) -> None:
    _, hf_model = base_in_both_formats("llama", tmp_path)
    torch.manual_seed(3)
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=init)
    adapted = peft.get_peft_model(hf_model, settings)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "initial")
    adapted.peft_config["default"].init_lora_weights = init
    for key, weight in adapted.named_parameters():
        if "lora_" in key:
            nn.init.normal_(weight, std=0.3)
    expected = hf_logits_of(adapted)
    adapted.save_pretrained(
        tmp_path / "peft", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    model = import_peft(tmp_path / "peft", tmp_path / "ours", base=tmp_path / "base")
    torch.testing.assert_close(logits_of(model.net), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_pattern": {"q_proj(": 2}}, "alpha_pattern has 'q_proj\\(', not a regular"),
        ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern of q_proj is '2', not a number"),
        ({"alpha_pattern": [2]}, "alpha_pattern must be an object"),
        ({"kasa_config": {"beta": 1}}, "kasa_config is .*; supported: None"),
    ],
)
def test_damaged_or_unknown_settings_are_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, hf_model = base_in_both_formats("llama", tmp_path)
    adapter_of_peft(hf_model, tmp_path / "peft", target_modules=["q_proj"], r=2)
    rewrite_settings(tmp_path / "peft", **changes)
    with pytest.raises(UserError, match=message):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "base")


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
