"""A run that is killed and resumed ends as an uninterrupted one."""

import json
import random
import shutil

import pytest
import torch
import yaml

from commands import assert_refused, assert_same_checkpoints, tree, write_recipe
from heedful.data.prepared import cache_folder
from heedful.training.checkpoint import Checkpoints
from heedful.training.events import CheckpointSaved, Evaluated, RunFinished, RunStarted, StepDone
from heedful.training.folder import facts_of_run
from heedful.training.listeners import read_log
from heedful.zoo.saved import WEIGHTS, load_tensors, read_step

LAST = "checkpoints/step-00000012"
RESULTS = ("model.safetensors", "scores.json", "test.output.txt", "config.json", "tokenizer.json")


@pytest.fixture(scope="module")
def whole(commands, tmp_path_factory):
    """(recipe file, folder, seconds) of an uninterrupted run, for each set of changes."""
    runs = {}

    def make(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in runs:
            folder = tmp_path_factory.mktemp("whole")
            recipe = write_recipe(folder / "recipe.json", **changes)
            ended = commands.train(recipe, folder / "run")
            assert ended.code == 0, ended.err
            runs[key] = recipe, folder / "run", ended.seconds
        return runs[key]

    return make


def resume_run(commands, recipe, out, kill=None):
    """The next session, resumed if the folder has a checkpoint."""
    more = ["--resume"] if (out / "recipe.yaml").exists() else []
    return commands.train(recipe, out, *more, kill=kill)


def assert_same_files(out, reference, names=RESULTS):
    for name in names:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name


def assert_same_end(out, reference):
    assert_same_files(out, reference)
    assert_same_checkpoints(out, reference)
    assert not list(out.rglob(".*tmp*"))
    assert_whole_log(out, reference)


def assert_whole_log(out, reference):
    """Every step once and in order, and all target tokens counted once."""
    events, expected = (read_log(folder / "log.jsonl") for folder in (out, reference))
    for kind in (StepDone, Evaluated, CheckpointSaved):
        steps = [event.step for event in events if isinstance(event, kind)]
        assert steps == sorted(set(steps)), kind
    tokens, all_tokens = (
        sum(event.num_tokens for event in log if isinstance(event, StepDone))
        for log in (events, expected)
    )
    assert tokens == all_tokens
    losses, same = (
        [(e.step, e.loss, e.scores, e.is_best) for e in log if isinstance(e, Evaluated)]
        for log in (events, expected)
    )
    assert losses == same
    resumed = [event.resumed_from for event in events if isinstance(event, RunStarted)][1:]
    known = [step for step in resumed if step is not None]
    assert known == sorted(set(known))
    assert [isinstance(event, RunFinished) for event in events].count(True) == 1
    assert isinstance(events[-1], RunFinished)


# Several settings a run: what is lost of any of them shows in the files at the end.
MORE_RUNS: list[tuple[int, dict[str, object]]] = [
    (
        2,
        {
            "training__gradient_accumulation": 2,
            "model__norm_placement": "post",
            "training__optimizer": {"name": "adamw"},
        },
    ),
    (
        3,
        {
            "training__optimizer": {"name": "muon"},
            "training__average_of": "best",
            "training__label_smoothing": 0.0,
            "training__max_epochs": 1,
        },
    ),
    (4, {"model__dropout": 0.3, "training__patience": 3, "training__ema_decay": 0.7}),
]


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (1, {"training__checkpoint_every": 2}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_RUNS),
    ],
)
def test_killed_at_random_moments(commands, whole, tmp_path, seed, changes):
    recipe, reference, seconds = whole(training__seed=seed, **changes)
    draw, kills = random.Random(seed), 0
    for attempt in range(6):  # again where a machine that has become faster outran every moment
        out = tmp_path / f"run{attempt}"
        moments = [draw.uniform(0.05, 0.9) * seconds for _ in range(3)]
        sessions = [resume_run(commands, recipe, out, {"seconds": moment}) for moment in moments]
        assert {(s.code, s.signal) for s in sessions} <= {(-1, 9), (0, 0)}, (moments, sessions)
        kills += sum(session.signal == 9 for session in sessions)
        ended = resume_run(commands, recipe, out)
        assert ended.code == 0, (moments, ended.err)
        assert_same_end(out, reference)
        if kills >= 2:
            return
    pytest.fail(f"no session was killed at {moments} of {seconds} s")


