"""The race: logs of peers, the clock, checkpoints that are kept, and the page. No peer is run."""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


JOEYNMT = """\
0.4\t$ python -m joeynmt train config.yaml --skip-test
9.0\t2026-11-27 22:47:18 - INFO - joeynmt.data - Valid dataset: PlaintextDataset(len=1014)
31.5\t2026-11-27 22:47:39 - INFO - joeynmt.training - Epoch   1, Step:       20, Batch Loss:     \
7.730318, Batch Acc: 0.046011, Tokens per Sec:      509, Lr: 0.000025
40.0\t2026-11-27 22:48:19 - INFO - joeynmt.prediction - Evaluation result (greedy): bleu:   0.00, \
loss:   7.65, ppl: 2108.42, acc:   0.06, 0.0766[sec]
61.0\t2026-11-27 22:48:44 - INFO - joeynmt.training - Epoch   1, Step:     1240, Batch Loss:     \
2.500000, Batch Acc: 0.5, Tokens per Sec:     1300, Lr: 0.005000
"""
EOLE = """\
2.0\t[2026-11-27 22:43:40,914 INFO] Start training loop and validate every 200 steps...
31.5\t[2026-11-27 22:43:48,914 INFO] Step 20/1000000; acc: 0.0; ppl: 9933.54; xent: 9.20; aux: \
0.000; mtp: 0.000; attn_ent: 2.169; lr: 2.80e-05; sents:    1344; bsz: 3250/3484/269; 1221/1309 \
tok/s;     13 sec;
50.0\t[2026-11-27 22:44:00,000 INFO] Train perplexity: 9000.0
61.0\t[2026-11-27 22:44:10,865 INFO] Step 1240/1000000; acc: 50.0; ppl: 12.2; xent: 2.50; aux: \
0.000; mtp: 0.000; attn_ent: 1.1; lr: 5.59e-05; sents:     968; bsz: 2917/3195/194; 900/1300 \
tok/s;     25 sec;
"""


@pytest.mark.parametrize(
    ("pattern", "text", "rates", "loss"),
    [("JOEYNMT_LINE", JOEYNMT, (509, 1300), 7.730318), ("EOLE_LINE", EOLE, (1309, 1300), 9.20)],
)
def test_logs_of_peers_are_read(
    tmp_path: Path, pattern: str, text: str, rates: tuple[float, float], loss: float
) -> None:
    import race_peers  # type: ignore[import-not-found]

    log = tmp_path / "race.log"
    log.write_text(text)
    lines = race_peers.read_progress(log, getattr(race_peers, pattern))
    assert [(line.seconds, line.step) for line in lines] == [(31.5, 20), (61.0, 1240)]
    assert [line.loss for line in lines] == [loss, 2.5]
    assert tuple(line.tokens_per_second for line in lines) == rates
    assert race_peers.tokens_per_second(lines) == sum(rates) / 2
    assert race_peers.tokens_per_second([]) is None


def test_steps_are_planned_for_the_time_that_is_left(tmp_path: Path) -> None:
    import race_heedful  # type: ignore[import-not-found]

    log = tmp_path / "race.log"
    log.write_text(
        '0.0\t$ python -m heedful {"no": "output"}\n7.0\tA note on the data.\n'
        '8.0\t{"total_steps": 5000, "parameters": {"all": 9},\n9.0\t"seconds_per_step": 0.5}\n'
    )
    output = race_heedful.dry_run_output(log)
    assert race_heedful.planned_steps(output, 1000, share=0.9) == 1800
    assert race_heedful.planned_steps(output, 1e6) == 5000, "the recipe's own end"
    assert race_heedful.planned_steps(output, 0.1) == 1
    endless = output.replace("5000", "null")
    assert race_heedful.planned_steps(endless, 1e6, share=1.0) == 2_000_000


def test_the_clock_stops_a_deaf_command_and_keeps_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import race_clock  # type: ignore[import-not-found]

    monkeypatch.setattr(race_clock, "POLL", 0.02)
    log, weights = tmp_path / "race.log", tmp_path / "weights"
    weights.write_text("first")
    clock = race_clock.Clock(0.4, 3, log)
    script = "trap '' INT TERM; sleep 60 & echo $! threads $OMP_NUM_THREADS; wait; wait"
    command = ["sh", "-c", script]
    into = tmp_path / "snapshots"
    status = clock.run(
        command,
        cwd=tmp_path,
        checkpoints=lambda: {"one": [weights], "gone": [tmp_path / "gone"]},
        into=into,
        grace=(0.05, 0.05),
    )
    assert status is None
    assert clock.used == clock.limit
    weights.unlink()
    assert (into / "one" / "weights").read_text() == "first"
    assert [*clock.snapshots] == os.listdir(into) == ["one"]
    assert 0 <= clock.snapshots["one"] <= 0.4
    first, second = race_clock.timed_lines(log)
    assert first == (0.0, f"$ {' '.join(command)}")
    child, *rest = second[1].split()
    assert rest == ["threads", "3"]
    if sys.platform == "linux":
        stat = Path(f"/proc/{child}/stat")
        assert not stat.is_file() or stat.read_text().split()[2] == "Z"
    assert clock.peak_bytes > 0


