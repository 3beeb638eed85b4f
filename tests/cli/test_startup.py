"""A command imports only the modules that it needs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

import pytest
import torch

from commands import write_recipe
from heedful.run import train

HEAVY = (
    "numpy",
    "tokenizers",
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


def heavy_imports(*arguments: str, then: str = "", heavy: Sequence[str] = HEAVY) -> list[str]:
    """The heavy packages that a command has imported when it ends."""
    code = RUN.format(arguments=list(arguments), heavy=heavy, then=then)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    actual: list[str] = json.loads(done.stdout.splitlines()[-1])
    return actual


@pytest.mark.parametrize("line", ["--help", "translate --help", "info", "--version"])
def test_no_heavy_package_is_imported(line: str) -> None:
    if line == "info" and not version("torch").endswith("+cpu"):
        line = "list models"  # the devices of this machine are known to torch only
    assert heavy_imports(*line.split()) == []


def test_recipes_are_read_without_torch() -> None:
    assert heavy_imports("recipes", "ls") == ["yaml", "heedful.config"]
    then = "import heedful; heedful.load_recipe('copy'); heedful.UserError; heedful.__version__"
    assert heavy_imports("--version", then=then) == ["yaml", "heedful.config"]


def test_public_model_classes_are_imported_without_torch() -> None:
    names = "Translator, LanguageModel, MaskedLanguageModel, Classifier, Embedder, load"
    then = f"from heedful import {names}; import heedful.data.hf_tokenizers, heedful.data.encoding"
    assert heavy_imports("--version", then=then) == ["numpy", "tokenizers"]


def test_translation_imports_torch_and_few_other_packages(tmp_path) -> None:
    """No packages with a long import, nor those of training, other tasks or other backends; opening
    a net needs no symbolic mathematics."""
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=1)
    train(recipe, tmp_path / "run")
    (tmp_path / "lines").write_text("1 2\n")
    files = ("-i", str(tmp_path / "lines"), "-o", str(tmp_path / "out"))
    sizes = "src_vocab_size=9, tgt_vocab_size=9, d_model=8, num_heads=2, d_ff=8"
    then = f"from heedful.zoo import vaswani2017 as v; v.build(v.Config({sizes}))"
    actual = heavy_imports(
        "translate", str(tmp_path / "run"), *files, "--backend", "eager", then=then
    )
    own = ["sympy"] * (torch.__version__ < "2.13")  # of torch itself, compared as versions
    assert actual == ["numpy", "tokenizers", "torch", *own]


def test_errors_in_a_recipe_do_not_wait_for_a_compiler() -> None:
    compilers = ["torch._dynamo", "torch._inductor", "sympy"]
    assert heavy_imports("--version", then="import heedful.run", heavy=compilers) == []


def test_a_training_imports_no_other_backends_and_tasks(tmp_path) -> None:
    """A training on pairs of texts needs no converted backends, chats and grammars."""
    recipe = write_recipe(tmp_path / "recipe.json", training__max_steps=1)
    unused = ("ctranslate2", "onnxruntime", "llguidance", "transformers", "heedful.serve")
    unused += ("heedful.backends.ctranslate2", "heedful.backends.onnxruntime")
    unused += ("heedful.backends.aot", "heedful.pipelines.grammar", "heedful.data.chats")
    unused += ("heedful.data.chat_template", "heedful.tasks.sft", "heedful.insight")
    arguments = ("train", str(recipe), "--out", str(tmp_path / "run"), "--quiet")
    used = ("heedful.training.trainer", "heedful.pipelines.translation")
    assert heavy_imports(*arguments, heavy=unused + used) == [*used]