def at(call, path, when, nth=1):
    return {"call": call, "path": path, "when": when, "nth": nth}


# Sessions of one run, each killed at a point: (call, its target, when, the nth of them).
POINTS = {
    "data preparation": [
        at("replace", r"run/run\.json$", "before"),
        at("replace", r"run/run\.json$", "after"),
        at("replace", r"run/recipe\.yaml$", "before"),
        at("replace", r"run/recipe\.yaml$", "after"),
        at("replace", r"/valid/\w+\.json$", "after"),
        at("replace", r"/valid\.jsonl$", "before"),
        at("replace", r"/src\.json$", "after"),
        at("replace", r"/training_rows\.json$", "before"),
        at("replace", r"/training_rows\.json$", "after"),
        at("replace", r"/train/\w+\.json$", "before"),
        at("replace", r"/train/\w+\.json$", "after"),
        at("replace", r"/data/[0-9a-f]+$", "before"),
        at("replace", r"/data/[0-9a-f]+$", "after"),
        at("replace", r"run/config\.json$", "before"),
        at("replace", r"run/run\.json$", "after"),
    ],
    "checkpoint": [
        at("save_file", r"\.step-.*/\.model\.safetensors", "before"),
        at("save_file", r"\.step-.*/\.model\.safetensors", "inside", 2),
        at("replace", r"\.step-.*/model\.safetensors$", "before"),
        at("replace", r"\.step-.*/model\.safetensors$", "after"),
        at("save_file", r"\.step-.*/\.training\.safetensors", "inside", 2),
        at("replace", r"\.step-.*/training\.safetensors$", "after"),
        at("replace", r"\.step-.*/state\.json$", "after"),
        at("replace", r"checkpoints/step-\d+$", "before"),
    ],
    "after a checkpoint": [
        at("replace", r"checkpoints/step-00000003$", "after"),
        at("replace", r"run/log\.jsonl$", "before"),
        at("replace", r"checkpoints/step-00000006$", "after"),
        at("unlink", r"step-00000006/training\.safetensors$", "before"),
        at("rmtree", r"checkpoints/step-00000003$", "before"),
    ],
    "after the last checkpoint": [
        at("rmtree", r"checkpoints/step-00000003$", "inside"),
        at("replace", r"run/scores\.json$", "before"),
    ],
    "before the oldest goes": [at("replace", r"checkpoints/step-00000012$", "after")],
    "best model": [
        at("save_file", r"checkpoints/\.best\.safetensors", "inside"),
        at("replace", r"checkpoints/best\.safetensors$", "after"),
        at("replace", r"run/model\.safetensors$", "before"),
        at("replace", r"run/model\.safetensors$", "after"),
        at("replace", r"run/model\.safetensors$", "after", 2),
    ],
    "end": [
        at("save_file", r"run/\.model\.safetensors", "inside"),
        at("replace", r"run/scores\.json$", "before"),
        at("replace", r"run/scores\.json$", "after"),
        at("replace", r"run/test\.output\.txt$", "before"),
        at("replace", r"run/report\.html$", "before"),
    ],
}


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(points, id=name, marks=[] if "checkpoint" in name else [pytest.mark.slow])
        for name, points in POINTS.items()
    ],
)
def test_killed_inside_a_write(commands, whole, tmp_path, points):
    # Data that no other run has prepared before.
    seed = {"data__generated__seed": 7 + list(POINTS.values()).index(points)}
    recipe, out = write_recipe(tmp_path / "recipe.json", **seed), tmp_path / "run"
    for point in points:
        killed = resume_run(commands, recipe, out, point)
        assert killed.signal == 9, (point, killed)
    ended = resume_run(commands, recipe, out)
    assert ended.code == 0, ended.err
    _, reference, _ = whole(**seed)
    assert_same_end(out, reference)


def test_ctrl_c_saves_and_prints_how_to_resume(commands, whole, tmp_path):
    recipe, reference, _ = whole()
    out = tmp_path / "run"
    # 3 evaluates: a stop there, and one between two evaluations.
    for step in (2, 3, 7):
        stopped = resume_run(commands, recipe, out, {"interrupt_at": step})
        assert (stopped.code, stopped.signal) == (130, 0), stopped
        line = stopped.err.splitlines()
        assert line == [f"stopped and saved; continue with: heedful train {out} --resume"]
        assert (out / f"checkpoints/interim-{step:08d}/training.safetensors").is_file()
    # The line that was printed, typed.
    words = line[0].partition("heedful ")[2].split()
    ended = commands.run(*words, "--quiet")
    assert ended.code == 0, ended.err
    log = [event for event in read_log(out / "log.jsonl") if not isinstance(event, CheckpointSaved)]
    assert [event.step for event in log if isinstance(event, Evaluated)] == [3, 6, 9, 12]
    assert_same_files(out, reference)
    left, right = ({p.name for p in (run / "checkpoints").iterdir()} for run in (out, reference))
    assert left == right
    assert_same_files(out / LAST, reference / LAST, ("model.safetensors", "training.safetensors"))


