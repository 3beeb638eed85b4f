"""`insight.verify` and `heedful verify` of every model of the zoo and every position scheme."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_verify import NO_WINDOW, SKIPPED, UNASKED, failures, skips
from torch import Tensor, nn
from typer.testing import CliRunner

from heedful.cli.app import make_app
from heedful.errors import UserError
from heedful.insight import verify
from heedful.insight.checks import distance
from heedful.insight.verification import checks_of
from heedful.parts.attention import Attention, plan_attention
from heedful.parts.cache import Cache, LayerGroup
from heedful.parts.tokens import MaskSpec, Tokens
from heedful.pipelines import ModelMetadata, open_net
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.saved import make_config
from single_stacks import SCHEMES, Single, decoder, encoder

ONE = {"vocab_size": 23, "d_model": 32, "num_heads": 4, "num_layers": 2, "max_length": 40}
TWO = {
    "src_vocab_size": 23,
    "tgt_vocab_size": 23,
    "d_model": 32,
    "num_heads": 4,
    "d_ff": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "max_length": 40,
}
# Beside every architecture as it is: a variant for each mechanism and each kind of output. Options
# that only change sizes, biases or activations are held by test_properties.py and by parity.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt3", {"window": 2}),
    ("llama", {"num_kv_heads": 2, "rope_layout": "interleaved"}),
    ("mistral", {"window": 2, "num_kv_heads": 2, "head_dim": 6}),
    ("gemma3", {"window": 3, "score_softcap": 4.0, "logit_softcap": 9.0}),
    ("bert", {"head": "classify", "num_labels": 3}),
    ("bert", {"head": "none"}),
    ("distilbert", {"positions": "sinusoidal"}),
    ("modernbert", {"global_every": 2, "window": 4}),
    ("modernbert", {"head": "none"}),
    ("t5", {"activation": "geglu_tanh", "tie_embeddings": False}),
    (
        "vaswani2017",
        {"norm_placement": "output", "positions": "learned", "tie_embeddings": "decoder"},
    ),
]
ZOO = [*((name, {}) for name in ARCHITECTURES), *VARIANTS]
# To train each of them would take too long.
LEARN: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {}),
    ("llama", {}),
    ("bert", {}),
    ("bert", {"head": "classify", "num_labels": 3}),
    ("t5", {}),
]
ENCODERS = ("bert", "roberta", "xlm_roberta", "distilbert", "modernbert")
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "marian", "pegasus", "m2m100", "mbart", "vaswani2017"), TWO),
    "t5": {**TWO, "head_dim": 8},
    **{name: {**ONE, "d_ff": 64} for name in ENCODERS},
    "mistral": {**ONE, "d_ff": 64, "head_dim": 8, "num_kv_heads": 2},
    "qwen3": {**ONE, "num_kv_heads": 2, "head_dim": 6},
    "mixtral": {**ONE, "d_ff": 64, "head_dim": 8, "num_kv_heads": 2},
}


def build(name: str, **keys: Any) -> nn.Module:
    """A tiny new model of the zoo."""
    config = make_config(name, {**SMALL.get(name, ONE), **keys})
    torch.manual_seed(0)
    return architecture(name).build(config)


def kind_of(name: str, keys: dict[str, Any]) -> str:
    """As in `SKIPPED`."""
    known = architecture(name).config.__dataclass_fields__
    if "head" in known:
        heads = {"mlm": "encoder", "classify": "classifier", "none": "states"}
        return heads[keys.get("head", "mlm")]
    return "two stacks" if "num_encoder_layers" in known else "decoder"


@pytest.mark.parametrize(
    ("name", "keys"), ZOO, ids=[f"{name}-{number}" for number, (name, _) in enumerate(ZOO)]
)
def test_the_zoo_passes_every_check(name: str, keys: dict[str, Any]) -> None:
    kind, overfit = kind_of(name, keys), (name, keys) in LEARN or name == "vaswani2017"
    net = build(name, **keys)
    report = verify(net, overfit=overfit, overfit_seconds=600.0)
    assert report.ok, str(report)
    windows = [module.window for module in net.modules() if isinstance(module, Attention)]
    is_near = None not in windows and sum(windows) < 40
    skipped = SKIPPED[kind] - (NO_WINDOW if is_near and kind != "classifier" else set())
    assert skips(report) == (skipped if overfit else skipped | UNASKED), str(report)
    assert len(report) == len(checks_of(single_stack=kind != "two stacks"))


WINDOWS = [(None, None), (2, None), (3, 2)]
PLACED = [name for name in SCHEMES if name != "none"]


@pytest.mark.parametrize(("number", "scheme"), list(enumerate(PLACED)))
def test_every_position_scheme_passes(number: int, scheme: str) -> None:
    single = Single(scheme, windows=WINDOWS[number // 3 % 3])
    kinds = {
        "decoder": lambda: decoder(single),
        "classifier": lambda: encoder(single, "classes"),
        "states": lambda: encoder(single, "none"),
    }
    kind = [*kinds][number % 3]  # of each family of schemes there are several
    report = verify(kinds[kind](), fresh=False, overfit=False)
    assert report.ok, str(report)
    has_reach = None not in single.windows and kind != "classifier"
    skipped = SKIPPED[kind] - (NO_WINDOW if has_reach else set())
    assert skips(report) == {*skipped, "initial loss", "one batch overfits"}


def test_without_positions_encoders_fail_and_causal_nets_may_pass() -> None:
    bare = Single("none", windows=(None,))
    both = {"fresh": False, "overfit": False}
    assert failures(verify(encoder(bare, "tokens"), **both)) == {"position awareness"}
    assert failures(verify(decoder(bare), **both)) == {"position awareness"}
    of_2017 = build("vaswani2017", positions="none", tie_embeddings="decoder", tgt_vocab_size=29)
    assert failures(verify(of_2017, overfit=False)) == {"position awareness"}
    # After two causal layers the state of each token depends on the tokens before it.
    assert verify(decoder(Single("none", windows=(None, None))), **both).ok


def test_a_hidden_distant_token_is_a_defect_without_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window may hide tokens; here no layer has one."""
    net = build("gpt2", num_layers=1, dropout=0.0)

    def near_only(spec: MaskSpec, layer: Any, **keys: Any) -> Any:
        size = spec.keys.positions.size(1)
        near = torch.ones(size, size, dtype=torch.bool).tril().triu(-3)
        cut = MaskSpec(spec.queries, spec.keys, causal=True, allowed=near[None])
        return plan_attention(cut, layer, **keys)

    monkeypatch.setattr("heedful.models.stack.plan_attention", near_only)
    report = verify(net, overfit=False)
    assert report["mask polarity"].status == "failed"
    assert report["mask polarity"].detail == "token 0 does not change the logits at 4"


