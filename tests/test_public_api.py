"""The public names of the library in a user's interpreter.

support/typed_program.py is what a type checker knows of them.
"""

import doctest
import importlib
import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import heedful
import heedful.generation
import heedful.insight
import heedful.models
import heedful.zoo
from backend_models import TEXTS, VOCAB, model_of
from heedful.options import Options, RunTimeOptions
from heedful.pipelines.keywords import (
    INTERNAL,
    ClassificationKeywords,
    GenerationKeywords,
    LoadKeywords,
)


def test_dir_lists_the_public_names_and_each_exists() -> None:
    assert set(dir(heedful)) == {*heedful.__all__, "__version__"}
    for name in dir(heedful):
        assert getattr(heedful, name) is not None


def test_the_types_of_keywords_are_those_of_the_declared_options() -> None:
    """An editor completes what `Options`, `RunTimeOptions` and `load` declare."""
    declared = {field.name: field.type for field in fields(Options) if field.name != "explicit"}
    assert get_type_hints(GenerationKeywords) == declared
    keywords = get_type_hints(LoadKeywords)
    signature = inspect.signature(heedful.load).parameters
    assert keywords == {name: signature[name].annotation for name in [*signature][1:]}
    logits = inspect.signature(heedful.Classifier.class_logits).parameters
    assert get_type_hints(ClassificationKeywords).keys() == logits.keys() - {"self", "texts"}
    run_time = {field.name for field in fields(RunTimeOptions)}
    assert run_time - {"batch_tokens"} == keywords.keys() - {"use"}
    for field in fields(RunTimeOptions):
        if field.name in signature:
            assert signature[field.name].default == field.default


def test_dir_lists_the_public_methods_of_a_model() -> None:
    """Nothing with an underscore, and nothing that is for other packages of heedful alone."""
    models = [model_of("marian"), model_of("gpt2"), model_of("bert", head="classify")]
    models.append(model_of("bert", head="mlm"))
    for model in models:
        names = dir(model)
        assert not [name for name in names if name.startswith("_")]
        assert {"save", "embed", "config", "metadata"} < {*names}
        assert not {*names} & INTERNAL
    assert {"generate", "stream", "score", "translate"} < {*dir(models[0])}
    known = {name for model in models for name in object.__dir__(model)}
    assert known >= INTERNAL


def test_docstring_examples_of_public_names_are_correct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each public name, and of each public function of the packages; run beside models."""
    monkeypatch.chdir(tmp_path)
    for folder, architecture, keys in (
        *(("mine", "marian", {}), ("other", "marian", {}), ("novel", "gpt2", {})),
        *(("labels", "bert", {"head": "classify"}), ("vectors", "bert", {"head": "none"})),
    ):
        model_of(architecture, **keys).save(f"runs/{folder}")
    masked: Any = model_of("bert", head="mlm")
    specials: Any = {"template": "both", "extra_specials": ["<mask>"]}
    tokenizer = heedful.train_tokenizer(TEXTS, vocab_size=VOCAB, **specials)
    heedful.from_net(masked.net, masked.config, tokenizer).save("runs/masked")
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    things = {name: getattr(heedful, name) for name in heedful.__all__}
    for package in (heedful.models, heedful.zoo, heedful.generation, heedful.insight):
        named = {name: getattr(package, name) for name in package.__all__}
        things |= {name: thing for name, thing in named.items() if inspect.isfunction(thing)}
    for name, thing in things.items():
        module = importlib.import_module(thing.__module__)
        tests = finder.find(thing, name, module=module, extraglobs={"heedful": heedful})
        assert any(test.examples for test in tests), f"{name} has no example"
        for test in tests:
            assert runner.run(test).failed == 0, name


@pytest.mark.parametrize("name", ["marian", "gpt2"])
def test_one_prompt_has_one_output_and_a_list_has_a_list(name: str) -> None:
    model: Any = model_of(name)
    options = {"max_new_tokens": 4, "beam_size": 2}
    texts = model.generate(TEXTS, **options)
    assert texts == [model.generate(text, **options) for text in TEXTS]
    details = model.generate(TEXTS, return_details=True, **options)
    alone = model.generate(TEXTS[0], return_details=True, **options)
    assert [output.ids for output in alone] == [output.ids for output in details[0]]
    assert [outputs[0].text for outputs in details] == texts
    rows = model.prompt_ids(TEXTS)
    ids = model.generate(rows, **options)
    assert ids == [model.generate(row, **options) for row in rows]
    assert ids == [outputs[0].ids for outputs in details]
    assert model.generate([], **options) == []


def test_one_text_has_one_class_and_one_vector() -> None:
    model: Any = model_of("bert", head="classify")
    for pairs in (None, TEXTS):
        of_list = model.classify(TEXTS, pairs=pairs)[1]
        alone = model.classify(TEXTS[1], pairs=pairs and pairs[1])
        assert of_list.probability == pytest.approx(alone.probability)
        assert of_list.label == alone.label
    assert model.embed(TEXTS)[1].tolist() == pytest.approx(model.embed(TEXTS[1]).tolist())
    assert model.embed(TEXTS[1]).ndim == 1


@pytest.mark.parametrize(
    ("name", "keys", "parts"),
    [
        ("marian", {}, ("Translator(marian, ", "parameters", "eager float32 on cpu")),
        ("bert", {"head": "mlm"}, ("MaskedLanguageModel(bert, ", "parameters")),
    ],
)
def test_repr_names_kind_architecture_size_and_backend(
    name: str, keys: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    model = model_of(name, **keys)
    for part in parts:
        assert part in repr(model)
    model.save(str(tmp_path / "model"))  # a path may be a string
    assert repr(heedful.load(str(tmp_path / "model"), device="cpu")) == repr(model)


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        (heedful.load_translator, "translator"),
        (heedful.load_language_model, "language model"),
        (heedful.load_masked_language_model, "masked language model"),
        (heedful.load_encoder, "encoder"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name(load: Any, kind: str, tmp_path: Path) -> None:
    wrong = "gpt2" if kind != "language model" else "marian"
    model_of(wrong).save(tmp_path / "model")
    with pytest.raises(heedful.UserError, match=f"needs an? {kind}, but this model is a "):
        load(tmp_path / "model")
