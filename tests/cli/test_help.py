"""The help of every command, and the one line for an argument that is not known."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer import Context
from typer.main import get_command

from commands import Commands, assert_refused
from heedful.cli.app import COMMANDS, make_app
from heedful.cli.help import WIDTH, panels
from heedful.cli.suggestions import OTHER_NAMES
from heedful.config import Training
from heedful.pipelines import Translator

ROOT: Any = get_command(make_app())
RUNS_A_MODEL = ("translate", "generate", "fill", "classify", "embed", "evaluate", "score")
PRINTS = (*RUNS_A_MODEL, "optimize", "verify", "info", "cache ls", "recipes list")


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


ALL = dict(commands_of(ROOT))


def options_of(command: Any) -> dict[str, Any]:
    return {flag: param for param in command.params for flag in param.opts if flag[:2] == "--"}


@pytest.mark.parametrize("name", ["", *ALL])
def test_help_fits_a_terminal_of_80_columns(name: str) -> None:
    command = ALL[name] if name else ROOT
    path = f"heedful {name}".strip()
    text = command.get_help(Context(command, info_name=path, max_content_width=WIDTH))
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert text.startswith(f"Usage: {path}")


@pytest.mark.parametrize("name", ALL)
def test_every_option_has_a_help_and_with_a_value_a_metavar(name: str) -> None:
    for param in ALL[name].params:
        assert param.help, param.name
        is_flag = getattr(param, "is_flag", False)
        assert is_flag or param.metavar, f"{name} {param.name}: no metavar"


def test_commands_are_in_groups() -> None:
    assert {name.split()[0] for name in ALL} == COMMANDS.keys()
    for name, command in ROOT.commands.items():
        assert command.rich_help_panel == COMMANDS[name]


@pytest.mark.parametrize("name", RUNS_A_MODEL)
def test_commands_that_run_a_model_have_the_same_options(name: str) -> None:
    rows = panels(ALL[name], Context(ALL[name]))["Run time"]
    flags = [flag.split()[0] for flag, _ in rows]
    batches = [] if name == "fill" else ["--batch-tokens"]  # which takes one text at a time
    assert flags == [
        *("--device", "--backend", "--precision", "--threads", "--trust-compiled"),
        *batches,
    ]


@pytest.mark.parametrize("name", ALL)
def test_sections_are_in_one_order(name: str) -> None:
    titles = [*panels(ALL[name], Context(ALL[name]))]
    common = ["Arguments", "Input and output", "Options"]
    first = [title for title in common if title in titles]
    assert titles[: len(first)] == first
    assert titles[-1] == "General"
    assert "Run time" not in titles or titles[-2] == "Run time"


@pytest.mark.parametrize("name", ALL)
def test_every_help_has_an_example_of_its_command(name: str) -> None:
    lines = [line for line in ALL[name].help.splitlines() if line.startswith("Example: ")]
    assert lines
    assert all(line.startswith(f"Example: heedful {name}") for line in lines)


@pytest.mark.parametrize("name", PRINTS)
def test_commands_with_output_have_json(name: str) -> None:
    assert name == "embed" or "--json" in options_of(ALL[name])  # embed prints nothing else


def test_defaults_are_shown() -> None:
    rows = dict(panels(ALL["evaluate"], Context(ALL["evaluate"]))["Search"])
    assert rows["--min-new-tokens N"].endswith("[default: the model's, or 0]")
    assert rows["--length-penalty X"].endswith("[default: the model's, or 1.0]")
    assert f"or {Translator.default_options['beam_size']} for translators" in rows["--beam-size N"]


@pytest.mark.parametrize(
    ("name", "title", "flag", "default"),
    [
        ("evaluate", "Run time", "--backend NAME", "eager"),
        ("score", "Run time", "--backend NAME", "eager"),
        ("translate", "Run time", "--backend NAME", "auto"),
        ("report", "Input and output", "-o, --output FILE", "report.html in RUN"),
        ("train", "Input and output", "-o, --out DIR", "runs/ and the recipe's name"),
        (
            "distill",
            "Input and output",
            "-o, --out DIR",
            "runs/RECIPE-distilled, or runs/TEACHER-student",
        ),
    ],
)
def test_the_shown_default_is_that_of_the_command(
    name: str, title: str, flag: str, default: str
) -> None:
    rows = dict(panels(ALL[name], Context(ALL[name]))[title])
    assert rows[flag].endswith(f"[default: {default}]")


def test_names_of_other_toolkits_lead_to_existing_options() -> None:
    flags = {flag for command in ALL.values() for flag in options_of(command)}
    assert {f"--{name}" for name in OTHER_NAMES.values()} <= flags
    assert (
        not {f"--{name}" for name in OTHER_NAMES.keys() - {"ref", "tgt", "out", "output", "text"}}
        & flags
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("translate m --engine eager", "no such option: --engine; use --backend"),
        ("translate m --beam 4", "use --beam-size"),
        ("translate m --nbest=4", "use --num-return"),
        ("generate m --beam_size 4", "use --beam-size"),
        ("generate m --prompt a", "give the text as an argument: heedful generate MODEL TEXT"),
        ("fill m --text a", "give the text as an argument"),
        ("translate m --score", "use --scores"),
        ("evaluate m --metric bleu", "use --metrics"),
        ("evaluate m --text file", "use --input"),
        ("optimize m --backends eager", "use --backend"),
        ("score m --src a --ref b", "use --tgt"),
        ("evaluate m --src a --ref b --ref c", "--ref takes one FILE; give it once"),
        ("translate m -i a.po --memory=a.tmx --memory b.tmx", "--memory takes one FILE"),
        ("train copy --out a -o b", "--out takes one DIR"),
        (
            "info m --temperature 1",
            "it is an option of heedful back-translate, translate, generate",
        ),
        ("translate m --tempperature 1", "use --temperature"),
        ("translte m", "Did you mean 'translate'"),
        ("export m --to hf out", "no such command 'm'; write heedful export hf"),
        ("translate m --input 'a text here'", "a text is an argument: MODEL TEXT"),
        ("translate a.txt", "a.txt does not exist"),
        ("train copy --max-steps 5", "use --steps"),
        ("train copy --learning-rate 1", "use --lr"),
        ("train copy --label-smoothing 0.2", "use --set training.label_smoothing=VALUE"),
        ("translate m --lr 1", "it is an option of heedful train, distill"),
        ("translate --model m a", "MODEL is an argument: heedful translate MODEL [TEXT]..."),
        ("info --model m", "MODEL is an argument: heedful info [MODEL]"),
        ("export hf m --out o", "OUT is an argument: heedful export hf MODEL OUT"),
        ("train --config a.yaml", "RECIPE is an argument: heedful train RECIPE"),
        ("train copy --src a", "use --set data.train.src=VALUE"),
        ("train copy --data a", "use --set data.train.file=VALUE"),
        ("train copy --d-model 9", "use --set model.d_model=VALUE"),
        ("translate m --beam-size x", "invalid value for '--beam-size': it must be a whole number"),
        ("train copy --lr x", "invalid value for '--lr': it must be a number"),
        ("train copy --steps 0", "invalid value for '--steps': it must be at least 1"),
        ("optimize m --for x", "'--for': 'x' is not one of 'latency', 'throughput', 'both'"),
        ("help train", "no such command 'help'; write heedful COMMAND --help"),
        ("-V", "use --version"),
        ("export m o", "write heedful export hf or heedful export peft"),
        ("train copy --set lr=1", "did you mean training.schedule.learning_rate?"),
        ("train copy --set training.lr=1", "did you mean training.schedule.learning_rate?"),
        ("train copy --set model.d_model=x", "model.d_model: Input should be a valid integer"),
        ("translate m a --weight 1", "--weight is the weight of a model of an --ensemble"),
    ],
)
def test_an_old_or_mistyped_name_suggests_the_right_one(
    commands: Commands, line: str, words: str
) -> None:
    import shlex

    assert_refused(commands.run(*shlex.split(line)), words)


def test_a_file_name_given_as_text_is_noted(commands: Commands, tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    done = commands.run("translate", "m", "a.txt", cwd=tmp_path)
    assert done.code == 2
    assert "note: a.txt is read as a text; to read the file: --input a.txt" in done.err


@pytest.mark.parametrize("line", ["--debug info nothing", "info nothing --debug"])
def test_debug_shows_the_traceback_and_the_line(commands: Commands, line: str) -> None:
    done = commands.run(*line.split())
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert "error: nothing does not exist" in done.err.splitlines()[-1]
    assert "Traceback" not in commands.run("info", "nothing").err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("heedful trans", "translate"),
        ("heedful train tra", "translation"),
        ("heedful ex", "export"),
    ],
)
def test_a_shell_completes_commands_and_recipes(words: str, expected: str) -> None:
    complete = {"_HEEDFUL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "0"}
    complete["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run(
        [sys.executable, "-c", "from heedful.cli import main; main()"],
        env={**os.environ, **complete},
        capture_output=True,
        text=True,
        check=False,
    )
    assert expected in done.stdout.split(), done.stderr


@pytest.mark.parametrize("name", ALL)
def test_the_names_of_other_commands_are_accepted(name: str) -> None:
    """`--out` and `--output`, `-o` and `-i` were each an option of some commands alone."""
    for param in ALL[name].params:
        if {"--out", "--output"} & {*param.opts}:
            assert {"--out", "--output", "-o"} <= {*param.opts}
        if "--input" in param.opts:
            assert "-i" in param.opts
        if {"--precision", "--dtype"} & {*param.opts}:
            assert param.opts == ["--precision", "--dtype"]


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (["translate", "m", "--precision", "bf16"], "bfloat16"),
        (["translate", "m", "--precision", "float32"], "float32"),
        (["optimize", "m", "--precision", "fp32", "--precision", "int8"], ["float32", "int8"]),
        (["train", "r", "--precision", "bfloat16"], "bfloat16"),
        (["export onnx", "m", "o", "--dtype", "fp32"], "float32"),
        (["export gguf", "m", "o", "--precision", "bf16"], "bf16"),  # as llama.cpp spells it
    ],
)
def test_data_types_have_both_names(
    words: list[str], precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, seen = ALL[words[0]], []
    name = next(param.name for param in command.params if "--precision" in param.opts)
    monkeypatch.setattr(command, "callback", lambda **values: seen.append(values[name]))
    command.main(words[1:], standalone_mode=False)
    assert seen == [precision]
    if words[0] == "train":
        assert Training.model_validate({"precision": precision}).precision == "bf16"
