"""Directories for sentence-transformers and from it: its vectors equal those of heedful."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_onnx import TEXT, model_of

import heedful
from heedful.errors import UserError
from heedful.export.hf import export_hf, import_hf
from heedful.export.sentence_transformers import export_sentence_transformers
from heedful.files import read_json, write_json

TEXTS = [TEXT, "words", "it is 12 of more", "a"]
KINDS = {"cls": "first", "max": "max", "mean": "mean", "lasttoken": "last"}
LEGACY = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"}


def library() -> Any:
    """sentence-transformers, which takes seconds to import: not in workers without these tests."""
    reason = "sentence_transformers is not installed"
    return pytest.importorskip("sentence_transformers", reason=reason)


def folder_of(name: str, folder: Path, pooling: Any, *, normalize: bool = False) -> Any:
    """A model that sentence-transformers saved at `folder`."""
    st = library()
    modules_of_st = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    net = folder.with_name("net")
    export_hf(model_of(name), net)
    modules = [modules_of_st.Transformer(str(net))]
    modules.append(modules_of_st.Pooling(modules[0].get_embedding_dimension(), pooling))
    modules += [modules_of_st.Normalize()] if normalize else []
    model = st.SentenceTransformer(modules=modules, device="cpu")
    model.save(str(folder))
    return model


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "first", "last", "max"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_vectors_are_equal(name: str, pooling: Any, normalize: bool, tmp_path: Path) -> None:
    model = model_of(name)
    for _ in range(2):
        export_sentence_transformers(
            model, tmp_path / "out", pooling=pooling, normalize=normalize, overwrite=True
        )
    other = library().SentenceTransformer(str(tmp_path / "out"), device="cpu")
    expected = model.vectors(TEXTS, pooling=pooling, normalize=normalize)
    np.testing.assert_allclose(other.encode(TEXTS), expected, atol=1e-5)
    assert other.max_seq_length == model.config.max_length


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", KINDS)
def test_an_imported_model_keeps_pooling_and_normalization(
    pooling: str, normalize: bool, tmp_path: Path
) -> None:
    other = folder_of("bert", tmp_path / "theirs", pooling, normalize=normalize)
    expected = other.encode(TEXTS)
    model = import_hf(tmp_path / "theirs", tmp_path / "ours")
    assert (model.metadata.pooling, model.metadata.normalize) == (KINDS[pooling], normalize)
    opened = heedful.load(tmp_path / "ours", device="cpu")
    np.testing.assert_allclose(opened.embed(TEXTS).numpy(), expected, atol=1e-5)
    plain = heedful.load(tmp_path / "theirs", device="cpu").embed(
        TEXTS, pooling="mean", normalize=False
    )
    means = [
        states.mean(0) for states in opened.backend_with("states").states(opened.encode(TEXTS))
    ]
    np.testing.assert_allclose(plain.numpy(), np.stack(means), atol=1e-6)
    export_sentence_transformers(opened, tmp_path / "again")
    again = library().SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(again, expected, atol=1e-5)
    notices: list[str] = []
    export_hf(opened, tmp_path / "hf", on_notice=notices.append)
    kept = (pooling, normalize) == ("mean", False)
    assert any("is not in this format" in line for line in notices) is not kept
    file = tmp_path / "theirs" / "1_Pooling" / "config.json"  # as former versions wrote it
    legacy = {f"pooling_mode_{key}": name == pooling for name, key in LEGACY.items()}
    write_json(file, {"word_embedding_dimension": 48, **legacy})
    assert heedful.load(tmp_path / "theirs").metadata.pooling == KINDS[pooling]


@pytest.mark.parametrize("pooling", ["weightedmean", "mean_sqrt_len_tokens", ["cls", "max"]])
def test_a_pooling_that_heedful_lacks_is_refused_by_name(pooling: Any, tmp_path: Path) -> None:
    folder_of("bert", tmp_path / "theirs", pooling)
    name = pooling if isinstance(pooling, str) else " and ".join(pooling)
    with pytest.raises(UserError, match=f"the pooling {name} is not supported; supported: one of"):
        import_hf(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"2_Normalize": "Dense"}, "has the modules Transformer, Pooling, Dense; supported:"),
        ({"1_Pooling": "Normalize"}, "has the modules Transformer, Normalize, Normalize;"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
    ],
)
def test_other_modules_are_refused_by_name(
    changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    folder_of("bert", tmp_path / "theirs", "cls", normalize=True)
    file = tmp_path / "theirs" / "modules.json"
    modules = read_json(file)
    for module in modules:
        kind = changes.get(module["path"])
        module["type"] = f"sentence_transformers.models.{kind}" if kind else module["type"]
    write_json(file, modules)
    if "module_input_name" in changes:
        write_json(tmp_path / "theirs" / "2_Normalize" / "config.json", changes)
    with pytest.raises(UserError, match=message):
        import_hf(tmp_path / "theirs", tmp_path / "ours")


SETTINGS = "sentence_bert_config.json"


@pytest.mark.parametrize("name", [SETTINGS, "tokenizer_config.json"])
def test_settings_of_the_texts_that_are_not_imported_are_reported(
    name: str, tmp_path: Path
) -> None:
    folder_of("bert", tmp_path / "theirs", "cls")
    settings = {"do_lower_case": True} | ({"max_seq_length": 5} if name == SETTINGS else {})
    write_json(tmp_path / "theirs" / SETTINGS, settings)
    if name != SETTINGS:
        file = tmp_path / "theirs" / name
        write_json(file, (read_json(file) if file.is_file() else {}) | {"model_max_length": 5})
    notices: list[str] = []
    import_hf(tmp_path / "theirs", tmp_path / "ours", on_notice=notices.append)
    assert [
        any(words in line for line in notices)
        for words in ("cuts texts after 5 tokens", "in lower case")
    ] == [True, True]


PROMPTS = "config_sentence_transformers.json"


def test_prompts_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    folder_of("bert", tmp_path / "theirs", "mean")
    prompts = {"query": "it is more: ", "document": None}
    write_json(tmp_path / "theirs" / PROMPTS, {"prompts": prompts, "default_prompt_name": "query"})
    other = library().SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    import_hf(tmp_path / "theirs", tmp_path / "ours")
    model = heedful.load(tmp_path / "ours", device="cpu")
    asked: list[dict[str, Any]] = [
        *({}, {"prompt_name": "query"}, {"prompt_name": "document"}),
        *({"prompt": "of words "}, {"prompt": ""}),
    ]
    found = [model.embed(TEXTS, **options).numpy() for options in asked]
    for options, vectors in zip(asked, found, strict=True):
        np.testing.assert_allclose(vectors, other.encode(TEXTS, **options), atol=1e-5)
    assert np.abs(found[0] - found[4]).max() > 1e-2
    rows = model.encode(TEXTS)  # ids are unchanged
    np.testing.assert_allclose(model.embed(rows).numpy(), found[4], atol=1e-6)
    for _ in range(2):
        export_sentence_transformers(model, tmp_path / "again", overwrite=True)
    again = library().SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), found[0], atol=1e-5)
    assert again.prompts == {"query": "it is more: ", "document": ""}
    notices: list[str] = []
    export_hf(model, tmp_path / "hf", on_notice=notices.append)
    assert any("prompts of its texts are not in this format" in line for line in notices)
    with pytest.raises(UserError, match="no prompt of the name 'title'; it has: query, document"):
        model.embed(TEXTS, prompt_name="title")
    with pytest.raises(UserError, match="prompt must be a text, not"):
        model.embed(TEXTS, prompt=5)
    with pytest.raises(UserError, match="not both"):
        model.embed(TEXTS, prompt_name="query", prompt="a ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (PROMPTS, {"prompts": ["a"]}, "prompts must be texts by name"),
        (PROMPTS, {"prompts": {"a": 1}}, "prompts must be texts by name"),
        (PROMPTS, {"default_prompt_name": ["a"]}, "which prompts does not have"),
        (PROMPTS, {"default_prompt_name": "a"}, "is 'a', which prompts does not have"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
    ],
)
def test_prompts_that_cannot_be_applied_are_one_line(
    name: str, content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    export_sentence_transformers(model_of("bert"), tmp_path / "theirs")
    write_json(tmp_path / "theirs" / name, content)
    with pytest.raises(UserError, match=message):
        import_hf(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


OUTSIDE = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../other"}]


@pytest.mark.parametrize(
    "content", ["{}", "[1]", "[", json.dumps(OUTSIDE[:1]), json.dumps(OUTSIDE)]
)
def test_damaged_modules_are_one_line(content: str, tmp_path: Path) -> None:
    export_hf(model_of("bert"), tmp_path / "net")
    (tmp_path / "net" / "modules.json").write_text(content)
    with pytest.raises(UserError, match=r"modules\.json"):
        import_hf(tmp_path / "net", tmp_path / "ours")


def test_other_models_and_poolings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs an encoder-only model"):
        export_sentence_transformers(model_of("gpt2"), tmp_path / "out")
    with pytest.raises(UserError, match="pooling must be mean, first, last, max, not 'median'"):
        export_sentence_transformers(model_of("bert"), tmp_path / "out", pooling="median")
