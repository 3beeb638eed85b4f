"""The command line: commands over files, pipes and streams."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import heedful
from commands import GONE, assert_refused, write_recipe
from encoder_runs import recipe_of
from heedful.backends.manifest import Manifest
from heedful.cli.app import make_app
from heedful.deploy.convert import convert_model
from heedful.evaluation.metrics import sentence_chrf
from heedful.run import train

COMMANDS = [str(command.name) for command in make_app().registered_commands]
INNER = [
    (str(group.name), str(command.name))
    for group in make_app().registered_groups
    for command in group.typer_instance.registered_commands
    if not command.hidden
]
LINES = ["1 2 3", "", "5 4", "0 0 0 1", "2"]


@pytest.fixture(scope="module")
def folder(commands, tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(root / "r.json", training__max_steps=60, training__evaluate_every=20)
    ended = commands.train(recipe, root / "run")
    assert (ended.code, ended.out, ended.err) == (0, "", "")  # with --quiet
    return root / "run"


@pytest.fixture(scope="module")
def model(folder):
    return heedful.load(folder, device="cpu")


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "lines"
    file.write_text("".join(f"{line}\n" for line in LINES))
    return file


# --- names and help -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["recipes"], ["import"]])
def test_a_group_without_a_command_shows_its_help_once(commands, words):
    ended = commands.run(*words)
    assert (ended.code, ended.err, ended.out.count("Usage:")) == (0, "", 1)


def test_public_names_can_be_imported():
    for name in heedful.__all__:
        assert getattr(heedful, name) is not None
    with pytest.raises(AttributeError, match="no attribute nothing"):
        heedful.nothing  # noqa: B018


def test_help_names_every_command(commands):
    result = commands.run("--help")
    assert result.code == 0
    assert all(
        f" {command} " in result.out for command in [*COMMANDS, *(group for group, _ in INNER)]
    )
    names = {"train", "translate", "evaluate", "score", "average", "verify", "info"}
    assert names <= set(COMMANDS)


@pytest.mark.parametrize("command", [*((command,) for command in COMMANDS), *INNER])
def test_help_of_every_command_has_an_example(commands, command):
    result = commands.run(*command, "--help")
    assert result.code == 0
    assert "Example: " in result.out
    assert f"heedful {' '.join(command)}" in result.out.split("Example: ")[1]


def test_version(commands):
    assert commands.run("--version").out.strip() == heedful.__version__


# --- translate ------------------------------------------------------------------------------


def test_translate_a_file_and_a_pipe_alike(commands, folder, model, lines, tmp_path):
    expected = model.translate(LINES, beam_size=5)
    by_file = commands.run("translate", folder, "--input", lines)
    by_pipe = commands.run("translate", folder, stdin=lines.read_bytes())
    to_file = commands.run("translate", folder, "-i", lines, "-o", tmp_path / "out")
    assert by_file.out.splitlines() == by_pipe.out.splitlines() == expected
    assert (to_file.code, to_file.out) == (0, "")
    assert (tmp_path / "out").read_text() == by_file.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "out"]


def test_a_last_line_without_a_line_break_and_windows_line_breaks(commands, folder, model):
    ended = commands.run("translate", folder, stdin=b"1 2 3\r\n\r\n5 4")
    assert ended.out.splitlines() == model.translate(["1 2 3", "", "5 4"])


def test_num_return_writes_n_lines_per_source(commands, folder, model, lines):
    ended = commands.run(
        "translate", folder, "-i", lines, "--beam-size", 2, "--num-return", 3, "--scores"
    )
    rows = [line.split("\t") for line in ended.out.splitlines()]
    assert len(rows) == 3 * len(LINES)
    # A number of translations above the beam size increases the beam.
    actual = model.generate(LINES, beam_size=3, num_return=3, return_details=True)
    for index, entries in enumerate(actual):
        written = rows[3 * index : 3 * index + 3]
        assert [text for _, text in written[: len(entries)]] == [e.text for e in entries]
        for (score, _), entry in zip(written, entries, strict=False):
            assert float(score) == pytest.approx(entry.score, abs=1e-4)
        assert all(row == ["-inf", ""] for row in written[len(entries) :])


def test_options_reach_the_search(commands, folder, model, lines):
    options = ("--length-penalty", 0.3, "--normalization", "gnmt", "--stop-rule", "beam_full")
    ended = commands.run(
        "translate",
        folder,
        "-i",
        lines,
        *options,
        "--no-repeat-ngram-size",
        2,
        "--max-new-tokens",
        4,
    )
    assert ended.out.splitlines() == model.translate(
        LINES,
        length_penalty=0.3,
        normalization="gnmt",
        stop_rule="beam_full",
        no_repeat_ngram_size=2,
        max_new_tokens=4,
    )


def test_truncated_translations_are_counted(commands, folder, lines):
    ended = commands.run("translate", folder, "-i", lines, "--beam-size", 1, "--max-new-tokens", 1)
    assert ended.code == 0
    assert ended.err.splitlines() == ["translations cut off by the length limit: 4"]


@pytest.mark.parametrize("beam", [1, 3])
def test_outputs_that_no_token_can_continue_are_named_and_counted(commands, folder, lines, beam):
    """They are no outputs that the length limit cut off."""
    banned = [word for digit in range(10) for word in ("--banned", digit)]
    options = ("--min-new-tokens", 2, "--no-unknown", *banned, "--beam-size", beam)
    ended = commands.run("translate", folder, "-i", lines, *options)
    assert (ended.code, ended.out.splitlines()) == (0, [""] * 5)
    reason = "the constraints allow no token that continues the output, which ends there"
    *named, count = ended.err.splitlines()
    assert sorted(named) == [f"line {number}: {reason}" for number in (1, 3, 4, 5)]
    assert count == "outputs that end where the constraints allow no token: 4"
    rows = commands.run("translate", folder, "-i", lines, *options, "--json").out.splitlines()
    failures = [json.loads(row)["outputs"][0]["failure"] for row in rows]
    assert failures == ["dead_end", None, *["dead_end"] * 3]


def test_missing_required_phrases_are_counted_apart_from_cut_outputs(commands, folder, lines):
    options = ("--require", "1", "--require", "2", "--banned", "1 ", "--banned", " 1")
    ended = commands.run("translate", folder, "-i", lines, *options, "--max-new-tokens", 5)
    assert ended.code == 0
    assert "cut off" not in ended.err
    assert "line 1: no output with all required phrases was found" in ended.err
    assert ended.err.splitlines()[-1] == "outputs without all required phrases: 4"


def test_an_option_that_the_named_backend_lacks_is_refused_by_its_flag(commands, folder, tmp_path):
    """With backend auto the net runs, with a note."""
    pytest.importorskip("ctranslate2")
    place = shutil.copytree(folder, tmp_path / "model")
    model = heedful.load(place, device="cpu")
    facts = convert_model(model, place, "float32")
    manifest = Manifest.new(place, "Translator").with_conversion(
        "ctranslate2", "float32", facts, {}
    )
    manifest.write(place)
    named = ("translate", place, "1 2", "--backend", "ctranslate2")
    for options, flag in (
        (("--no-repeat-ngram-size", 2), "--no-repeat-ngram-size"),
        (("--min-new-tokens", 3), "--min-new-tokens"),
        (("--banned", "1"), "--banned"),
        (("--length-penalty", 0.5), "--length-penalty"),
        (("--stop-rule", "optimal"), "--stop-rule optimal"),
        (("--beam-size", 1, "--temperature", 1, "--seed", 1), "--seed"),
    ):
        refused = commands.run(*named, *options)
        assert_refused(refused, "ctranslate2 cannot run this", flag, "--backend eager")
        auto = commands.run(*named[:3], *options)
        assert (auto.code, auto.err.count(flag)) == (0, 1)
        eager = commands.run(*named[:3], *options, "--backend", "eager")
        assert (auto.out, eager.err) == (eager.out, "")


def test_a_closed_pipe_is_no_error(commands, folder):
    ended = commands.run("translate", folder, stdin=b"1 2 3\n" * 20, stdout=GONE)
    assert (ended.code, ended.err) == (0, "")


# --- evaluate, score ------------------------------------------------------------------------


def test_evaluate_json(commands, folder, model, tmp_path):
    (tmp_path / "src").write_text("1 2 3\n5 4\n0 1 0\n")
    out = tmp_path / "out"
    flags = ("--src", tmp_path / "src", "--ref", tmp_path / "src")
    ended = commands.run("evaluate", folder, *flags, "--json", "-o", out)
    assert ended.code == 0, ended.err
    actual = json.loads(ended.out)
    keys = {"model", "beam_size", "length_penalty", "num_segments", "scores"}
    assert actual.keys() == {*keys, "perplexity", "token_accuracy", "examples"}
    assert actual["scores"].keys() == {"bleu", "chrf", "ter", "exact_match"}
    assert actual["num_segments"] == 3
    sources = ["1 2 3", "5 4", "0 1 0"]
    outputs = model.translate(sources)
    assert out.read_text().splitlines() == outputs
    equal = sum(a == b for a, b in zip(outputs, sources, strict=True))
    assert actual["scores"]["exact_match"]["score"] == pytest.approx(equal / 3)
    assert "version:" in actual["scores"]["bleu"]["signature"]
    forced = model.teacher_forced(sources, sources)
    assert actual["perplexity"] == pytest.approx(forced["perplexity"], rel=1e-4)
    assert actual["token_accuracy"] == pytest.approx(forced["token_accuracy"])
    worst = actual["examples"]["worst"]
    assert [one["chrf"] for one in worst] == sorted(sentence_chrf(outputs, sources))
    for one in worst:
        line = one["line"] - 1
        assert (one["source"], one["output"]) == (sources[line], outputs[line])
    assert {one["line"] for one in actual["examples"]["random"]} == {1, 2, 3}


def test_lowercasing_models_are_scored_case_insensitively(commands, tmp_path):
    run, files = tmp_path / "run", [tmp_path / name for name in ("src", "tgt")]
    train(recipe_of("translation", tmp_path, tokenizer__lowercase=True), run)
    scores = json.loads((run / "scores.json").read_text())["scores"]
    assert "case:lc" in scores["bleu"]["signature"]
    sources = files[0].read_text().splitlines()[:5]
    outputs = heedful.load(run, device="cpu").translate(sources)
    assert any(outputs)
    for file, texts in zip(files, (sources, outputs), strict=True):
        file.write_text("".join(f"{text.upper()}\n" for text in texts))
    ended = commands.run("evaluate", run, "--src", files[0], "--ref", files[1], "--json")
    content = json.loads(ended.out)
    assert content["scores"]["exact_match"]["score"] == 1
    ranked = [one["chrf"] for one in content["examples"]["worst"] if one["output"]]
    assert ranked == pytest.approx([100] * len(ranked)), "examples are ranked by the same scores"


def test_evaluate_prints_the_requested_metrics(commands, folder, tmp_path):
    (tmp_path / "src").write_text("1 2 3\n5 4\n")
    arguments = ("--src", tmp_path / "src", "--ref", tmp_path / "src", "--metrics", "chrf,bleu")
    arguments += ("--examples", "0")
    lines = commands.run("evaluate", folder, *arguments).out.splitlines()
    assert [line.split()[0] for line in lines] == ["chrf", "bleu", "perplexity", "token_accuracy"]


def test_score(commands, folder, model, tmp_path):
    src, tgt = ["1 2 3", "5 4", "0"], ["1 2", "5 4 4", "0"]
    for name, texts in (("src", src), ("tgt", tgt)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))
    arguments = ("score", folder, "--src", tmp_path / "src", "--tgt", tmp_path / "tgt")
    expected = model.score(src, tgt)
    sums = [float(line) for line in commands.run(*arguments).out.splitlines()]
    assert sums == pytest.approx([pair.log_prob for pair in expected], abs=1e-4)
    commands.run(*arguments, "--per-token", "--output", tmp_path / "out")
    means = [float(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert means == pytest.approx([p.log_prob / p.num_tokens for p in expected], abs=1e-4)


# --- average, verify, info ------------------------------------------------------------------


def test_average_is_the_mean(commands, folder, tmp_path):
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 3
    cases = {
        "all": ([], checkpoints),
        "last": (["--last", 2], checkpoints[1:]),
        "named": (["-c", checkpoints[0], "-c", folder], [checkpoints[0], folder]),
    }
    for name, (options, members) in cases.items():
        ended = commands.run("average", folder, tmp_path / name, *options)
        assert ended.code == 0, ended.err
        average = load_file(tmp_path / name / "model.safetensors")
        parts = [load_file(member / "model.safetensors") for member in members]
        for key, tensor in average.items():
            mean = torch.stack([part[key].double() for part in parts]).mean(0).float()
            torch.testing.assert_close(tensor, mean, rtol=1e-7, atol=0)
        assert heedful.load(tmp_path / name, device="cpu").translate(["1 2"])


def test_verify_passes_on_a_trained_model(commands, folder):
    assert commands.run("verify", folder, "--no-overfit").code == 0
    assert json.loads(commands.run("verify", folder, "--no-overfit", "--json").out)["ok"]


# --- train ----------------------------------------------------------------------------------


def test_train_prints_its_files_and_a_command_for_the_model(commands, tmp_path):
    recipe = write_recipe(tmp_path / "mine.yaml", training__max_minutes=1e-6)
    ended = commands.run("train", recipe, cwd=tmp_path)
    assert ended.code == 0, ended.err
    out = tmp_path / "runs/mine"  # named by the recipe
    assert f"heedful translate {out.relative_to(tmp_path)}" in ended.out
    assert "exact_match" in ended.out
    assert "stopped at the time limit after step 1 " in ended.out
    assert "step 1.00" not in ended.out
    assert {"config.json", "model.safetensors", "recipe.yaml", "log.jsonl", "report.html"} <= {
        path.name for path in out.iterdir()
    }
