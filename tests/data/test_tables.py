"""Tables: Parquet files and folders of `datasets` give the same rows as JSONL, or an error."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as parquet

from heedful.config import parse_recipe
from heedful.data.prepared import content_key
from heedful.data.row_files import read_rows
from heedful.data.rows import Rows
from heedful.errors import UserError
from heedful.run import train

PAIR: dict[str, Any] = {"src": None, "tgt": None}
LABELED: dict[str, Any] = {"text": None, "label": None}
FORMATS = ["parquet", "saved", "two shards"]
ENTRIES: list[dict[str, Any]] = [
    {"src": "a b", "tgt": "c\nd", "text": "one", "label": 0, "more": {"en": "x", "de": "y"}},
    {"src": "", "tgt": "e", "text": " two\u2028", "label": 1, "more": {"en": "今天", "de": "z"}},
    {"src": "f", "tgt": "今天", "text": "three", "label": 1, "more": {"en": "v", "de": "w"}},
]


def written(path: Path, table: Any, format: str = "parquet") -> Path:
    """A table as Parquet, or in the files that `Dataset.save_to_disk` writes."""
    if format == "parquet":
        parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=2)
        return path.with_suffix(".parquet")
    path.mkdir()
    half = table.num_rows // 2
    shards = [table] if format == "saved" else [table.slice(0, half), table.slice(half)]
    names = [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, shard.schema) as to:
            to.write_table(shard)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")
    return path


def with_classes(table: Any, column: str, names: list[str]) -> Any:
    """The class names as `datasets` stores them in a schema."""
    features = {column: {"names": names, "_type": "ClassLabel"}}
    content = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": content})


def texts(rows: Rows) -> tuple[dict[str, list[str]], list[int]]:
    return rows.columns, [int(rows.location(i).rsplit(" ")[-1]) for i in range(len(rows))]


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_has_the_rows_of_jsonl(format: str, tmp_path: Path) -> None:
    jsonl = tmp_path / "t.jsonl"
    jsonl.write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES))
    path = written(tmp_path / "t", pa.Table.from_pylist(ENTRIES), format)
    expected: list[dict[str, Any]] = [
        PAIR, LABELED, {"src": "tgt", "tgt": "tgt"}, {"text": None}, {"text": "src"},
        {"text": "text", "label": "label", "pair": "src"},
    ]  # fmt: skip
    for fields in expected:
        assert texts(read_rows([path], fields)) == texts(read_rows([jsonl], fields)), fields
        assert read_rows([path], fields).report == read_rows([jsonl], fields).report
    inside = read_rows([path], {"src": "more.en", "tgt": "more.de"})
    assert inside.columns == {"src": ["x", "今天", "v"], "tgt": ["y", "z", "w"]}
    both = read_rows([path, jsonl], PAIR)
    assert len(both) == 4


@pytest.mark.parametrize("format", FORMATS)
def test_values_of_other_types_and_missing_ones(format: str, tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["a", None, "c", "d"], pa.large_string()),
        "label": pa.array([True, False, True, False]),
        "coded": pa.array(["x", "y", "x", "x"]).dictionary_encode(),
        "class": pa.array([2, 0, 1, 0], pa.int64()),
        "a.b": ["p", "q", "r", "s"],
    }
    table = with_classes(pa.table(columns), "class", ["no", "yes", "maybe"])
    path = written(tmp_path / "t", table, format)
    rows = read_rows([path], LABELED)
    assert rows.columns == {"text": ["a", "c", "d"], "label": ["true", "true", "false"]}
    assert rows.report.num_empty == 1
    rows = read_rows([path], {"text": "coded", "label": "class", "pair": "a.b"})
    assert rows["label"] == ["maybe", "no", "yes", "no"]
    assert rows["text"] == ["x", "y", "x", "x"]
    assert rows["pair"] == ["p", "q", "r", "s"]


def test_rows_are_counted_over_many_batches(tmp_path: Path) -> None:
    table = pa.table({"text": [str(number) for number in range(10_000)]})
    for format in FORMATS:
        path = written(tmp_path / format, table, format)
        assert read_rows([path], {"text": None})["text"] == table["text"].to_pylist()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"src": "a", "tgt": "tgt"}, r"no column 'a' \(its columns: 'src', 'tgt'"),
    ({"src": "more.fr", "tgt": "tgt"}, r"no column 'more.fr' .*'more.(en|de)', 'more"),
    ({"src": "src.x", "tgt": "tgt"}, "no column 'src.x'"),
    ({"src": "more", "tgt": "tgt"}, r"no column 'more' .*'more.(en|de)', 'more"),
    ({"src": "label", "tgt": "tgt"}, r"'label' holds int64, not text"),
    ({"src": 1, "tgt": 2}, r"is a table, whose fields have names"),
    ({"text": None, "label": "none"}, r"no column 'none'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
@pytest.mark.parametrize("format", ["parquet", "saved"])
def test_missing_and_wrong_columns_of_a_table_are_errors(
    format: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "t", pa.Table.from_pylist(ENTRIES), format)
    with pytest.raises(UserError, match=message) as error:
        read_rows([path], fields)
    assert "\n" not in str(error.value)


def test_a_duplicate_column_is_an_error(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"])
    with pytest.raises(UserError, match="two columns 'text'"):
        read_rows([written(tmp_path / "t", table, "saved")], {"text": None})


@pytest.mark.parametrize("format", ["parquet", "saved"])
def test_a_file_truncated_anywhere_is_an_error(format: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t", pa.Table.from_pylist(ENTRIES), format)
    file = next(path.glob("*.arrow")) if path.is_dir() else path
    data = file.read_bytes()
    for size in [*range(0, len(data), 7), len(data) - 8, len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(UserError, match="is damaged or not a table") as error:
            read_rows([path], PAIR)
        assert "\n" not in str(error.value)
    draw = random.Random(0)
    for _ in range(200):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(changed)
        with suppress(UserError):  # nothing else, whatever byte it is
            read_rows([path], PAIR)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot read .*: No such file"):
        read_rows([path], PAIR)


def test_text_that_is_not_utf_8_and_labels_that_are_missing(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    path = written(tmp_path / "raw", pa.table({"text": raw}), "saved")
    with pytest.raises(UserError, match=r"is damaged or not a table .*UTF8"):
        read_rows([path], {"text": None})
    table = with_classes(pa.table({"text": ["a"], "label": [-1]}), "label", ["no", "yes"])
    with pytest.raises(UserError, match="line 1: no label"):
        read_rows([written(tmp_path / "t", table)], LABELED)
    table = pa.table({"text": ["a"], "label": [[0, -1]]})
    features = {"label": {"feature": {"names": ["no", "yes"], "_type": "ClassLabel"}}}
    content = {"huggingface": json.dumps({"info": {"features": features}})}
    path = written(tmp_path / "lists", table.replace_schema_metadata(content))
    with pytest.raises(UserError, match="'label' holds the label -1, which has no class name"):
        read_rows([path], LABELED)


def test_other_folders_are_errors(tmp_path: Path) -> None:
    splits = tmp_path / "splits"
    written(splits, pa.Table.from_pylist(ENTRIES), "saved")
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"several splits \(train, test\); name one of its folders"):
        read_rows([splits], PAIR)
    (splits / "dataset_dict.json").unlink()
    for files, message in (
        ([{"filename": "../t.arrow"}], "must name a file beside it"),
        ([3], "must name a file beside it"),
        (None, "is damaged or of an old version"),
    ):
        (splits / "state.json").write_text(json.dumps({"_data_files": files}))
        with pytest.raises(UserError, match=message):
            read_rows([splits], PAIR)
    (splits / "state.json").unlink()
    with pytest.raises(UserError, match=r"Is a directory, and not one .*\(no state\.json\)"):
        read_rows([splits], PAIR)
    for path, message in (
        (splits, "Is a directory"),
        (written(tmp_path / "t", pa.Table.from_pylist(ENTRIES)), "in a recipe, give it as file"),
    ):
        with pytest.raises(UserError, match=message):
            read_rows({"src": [path], "tgt": [path]})


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "t", pa.Table.from_pylist(ENTRIES))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'heedful\[parquet\]'"):
        read_rows([path], PAIR)


def test_the_key_of_prepared_data_depends_on_the_content_of_a_folder(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ENTRIES)
    one, two = (written(tmp_path / name, table, "two shards") for name in ("one", "two"))
    assert content_key([one]) == content_key([two])
    other = written(tmp_path / "other", table.slice(1), "two shards")
    assert content_key([one]) != content_key([other])


def test_a_translator_learns_from_tables(tmp_path: Path) -> None:
    def pairs(lines: list[str]) -> Any:
        return pa.table({"translation": [{"en": line, "de": line[::-1]} for line in lines]})

    lines = ["the cat sat", "a dog ran", "hello world"]
    train_path = written(tmp_path / "t", pairs(lines * 5), "two shards")
    valid = written(tmp_path / "v", pairs(["the dog sat", "a cat ran"]))
    names = {"src_field": "translation.en", "tgt_field": "translation.de"}
    content = {
        "task": "translation",
        "data": {
            "train": {"file": str(train_path), **names},
            "valid": {"file": str(valid), **names},
        },
        "tokenizer": {"kind": "char", "vocab_size": None},
        "model": {"d_model": 8, "num_heads": 2, "d_ff": 8}
        | {"num_encoder_layers": 1, "num_decoder_layers": 1},
        "training": {"max_steps": 1, "device": "cpu", "schedule": {"learning_rate": 1e-3}},
        "evaluation": {"decode_sentences": 0},
    }
    train(parse_recipe(content), tmp_path / "run")
    assert (tmp_path / "run/model.safetensors").is_file()
