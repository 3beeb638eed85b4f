"""Preparation in a stream: independent of workers and chunks, continued after an interruption."""

import gc
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from commands import tiny, tree
from heedful import plugins
from heedful.config import parse_recipe
from heedful.data import scan, text_files, workers
from heedful.data.filters import Unique
from heedful.data.prepared import MANIFEST, UNFINISHED, Resumable, list_entries, remove_entry
from heedful.data.rows import Rows
from heedful.tasks import prepared_data
from heedful.tasks.run_data import Inherited, RunData

WORDS = ["red", "dog", "cow", "sees", "a", "the", "old", "ünd", "cat", "今天"]
ROWS = 150


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_LINES", 8)
    monkeypatch.setattr(text_files, "_READ_BYTES", 100)
    monkeypatch.setattr(prepared_data, "SHARD_CHUNKS", 2)


def write_pairs(folder: Path) -> dict[str, Any]:
    """Pairs with empty lines, equal pairs and long ones, and a held-out file with some of them."""
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(ROWS)]
    lines[20] = lines[90] = ""
    lines[30] = lines[31] = lines[140]
    (folder / "src").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tgt").write_text("".join(f"{line[::-1]}\n" for line in lines))
    held = [lines[5], lines[77], lines[149], "new dog"]
    for side, step in (("src", 1), ("tgt", -1)):
        (folder / f"held.{side}").write_text("".join(f"{line[::step]}\n" for line in held))
    return {side: str(folder / side) for side in ("src", "tgt")}


def recipe_of(folder: Path, **data: Any) -> Any:
    content = tiny(task="translation", tokenizer={"kind": "bpe", "vocab_size": 40})
    content["data"] = {"train": write_pairs(folder), "max_length": 100, **data}
    return parse_recipe(content)


def prepare(recipe: Any, cache: Path) -> RunData:
    task = plugins.task.get(recipe.task)(recipe)
    return prepared_data.prepare(task, cache, Inherited(), lambda line: None)


def contents(data: RunData) -> dict[str, bytes | None]:
    return tree(data.directory)


CASES: dict[str, dict[str, Any]] = {
    "random": {"valid_size": 9},
    "filters": {"valid_size": 9, "filters": {"max_words": 7, "unique": ["row"]}},
}


@pytest.mark.parametrize("case", CASES)
def test_prepared_data_do_not_depend_on_workers_and_chunks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path, **CASES[case])
    one = prepare(recipe.replace({"data.workers": 1}), tmp_path / "1")
    for number in (2, 3) if case == "filters" else (2,):
        other = prepare(recipe.replace({"data.workers": number}), tmp_path / f"{number}")
        assert contents(other) == contents(one)
    monkeypatch.setattr(text_files, "BLOCK_LINES", 4_096)
    whole = prepare(recipe, tmp_path / "whole")
    assert contents(whole) == contents(one)
    lines = (tmp_path / "src").read_text().splitlines()
    report = one.splits["train"].report
    valid = {row["src"] for row in one.texts("valid")}
    kept = [line for line in lines if line and line not in valid]
    if case == "filters":
        kept = [line for line in dict.fromkeys(kept) if len(line.split()) <= 7]
        assert report.num_filtered == 0  # rows are counted after the choice of held-out ones
        assert one.filters.num_dropped == sum(
            lines[i] in lines[:i] or len(lines[i].split()) > 7 for i in range(ROWS) if lines[i]
        )
    actual = [one.tokenizer.decode(ids.tolist()) for ids in one.ids("train", "src")]
    assert actual == kept
    assert report.num_kept == len(kept)


def test_workers_identify_languages_as_one_process_does(tmp_path: Path) -> None:
    sides = ("The dog runs over the green grass number {}.", "Der Hund läuft über das Gras {}.")
    rows = [sides if i % 3 else sides[::-1] for i in range(60)]
    for column, side in enumerate(("src", "tgt")):
        text = "".join(f"{row[column].format(i)}\n" for i, row in enumerate(rows))
        (tmp_path / f"mixed.{side}").write_text(text, encoding="utf-8")
    settings = {"filters": {"language": True}, "src_language": "en", "tgt_language": "de"}
    recipe = recipe_of(tmp_path, valid_size=9, **settings).replace(
        {f"data.train.{side}": str(tmp_path / f"mixed.{side}") for side in ("src", "tgt")}
    )
    one, two = (prepare(recipe.replace({"data.workers": n}), tmp_path / f"{n}") for n in (1, 2))
    assert contents(two) == contents(one)
    [count] = one.filters.filters
    assert (count.num_seen, count.num_dropped, len(count.examples)) == (60, 20, 10)
    assert len(one.splits["train"]) == 40 - 9