def test_the_clock_goes_on_with_the_next_command_and_says_how_one_ended(tmp_path: Path) -> None:
    import race_clock
    import race_peers

    corpus = race_peers.Corpus("multi30k", tmp_path, "en", "de")
    job = race_peers.Job(Path("python"), tmp_path, corpus, tmp_path, 1)
    clock = race_clock.Clock(60.0, 1, tmp_path / race_peers.LOG)
    race_peers.run(clock, job, ["sh", "-c", "echo ready"])
    used = clock.used
    assert used > 0
    with pytest.raises(RuntimeError, match="exit status 3: no such corpus"):
        race_peers.run(clock, job, ["sh", "-c", "echo no such corpus; exit 3"])
    assert clock.used > used
    clock.used = clock.limit
    race_peers.run(clock, job, ["sh", "-c", "touch late"])
    assert not (tmp_path / "late").exists()


def test_checkpoints_of_peers_are_taken_when_they_are_complete(tmp_path: Path) -> None:
    import race_peers

    model = tmp_path / "model"
    assert race_peers.joeynmt_checkpoints(tmp_path) == {}
    assert race_peers.eole_checkpoints(tmp_path) == {}
    (model / "step_200").mkdir(parents=True)
    for name in ("200.ckpt", "400.ckpt", "step_200/model.00.safetensors", "step_200/optimizer.pt"):
        (model / name).touch()
    assert race_peers.joeynmt_checkpoints(tmp_path) == {}, "it is not linked yet"
    assert race_peers.eole_checkpoints(tmp_path) == {}, "it is not linked yet"
    (model / "latest.ckpt").symlink_to("400.ckpt")
    (model / "best.ckpt").symlink_to("200.ckpt")
    (model / "step_200" / "config.json").touch()
    (model / "config.json").symlink_to("step_200/config.json")
    assert race_peers.joeynmt_checkpoints(tmp_path) == {"step-00000400": [model / "400.ckpt"]}
    found = race_peers.eole_checkpoints(tmp_path)["step-00000200"]
    assert [path.name for path in found] == ["config.json", "model.00.safetensors"]
    job = race_peers.Job(
        Path("python"), tmp_path, race_peers.Corpus("x", tmp_path, "en", "de"), tmp_path, 1
    )
    names = ["step-00000200", "step-00000400"]
    assert race_peers.joeynmt_best(job, names) == "step-00000200"
    assert race_peers.joeynmt_best(job, names[1:]) == "step-00000400", "its best came too late"


@pytest.mark.parametrize("index", range(4))
def test_configurations_are_yaml_with_lines_to_count(tmp_path: Path, index: int) -> None:
    import race_peers

    system = race_peers.PEERS[index]
    corpus = race_peers.Corpus("multi30k", tmp_path / "text", "en", "de", vocabulary=777)
    job = race_peers.Job(Path("/e/bin/python"), tmp_path, corpus, tmp_path, 1)
    plan = race_peers.joeynmt if "joeynmt" in system.name else race_peers.eole
    config, commands = plan(job, is_tiny=system.name.endswith("-tiny"))
    assert yaml.safe_load(race_peers.dump(config)) == config
    assert "777" in race_peers.dump(config)
    lines, number = system.configuration(job)
    assert number == len(commands)
    assert lines == len(race_peers.dump(config).splitlines())
    assert any("--vocab_size=777" in word for word in commands[0])


def test_checkpoints_to_score_are_spread_over_the_time() -> None:
    from race import thinned  # type: ignore[import-not-found]

    assert thinned(range(9), 3) == [0, 4, 8]
    assert thinned(range(9), 1) == [8]
    assert thinned(range(3), 3) == thinned(range(3), 9) == [0, 1, 2]
    assert thinned([], 3) == []


PIP = """\
Collecting sockeye==3.1.34
ERROR: Cannot install sockeye==3.1.34 and torch==2.13.0+cpu because of conflicting dependencies.
The conflict is caused by:
    sockeye 3.1.34 depends on torch<1.14.0
ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/
"""


