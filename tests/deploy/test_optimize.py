"""`heedful optimize`: what is built is proved, measured and kept whole, or refused in one line."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import heedful
from backend_models import model_of, saved
from commands import assert_refused, tiny, tree
from heedful.backends.base import Settings
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.manifest import BackendChoice, Manifest
from heedful.cli.optimize import _show
from heedful.config import parse_recipe
from heedful.deploy import measure, prove
from heedful.deploy.optimize import optimize
from heedful.errors import UserError
from heedful.hardware import cores
from heedful.progress import Advance, use_display
from heedful.run import train

pytestmark = pytest.mark.usefixtures("brief")
QUICK = ("--backend", "eager", "--backend", "ctranslate2")  # without what takes minutes
ONE_THREAD = ("--threads", 1)  # two threads of the net wait for each other beside other tests
TEXTS = ["1 2 3", "0", "", "2 4", "3 1 0 2", "4 4 1", "5 5 5 5 5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("optimized") / "run"
    train(parse_recipe(tiny(training__max_steps=60, training__evaluate_every=60)), out)
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("texts")
    for name in ("src", "ref"):
        (here / name).write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return here


def record_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "backends" / "backends.json").read_text())
    return content


@pytest.mark.parametrize("given", [True, False])
def test_commands_use_the_measured_choice_and_import_no_torch(
    commands, folder, files, given
) -> None:
    """Without --src the held-out text of the run is taken."""
    texts = ("--src", files / "src", "--ref", files / "ref") if given else ()
    done = commands.run("optimize", folder, *texts, *QUICK, *ONE_THREAD, "--tolerance", 100)
    assert done.code == 0, done.err
    assert "ctranslate2 float32: 100% of" in done.out
    assert "throughput" in done.out
    found = record_of(folder)
    kept = {path.name for path in (folder / "backends" / "ctranslate2").iterdir()}
    assert kept == set(found["backends"]["ctranslate2"]["proofs"])
    assert {"float32", "int8"} <= kept
    assert set(found["best"]) == {"latency", "throughput"}
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    assert "latency" in commands.run("info", folder).out

    code = (
        f"import sys; sys.argv = ['heedful', 'translate', {str(folder)!r}, '-i', "
        f"{str(files / 'src')!r}, '--backend', 'ctranslate2', '--precision', 'float32', "
        "'--beam-size', '1']; from heedful.cli import main; main()\n"
    )
    then = "finally: print([n for n in ('torch', 'transformers', 'jinja2') if n in sys.modules])"
    code = f"try:\n  {code}{then}"
    lines = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert lines.pop() == "[]"
    eager = heedful.load(folder, device="cpu", backend="eager")
    assert lines == [
        outputs[0].text for outputs in eager.generate(TEXTS, beam_size=1, return_details=True)
    ]


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_the_net_runs_with_the_settings_that_were_measured_best(folder, tmp_path, backend) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    shutil.rmtree(path / "backends", ignore_errors=True)
    best = {
        "latency": BackendChoice("eager", "float32", 1),
        "throughput": BackendChoice("eager", "float32", cores(), 1, 40),
    }
    replace(Manifest.new(path, "Translator"), best=best).write(path)
    model = heedful.load(path, device="cpu", backend=backend, use="throughput")
    assert model.eager.settings == best["throughput"].settings
    assert model.options().batch_tokens == 40
    one_by_one = heedful.load(path, device="cpu", backend=backend)
    assert one_by_one.eager.settings == best["latency"].settings
    asked = heedful.load(path, device="cpu", backend=backend, use="throughput", threads=1)
    assert (asked.eager.settings.threads, asked.eager.settings.may_reduce) == (1, False)
    (path / "backends/backends.json").write_text("{")
    assert heedful.load(path, device="cpu", backend="eager").eager.settings == Settings()


def test_requested_threads_apply_if_a_backend_falls_back_to_the_net(tmp_path) -> None:
    saved("vaswani2017", tmp_path)
    model = heedful.load(tmp_path, backend="ctranslate2", threads=1)
    assert model.eager.settings.threads == 1


def test_int8_is_not_a_precision_of_the_net(folder, tmp_path) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    shutil.rmtree(path / "backends", ignore_errors=True)
    best = {"latency": BackendChoice("eager", "float32", 1)}
    replace(Manifest.new(path, "Translator"), best=best).write(path)
    with pytest.raises(UserError, match="no backend with int8"):
        heedful.load(path, precision="int8")
    with pytest.raises(UserError, match="no int8"):
        heedful.load(path, precision="int8", device="meta")


def test_only_requested_candidates_are_measured(folder, files) -> None:
    model = heedful.load(folder, device="cpu", backend="eager")
    told: list[tuple[str, int | None, int]] = []

    @contextmanager
    def show(what: str, total: int | None) -> Iterator[Advance]:
        parts: list[int] = []
        yield parts.append
        told.append((what, total, sum(parts)))

    with use_display(show):
        found = optimize(model, folder, TEXTS, backends=["eager"], uses=["latency"], threads=[1])
    [(use, outcome)] = found.outcomes.items()
    [(choice, rate)] = outcome.rates.items()
    assert (use, choice.backend, choice.threads) == ("latency", "eager", 1)
    assert rate > 0
    assert told[-1] == ("measuring", 6, 6)
    assert record_of(folder)["backends"] == {}
    assert model.backend is None


@pytest.mark.parametrize("name", ["gpt2", "vaswani2017"])
def test_a_model_that_samples_by_default_is_compared_greedily(name: str) -> None:
    """Each backend had other samples, so that the net differed from itself."""
    model = model_of(name)
    options = {"beam_size": 1, "temperature": 4.0, "top_k": 9}  # as imported
    model.metadata = replace(model.metadata, options=options)
    assert prove.Prover(model, TEXTS).prove(model.eager).same == 1


def test_where_a_backend_has_no_output_the_net_runs(folder, monkeypatch) -> None:
    """A conversion without an output at the length limit ended the command."""
    original = CTranslate2.outputs

    def outputs(backend: Any, rows: Any, request: Any) -> Any:
        found = original(backend, rows, request)
        return [[], *found[1:]]

    monkeypatch.setattr(CTranslate2, "outputs", outputs)
    model = heedful.load(folder, device="cpu", backend="eager")
    options: Any = {"backends": ["ctranslate2"], "threads": [1], "precisions": ["float32"]}
    found = optimize(model, folder, TEXTS, uses=["latency"], **options)
    assert found.proofs["ctranslate2 float32"].same == 1


@pytest.mark.parametrize(("used", "is_busy"), [(0.0, False), (0.05, False), (0.4, True)])
def test_a_busy_machine_is_named(folder, tmp_path, monkeypatch, capsys, used, is_busy) -> None:
    """Beside other programs another setting may be the fastest, in all rounds."""
    copied = shutil.copytree(folder, tmp_path / "model")
    monkeypatch.setattr(
        "heedful.deploy.measure.seconds_of_others", lambda: used * cores() * time.monotonic()
    )
    options: Any = {"backends": ["eager"], "threads": [1], "uses": ["latency"]}
    findings = optimize(heedful.load(copied, backend="eager"), copied, TEXTS, **options)
    assert findings.undecided == (["latency"] if is_busy else [])
    _show(findings)
    named = f"other programs used {used * cores():.1f} of {cores()} cores"
    assert (named in capsys.readouterr().out) == is_busy


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (1, [0]),
        (5, [0, 1, 2, 3, 4]),
        (12, [*range(12)]),
        (23, [0, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21]),
        (36, [*range(0, 36, 3)]),
    ],
)
def test_latency_is_measured_on_evenly_spaced_texts(folder, monkeypatch, count, chosen) -> None:
    timed: list[Any] = []
    monkeypatch.setattr(measure, "_rate", lambda model, parts, choice: timed.append(parts) or 1)
    texts = [f"{number}" for number in range(count)]
    model = heedful.load(folder, device="cpu", backend="eager")
    optimize(model, folder, texts, backends=["eager"], uses=["latency"], threads=[1])
    singles = [[texts[number]] for number in chosen]
    assert timed == [singles[:1], singles] * 6  # the first call is no measure


def test_a_conversion_above_its_tolerance_is_refused_and_reported(folder, monkeypatch) -> None:
    def fails(proof: prove.Proof, tolerance: float | None = None) -> str | None:
        assert tolerance == 0.5
        return "it loses more" if proof.precision == "int8" else None

    monkeypatch.setattr(prove.Proof, "failure", fails)
    model = heedful.load(folder, device="cpu", backend="eager")
    found = optimize(
        model,
        folder,
        TEXTS,
        TEXTS,
        backends=["eager", "ctranslate2"],
        tolerance=0.5,
        precisions=["float32", "int8"],
        threads=[1],
    )
    assert found.refused == {"ctranslate2 int8": "it loses more"}
    assert [*found.proofs] == ["ctranslate2 float32"]
    assert {path.name for path in (folder / "backends" / "ctranslate2").iterdir()} == {"float32"}
    assert [*found.outcomes] == ["latency", "throughput"]
    for use, outcome in found.outcomes.items():
        assert all(choice.precision == "float32" for choice in outcome.rates)
        assert record_of(folder)["best"][use]["backend"] == outcome.fastest.backend


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--threads", cores() + 1), ("threads", cores())),
        (("--backend", "magic"), ("unknown backend magic", "eager")),
        (("--precision", "int3"), ("unknown precision int3",)),
        (("--ref", "REF"), ("--src",)),
        (("--src", "EMPTY"), ("validation text is empty",)),
    ],
)
def test_bad_input_is_one_line_and_nothing_changes(
    commands, folder, files, tmp_path, arguments, said
) -> None:
    (tmp_path / "empty").write_text("\n \n")
    places = {"REF": files / "ref", "EMPTY": tmp_path / "empty"}
    before = tree(folder)
    done = commands.run("optimize", folder, *(places.get(each, each) for each in arguments))
    assert_refused(done, *said)
    assert tree(folder) == before


def test_files_for_a_backend_of_another_version_are_ignored(commands, tmp_path) -> None:
    saved("gpt2", tmp_path)
    record = record_of(tmp_path)
    record["backends"]["onnxruntime"] = record["backends"].pop("ctranslate2")
    folder = tmp_path / "backends"
    (folder / "backends.json").write_text(json.dumps(record))
    (folder / "ctranslate2").rename(folder / "onnxruntime")
    arguments = ("generate", tmp_path, "the cat", "--beam-size", 1, "--max-new-tokens", 4)
    done, eager = (commands.run(*arguments, *more) for more in ((), ("--backend", "eager")))
    assert (done.code, done.out) == (0, eager.out)
    [line] = done.err.splitlines()
    assert "the model runs eager" in line
    assert "is for the backend onnxruntime, which this version of heedful does not have" in line
    refused = commands.run(*arguments, "--backend", "onnxruntime")
    assert_refused(refused, "backend must be auto, eager, compiled, ctranslate2")


def test_a_wrong_name_is_reported_before_a_missing_folder(commands, tmp_path) -> None:
    nowhere = tmp_path / "nowhere"
    assert_refused(commands.run("optimize", nowhere, "--backend", "magic"), "unknown backend magic")
    assert_refused(commands.run("optimize", nowhere), "nowhere does not exist")


def test_a_model_without_a_backend_is_refused_with_every_reason(commands, tmp_path, files) -> None:
    recipe = tiny(training__max_steps=1, model__norm_placement="output")
    train(parse_recipe(recipe), tmp_path / "run")
    backend = ("--backend", "ctranslate2")
    done = commands.run("optimize", tmp_path / "run", "--src", files / "src", *backend)
    assert_refused(done, "norm_placement output")
    assert done.err.count("norm_placement") == 1
    assert not (tmp_path / "run" / "backends").exists()


def test_a_shortlist_is_counted_proved_kept_and_used(commands, folder, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    shutil.rmtree(model / "backends", ignore_errors=True)
    settings = (*QUICK, *ONE_THREAD, "--precision", "float32")
    asked = ("optimize", model, *settings, "--shortlist")
    done = commands.run(*asked, "--tolerance", 100)
    assert done.code == 0, done.err
    [line] = [line for line in done.out.splitlines() if line.startswith("shortlist: ")]
    assert "% of the held-out ones, bleu " in line
    assert (model / "backends/ctranslate2/float32/vmap.txt").is_file()
    made = heedful.load(model).shortlist
    sources = heedful.load(model).encode(["1 2"])[0]
    assert 0 < len(made.allowed_ids(sources)) <= made.target_size
    assert heedful.load(model, backend="eager").eager.shortlist is not None
    assert commands.run("optimize", model, *settings).code == 0
    assert heedful.load(model).shortlist is None  # what is not asked for again is gone
    strict = commands.run(*asked, "--tolerance", 0)
    assert strict.code == 0
    assert ("a shortlist" in strict.out) is (heedful.load(model).shortlist is None)
    (model / "run.json").unlink(missing_ok=True)
    assert_refused(commands.run(*asked), "has no record of its")
