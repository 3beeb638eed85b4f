"""Adapters of every kind on every kind of base, whose logits in peft are those of heedful.

The tests hold the differences below `CLOSE`; `docs/make_adapters.py` writes them down.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
from heedful.zoo.saved import trainable

CLOSE = 1e-4
CHANGED = 1e-2  # the least change of the logits by an adapter
IDS = torch.tensor([[5, 9, 11, 7, 3], [6, 8, 10, 4, 2]])


@dataclass(frozen=True)
class Kind:
    """A kind of base model.

    Attributes:
        attention: modules of the format with queries, and with values.
        layers: the linear layers of the blocks, as `target_modules` of peft.
        tied: modules of the format that share one matrix for embeddings and output.
        task: `task_type` of peft, by which it saves the head of a classifier; None: not named.
    """

    architecture: str
    attention: tuple[str, ...]
    layers: Any = "all-linear"
    keys: dict[str, Any] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    task: str | None = None


def _classifier(architecture: str, attention: tuple[str, ...], layers: str, **keys: Any) -> Kind:
    keys |= {"head": "classify", "num_labels": 2}
    return Kind(architecture, attention, layers, keys, task="SEQ_CLS")


_QV, _STACKS = ("q_proj", "v_proj"), r".*layers.*(_proj|fc1|fc2)"
_EMBEDDINGS = ("model.embed_tokens", "lm_head")
_BERT = ("query", "value"), r".*layer\..*(query|key|value|dense)"
BASES = {
    "llama": Kind("llama", _QV),
    "tied llama": Kind("llama", _QV, keys={"tie_embeddings": True}, tied=_EMBEDDINGS),
    "mistral": Kind("mistral", _QV),
    "mixtral": Kind("mixtral", _QV, _QV),
    "qwen3": Kind("qwen3", _QV),
    "gemma3": Kind("gemma3", _QV, tied=_EMBEDDINGS),
    "gpt2": Kind("gpt2", ("c_attn",), tied=("transformer.wte", "lm_head")),
    "t5": Kind(
        "t5",
        ("q", "v"),
        tied=("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"),
        task="SEQ_2_SEQ_LM",
    ),
    "bart": Kind(
        "bart",
        _QV,
        _STACKS,  # `all-linear` contains the output
        tied=(
            *("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
            "lm_head",
        ),
    ),
    "marian": Kind("marian", _QV, _STACKS),
    "bert": _classifier("bert", *_BERT),
    "masked bert": Kind(
        "bert",
        *_BERT,
        {"head": "mlm"},
        ("bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ),
    # The positions of RoBERTa begin after the padding's id.
    "roberta": _classifier("roberta", *_BERT, position_offset=1),
    # Formats of GPT-2 and ModernBERT join queries, keys and values.
    "modernbert": _classifier("modernbert", ("Wqkv",), r".*layers.*(Wqkv|Wo|Wi)"),
    "distilbert": _classifier("distilbert", ("q_lin", "v_lin"), r".*layer\..*lin.*"),
}
TIED = tuple(name for name, kind in BASES.items() if kind.tied)
CLASSIFIERS = tuple(name for name, kind in BASES.items() if kind.task == "SEQ_CLS")


def logits_of(net: nn.Module) -> Tensor:
    with torch.inference_mode():
        return net(IDS, IDS) if isinstance(net, EncoderDecoder) else net(IDS)


def hf_logits_of(net: Any) -> Tensor:
    more = {"decoder_input_ids": IDS} if net.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return net.eval()(input_ids=IDS, **more).logits


class Base:
    """A base model at `folder/base`, and as a model of transformers at `folder/hf`."""

    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        self.kind, self.folder = BASES[name], folder
        model = model_of(self.kind.architecture, **self.kind.keys)
        model.save(folder / "base")
        export_hf(model, folder / "hf")
        [kind] = transformers.AutoConfig.from_pretrained(folder / "hf").architectures
        self._hf_model = getattr(transformers, kind).from_pretrained(folder / "hf")
        self.plain = logits_of(model.net)

    @property
    def path(self) -> Path:
        return self.folder / "base"

    def model(self) -> Any:
        return heedful.load(self.path, device="cpu", backend="eager")

    def hf_model(self) -> Any:
        """A copy, which peft may change."""
        return copy.deepcopy(self._hf_model)

    def peft_logits(self, adapter: Path) -> Tensor:
        """The logits of a saved adapter in peft."""
        import peft

        return hf_logits_of(peft.PeftModel.from_pretrained(self.hf_model(), adapter))


def randomize(weights: Any, seed: int) -> None:
    torch.manual_seed(seed)
    for weight in weights:
        nn.init.normal_(weight, std=0.3)


def adapter_of_peft(base: Base, out: Path, **settings: Any) -> Tensor:
    """Save a random adapter of peft at `out`; returns its logits."""
    import peft

    adapted = peft.get_peft_model(base.hf_model(), peft.LoraConfig(**{"r": 2} | settings))
    adapted.create_or_update_model_card = lambda folder: None  # half of the time
    named = adapted.named_parameters()
    randomize([w for key, w in named if "lora_" in key or "modules_to_save" in key], 2)
    adapted.save_pretrained(out)
    return hf_logits_of(adapted)


def rewrite_settings(adapter: Path, **changes: Any) -> None:
    """Change settings of a saved adapter; peft itself writes them in the order of their names."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


