"""`insight.verify` and `heedful verify` of every model of the zoo and every position scheme."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_verify import SKIPPED, UNASKED, failures, skips
from torch import Tensor, nn
from typer.testing import CliRunner

from heedful.cli.app import make_app
from heedful.errors import UserError
from heedful.insight import verify
from heedful.insight.verification import checks_of
from heedful.parts.cache import Cache
from heedful.parts.masks import MaskSpec
from heedful.parts.tokens import Tokens
from heedful.pipelines import ModelMetadata, open_net
from heedful.zoo import ARCHITECTURES, architecture
from heedful.zoo.saved import make_config
from single_stacks import SCHEMES, Single, decoder, encoder

ONE = {"vocab_size": 23, "d_model": 32, "num_heads": 4, "num_layers": 2, "max_length": 16}
TWO = {
    "src_vocab_size": 23,
    "tgt_vocab_size": 23,
    "d_model": 32,
    "num_heads": 4,
    "d_ff": 64,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "max_length": 16,
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
SMALL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bart", "marian", "pegasus", "vaswani2017"), TWO),
    "t5": {**TWO, "head_dim": 8},
    **{name: {**ONE, "d_ff": 64} for name in ("bert", "roberta", "distilbert", "modernbert")},
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
    report = verify(build(name, **keys), overfit=overfit, overfit_seconds=600.0)
    assert report.ok, str(report)
    assert skips(report) == (SKIPPED[kind] if overfit else SKIPPED[kind] | UNASKED), str(report)
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
    assert skips(report) == {*SKIPPED[kind], "initial loss", "one batch overfits"}


def test_without_positions_encoders_fail_and_causal_nets_may_pass() -> None:
    bare = Single("none", windows=(None,))
    both = {"fresh": False, "overfit": False}
    assert failures(verify(encoder(bare, "tokens"), **both)) == {"position awareness"}
    assert failures(verify(decoder(bare), **both)) == {"position awareness"}
    of_2017 = build("vaswani2017", positions="none", tie_embeddings="decoder", tgt_vocab_size=29)
    assert failures(verify(of_2017, overfit=False)) == {"position awareness"}
    # After two causal layers the state of each token depends on the tokens before it.
    assert verify(decoder(Single("none", windows=(None, None))), **both).ok


def test_a_hidden_distant_token_is_a_defect_without_windows() -> None:
    """A window may hide tokens; here no layer has one."""
    net = build("gpt2", num_layers=1, dropout=0.0)
    attention = net.decoder.blocks[0].self_attention.sublayer
    whole = attention.prepare_mask

    def near_only(spec: MaskSpec, x: Tensor, **options: Any) -> Any:
        size = spec.keys.positions.size(1)
        near = torch.ones(x.size(1), size, dtype=torch.bool).tril().triu(-3)
        cut = MaskSpec(spec.queries, spec.keys, causal=True, allowed=near[None])
        return whole(cut, x, **options)

    attention.prepare_mask = near_only
    report = verify(net, overfit=False)
    assert report["mask polarity"].status == "failed"
    assert report["mask polarity"].detail == "token 0 does not change the logits at 4"


@pytest.mark.parametrize("name", ["gpt2", "vaswani2017"])
@pytest.mark.parametrize("flaw", ["reorder", "begin"])
def test_defects_of_the_cache_are_found(
    name: str, flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beams that are not reordered; beams that see each other's tokens."""
    begin = Cache.begin

    def sees_all(cache: Cache, tokens: Tokens) -> Any:
        cache.groups[0].seen.fill_(True)
        return begin(cache, tokens)

    broken = {"reorder": lambda cache, parents: None, "begin": sees_all}[flaw]
    monkeypatch.setattr(Cache, flaw, broken)
    assert failures(verify(build(name), overfit=False)) == {"cached = uncached"}


def test_a_vector_per_text_is_no_class() -> None:
    report = verify(build("bert", head="classify", num_labels=1))
    assert report.ok, str(report)
    assert skips(report) == {*SKIPPED["classifier"], "initial loss", "one batch overfits"}


def test_small_effects_of_16_bit_nets_are_checked_again_in_fp64() -> None:
    report = verify(build("llama").to(torch.bfloat16), overfit=False)
    assert report.ok, str(report)


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
    skipped = {row["name"] for row in actual["checks"] if row["status"] == "skipped"}
    assert skipped == {*SKIPPED[kind_of(name, keys)], "initial loss", "one batch overfits"}


def test_the_command_exits_with_1_on_failure_and_refuses_short_models(tmp_path: Path) -> None:
    net = build("gpt2")
    with torch.no_grad():
        net.head.out.weight.fill_(1e38)  # logits that overflow
    ended = run_on(tmp_path / "broken", "gpt2", net)
    assert ended.exit_code == 1
    assert "1 failed" in ended.output
    ended = run_on(tmp_path / "short", "gpt2", build("gpt2", max_length=7), max_length=7)
    assert isinstance(ended.exception, UserError)
    assert "allows 7" in str(ended.exception)
