"""Bulk inference: results of each task, rows with errors, kills and resumption, refusals."""

import gzip
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from commands import Commands, tree
from encoder_runs import Stop
from heedful import pipelines
from heedful.bulk import folder as bulk_folder
from heedful.bulk.folder import LOG, MANIFEST, JobFolder, read_results
from heedful.bulk.formats import encode
from heedful.bulk.job import BulkJob, choose_workers, run_job, run_locally
from heedful.bulk.model_files import model_hashes
from heedful.bulk.shards import ShardReader
from heedful.bulk.tasks import Translate
from heedful.bulk.worker import ShardResult, Worker
from heedful.errors import UserError
from heedful.pipelines import SavedModel, load
from hostile_world import WORDS, make_net

LONG = "the cat sat on the mat " * 20
LOADING = {"device": "cpu", "backend": "eager", "threads": 1, "use": "throughput"}
run_alone = partial(run_locally, num_workers=1)
Job = BulkJob


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    for name in ("own", "lm", "mlm", "classes"):
        make_net(folder, name)
    lines = [" ".join(random.Random(n).choices(" ".join(WORDS).split(), k=4)) for n in range(30)]
    (folder / "lines.txt").write_text("\n".join(lines) + "\n")
    return folder


def job_of(world: Path, out: Path, model: str = "own", task: str = "translate", **more: Any) -> Job:
    settings: dict[str, Any] = {"inputs": [world / "lines.txt"], "shard_rows": 8, **more}
    settings["options"] = {"max_new_tokens": 6} if task in ("translate", "generate") else {}
    settings["options"] |= more.get("options", {})
    return BulkJob(world / model, task, output=out, load_settings=LOADING, **settings)


def run(job: BulkJob, map_shards: Any = run_alone) -> list[str]:
    printed: list[str] = []
    run_job(job, map_shards, printed.append)
    return printed


def records(out: Path) -> list[dict[str, Any]]:
    return [*read_results(out)]


