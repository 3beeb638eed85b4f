"""Events and listeners: complete logs without duplicates, displays without control codes."""

import io
import json
import math
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from heedful.errors import UserError
from heedful.progress import clock
from heedful.training.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    RunFinished,
    RunStarted,
    Sample,
    StepDone,
    format_score,
)
from heedful.training.listeners import (
    JsonlLog,
    RunDisplay,
    TensorBoardLog,
    from_json,
    read_log,
    to_json,
)

RECIPE = {"model": {"d_model": 64}, "training": {"label_smoothing": 0.1}}
START = RunStarted(RECIPE, 1_234_567, 900, 100, "cpu", 100)


def step_done(step: int) -> StepDone:
    return StepDone(step, 1, 5.0 / step, 4.0 / step, 1e-3, 0.5, 1000.0, 250, step * 0.5)


def evaluated(step: int, *, is_best: bool = False) -> Evaluated:
    samples = [Sample("zwölf\u2028März", "03-12", "03-21")]
    scores = {"bleu": 23.4, "exact_match": 0.5}
    return Evaluated(step, 1, step * 0.5, 1.5, 3.25, 0.625, scores, samples, is_best)


def a_run(until: int = 100) -> list[Event]:
    """Events of a run: steps logged every 10, evaluated and saved every 20."""
    events: list[Event] = [START]
    for step in range(10, until + 1, 10):
        events.append(step_done(step))
        if step % 20 == 0:
            events += [evaluated(step, is_best=step == 40), CheckpointSaved(step, "last", "last")]
    return events


texts = st.text(max_size=12)
numbers = st.floats()
counts = st.integers(0, 2**40)
scores = st.dictionaries(texts, numbers, max_size=3)
samples = st.lists(st.builds(Sample, texts, texts, texts), max_size=2)
recipes = st.dictionaries(texts, st.none() | st.booleans() | counts | texts, max_size=3)
any_event = st.one_of(
    st.builds(
        RunStarted, recipes, counts, counts, counts, texts, st.none() | counts, st.none() | counts
    ),
    st.builds(StepDone, counts, counts, *[numbers] * 5, counts, numbers),
    st.builds(Evaluated, counts, counts, *[numbers] * 4, scores, samples, st.booleans()),
    st.builds(CheckpointSaved, counts, texts, texts),
    st.builds(RunFinished, counts, numbers, st.just("time_limit"), scores, scores),
)


@settings(deadline=None)
@given(any_event)
def test_an_event_survives_its_line_of_json(event: Event) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = to_json(event)
    assert "\n" not in line
    json.loads(line, parse_constant=refuse)
    again = from_json(line)
    assert type(again) is type(event)
    assert repr(asdict(again)) == repr(asdict(event))  # repr, as NaN is not equal to itself


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "event: Invalid JSON"),
        ("[1]", "event: Input should be"),
        ('{"event": "step"}', "event: Input tag 'step'"),
        ('{"event": "checkpoint_saved", "step": 1, "path": "x"}', "kind"),
        ('{"event": "checkpoint_saved", "step": "one", "path": "x", "kind": "y"}', "step"),
        ('{"event": "run_finished", "step": 1, "seconds": 2, "reason": "tired"}', "reason"),
    ],
)
def test_a_line_that_is_not_an_event_is_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(line)


