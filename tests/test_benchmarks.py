"""The benchmarks run end to end on toy sizes: their pages and records, not their speed."""

import gzip
import json
import runpy
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from heedful.hardware import cores
from heedful.recipe_files import RECIPES, load_recipe, read_settings

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, EXPERIMENTS = ROOT / "benchmarks", ROOT / "experiments"
pytestmark = pytest.mark.benchmarks
Bench = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief: None) -> Bench:
    """Runs a benchmark by name; returns its page and its JSON."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def run(name: str, *arguments: str, page: str = "") -> tuple[str, dict[str, Any]]:
        results = tmp_path / "results"
        folder = BENCHMARKS if (BENCHMARKS / f"{name}.py").is_file() else EXPERIMENTS
        script = str(folder / f"{name}.py")
        words = [script, "--quick", "--results", str(results), *arguments]
        monkeypatch.setattr("sys.argv", words)
        here = tmp_path / "here"
        here.mkdir(exist_ok=True)
        monkeypatch.chdir(here)
        runpy.run_path(script, run_name="__main__")
        assert not list(here.iterdir()), "a benchmark writes where it was called"
        written = (results / f"{page or name}.md").read_text(encoding="utf-8")
        content = (results / f"{page or name}.json").read_text(encoding="utf-8")
        for text in (written, content):
            assert str(tmp_path) not in text, "a folder of this machine is in the results"
        data = json.loads(content)
        assert f"{folder.name}/{name}.py" in data["command"]
        assert {"python", "torch", "heedful"} <= data["versions"].keys()
        assert data["machine"]["processor"]
        return written, data

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
        actual = data["sizes"][size]
        total = paper_parameters(width, hidden, 37_000)
        assert actual["total"] == total
        assert f"{total:,}" in page
        assert abs(actual["difference_percent"]) < 4
        low, high = actual["vocabulary_needed"]
        for rows, edge in ((low, -500_000), (high, 500_000)):
            assert total + (rows - 37_000) * width == pytest.approx(actual["paper"] + edge)


def test_training_speed(bench: Bench) -> None:
    page, data = bench("training_speed")
    actual = data["sizes"]["quick"]
    names = ("heedful", "torch", "transformers")
    cases = {f"{who} {p}" for who in (*names, "products") for p in ("fp32", "bf16")}
    assert (
        actual["tokens_per_second"].keys() == actual["tokens_per_second_by_round"].keys() == cases
    )
    # torch.nn.Transformer has a norm after each stack, of 2 x 16 numbers.
    assert actual["parameters"]["torch"] == actual["parameters"]["heedful"] + 2 * 2 * 16
    assert actual["marian_attention"].keys() == {"fp32", "bf16"}
    assert f"fp32 {actual['marian_attention']['fp32']}" in page
    assert "torch.nn.Transformer, bf16" in page
    rounds = actual["tokens_per_second_by_round"]
    (rate,), (limit,) = rounds["heedful bf16"], rounds["products bf16"]
    assert f"| heedful, bf16 | {rate:,.0f} ({rate / limit:.0%}) |" in page
    # 6 FLOPs a token for each weight of a matrix, of which there are about 6,000.
    assert 6 * 6_000 / 2 < actual["product_flops_per_token"] < 6 * 6_000 * 2


def test_training_speed_on_a_gpu(bench: Bench) -> None:
    """On the CPU, compiled steps included."""
    page, data = bench("training_speed_gpu", "--device", "cpu")
    pairs, texts = (data["sizes"][name]["tokens_per_second"] for name in ("base", "gpt2"))
    ways = ("eager", "compiled")
    assert pairs.keys() == {f"{n} {w}" for n in ("heedful", "torch", "transformers") for w in ways}
    assert texts.keys() == {f"{n} {w}" for n in ("heedful", "transformers") for w in ways}
    best = {n: max(pairs[f"{n} {w}"][0] for w in ways) for n in ("heedful", "torch")}
    assert f"| torch.nn.Transformer | {best['heedful'] / best['torch']:.2f} |  |" in page


def test_decoding_speed_on_a_gpu(bench: Bench) -> None:
    page, data = bench("decoding_gpu", "--device", "cpu", "--static")
    for setting, rates in data["tokens_per_second"].items():
        best = {
            system: max(rate for name, [rate] in rates.items() if name.startswith(system))
            for system in ("heedful", "transformers", "CTranslate2")
        }
        assert "transformers, static cache" in rates
        assert f"| {setting} |" in page
        for peer in ("transformers", "CTranslate2"):
            assert f" {best['heedful'] / best[peer]:.2f} |" in page
    greedy = [setting for setting in data["tokens_per_second"] if "greedy" in setting]
    equal = {"transformers": 1.0, "CTranslate2": 1.0}
    assert data["equal_outputs"] == dict.fromkeys(greedy, equal)


def test_products_of_a_step_are_recorded_and_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from step_products import record_products, runner  # type: ignore[import-not-found]

    layer = torch.nn.Linear(5, 7)
    x, key = torch.randn(3, 5, requires_grad=True), torch.randn(4, 7, 6)

    def step() -> None:
        y = layer(x).relu()
        (y.expand(4, 3, 7) @ key).sum().backward()

    products = record_products(step)
    # Forward, and the two factors' gradients; `key` needs none.
    assert [product.flops for product in products] == [
        2 * 3 * 5 * 7,
        2 * 4 * 3 * 7 * 6,
        2 * 4 * 3 * 6 * 7,
        2 * 3 * 7 * 5,
        2 * 3 * 7 * 5,
    ]
    assert products[1].operands[0].strides == (0, 7, 1)
    assert record_products(runner(products)) == products
    x, key = torch.randn(4, 3, 7), torch.randn(4, 7, 6)
    into = record_products(lambda: torch.bmm(x, key, out=torch.empty(4, 3, 6)))
    assert into == record_products(lambda: x @ key)


@pytest.mark.parametrize("name", ["torch", "eager", "sdpa"])
def test_peers_of_training_form_the_logits_of_real_targets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import training_speed as speed  # type: ignore[import-not-found]

    size = speed.QUICK["quick"]
    batch = speed.make_batches(size, seed=1)[0]
    net = speed.TorchTransformer(size) if name == "torch" else speed.Marian(size, name)
    net.eval()
    ids, every = batch.tokens.ids, torch.arange(batch.tokens.ids.numel())
    assert len(batch.target_positions) < len(every)
    with torch.no_grad():
        logits = net(batch.source.ids, ids, batch.target_positions)
        whole = net(batch.source.ids, ids, every)
    torch.testing.assert_close(logits, whole[batch.target_positions])
    if name != "torch":
        assert net.net.config._attn_implementation == name
        layer = net.net.model.encoder.layers[0].self_attn
        assert layer.config._attn_implementation == name


def test_decoding(bench: Bench, tmp_path: Path) -> None:
    page, data = bench("decoding")
    systems = {"eager", "transformers", "optimized", "ctranslate2"}
    actual = {item["system"] for item in data["records"]}
    assert systems <= actual <= systems | {"llama.cpp"}
    keys = {"version", "size", "batch", "beam", "mixed", "precision", "threads", "workers"}
    more = {"backend", "detail", "setting", "tokens/s", "tokens/s by round"}
    shares = {"share of reading", "share of products"}
    assert all(item.keys() == {"system"} | keys | more | shares for item in data["records"])
    assert len(data["same_greedy_outputs"]) == 5
    for of in data["same_greedy_outputs"].values():
        assert set(of.values()) == {1.0}
    assert "| quick, greedy, batch 64 |" in page
    assert "| quick gpt2, greedy, batch 2, mixed lengths |" in page
    assert data["limits"].keys() == {"bytes/s", "float32 products/s", "int8 products/s"}
    ElementTree.parse(tmp_path / "results" / "decoding.svg")


def test_shared_cores(bench: Bench) -> None:
    names = ["heedful", "no kernels", "torch", "eager", "ctranslate2"]
    names += ["train", "two processes", "serve", "bulk"]
    page, data = bench("shared_cores", "--systems", ",".join([*names, "optimize"]))
    assert [*data["rates_by_round"]] == names
    for name, rates in data["rates_by_round"].items():
        loads = {"nothing", "one busy loop", "two busy loops"}
        if name in ("heedful", "no kernels", "torch"):
            loads.add("a second training")
        assert rates.keys() == loads
        assert all(rate > 0 for of_load in rates.values() for rate in of_load)
    times = {load: 1 / rates[0] for load, rates in data["rates_by_round"]["torch"].items()}
    slowdown = times["two busy loops"] / times["nothing"]
    ratio = f"{slowdown * cores() / (cores() + 2):.2f}"
    assert f"{ratio} ({ratio}–{ratio})" in page
    assert [*data["choices"]] == ["two busy loops", "one busy loop", "nothing"]
    for (found,) in data["choices"].values():
        fastest = found["rates"][0]
        assert f"{fastest['backend']}, " in page
        assert fastest["tokens_per_second"] == max(r["tokens_per_second"] for r in found["rates"])


def test_command(bench: Bench) -> None:
    page, data = bench("command")
    names = ["heedful translate", "CTranslate2 by hand"]
    assert data["files"].keys() == {"10", "100"}
    for of in (data["starts"], *data["files"].values()):
        assert [*of] == names
        for rounds in of.values():
            assert all(item["processor seconds"] > 0 for item in rounds)
            assert all(10 < item["MiB"] < 10_000 for item in rounds)
    assert "| 100 sentences, CTranslate2 by hand |" in page


def test_both_commands_search_greedily(bench: Bench) -> None:
    """The default of `heedful translate` is a beam."""
    import command  # type: ignore[import-not-found]

    assert " --beam-size 1" in " ".join(command.heedful_command(Path()))
    assert '"beam_size": 1' in command.BY_HAND


def test_encoding(bench: Bench) -> None:
    page, data = bench("encoding")
    names = [item["system"] for item in data["records"]]
    assert names[0] == "heedful optimized"
    assert {"heedful eager, float32", "transformers", "ctranslate2"} <= set(names)
    assert all(item["least_cosine"] > 0.99 for item in data["records"])
    assert all(item["tokens/s"] > 0 for item in data["records"])
    assert "| transformers | bfloat16 |" in page


def test_interleaved_takes_the_cases_in_turn(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
    actual = common.interleaved(cases, rounds=2, lasting=209)
    assert actual == {"a": [6.0, 3.0, 2.0], "b": [1.0, 6.0, 3.0]}
    assert order == ["a", "b", "b", "a"] * 2
    assert common.ratio(actual["a"], actual["b"]) == "0.67"
    cases = {"a": case("a", [99, 1, 2, 3]), "b": case("b", [99, 6, 1, 2])}
    actual = common.interleaved(cases, rounds=3)
    assert common.medians(actual) == {"a": 3.0, "b": 3.0}


def test_settings_are_chosen_by_warm_rounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is not counted, and cases that are far slower are dropped."""
    import common

    clock, calls = [0.0], {"slow at first": 0, "slow": 0, "fast": 0}
    monkeypatch.setattr(common.time, "perf_counter", lambda: clock[0])

    def case(name: str, first: float, later: float) -> Callable[[], float]:
        def run() -> float:
            clock[0] += later if calls[name] else first
            calls[name] += 1
            return 1.0

        return run

    settings = {"slow at first": (99, 1.0), "slow": (0.1, 3.0), "fast": (2.0, 1.1)}
    cases = [case(name, *times) for name, times in settings.items()]
    assert common.fastest(cases, least=0.0) == 0
    assert calls == {"slow at first": 7, "slow": 3, "fast": 7}
    assert common.fastest(cases[1:2], least=0.0) == 0, "there is nothing to choose from"
    assert calls["slow"] == 3