def test_what_does_not_install_says_why() -> None:
    from race_environments import last_line  # type: ignore[import-not-found]

    assert last_line(PIP).startswith("Cannot install sockeye==3.1.34 and torch")
    assert last_line("Traceback\nValueError: mutable default\n") == "ValueError: mutable default"
    assert last_line("") == "no output"


def record(system: str, scores: dict[float, float], **more: Any) -> dict[str, Any]:
    """A result as race.py writes it; scores: BLEU by seconds."""
    names = {f"step-{index}": seconds for index, seconds in enumerate(scores)}
    values = dict(zip(names, scores.values(), strict=True))
    return {
        "system": system,
        "task": "multi30k",
        "minutes": 30.0,
        "threads": 1,
        "versions": "python 3.11",
        "settings": "documented",
        "configuration_lines": 7,
        "commands": 2,
        "command_lines": ["python train"],
        "steps": 1200,
        "tokens_per_second": None,
        "peak_bytes": 2**30,
        "snapshots": names,
        "model": max(names, default=""),
        "scores": {name: {"bleu": value, "chrf": 2 * value} for name, value in values.items()},
        "error": "",
        **more,
    }


def test_the_page_has_the_selected_models_and_when_heedful_was_there(tmp_path: Path) -> None:
    import race_page  # type: ignore[import-not-found]

    results = [
        record("heedful", {300: 10.0, 600: 20.0, 1200: 30.0}),
        record("joeynmt", {600: 19.5, 1200: 16.0}, sentences_per_second=12.34),
        record("eole", {}, error="exit status 1: out of memory"),
    ]
    for result in results[::-1]:
        path = tmp_path / "multi30k-30min-1threads" / result["system"] / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(result))
    (records,) = race_page.read_races(tmp_path).values()
    assert [one["system"] for one in records] == ["heedful", "joeynmt", "eole"]
    page = "\n".join(race_page.race_sections(records))
    assert "## Multi30k, English to German: 30 minutes, one thread" in page
    # The model of joeynmt is the last one, the best time that of the checkpoint before.
    rows = """
|  | heedful | joeynmt | eole |
| --- | ---: | ---: | ---: |
| BLEU | 30.0 | 16.0 | – |
| chrF | 60.0 | 32.0 | – |
| best after, min | 20.0 | 10.0 | – |
| heedful has that after, min | – | 10.0 | – |
| steps | 1,200 | 1,200 | 1,200 |
| target tokens/s | – | – | – |
| peak memory, MiB | 1,024 | 1,024 | 1,024 |
| sentences/s | – | 12.3 | – |
| lines of configuration | 7 | 7 | 7 |
| commands | 2 | 2 | 2 |
"""
    assert rows in page
    assert "* eole: exit status 1: out of memory" in page
    assert "* joeynmt: python 3.11; documented; `python train`" in page


def test_a_long_race_has_the_score_of_its_first_quarter() -> None:
    import race_page

    points = {600.0: 20.0, 1700.0: 25.0, 1900.0: 26.0, 7000.0: 30.0}
    records = [record("heedful", points, minutes=120.0), record("eole", {}, minutes=120.0)]
    page = "\n".join(race_page.race_sections(records))
    assert "\n|  | heedful | eole |\n" in page
    assert "\n| BLEU | 30.0 | – |\n" in page
    assert "\n| BLEU after 30 min | 25.0 | – |\n| best after, min | 116.7 | – |\n" in page


def test_a_shorter_race_of_peers_is_in_the_chart_of_the_longer_one() -> None:
    import race_page

    def race_of(*systems: str, **more: Any) -> list[dict[str, Any]]:
        return [record(system, {600.0: 20.0}, **more) for system in systems]

    half, two, other = (
        race_of("eole"),
        race_of("heedful", "eole-tiny", minutes=120.0),
        race_of("stub", task="libreoffice"),
    )
    races = race_page.in_order({"half": half, "other": other, "two": two})
    assert list(races) == ["two", "half", "other"]
    assert race_page.charts(races) == [[*two, *half], other]
    assert races["two"] == two, "the tables keep their races"
    assert race_page.charts({"half": race_of("heedful"), "two": two}) == [race_of("heedful"), two]


