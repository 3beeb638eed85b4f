"""Export to CTranslate2: the example program's output equals heedful's."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_models import TEXTS, model_of
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError
from heedful.export.ctranslate2 import export_ctranslate2


def run_example(directory: Path, text: str) -> list[str]:
    """The output of example.py in another process."""
    command = [sys.executable, str(directory / "example.py")]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


def test_the_example_translates_as_the_model_does(tmp_path: Path) -> None:
    model = model_of("vaswani2017")
    model.metadata.options["beam_size"] = 1
    export_ctranslate2(model, tmp_path / "out")
    ours = model.translate(TEXTS, max_new_tokens=48)
    assert run_example(tmp_path / "out", "\n".join(TEXTS)) == ours
    assert len(set(ours)) > 1
    code = (tmp_path / "out" / "example.py").read_text(encoding="utf-8")
    assert "torch" not in code
    assert "heedful" not in code


def test_the_example_has_the_forced_and_the_suppressed_tokens_of_the_model(tmp_path: Path) -> None:
    model = model_of("vaswani2017")
    model.metadata.options.update(beam_size=1, normalization="none")
    plain = model.translate(TEXTS, max_new_tokens=48)
    often = model.tgt_tokenizer.encode(plain[0])[:2]
    ids = replace(model.ids, forced_bos_id=1, suppressed_ids=tuple({*often}))
    model.metadata = replace(model.metadata, generation=ids)
    export_ctranslate2(model, tmp_path / "out")
    ours = model.translate(TEXTS, max_new_tokens=48)
    assert run_example(tmp_path / "out", "\n".join(TEXTS)) == ours
    assert ours != plain
    assert "length_penalty=0.0" in (tmp_path / "out" / "example.py").read_text(encoding="utf-8")


def test_the_example_continues_texts_as_the_model_does(tmp_path: Path) -> None:
    model = model_of("gpt2")
    export_ctranslate2(model, tmp_path / "out")
    text = "the cat sat"
    assert run_example(tmp_path / "out", text) == model.generate([text], max_new_tokens=24)


def test_the_example_classifies_as_the_model_does(tmp_path: Path) -> None:
    model = model_of("bert", head="classify")
    export_ctranslate2(model, tmp_path / "out")
    ours = [actual.label for actual in model.classify(TEXTS)]
    assert run_example(tmp_path / "out", "\n".join(TEXTS)) == ours


@pytest.mark.parametrize("problem", ["multi_label", "regression"])
def test_the_example_says_what_a_classifier_of_another_problem_says(
    problem: Any, tmp_path: Path
) -> None:
    model = model_of("bert", head="classify")
    model.metadata = replace(model.metadata, problem=problem)
    export_ctranslate2(model, tmp_path / "out")
    printed = run_example(tmp_path / "out", "\n".join(TEXTS))
    for line, result in zip(printed, model.classify(TEXTS), strict=True):
        if problem == "multi_label":
            assert line == ",".join(result.labels)
        else:
            values = [float(value) for value in line.split("\t")]
            assert values == pytest.approx([*result.values.values()], abs=1e-4)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", False), ("max", True)])
def test_a_vector_for_each_text(pooling: Any, normalize: bool, tmp_path: Path) -> None:
    model = model_of("bert", head="none")
    prompt: dict[str, Any] = {"prompts": {"q": "a "}, "default_prompt": "q"} if normalize else {}
    model.metadata = replace(model.metadata, pooling=pooling, normalize=normalize, **prompt)
    export_ctranslate2(model, tmp_path / "out")
    lines = " ".join(run_example(tmp_path / "out", TEXTS[0]))
    actual = torch.tensor([float(number) for number in lines.strip("[] ").split()])
    assert torch.allclose(actual, model.embed(TEXTS[:1])[0], atol=1e-4)


def test_two_tokenizers_have_separate_files_and_duplicate_pieces_are_renamed(
    tmp_path: Path,
) -> None:
    model = model_of("vaswani2017", tie_embeddings="none")
    other = train_tokenizer(TEXTS[2:], kind="word", vocab_size=40)
    model._tgt_tokenizer = other
    export_ctranslate2(model, tmp_path / "out")
    names = json.loads((tmp_path / "out" / "target_vocabulary.json").read_text(encoding="utf-8"))
    assert len(set(names)) == len(names) == 40
    assert names[other.eos_id] == "</s>"
    assert (tmp_path / "out" / "tokenizer.target.json").is_file()


def test_a_tokenizer_with_other_ids_is_used_by_its_pieces(tmp_path: Path) -> None:
    """Marian: the ids of the library differ, so text is passed as pieces."""
    model = model_of("vaswani2017")
    tokenizer = model.src_tokenizer
    ids = {tokenizer.piece(i): (i if i < 4 else 4 + (i + 7) % 36) for i in range(40)}
    own = Tokenizer(tokenizer._backend, tokenizer.kind, tokenizer.roles, piece_ids=ids)
    model._src_tokenizer = model._tgt_tokenizer = own
    model.metadata.options["beam_size"] = 1
    export_ctranslate2(model, tmp_path / "out")
    assert "decoder.decode" in (tmp_path / "out" / "example.py").read_text(encoding="utf-8")
    ours = [text.strip() for text in model.translate(TEXTS, max_new_tokens=48)]
    reference = run_example(tmp_path / "out", "\n".join(TEXTS))
    assert [line.strip() for line in reference] == ours
    assert own.encode(TEXTS[0]) != tokenizer.encode(TEXTS[0])


def test_a_refused_export_leaves_no_files(tmp_path: Path) -> None:
    model = model_of("vaswani2017", norm_placement="output")
    with pytest.raises(UserError, match="norm_placement output"):
        export_ctranslate2(model, tmp_path / "out")
    with pytest.raises(UserError, match="must be float32, bfloat16, int8, not int3"):
        export_ctranslate2(model, tmp_path / "out", precision="int3")
    assert not list(tmp_path.iterdir())


def test_the_error_without_ctranslate2_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(UserError, match=r"pip install 'heedful\[fast\]'"):
        export_ctranslate2(model_of("gpt2"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=str(tmp_path)):
            export_ctranslate2(model_of("gpt2"), tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    for overwrite in (False, True):  # an existing export is replaced with `overwrite`
        export_ctranslate2(model_of("gpt2"), tmp_path / "out", overwrite=overwrite)
