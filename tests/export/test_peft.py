"""Adapters for peft and from it, whose logits are those of heedful."""

import dataclasses
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import adapter_cases
import heedful
from adapter_cases import BASES, CASES, CLOSE, REFUSED, Base, adapter_of_peft, rewrite_settings
from backend_models import model_of
from heedful.errors import UserError
from heedful.export.peft import export_peft, import_peft
from heedful.models import LoRA
from heedful.zoo.saved import trainable

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "adapters.md"
DIGITS = re.compile(r"≤ 1e-\d")


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Base]:
    """A base of a kind, which is made once."""
    made: dict[str, Base] = {}

    def get(name: str) -> Base:
        if name not in made:
            made[name] = Base(name, tmp_path_factory.mktemp("base"))
        return made[name]

    return get


@pytest.fixture
def llama(base_of: Callable[[str], Base]) -> Base:
    return base_of("llama")


def marks_of(name: str, case: str) -> list[pytest.MarkDecorator]:
    """Queries and values of other bases are among all layers of their blocks."""
    is_part = case == "LoRA of queries and values" and name not in adapter_cases.SOME
    return [pytest.mark.benchmarks] if is_part else []


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=marks_of(name, case))
        for name in BASES
        for case in CASES
        if name in CASES[case].bases
    ],
)
def test_logits_in_peft_equal_those_of_heedful(
    name: str, case: str, base_of: Callable[[str], Base], tmp_path: Path
) -> None:
    found = CASES[case].measure(base_of(name), tmp_path)
    assert tuple(found) == CASES[case].directions
    assert max(found.values()) < CLOSE, found


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for case in REFUSED for name in REFUSED[case].bases]
)
def test_an_adapter_that_cannot_be_imported_is_one_line(
    name: str, case: str, base_of: Callable[[str], Base], tmp_path: Path
) -> None:
    REFUSED[case].hold(base_of(name), tmp_path)


def test_the_page_of_adapters_is_up_to_date() -> None:
    """In all but the digits, which the tests above hold."""
    render = runpy.run_path(str(PAGE.parents[1] / "make_adapters.py"))["render"]
    made = render(lambda case, name: dict.fromkeys(CASES[case].directions, 0.0))
    page = PAGE.read_text(encoding="utf-8")
    assert DIGITS.sub("≤", page) == DIGITS.sub("≤", made), "run `make pages`"


def test_an_imported_adapter_replaces_one(llama: Base, tmp_path: Path) -> None:
    """Which has a tokenizer beside its weights."""
    adapter_of_peft(llama, tmp_path / "peft", target_modules=["q_proj"])
    for overwrite in (False, True):
        import_peft(tmp_path / "peft", tmp_path / "out", base=llama.path, overwrite=overwrite)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_grown_vocabulary_is_said_and_needs_a_resized_base(
    base_of: Callable[[str], Base], tmp_path: Path
) -> None:
    base = base_of("tied llama")
    hf_model = base.hf_model()
    grown = model_of("llama", tie_embeddings=True)
    grown = heedful.from_net(*resized(grown), grown.tokenizer)
    grown.add_adapter(LoRA(3, 5.0, targets=("q",), trained=("embedding.tokens.weight",)))
    adapter_cases.randomize(trainable(grown.net).values(), 1)
    expected = adapter_cases.logits_of(grown.net)
    grown.save(tmp_path / "adapted", base=base.path)
    said: list[str] = []
    export_peft(tmp_path / "adapted", tmp_path / "peft", say=said.append)
    assert "has 43 tokens, that of the base 40: before" in said[0]
    assert "resize_token_embeddings(43)" in said[0]
    hf_model.resize_token_embeddings(43)
    adapted = peft.PeftModel.from_pretrained(hf_model, tmp_path / "peft")
    actual = adapter_cases.hf_logits_of(adapted)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        UserError, match=r"is \(43, 16\), that of the base \(40, 16\).* resize_token"
    ):
        import_peft(tmp_path / "peft", tmp_path / "out", base=base.path)


def resized(model: Any) -> tuple[nn.Module, Any]:
    """The net of a model with 3 more tokens, and its Config."""
    config = dataclasses.replace(model.config, vocab_size=43)
    net = heedful.zoo.architecture(model.metadata.architecture).build(config)
    own = dict(net.named_parameters())
    with torch.no_grad():
        for name, weight in model.net.named_parameters():
            own[name][: len(weight)] = weight
    return net, config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha_pattern": {"q_proj(": 2}}, "alpha_pattern has 'q_proj\\(', not a regular"),
        ({"alpha_pattern": {"q_proj": "2"}}, "alpha_pattern of q_proj is '2', not a number"),
        ({"alpha_pattern": [2]}, "alpha_pattern must be an object"),
    ],
)
def test_damaged_settings_are_one_line(
    changes: dict[str, Any], message: str, llama: Base, tmp_path: Path
) -> None:
    adapter_of_peft(llama, tmp_path / "peft", target_modules=["q_proj"], r=2)
    rewrite_settings(tmp_path / "peft", **changes)
    with pytest.raises(UserError, match=message):
        import_peft(tmp_path / "peft", tmp_path / "out", base=llama.path)


@pytest.mark.parametrize("alpha", [-4, 0])
def test_an_adapter_of_a_scale_that_is_not_above_0_is_the_same_model(
    alpha: int, llama: Base, tmp_path: Path
) -> None:
    """The scale of heedful's adapters is above 0: the sign is that of the factors."""
    adapter_of_peft(llama, tmp_path / "peft", target_modules=["q_proj"], r=2)
    rewrite_settings(tmp_path / "peft", lora_alpha=alpha)
    adapted = peft.PeftModel.from_pretrained(llama.hf_model(), tmp_path / "peft")
    expected = adapter_cases.hf_logits_of(adapted)
    import_peft(tmp_path / "peft", tmp_path / "out", base=llama.path)
    actual = adapter_cases.logits_of(heedful.load(tmp_path / "out", device="cpu").net)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_what_is_not_lora_is_one_line(llama: Base, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no adapter_config\.json"):
        import_peft(llama.folder / "hf", tmp_path / "out", base=llama.path)
    with pytest.raises(UserError, match="has no adapter; export the whole model"):
        export_peft(llama.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_one_line(llama: Base, tmp_path: Path) -> None:
    adapter_of_peft(llama, tmp_path / "peft", target_modules=["q_proj"])
    model_of("gpt2").save(tmp_path / "gpt2")
    with pytest.raises(UserError, match="holds tensors that the base model does not have: model"):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "gpt2")
    model_of("llama", d_model=8).save(tmp_path / "small")
    with pytest.raises(UserError, match="the adapter is of another model"):
        import_peft(tmp_path / "peft", tmp_path / "out", base=tmp_path / "small")
    assert not (tmp_path / "out").exists()
