"""Batches of whole rows: their order, their size, and errors of single rows."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from heedful.errors import UserError
from heedful.serve.batches import BatchEngine, Job, OnOutput, call_all


class Batches:
    """An engine without a thread, and the batches that it has run."""

    def __init__(
        self,
        budget: int,
        fails: Callable[[list[int]], bool] = lambda rows: False,
        early: Callable[[list[int]], list[int]] = lambda rows: [],
    ):
        self.ran: list[list[int]] = []
        self.fails = fails
        self.early = early  # indices of the rows that are reported before the end of their batch
        self.jobs: list[Job] = []
        self.ended: list[list[int]] = []  # after each early report, the jobs that have ended
        self.engine = BatchEngine(budget, call_all)

    def job(self, sizes: list[int], key: str = "", rows_each: int = 1) -> Job:
        def run(rows: list[int], report: OnOutput) -> list[int]:
            self.ran.append(rows)
            for index in self.early(rows):
                report(index, rows[index] * 10)
                ended = [n for n, job in enumerate(self.jobs) if job.result.done()]
                self.ended.append(ended)
            if self.fails(rows):
                raise UserError(f"bad {rows}")
            return [row * 10 for row in rows]

        return Job(key, list(sizes), list(sizes), run, rows_each)

    def add(self, *args: Any, **keywords: Any) -> Job:
        job = self.job(*args, **keywords)
        self.jobs.append(job)
        self.engine.add(job)
        return job


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.sampled_from("ab")))
)
@settings(max_examples=30, deadline=None)
def test_every_batch_has_the_oldest_row_and_fits(requests: list[tuple[list[int], str]]) -> None:
    def test() -> None:
        batches = Batches(40)
        jobs = [batches.add(sizes, key) for sizes, key in requests]
        keys = {id(job): job.key for job in jobs}
        while True:
            waiting = list(batches.engine._waiting)
            if not batches.engine.turn():
                break
            rows = batches.ran[-1]
            assert waiting[0].size in rows
            assert len(rows) == 1 or len(rows) * max(rows) <= 40
            left = {row.order for row in batches.engine._waiting}
            taken = [row for row in waiting if row.order not in left]
            assert sorted(row.size for row in taken) == sorted(rows)
            assert len({keys[id(row.job)] for row in taken}) == 1
        for job, (sizes, _) in zip(jobs, requests, strict=True):
            assert job.result.result() == [size * 10 for size in sizes]

    in_loop(test)


def test_rows_of_similar_length_share_a_batch() -> None:
    def test() -> None:
        batches = Batches(60)
        batches.add([10, 30, 11, 9, 29])
        while batches.engine.turn():
            pass
        assert [sorted(rows) for rows in batches.ran] == [[9, 10, 11], [29, 30]]
        batches = Batches(60)
        batches.add([10, 10, 10, 10], rows_each=3)  # beams
        while batches.engine.turn():
            pass
        assert [len(rows) for rows in batches.ran] == [2, 2]

    in_loop(test)


def test_a_request_of_many_rows_does_not_stop_others() -> None:
    """A row waits for those before it in its own request, and for no more of others."""

    def test() -> None:
        batches = Batches(10)
        many = batches.add([10] * 20)
        assert batches.engine.turn()
        one = batches.add([4])
        assert batches.engine.turn()
        assert batches.engine.turn()
        assert one.result.done()
        while not many.result.done():  # although short ones keep coming
            batches.add([4])
            assert batches.engine.turn()
            assert len(batches.ran) < 60
        assert batches.engine.turn()

    in_loop(test)


def test_a_row_that_fails_fails_alone() -> None:
    def test() -> None:
        batches = Batches(100, lambda rows: 7 in rows)
        good, bad, other = batches.add([5, 6]), batches.add([7, 8]), batches.add([9])
        while batches.engine.turn():
            pass
        assert good.result.result() == [50, 60]
        assert other.result.result() == [90]
        with pytest.raises(UserError, match=r"bad \[7\]"):
            bad.result.result()
        assert batches.ran == [[5, 6, 7, 8, 9], [5], [6], [7], [8], [9]]

    in_loop(test)


def test_a_job_ends_with_its_last_row_while_the_batch_goes_on() -> None:
    def test() -> None:
        batches = Batches(100, early=lambda rows: [2, 1, 3])
        first, second = batches.add([5, 7]), batches.add([6, 8])
        assert batches.engine.turn()
        assert batches.ran == [[5, 6, 7, 8]]
        assert batches.ended == [[], [], [1]]
        assert second.result.result() == [60, 80]
        assert first.result.result() == [50, 70]

    in_loop(test)


def test_rows_that_were_reported_before_an_error_do_not_run_again() -> None:
    def test() -> None:
        def early(rows: list[int]) -> list[int]:
            return [0] if len(rows) > 1 else []

        batches = Batches(100, lambda rows: 7 in rows, early)
        good, other, bad = batches.add([5]), batches.add([6]), batches.add([7])
        assert batches.engine.turn()
        assert batches.ran == [[5, 6, 7], [6], [7]]
        assert batches.ended == [[0]]
        assert (good.result.result(), other.result.result()) == ([50], [60])
        with pytest.raises(UserError, match=r"bad \[7\]"):
            bad.result.result()

    in_loop(test)


def test_cancelled_rows_do_not_run() -> None:
    def test() -> None:
        batches = Batches(10)
        first, second = batches.add([5, 9]), batches.add([6])
        assert batches.engine.turn()
        first.cancel()
        assert batches.engine.turn()
        assert not batches.engine.turn()
        assert batches.ran == [[5], [6]]
        assert second.result.result() == [60]
        assert not first.result.done()
        third = batches.add([3])
        batches.engine.fail(RuntimeError("defect"))
        with pytest.raises(RuntimeError, match="defect"):
            third.result.result()
        assert not batches.engine.turn()

    in_loop(test)