@pytest.mark.parametrize(
    ("name", "flaw"),
    [
        *((name, flaw) for name in ("gpt2", "vaswani2017") for flaw in ("reorder", "begin")),
        *(("gpt2", "resized"), ("vaswani2017", "resized"), ("mistral", "without_hidden")),
    ],
)
def test_defects_of_the_cache_are_found(
    name: str, flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams that are not reordered; beams that see each other's tokens; a cache that grows without
    its first key; a cache that forgets one key of the window."""
    begin, resized, without_hidden = Cache.begin, LayerGroup.resized, LayerGroup.without_hidden

    def sees_all(cache: Cache, tokens: Tokens) -> Any:
        cache.groups[0].visible.fill_(True)
        return begin(cache, tokens)

    def without_first(group: LayerGroup, capacity: int, texts: int | None = None) -> LayerGroup:
        larger = resized(group, capacity, texts)
        for store in larger.stores:
            store[:, 0] = 0
        return larger

    def too_few(group: LayerGroup, capacity: int) -> LayerGroup:
        assert group.window is not None
        narrow = without_hidden(replace(group, window=group.window - 2), capacity)
        return replace(narrow, window=group.window)

    broken: dict[str, Any] = {
        "reorder": (Cache, lambda cache, parents: None),
        "begin": (Cache, sees_all),
        "resized": (LayerGroup, without_first),
        "without_hidden": (LayerGroup, too_few),
    }
    owner, function = broken[flaw]
    monkeypatch.setattr(owner, flaw, function)
    keys = {"window": 3} if name == "mistral" else {}
    report = verify(build(name, **keys), overfit=False)
    assert failures(report) == {"cached = uncached"}
    assert " differ by " in report["cached = uncached"].detail  # and nothing was raised


@pytest.mark.parametrize("window", [3, 4, 5])
def test_windows_of_another_width_than_intended_are_found(window: int) -> None:
    report = verify(build("mistral", window=window), max_distance=2 * (4 - 1), overfit=False)
    assert failures(report) == ({"attention window"} if window != 4 else set()), str(report)


def test_a_vector_per_text_is_no_class() -> None:
    report = verify(build("bert", head="classify", num_labels=1))
    assert report.ok, str(report)
    assert skips(report) == {*SKIPPED["classifier"], "initial loss", "one batch overfits"}


def test_a_single_number_is_compared_by_its_magnitude() -> None:
    """It has no standard deviation, and rounding differs between batches on some processors."""
    number = torch.tensor([[[-0.25]]])
    assert distance(number, number * (1 + 2e-7)) < 1e-6
    assert distance(number, number * 1.5) == pytest.approx(0.5)
    assert distance(0 * number, number) > 1e6


def test_small_effects_of_16_bit_nets_are_checked_again_in_fp64() -> None:
    report = verify(build("llama").to(torch.bfloat16), overfit=False)
    assert report.ok, str(report)


# --- nets of transformers --------------------------------------------------------------------

HF_SIZES = {"vocab_size": 23, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HF_STACKS = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in {"layers": 1, "attention_heads": 4, "ffn_dim": 48}.items()
}
HF_NETS: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2LMHeadModel": ("GPT2Config", {**HF_SIZES, "n_positions": 40}, "decoder"),
    "LlamaForCausalLM": ("LlamaConfig", {**HF_SIZES, "intermediate_size": 48}, "decoder"),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"vocab_size": 23, "d_model": 32, "max_position_embeddings": 40, **HF_STACKS},
        "two stacks",
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 23, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "two stacks",
    ),
    "BertForMaskedLM": ("BertConfig", {**HF_SIZES, "intermediate_size": 48}, "encoder"),
    "BertForSequenceClassification": (
        "BertConfig",
        {**HF_SIZES, "intermediate_size": 48, "num_labels": 3},
        "classifier",
    ),
}


def hf_net(name: str) -> nn.Module:
    config, sizes, _ = HF_NETS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


@pytest.mark.parametrize("name", HF_NETS)
def test_nets_of_transformers_pass_without_an_adapter(name: str) -> None:
    kind = HF_NETS[name][2]
    report = verify(hf_net(name), overfit=False, long_length=40)
    assert report.ok, str(report)
    no_left = {"two stacks": {"source padding, left", "target padding, left"}, "decoder": set()}
    assert skips(report) == {*SKIPPED[kind], *UNASKED, *no_left.get(kind, {"padding, left"})}


def test_positions_that_count_padding_fail_in_a_net_of_transformers() -> None:
    """BART has learned positions and takes no position_ids."""
    report = verify(hf_net("BartForConditionalGeneration"), left_padding=True, overfit=False)
    assert "source padding, left" in failures(report), str(report)
    relative = verify(hf_net("T5ForConditionalGeneration"), left_padding=True, overfit=False)
    assert relative.ok, str(relative)


@pytest.mark.parametrize(
    ("flaw", "check"),
    [("is_causal", "causality"), ("mask", "padding, left"), ("cache", "cached = uncached")],
)
def test_defects_of_a_net_of_transformers_are_found(
    flaw: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = hf_net("LlamaForCausalLM")
    forward = type(net).forward

    def flawed(
        self: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        if flaw == "is_causal":
            attention_mask = torch.zeros(len(input_ids), 1, *[input_ids.size(1)] * 2)
        if flaw == "mask" and attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        if flaw == "cache" and past_key_values is not None and position_ids is None:
            position_ids = torch.full_like(input_ids, past_key_values.get_seq_length() + 1)
        return forward(
            self,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )

    monkeypatch.setattr(type(net), "forward", flawed)
    report = verify(net, overfit=False, long_length=24)
    assert check in failures(report), str(report)


def test_an_unknown_net_of_transformers_needs_causal() -> None:
    base = transformers.GPT2Model(transformers.GPT2Config(**HF_SIZES, n_positions=16))
    with pytest.raises(UserError, match="pass causal=True"):
        verify(base)
    report = verify(base, causal=True, overfit=False)
    assert report.ok, str(report)
    assert report["initial loss"].status == "skipped"  # it returns states


# --- the command ----------------------------------------------------------------------------


def run_on(folder: Path, name: str, net: nn.Module, *options: str, **keys: Any) -> Any:
    """The command on a model in a directory."""
    config = make_config(name, {**SMALL.get(name, ONE), **keys})
    folder.mkdir(exist_ok=True)
    open_net(net, config, ModelMetadata(name, "imported"), None).save(folder)
    return CliRunner().invoke(make_app(), ["verify", str(folder), "--no-overfit", *options])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("vaswani2017", {}),
        ("gpt2", {}),
        ("bert", {}),
        ("bert", {"head": "classify"}),
        ("distilbert", {"head": "none", "max_length": 9}),
    ],
)
def test_the_command_takes_a_model_of_any_kind(
    tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    ended = run_on(tmp_path, name, build(name, **keys), "--json", **keys)
    assert ended.exit_code == 0, ended.output
    actual = json.loads(ended.output)
    assert actual["ok"]
    longest = keys.get("max_length", 40)
    assert actual["length"] == min(10, longest)
    assert actual["long_length"] == longest
    skipped = {row["name"] for row in actual["checks"] if row["status"] == "skipped"}
    assert skipped == {*SKIPPED[kind_of(name, keys)], "initial loss", "one batch overfits"}


def test_the_command_exits_with_1_on_failure_and_refuses_short_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build("gpt2")
    with torch.no_grad():
        net.head.out.weight.fill_(1e38)  # logits that overflow
    monkeypatch.setenv("COLUMNS", "200")
    ended = run_on(tmp_path / "broken", "gpt2", net)
    assert ended.exit_code == 1
    assert "1 failed" in ended.output
    assert max(map(len, ended.output.splitlines())) == 80
    assert "tested with texts of up to 10 tokens" in ended.output
    ended = run_on(tmp_path / "short", "gpt2", build("gpt2", max_length=7), max_length=7)
    assert isinstance(ended.exception, UserError)
    assert "allows 7" in str(ended.exception)
