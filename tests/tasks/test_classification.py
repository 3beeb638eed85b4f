"""Classification: batches, loss, F1, and runs from labeled files to a saved model."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from encoder_runs import LEARNS, PreparedTask, saved, tiny, words
from heedful.data.encoding import TextColumn, encode_rows
from heedful.data.row_files import read_rows
from heedful.errors import UserError
from heedful.pipelines import Classifier
from heedful.run import train
from heedful.tasks.classification import TextClassification
from heedful.tasks.prepared_data import FirstPass
from heedful.tasks.run_data import Inherited
from heedful.training.events import Evaluated
from heedful.training.listeners import read_log

LABELS = {"beast": ["cat", "dog", "cow"], "bird": ["hen", "owl", "duck"], "fish": ["eel", "cod"]}
ANIMALS = [animal for animals in LABELS.values() for animal in animals]
FILLERS = ["the", "a", "old", "runs", "sleeps", "near", "house", "river"]
TOKENIZER = words([*FILLERS, *ANIMALS])


def examples(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Texts of a few words, with the animal as the label."""
    rng = np.random.default_rng(seed)
    actual = []
    for _ in range(count):
        label = str(rng.choice(list(LABELS)))
        text = [str(word) for word in rng.choice(FILLERS, rng.integers(1, 6))]
        text.insert(int(rng.integers(len(text) + 1)), str(rng.choice(LABELS[label])))
        actual.append((" ".join(text), label))
    return actual


def write_tsv(path: Path, rows: list[tuple[str, ...]]) -> str:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_tsv(tmp_path / "train.tsv", examples(60))


def recipe_of(file: str, init_from: Path | None = None, **changes: Any) -> Any:
    changes = {"data__train": {"file": file}, **changes}
    if not changes.get("data__valid"):
        changes["data__valid_size"] = 10
    if init_from is not None:
        changes["model"] = {}
    recipe = tiny("classification", **changes)
    return recipe.model_copy(update={"init_from": init_from and str(init_from)})


def ready(folder: Path, file: str, **changes: Any) -> PreparedTask:
    return PreparedTask(recipe_of(file, **changes), folder, "bert")


@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
@pytest.mark.parametrize("num_equal", [1, 2])
def test_the_split_keeps_a_source_of_each_label_in_train(
    problem: Any, num_equal: int, tmp_path: Path
) -> None:
    """A label whose only row was held out ended the run."""
    texts = [f"the house {number}" for number in range(40)]
    texts += texts[: num_equal - 1]

    def read(labels: list[str]) -> FirstPass:
        file = write_tsv(tmp_path / "rows.tsv", [*zip(texts, labels, strict=True)])
        recipe = recipe_of(file, objective={"problem": problem})
        raw = replace(TextClassification(recipe).raw_data(), problem=problem)
        return FirstPass.read(recipe, raw, 1_000)

    labels = ["cat" if number % 2 else "dog" for number in range(len(texts))]
    before = read(labels)
    first, second, *_ = before.train.split.held_out.tolist()
    both = "owl,eel" if problem == "multi_label" else "owl"
    for number, text in enumerate(texts):
        if text == texts[first]:
            labels[number] = both
    labels[second] = "cod"
    read_again = read(labels)
    train = Counter(",".join(read_again.sample()["label"]).split(","))
    assert {*train} == {*read_again.train.labels} == {"cat", "dog", "cod", *both.split(",")}
    kept = {*before.train.split.held_out.tolist()} - {*read_again.train.split.held_out.tolist()}
    assert {texts[number] for number in kept} == {texts[first], texts[second]}
    count = len(before.train.split.held_out) - len(kept)
    assert len(read_again.held_out["valid"]) == read_again.train.split.num_valid == count
    line = f"{count} of data.train (data.valid_size); {len(kept)} kept in train, for labels"
    assert read_again.summaries["valid"].startswith(line)


def test_a_split_that_would_hold_out_nothing_is_left(tmp_path: Path) -> None:
    file = write_tsv(tmp_path / "rows.tsv", [(f"the house {n}", f"cat{n}") for n in range(40)])
    with pytest.raises(UserError, match="no training row has the label"):
        ready(tmp_path, file)


