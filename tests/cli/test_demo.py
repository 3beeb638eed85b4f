"""`heedful demo`: trains, resumes, or only shows; and answers typed dates."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from heedful.cli import demo as demo_command
from heedful.cli.app import make_app
from heedful.errors import UserError
from heedful.examples.dates import EXAMPLES_FOR_PEOPLE, generate
from heedful.recipe_files import load_recipe, read_settings
from heedful.run import train

SHORT = (
    "data.generated.num_train=300",
    "data.generated.num_valid=15",
    "data.generated.num_test=15",
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_encoder_layers=1",
    "model.num_decoder_layers=1",
    "model.d_ff=16",
    "training.precision=fp32",
    "training.max_steps=4",
    "training.evaluate_every=2",
    "training.batch_tokens=1024",
    "evaluation.decode_sentences=2",
)


def run_demo(out: Path, *, ok: bool = True) -> str:
    result = CliRunner().invoke(make_app(), ["demo", "--out", str(out)])
    if ok:
        assert result.exception is None, result.output
    else:
        assert isinstance(result.exception, UserError)
        return str(result.exception)
    return result.output


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "run"
    train(load_recipe("dates", read_settings(SHORT)), out)
    return out


def test_a_finished_run_is_only_shown(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    output = run_demo(finished)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert "Exact match on 15 held-out dates" in output
    for language in ("English", "German", "French", "Spanish", "Chinese"):
        assert f"{language} " in output
    groups, _, rest = output.partition("Phrases that it never saw:")
    assert groups.count(" of 1") == 15  # five languages, three groups, one of each
    for example in EXAMPLES_FOR_PEOPLE:
        assert example.src in output
        assert example.tgt in output
    phrases, _, errors = rest.partition("Wrong in the test: 15 of 15; the first 5:")
    assert phrases.count("ok") + phrases.count("wrong") == len(EXAMPLES_FOR_PEOPLE)
    assert errors.count("wrong") == 5
    for example in generate(15, seed=1, split="test")[:5]:
        assert f"{example.tgt}  wrong" in errors
    last = output.strip().splitlines()[-1]
    assert last.strip().startswith("echo '")
    assert last.endswith(f"| heedful translate {finished}")


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_plugin_that_a_folder_names_is_not_executed(
    finished: Path, is_finished: bool, tmp_path: Path
) -> None:
    """The folder may come from anybody; the recipe dates has a shipped plugin alone."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    if not is_finished:
        (out / "scores.json").unlink()
    mark, plugin = tmp_path / "ran", tmp_path / "own.py"
    plugin.write_text(f"open({str(mark)!r}, 'w').close()")
    recipe = (out / "recipe.yaml").read_text(encoding="utf-8")
    named = f"plugins:\n- {plugin}\n"
    assert "plugins:\n" in recipe
    (out / "recipe.yaml").write_text(recipe.replace("plugins:\n", named), encoding="utf-8")
    assert "needs the plugin own.py" in run_demo(out, ok=False)
    assert not mark.exists()


def test_a_stopped_run_goes_on_with_its_own_recipe(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    facts = {"heedful": "0.1.0", "precision": "fp32"}
    (out / "run.json").write_text(json.dumps(facts))
    (out / "recipe.yaml").write_text(
        load_recipe("dates", read_settings(SHORT)).to_yaml(), encoding="utf-8"
    )
    output = run_demo(out)
    assert "Continuing the recipe dates" in output
    assert "all steps done after step 4" in output
    assert "Exact match on 15 held-out dates" in output


def test_a_new_folder_trains_the_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []

    def stop(recipe: object, out: Path, **options: object) -> None:
        prompts.append((recipe, out, options["resume"]))
        raise UserError("enough")

    monkeypatch.setattr("heedful.run.train", stop)
    assert run_demo(tmp_path / "run", ok=False) == "enough"
    assert prompts == [(load_recipe("dates"), tmp_path / "run", False)]


def test_another_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(load_recipe("copy").to_yaml(), encoding="utf-8")
    assert "another --out" in run_demo(tmp_path, ok=False)


@pytest.mark.parametrize("is_shown", [True, False])
def test_dates_are_asked_for_only_where_the_question_is_seen(
    finished: Path, monkeypatch: pytest.MonkeyPatch, is_shown: bool
) -> None:
    """With stdout in a file the command waited for an answer without showing the question."""
    asked: list[object] = []
    terminal, file = (SimpleNamespace(isatty=lambda is_one=is_one: is_one) for is_one in (1, 0))
    streams = {"stdin": terminal, "stdout": terminal if is_shown else file}
    monkeypatch.setattr(demo_command, "sys", SimpleNamespace(argv=sys.argv, **streams))
    monkeypatch.setattr(demo_command, "_ask", lambda *given: asked.append(given))
    run_demo(finished)
    assert len(asked) == is_shown


def test_typed_dates_are_answered_until_an_empty_line(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    import heedful

    typed = iter(["4 July 1999", "far too long " * 20, "4 July 1999", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    model = heedful.load(finished)
    demo_command._ask(model, Console(width=300))
    answers = capsys.readouterr().out.splitlines()[2:]
    expected = model.generate(["4 July 1999"], beam_size=1, return_details=True)[0][0].text
    assert answers[0].strip().startswith(expected)
    assert "allows" in answers[1], "a text that is too long is told, and the next one answered"
    assert answers[2] == answers[0]


def test_the_line_to_type_calls_this_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ".venv" / "bin" / "heedful"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program), "demo"])
    monkeypatch.setenv("PATH", "")
    assert demo_command._command() == ".venv/bin/heedful"
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo_command._command() == "heedful"