def test_the_log_is_complete_after_every_event(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "new" / "log.jsonl")
    for count, event in enumerate(a_run(), start=1):
        log.on(event)
        assert read_log(log.path) == a_run()[:count]  # flushed, although still open
    log.close()
    JsonlLog(log.path).close()
    assert read_log(log.path) == []


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 10).map(lambda n: 10 * n), st.integers(0, 30), st.data())
def test_a_killed_and_resumed_log_is_that_of_the_uninterrupted_run(
    killed_at: int, torn: int, data: st.DataObject
) -> None:
    saved = data.draw(st.sampled_from(range(20, killed_at + 1, 20)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        first = JsonlLog(path)
        for event in a_run(killed_at):
            first.on(event)
        first.close()
        torn_line = to_json(evaluated(killed_at + 10)).encode()[:torn]
        path.write_bytes(path.read_bytes() + torn_line)
        resumed = RunStarted({}, 1, 2, 3, "cpu", 100, resumed_from=saved)
        second = JsonlLog(path, resume_step=saved)
        done = {id(event) for event in a_run() if getattr(event, "step", 0) <= saved}
        assert len(read_log(path)) == len(done)
        for event in [resumed, *(e for e in a_run() if getattr(e, "step", 0) > saved)]:
            second.on(event)
        second.close()
        assert [event for event in read_log(path) if event != resumed] == a_run()
        assert list(Path(folder).iterdir()) == [path]


def test_resuming_drops_obsolete_events(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    at_20, at_40 = (RunStarted({}, 1, 2, 3, "cpu", 100, resumed_from=step) for step in (20, 40))
    log = JsonlLog(path)
    for event in [START, step_done(10), at_20, step_done(30), step_done(40), at_40, step_done(50)]:
        log.on(event)
    log.on(RunFinished(50, 25.0, "interrupted"))
    log.close()
    JsonlLog(path, resume_step=40).close()
    assert read_log(path) == [START, step_done(10), at_20, step_done(30), step_done(40)]


def test_resume_without_a_log_starts_one(tmp_path: Path) -> None:
    JsonlLog(tmp_path / "log.jsonl", resume_step=40).close()
    assert read_log(tmp_path / "log.jsonl") == []


def test_unusable_logs_are_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent"):
        read_log(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot write"):
        JsonlLog(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        JsonlLog(tmp_path / "file" / "log.jsonl")
    broken = tmp_path / "broken.jsonl"
    for line in (b'{"event": "nothing"}', b"\xff"):
        broken.write_bytes(to_json(START).encode() + b"\n" + line + b"\n")
        with pytest.raises(UserError, match=r"broken\.jsonl, line 2"):
            read_log(broken)


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoardLog(tmp_path)
    for event in a_run(60):
        log.on(event)
    log.close()
    resumed = TensorBoardLog(tmp_path, resume_step=40)
    for event in a_run()[1:]:
        if isinstance(event, StepDone) and event.step > 40:
            resumed.on(event)
    resumed.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    losses = reader.Scalars("train/loss")
    assert [point.step for point in losses] == list(range(10, 101, 10))  # 50 and 60 only once
    assert losses[4].value == pytest.approx(step_done(50).loss)
    assert [(p.step, p.value) for p in reader.Scalars("valid/exact_match")][:2] == [
        (20, 0.5),
        (40, 0.5),
    ]
    assert "recipe/text_summary" in reader.Tags()["tensors"]


def test_tensorboard_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'heedful\[tensorboard\]'"):
        TensorBoardLog(tmp_path)


def shown(events: list[Event], *, terminal: bool, width: int = 100) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    bar = RunDisplay(console, line_seconds=15)
    for event in events:
        bar.on(event)
    bar.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_progress_is_plain_lines() -> None:
    out = shown(
        [*a_run(), RunFinished(100, 50.0, "max_steps", {"bleu": 23.4})], terminal=False, width=40
    )
    assert all(character.isprintable() or character == "\n" for character in out)
    lines = out.splitlines()
    assert "1,234,567 parameters on cpu" in lines[0]
    # 5, 20, 35, 50 seconds: one line every 15, the time left from the mean speed.
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["10/100", "40/100", "70/100", "100/100"]
    assert "loss 0.125 (smoothed)  lr 1.00e-03  1,000 tokens/s  0:30 left" in steps[1]
    held_out = [line for line in lines if "held-out loss" in line]
    assert [line[0] for line in held_out] == [" ", "*", " ", " ", " "]
    scores = "perplexity 3.25  token accuracy 62.50%  BLEU 23.40  exact match 50.00%"
    assert f"held-out loss 1.500  {scores}" in held_out[1]
    assert lines[-1] == "all steps done after step 100 and 0:50; best  BLEU 23.40"


@pytest.mark.parametrize(
    ("recipe", "of_training"),
    [
        ({"training": {"label_smoothing": 0.1}}, " (smoothed)"),
        ({"training": {"r_drop": 1.0}}, " (with R-Drop)"),
        ({"distillation": {"teacher": "t", "level": "word"}}, " (with the teacher's part)"),
        ({}, " (not the likelihood alone)"),
    ],
)
def test_the_display_notes_terms_besides_the_likelihood(
    recipe: dict[str, object], of_training: str
) -> None:
    """The held-out loss has none."""
    start = replace(START, recipe=recipe, unit="tokens")
    events: list[Event] = [start, step_done(10)]
    events.append(Evaluated(10, 1, 5.0, 1.5, math.exp(1.5), 0.5, smoothed_loss=1.7))
    first, step, evaluation = shown(events, terminal=False).splitlines()
    assert "900 training and 100 held-out tokens" in first
    assert f"loss 0.500{of_training}  lr" in step
    assert "held-out loss 1.500  perplexity" in evaluation


def test_classification_displays_no_perplexity() -> None:
    event = Evaluated(10, 1, 5.0, 0.5, math.exp(0.5), 0.75, {"accuracy": 0.75, "macro_f1": 0.5})
    (line,) = shown([event], terminal=False).splitlines()
    assert line == "  step 10  held-out loss 0.500  accuracy 75.00%  macro F1 50.00%  0:05"


def test_the_bar_is_removed_before_the_last_line() -> None:
    out = shown([*a_run(), RunFinished(100, 50.0, "interrupted")], terminal=True)
    hidden, visible, end = (out.rindex(s) for s in ("\x1b[?25l", "\x1b[?25h", "interrupted"))
    assert hidden < visible < end
    assert "100/100" in out
    assert "* step 40/100" in out


def test_markup_in_names_is_not_interpreted() -> None:
    event = Evaluated(1, 1, 1.0, 1.0, 1.0, 0.5, {"[red]x": 1.0})
    assert "[red]x 1.00" in shown([START, event], terminal=False)


def test_scores_are_formatted() -> None:
    assert [clock(s) for s in (0, 59.6, 3599, 3600, 36_061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:00:00",
        "10:01:01",
    ]
    assert format_score("exact_match", 0.99) == "99.00%"
    assert format_score("bleu", 37.456) == "37.46"
    assert format_score("bleu", math.nan) == "nan"
