"""Only the packages of the base are needed to train and to run models; others are named in time."""

import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import heedful
from commands import Commands, assert_refused, write_recipe
from heedful.extras import EXTRAS
from without_extras import hide

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tests" / "support" / "without_extras.py"
FEW = "--set training.max_steps=2 --set training.device=cpu"
BASE = [
    "train translation --set data.train.src=text --set data.train.tgt=text"
    f" --set evaluation.metric=loss --out pairs {FEW}",
    "translate pairs 'a man'",
    f"train rhyme --out rhyme {FEW}",
    "generate rhyme Tick --max-new-tokens 3",
    f"train classification --set data.train.file=labels.tsv --out classes {FEW}",
    "classify classes 'a man'",
    "embed classes 'a man'",
]
TRANSLATION = "train translation --out new --set data.train"
PAIRS = f"{TRANSLATION}.src=text --set data.train.tgt=text"


def test_extras_are_those_of_the_package() -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = content["project"]["optional-dependencies"]
    assert found.pop("all") == [f"heedful[{','.join(sorted(EXTRAS))}]"]
    packages = {
        name: tuple(Requirement(text).name for text in texts) for name, texts in found.items()
    }
    assert packages == EXTRAS


def test_models_are_trained_and_run_with_the_packages_of_the_base(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"a man rides {i}\n" for i in range(40)))
    (tmp_path / "labels.tsv").write_text(
        "text\tlabel\n" + "".join(f"a man {i}\tgood\na dog {i}\tbad\n" for i in range(30))
    )
    done = subprocess.run(
        [sys.executable, PROGRAM, *BASE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no report was written: it needs") == 3
    assert done.stdout.count("pip install 'heedful[report]'") == 3
    assert done.stdout.count("scores are without bleu, chrf, ter") == 1
    assert not [*tmp_path.rglob("report.html")]
    assert '"exact_match"' in (tmp_path / "pairs" / "scores.json").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").write_text("1 2\n")
    (folder / "table.parquet").write_bytes(b"")
    recipe = write_recipe(folder / "recipe.json", training__max_steps=2)
    heedful.train(recipe, folder / "run", progress=False)
    shutil.copytree(folder / "run", folder / "other")
    return folder


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ("demo", "demo --out new"),
        ("demo", "train dates --out new"),
        ("eval", PAIRS),
        ("eval", "train copy --out new --set evaluation.metric=ter"),
        ("eval", "train copy --dry-run --set evaluation.metric=bleu"),
        ("eval", "evaluate run --src text --ref text"),
        ("fast", "export ctranslate2 run new"),
        ("gguf", "export gguf run new"),
        ("grammar", "translate run --input text --regex a"),
        ("langid", f"{PAIRS} --set data.filters.language=true"),
        ("onnx", "export onnx run new"),
        ("parquet", f"{TRANSLATION}.file=table.parquet --set evaluation.metric=loss"),
        ("report", "report run"),
        ("tensorboard", "train copy --out new --set training.tensorboard=true"),
    ],
)
def test_a_missing_extra_is_named_before_the_work(
    extra: str, line: str, run: Path, commands: Commands
) -> None:
    done = commands.run(*line.split(), cwd=run, first=partial(hide, EXTRAS[extra]))
    assert_refused(done, EXTRAS[extra][0], f"pip install 'heedful[{extra}]'")
    assert not (run / "new").exists()