def texts_of(world: Path) -> list[str]:
    return (world / "lines.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(job_of(world, out))
    return out


def values(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_each_task_has_the_results_of_its_pipeline(
    world: Path, whole: Path, tmp_path: Path
) -> None:
    texts = texts_of(world)
    rows = records(whole)
    assert [(row["file"], row["line"], row["text"]) for row in rows] == [
        (str(world / "lines.txt"), line, text) for line, text in enumerate(texts, 1)
    ]
    expected = [
        load(world / "own", backend="eager").generate(text, return_details=True, max_new_tokens=6)
        for text in texts
    ]
    assert values(rows, "output") == [best.text for best, *_ in expected]
    assert values(rows, "finished") == [best.finished for best, *_ in expected]
    assert values(rows, "failure") == [best.failure for best, *_ in expected]

    options = {"num_return": 2, "scores": True, "temperature": 1.0, "seed": 5}
    run(job_of(world, tmp_path / "lm", "lm", "generate", options=options, shard_rows=7))
    lm = load(world / "lm", backend="eager")
    [*sampled] = lm.iterate_generations([texts], max_new_tokens=6, **options)
    for row, outputs in zip(records(tmp_path / "lm"), sampled, strict=True):
        assert [output["output"] for output in row["outputs"]] == [o.text for o in outputs]
        assert row["log_prob"] == pytest.approx(outputs[0].log_prob, abs=1e-4)
        scores = [output["score"] for output in row["outputs"]]
        assert scores == pytest.approx([o.score for o in outputs], abs=1e-4)
        assert row["score"] == scores[0]

    run(job_of(world, tmp_path / "score", "lm", "score"))
    for row, text in zip(records(tmp_path / "score"), texts, strict=True):
        [score] = lm.score([text])
        assert row["log_prob"] == pytest.approx(score.log_prob, abs=1e-4)
        assert row["num_tokens"] == score.num_tokens
        mean = score.log_prob / score.num_tokens
        assert row["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
        first = lm.tokenizer.decode(lm.prompt_ids([text])[0][:1])  # not predicted; "": unknown
        bits = -score.log_prob / math.log(2) / len(text[len(first) or 1 :])
        assert row["bits_per_character"] == pytest.approx(bits, rel=1e-4)

    run(job_of(world, tmp_path / "embed", "mlm", "embed", options={"pooling": "first"}))
    vectors = load(world / "mlm", backend="eager").vectors(texts, pooling="first")
    for row, vector in zip(records(tmp_path / "embed"), vectors.tolist(), strict=True):
        assert row["vector"] == pytest.approx(vector, abs=1e-5)

    run(job_of(world, tmp_path / "classify", "classes", "classify"))
    labels = load(world / "classes", backend="eager").classify(texts)
    for row, label in zip(records(tmp_path / "classify"), labels, strict=True):
        assert row["label"] == label.label
        assert row["scores"] == pytest.approx(label.probabilities, abs=1e-5)


def test_pairs_masks_and_the_formats_of_output(world: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv.gz"
    rows = [(source, target) for source in WORDS for target in WORDS]
    pairs.write_bytes(gzip.compress("".join(f"{s}\t{t}\n" for s, t in rows).encode()))
    job = job_of(world, tmp_path / "pairs", task="score", pairs=True, inputs=[pairs])
    run(replace(job, format="parquet"))
    table = parquet.read_table(tmp_path / "pairs" / "part-000000.parquet").to_pylist()
    translator = load(world / "own", backend="eager")
    for row, (source, target) in zip(table, rows[:8], strict=True):
        [score] = translator.score([source], [target])
        assert (row["src"], row["tgt"], row["error"]) == (source, target, None)
        assert row["log_prob"] == pytest.approx(score.log_prob, abs=1e-4)

    named = tmp_path / "named.parquet"
    parquet.write_table(pa.table({"a": WORDS, "b": [None, *WORDS[1:]], "n": [1, 2, 3]}), named)
    job = job_of(world, tmp_path / "c", "classes", "classify", pairs=True, inputs=[named])
    run(replace(job, fields=("a", "b"), format="text"))
    labels = load(world / "classes", backend="eager").classify(WORDS[1:], pairs=WORDS[1:])
    expected = ["", *(label.label for label in labels)]
    assert (tmp_path / "c" / "part-000000.txt").read_text().split("\n") == [*expected, ""]

    masked = tmp_path / "masked.jsonl"
    texts = ["the <mask> sat", "no mask at all", "[MASK] and <mask>"]
    masked.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"candidates": 2}
    run(job_of(world, tmp_path / "m", "mlm", "fill", inputs=[masked], options=options))
    first, second, third = records(tmp_path / "m")
    filler = load(world / "mlm", backend="eager")
    [[best, other]] = filler.fill(texts[0], top_k=2)
    assert first["masks"][0][0] == pytest.approx(vars(best), abs=1e-6)
    assert first["masks"][0][1]["token"] == other.token
    assert "no <mask>" in second["error"]
    assert len(third["masks"]) == 2
    parquet_job = job_of(world, tmp_path / "mp", "mlm", "fill", inputs=[masked], options=options)
    run(replace(parquet_job, format="parquet"))
    read = parquet.read_table(tmp_path / "mp" / "part-000000.parquet").to_pylist()
    assert read[2]["masks"] == third["masks"]
    assert read[1] == {**dict.fromkeys(read[1]), **second}


def known_values(row: Any) -> Any:
    """A row without the values that are null, which JSON may leave out and a table has."""
    if isinstance(row, dict):
        return {name: known_values(value) for name, value in row.items() if value is not None}
    return [known_values(value) for value in row] if isinstance(row, list) else row


@pytest.mark.parametrize(
    ("model", "task", "options"),
    [
        ("own", "translate", {"beam_size": 2, "num_return": 2, "scores": True, "truncate": True}),
        ("own", "translate", {"glossary": "terms.tsv"}),
        ("lm", "generate", {"beam_size": 2, "num_return": 2, "truncate": True}),
        ("lm", "score", {}),
        ("mlm", "embed", {"pooling": "mean", "truncate": True, "prompt": "a dog "}),
        ("classes", "classify", {}),
        ("multi_label", "classify", {}),
        ("regression", "classify", {}),
    ],
)
def test_a_table_has_the_rows_of_json(
    world: Path, tmp_path: Path, model: str, task: str, options: dict[str, Any]
) -> None:
    """With lists of outputs, reasons, classes and values; too long texts are cut."""
    texts = ["the cat sat", "", "hello world", LONG]
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n" for text in texts))
    (tmp_path / "terms.tsv").write_text(f"cat\t{WORDS[2]}\n")  # more tokens than the limit
    options = {key: str(tmp_path / v) if key == "glossary" else v for key, v in options.items()}
    if model in ("multi_label", "regression"):
        shutil.copytree(world / "classes", tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"problem": model}))
    job = job_of(world, tmp_path / "json", model, task, options=options)
    job = replace(job, inputs=[tmp_path / "lines.txt"])
    if (tmp_path / "model").exists():
        job = replace(job, model=tmp_path / "model")
    run(job)
    run(replace(job, output=tmp_path / "table", format="parquet"))
    rows = records(tmp_path / "json")
    table = parquet.read_table(tmp_path / "table" / "part-000000.parquet").to_pylist()
    assert known_values(table) == known_values(rows)
    errors = [number for number, row in enumerate(rows) if "error" in row]
    assert errors == ([1, 3] if "glossary" in options else [1])
    if "glossary" in options:
        opened = load(world / model, backend="eager")
        best, *_ = opened.generate(texts[0], return_details=True, max_new_tokens=6, **options)
        assert rows[0]["reasons"] == [*best.reasons] != []
    elif options.get("num_return"):
        assert {len(row["outputs"]) for row in rows if "error" not in row} == {2}
    elif task == "classify":
        expected = load(job.model, backend="eager").classify([texts[0], texts[2]])
        assert [row["label"] for row in rows if "error" not in row][:2] == [
            one.text for one in expected
        ]
        assert rows[2]["scores"] == pytest.approx(expected[1].scores, abs=1e-5)


def test_line_n_of_the_text_format_belongs_to_row_n() -> None:
    task: Any = Translate(None, {})
    rows = [{"output": "a\n b\u2028c"}, {"error": "empty"}, {"output": ""}]
    assert encode(rows, "text", task).decode() == "a  b c\n\n\n"


BAD_LINES: Mapping[bytes, str] = {
    b"not JSON": "is not JSON",
    b'{"text": 5}': "not a text",
    b'{"other": "x"}': "no key 'text'",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b'{"text": "\xff\xfe"}': "not UTF-8",
    b'["text"]': "not a JSON object",
    b'{"text": " \\t"}': "the text is empty",
    b"": "the text is empty",
    json.dumps({"text": LONG}).encode(): "tokens, but the model allows 24",
}


def test_a_row_that_cannot_be_used_is_one_with_an_error(world: Path, tmp_path: Path) -> None:
    good = [json.dumps({"text": text}).encode() for text in texts_of(world)]
    lines = [line for pair in zip(good, [*BAD_LINES] * 4, strict=False) for line in pair]
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    run(job_of(world, tmp_path / "out", inputs=[path], shard_rows=20))
    rows = records(tmp_path / "out")
    assert [row["line"] for row in rows] == [*range(1, len(lines) + 1)]
    translations = load(world / "own", backend="eager").translate(texts_of(world), max_new_tokens=6)
    for row, line in zip(rows, lines, strict=True):
        if line in BAD_LINES:
            assert BAD_LINES[line] in row["error"], line
            assert "output" not in row
        else:
            assert row["output"] == translations[good.index(line)]
    too_long = [row for row in rows if row.get("text") == LONG]
    assert too_long
    assert all(f"line {row['line']} " in row["error"] for row in too_long)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["errors"] == len(lines) - len(good)


def test_a_row_that_makes_a_model_fail_is_found(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, bad = Translate.results, {texts_of(world)[11]}

    def fail(self: Any, rows: Any, *arguments: Any) -> Any:
        if bad & {text for text, *_ in rows} or "*" in bad:
            raise RuntimeError("broken kernel")
        return original(self, rows, *arguments)

    monkeypatch.setattr(Translate, "results", fail)
    run(job_of(world, tmp_path / "out"))
    expected = records(whole)
    kept = {name: expected[11][name] for name in ("file", "line", "text")}
    expected[11] = {**kept, "error": "RuntimeError: broken kernel"}
    assert records(tmp_path / "out") == expected
    bad.add("*")  # every row fails: the cause is no row
    with pytest.raises(RuntimeError, match="broken kernel"):
        run(job_of(world, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_an_output_that_is_not_finite_is_an_error(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SavedModel.vectors

    def broken(self: Any, texts: Any, **options: Any) -> Any:
        vectors = original(self, texts, **options)
        vectors[1, 0] = math.nan
        return vectors

    monkeypatch.setattr(SavedModel, "vectors", broken)
    run(job_of(world, tmp_path / "out", "mlm", "embed", shard_rows=16))
    errors = [row["line"] for row in records(tmp_path / "out") if "error" in row]
    assert errors == [2, 18]


@pytest.mark.parametrize("moment", ["before the file", "before the entry", "after the entry"])
def test_killed_and_resumed_is_equal_to_an_uninterrupted_job(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    out, original = tmp_path / "out", JobFolder.add
    processed: list[int] = []

    def counted(worker: Any, reader: ShardReader, done: Collection[int]) -> Iterator[Any]:
        for result in run_alone(worker, reader, done):
            processed.append(result.index)
            yield result

    def add(self: JobFolder, result: Any) -> None:
        if result.index not in kills:
            original(self, result)
            return
        kills.remove(result.index)
        if moment == "before the entry":
            with monkeypatch.context() as patch, suppress(Stop):
                patch.setattr(bulk_folder.json, "dumps", raise_stop)
                original(self, result)
        elif moment == "after the entry":
            original(self, result)
        raise KeyboardInterrupt

    kills = {0, 2, 3}
    monkeypatch.setattr(JobFolder, "add", add)
    printed = []
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            printed.append(run_job(job_of(world, out), counted, printed.append))
        (out / f".part-000002.jsonl.{os.getpid() + 4_000_000}.tmp").write_text("unfinished")
        with (out / LOG).open("a") as log:
            log.write('{"index": 9, "fi')  # a torn line
    run_job(job_of(world, out), counted, printed.append)
    assert tree(out) == tree(whole)
    again = 0 if moment == "after the entry" else 1
    assert [processed.count(index) for index in range(4)] == [1 + again, 1, 1 + again, 1 + again]
    assert any("the same command continues" in line for line in printed)
    assert any(line.startswith("continues: ") for line in printed)


def raise_stop(*arguments: Any, **keywords: Any) -> str:
    raise Stop


def test_a_finished_shard_that_was_damaged_is_processed_again(
    world: Path, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def two(worker: Any, reader: ShardReader, done: Collection[int]) -> Iterator[Any]:
        for number, result in enumerate(run_alone(worker, reader, done)):
            if number == 2:
                raise KeyboardInterrupt
            yield result

    with pytest.raises(KeyboardInterrupt):
        run(job_of(world, out), two)
    (out / "part-000000.jsonl").write_text("damaged\n")
    [line] = run(job_of(world, out))
    assert "1 of 4 shards (8 of 30 rows) are finished" in line
    assert tree(out) == tree(whole)
    assert run(job_of(world, out)) == [f"{out} is complete: nothing is left to do"]


@pytest.mark.parametrize("content", ["", "other\n" * 14])
def test_input_that_is_changed_while_a_job_runs_ends_it(
    world: Path, tmp_path: Path, content: str
) -> None:
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out"
    lines = texts_of(world)
    rest = "\n".join(lines[16:])
    first.write_text("\n".join(lines[:16]))
    second.write_text(rest)
    job = replace(job_of(world, out), inputs=[first, second])

    def changing(worker: Any, reader: ShardReader, done: Collection[int]) -> Iterator[Any]:
        for result in run_alone(worker, reader, done):
            yield result
            second.write_text(content)

    with pytest.raises(UserError, match=r"b\.txt was changed while the job ran"):
        run(job, changing)
    assert not json.loads((out / MANIFEST).read_text())["complete"]
    second.write_text(rest)
    [line] = run(job)
    assert "2 of 4 shards" in line
    assert [row["text"] for row in records(out)] == lines


def other_model(world: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of a model, and a file of other weights with the size and times of the copy's."""
    model = folder / "model"
    shutil.copytree(world / "own", model)
    weights, other = model / "model.safetensors", folder / "other"
    tensors = load_file(weights)
    save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, other)
    shutil.copystat(weights, other)
    return model, other


@pytest.mark.parametrize("moment", ["before", "during", "after", "and back"])
def test_a_model_that_is_replaced_while_a_job_runs_ends_it(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The manifest has the hashes of the model that wrote the rows; resuming is refused too."""
    model, other = other_model(world, tmp_path)
    former = tmp_path / "former"
    shutil.copy2(model / "model.safetensors", former)

    def load_other(*arguments: Any, **settings: Any) -> Any:
        os.replace(other, model / "model.safetensors")
        opened = load(*arguments, **settings)
        if moment == "and back":
            os.replace(former, model / "model.safetensors")
        return opened

    def replacing(worker: Worker, *arguments: Any) -> Iterator[Any]:
        if moment == "before":
            os.replace(other, model / "model.safetensors")
        for result in run_alone(worker, *arguments):
            if other.exists():
                os.replace(other, model / "model.safetensors")
            yield result

    if moment in ("during", "and back"):
        monkeypatch.setattr(pipelines, "load", load_other)
    job = replace(job_of(world, tmp_path / "out"), model=model)
    with pytest.raises(UserError, match=f"{model} was changed while the job ran; put it back"):
        run(job, replacing)
    if moment == "after":  # the rows of the former model are kept
        with pytest.raises(UserError, match=r"started with other settings \(model\)"):
            run(job)
        os.replace(former, model / "model.safetensors")
        monkeypatch.undo()
        run(job)
        assert json.loads((job.output / MANIFEST).read_text())["complete"] is True
    else:
        assert not job.output.exists()


def test_all_files_of_a_model_are_hashed(world: Path, tmp_path: Path) -> None:
    """Those of the Hugging Face format, and the weights of a base, which are elsewhere."""
    model = tmp_path / "model"
    shutil.copytree(world / "own", model)
    for name in ("merges.txt", "chat_template.jinja", "model.safetensors.index.json", "a.spm"):
        (model / name).write_text("")
        assert name in model_hashes(model)
    (model / "log.jsonl").write_text("")
    assert "log.jsonl" not in model_hashes(model)
    config = json.loads((model / "config.json").read_text())
    config["base"] = {"path": os.path.relpath(world / "lm", model), "sha256": "0" * 64}
    (model / "config.json").write_text(json.dumps(config))
    assert os.path.relpath(world / "lm" / "model.safetensors", model) in model_hashes(model)


def test_two_workers_killed_and_resumed_by_one(
    commands: Commands, world: Path, whole: Path, tmp_path: Path
) -> None:
    words = f"bulk {world}/own --task translate --input {world}/lines.txt --output out"
    words += " --shard-rows 8 --device cpu --backend eager --threads 1 --max-new-tokens 6"
    kill = {"call": "replace", "path": r"part-000002\.jsonl", "when": "before"}
    killed = commands.run(*words.split(), "--workers", 2, cwd=tmp_path, kill=kill)
    assert killed.signal == signal.SIGKILL
    out = tmp_path / "out"
    assert sorted(entry["index"] for entry in map(json.loads, (out / LOG).open())) == [0, 1]
    done = commands.run(*words.split(), "--workers", 1, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out) == {"num_rows": 30, "num_errors": 0, "num_shards": 4}
    for name in ("part-000000.jsonl", "part-000003.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(os.listdir(out)) == [MANIFEST, *(f"part-{n:06}.jsonl" for n in range(4))]


def test_other_settings_and_wrong_uses_are_refused(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = world / "lines.txt"
    other = tmp_path / "other.txt"
    other.write_text("hello\n")
    for name, change in {
        "options": {"options": {"beam_size": 2}},
        "inputs": {"inputs": [other]},
        "shard_rows": {"shard_rows": 9},
        "model": {"model": "lm", "task": "generate"},
    }.items():
        with pytest.raises(UserError, match=rf"other settings \(.*{name}.*another folder"):
            run(job_of(world, whole, **change))
    before = lines.read_text()
    lines.write_text("changed " + before)
    with pytest.raises(UserError, match=r"other settings .inputs."):
        run(job_of(world, whole))
    lines.write_text(before)

    wrong = {
        "a classifier": {"task": "classify"},
        "no option pooling": {"options": {"pooling": "mean"}},
        "give pairs=True": {"task": "score"},
        "pairs are for": {"pairs": True},
        "take jsonl or parquet": {"model": "mlm", "task": "embed", "format": "text"},
        "format must be": {"format": "xml"},
        "no file matches": {"inputs": [tmp_path / "*.gz"]},
        "cannot read": {"inputs": [tmp_path / "missing"]},
        "2 fields are given": {"fields": ("a", "b")},
        "beam_size": {"options": {"beam_size": 0}},
        "no tgt_language xx": {"options": {"tgt_language": "xx"}},
        "pooling must be": {"model": "mlm", "task": "embed", "options": {"pooling": "median"}},
        "no row can be used: .*not JSON": {"inputs": [tmp_path / "bad.jsonl"]},
        "no rows": {"inputs": [tmp_path / "empty.txt"]},
        "has no columns?": {"inputs": [tmp_path / "table.parquet"]},
    }
    (tmp_path / "bad.jsonl").write_text("{\n[\n")
    (tmp_path / "empty.txt").write_text("")
    parquet.write_table(pa.table({"words": ["a"]}), tmp_path / "table.parquet")
    out = tmp_path / "new" / "out"
    for part, change in wrong.items():
        with pytest.raises(UserError, match=part):
            run(job_of(world, out, **change))
        assert not out.parent.exists(), part
    with pytest.raises(UserError, match="holds no model"):
        run(replace(job_of(world, out), model=tmp_path))
    with pytest.raises(UserError, match=f"{tmp_path} holds bad.jsonl, which does not"):
        run(job_of(world, tmp_path))


def test_a_second_process_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    """It removed the manifest and the log, without which the first one cannot be continued."""
    path, settings = tmp_path / "out", {"model": {}}
    first = JobFolder(path, ".jsonl")
    with first.opened(settings):
        first.add(ShardResult(0, "a.txt", 1, b"{}\n", 1, 0))
        before = tree(path)
        with pytest.raises(UserError, match="another process works on"):
            JobFolder(path, ".jsonl").opened(settings).__enter__()
        assert tree(path) == before
    again = JobFolder(path, ".jsonl")
    with again.opened(settings):
        assert again.entries == first.entries


def test_a_job_ends_with_a_glossary_that_is_changed_meanwhile(world: Path, tmp_path: Path) -> None:
    """Its later shards had other terms than the manifest says."""
    terms, out = tmp_path / "terms.tsv", tmp_path / "out"
    terms.write_text("the\tdog\n")
    job = job_of(world, out, options={"glossary": str(terms), "beam_size": 1})

    def change(worker: Worker, reader: ShardReader, done: Collection[int]) -> Iterator[ShardResult]:
        for result in run_alone(worker, reader, done):
            if result.index == 1:
                terms.write_text("the\tcat\n")
            yield result

    with pytest.raises(UserError, match=r"terms.tsv was changed while the job ran"):
        run(job, change)
    assert [*JobFolder(out, ".jsonl").path.glob("part-*")] == [out / "part-000000.jsonl"]


def test_a_job_is_not_continued_with_another_glossary(world: Path, tmp_path: Path) -> None:
    terms = tmp_path / "terms.tsv"
    terms.write_text("the\tdog\n")
    job = job_of(world, tmp_path / "out", options={"glossary": str(terms), "beam_size": 1})
    job = replace(job, inputs=[tmp_path / "lines.txt"])
    (tmp_path / "lines.txt").write_text("the cat\n")
    run(job)
    run(job)
    terms.write_text("the\tcat\n")
    with pytest.raises(UserError, match=r"other settings \(options\)"):
        run(job)


def test_shards_depend_on_the_files_alone(world: Path, tmp_path: Path) -> None:
    texts = texts_of(world)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n".join(texts[:9]).encode()))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[9:12]))
    parquet.write_table(pa.table({"text": texts[12:]}), tmp_path / "c.parquet")
    files = tuple(sorted(tmp_path.iterdir()))
    for shard_rows in (1, 4, 9, 4_096):
        reader = ShardReader(files, (("text", None),), shard_rows)
        shards = [*reader.shards()]
        assert [text for shard in shards for row in shard.rows() for text in row.texts] == texts
        starts = [sum(s.num_rows for s in shards[:n]) for n in range(len(shards))]
        assert [shard.first_row for shard in shards] == starts
        assert max(shard.num_rows for shard in shards) <= shard_rows
        left = [(shard.index, shard.rows()) for shard in reader.shards(done={0, 2})]
        assert left == [(s.index, s.rows()) for s in shards if s.index not in (0, 2)]


def test_threads_are_the_share_of_a_worker_or_those_of_the_job_in_the_folder(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.bulk.job.cores", lambda: 8)
    job = replace(job_of(world, tmp_path / "out"), load_settings={"device": "cpu"}, workers=4)

    def interrupted(worker: Worker, *arguments: Any) -> Any:
        threads.append(worker.load_settings["threads"])
        raise KeyboardInterrupt

    threads: list[int | None] = []
    alone = replace(job, output=tmp_path / "alone", workers=1)
    for started in (job, replace(job, workers=1), alone, replace(alone, workers=4)):
        with pytest.raises(KeyboardInterrupt):
            run(started, interrupted)
    assert threads == [2, 2, None, None]
    with pytest.raises(UserError, match=r"other settings .loading."):
        run(replace(job, load_settings={"device": "cpu", "threads": 3}), interrupted)


def test_the_default_number_of_workers_fits_the_memory(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.bulk.job.cores", lambda: 64)
    assert choose_workers(world / "own", "cpu") == 64
    monkeypatch.setattr("heedful.pipelines.choose_device", lambda name: torch.device("cuda"))
    assert choose_workers(world / "own") == 1
    assert choose_workers(world / "own", "cpu") == 64
    (world / "own" / "backends").mkdir()
    assert choose_workers(world / "own") == 64, "a converted backend is run by the CPU"
    assert choose_workers(world / "own", backend="eager") == 1
    (world / "own" / "backends").rmdir()
    size = (world / "own" / "model.safetensors").stat().st_size
    monkeypatch.setattr(os, "sysconf", lambda name: 4 * size if "SIZE" in name else 12)
    assert 8 <= choose_workers(world / "own", "cpu") <= 12


def end_at_once(*arguments: Any) -> None:
    """A process that ends without a result."""
    os._exit(1)


def fail_in_two_lines(*arguments: Any) -> None:
    """A job of Ray that fails with an error that is not Ray's own."""
    raise ValueError("no shard was finished\nin the last hours")


def test_any_error_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from heedful.bulk import on_ray

    receiver, sender = multiprocessing.Pipe(duplex=False)
    monkeypatch.setattr(on_ray, "_results", fail_in_two_lines)
    monkeypatch.setattr(on_ray.os, "dup2", lambda *numbers: None)
    monkeypatch.setattr(on_ray.signal, "signal", lambda *arguments: None)
    on_ray._drive(sender)
    with pytest.raises(UserError) as raised:
        on_ray._receive(receiver)
    reason = "Ray stopped: ValueError: no shard was finished; the same command continues"
    assert str(raised.value) == reason


@pytest.mark.benchmarks
def test_ray_has_the_results_of_this_machine(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="the package ray is not installed")
    from heedful.bulk.on_ray import run_on_ray

    run(job_of(world, tmp_path / "out"), partial(run_on_ray, num_workers=2))
    assert tree(tmp_path / "out") == tree(whole)
    with pytest.raises(UserError, match="a classifier"):
        run(job_of(world, tmp_path / "no", task="classify"), partial(run_on_ray, num_workers=1))
    monkeypatch.setattr("heedful.bulk.on_ray._drive", end_at_once)  # as Ray ends its process
    with pytest.raises(UserError, match="connection to its cluster was lost; the same command"):
        run(job_of(world, tmp_path / "no"), partial(run_on_ray, num_workers=1))
    monkeypatch.undo()
    with pytest.raises(UserError, match="no Ray cluster at 127"):
        run(
            job_of(world, tmp_path / "no"),
            partial(run_on_ray, num_workers=1, address="127.0.0.1:1"),
        )