Differences = dict[str, float]  # the largest of all logits, by direction


@dataclass(frozen=True)
class Case:
    """A kind of adapter.

    Attributes:
        directions: what `measure` measures: import (peft to heedful), export (heedful to peft),
            and back (export, then import).
        bases: names of the bases it is tried with.
        measure: makes adapters in a new folder; returns the differences by direction.
    """

    directions: tuple[str, ...]
    bases: Iterable[str]
    measure: Callable[[Base, Path], Differences]


def of_peft(
    bases: Iterable[str], settings: Callable[[Kind], dict[str, Any]], order: str | None = None
) -> Case:
    """An adapter that peft made, imported.

    Args:
        settings: of `LoraConfig`.
        order: the setting whose patterns are in the order of the settings, not of their names.
    """

    def save(base: Base, out: Path) -> Tensor:
        content = {"task_type": base.kind.task} | settings(base.kind)
        expected = adapter_of_peft(base, out, **content)
        if order is None:
            return expected
        rewrite_settings(out, **{order: content[order]})
        return base.peft_logits(out)

    return saved_by_peft(bases, save)


def saved_by_peft(bases: Iterable[str], save: Callable[[Base, Path], Tensor]) -> Case:
    """An adapter that `save` writes and whose logits it returns, imported."""

    def measure(base: Base, folder: Path) -> Differences:
        expected = save(base, folder / "peft")
        assert (expected - base.plain).abs().max() > CHANGED
        model = import_peft(folder / "peft", folder / "ours", base=base.path)
        assert lora_layers(model.net)
        found = difference(logits_of(model.net), expected)
        opened = heedful.load(folder / "ours", device="cpu").net  # with the adapter merged
        return {"import": max(found, difference(logits_of(opened), expected))}

    return Case(("import",), bases, measure)


def of_heedful(
    bases: Iterable[str],
    targets: tuple[str, ...],
    trained: str = "",
    modules: Callable[[Kind], list[str] | None] = lambda kind: None,
) -> Case:
    """An adapter that heedful made, exported, and imported again.

    Args:
        trained: pattern of the names of further parameters that are trained.
        modules: those that peft is to save whole; None: any.
    """

    def measure(base: Base, folder: Path) -> Differences:
        model = base.model()
        names = tuple(key for key in dict(model.net.named_parameters()) if re.match(trained, key))
        model.add_adapter(LoRA(3, 5.0, targets=targets, trained=names if trained else ()))
        randomize(trainable(model.net).values(), 1)
        expected = logits_of(model.net)
        assert (expected - base.plain).abs().max() > CHANGED
        model.save(folder / "ours", base=base.path)
        opened = heedful.load(folder / "ours", device="cpu").net
        torch.testing.assert_close(logits_of(opened), expected, rtol=1e-5, atol=1e-5)
        export_peft(folder / "ours", folder / "peft")
        saved = json.loads((folder / "peft" / "adapter_config.json").read_text())
        if (wanted := modules(base.kind)) is not None:
            assert saved["modules_to_save"] == wanted
        again = import_peft(folder / "peft", folder / "again", base=base.path)
        return {
            "export": difference(base.peft_logits(folder / "peft"), expected),
            "back": difference(logits_of(again.net), expected),
        }

    return Case(("export", "back"), bases, measure)


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())


