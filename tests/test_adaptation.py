"""Adaptation to a translation memory: no leaks, scores of both texts, resumption, errors."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from backend_models import model_of
from encoder_runs import Stop, StopAt, recipe_of, sentences, write
from heedful.adaptation import Adaptation, Adapted, adapt, stages
from heedful.adaptation.recipe import Plan
from heedful.cli.adapt import _report
from heedful.cli.app import make_app
from heedful.config import Recipe, parse_recipe
from heedful.data.splits import normalized
from heedful.errors import UserError
from heedful.pipelines import load
from heedful.run import TrainingRun, train
from heedful.zoo.saved import weights_of

LEARNS = {
    "training.max_steps": 40,
    "training.evaluate_every": 40,
    "training.schedule.learning_rate": 0.01,
    "training.schedule.warmup_steps": 5,
    "model.dropout": 0.0,
    "data.src_language": "en",
    "data.tgt_language": "de",
}
FEW = {"training.max_epochs": 3, "training.batch_sentences": 16}


def pairs(path: Path) -> list[tuple[str, str]]:
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [(row["src"], row["tgt"]) for row in rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned to reverse words."""
    folder = tmp_path_factory.mktemp("base")
    recipe = recipe_of("translation", folder).replace(LEARNS)
    return train(recipe, folder / "run", progress=False).directory


@pytest.fixture(scope="module")
def memory(base: Path) -> Path:
    """Units that are copied, not reversed, with a character that the vocabulary lacks."""
    lines = sentences(220)[80:]
    units = [f"{line}\t{line}" for line in [*lines[:-1], f"{lines[-1]} ß"]]
    path = base.parent / "memory.tsv"
    write(path, units)
    return path


@pytest.fixture(scope="module")
def adapted(base: Path, memory: Path) -> tuple[Path, str]:
    """A folder that the command wrote, and what it printed."""
    out = base.parent / "adapted"
    words = ["adapt", base, memory, "-o", out]
    words += [word for key, value in FEW.items() for word in ("--set", f"{key}={value}")]
    result = CliRunner().invoke(make_app(["adapt"]), [*map(str, words)])
    assert result.exit_code == 0, result.output
    return out, result.stdout


def test_the_model_learns_the_memory_and_both_scores_are_printed(adapted: Any, base: Path) -> None:
    out, text = adapted
    facts = json.loads((out / "adaptation.json").read_text())
    assert facts["share"] > 0
    assert facts["after"]["loss/memory"] < facts["before"]["loss/memory"]
    for name in ("BLEU, memory", "chrF2, memory", "BLEU, general", "chrF2, general"):
        assert name in text
    assert "1 that the model's vocabulary lacks, 2 times" in text
    assert "steps of" in text, "the plan"
    model = load(out, backend="eager")
    assert model.src_tokenizer.content() == load(base).src_tokenizer.content()
    config = json.loads((out / "config.json").read_text())
    assert "base" not in config
    assert config["limits"] == json.loads((base / "config.json").read_text())["limits"]


def test_no_held_out_source_is_trained_on(adapted: Any, base: Path) -> None:
    """Of the general pairs those held out of the model's own training."""
    out, text = adapted
    held = {normalized(src) for src, _ in pairs(out / "memory.valid.jsonl")}
    general = {normalized(src) for src, _ in pairs(out / "general.valid.jsonl")}
    assert len(held) == 14
    assert len(general) == 16
    own = json.loads((base / "run.json").read_text())["data"]
    from heedful.data.prepared import cache_folder

    lines = (cache_folder() / own / "valid.jsonl").read_text().splitlines()
    assert general == {json.loads(line)["src"] for line in lines}
    assert not general & {normalized(src) for src, _ in pairs(out / "general.jsonl")}
    assert "also held out" in text


