"""The benchmarks run end to end, on toy sizes: what they write, not how fast."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Bench = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Runs a benchmark by name; gives its page and its JSON."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        results = tmp_path / "results"
        script = str(BENCHMARKS / f"{name}.py")
        words = [script, "--quick", "--results", str(results), *arguments]
        monkeypatch.setattr("sys.argv", words)
        runpy.run_path(script, run_name="__main__")
        page = (results / f"{name}.md").read_text(encoding="utf-8")
        content = (results / f"{name}.json").read_text(encoding="utf-8")
        for text in (page, content):
            assert str(tmp_path) not in text, "a folder of this machine is in the results"
        data = json.loads(content)
        assert f"benchmarks/{name}.py" in data["command"]
        assert {"python", "torch", "heedful"} <= data["versions"].keys()
        assert data["machine"]["processor"]
        return page, data

    return run


def paper_parameters(width: int, hidden: int, vocabulary: int) -> int:
    """By hand: 6 + 6 layers, biases everywhere but at the shared output, no last norm."""
    attention = 4 * (width * width + width)
    feedforward = width * hidden + hidden + hidden * width + width
    norm = 2 * width
    encoder, decoder = attention + feedforward + 2 * norm, 2 * attention + feedforward + 3 * norm
    return vocabulary * width + 6 * (encoder + decoder)


def test_parameters_are_those_of_the_paper(bench: Bench) -> None:
    page, data = bench("parameters")
    for size, width, hidden in (("base", 512, 2048), ("big", 1024, 4096)):
        found = data["sizes"][size]
        total = paper_parameters(width, hidden, 37_000)
        assert found["total"] == total
        assert f"{total:,}" in page
        assert abs(found["difference_percent"]) < 4
        low, high = found["vocabulary_wanted"]
        for rows, edge in ((low, -500_000), (high, 500_000)):
            assert total + (rows - 37_000) * width == pytest.approx(found["paper"] + edge)


def test_training_speed(bench: Bench) -> None:
    page, data = bench("training_speed", "--peers", "torch")
    found = data["sizes"]["quick"]
    assert set(found["tokens_per_second"]) == {
        f"{who} {precision}" for who in ("heedful", "torch") for precision in ("fp32", "bf16")
    }
    # torch.nn.Transformer has a norm after each stack, of 2 x 16 numbers.
    assert found["parameters"]["torch"] == found["parameters"]["heedful"] + 2 * 2 * 16
    assert "torch.nn.Transformer, bf16" in page


def test_decoding_speed(bench: Bench) -> None:
    _, data = bench("decoding_speed", "--peers", "")
    assert set(data["tokens_per_second"]["quick"]) == {
        f"{search}, batch {rows}" for search in ("greedy", "beam 4") for rows in (1, 64)
    }


def test_interleaved_takes_the_median_of_cases_in_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import common  # type: ignore[import-not-found]

    clock, order = [0.0], []
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])

    def case(name: str, durations: list[float]) -> Callable[[], float]:
        left = iter(durations)

        def run() -> float:
            order.append(name)
            clock[0] += next(left)
            return 6.0

        return run

    cases = {"a": case("a", [99, 1, 2, 3]), "b": case("b", [99, 6, 1, 2])}
    assert common.interleaved(cases, rounds=3) == {"a": 3.0, "b": 3.0}
    assert order == ["a", "b"] * 4


def test_synthetic(bench: Bench, tmp_path: Path) -> None:
    page, data = bench("synthetic", "--runs", str(tmp_path / "runs"))
    assert set(data["runs"]) == {"copy", "reverse", "sort", "copy-varied"}
    copied = data["runs"]["copy"]
    assert copied["num_test"] == 20
    assert copied["exact_match"] == copied["num_equal"] / 20
    assert copied["first_epoch_at_threshold"] is None
    assert "| never |" in page
    assert "training.max_steps" in page, "a changed recipe is told"


@pytest.mark.parametrize(("name", "target"), [("multi30k", "de"), ("tatoeba", "zh")])
def test_translation(bench: Bench, tmp_path: Path, name: str, target: str) -> None:
    words = {
        "en": "the dog runs to a red house",
        "de": "der Hund läuft zum Haus",
        "zh": "狗跑向房子",
    }
    text = tmp_path / "text"
    text.mkdir()
    for file, count in (("train", 40), ("val", 6), ("test_2016_flickr", 5)):
        for language in ("en", target):
            lines = [f"{words[language]} {number}\n" for number in range(count)]
            # Read by what they hold, not by their names: plain text will do.
            (text / f"{file}.{language}.gz").write_bytes(gzip_of("".join(lines)))
    run = str(tmp_path / "run")
    page, data = bench(name, "--data", str(text), "--run", run)
    assert data["command"] == f"python benchmarks/{name}.py --quick --data DATA --run RUN"
    assert data["steps"] == 4
    assert [entry["step"] for entry in data["validation"]] == [2, 4]
    for search in ("beam 5", "greedy"):
        scores = data["scores"][search]
        assert "version:" in scores["chrf"]["signature"]
        assert ("tok:zh" if target == "zh" else "tok:13a") in scores["bleu"]["signature"]
    if target == "de":
        scores = data["scores"]["beam 5"]
        assert "case:lc" in scores["bleu_lowercase"]["signature"]
        assert len(scores["tokenized_lowercase_bleu"]["precisions"]) == 4
    assert words[target] not in page, "no sentence of the data is in the results"
    # A finished run is not trained again, and needs no text.
    again, _ = bench(name, "--run", run)
    assert again.split("## How")[0] == page.split("## How")[0]


def gzip_of(text: str) -> bytes:
    import gzip

    return gzip.compress(text.encode())