def converted(init: str) -> Callable[[Base, Path], Tensor]:
    """Save an adapter with this initialization as plain LoRA, as peft offers."""

    def save(base: Base, out: Path) -> Tensor:
        import peft

        torch.manual_seed(3)
        settings = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=init)
        adapted = peft.get_peft_model(base.hf_model(), settings)
        adapted.peft_config["default"].init_lora_weights = True
        adapted.save_pretrained(out.with_name("initial"))
        adapted.peft_config["default"].init_lora_weights = init
        randomize([w for key, w in adapted.named_parameters() if "lora_" in key], 2)
        expected = hf_logits_of(adapted)
        initial = str(out.with_name("initial"))
        adapted.save_pretrained(out, path_initial_model_for_weight_conversion=initial)
        return expected

    return save


def attention(kind: Kind, **settings: Any) -> dict[str, Any]:
    return {"target_modules": [*kind.attention]} | settings


def layers(kind: Kind, **settings: Any) -> dict[str, Any]:
    modules = kind.layers if isinstance(kind.layers, str) else [*kind.layers]
    return {
        "target_modules": modules,
        "r": 4,
        "fan_in_fan_out": kind.architecture == "gpt2",
    } | settings


def overlapping(kind: Kind, *, turned: bool = False) -> dict[str, Any]:
    """Patterns of which several match a module, and the first one decides."""
    first, last = kind.attention[0], kind.attention[-1]
    patterns = [(rf".*\.1\..*{first}", 64.0), (first, 2.0), (r".*\.1\..*", 7.0), (last, 5.0)]
    return layers(kind, alpha_pattern=dict(patterns[::-1] if turned else patterns))


def tied(kind: Kind) -> dict[str, Any]:
    return attention(kind, modules_to_save=["lm_head"], ensure_weight_tying=True)


SOME = ("llama", "gpt2", "t5", "bert")
_INITS = ("False", "gaussian", "eva", "orthogonal", "mica")
CASES = {
    "LoRA of queries and values": of_peft(BASES, attention),
    "LoRA of all layers of the blocks": of_peft(BASES, layers),
    "rsLoRA": of_peft(SOME, lambda kind: attention(kind, use_rslora=True, r=4)),
    "`rank_pattern` and `alpha_pattern`": of_peft(
        SOME,
        lambda kind: layers(
            kind, rank_pattern={kind.attention[0]: 2}, alpha_pattern={kind.attention[-1]: 1.0}
        ),
    ),
    "overlapping `alpha_pattern`": of_peft(SOME, overlapping, "alpha_pattern"),
    "the same in the other order": of_peft(
        SOME, lambda kind: overlapping(kind, turned=True), "alpha_pattern"
    ),
    **{
        f"`init_lora_weights` {init}": of_peft(
            ("llama",),
            lambda kind, init=init: attention(
                kind, init_lora_weights=False if init == "False" else init
            ),
        )
        for init in _INITS
    },
    **{
        f"{name}, saved as plain LoRA": saved_by_peft(("llama",), converted(name.lower()))
        for name in ("PiSSA", "OLoRA")
    },
    "embeddings and the output, kept equal": of_peft(
        [name for name in TIED if name not in ("t5", "bart", "masked bert")], tied
    ),
    "heedful's, of queries and values": of_heedful(
        ("llama", "gpt2", "t5", "bert", "modernbert", "distilbert"), ("q", "v")
    ),
    "heedful's, of all layers": of_heedful(
        [name for name in BASES if name not in CLASSIFIERS], ("*",)
    ),
    "heedful's, with the head": of_heedful(CLASSIFIERS, ("*",), r"head\."),
    "heedful's, with embeddings that are the output": of_heedful(
        TIED, ("q", "v"), ".*tokens", lambda kind: sorted(kind.tied)
    ),
}


