"""What a command does not need it does not import; told by the modules that there are after it."""

import json
import subprocess
import sys

import pytest

from commands import write_recipe
from heedful.run import train

HEAVY = (
    "torch",
    "torch._dynamo",
    "transformers",
    "ctranslate2",
    "matplotlib",
    "jinja2",
    "sympy",
    "sacrebleu",
    "yaml",
    "heedful.run",
    "heedful.config",
)
RUN = """
import json, sys
sys.argv = ["heedful", *{arguments!r}]
try:
    from heedful.cli import main
    main()
except SystemExit as end:
    assert not end.code, end.code
{then}
print(json.dumps([name for name in {heavy!r} if name in sys.modules]))
"""


def imported(*arguments: str, then: str = "") -> list[str]:
    """Which of the heavy packages a command has imported when it ends."""
    code = RUN.format(arguments=list(arguments), heavy=HEAVY, then=then)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_modules_are_told_where_they_are_there() -> None:
    assert imported("--version", then="import torch, sympy") == ["torch", "sympy"]


@pytest.mark.parametrize("arguments", [("--help",), ("translate", "--help"), ("info",), ()])
def test_nothing_heavy_is_imported(arguments: tuple[str, ...]) -> None:
    assert imported(*(arguments or ("--version",))) == []


def test_every_kind_of_model_and_the_tokenizers_come_without_torch() -> None:
    names = "Translator, LanguageModel, MaskedLanguageModel, Classifier, Embedder, load"
    then = f"from heedful import {names}; import heedful.data.hf_tokenizers, heedful.data.encoding"
    assert imported("--version", then=then) == []


def test_a_line_through_the_net_imports_torch_and_little_more(tmp_path) -> None:
    """What takes long to import, and what only training, other tasks or other engines need."""
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=1)
    train(recipe, tmp_path / "run")
    (tmp_path / "lines").write_text("1 2\n")
    files = ("-i", str(tmp_path / "lines"), "-o", str(tmp_path / "out"))
    found = imported("translate", str(tmp_path / "run"), *files, "--engine", "eager")
    assert found == ["torch"]


def test_building_a_net_imports_no_symbolic_mathematics() -> None:
    sizes = "src_vocab_size=9, tgt_vocab_size=9, d_model=8, num_heads=2, d_ff=8"
    then = f"from heedful.zoo import vaswani2017 as v; v.build(v.Config({sizes}))"
    assert imported("--version", then=then) == ["torch"]
