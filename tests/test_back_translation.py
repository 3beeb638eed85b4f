"""Back-translation: reversed recipes, its stages, resumption after a kill at each of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from encoder_runs import Stop, StopAt, recipe_of, sentences, write
from heedful import back_translation
from heedful.back_translation import BackTranslation, back_translate, reverse_recipe
from heedful.bulk.folder import JobFolder
from heedful.cli.app import make_app
from heedful.config import Recipe, parse_recipe
from heedful.data.special_tokens import tag_id
from heedful.errors import UserError
from heedful.pipelines import load
from heedful.run import train

LEARNS = {
    "training.max_steps": 40,
    "training.evaluate_every": 20,
    "training.schedule.learning_rate": 0.01,
    "training.schedule.warmup_steps": 5,
    "model.dropout": 0.0,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("pairs")
    return recipe_of("translation", folder).replace(LEARNS)


@pytest.fixture(scope="module")
def mono(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mono") / "mono.txt"
    write(path, sentences(120)[80:])
    return path


class Stages:
    """`train_stage` of tests: trains without display, and may be stopped at a step of a run."""

    def __init__(self, stop: tuple[str, int] | None = None) -> None:
        self.stop, self.calls = stop, list[tuple[str, bool]]()

    def __call__(self, recipe: Recipe, folder: Path, resume: bool) -> Any:
        self.calls.append((folder.name, resume))
        is_stopped = self.stop is not None and self.stop[0] == folder.name
        on_event = StopAt(self.stop[1]) if self.stop and is_stopped else None
        return train(recipe, folder, resume=resume, on_event=on_event, progress=False)


def run(
    recipe: Recipe, mono: Path, out: Path, stages: Stages | None = None, **settings: Any
) -> list[str]:
    lines: list[str] = []
    options = BackTranslation([mono], **settings)
    back_translate(recipe, options, out, stages or Stages(), lines.append)
    return lines


def pairs_in(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "back.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(recipe: Recipe, mono: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(back_translation, "SHARD_ROWS", 8)
        run(recipe, mono, out)
    return out


def test_the_pairs_are_translations_of_the_monolingual_text(whole: Path, mono: Path) -> None:
    pairs = pairs_in(whole)
    texts = mono.read_text().splitlines()
    assert len(pairs) > len(texts) // 2
    backward = load(whole / "backward", backend="eager")
    expected = backward.generate(texts, return_details=True)
    held_out = [json.loads(line)["tgt"] for line in (whole / "valid.jsonl").open()]
    kept = [
        {"src": best.text, "tgt": text}
        for (best, *_), text in zip(expected, texts, strict=True)
        if best.finished and best.text.strip() and text not in held_out
    ]
    assert pairs == kept
    assert not (whole / "back").exists(), "the shards are joined"


def test_monolingual_texts_that_are_held_out_are_dropped_and_counted(
    recipe: Recipe, whole: Path, tmp_path: Path
) -> None:
    """Those in the validation and the test targets, with other spaces too."""
    held = [json.loads(line)["tgt"] for line in (whole / "valid.jsonl").read_text().splitlines()]
    test = {"src": write(tmp_path / "s", ["a"]), "tgt": write(tmp_path / "t", ["red dog cow"])}
    new = ["cow cow cow cow red", "dog dog dog dog old"]
    mono = tmp_path / "mono.txt"
    write(mono, [*new, *(text.replace(" ", "  ") for text in held), "red dog cow", held[0]])
    changed = recipe.replace({"data.test": test})
    stages = Stages(("forward", 2))
    lines: list[str] = []
    options = BackTranslation([mono], backward_model=whole / "backward")
    with pytest.raises(Stop):
        back_translate(changed, options, tmp_path / "out", stages, lines.append)
    assert {pair["tgt"] for pair in pairs_in(tmp_path / "out")} <= {*new}
    assert f"{len(held) + 2} dropped as also held out" in "\n".join(lines)


def test_rows_held_out_of_training_are_never_in_it(
    recipe: Recipe, mono: Path, whole: Path, tmp_path: Path
) -> None:
    """Although `data.drop_held_out` is false: both runs read them from a file."""
    out, stages = tmp_path / "out", Stages(("forward", 2))
    with pytest.raises(Stop):
        run(
            recipe.replace({"data.drop_held_out": False}),
            mono,
            out,
            stages,
            backward_model=whole / "backward",
        )
    assert (out / "valid.jsonl").read_bytes() == (whole / "valid.jsonl").read_bytes()
    for folder in (out, whole):
        facts = json.loads((folder / "forward" / "run.json").read_text())
        assert facts["data"] == json.loads((whole / "forward" / "run.json").read_text())["data"]


def test_both_runs_hold_out_the_same_rows_and_the_tag_marks_the_translations(whole: Path) -> None:
    forward, backward = (
        json.loads((whole / name / "run.json").read_text())["report"]["facts"]["training data"]
        for name in ("forward", "backward")
    )
    assert forward != backward
    model = load(whole / "forward", backend="eager")
    assert tag_id(model.src_tokenizer, "<bt>") in model.src_tokenizer.special_ids
    held_out = [json.loads(line) for line in (whole / "valid.jsonl").read_text().splitlines()]
    assert len(held_out) == 16
    assert isinstance(model.translate("red dog"), str), "no language is asked for"


@pytest.mark.parametrize("place", ["backward", "translations", "forward"])
def test_a_killed_back_translation_goes_on_where_it_was(
    recipe: Recipe, mono: Path, whole: Path, tmp_path: Path, monkeypatch, place: str
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(back_translation, "SHARD_ROWS", 8)
    stages = Stages(None if place == "translations" else (place, 22))
    original, written = JobFolder.add, []

    def add_two(folder: JobFolder, result: Any) -> None:
        written.append(result.index)
        if place == "translations" and len(written) == 3:
            raise Stop
        original(folder, result)

    monkeypatch.setattr(JobFolder, "add", add_two)
    with pytest.raises(Stop):
        run(recipe, mono, out, stages)
    if place == "translations":
        assert written == [0, 1, 2]
        assert len([*(out / "back").glob("part-*")]) == 2
    again = Stages()
    run(recipe, mono, out, again)
    expected = {
        "backward": [("backward", True), ("forward", False)],
        "translations": [("forward", False)],
        "forward": [("forward", True)],
    }
    assert again.calls == expected[place]
    assert (out / "back.jsonl").read_bytes() == (whole / "back.jsonl").read_bytes()
    for name in ("backward", "forward"):
        weights = f"{name}/model.safetensors"
        assert (out / weights).read_bytes() == (whole / weights).read_bytes()
    with pytest.raises(UserError, match="is finished: its model is"):
        run(recipe, mono, out)


def test_sampled_translations_are_repeatable_and_do_not_depend_on_shards(
    recipe: Recipe, mono: Path, whole: Path, tmp_path: Path, monkeypatch
) -> None:
    model, results = whole / "backward", []
    for number, size in enumerate((8, 100)):
        monkeypatch.setattr(back_translation, "SHARD_ROWS", size)
        out = tmp_path / f"{number}"
        stages = Stages(("forward", 2))
        with pytest.raises(Stop):
            run(recipe, mono, out, stages, decoding={"temperature": 1.0}, backward_model=model)
        assert not (out / "backward").exists()
        results.append(pairs_in(out))
    assert results[0] == results[1] != pairs_in(whole)


def test_a_reversed_recipe_exchanges_the_sides() -> None:
    base = {"task": "translation", "training": {"max_steps": 1, "schedule": {"learning_rate": 0.1}}}
    files = {"src": "a", "tgt": "b"}
    data = {"train": files, "src_language": "en", "filters": {"unique": ["src", "row"]}}
    recipe = reverse_recipe(parse_recipe(base | {"data": data}))
    assert (recipe.data.train.src, recipe.data.train.tgt) == ("b", "a")
    assert (recipe.data.src_language, recipe.data.tgt_language) == (None, "en")
    assert recipe.data.filters.unique == ["tgt", "row"]
    for file, fields, expected in (
        ("x.tsv", {}, (2, 1)),
        ("x.CSV.gz", {}, (2, 1)),
        ("x.jsonl", {}, ("tgt", "src")),
        ("x.tsv", {"src_field": 3, "tgt_field": 1}, (1, 3)),
        ("x.jsonl", {"src_field": "en"}, ("tgt", "en")),
    ):
        table = parse_recipe(base | {"data": {"train": {"file": file, **fields}}})
        train_files = reverse_recipe(table).data.train
        assert (train_files.src_field, train_files.tgt_field) == expected
        assert reverse_recipe(reverse_recipe(table)).data.train.tgt_field in (
            fields.get("tgt_field"), 2, "tgt"
        )  # fmt: skip


def test_a_reversed_recipe_has_the_columns_of_the_files_of_a_folder(tmp_path: Path) -> None:
    """A folder or pattern was taken for JSONL, and a memory for a table with names."""
    base = {"task": "translation", "training": {"max_steps": 1, "schedule": {"learning_rate": 0.1}}}
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "a.tsv").write_text("a\tb\n")
    for name in ("pairs", "pairs/*.tsv"):
        data = {"train": {"file": name}, "folder": str(tmp_path)}
        files = reverse_recipe(parse_recipe(base | {"data": data})).data.train
        assert (files.src_field, files.tgt_field) == (2, 1)
    memory = parse_recipe(base | {"data": {"train": {"file": "a.tmx"}}})
    with pytest.raises(UserError, match=r"^a.tmx has no columns, which back-translation exchanges"):
        reverse_recipe(memory)


def test_wrong_back_translations_are_refused(
    recipe: Recipe, mono: Path, whole: Path, tmp_path
) -> None:
    corpora = {"a": {"src": "x", "tgt": "y"}}
    other = parse_recipe(recipe.model_dump(exclude_unset=True) | {"data": {"corpora": corpora}})
    cases: list[tuple[Recipe, Path, dict[str, Any], str]] = [
        (other, tmp_path / "a", {}, "makes data.corpora itself; give the pairs as data.train"),
        (recipe.replace({"init_from": "m", "model": {}}), tmp_path / "a", {}, "of the forward dir"),
        (recipe, whole, {"tag": "<x>"}, r"was started with other settings \(tag\)"),
        (recipe, mono.parent, {}, "holds other files; give a new out=FOLDER"),
        (recipe, tmp_path / "b", {"backward_model": tmp_path}, "is not a model"),
        (recipe, tmp_path / "b", {"backward_model": mono, "optimize": True}, "is not optimized"),
        (recipe, tmp_path / "b", {"weight": 0}, "a corpus of weight 0"),
        (recipe, tmp_path / "b", {"tag": "bt"}, "angle brackets, as <2de>, not 'bt'"),
        (recipe, tmp_path / "b", {"decoding": {"temperature": -1.0}}, "temperature must be"),
        (recipe, tmp_path / "b", {"backward_changes": {"a.b": 1}}, "unknown key a"),
    ]
    for changed, out, settings, message in cases:
        with pytest.raises(UserError, match=message):
            run(changed, mono, out, **settings)
    assert not (tmp_path / "b").exists(), "refused before anything is written"
    held = [json.loads(line)["tgt"] for line in (whole / "valid.jsonl").read_text().splitlines()]
    write(tmp_path / "held", held)
    write(tmp_path / "empty", [])
    for name, message in (("held", "each text of .* is also a target"), ("empty", "has no text")):
        with pytest.raises(UserError, match=message):
            run(recipe, tmp_path / name, tmp_path / "d")
    assert not (tmp_path / "d").exists(), "known before the backward model is trained"
    with pytest.raises(UserError, match=r"cannot read .*nothing"):
        run(recipe, tmp_path / "nothing", tmp_path / "c")


def test_the_command(recipe: Recipe, mono: Path, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    words = ["--mono", mono, "--out", tmp_path / "out", "--backward", whole / "backward"]
    words += ["--beam-size", 2, "--weight", 0.5, "--steps", 4, "--json"]
    result = CliRunner().invoke(
        make_app(["back-translate"]), ["back-translate", str(path), *map(str, words)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["directory"] == str(tmp_path / "out" / "forward")
    saved = (tmp_path / "out" / "forward" / "recipe.yaml").read_text()
    assert "src_tag: <bt>" in saved
    assert "weight: 0.5" in saved
