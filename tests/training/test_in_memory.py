"""Training on rows in memory: the same run as from files, for each family, and misuse refused."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import heedful
import heedful.run
from encoder_runs import NET, tiny
from heedful import extras
from heedful.config import Recipe
from heedful.errors import UserError
from heedful.pipelines import Classifier, LanguageModel, MaskedLanguageModel, Translator
from heedful.tasks.in_memory import InMemoryData
from heedful.tasks.translation import Translation
from heedful.training.events import Evaluated, Event, RunFinished, RunStarted

TEXTS = [
    f"the {color} {noun} runs" for color in ("red", "big", "old") for noun in ("dog", "cat")
] * 4
PAIRS = [(text, " ".join(reversed(text.split()))) for text in TEXTS]
LABELED = [(text, "dog" if "dog" in text else "cat") for text in TEXTS]
TWO_STACKS = {
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    **{key: NET[key] for key in ("d_model", "num_heads", "d_ff")},
}


class Dataset:
    """The part of `datasets.Dataset` that is read: length, rows, `column_names`, `features`."""

    def __init__(self, rows: list[dict[str, Any]], **features: Any) -> None:
        self.rows, self.features = rows, features
        self.column_names = list(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def recipe_of(task: str, **changes: Any) -> Recipe:
    keys: dict[str, Any] = {"training__max_steps": 2}
    if task != "copy":
        keys["data__valid_size"] = 4
    if task == "translation":
        keys["model"] = {"architecture": "vaswani2017", **TWO_STACKS}
        keys |= {"evaluation__decode_sentences": 2, "evaluation__final_beam_size": 1}
    if task == "denoising":
        keys["model"] = {"architecture": "vaswani2017", **TWO_STACKS}
    if task == "language_modeling":
        keys["model"] = {"architecture": "gpt2", "d_model": 16, "num_heads": 2, "num_layers": 1}
        keys["objective"] = {"context": 8, "sample_tokens": 3}
    return tiny(task, **(keys | changes))


@pytest.mark.parametrize(
    ("task", "rows", "kind", "source"),
    [
        ("translation", PAIRS, Translator, "file"),
        ("language_modeling", TEXTS, LanguageModel, "text"),
        ("masked_lm", TEXTS, MaskedLanguageModel, "text"),
        ("denoising", TEXTS, Translator, "text"),
        ("classification", LABELED, Classifier, "file"),
    ],
)
def test_a_run_from_memory_is_the_run_from_a_file(
    tmp_path: Path, task: str, rows: list[Any], kind: type[Any], source: str
) -> None:
    events: list[Event] = []
    run = heedful.train(
        recipe_of(task), tmp_path / "run", data=rows, on_event=events.append, progress=False
    )
    assert isinstance(run.model, kind)
    assert [type(events[0]), type(events[-1])] == [RunStarted, RunFinished]
    columns = {"translation": ("src", "tgt"), "classification": ("text", "label")}.get(task)
    lines = [dict(zip(columns, row, strict=True)) if columns else {"text": row} for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    recipe = recipe_of(task, **{f"data__train__{source}": str(file)})
    heedful.train(recipe, tmp_path / "same", progress=False)
    weights = [tmp_path / name / "model.safetensors" for name in ("run", "same")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("last", [[], ["\u200b"]], ids=["texts", "without_tokens"])
def test_bits_per_character_without_bos_count_only_characters_that_are_predicted(
    last: list[str],
) -> None:
    """Each target is one character, so that they are the loss in bits."""
    tokenizer = {"kind": "char", "vocab_size": None}
    objective = {"context": 8, "sample_tokens": 3, "add_bos_eos": False}
    recipe = recipe_of("language_modeling", tokenizer=tokenizer, objective=objective)
    events: list[Event] = []
    run = heedful.train(recipe, data=[*TEXTS, *last], progress=False, on_event=events.append)
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    assert run.scores is not None
    for scores in [run.scores.values(), *(e.scores | {"loss": e.loss} for e in evaluations)]:
        assert scores["bits_per_character"] == pytest.approx(scores["loss"] / math.log(2))
        assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / math.log(2))


def test_a_run_into_japanese_without_its_tokenizer_leaves_bleu_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "ipadic")
    recipe, lines = recipe_of("translation", data__tgt_language="ja"), list[str]()
    run = heedful.train(recipe, data=PAIRS, progress=False, print_line=lines.append)
    assert run.scores is not None
    assert [*run.scores.values()] == ["chrf", "ter"]
    (note,) = [line for line in lines if line.startswith("scores are without bleu: needs")]
    assert "pip install 'sacrebleu[ja]'" in note
    changed = recipe_of("translation", data__tgt_language="ja", evaluation__metric="bleu")
    with pytest.raises(UserError, match="the metric bleu needs MeCab and ipadic"):
        heedful.train(changed, tmp_path / "run", data=PAIRS, progress=False)
    assert not (tmp_path / "run").exists()


def test_an_error_in_an_evaluation_saves_its_step_and_names_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, options = Translation.evaluate, {"data": PAIRS, "progress": False}

    def broken(*arguments: Any) -> Any:
        raise KeyError("score")

    recipe = recipe_of("translation", training__evaluate_every=2, training__max_steps=4)
    monkeypatch.setattr(Translation, "evaluate", broken)
    with pytest.raises(UserError, match="step 2: the evaluation failed: KeyError: 'score';") as end:
        heedful.train(recipe, tmp_path / "run", **options)
    checkpoint = tmp_path / "run" / "checkpoints" / "interim-00000002"
    assert f"saved in {checkpoint}" in str(end.value)
    assert checkpoint.is_dir()
    monkeypatch.setattr(Translation, "evaluate", plain)
    heedful.train(recipe, tmp_path / "run", resume=True, **options)
    heedful.train(recipe, tmp_path / "whole", **options)
    weights = [tmp_path / name / "model.safetensors" for name in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("part", ["scores", "report"])
def test_an_error_in_final_scores_or_the_report_is_a_note_and_the_run_complete(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError("division by\nzero")

    if part == "scores":
        monkeypatch.setattr(Translation, "compute_final_scores", broken)
    else:
        monkeypatch.setattr(heedful.run, "write_run_report", broken)
    lines: list[str] = []
    run = heedful.train(
        recipe_of("translation"),
        tmp_path / "run",
        data=PAIRS,
        progress=False,
        print_line=lines.append,
    )
    note = {"scores": "no scores: ", "report": "no report was written: "}[part]
    assert [line for line in lines if f"{note}ZeroDivisionError: division by zero" in line]
    assert run.reason == "max_steps"
    assert isinstance(run.model, Translator)


def test_the_held_out_loss_is_the_one_that_selects_the_best_model() -> None:
    """Without label smoothing, which would be lower for a worse model."""
    events: list[Event] = []
    changes: dict[str, Any] = {"training__label_smoothing": 0.5, "training__evaluate_every": 1}
    schedule = {"name": "constant", "learning_rate": 0.1, "warmup_steps": 0}
    changes |= {"training__max_steps": 8, "training__schedule": schedule}
    recipe = recipe_of("translation", **changes)
    heedful.train(recipe, data=PAIRS, progress=False, on_event=events.append)
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    best = math.inf
    for event in evaluations:
        assert event.loss == pytest.approx(math.log(event.perplexity))
        assert event.smoothed_loss is not None
        assert event.is_best is (event.loss < best)
        best = min(best, event.loss)
    last = evaluations[-1]
    assert last.smoothed_loss != pytest.approx(last.loss, rel=1e-2)


def test_without_a_folder_the_run_is_temporary_and_its_model_is_not(tmp_path: Path) -> None:
    lines: list[str] = []
    run = heedful.train(
        recipe_of("translation"), data=PAIRS, progress=False, print_line=lines.append
    )
    folder, model = run.directory, run.model
    assert any("`heedful.verify(run.model.net)`" in line for line in lines)
    assert not any(str(folder) in line for line in lines)
    assert run.scores is not None
    assert (folder / "report.html").is_file()
    del run
    assert not folder.exists()
    model.save(tmp_path / "saved")
    texts = ["the red dog runs"]
    assert heedful.load(tmp_path / "saved", device="cpu").translate(texts) == model.translate(texts)


def test_a_temporary_run_that_diverges_does_not_refer_to_its_folder() -> None:
    schedule = {"name": "constant", "learning_rate": 1e38, "warmup_steps": 0}
    recipe = recipe_of("translation", training__schedule=schedule, training__clip_norm=None)
    with pytest.raises(UserError, match="train again with out=FOLDER and training") as end:
        heedful.train(recipe, data=PAIRS, progress=False)
    assert "heedful-" not in str(end.value)


def test_progress_is_shown_on_standard_error_unless_switched_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heedful.train(recipe_of("classification"), data=LABELED, progress=False)
    assert capsys.readouterr() == ("", "")
    heedful.train(recipe_of("classification"), data=LABELED)
    output = capsys.readouterr()
    assert not output.out
    for part in ("tokenizer", "training and", "held-out loss", "all steps done"):
        assert part in output.err, part


def test_an_exception_of_on_event_ends_the_run_which_resumes_with_the_same_rows(
    tmp_path: Path,
) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, Evaluated) and event.step == 4:
            raise KeyError

    recipe = recipe_of("classification", training__max_steps=8)
    out, options = tmp_path / "run", {"data": LABELED, "progress": False}
    with pytest.raises(KeyError):
        heedful.train(recipe, out, on_event=stop, **options)
    with pytest.raises(UserError, match=r"other rows than .*train\.jsonl"):
        heedful.train(recipe, out, resume=True, data=LABELED[1:], progress=False)
    heedful.train(recipe, out, resume=True, **options)
    heedful.train(recipe, tmp_path / "whole", **options)
    weights = [path / "model.safetensors" for path in (out, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_that_failed_before_its_first_step_starts_again_by_its_recipe(tmp_path: Path) -> None:
    def fail(event: Event) -> None:
        raise KeyError

    out = tmp_path / "run"
    with pytest.raises(KeyError):
        heedful.train(recipe_of("classification"), out, data=LABELED, on_event=fail, progress=False)
    assert heedful.train(out / "recipe.yaml", out, progress=False).scores is not None


def convert(rows: Any, task: str = "translation", **changes: Any) -> dict[str, list[Any]]:
    """The rows by split as they are written."""
    recipe = recipe_of(task, **changes)
    columns = heedful.plugins.task.get(task).row_columns
    actual = InMemoryData.convert(recipe, columns, rows, Path("run"))
    assert all(str(path) in str(actual.recipe.data) for path in actual.files)
    return {
        path.stem: [json.loads(line) for line in lines.splitlines()]
        for path, lines in actual.files.items()
    }


def test_rows_may_be_mappings_in_splits_with_columns_of_other_names() -> None:
    nested = [{"id": 7, "translation": {"de": "ja", "en": "yes"}}]
    fields = {"src_field": "translation.de", "tgt_field": "translation.en"}
    splits = {"train": Dataset(nested), "validation": nested, "test": [("a", "b")]}
    assert convert(splits, data__train=fields) == {
        "train": [{"src": "ja", "tgt": "yes"}],
        "valid": [{"src": "ja", "tgt": "yes"}],
        "test": [{"src": "a", "tgt": "b"}],
    }


def test_labels_may_be_numbers_or_classes_of_a_dataset_and_texts_may_be_pairs() -> None:
    dataset = Dataset(
        [{"sentence": "a", "label": 1}, {"sentence": "b", "label": 0}],
        label=SimpleNamespace(names=["bad", "good"]),
    )
    fields = {"data__train": {"text_field": "sentence"}}
    assert convert(dataset, "classification", **fields)["train"] == [
        {"text": "a", "label": "good"},
        {"text": "b", "label": "bad"},
    ]
    rows = [("a", "b", 1), ("c", "d", True)]
    assert convert(rows, "classification")["train"] == [
        {"text": "a", "pair": "b", "label": 1},
        {"text": "c", "pair": "d", "label": True},
    ]
    paired = [{"text": "a", "second": "b", "label": "x"}]
    fields = {"data__train": {"pair_field": "second"}}
    assert convert(paired, "classification", **fields)["train"] == [
        {"text": "a", "pair": "b", "label": "x"}
    ]


@pytest.mark.parametrize(
    ("rows", "changes", "problem"),
    [
        ("pairs.tsv", {}, "must be a list or a datasets.Dataset, not str; files are named in"),
        (iter(PAIRS), {}, "must be a list or a datasets.Dataset, not"),
        ([], {}, "data, train: there are no rows"),
        ([("a", "b"), ("a",)], {}, "data, train, row 2: 1 items, but a row has 2: src, tgt"),
        ([("a", 3)], {}, "data, train, row 1: tgt must be a text, not int"),
        ([3], {}, "row 1: a row is a tuple or a mapping, not int"),
        (["a"], {}, "row 1: 1 items, but a row has 2"),
        ([{"src": "a"}], {}, "row 1: no column 'tgt' among 'src'; set the recipe's"),
        ({"valid": PAIRS}, {}, "no split 'train'"),
        ({"train": PAIRS, "dev": PAIRS}, {}, "unknown split 'dev'"),
        (PAIRS, {"data__train": {"file": "x.tsv"}}, "the recipe names files for data.train"),
        (PAIRS, {"task": "copy"}, "the task copy reads no rows from memory"),
        ([(1, 1)], {"task": "classification"}, "row 1: text must be a text, not int"),
        ([("a", None)], {"task": "classification"}, "row 1: label must be a text, not NoneType"),
        ([("a", [None])], {"task": "classification"}, "row 1: an item of label must be a text or"),
        ([3], {"task": "masked_lm"}, "row 1: a row is a text or a mapping, not int"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows: Any, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        convert(rows, **changes)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_class_without_a_name_is_refused() -> None:
    rows = Dataset([{"text": "a", "label": -1}], label=SimpleNamespace(names=["x"]))
    with pytest.raises(UserError, match="row 1: label -1 has no class name"):
        convert(rows, "classification")


def test_a_run_without_a_folder_cannot_be_resumed() -> None:
    with pytest.raises(UserError, match="to resume a run, give its folder"):
        heedful.train(recipe_of("classification"), data=LABELED, resume=True, progress=False)
