"""The README's commands and Python run as they are written, on small data, for a few steps."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Commands

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")
# Settings that make a run short, by recipe; added to each `heedful train` of a recipe.
STEPS = ("training.max_steps=4", "training.evaluate_every=2", "model.d_model=16", "model.d_ff=16")
ONE_STACK = (*STEPS, "model.num_heads=2", "model.num_layers=1")
SHORT = {
    "translation": (*STEPS, "model.num_encoder_layers=1", "model.num_decoder_layers=1"),
    "rhyme": (*ONE_STACK, "objective.sample_tokens=5"),
    "masked-lm": (*ONE_STACK, "tokenizer.vocab_size=60"),
    "classification": (*ONE_STACK, "data.valid_size=8"),
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def documented_commands() -> list[str]:
    lines = re.sub(r"\\\n +", "", "\n".join(blocks("bash"))).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data files that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    words = ["a", "man", "dog", "rides", "runs", "bicycle", "the", "one", "two", "red"]
    pairs = [f"{a} {b} {c}." for a in words for b in words for c in words[:2]]
    for name in ("my.en", "test.en"):
        (folder / name).write_text("".join(f"{line}\n" for line in pairs), encoding="utf-8")
    for name in ("my.de", "test.de"):
        (folder / name).write_text("".join(f"{line[::-1]}\n" for line in pairs), encoding="utf-8")
    labeled = "".join(f"{line}\t{'far' if 'dog' in line else 'near'}\n" for line in pairs)
    (folder / "my.tsv").write_text(labeled, encoding="utf-8")
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n'
    catalogue = f'{header}\nmsgid "a dog"\nmsgstr ""\n'
    (folder / "app.po").write_text(catalogue, encoding="utf-8")
    return folder


def shortened(command: str) -> str:
    """The command, with options that make it short if it takes long."""
    if command.startswith("heedful optimize"):
        backends = "--backend eager --backend ctranslate2"  # to compile takes a minute
        return f"{command} {backends} --threads 1"
    if command.startswith("heedful serve"):
        return f"{command} --check"  # tests/serve/test_process.py has whole servers
    if command.startswith("heedful verify"):
        return f"{command} --no-overfit"
    found = re.match(r"heedful train (\S+)", command)
    if found is None or "--resume" in command:
        return command
    return " ".join([command, *(f"--set {setting}" for setting in SHORT[found[1]])])


def in_a_shell(command: str, folder: Path) -> str:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    words = ["bash", "-c", f"set -o pipefail; {command}"]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def forked(command: str, folder: Path, commands: Commands) -> str:
    """As in a shell, in a process that is forked from one that has imported torch."""
    found = re.fullmatch(r"(?:echo ('.*') \| )?heedful (.*)", command)
    assert found is not None, command
    stdin = "".join(f"{text}\n" for text in shlex.split(found[1] or ""))
    ended = commands.run(*shlex.split(found[2]), stdin=stdin.encode(), cwd=folder)
    assert ended.code == 0, f"{command}\n{ended.out}\n{ended.err}"
    return ended.out


def output_after(code: str) -> str:
    """The documented output that follows a block of code, with one space for white space."""
    (found,) = re.findall(rf"{re.escape(code)}```\n```text\n(.*?)```", README, flags=re.DOTALL)
    return " ".join(found.split())


def test_length_and_targets() -> None:
    assert max(README.count("\n"), CHINESE.count("\n")) <= 110
    targets = [command for command in documented_commands() if command.startswith("make ")]
    assert {"make demo", "make test"} <= set(targets)
    for target in [*targets, "make setup"]:
        in_a_shell(f"{target} --dry-run", ROOT)


def test_results_are_those_of_the_benchmarks() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_readme_table.py"))
    for name, language in page["PAGES"].items():
        text = (ROOT / name).read_text(encoding="utf-8")
        between = text.partition(page["START"])[2].partition(page["END"])[0]
        assert between == page["render"](language), "run `make pages`"


def test_the_chinese_readme_has_the_same_code() -> None:
    """So that the commands which the other tests run are those of both."""
    code = re.compile(r"^```\w+\n.*?^```", re.DOTALL | re.MULTILINE)
    assert code.findall(CHINESE) == code.findall(README)


def test_every_command_is_run_by_a_test() -> None:
    """Wheels: tests/test_package.py; the rest: this file."""
    for command in documented_commands():
        assert re.match(r"make (demo|test)$|pip wheel|heedful |echo '[^']*' \| heedful ", command)


def test_commands_and_library_run(folder: Path, commands: Commands) -> None:
    ours = [command for command in documented_commands() if "heedful " in command]
    ours = [command for command in ours if not command.startswith("pip ")]
    for recipe in SHORT:
        assert any(f"heedful train {recipe} " in command for command in ours), recipe
    outputs = {command: forked(shortened(command), folder, commands) for command in ours}
    for command, out in outputs.items():
        if "app.po" in command:
            assert "msgid" in (folder / "app.de.po").read_text()
        elif "heedful translate" in command:
            assert out.count("\n") == 1
        elif "heedful train translation" in command:
            assert "20 of data.train" in out, "a tenth is held out of few pairs"
        elif "heedful evaluate" in command:
            names = {"bleu", "chrf"} & {line.partition(" ")[0] for line in out.splitlines()}
            assert names == {"bleu", "chrf"}
        elif "heedful classify" in command:
            assert out in ("far\n", "near\n")
        elif "heedful fill" in command:
            assert " rides" in out.splitlines()[0]
    assert (folder / "exported/model.safetensors").is_file()
    assert (folder / "runs/back/model.safetensors").is_file()
    assert "<html" in (folder / "inspect.html").read_text(encoding="utf-8")
    assert (folder / "out/manifest.json").is_file()
    _, library = blocks("python")
    out = in_a_shell(f"{sys.executable} - <<'PYTHON'\n{library}\nPYTHON", folder)
    assert len(out.splitlines()) == 5, "a translation, three outputs, scores"


def test_verify_finds_the_documented_mistakes(folder: Path) -> None:
    """The same lines; numbers differ, since the weights are random."""
    code, _ = blocks("python")
    out = in_a_shell(f"{sys.executable} - 2>&1 <<'PYTHON'\n{code}\nPYTHON", folder)
    position = re.compile(r"at \d+|[\d.]+e[-+]\d+|token \d+")
    found, documented = " ".join(out.split()), output_after(code)
    assert position.sub("#", documented) in position.sub("#", found)