def test_preparation(bench: Bench) -> None:
    _, data = bench("preparation", "--parts", "kill")
    assert "pairs" not in data
    killed = data["killed"]
    page, data = bench("preparation", "--parts", "pairs", "texts")
    assert data["killed"] == killed, "the former result"
    for name in ("pairs", "pairs, tokenizer given", "texts"):
        assert data[name]["equal"]
        assert data[name]["workers"]["2"]["peak MiB"] > 100
        assert data[name]["training peak MiB"] > 100
        assert data[name]["command"].endswith("--parts pairs texts")
    assert killed["equal"]
    assert killed["command"].endswith("--parts kill")
    assert killed["command"] in page
    assert "equal, byte for byte" in page


def test_bulk(bench: Bench) -> None:
    page, data = bench("bulk")
    assert data["rates"]["sentences"] == data["kills"]["sentences"] == 300
    assert data["kills"]["equal"]
    assert len(data["kills"]["after"]) == 2
    assert data["kills"]["ray"] in (True, None)
    assert "Ratio: " in page
    assert "equal, byte for byte" in page


def test_serving(bench: Bench) -> None:
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    page, data = bench("serving")
    assert set(data["models"]) == {"translator", "gpt2"}
    for name, model in data["models"].items():
        assert (model["load"]["lost"], model["load"]["statuses"].keys()) == (0, {"200"})
        assert set(model["burst"]) <= {"200", "429"}
        assert sum(model["burst"].values()) == 700
        assert (model["killed"] is None) == (name == "translator")
        assert model["rates"]["ratio"] == pytest.approx(
            model["rates"]["capacity"] / model["rates"]["offline"]
        )
    assert "Its slot was free after" in page