def test_sigterm_ends_an_evaluation_which_the_resumed_run_repeats(commands, whole, tmp_path):
    recipe, reference, _ = whole()
    out = tmp_path / "run"
    for nth in (2, 1):  # that of step 6, and again where it is made first of all
        stopped = resume_run(commands, recipe, out, {"interrupt_decoding": nth})
        assert (stopped.code, stopped.signal) == (130, 0), stopped
        evaluated = [e.step for e in read_log(out / "log.jsonl") if isinstance(e, Evaluated)]
        assert evaluated == [3]
        newest = Checkpoints(out / "checkpoints", 3).newest()
        assert newest == out / "checkpoints/interim-00000006"
    assert resume_run(commands, recipe, out).code == 0
    assert_same_files(out, reference)
    assert_same_checkpoints(out, reference)
    evaluated = [e.step for e in read_log(out / "log.jsonl") if isinstance(e, Evaluated)]
    assert evaluated == [3, 6, 9, 12]


def test_interrupted_twice_at_one_step_keeps_its_state(commands, whole, tmp_path):
    recipe, reference, _ = whole()
    out = tmp_path / "run"
    assert resume_run(commands, recipe, out, {"interrupt_at": 5}).code == 130
    saved = out / "checkpoints/interim-00000005"
    before = tree(saved)
    point = at("replace", r"interim-00000005$", "before")
    # The checkpoint of this step exists: it is neither removed nor written again.
    Checkpoints(out / "checkpoints", 3).save(5, torch.nn.Linear(1, 1), {}, {}, interim=True)
    assert tree(saved) == before
    assert resume_run(commands, recipe, out, point).code == 0
    assert_same_files(out, reference)


def test_an_unfinished_run_has_a_model_with_its_step(commands, whole, tmp_path):
    """After an interruption before the first evaluation, and while the run is locked."""
    recipe, reference, _ = whole()
    out = tmp_path / "run"
    assert resume_run(commands, recipe, out, {"interrupt_at": 1}).code == 130
    assert not [item for item in read_log(out / "log.jsonl") if isinstance(item, Evaluated)]
    assert commands.run("translate", out, stdin=b"a\n").code == 0
    assert read_step(out / WEIGHTS) == 1
    (out / ".lock").touch()
    assert "its model is of step 1" in commands.run("translate", out, stdin=b"a\n").err
    (out / WEIGHTS).unlink()
    refused = commands.run("translate", out, stdin=b"a\n")
    assert_refused(refused, "holds a run, but no model yet: it is written after the first step")
    config = out / "config.json"
    right = config.read_text()
    for damage in ({"architecture": 1}, {"model": None}):
        config.write_text(json.dumps(json.loads(right) | damage))
        assert_refused(resume_run(commands, recipe, out), "config.json was not written by heedful")
    config.write_text(right)
    assert resume_run(commands, recipe, out).code == 0
    assert_same_files(out, reference)


def test_resume_with_a_changed_recipe_names_keys_and_values_and_removes_nothing(commands, whole):
    recipe, reference, _ = whole()
    half = reference / ".model.safetensors.1.tmp"
    half.write_text("half")
    before = tree(reference)
    changes = ("--set", "training.seed=13", "--set", "model.dropout=0.2")
    refused = commands.train(recipe, reference, "--resume", *changes)
    assert_refused(refused, reference, "training.seed (1 -> 13)", "model.dropout (0.1 -> 0.2)")
    assert "d_model" not in refused.err
    assert tree(reference) == before
    half.unlink()


