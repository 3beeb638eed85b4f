"""Batches read ahead by a thread: the same in the same order, errors where they are asked for."""

import threading
import time
from collections.abc import Iterator

import pytest

from heedful.training.step import STEPS_AHEAD, read_ahead


class Source:
    """Numbers, with a record of those that were made and by which threads."""

    def __init__(self, count: int = 100, fails_at: int | None = None) -> None:
        self.made: list[int] = []
        self.threads = set[int]()
        self._count, self._fails_at = count, fails_at

    def __iter__(self) -> Iterator[int]:
        for number in range(self._count):
            self.made.append(number)
            self.threads.add(threading.get_ident())
            if number == self._fails_at:
                raise ValueError("no batch")
            yield number

    def has_thread(self) -> bool:
        return bool(self.threads & {thread.ident for thread in threading.enumerate()})


def wait_for(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 5 seconds")


def test_results_are_those_of_the_items_one_by_one_and_few_are_ahead() -> None:
    source = Source()
    read = read_ahead(iter(source))
    for number in range(20):
        assert next(read) == number
        most = number + 1 + STEPS_AHEAD + 1
        if number in (0, 9):
            wait_for(lambda most=most: len(source.made) == most)
        assert len(source.made) <= most
    assert threading.get_ident() not in source.threads
    read.close()


def test_the_thread_ends_when_the_reader_is_closed() -> None:
    source = Source()
    read = read_ahead(iter(source))
    assert next(read) == 0
    read.close()
    wait_for(lambda: not source.has_thread())
    assert len(source.made) < 10


def test_an_error_is_raised_at_its_place_and_the_thread_ends() -> None:
    source = Source(fails_at=2)
    read = read_ahead(iter(source))
    assert next(read) == 0
    wait_for(lambda: 2 in source.made)
    assert next(read) == 1
    with pytest.raises(ValueError, match="no batch"):
        next(read)
    wait_for(lambda: not source.has_thread())


def test_the_thread_ends_with_the_last_item() -> None:
    source = Source(count=3)
    read = read_ahead(iter(source))
    assert [*read] == source.made == [0, 1, 2]
    wait_for(lambda: not source.has_thread())