def test_a_loss_is_the_better_the_lower_it_is() -> None:
    import race_page

    def loss(system: str, points: dict[float, float]) -> dict[str, Any]:
        found = record(system, points, task="shakespeare")
        found["scores"] = {name: {"loss": one["bleu"]} for name, one in found["scores"].items()}
        return found

    ours, peer = loss("heedful", {60: 1.9, 120: 1.6}), loss("nanogpt", {60: 2.2, 120: 1.85})
    records = sorted([peer, ours, loss("litgpt", {})], key=race_page.rank)
    assert [one["system"] for one in records] == ["heedful", "nanogpt", "litgpt"]
    page = "\n".join(race_page.race_sections(records, ["One core."]))
    assert "## Tiny Shakespeare, characters: 30 minutes, one thread\n" in page
    assert "\nOne core.\n" in page
    assert "\n| loss | 1.600 | 1.850 | – |\n| best after, min | 2.0 | 2.0 | – |\n" in page
    assert "\n| heedful has that after, min | – | 2.0 | – |\n" in page
    assert "sentences/s" not in page


def test_the_page_keeps_the_races_of_other_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import race_page

    monkeypatch.setattr("sys.argv", ["race.py"])
    monkeypatch.setattr(race_page, "draw_chart", lambda races, path: None)
    results, environments = tmp_path / "results", tmp_path / "environments"
    environments.mkdir()
    for task, minutes, peer, note in (
        ("sst2", 5.0, "litgpt", "A busy core."),
        ("multi30k", 120.0, "fairseq", ""),
        ("multi30k", 30.0, "litgpt", "A quiet core."),
    ):
        runs = tmp_path / f"{task}{minutes}"
        path = runs / f"{task}-{minutes:g}min-1threads" / "heedful" / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record("heedful", {}, task=task, minutes=minutes)))
        (environments / f"{peer}.json").write_text(json.dumps({"error": "no wheel"}))
        arguments = argparse.Namespace(results=results, note=note, data=None, runs=runs)
        arguments.environments = environments
        race_page.write_page(runs, environments, arguments)
        (environments / f"{peer}.json").unlink()
    data = json.loads((results / "race.json").read_text(encoding="utf-8"))
    names = ["multi30k-30min-1threads", "multi30k-120min-1threads", "sst2-5min-1threads"]
    assert [*data["races"]] == names, "in the order of the tasks"
    assert data["notes"] == {names[0]: "A quiet core.", names[2]: "A busy core."}
    assert data["not_installed"] == {"fairseq": "no wheel", "litgpt": "no wheel"}
    page = (results / "race.md").read_text(encoding="utf-8")
    assert page.count("with beams of 5") == 1, "the text on translators is there once"
    assert page.index("A quiet core.") < page.index("## SST-2") < page.index("A busy core.")


def test_the_page_keeps_other_systems_of_a_race_and_its_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import race_page

    monkeypatch.setattr("sys.argv", ["race.py"])
    monkeypatch.setattr(race_page, "draw_chart", lambda races, path: None)
    long, short = "multi30k-120min-1threads", "multi30k-30min-1threads"

    def write(folder: str, name: str, result: dict[str, Any], note: str, *ran: str) -> Any:
        path = tmp_path / folder / name / result["system"] / "result.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        arguments = argparse.Namespace(results=tmp_path, note=note, data=None)
        arguments.runs = arguments.environments = tmp_path / folder
        race_page.write_page(arguments.runs, arguments.runs, arguments, ran)
        return json.loads((tmp_path / "race.json").read_text(encoding="utf-8"))

    write("one", short, record("heedful", {300: 10.0}), "A quiet core.", short)
    write("one", short, record("eole", {300: 20.0}), "", short)
    data = write("two", short, record("heedful", {300: 30.0}), "")
    scores = [(one["system"], one["scores"]["step-0"]["bleu"]) for one in data["races"][short]]
    assert scores == [("heedful", 30.0), ("eole", 20.0)]
    data = write("two", long, record("heedful", {}, minutes=120.0), "A busy core.", long)
    assert data["notes"] == {short: "A quiet core.", long: "A busy core."}
    data = write("two", long, record("eole", {}, minutes=120.0), "A new core.", long)
    assert data["notes"] == {short: "A quiet core.", long: "A new core."}


NANOGPT = """\
1.0\t$ python train.py --out_dir=probe
2.0\tstep 0: train loss 4.2, val loss 4.2
3.0\titer 0: loss 4.2000, time 900.00ms, mfu -100.00%
4.0\titer 1: loss 4.1000, time 40.00ms, mfu -100.00%
5.0\titer 2: loss 4.1000, time 20.00ms, mfu -100.00%
6.0\t$ python train.py
7.0\titer 0: loss 4.2000, time 900.00ms, mfu -100.00%
8.0\titer 100: loss 3.0000, time 20.00ms, mfu 0.10%
10.0\titer 250: loss 2.5000, time 20.00ms, mfu 0.10%
10.5\tstep 250: train loss 2.5, val loss 2.6
11.0\tsaving checkpoint to out-shakespeare-char
"""


