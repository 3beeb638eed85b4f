"""Commits of a writer of columns, which a thread makes durable while parts are appended."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heedful.data import column_writer
from heedful.data.column_writer import PROGRESS, ColumnsWriter
from heedful.data.columns import Columns, DataReport


def part(*numbers: int, corpus: str = "first") -> Columns:
    columns = {"number": np.array(numbers, np.int64)}
    report = DataReport(len(numbers), len(numbers))
    return Columns({**columns}, report, {"corpora": [(corpus, 0, len(numbers))]})


def test_a_commit_holds_what_was_appended_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is appended while the disk is slow."""
    may_sync, real = threading.Event(), os.fsync

    def slow(handle: int) -> None:
        may_sync.wait()
        real(handle)

    monkeypatch.setattr(column_writer.os, "fsync", slow)
    writer = ColumnsWriter(tmp_path / "parts")
    writer.append(part(1, 2))
    writer.commit(1)
    assert not (tmp_path / "parts" / PROGRESS).exists()
    writer.append(part(3, corpus="second"))
    may_sync.set()
    writer.close()
    resumed = ColumnsWriter(tmp_path / "parts")
    assert (resumed.position, resumed.report) == (1, DataReport(2, 2))
    assert [(c.name, c.start, c.end) for c in resumed.corpora] == [("first", 0, 2)]


@pytest.mark.parametrize("then", ["commit", "complete", "close"])
def test_the_error_of_a_commit_is_raised_by_the_next_call(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> Any:
        raise OSError(28, "No space left on device")

    writer = ColumnsWriter(tmp_path / "parts")
    writer.append(part(1, 2))
    monkeypatch.setattr(column_writer.os, "fsync", full)
    writer.commit(1)
    if then == "close":  # after another error
        writer.close()
    else:
        call = {"commit": lambda: writer.commit(2), "complete": lambda: complete(writer)}[then]
        with pytest.raises(OSError, match="No space left"):
            call()
    assert not (tmp_path / "parts" / PROGRESS).exists()


def complete(writer: ColumnsWriter) -> None:
    assert writer.report is not None
    writer.complete(writer.report, {})
