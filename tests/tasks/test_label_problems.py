"""Training with several labels a text, and with values: data, loss, scores, saved models."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

import heedful
from encoder_runs import LEARNS, PreparedTask, assert_resumes, saved, tiny, words
from heedful.data.labels import label_targets
from heedful.data.row_files import open_rows
from heedful.data.rows import LABEL, collect
from heedful.errors import UserError
from heedful.evaluation.labels import multi_label_scores, regression_scores
from heedful.export.hf import export_hf
from heedful.run import train
from heedful.tasks.in_memory import InMemoryData
from heedful.training.events import Evaluated
from heedful.training.listeners import read_log

COLORS, FILLERS = ["red", "green", "blue"], ["the", "a", "old", "house", "river", "near"]
TOKENIZER = words([*COLORS, *FILLERS])
PROBLEMS = ["multi_label", "regression"]


def rows_of(problem: str, count: int, seed: int = 0) -> list[tuple[str, list[Any]]]:
    """Texts, with the colors in them, or with the share of each of the first two colors."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        colors = [color for color in COLORS if rng.random() < 0.5]
        text = [*colors, *map(str, rng.choice(FILLERS, rng.integers(1, 4)))]
        rng.shuffle(text)
        values = [round(0.5 * (color in colors) - 0.2, 2) for color in COLORS[:2]]
        rows.append((" ".join(text), colors if problem == "multi_label" else values))
    return rows


def write(path: Path, rows: list[tuple[str, list[Any]]]) -> str:
    """Rows as .tsv, or as .jsonl with lists."""
    if path.suffix == ".jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    else:
        lines = [f"{text}\t{' , '.join(map(str, label))}" for text, label in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def recipe_of(problem: str | None, file: str, **changes: Any) -> Any:
    objective = {} if problem is None else {"problem": problem}
    size = None if changes.get("data__valid") else 20
    keys = {"data__train": {"file": file}, "data__valid_size": size, "objective": objective}
    return tiny("classification", **(keys | changes))


def source_of(folder: Path, problem: str, labels: list[str]) -> Path:
    """A saved classifier of a problem."""
    keys = {"labels": labels, "head": "classify", "num_labels": len(labels)}
    model = saved(folder / "first", "bert", TOKENIZER, **keys)
    model.metadata = replace(model.metadata, problem=problem)
    model.save(folder / "source")
    return folder / "source"


# --- data and loss ---------------------------------------------------------------------------


@pytest.mark.parametrize("problem", PROBLEMS)
def test_labels_are_read_from_lists_and_from_cells(tmp_path: Path, problem: str) -> None:
    rows = rows_of(problem, 60)
    jobs = [
        PreparedTask(recipe_of(problem, write(tmp_path / f"rows{suffix}", rows)), tmp_path / suffix)
        for suffix in (".tsv", ".jsonl")
    ]
    for job in jobs:
        names = ("blue", "green", "red") if problem == "multi_label" else ("value_1", "value_2")
        assert (job.data.problem, job.data.labels) == (problem, names)
        columns, seen = job.data.splits["train"], dict(rows)
        targets = label_targets(columns, np.arange(len(columns)), names, job.data.problem)
        for ids, target in zip(job.data.ids("train"), targets, strict=True):
            expected = seen[job.tokenizers[0].decode(ids.tolist())]
            if problem == "multi_label":
                expected = [name in expected for name in names]
            np.testing.assert_allclose(target, expected, rtol=1e-6)
        batch = job.load_batch(job.plan_epoch(0)[0])
        assert batch.targets.shape == (8, len(names))
        parts = [batch.part(index, 3) for index in range(3)]
        assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    shown = "\n".join(jobs[0].printed_lines)
    assert ("labels     blue (" in shown) == (problem == "multi_label")


def test_lists_of_classes_are_read_from_tables_and_from_memory(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = rows_of("multi_label", 40)
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.Sequence(datasets.ClassLabel(names=COLORS)),
        }
    )
    columns = {
        "text": [text for text, _ in rows],
        "label": [[COLORS.index(name) for name in label] for _, label in rows],
    }
    table = datasets.Dataset.from_dict(columns, features=features)
    table.to_parquet(str(tmp_path / "rows.parquet"))
    write(tmp_path / "rows.tsv", rows)
    for file in ("rows.parquet", "rows.tsv"):
        source = open_rows([tmp_path / file], {"text": None, "label": None})
        read = collect(replace(source, problem="multi_label"))
        actual = [{*filter(None, map(str.strip, cell.split(",")))} for cell in read[LABEL]]
        assert actual == [{*label} for _, label in rows]
    recipe = tiny("classification", objective={"problem": "multi_label"}, data__valid_size=10)
    for data in (rows, table):
        made = InMemoryData.convert(recipe, ("text", "label"), data, tmp_path)
        (content,) = made.files.values()
        assert [json.loads(line)["label"] for line in content.splitlines()] == [
            label for _, label in rows
        ]
    values = InMemoryData.convert(
        recipe, ("text", "label"), [("a", 0.5), ("b", [1, 2.5])], tmp_path
    )
    (content,) = values.files.values()
    assert [json.loads(line)["label"] for line in content.splitlines()] == [0.5, [1, 2.5]]