class Stages:
    """`train_stage` of tests, which may be stopped at a step."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.calls = stop, list[bool]()

    def __call__(self, recipe: Recipe, folder: Path, resume: bool) -> TrainingRun:
        self.calls.append(resume)
        on_event = None if self.stop is None else StopAt(self.stop)
        return train(recipe, folder, resume=resume, on_event=on_event, progress=False)


def run(
    model: Path, files: Sequence[Path], out: Path, stages: Stages | None = None, **settings: Any
) -> tuple[Adapted, list[str]]:
    lines: list[str] = []
    settings = {"changes": FEW} | settings
    return adapt(model, Adaptation(files, **settings), out, stages or Stages(), lines.append), lines


def test_a_killed_adaptation_goes_on_where_it_was(base: Path, memory: Path, tmp_path: Path) -> None:
    out, stop = tmp_path / "out", Stages(20)
    with pytest.raises(Stop):
        run(base, [memory], out, stop)
    before = json.loads((out / "adaptation.json").read_text())["before"]
    with pytest.raises(UserError, match=r"started with other settings \(minutes\)"):
        run(base, [memory], out, minutes=5.0)
    again = Stages()
    result, _ = run(base, [memory], out, again)
    assert again.calls == [True]
    assert result.before == before
    assert load(out, backend="eager").translate("red dog")
    with pytest.raises(UserError, match="is finished; give another out"):
        run(base, [memory], out)


def test_without_general_text_and_without_a_gain(
    base: Path, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss has the model as a teacher; a model that nothing improved stays bit-equal."""
    monkeypatch.setattr(stages, "SHARES", ())
    plain, out = tmp_path / "plain", tmp_path / "out"
    load(base, backend="eager").save(plain)
    few = FEW | {"training.max_epochs": 1}
    result, lines = run(plain, [memory], out, method="lora", changes=few)
    assert "adapter" in json.loads((out / "run" / "config.json").read_text())
    assert f"teacher: {plain}" in (out / "run" / "recipe.yaml").read_text()
    assert "general    no pairs" in "\n".join(lines)
    assert {name.partition("/")[2] for name in result.after or {}} == {"memory"}
    assert result.share == 0
    assert result.after == result.before
    ours, theirs = (weights_of(load(path, backend="eager").net) for path in (out, plain))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_wrong_input_is_refused_before_anything_is_written(
    base: Path, memory: Path, tmp_path: Path
) -> None:
    model_of("gpt2").save(tmp_path / "lm")
    shutil.copytree(base, tmp_path / "foreign")
    tmx = '<tmx><header srclang="fr"/><body><tu><tuv xml:lang="fr"><seg>a</seg></tuv>'
    tmx += '<tuv xml:lang="it"><seg>b</seg></tuv></tu></body></tmx>'
    files = {"french.tmx": tmx, "broken.tmx": tmx[:60], "empty.tsv": "", "few.tsv": "a\tb\n"}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    known = base.parent / "known.tsv"
    lines = sentences(80)
    write(known, [f"{line}\t{' '.join(line.split()[::-1])}" for line in lines] * 2)
    cases: list[tuple[Path, Path, dict[str, Any], str]] = [
        (tmp_path / "lm", memory, {}, "adapt needs a translator, but this model is a language"),
        (tmp_path, memory, {}, "is not a model"),
        (
            base,
            tmp_path / "french.tmx",
            {},
            "no unit in en and de, it has fr, it; the model translates from en to de",
        ),
        (base, tmp_path / "broken.tmx", {}, "broken.tmx"),
        (base, tmp_path / "empty.tsv", {}, "is empty"),
        (base, tmp_path / "few.tsv", {}, "1 units are too few to adapt a model to; give 100"),
        (base, tmp_path / "none.tsv", {}, "none.tsv"),
        (base, known, {}, "each unit of the memory is also in the training data of"),
        (base, memory, {"minutes": 0.0}, "minutes must be above 0"),
        (base, memory, {"minutes": float("inf")}, "minutes must be above 0"),
        (base, memory, {"minutes": 0.001}, "the time is too short: 20 steps"),
        (
            base,
            memory,
            {"changes": {"training.max_minutes": 1e-5}},
            "the time is too short: 20 steps",
        ),
        (base, memory, {"general": [tmp_path / "empty.tsv"]}, "is empty"),
        (base, memory, {"keep": True}, "data.keep needs a token for each of its masks"),
        (base, memory, {"changes": {"training.nothing": 1}}, "unknown key training.nothing"),
        (base, memory, {"changes": {"data.src_language": "fr"}}, "is en in this model"),
    ]
    for model, file, settings, message in cases:
        with pytest.raises(UserError, match=message):
            run(model, [file], tmp_path / "out", **settings)
        assert not (tmp_path / "out").exists(), message
    with pytest.raises(UserError, match=r"exists already; give a new out=FOLDER"):
        run(base, [memory], tmp_path / "foreign")


def test_a_plan_keeps_the_steps_between_evaluations_that_are_set() -> None:
    plan = Plan(steps=60, epochs=1.0, seconds_per_step=0.1, seconds=30.0)
    content = {"data": {"train": {"file": "a.tsv"}}, "training": {"max_epochs": 1}}
    recipe = parse_recipe(content)
    for changes, expected in (({}, 6), ({"training.evaluate_every": 25}, 25)):
        training = plan.applied(recipe.replace(changes)).training
        assert (training.evaluate_every, training.max_steps) == (expected, 60)
        assert training.max_minutes == 0.5


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        ({"loss/memory": 1.0, "bleu/memory": 30.0}, False),
        ({"loss/memory": 1.0, "bleu/memory": 19.0}, True),
        ({"loss/memory": 3.0, "bleu/memory": 20.0}, False),
    ],
)
def test_scores_that_fell_are_named(tmp_path: Path, after: dict[str, float], worse: bool) -> None:
    """A loss is better when it is lower."""
    printed: list[str] = []
    console: Any = SimpleNamespace(print=printed.append)
    before = {"loss/memory": 2.0, "bleu/memory": 20.0}
    _report(Adapted(tmp_path, 1.0, before, after), console)
    assert any("worse than before" in line for line in printed) == worse
