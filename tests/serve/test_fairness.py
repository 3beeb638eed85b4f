"""Which outputs run in a continuous batch: none stops the others, and results are those alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from backend_models import model_of
from heedful.serve import continuous, outputs
from heedful.serve.batches import call_all
from heedful.serve.continuous import ContinuousBatch
from heedful.serve.outputs import GenerationJob, Output

MODEL = model_of("gpt2")
MODEL.net.double()
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.8, "seed": 6},
    {"repetition_penalty": 1.3},
]


class Run:
    """A batch without a thread, whose turns are checked."""

    def __init__(self, budget: int, prefix_tokens: int = 0) -> None:
        self.batch = ContinuousBatch(MODEL.eager, budget, call_all, prefix_tokens=prefix_tokens)
        self.turns = 0
        # Turns that an output has waited, and those that it may wait for each slice before it.
        self.waits: dict[Output, tuple[int, dict[Any, int]]] = {}

    def ask(self, row: list[int], limit: int, texts: int = 1, **options: Any) -> GenerationJob:
        options = {"beam_size": 1, "max_new_tokens": limit, "scores": False, **options}
        rows = [row] * texts
        request = MODEL.request(rows, **options)
        if request.seeds is not None:
            request = request._replace(seeds=[options["seed"]] * texts)
        job = GenerationJob(rows, request)
        self.batch.add(job)
        return job

    def turn(self) -> bool:
        has_work = self.batch.turn()
        self.turns += 1
        running = [output for output in self.batch.queue if output.runs]
        assert self.batch.num_cached <= self.batch.batch_tokens or len(running) == 1
        assert len(running) <= continuous.MAX_ROWS
        for number, output in enumerate(self.batch.queue):
            if output.runs:
                self.waits.pop(output, None)
                continue
            waited, before = self.waits.get(output, (0, {}))
            for other in self.batch.queue[:number]:
                before.setdefault((other, other.slice_end), _slice_turns(other))
            assert waited <= sum(before.values())
            self.waits[output] = waited + 1, before
        return has_work


def _slice_turns(output: Output) -> int:
    """Most turns that the slice of an output takes while it runs, its own reading included."""
    new = max(continuous.SLICE, output.slice_end - len(output.ids))
    parts = -(-(output.num_tokens + new) // continuous.READ_BESIDE)
    return new + parts * continuous.MAX_ROWS + 2


def outputs_of(job: GenerationJob) -> list[list[int]]:
    """The ids of each output of a job that has ended."""
    pieces = [job.pieces.get_nowait() for _ in range(job.pieces.qsize())]
    assert all(piece.reason is not None and piece.error is None for piece in pieces)
    assert sorted(piece.index for piece in pieces) == list(range(len(job.rows)))
    return [piece.ids for piece in sorted(pieces, key=lambda piece: piece.index)]


def ids_of(job: GenerationJob) -> list[int]:
    [ids] = outputs_of(job)
    return ids


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Limits that outputs of a few tokens reach."""
    values = {"READ_AT_ONCE": 12, "READ_BESIDE": 3, "SLICE": 4, "MAX_ROWS": 5}
    for name, value in values.items():
        patch.setattr(continuous, name, value)
    patch.setattr(outputs, "HEADROOM", 2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def in_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_every_output_is_the_one_alone_within_the_budget_and_its_wait(data: st.DataObject) -> None:
    rows = st.lists(st.integers(3, 39), min_size=1, max_size=30)
    arrival = st.tuples(
        st.integers(0, 6),
        rows,
        st.integers(1, 17),
        st.sampled_from([1, 1, 7]),
        st.sampled_from(OPTIONS),
        st.booleans(),
    )
    arrivals = data.draw(st.lists(arrival, min_size=1, max_size=12))
    budget = data.draw(st.sampled_from([8, 40, 60, 200]))

    def test() -> None:
        run, jobs = Run(budget, data.draw(st.sampled_from([0, 100]))), []
        run.batch.prefixes.min_tokens = 4
        for pause, row, limit, texts, options, is_cancelled in arrivals:
            for _ in range(pause):
                run.turn()
            jobs.append((run.ask(row, limit, texts, **options), row, limit, options))
            if is_cancelled:
                jobs[0][0].cancel()
        while run.turn():
            assert run.turns < 2_000
        assert not run.batch.num_cached
        for job, row, limit, options in jobs:
            if not job.cancelled:
                keywords = {"beam_size": 1, "max_new_tokens": limit, **options}
                alone = MODEL.generate([row], **keywords)[0]
                assert outputs_of(job) == [alone] * len(job.rows)

    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        in_loop(test)


def endless(run: Run, row: list[int], limit: int, texts: int = 1) -> GenerationJob:
    """Outputs that end by their limit."""
    return run.ask(row, limit, texts, min_new_tokens=limit)


def test_a_long_output_does_not_stop_short_ones() -> None:
    """Its limit does not count before its tokens are there."""

    def test() -> None:
        run = Run(60)
        long = endless(run, [5], 40)
        run.turn()
        for _ in range(5):
            short, begun = endless(run, [6, 7], 3), run.turns
            while short.pieces.empty():
                run.turn()
            assert run.turns - begun == 2  # the first of them has two tokens
        assert long.pieces.empty()

    in_loop(test)


def test_a_long_prompt_does_not_stop_short_ones(small: None) -> None:
    """It is read in parts, and short ones take their steps between them."""

    def test() -> None:
        run, sizes = Run(200), []
        run.batch.observe = lambda rows, tokens: sizes.append(tokens)
        first = endless(run, [4], 20)
        run.turn()
        long = endless(run, [5] * 40, 1)
        run.turn()
        short = endless(run, [6, 7], 3)
        while short.pieces.empty():
            run.turn()
            assert long.pieces.empty()
        assert max(sizes) == 3
        while long.pieces.empty():
            run.turn()
        assert first.pieces.empty()

    in_loop(test)


@pytest.mark.parametrize("limit", [3, 11])  # one slice, and several
def test_a_request_of_many_texts_does_not_stop_a_later_one(small: None, limit: int) -> None:
    """It waits for a slice at most, not for all texts that came before it."""

    def test() -> None:
        for begun in range(1, 24, 2):
            run = Run(24)
            many = endless(run, [4, 5], limit, texts=60)
            while run.turns < begun:
                run.turn()
            short = endless(run, [6, 7], 2)
            longer = endless(run, [6, 8], 6)  # its second slice does not go behind them either
            while short.pieces.empty():
                run.turn()
            assert run.turns - begun <= continuous.SLICE + 2
            while longer.pieces.empty():
                run.turn()
            assert run.turns - begun <= 2 * continuous.SLICE + 6
            assert many.pieces.qsize() < 60

    in_loop(test)


def test_a_request_of_many_texts_ends_while_others_come(small: None) -> None:
    """More of them than there is room for, in each turn."""

    def test() -> None:
        run, short = Run(24), []
        many = endless(run, [4, 5], 11, texts=10)
        while many.pieces.qsize() < 10:
            short += [endless(run, [6, 7], 3) for _ in range(2)]
            run.turn()
            assert run.turns < 400
        assert any(job.pieces.empty() for job in short)  # there was no room
        assert [len(ids) for ids in outputs_of(many)] == [11] * 10

    in_loop(test)


@pytest.mark.parametrize("is_long_first", [True, False])
def test_nobody_starves_where_the_cache_is_full(small: None, is_long_first: bool) -> None:
    """A long output, and short ones that come in each turn, more than there is room for."""

    def test() -> None:
        run, jobs = Run(30), []
        if is_long_first:
            long = endless(run, [5] * 10, 30)
        for _ in range(12):
            jobs.append(endless(run, [6, 7], 3))
        if not is_long_first:
            long = endless(run, [5] * 10, 30)
        while long.pieces.empty():
            jobs.append(endless(run, [6, 7], 3))
            run.turn()
            assert run.turns < 2_000
        count = len(jobs)
        while run.turn():
            pass
        assert len(ids_of(long)) == 30
        assert all(len(ids_of(job)) == 3 for job in jobs)
        assert count > 30

    in_loop(test)


def test_a_paused_output_goes_on_with_its_random_numbers(small: None) -> None:
    def test() -> None:
        run, options = Run(24), {"temperature": 1.5, "seed": 3, "min_new_tokens": 16}
        jobs = [run.ask([5, 6 + number], 16, **options) for number in range(4)]
        was_paused = False
        while run.turn():
            was_paused |= any(output.ids and not output.runs for output in run.batch.queue)
        assert was_paused
        for number, job in enumerate(jobs):
            [alone] = MODEL.generate([[5, 6 + number]], beam_size=1, max_new_tokens=16, **options)
            assert ids_of(job) == alone

    in_loop(test)