def test_masked_texts_may_come_from_a_file_with_several_labels(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", rows_of("multi_label", 40))
    job = PreparedTask(tiny("masked_lm", data__train={"file": file}), tmp_path / "data")
    assert job.num_train + job.num_valid == 40


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("outputs", [1, 2])
def test_loss_and_saved_model_are_those_of_transformers(
    tmp_path: Path, problem: str, outputs: int
) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = rows_of(problem, 60)
    cut = [(text, label[:outputs]) for text, label in rows]
    if problem == "multi_label":
        cut = [(text, [item for item in label if item in COLORS[:outputs]]) for text, label in rows]
    job = PreparedTask(
        recipe_of(problem, write(tmp_path / "rows.tsv", cut)), tmp_path / "data", "bert"
    )
    batch = job.load_batch(job.plan_epoch(0)[0])
    sums = job.task.loss(job.model.net.eval(), batch)
    export_hf(job.model, tmp_path / "hf")
    content = json.loads((tmp_path / "hf/config.json").read_text())
    expected = {"multi_label": "multi_label_classification"}.get(problem, problem)
    assert content["problem_type"] == expected
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    labels = batch.targets.float()
    mask = batch.tokens.real.long()
    with torch.no_grad():
        theirs = other(
            input_ids=batch.tokens.ids,
            attention_mask=mask,
            labels=labels[:, 0] if problem == "regression" and outputs == 1 else labels,
        )
    assert sums.loss.item() / sums.tokens == pytest.approx(theirs.loss.item(), rel=1e-5)
    back = heedful.load(tmp_path / "hf", device="cpu")
    assert (back.metadata.problem, back.labels) == (problem, job.data.labels)


# --- scores ----------------------------------------------------------------------------------


def test_scores_of_several_labels_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, predictions = rng.random((2, 40, 5)) < 0.3
    labels[:, 4] = predictions[:, 4] = False  # left out of the mean
    actual = multi_label_scores(labels, predictions)
    for kind in ("micro", "macro"):
        expected = metrics.f1_score(labels, predictions, average=kind, zero_division=np.nan)
        assert actual[f"{kind}_f1"] == pytest.approx(expected)
    assert actual["exact_match"] == pytest.approx(metrics.accuracy_score(labels, predictions))
    nothing = multi_label_scores(labels & False, labels & False)
    assert nothing == {"micro_f1": 0, "macro_f1": 0, "exact_match": 1}


def test_scores_of_a_regression_are_those_of_scipy() -> None:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 5, (40, 2)).astype(np.float32)  # with ties
    values = (targets + rng.normal(size=(40, 2))).astype(np.float32)
    actual = regression_scores(targets, values)
    columns = list(zip(targets.T.astype(float), values.T.astype(float), strict=True))
    for name, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        expected = np.mean([function(x, y).statistic for x, y in columns])
        assert actual[name] == pytest.approx(expected)
    for name in ("mean_squared_error", "mean_absolute_error"):
        expected = getattr(metrics, name)(targets, values)
        assert actual[name] == pytest.approx(expected, rel=1e-5)
    assert regression_scores(targets, values * 0)["pearson"] == 0