# --- a job's data ---------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_evaluations_are_deterministic_and_use_no_random_numbers(
    file: str, tmp_path: Path, metric: str
) -> None:
    job = ready(tmp_path / "data", file, evaluation__metric=metric)
    state = torch.get_rng_state()
    actual = job.evaluate()
    assert job.evaluate() == actual
    assert torch.equal(torch.get_rng_state(), state)
    assert actual.value == actual.scores[metric]
    assert actual.token_accuracy == actual.scores["accuracy"]
    assert (job.num_train, job.num_valid) == (50, 10)
    texts = dict(examples(60))
    assert [sample.reference for sample in actual.samples] == [
        texts[sample.source] for sample in actual.samples
    ]
    outputs = [sample.output for sample in actual.samples]
    predicted = job.model.classify([sample.source for sample in actual.samples])
    assert outputs == [answer.label for answer in predicted]


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_held_out_texts_are_truncated_but_never_dropped(tmp_path: Path, too_long: str) -> None:
    long = ("cat " * 30, "beast")
    train_file = write_tsv(tmp_path / "train.tsv", [*examples(20), long])
    test_file = write_tsv(
        tmp_path / "test.tsv", [("hen", "bird"), (f"{long[0]} cat", long[1]), ("cod", "fish")]
    )
    job = ready(
        tmp_path / "data",
        train_file,
        data__valid={"file": test_file},
        data__test={"file": test_file},
        data__truncation=too_long,
    )
    assert job.num_train == 20 + (too_long == "truncate")
    assert job.data.ids("test").lengths.tolist() == [3, 16, 3]
    job.compute_final_scores(tmp_path)
    assert len((tmp_path / "test.output.txt").read_text().splitlines()) == 3


# --- refused input ---------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["valid", "test"])
def test_an_unknown_label_is_refused_with_its_line(file: str, tmp_path: Path, split: str) -> None:
    valid = write_tsv(tmp_path / "valid.tsv", [("the cat", "beast"), ("", "x"), ("ant", "insect")])
    files = {"valid": {"file": file}, split: {"file": valid}}
    changes = {f"data__{name}": item for name, item in files.items()}
    printed_lines: list[str] = []
    with pytest.raises(UserError, match=r"valid\.tsv, line 3: label 'insect' is not among"):
        train(recipe_of(file, **changes), tmp_path / "run", print_line=printed_lines.append)
    assert not [
        line for line in printed_lines if line.startswith("tokenizer")
    ]  # printed before training
    assert not (tmp_path / "run").exists()


# --- runs -----------------------------------------------------------------------------------