def test_short_requests_beside_a_long_one(bench: Bench) -> None:
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    page, data = bench("beside_long")
    alone, beside = data["short"]["alone"], data["short"]["beside a long one"]
    for values in (alone, beside):
        assert values["requests"] > 0
        assert 0 < values["p50 ms"] <= values["p99 ms"] <= values["longest ms"]
    assert data["ratio of p99"] == beside["p99 ms"] / alone["p99 ms"]
    assert f"| alone | {alone['requests']} | {alone['p50 ms']:.0f} | " in page
    assert data["long answers"] > 0


def test_synthetic(bench: Bench, tmp_path: Path) -> None:
    page, data = bench("synthetic", "--runs", str(tmp_path / "runs"))
    assert set(data["runs"]) == {"copy", "reverse", "sort", "copy-varied"}
    copied = data["runs"]["copy"]
    assert copied["num_test"] == 20
    assert copied["exact_match"] == copied["num_equal"] / 20
    assert copied["first_epoch_at_threshold"] is None
    assert "| never |" in page
    assert "training.max_steps" in page, "a changed recipe is told"


WORDS = {
    "en": "the dog runs to a red house",
    "de": "der Hund läuft zum Haus",
    "zh": "狗跑向房子",
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder as that of Multi30k, with a few sentences in it."""
    folder = tmp_path / "text"
    folder.mkdir()
    for file, count in (("train", 40), ("val", 6), ("test_2016_flickr", 5)):
        for language, words in WORDS.items():
            # Texts that are also held out would be dropped from the training text.
            lines = [f"{words} {file} {number}\n" for number in range(count)]
            # Files are recognized by content, not by name, so plain text is enough.
            (folder / f"{file}.{language}.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return folder


def test_an_ablation_keeps_the_records_of_earlier_days(
    bench: Bench, tmp_path: Path, text: Path
) -> None:
    runs = tmp_path / "runs"
    words = ["multi30k", "--data", str(text), "--runs", str(runs)]
    page = {"page": "multi30k_ablation"}
    first = ["5000-pairs", "short-warm-up", "backward-short-warm-up"]
    bench("ablation", *words, "--rows", *first, **page)
    then = ["5000-pairs-muon", *first, "one-each-way", "one-each-way-r-drop"]
    written, data = bench("ablation", *words, "--rows", *then, "--seed", "2", **page)
    records = {(record["row"], record["seed"]): record for record in data["records"]}
    assert list(records) == [*((row, 1) for row in first), *((row, 2) for row in then)]
    for record in records.values():
        assert record["valid"] == max(record["valid_by_search"].values())
        assert 0 < record["processor_minutes"] < 10
        assert [entry["step"] for entry in record["validation"]] == [2, 4]
    assert "\n| 2 | – | – | 0 |" in written  # no run of the sequence came to a threshold
    # A test needs the outputs of the row that a row starts from, in the same direction.
    tested = {key: record["significance"]["baseline"] for key, record in records.items()}
    assert tested["5000-pairs-muon", 2] is None, "its base was trained after it"
    assert tested["backward-short-warm-up", 2] is None, "its base translates the other way"
    assert tested["one-each-way-r-drop", 2] == "one-each-way"
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| 5000-pairs")]
    assert [row[2] for row in rows] == ["1, 2", "2"]


def test_rows_of_an_ablation_learn_from_ensembles(bench: Bench, tmp_path: Path, text: Path) -> None:
    runs = tmp_path / "runs"
    words = ["multi30k", "--data", str(text), "--runs", str(runs)]
    page = {"page": "multi30k_ablation"}
    teachers = ["short-warm-up", "backward-short-warm-up"]
    bench("ablation", *words, "--rows", *teachers, "right-to-left", **page)
    for row, seed in product(teachers, "23"):
        shutil.copytree(runs / f"{row}-1", runs / f"{row}-{seed}")
    bench("ablation", *words, "--rows", "ensemble-student", **page)
    for seed in "23":
        shutil.copytree(runs / "ensemble-student-1", runs / f"ensemble-student-{seed}")
    _, data = bench("ablation", *words, "--rows", "second-ensemble-student", **page)
    records = {record["row"]: record for record in data["records"]}
    # Its test text is reversed, so that it cannot be tested against another row.
    assert records["right-to-left"]["significance"]["baseline"] is None
    assert records["ensemble-student"]["significance"]["baseline"] == "short-warm-up"
    first = str(text / "train.en.gz"), str(text / "train.de.gz")
    students = {"ensemble-student": "short-warm-up", "second-ensemble-student": "ensemble-student"}
    for row, teacher in students.items():
        train = load_recipe(runs / f"{row}-1").data.train
        assert (train.src[0], train.tgt[0]) == first
        made = {*train.src, *train.tgt} - {*first}
        assert {Path(path).name for path in made} == {
            f"{teacher}-1+{teacher}-2+{teacher}-3.txt",
            "right-to-left-1.txt",
            "backward-short-warm-up-1+backward-short-warm-up-2.txt",
        }
        assert train.src.count(first[0]) == 3
        assert train.tgt.count(first[1]) == 2
        assert all(len(Path(path).read_text().split("\n")) == 41 for path in made)
    reverse = (runs / "train.de.reversed").read_text().split("\n")
    assert reverse[0] == "0 train Haus zum läuft Hund der"


def test_an_ablation_of_the_first_pairs(bench: Bench, tmp_path: Path, text: Path) -> None:
    words = ["translation", "--data", str(text), "--runs", str(tmp_path / "runs")]
    page = {"page": "translation_ablation"}
    written, data = bench("ablation", *words, "--rows", "shipped", **page)
    [record] = data["records"]
    assert (record["row"], record["settings"]) == ("shipped", [])
    assert "\n| shipped | recipe | 1 |" in written
    again, data = bench("ablation", "translation", **page)  # from the records only
    assert again.split("## Command, versions")[0] == written.split("## Command, versions")[0]
    assert data["records"] == [record]


def test_back_translation(bench: Bench, tmp_path: Path, text: Path) -> None:
    words = ["--data", str(text), "--runs", str(tmp_path / "runs")]
    page, data = bench("back_translation", *words)
    assert [*data["scores"]] == [
        "half of the pairs",
        "and the other half, back-translated (sampling)",
        "all pairs",
    ]
    assert data["pairs"]["sampling"] > 0
    assert bench("back_translation", *words)[0] == page, "finished runs are read again"


def test_many_to_many(bench: Bench, tmp_path: Path, text: Path) -> None:
    (tmp_path / "zh").mkdir()
    for name in ("train", "val"):  # no test split
        for code in ("en", "zh"):
            shutil.copy(text / f"{name}.{code}.gz", tmp_path / "zh")
    words = ["--corpus", f"en-de={text}", f"en-zh={tmp_path / 'zh'}"]
    words += ["--runs", str(tmp_path / "runs"), "--steps", "4", "--joint-steps", "4", "8"]
    page, data = bench("many_to_many", *words)
    assert " --corpus en-de=FOLDER en-zh=FOLDER --runs RUNS " in data["command"]
    assert data["scores"].keys() == {"en-de", "de-en", "en-zh", "zh-en"}
    models = ["one model, 4 steps", "one model, 8 steps", "own models, 4 steps each"]
    for found in data["scores"].values():
        assert [*found] == models
    assert f"| direction | {' | '.join(models)} |" in page
    assert [line.split(",")[0] for line in page.splitlines() if "without pairs" in line] == [
        "<summary>de-zh",
        "<summary>zh-de",
    ]
    rows = [line for line in page.splitlines() if line.startswith("| der Hund läuft zum Haus test")]
    assert len(rows) == 5
    scores = json.loads((tmp_path / "runs" / "joint-8" / "scores.json").read_text())["scores"]
    for name, tokenizer in (("en-zh", "zh"), ("zh-en", "13a")):
        assert f"tok:{tokenizer}|" in scores[f"bleu/{name}"]["signature"]
    recipe = load_recipe(tmp_path / "runs" / "zh-en")
    corpus = recipe.data.corpora["zh-en"]
    assert str(corpus.test.src) == str(tmp_path / "zh" / "val.zh.gz")
    train, valid = (
        Path(str(files.src)).read_text().splitlines() for files in (corpus, corpus.valid)
    )
    lines = gzip.decompress((text / "train.zh.gz").read_bytes()).decode().splitlines()
    assert (train + valid, len(valid)) == (lines, 4), "the last pairs are held out"


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("en-de", "not of the form en-de=FOLDER: en-de"),
        ("en-en=x", "not of the form en-de=FOLDER: en-en=x"),
        ("en-de=nowhere", "nowhere/train.en.gz does not exist"),
    ],
)
def test_wrong_corpora_of_many_to_many_are_refused(
    bench: Bench, corpus: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench("many_to_many", "--corpus", corpus)
    assert message in capsys.readouterr().err


@pytest.fixture
def adaptation_data(tmp_path: Path) -> Path:
    """The folders of the experiment on LoRA, with a few sentences each."""
    data = tmp_path / "data"
    sentences = {"en": ["the dog runs", "a man sleeps"], "de": ["der Hund läuft", "ein Mann"]}
    files = [("multi30k", "test_2016_flickr", 4)]
    files += [(name, split, n) for name in ("multi30k", "tatoeba") for split, n in SIZES]
    for folder, split, count in files:
        (data / folder).mkdir(parents=True, exist_ok=True)
        for code, (with_animal, without) in sentences.items():
            lines = [f"{without if i % 2 else with_animal} {split} {i}\n" for i in range(count)]
            path = data / folder / f"{split}.{code}.gz"
            path.write_bytes(gzip.compress("".join(lines).encode()))
    (data / "sst2").mkdir()
    for split, count in (("train", 40), ("dev", 6)):
        rows = [f"a {'good' if i % 2 else 'bad'} film {split} {i}\t{i % 2}\n" for i in range(count)]
        (data / "sst2" / f"{split}.tsv").write_text("".join(rows))
    return data


SIZES = [("train", 60), ("val", 6)]


def test_lora(bench: Bench, tmp_path: Path, adaptation_data: Path) -> None:
    words = ["--data", str(adaptation_data), "--runs", str(tmp_path / "runs")]
    page, data = bench("lora", *words)
    assert [*data["families"]] == ["encoder-decoder", "decoder", "encoder"]
    assert "that do. Scores: pairs of val and test_2016_flickr, 5 with animals" in page
    for name, record in data["families"].items():
        assert record["base_unchanged"]
        reference, full, lora = record["rows"].values()
        assert reference.keys() <= full.keys() == lora.keys()
        assert full["trained"] >= 0.95 * full["parameters"]
        assert lora["rate"] in map(float, lora["validation"])
        runs = tmp_path / "runs" / name
        tensors = load_file(runs / f"LoRA-{lora['rate']}" / "model.safetensors")
        assert lora["trained"] == sum(tensor.numel() for tensor in tensors.values())
        assert any("lora_a" in tensor for tensor in tensors)
        assert f"{lora['trained']:,}" in page
    texts = tmp_path / "runs" / "encoder-decoder" / "texts"
    for split, animals in (("train", 30), ("test", 5)):
        lines = (texts / f"{split}-animals.src").read_text().splitlines()
        assert len(lines) == animals
        assert all("dog" in line for line in lines)
    lines = (texts / "train-others.tgt").read_text().splitlines()
    assert len(lines) == 30
    assert all("Mann" in line for line in lines)
    assert bench("lora", *words)[0] == page, "finished runs are read again"


def test_rows_of_an_experiment_inherit_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from ablation import Experiment  # type: ignore[import-not-found]

    for path in sorted(EXPERIMENTS.glob("*.yaml")):
        experiment = Experiment(path)
        for row, content in experiment.rows.items():
            settings = experiment.settings(row)
            own = dict(setting.split("=", 1) for setting in content.get("set", []))
            assert own.items() <= settings.items(), "a row's own settings win"
            inherited = {key: value for key, value in settings.items() if key not in own}
            for key, value in inherited.items():
                assert value in [
                    experiment.settings(base).get(key) for base in experiment.bases(row)
                ]
            command = {"data": "DATA", "runs": "RUNS", "seed": 1, "other": 2}
            load_recipe(
                experiment.recipe,
                read_settings(f"{key}={v.format(**command)}" for key, v in settings.items()),
            )


def test_significance_tells_systems_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from significance import significance  # type: ignore[import-not-found]

    references = [f"the dog number {number} runs over the green field" for number in range(60)]
    red = [line.replace("green", "red") for line in references]
    odd = [red[i] if i % 2 else line for i, line in enumerate(references)]
    even = [line if i % 2 else red[i] for i, line in enumerate(references)]
    actual = significance({"worse": odd, "alike": even, "right": references}, references, "en")
    for by_system in actual.values():
        assert by_system["worse"]["p_value"] is None
        assert by_system["right"]["score"] == pytest.approx(100)
        assert by_system["right"]["p_value"] < 0.01 < 0.1 < by_system["alike"]["p_value"]
        assert by_system["right"]["interval"] == pytest.approx(0)
        assert by_system["worse"]["interval"] > 0


@pytest.mark.parametrize(("name", "target"), [("multi30k", "de"), ("tatoeba", "zh")])
def test_translation(bench: Bench, tmp_path: Path, text: Path, name: str, target: str) -> None:
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
    assert WORDS[target] not in page, "no sentence of the data is in the results"
    # A finished run is not trained again, and needs no text.
    again, _ = bench(name, "--run", run)
    assert again.split("## Command, versions")[0] == page.split("## Command, versions")[0]


def test_localization(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "data" / "de"
    data.mkdir(parents=True)
    pairs = [(f"Page {n} of %s", f"Seite {n} von %s") for n in range(30)]
    units = "".join(
        f'<tu><tuv xml:lang="en"><seg>{src}</seg></tuv>'
        f'<tuv xml:lang="de"><seg>{tgt}</seg></tuv></tu>'
        for src, tgt in pairs
    )
    memory = f'<tmx version="1.4"><header srclang="en"/><body>{units}</body></tmx>'
    (data / "train.tmx.gz").write_bytes(gzip.compress(memory.encode()))
    lines = "".join(f"{src} <b>\t{tgt} <b>\n" for src, tgt in pairs[:4]).encode()
    for name in ("valid.tsv.gz", "test.help.tsv.gz"):
        (data / name).write_bytes(gzip.compress(lines))
    entries = (("Page 3", "Seite 3"), ("Open the page.", "Seite öffnen."))
    catalogue = "".join(f'msgid "{src}"\nmsgstr "{tgt}"\n\n' for src, tgt in entries)
    (data / "test.po").write_text(catalogue, encoding="utf-8")
    runs = tmp_path / "runs"
    page, content = bench("localization", "--data", str(data.parent), "--runs", str(runs),
                          "--languages", "de", "--backends", "eager", "ctranslate2",
                          "--longer", "6")  # fmt: skip
    rates = content["languages"]["de"]["sentences per second by round"]
    kinds = ("eager", "ctranslate2"), ("greedy", "beam of 5"), ("with", "without")
    assert rates.keys() == {f"{name}, {search} {how}" for name, search, how in product(*kinds)}
    for test, count in (("messages", 1), ("paragraphs of help", 4)):
        systems = content["languages"]["de"]["tests"][test]
        assert systems["localization"]["kept"]["all"] == [count, count]
        assert systems["human translation"]["kept"]["numbers"] == [count, count]
        assert {"translation", "nearest source of the memory"} < systems.keys()
    assert "| localization |" in page
    assert "| localization, 6 steps |" in page
    notes = content["languages"]["de"]["notes"]
    assert "; 4 steps," in notes["Recipe `localization`"]
    assert "; 6 steps," in notes["localization, 6 steps"]
    run = str(runs / "localization-de")
    page, content = bench("noise", "--data", str(data.parent), "--run", run,
                          "--runs", str(tmp_path / "further"))  # fmt: skip
    assert "training.noise.upper (0.0 -> 0.05)" in page
    assert len(content["scores"]) == 5


def test_students(bench: Bench, tmp_path: Path, text: Path) -> None:
    from runs import QUICK, finished_run  # type: ignore[import-not-found]

    files = {"train": "train", "valid": "val"}
    settings = [
        f"data.{split}.{side}={text / file}.{language}.gz"
        for split, file in files.items()
        for side, language in (("src", "en"), ("tgt", "de"))
    ]
    teacher = finished_run("translation", tmp_path / "teacher", [*settings, *QUICK]).directory
    settings += [item for item in QUICK if not item.startswith("tokenizer.")]
    # A model after a few steps finishes no output, so that a student would have no data.
    learning = [*settings, f"distillation.teacher={teacher}", "distillation.level=word"]
    learning += ["distillation.include_references=false"]
    student = finished_run("translation-student", tmp_path / "student", learning).directory
    before = {path: path.read_bytes() for path in sorted(student.iterdir()) if path.is_file()}
    words = ["--data", str(text), "--teacher", str(teacher), "--student", str(student)]
    page, data = bench("students", *words, "--limit", "4")
    command = "--data DATA --teacher TEACHER --student STUDENT --limit 4"
    assert data["command"] == f"python benchmarks/students.py --quick {command}"
    assert data["sentences"] == 4
    names = ["teacher, beam 5", "teacher, greedy", "student, greedy", "student, greedy, shortlist"]
    assert [*data["systems"]] == [*names, "student, beam 2, shortlist"]
    assert all(item["sentences/s"] > 0 for item in data["systems"].values())
    assert [*data["files"]] == names[:3:2]
    assert 0 < data["systems"][names[3]]["shortlist"]["recall"] <= 1
    assert [*data["precisions"]] == ["int8", "float32, the net itself", "float32"]
    assert "\n| shortlist | " in page
    assert "\n| distillation | " not in page, "there is no run without"
    assert "training.max_steps (6000 -> 4)" in data["trained"]["student"]
    assert str(tmp_path) not in page
    after = {path: path.read_bytes() for path in sorted(student.iterdir()) if path.is_file()}
    assert before == after
    assert not (student / "backends").exists()


@pytest.fixture
def short_rhyme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Reduce the shipped recipes to `rhyme` with four steps; returns its file."""
    recipe = tmp_path / "recipes" / "rhyme.yaml"
    recipe.parent.mkdir()
    (recipe.parent / "rhyme.txt").write_bytes((RECIPES / "rhyme.txt").read_bytes())
    changes = ["training.max_steps=4", "training.evaluate_every=2", "objective.sample_tokens=5"]
    recipe.write_text(load_recipe("rhyme", read_settings(changes)).to_yaml(), encoding="utf-8")
    monkeypatch.setattr("heedful.recipe_files.RECIPES", recipe.parent)
    return recipe


def expecting(recipe: Path, *bands: tuple[int, float, float]) -> None:
    """Put bands (step, low, high) into a recipe."""
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    content["expect"] = [{"step": step, "low": low, "high": high} for step, low, high in bands]
    recipe.write_text(yaml.safe_dump(content), encoding="utf-8")


def test_bands(bench: Bench, tmp_path: Path, short_rhyme: Path) -> None:
    expecting(short_rhyme, (2, 0.0, 50.0))
    runs = str(tmp_path / "runs")
    page, data = bench("bands", "--runs", runs)
    (actual,) = data["bands"]
    assert actual["recipe"] == "rhyme"
    assert actual["verdict"] == "within"
    assert f"| rhyme | 2 | 0 to 50 | {actual['loss']:.3f} | within |" in page
    log = (tmp_path / "runs/rhyme/log.jsonl").read_text(encoding="utf-8")
    assert '"step": 3' not in log, "a run ends at its last band"
    # A later band resumes the run; a loss outside is an error after the page is written.
    expecting(short_rhyme, (2, 0.0, 50.0), (4, 40.0, 50.0))
    with pytest.raises(SystemExit, match="rhyme, step 4: OUTSIDE"):
        bench("bands", "--runs", runs)
    again = json.loads((tmp_path / "results/bands.json").read_text(encoding="utf-8"))["bands"]
    assert [band["verdict"] for band in again] == ["within", "OUTSIDE"]
    assert again[0]["loss"] == actual["loss"]
    page, data = bench("bands", "--runs", runs, "--only", "dates")
    assert data["bands"] == again, "what is not run again stays"
    assert "| rhyme | 4 |" in page


def test_bands_leave_out_what_has_no_data(bench: Bench, tmp_path: Path, short_rhyme: Path) -> None:
    expecting(short_rhyme, (2, 0.0, 50.0))
    text = short_rhyme.read_text(encoding="utf-8").replace("shipped:rhyme.txt", "absent/a.txt")
    short_rhyme.write_text(text, encoding="utf-8")
    _, data = bench("bands", "--data", str(tmp_path), "--runs", str(tmp_path / "runs"))
    assert [(band["loss"], band["verdict"]) for band in data["bands"]] == [(None, "data absent")]
    assert not (tmp_path / "runs").exists()


def test_shakespeare(bench: Bench, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    lines = [f"Speaker {number % 7}:\nWords of number {number}.\n" for number in range(100)]
    (text / "input.txt").write_text("\n".join(lines), encoding="utf-8")
    runs = tmp_path / "runs"
    folders = ("--data", str(text), "--runs", str(runs))
    page, data = bench("shakespeare", *folders, "--seeds", "2")
    actual = data["runs"]
    assert set(actual) == {"shakespeare", "shakespeare-llama", "peer"}
    size = len((text / "input.txt").read_text(encoding="utf-8"))
    for name, windows in (("shakespeare", 12), ("shakespeare-llama", 6)):
        # The runs' own scores, which they have of the same windows.
        paths = [runs / folder / "scores.json" for folder in (name, f"{name}-2")]
        scores = [json.loads(path.read_text(encoding="utf-8"))["scores"]["loss"] for path in paths]
        assert actual[name]["losses"] == pytest.approx(scores, rel=1e-5)
        assert scores[0] != scores[1]
        assert actual[name]["overlapping"] != actual[name]["losses"]
        assert actual[name]["test_characters"] == size // 10
        assert actual[name]["training_tokens"] == 4 * windows * 64
        assert f"## {name}: a sample" in page
    for one in actual.values():
        # Estimates are of the same text, by windows at random places.
        assert np.mean(one["estimates"]) == pytest.approx(np.mean(one["losses"]), rel=0.05)
        assert len(one["losses"]) == 2
    assert "| the same in transformers' GPT-2" in page
    command = "python benchmarks/shakespeare.py --quick --data DATA --runs RUNS --seeds 2"
    assert data["command"] == command


def test_long_texts(bench: Bench, tmp_path: Path) -> None:
    page, data = bench("long_texts")
    assert data["layers"].keys() == {"window", "full", "fused"}
    for of in data["layers"].values():
        assert of.keys() == {"64", "128"}
        assert all(actual["seconds"] > 0 for actual in of.values())
    assert set(data["decoding"]) == {"32", "64"}
    assert "(long_texts.svg)" in page
    picture = ElementTree.parse(tmp_path / "results/long_texts.svg").getroot()
    assert len(picture.findall("{*}circle")) == 2 * 6  # measures, lengths of the three kinds


def test_the_memory_of_a_layer_does_not_depend_on_that_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_texts  # type: ignore[import-not-found]

    small = long_texts.memory_of_process("full", 4096)
    large = b"\1" * (1 << 30)  # more than torch and the layer take
    again = long_texts.memory_of_process("full", 4096)
    assert len(large) == 1 << 30
    assert min(small, again) > 10 << 20
    assert abs(small - again) < small / 2


def test_long_texts_compare_the_window_with_the_fastest_full_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_texts  # type: ignore[import-not-found]

    def measured(seconds: list[float]) -> dict[str, object]:
        return {"seconds": sorted(seconds)[1], "seconds_by_round": seconds}

    layers = {
        "window": {"8": measured([2.0, 2.0, 2.0]), "1024": measured([2.0, 4.0, 2.0])},
        "full": {"8": measured([9.0, 9.0, 9.0]), "1024": measured([8.0, 8.0, 8.0])},
        "fused": {"8": measured([1.0, 1.0, 3.0]), "1024": measured([4.0, 6.0, 5.0])},
    }
    ratios = long_texts.window_ratios(layers)
    assert ratios == {"8": 0.5, "1024": 2.0}
    sentence = long_texts.verdict(ratios)
    assert "slower at 8 (0.50) and as fast or faster at 1,024 (2.00) tokens" in sentence


def test_sst2(bench: Bench, tmp_path: Path) -> None:
    folder, runs = tmp_path / "text", tmp_path / "runs"
    folder.mkdir()
    films = ["film", "story", "plot", "cast", "scene"]
    words_of = {"good": ["fine", "warm", "funny"], "bad": ["dull", "cold", "silly"]}
    lines = [
        f"the {film} {number} is {word}\t{label}\n"
        for label, words in words_of.items()
        for word in words
        for film in films
        for number in range(3)
    ]
    (folder / "train.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "dev.tsv").write_text("".join(lines[::4]), encoding="utf-8")
    arguments = ["--data", str(folder), "--runs", str(runs), "--seeds", "1"]
    page, data = bench("sst2", *arguments)
    assert {kind: len(actual) for kind, actual in data["models"]["accuracy"].items()} == {
        "scratch": 1,
        "pretrained": 1,
        "student": 1,
    }
    assert data["tfidf"]["accuracy"] == 1.0, "the words alone determine the label"
    assert set(data["models"]["sentences_per_second"]) == {"teacher", "student"}
    assert "scikit-learn" in data["versions"]
    assert "| TF-IDF of n-grams, logistic regression | 100.00 |" in page
    again, data = bench("sst2", *arguments, "--baseline-only")
    assert again.split("## Command, versions")[0] == page.split("## Command, versions")[0]
    sizes = {
        name: json.loads((runs / name / "config.json").read_text(encoding="utf-8"))["model"]
        for name in ("masked-lm", "pretrained-1", "student-1")
    }
    assert [size["num_layers"] for size in sizes.values()] == [4, 4, 2]
    assert len({size["d_model"] for size in sizes.values()}) == 1


def test_sst2_evaluates_each_classifier_once_and_at_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without --quick: nothing is selected on dev, and a model fits the one that it starts from."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    request: list[tuple[str, list[str]]] = []

    def stop(name: str, directory: Path, settings: list[str]) -> SimpleNamespace:
        request.append((name, settings))
        if name == "classification-student":
            raise InterruptedError
        return SimpleNamespace(directory=directory)

    import runs

    monkeypatch.setattr(runs, "finished_run", stop)
    monkeypatch.setattr("sys.argv", ["sst2.py", "--data", "DATA"])
    with pytest.raises(InterruptedError):
        runpy.run_path(str(BENCHMARKS / "sst2.py"), run_name="__main__")
    recipes = [load_recipe(name, read_settings(settings)) for name, settings in request]
    assert [recipe.task for recipe in recipes] == [*["masked_lm"] * 2, *["classification"] * 3]
    for recipe in recipes[2:]:
        assert recipe.training.evaluate_every == recipe.training.max_steps
    for recipe, layers in zip(recipes, [4, 4, 4, 4, 2], strict=True):
        # What starts from another model has its sizes.
        begins = recipe.init_from or recipe.distillation.copy_layers
        assert recipe.model.get("size") == (None if begins else "tiny")
        assert recipe.model.get("num_layers") == (None if recipe.init_from else layers)


def test_race_of_a_stub_and_heedful(bench: Bench, tmp_path: Path, text: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "multi30k").symlink_to(text)
    runs = tmp_path / "race"
    words = ["--data", str(tmp_path / "data"), "--runs", str(runs), "--tasks", "multi30k"]
    words += ["--points", "3", "--threads", "1"]
    bench("race", *words, "--minutes", "0.1", "--systems", "stub", "--note", "A quiet core.")
    note = ["--note", "A busy core."]
    page, data = bench("race", *words, "--minutes", "5", "--systems", "heedful", *note)
    assert [*data["notes"].values()] == ["A quiet core.", "A busy core."]
    assert data["command"].startswith("python benchmarks/race.py --quick --data DATA --runs RUNS")
    short, long = (data["races"][f"multi30k-{name}min-1threads"] for name in ("0.1", "5"))
    (stub,), (heedful,) = short, long
    assert (stub["error"], heedful["error"]) == ("", "")
    assert stub["seconds"] == 6
    assert 0 < len(stub["scores"]) <= 3
    assert stub["model"] == max(stub["snapshots"])
    assert stub["tokens_per_second"] == 1000
    assert heedful["steps"] == 4
    assert "--steps 4 --minutes " in heedful["command_lines"][1]
    assert heedful["model"] in heedful["scores"]
    assert heedful["sentences_per_second"] > 0
    assert "| heedful |" in page
    assert ElementTree.parse(tmp_path / "results" / "race.svg").getroot().tag.endswith("svg")
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*.json")}
    bench("race", *words, "--minutes", "0.1", "--systems", "stub")
    after = {path: path.stat().st_mtime_ns for path in runs.rglob("*.json")}
    assert before == after, "a system that has finished is not repeated"


def test_race_of_stubs_in_every_kind_of_task(bench: Bench, tmp_path: Path) -> None:
    folders = [tmp_path / "data" / name for name in ("tinyshakespeare", "sst2")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "input.txt").write_text("To be, or not to be.\n" * 100, encoding="utf-8")
    lines = "".join(f"film {number}\t{number % 2}\n" for number in range(30))
    for name in ("train", "dev"):
        (folders[1] / f"{name}.tsv").write_text(lines, encoding="utf-8")
    words = ["--data", str(tmp_path / "data"), "--runs", str(tmp_path / "race")]
    words += ["--tasks", "shakespeare,sst2", "--systems", "stub", "--points", "1"]
    page, data = bench("race", *words, "--minutes", "0.02")
    (plays,), (reviews,) = data["races"].values()
    assert plays["scores"][plays["model"]]["loss"] == pytest.approx(np.log(65), abs=1e-3)
    assert reviews["scores"][reviews["model"]]["accuracy"] == 50
    assert "| stub | 4.174 |" in page
    assert "| stub | 50.0 |" in page
    corpus = tmp_path / "race" / "data" / "sst2"
    kept = [(corpus / f"{name}.tsv").read_text().splitlines() for name in ("train", "valid")]
    assert [len(part) for part in kept] == [27, 3], "every fourteenth line is for validation"