# --- runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PROBLEMS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The problem, and the folder of a run that has learned."""
    folder = tmp_path_factory.mktemp(request.param)
    files = {
        f"data__{split}": {"file": write(folder / f"{split}.tsv", rows_of(request.param, 40, seed))}
        for seed, split in enumerate(("valid", "test"), 1)
    }
    train_file = write(folder / "train.tsv", rows_of(request.param, 300))
    metric = {"multi_label": "exact_match", "regression": "mean_absolute_error"}[request.param]
    changes = {**LEARNS, **files, "evaluation__metric": metric}
    changes |= {"training__max_steps": 300, "training__evaluate_every": 100}
    changes["data__drop_held_out"] = False
    train(recipe_of(request.param, train_file, **changes), folder / "run", progress=False)
    return request.param, folder


def test_a_run_learns_and_its_model_says_the_same(run: Any) -> None:
    problem, folder = run
    content = json.loads((folder / "run/scores.json").read_text())
    scores, model = content["scores"], heedful.load(folder / "run", device="cpu")
    assert model.metadata.problem == problem
    rows = rows_of(problem, 40, 2)
    answers = model.classify([text for text, _ in rows])
    lines = (folder / "run/test.output.txt").read_text().splitlines()
    if problem == "multi_label":
        assert lines == [answer.text for answer in answers]
        right = [
            {*answer.labels} == {*label} for answer, (_, label) in zip(answers, rows, strict=True)
        ]
        assert scores["exact_match"] == np.mean(right) > 0.7
        assert content["per_label"]["red"]["num_texts"] == sum("red" in label for _, label in rows)
    else:
        actual = np.array([[*answer.values.values()] for answer in answers])
        written = [[*map(float, line.split("\t"))] for line in lines]
        np.testing.assert_allclose(written, actual, atol=2e-6)
        errors = actual - [label for _, label in rows]
        assert scores["mean_squared_error"] == pytest.approx(np.mean(errors**2), rel=1e-4)
        assert scores["loss"] == pytest.approx(np.mean(errors**2), rel=1e-4)
        assert scores["pearson"] > 0.8
    evaluations = [e for e in read_log(folder / "run/log.jsonl") if isinstance(e, Evaluated)]
    name, choose = (
        ("exact_match", max) if problem == "multi_label" else ("mean_absolute_error", min)
    )
    best = [e for e in evaluations if e.is_best][-1]
    assert best.scores[name] == choose(e.scores[name] for e in evaluations)
    assert all(e.is_of_labels for e in evaluations)
    assert len(best.samples) == 5
    assert (folder / "run/report.html").is_file()


def test_evaluate_has_the_scores_of_the_run(run: Any, commands: Any) -> None:
    problem, folder = run
    command = ["evaluate", str(folder / "run"), "--input", str(folder / "test.tsv"), "--json"]
    content = json.loads(commands.run(*command).out)
    expected = json.loads((folder / "run/scores.json").read_text())["scores"]
    for name in expected.keys() - {"loss"}:
        # Near values may change their ranks by rounding: by two of 40 rows at most.
        tolerance = 1e-3 if name == "spearman" else 0.0
        assert content[name] == pytest.approx(expected[name], rel=1e-4, abs=tolerance), name
    shown = commands.run(*command[:-1]).out
    assert ("precision" in shown) == (problem == "multi_label")
    assert "predicted " in shown


def test_a_run_goes_on_with_the_problem_of_its_model(run: Any, tmp_path: Path) -> None:
    problem, folder = run
    changes = {"model": {}, "training__max_steps": 4}
    recipe = recipe_of(None, str(folder / "train.tsv"), **changes)
    recipe = recipe.model_copy(update={"init_from": str(folder / "run")})
    train(recipe, tmp_path / "next", progress=False)
    model = heedful.load(tmp_path / "next", device="cpu")
    assert model.metadata.problem == problem
    assert model.labels == heedful.load(folder / "run", device="cpu").labels
    loaded = json.loads((tmp_path / "next/init_from.json").read_text())
    assert loaded["initialized"] == []


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_killed_run_is_resumed_exactly(tmp_path: Path, problem: str) -> None:
    file = write(tmp_path / "train.tsv", rows_of(problem, 60))
    assert_resumes(recipe_of(problem, file, training__max_steps=12), tmp_path, ["scores.json"])