def test_a_run_learns_and_its_model_classifies(tmp_path: Path) -> None:
    files = {
        name: write_tsv(tmp_path / f"{name}.tsv", examples(count, seed))
        for name, count, seed in (("train", 200, 1), ("valid", 40, 2), ("test", 50, 3))
    }
    recipe = recipe_of(
        files["train"],
        data__valid={"file": files["valid"]},
        data__test={"file": files["test"]},
        **LEARNS,
        evaluation__metric="accuracy",
        training__max_steps=100,
        training__evaluate_every=25,
        training__log_every=25,
        training__label_smoothing=0.1,
    )
    actual = train(recipe, tmp_path / "run")
    assert actual.scores is not None
    scores = actual.scores.values()
    assert scores["accuracy"] > 0.95
    assert scores["macro_f1"] > 0.95
    model = heedful.load(tmp_path / "run", device="cpu")
    assert isinstance(model, Classifier)
    assert model.labels == ("beast", "bird", "fish")
    texts, labels = zip(*examples(50, 3), strict=True)
    answers = model.classify(texts)
    predicted = [answer.label for answer in answers]
    assert (tmp_path / "run/test.output.txt").read_text().splitlines() == predicted
    written = json.loads((tmp_path / "run/scores.json").read_text())
    assert written["set"] == "test"
    assert written["scores"] == scores
    assert written["labels"] == list(model.labels)
    assert scores["accuracy"] == sum(a == b for a, b in zip(predicted, labels, strict=True)) / 50
    for i, label in enumerate(model.labels):
        for j, other in enumerate(model.labels):
            count = list(zip(labels, predicted, strict=True)).count((label, other))
            assert written["confusion"][i][j] == count
        assert written["per_label"][label]["num_texts"] == labels.count(label)
    # No text's answer or vector depends on the others.
    vectors = model.embed(texts)
    for text, answer, vector in list(zip(texts, answers, vectors, strict=True))[:8]:
        (alone,) = model.classify([text])
        assert alone.probabilities == pytest.approx(answer.probabilities, abs=1e-5)
        torch.testing.assert_close(model.embed([text])[0], vector, rtol=1e-5, atol=1e-5)
    events = read_log(tmp_path / "run/log.jsonl")
    evaluations = [event for event in events if isinstance(event, Evaluated)]
    best = [event for event in evaluations if event.is_best][-1]
    assert best.scores["accuracy"] == max(event.scores["accuracy"] for event in evaluations)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_pairs_are_classified(tmp_path: Path, name: str) -> None:
    pairs = [(first, second) for first in FILLERS[:4] for second in ANIMALS[:4]]
    held_out = pairs[:: len(FILLERS[:4]) + 1]  # each word once

    def rows(selected: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
        orders = [(*pair, "after") for pair in selected]
        return orders + [(second, first, "before") for first, second in selected]

    fields = {"text_field": 1, "pair_field": 2, "label_field": 3}
    splits = {"train": rows([pair for pair in pairs if pair not in held_out]) * 3}
    splits |= {"valid": rows(held_out), "test": rows(held_out)}
    files = {
        f"data__{split}": {"file": write_tsv(tmp_path / f"{split}.tsv", examples), **fields}
        for split, examples in splits.items()
    }
    changes = {**LEARNS, **files, "model__architecture": name}
    recipe = recipe_of("", **changes, training__max_steps=150, training__evaluate_every=150)
    actual = train(recipe, tmp_path / "run")
    assert actual.scores is not None
    assert actual.scores.values()["accuracy"] == 1
    lines = (tmp_path / "test.tsv").read_text().splitlines()
    firsts, seconds, labels = zip(*[line.split("\t") for line in lines], strict=True)
    opened = heedful.load(tmp_path / "run", device="cpu")
    answers = [answer.label for answer in opened.classify(firsts, pairs=seconds)]
    assert answers == list(labels)
    assert answers == (tmp_path / "run/test.output.txt").read_text().splitlines()


def test_a_classifier_keeps_the_order_of_its_labels(file: str, tmp_path: Path) -> None:
    labels = ("fish", "beast", "bird")
    source = tmp_path / "source"
    saved(source, "bert", TOKENIZER, labels=labels, head="classify", num_labels=3)
    origin = Inherited((TOKENIZER, TOKENIZER), labels=labels)
    job = PreparedTask(recipe_of(file, source), tmp_path / "data", inherited=origin)
    assert job.data.labels == job.describe_model("bert").labels == labels
    lines = Path(file).read_text().splitlines()
    label_of_text = {line.split("\t")[0]: line.split("\t")[1] for line in lines}
    stored = job.data.splits["train"].numbers("labels")
    for row, label in zip(job.data.ids("train"), stored, strict=True):
        assert label_of_text[job.tokenizers[0].decode(row.tolist())] == labels[label]


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_a_long_pair_is_truncated_as_in_training(tmp_path: Path, name: str) -> None:
    """The longer text is truncated, so that the pair ends as in training."""
    model = saved(tmp_path / "model", name, TOKENIZER, labels=("a", "b"), num_labels=2)
    model.config = replace(model.config, max_length=9)
    rows = [("the cat runs near a house", "old owl"), ("hen", "the duck sleeps near a river")]
    for text, other in rows:
        line = write_tsv(tmp_path / "one.tsv", [(text, other, "a")])
        columns = encode_rows(
            read_rows([Path(line)], {"text": 1, "pair": 2}),
            {"text": TextColumn(TOKENIZER, ("text", "pair"))},
            max_length=9,
            truncation="truncate",
        )
        ids, types = model.encode_pairs([text], [other], "truncate")
        assert ids == [columns.sequences("text")[0].tolist()]
        second = int(columns.numbers("text.second")[0])
        assert types == [[0] * second + [1] * (9 - second)]
    assert model.num_truncated == 2
    with pytest.raises(UserError, match=r"pair 1 has .* tokens, but the model allows 9"):
        model.encode_pairs(*zip(*rows, strict=True), "error")


def test_a_class_without_a_training_row_is_refused(tmp_path: Path) -> None:
    """Its only row is held out too, and thus dropped from training."""
    rare = ("the only one", "rare")
    rows = examples(60)
    valid = write_tsv(tmp_path / "valid.tsv", [rare, *examples(10, seed=1)])
    recipe = recipe_of(
        write_tsv(tmp_path / "train.tsv", [*rows, rare]), data__valid={"file": valid}
    )
    with pytest.raises(UserError, match="no training row has the label 'rare'"):
        train(recipe, tmp_path / "run", progress=False)
