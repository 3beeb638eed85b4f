"""The model card of an exported directory: valid for the Hub, true of the run, never replaced."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from heedful import load
from heedful.config import parse_recipe
from heedful.data.hf_tokenizers import write_tokenizer
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.export.hf import export_hf
from heedful.export.model_card import model_card
from heedful.run import train
from heedful.training.run_report import RecordedRun

PAIRS = [("the dog", "der Hund"), ("the cat", "die Katze"), ("a dog", "ein Hund")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with BLEU and chrF of its test text."""
    folder = tmp_path_factory.mktemp("card")
    data: dict[str, Any] = {"src_language": "en", "tgt_language": "de"}
    for split, pairs in {"train": PAIRS, "valid": PAIRS[:1], "test": PAIRS[1:]}.items():
        lines = [f"{src} {split}\t{tgt} {split}\n" for src, tgt in pairs]
        (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
        data[split] = {"file": str(folder / f"{split}.tsv")}
    content = {
        "task": "translation",
        "data": data,
        "tokenizer": {"kind": "char", "vocab_size": None},
        "model": {"size": "tiny", "d_model": 16, "d_ff": 32, "num_heads": 2},
        "training": {"max_steps": 1, "device": "cpu", "schedule": {"learning_rate": 1e-3}},
        "evaluation": {"final_beam_size": 1},
    }
    train(parse_recipe(content), folder / "run")
    return folder / "run"


def test_a_card_is_valid_metadata_and_states_the_run(
    run: Path, tmp_path: Path, commands: Any
) -> None:
    outcome = commands.run("export", "hf", run, tmp_path / "my-model")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "my-model/README.md").read_text(encoding="utf-8")
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "language": ["en", "de"],
        "license": "unknown",
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["heedful", "vaswani2017"],
        "metrics": card.data.metrics,
    }
    assert {"bleu", "chrf"} <= {*card.data.metrics}
    assert "license: unknown # to be filled in by the author" in text
    assert card.text.strip().startswith("# my-model\n")
    for part in ("3 lines read", "on the test data", "task: translation", "License"):
        assert part in text
    assert "file: train.tsv\n" in text  # without the folders of the machine
    assert str(run.parent) not in text
    assert re.search(r"- BLEU: \S+ \(`nrefs:1\|case:mixed\|.*\|tok:13a\|.*\|version:.*`\)", text)


def test_the_code_of_a_card_runs(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    export_hf(load(run, device="cpu"), tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path / "out")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("\n")
    assert "Not recorded" in text
    assert "None is recorded" in text


def test_a_readme_is_never_replaced(run: Path, tmp_path: Path) -> None:
    model, out = load(run, device="cpu"), tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    for overwrite in (False, True):  # no model is in the directory
        with pytest.raises(UserError):
            export_hf(model, out, overwrite=overwrite)
    (out / "README.md").unlink()
    export_hf(model, out)
    (out / "README.md").write_text("mine")
    notices: list[str] = []
    export_hf(model, out, overwrite=True, precision="bfloat16", on_notice=notices.append)
    assert (out / "README.md").read_text() == "mine"
    assert any("README.md is kept" in notice for notice in notices)
    weights = load_file(out / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}


def test_an_unreadable_run_is_a_notice_and_not_the_end_of_an_export(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    notices: list[str] = []
    export_hf(load(run, device="cpu"), tmp_path / "out", run=folder, on_notice=notices.append)
    assert any("no facts of the run" in notice for notice in notices)
    assert "Not recorded" in (tmp_path / "out/README.md").read_text()


def test_scores_without_a_name_or_a_signature_are_in_the_card(run: Path) -> None:
    """Those of language models and classifiers are numbers, or have details alone."""
    recorded = RecordedRun.read(run)
    scores = {"perplexity": 12.5, "accuracy": 0.75, "f1": {"name": "F1", "score": 0.5}}
    facts = replace(recorded.facts, scores=scores)
    text = model_card(load(run, device="cpu"), "name", "bart", replace(recorded, facts=facts))
    for row in ("- perplexity: 12.5\n", "- accuracy: 0.75\n", "- F1: 0.5\n"):
        assert row in text
    assert ModelCard(text).data.metrics == ["perplexity", "accuracy", "f1"]


@pytest.mark.parametrize("is_marian", [False, True])
def test_a_card_names_only_folders_that_are_written(
    run: Path, is_marian: bool, tmp_path: Path
) -> None:
    """Equal tokenizers, and those of Marian, of which one class of transformers reads both."""
    model = load(run, device="cpu")
    tokenizer = model.src_tokenizer
    model._src_tokenizer, model._tgt_tokenizer = (
        Tokenizer(
            tokenizer._backend,
            tokenizer.kind,
            tokenizer.roles,
            files={f"{side}.spm": side.encode(), "vocab.json": b"{}"} if is_marian else None,
        )
        for side in ("source", "target")
    )
    write_tokenizer(model.src_tokenizer, tmp_path, model.tgt_tokenizer)
    assert not (tmp_path / "tokenizer_target").exists()
    assert "tokenizer_target" not in model_card(model, "name", "marian", None)


def test_a_source_begins_with_the_tag_of_its_target_language(run: Path) -> None:
    model = load(run, device="cpu")
    model.metadata = replace(model.metadata, language_tags={"de": "<2de>", "fr": "<2fr>"})
    assert 'tokenizer("<2de>A text."' in model_card(model, "name", "bart", None)


def test_languages_of_a_card_are_codes_whatever_form_their_tags_have(run: Path) -> None:
    model = load(run, device="cpu")
    model.metadata = replace(model.metadata, src_language="eng", tgt_language="pt_BR")
    assert ModelCard(model_card(model, "name", "bart", None)).data.language == ["en", "pt"]


def test_text_of_a_recipe_cannot_end_its_block(run: Path) -> None:
    model = load(run, device="cpu")
    recipe = SimpleNamespace(
        task="x", init_from=None, to_yaml=lambda **_: 'a: "\\n```\\n# B"\n', data=None
    )
    facts = SimpleNamespace(facts={}, scores={}, filters=SimpleNamespace(filters=[]))
    recorded: Any = SimpleNamespace(recipe=recipe, facts=facts)
    text = model_card(model, "name", "bart", recorded)
    [block] = re.findall(r"\n````yaml\n(.*?)\n````\n", text, re.DOTALL)
    assert yaml.safe_load(block) == {"a": "\n```\n# B"}