# --- refused input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "line", "message"),
    [
        ("multi_label", "a red\tred,,blue", r"line 21: a blank label in 'red,,blue'"),
        ("multi_label", "a red\tred,red", r"line 21: a label twice"),
        ("regression", "a red\tmany", r"line 21: the label 'many' is no finite number"),
        ("regression", "a red\tnan", r"line 21: .* no finite number"),
        ("regression", "a red\t1e60", r"line 21: .* no finite number"),
        ("regression", "a red\t", r"line 21: no label"),
        ("regression", "a red\t1", r"line 21: 1 numbers, where there must be 2"),
    ],
)
def test_wrong_labels_are_refused(tmp_path: Path, problem: str, line: str, message: str) -> None:
    file = write(tmp_path / "train.tsv", rows_of(problem, 20))
    with Path(file).open("a") as out:
        out.write(f"{line}\n")
    valid = write(tmp_path / "valid.tsv", rows_of(problem, 5, 1))
    recipe = recipe_of(problem, file, data__valid={"file": valid})
    with pytest.raises(UserError, match=message):
        PreparedTask(recipe, tmp_path / "data")


@pytest.mark.parametrize("label", [["red", "blue"], 0.5])
def test_lists_and_fractions_are_no_single_labels(tmp_path: Path, label: Any) -> None:
    rows = [("a red", "red"), ("a blue", "blue"), ("a red blue", label)]
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: the label .* is not a text"):
        PreparedTask(recipe_of(None, file), tmp_path / "data")


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training__label_smoothing", 0.1),
        ("training__r_drop", 1.0),
        ("distillation__teacher", "teacher"),
        ("evaluation__metric", "accuracy"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    tmp_path: Path, problem: str, key: str, value: Any
) -> None:
    file = write(tmp_path / "rows.tsv", rows_of(problem, 60))
    name = key.replace("__", ".")
    with pytest.raises(UserError, match=f"without a meaning for the problem {problem}: {name}"):
        PreparedTask(recipe_of(problem, file, **{key: value}), tmp_path / "data")
    source = source_of(tmp_path, problem, ["a", "b"])
    recipe = recipe_of(None, file, model={}, **({} if "teacher" in key else {key: value}))
    recipe = recipe.model_copy(update={"init_from": str(source)})
    if "teacher" not in key:
        with pytest.raises(UserError, match=f"without a meaning for the problem {problem}: {name}"):
            train(recipe, tmp_path / "run", progress=False)


@pytest.mark.parametrize(
    ("own", "origin"),
    [("single_label", "multi_label"), ("regression", "multi_label"), ("multi_label", "regression")],
)
def test_a_contradiction_to_the_model_is_refused(tmp_path: Path, own: str, origin: str) -> None:
    file = write(tmp_path / "rows.tsv", rows_of(own, 60))
    recipe = recipe_of(own, file, model={})
    recipe = recipe.model_copy(update={"init_from": str(source_of(tmp_path, origin, ["a", "b"]))})
    with pytest.raises(UserError, match=f"objective.problem is {own}, but init_from: .* {origin}"):
        train(recipe, tmp_path / "run", progress=False)


def test_a_label_without_a_training_row_is_refused(tmp_path: Path) -> None:
    rare = [("the red river", ["rare"])]
    file = write(tmp_path / "train.tsv", [*rows_of("multi_label", 60), *rare])
    valid = write(tmp_path / "valid.tsv", rare)
    recipe = recipe_of("multi_label", file, data__valid={"file": valid})
    with pytest.raises(UserError, match="no training row has the label 'rare'"):
        PreparedTask(recipe, tmp_path / "data")