def test_a_checkpoint_of_nanogpt_is_copied_once_it_is_complete(tmp_path: Path) -> None:
    import race_language_models  # type: ignore[import-not-found]
    import race_peers

    log, folder = tmp_path / race_peers.LOG, tmp_path / "out-shakespeare-char"
    log.write_text(NANOGPT)
    folder.mkdir()
    weights = folder / "ckpt.pt"
    weights.write_text("at 250")
    assert race_language_models.nanogpt_checkpoints(tmp_path) == {}, "it is being written"
    with open(log, "a", encoding="utf-8") as lines:
        lines.write("11.5\titer 250: loss 2.5000, time 600.00ms, mfu 0.10%\n")
    ((name, (copy,)),) = race_language_models.nanogpt_checkpoints(tmp_path).items()
    weights.write_text("at 500")
    assert race_language_models.nanogpt_checkpoints(tmp_path) == {name: [copy]}
    assert (name, copy.read_text()) == ("step-00000250", "at 250")


def test_steps_and_rates_of_language_models_are_those_of_the_last_command(tmp_path: Path) -> None:
    import race_language_models as models
    import race_peers

    log = tmp_path / race_peers.LOG
    corpus = race_peers.Corpus("shakespeare", tmp_path, "txt", "windows")
    job = race_peers.Job(Path("python"), tmp_path, corpus, tmp_path, 1)
    log.write_text(NANOGPT.partition("6.0\t$")[0])
    steps = models.planned(job, 10.0, models.NANOGPT_LINE, "train.py")
    seconds = models.SHARE * (10.0 - 2.0 * models.WARM_START)  # the first one is printed at 3.0
    assert steps == int(seconds / 0.03), "the first half is not counted"
    log.write_text(NANOGPT)
    lines = models.progress(job, models.NANOGPT_LINE, 768)
    assert [(line.seconds, line.step) for line in lines] == [(7.0, 0), (10.0, 250)]
    assert [line.tokens_per_second for line in lines] == [None, 768 * 250 / 3]
    log.write_text("1.0\t$ litgpt pretrain\n")
    with pytest.raises(RuntimeError, match="litgpt pretrain has printed no time"):
        models.planned(job, 10.0, models.LITGPT_LINE, "litgpt pretrain")


def test_every_character_of_a_window_counts_once_in_the_loss() -> None:
    import torch

    from race_logits import CONTEXT, window_losses  # type: ignore[import-not-found]

    ids = torch.arange(2 * CONTEXT + 40) % 5

    def knows_the_next(inputs: torch.Tensor) -> torch.Tensor:
        assert inputs.shape == (2, CONTEXT)
        return torch.nn.functional.one_hot((inputs + 1) % 5, 5) * 100.0

    assert window_losses(knows_the_next, ids) == [0.0, 0.0]
    losses = window_losses(lambda inputs: torch.zeros(*inputs.shape, 5), ids)
    assert losses == pytest.approx([CONTEXT * math.log(5)] * 2)


def test_the_trainer_takes_its_best_checkpoint_of_those_in_time(tmp_path: Path) -> None:
    import race_classifiers  # type: ignore[import-not-found]
    import race_peers

    out = tmp_path / "out"
    for step in (9, 18, 27):
        (out / f"checkpoint-{step}").mkdir(parents=True)
    assert race_classifiers.checkpoints(tmp_path) == {}, "they are not complete"
    for step in (9, 18):
        state = {"best_model_checkpoint": "out/checkpoint-9"}
        (out / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    names = ["step-00000009", "step-00000018"]
    assert sorted(race_classifiers.checkpoints(tmp_path)) == names
    corpus = race_peers.Corpus("sst2", tmp_path, "text", "label")
    job = race_peers.Job(Path("python"), tmp_path, corpus, tmp_path, 1)
    assert race_classifiers.best(job, names) == names[0]
    assert race_classifiers.best(job, names[1:]) == names[1], "its best came too late"


def test_the_lines_of_a_program_are_those_that_its_user_writes() -> None:
    from race_classifiers import written_lines

    program = (
        '"""What it is."""\n\nimport os\n\nSIZE = 4\n\n\ndef train(\n    size,\n):\n'
        '    """Train."""\n    print(size)\n\n    return size\n\n\n'
        'def other():\n    """No."""\n    0\n'
    )
    assert written_lines(program, {"train"}) == 7
    assert written_lines(program, {"train", "other"}) == 9