@dataclass(frozen=True)
class Refusal:
    """A kind of adapter that is not imported.

    Attributes:
        words: of the message.
        save: writes the adapter into a folder.
    """

    bases: Iterable[str]
    words: str
    save: Callable[[Base, Path], object]

    def hold(self, base: Base, folder: Path) -> None:
        """Fail unless the adapter is refused with these words, and nothing is written."""
        self.save(base, folder / "peft")
        with pytest.raises(UserError, match=re.escape(self.words)):
            import_peft(folder / "peft", folder / "out", base=base.path)
        assert not (folder / "out").exists()


def by_setting(words: str, **changes: Any) -> Refusal:
    """Refused for settings, which are read before the weights."""

    def save(base: Base, out: Path) -> None:
        adapter_of_peft(base, out, target_modules=["q_proj"])
        rewrite_settings(out, **changes)

    return Refusal(("llama",), words, save)


def _initialized(init: str) -> Refusal:
    words = f"init_lora_weights is '{init}', which changes the weights of the base"
    return by_setting(words, init_lora_weights=init)


def _embeddings(*, output: bool) -> Callable[[Base, Path], object]:
    """Save an adapter that trains embeddings of a tied base, without the output or beside it."""

    def save(base: Base, out: Path) -> None:
        modules = base.kind.tied if output else base.kind.tied[:1]
        adapter_of_peft(base, out, **attention(base.kind, modules_to_save=[*modules]))

    return save


def _all_linear(base: Base, out: Path) -> None:
    adapter_of_peft(base, out, target_modules="all-linear", task_type=base.kind.task)


_INIT_NAMES = {
    "PiSSA": "pissa",
    "fast PiSSA": "pissa_niter_2",
    "OLoRA": "olora",
    "CorDA": "corda",
    "LoftQ": "loftq",
    "LoRA-GA": "lora_ga",
}
REFUSED = {
    **{name: _initialized(init) for name, init in _INIT_NAMES.items()},
    "DoRA": by_setting("use_dora is True; supported: False", use_dora=True),
    "all biases": by_setting("bias is 'all'; supported: 'none'", bias="all"),
    "biases of its layers": by_setting("bias is 'lora_only'; supported: 'none'", bias="lora_only"),
    "a bias of the update": by_setting("lora_bias is True; supported: False", lora_bias=True),
    "single tokens": by_setting(
        "trainable_token_indices is [1, 2]; supported: None", trainable_token_indices=[1, 2]
    ),
    "parameters": by_setting(
        "target_parameters is ['gate']; supported: None", target_parameters=["gate"]
    ),
    "KaSA": by_setting("kasa_config is {'beta': 1}; supported: None", kasa_config={"beta": 1}),
    "another kind than LoRA": by_setting("peft_type is 'IA3'; supported: 'LORA'", peft_type="IA3"),
    "`all-linear`, with experts": Refusal(
        ("mixtral",),
        "target_parameters is [",
        _all_linear,
    ),
    "`all-linear`, with the pooler or the head": Refusal(
        ("bert", "modernbert"),
        "heedful has them for linear layers of the blocks alone",
        _all_linear,
    ),
    "embeddings without the output that they are": Refusal(
        TIED, "for which the base has the same matrix", _embeddings(output=False)
    ),
    "embeddings and the output, not equal": Refusal(
        TIED, "differ, but the base has one matrix for both", _embeddings(output=True)
    ),
    "embeddings and an output with a bias, kept equal": Refusal(
        ("masked bert",),
        "peft leaves out the bias of the base's output",
        lambda base, out: adapter_of_peft(base, out, **tied(base.kind)),
    ),
}