def test_held_out_files_drop_rows_from_training_in_every_chunk(tmp_path: Path) -> None:
    held = {side: str(tmp_path / f"held.{side}") for side in ("src", "tgt")}
    recipe = recipe_of(tmp_path, valid=held)
    data = prepare(recipe, tmp_path / "cache")
    lines = (tmp_path / "src").read_text().splitlines()
    known = set((tmp_path / "held.src").read_text().splitlines())
    report = data.splits["train"].report
    assert report.num_also_held_out == sum(line in known for line in lines) >= 3
    assert (report.num_lines, report.num_empty) == (ROWS, 2)
    actual = [data.tokenizer.decode(ids.tolist()) for ids in data.ids("train", "src")]
    assert actual == [line for line in lines if line and line not in known]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_preparation_continues_at_its_last_shard(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path, valid_size=9)
    whole = prepare(recipe, tmp_path / "whole")
    cache, encoded = tmp_path / "cache", list[int]()
    original = prepared_data.ChunkEncoder.__call__

    def stop_at(count: int) -> None:
        def call(self: Any, chunk: Any) -> Any:
            if len(encoded) == count:
                raise error
            encoded.append(chunk.first)
            return original(self, chunk)

        monkeypatch.setattr(prepared_data.ChunkEncoder, "__call__", call)

    def is_unfinished() -> bool:
        names = [entry.name for entry in cache.iterdir() if entry.is_dir()]
        return names == [whole.directory.name + UNFINISHED]

    for count, chunks in ((7, 7), (5, 5)):
        encoded.clear()
        stop_at(count)
        with pytest.raises((KeyboardInterrupt, Resumable, ValueError)):
            prepare(recipe, cache)
        assert len(encoded) == chunks
        assert is_unfinished()
        [entry] = list_entries(cache)
        assert entry.about["task"] == "translation, unfinished"
    monkeypatch.setattr(scan, "scan_rows", None)  # the first pass is not repeated
    monkeypatch.setattr(prepared_data, "scan_rows", None)
    encoded.clear()
    stop_at(-1)
    data = prepare(recipe, cache)
    assert len(encoded) == -(-ROWS // 8) - 6 - 4
    assert contents(data) == contents(whole)
    assert not is_unfinished()


def test_an_unfinished_preparation_can_be_removed_and_wrong_data_leave_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, cache = recipe_of(tmp_path, valid_size=9), tmp_path / "cache"

    def stop(self: Any, chunk: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prepared_data.ChunkEncoder, "__call__", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(recipe, cache)
    [entry] = list_entries(cache)
    assert remove_entry(entry)
    assert not list_entries(cache)
    with open(tmp_path / "src", "a", encoding="utf-8") as file:
        file.write("one more\n")
    with pytest.raises(ValueError, match="src has 151 lines but"):
        prepare(recipe, cache)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


@pytest.mark.parametrize(
    ("name", "value"), [("src_field", 2), ("tgt_field", "x"), ("header", True)]
)
def test_columns_of_files_of_lines_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    train = recipe.data.train.model_copy(update={name: value})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": train})})
    with pytest.raises(ValueError, match=f"data.train.{name} is of a table"):
        prepare(recipe, tmp_path / "cache")


def test_keys_of_a_new_tokenizer_are_noted_beside_an_existing_one(tmp_path: Path) -> None:
    data = prepare(recipe_of(tmp_path, valid_size=9), tmp_path / "cache")
    size = data.tokenizer.vocab_size

    def notes(**keys: Any) -> list[str]:
        recipe = recipe_of(tmp_path, valid_size=9)
        keys = {"kind": "bpe", "vocab_size": "auto", **keys}
        recipe = recipe.replace({f"tokenizer.{key}": value for key, value in keys.items()})
        lines: list[str] = []
        task = plugins.task.get(recipe.task)(recipe)
        prepared_data.prepare(task, tmp_path / "cache", Inherited(data.tokenizers), lines.append)
        return [line for line in lines if line.startswith("note: the tokenizer")]

    assert notes() == notes(vocab_size=size) == []
    [line] = notes(kind="char", vocab_size=size + 1, lowercase=True)
    for key, value in (("kind", "bpe"), ("vocab_size", size), ("lowercase", "false")):
        assert f"tokenizer.{key} has no effect, it is {value}" in line


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{support!r}, {tests!r}]
import test_preparation as t
from heedful.data import text_files
from heedful.tasks import prepared_data
from heedful.data.columns import ColumnsWriter

text_files.BLOCK_LINES, text_files._READ_BYTES, prepared_data.SHARD_CHUNKS = 8, 100, 2
commit = ColumnsWriter.commit

def kill(self, position):
    commit(self, position)
    if position == 6:
        os.kill(os.getpid(), signal.SIGKILL)

ColumnsWriter.commit = kill
folder = Path(sys.argv[1])
t.prepare(t.recipe_of(folder, valid_size=9, workers=2), folder / "cache")
"""


def test_a_killed_preparation_leaves_no_worker_and_continues(tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`: workers do not run it again."""
    here = Path(__file__).parent
    text = KILLED.format(support=str(here.parent / "support"), tests=str(here))
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr  # `run` returns when no worker has the pipes open
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert folder.name.endswith(UNFINISHED)
    assert (folder / MANIFEST).is_file()
    recipe = recipe_of(tmp_path, valid_size=9)
    whole = prepare(recipe, tmp_path / "whole")
    assert contents(prepare(recipe, tmp_path / "cache")) == contents(whole)


def test_workers_do_not_run_the_program_and_have_one_thread_of_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, program, marker = ModuleType("__main__"), tmp_path / "program.py", tmp_path / "has_run"
    program.write_text(f"open({str(marker)!r}, 'w').close()\n")
    main.__file__ = str(program)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    items = [
        "__import__('os').environ['TOKENIZERS_PARALLELISM']",
        "'torch' in __import__('sys').modules",
    ]
    assert [*workers.map_in_order(eval, iter(items), 2)] == ["false", False]
    assert not marker.exists()


def test_results_are_in_order_and_few_items_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def items() -> Any:
        for number in range(40):
            read.append(number)
            yield number

    results = workers.map_in_order(np.negative, items(), 2)
    for number in range(40):
        assert next(results) == -number
        assert len(read) <= number + 6
    many, gib = workers.choose_workers(None, 1 << 30), 1 << 30
    assert (workers.choose_workers(None, 1_000), workers.choose_workers(3, gib)) == (1, 3)
    assert many >= 1


def test_garbage_is_collected_rarely_with_one_worker_and_as_before_afterwards() -> None:
    before = gc.get_threshold()
    during = [*workers.map_in_order(lambda item: gc.get_threshold()[0], range(2), 1)]
    assert min(during) > before[0]
    assert gc.get_threshold() == before
    interrupted = workers.map_in_order(abs, range(2), 1)
    next(interrupted)
    interrupted.close()
    assert gc.get_threshold() == before


def test_a_killed_worker_is_one_line() -> None:
    with pytest.raises(Resumable, match=r"worker process .* was killed.*data\.workers"):
        list(workers.map_in_order(os._exit, iter([9, 9]), 2))


def test_a_sample_of_many_rows_is_the_same_for_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows({"text": [f"{i} " * (i % 5 + 1) for i in range(500)]})
    whole = scan.scan_rows(rows, [], 500, 1)
    assert whole.sample["text"] == rows["text"]
    some = scan.scan_rows(rows, [], 60, 1)
    assert len(some.sample) == 60
    assert [rows["text"][i] for i in some.sample_indices] == some.sample["text"]
    assert (np.diff(some.sample_indices) > 0).all()
    assert some.sample_indices.max() > 300
    monkeypatch.setattr(scan, "_SLACK", 1.0)  # cut to size at every chunk
    again = scan.scan_rows(rows, [], 60, 1)
    assert again.sample["text"] == some.sample["text"]
    monkeypatch.setattr(scan, "SAMPLE_CHARACTERS", 100)
    short = scan.scan_rows(rows, [Unique("text")], 60, 1)
    assert 50 < sum(map(len, short.sample["text"])) <= 100
    assert scan.scan_rows(rows, [], 0, 1).sample["text"] == []
