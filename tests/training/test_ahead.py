"""Work ahead in a thread: the same results in the same order, errors where they are asked for."""

import threading
import time

import pytest

from heedful.training import ahead
from heedful.training.ahead import Ahead, Position


class Source:
    """Batches of epochs of three, with a record of what was loaded and by which thread."""

    def __init__(self, fails_at: Position | None = None) -> None:
        self.loaded: list[Position] = []
        self.threads = set[int]()
        self.fails_at = fails_at

    def __call__(self, position: Position) -> tuple[str, Position]:
        self.loaded.append(position)
        self.threads.add(threading.get_ident())
        if position == self.fails_at:
            raise ValueError("no batch")
        epoch, batch = position
        return f"{epoch}.{batch}", (epoch, batch + 1) if batch < 2 else (epoch + 1, 0)


def wait_for(condition) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 5 seconds")


def test_results_are_those_of_calls_one_by_one_and_few_are_ahead() -> None:
    source, plain = Source(), Source()
    read, position = Ahead(source), (0, 0)
    for number in range(20):
        expected = plain(position)
        assert read(position) == expected
        position = expected[1]
        most = number + 1 + ahead.STEPS_AHEAD + 1
        if number in (0, 9):
            wait_for(lambda most=most: len(source.loaded) == most)
        assert len(source.loaded) <= most
    assert source.loaded[:20] == plain.loaded
    assert threading.get_ident() not in source.threads
    read.close()


def test_another_position_starts_again_there() -> None:
    source = Source()
    read = Ahead(source)
    assert read((0, 0)) == ("0.0", (0, 1))
    assert read((5, 1)) == ("5.1", (5, 2))
    assert read((5, 2)) == ("5.2", (6, 0))
    read.close()
    assert read((6, 0)) == ("6.0", (6, 1))
    read.close()
    wait_for(lambda: threading.active_count() == 1 or not source.threads & alive())


def alive() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate()}


def test_an_error_is_raised_at_its_position_and_the_thread_ends() -> None:
    source = Source(fails_at=(0, 2))
    read = Ahead(source)
    assert read((0, 0))[0] == "0.0"
    wait_for(lambda: (0, 2) in source.loaded)
    assert read((0, 1))[0] == "0.1"
    with pytest.raises(ValueError, match="no batch"):
        read((0, 2))
    wait_for(lambda: not source.threads & alive())
    source.fails_at = None
    assert read((0, 2)) == ("0.2", (1, 0))
    read.close()


def test_epochs_after_the_last_one_are_not_loaded_ahead() -> None:
    source = Source()
    read, position = Ahead(source, num_epochs=2), (0, 0)
    while position[0] < 2:
        position = read(position)[1]
    wait_for(lambda: not source.threads & alive())
    assert source.loaded == [(epoch, batch) for epoch in (0, 1) for batch in range(3)]
    assert read((2, 0)) == ("2.0", (2, 1))  # where it is asked for
    assert read((2, 1)) == ("2.1", (2, 2))