def test_a_finished_run_can_be_extended(commands, tmp_path):
    """Its schedule does not depend on the last step."""
    recipe = write_recipe(tmp_path / "recipe.json", training__schedule__name="constant")
    for out, ends in (("whole", (12,)), ("parts", (5, 12))):
        for number, end in enumerate(ends):
            more = ["--resume"] if number else []
            done = commands.train(
                recipe, tmp_path / out, *more, "--set", f"training.max_steps={end}"
            )
            assert done.code == 0, done.err
    assert "max_steps: 12\n" in (tmp_path / "parts" / "recipe.yaml").read_text()
    ended = commands.train(recipe, tmp_path / "parts", "--resume", "--set", "training.max_steps=5")
    assert ended.code == 2
    assert "has 12 steps" in ended.err
    assert "max_steps: 12\n" in (tmp_path / "parts" / "recipe.yaml").read_text()
    whole, parts = (load_tensors(tmp_path / out / LAST / WEIGHTS) for out in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.fixture
def moved(commands, tmp_path):
    """An interrupted run with relative paths, whose corpus and source model were removed."""
    work = tmp_path / "work"
    work.mkdir()
    for side in ("en", "de"):
        (work / f"a.{side}").write_text("".join(f"w{n % 7} w{n % 5}\n" for n in range(60)))
    pairs = {"train": {"src": "a.en", "tgt": "a.de"}, "valid_size": 6, "max_length": 12}
    keys = {"task": "translation", "data": pairs, "training__max_steps": 6}
    write_recipe(work / "first.json", **keys)
    write_recipe(work / "second.json", init_from="first", **keys)
    for line, kill in (
        ("first.json --out first", None),
        ("second.json --out whole", None),
        ("second.json --out run", {"interrupt_at": 4}),
    ):
        ended = commands.run("train", *line.split(), "--quiet", cwd=work, kill=kill)
        assert ended.code == (130 if kill else 0), ended.err
    return work


def test_a_run_resumes_in_any_current_folder_without_its_raw_text(commands, moved, tmp_path):
    for name in ("a.en", "a.de", "first", "second.json"):
        (moved / name).rename(tmp_path / name)
    ended = commands.run("train", moved / "run", "--resume", "--quiet", cwd=tmp_path / "first")
    assert ended.code == 0, ended.err
    assert_same_files(moved / "run", moved / "whole", ("model.safetensors", "scores.json"))
    assert_same_checkpoints(moved / "run", moved / "whole")


def test_missing_prepared_data_are_prepared_again(commands, moved, tmp_path):
    name = facts_of_run(moved / "run").data
    shutil.rmtree(cache_folder() / name)
    text = (moved / "a.en").read_text()
    before = tree(moved / "run")
    (moved / "a.en").write_text(text + "more\n")
    (moved / "a.de").write_text(text + "more\n")
    refused = commands.run("train", moved / "run", "--resume", "--quiet", cwd=tmp_path)
    assert_refused(refused, "its prepared data are missing", "have changed")
    (moved / "a.en").unlink()
    refused = commands.run("train", moved / "run", "--resume", "--quiet", cwd=tmp_path)
    assert_refused(refused, "its prepared data are missing", "cannot be prepared again", "a.en")
    assert tree(moved / "run") == before
    for side in ("en", "de"):
        (moved / f"a.{side}").write_text(text)
    ended = commands.run("train", moved / "run", "--resume", "--quiet", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert_same_files(moved / "run", moved / "whole", ("model.safetensors", "scores.json"))
    assert_same_checkpoints(moved / "run", moved / "whole")


def test_resuming_an_empty_folder_is_refused(commands, tmp_path):
    recipe = write_recipe(tmp_path / "recipe.json")
    refused = commands.train(recipe, tmp_path / "none", "--resume")
    assert_refused(refused, tmp_path / "none", "no run to resume", "leave out --resume")
    assert not (tmp_path / "none").exists()


def test_a_new_run_in_the_folder_of_a_run_is_refused(commands, whole):
    recipe, reference, _ = whole()
    before = tree(reference)
    assert_refused(commands.train(recipe, reference), "already holds a run", "--resume", "--out")
    assert tree(reference) == before


def test_the_saved_recipe_is_the_resolved_one(commands, whole, tmp_path):
    _, reference, _ = whole()
    saved = yaml.safe_load((reference / "recipe.yaml").read_text())
    assert saved["training"]["optimizer"]["betas"] == [0.9, 0.98]  # a default, written out
    assert saved["model"]["d_model"] == 16
    # The run can be repeated from its folder.
    again = commands.train(reference, tmp_path / "again")
    assert again.code == 0, again.err
    assert_same_end(tmp_path / "again", reference)
