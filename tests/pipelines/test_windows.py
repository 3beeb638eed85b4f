"""Prompts in windows: outputs in order, and no more windows in memory than were started."""

from collections.abc import Callable, Iterator
from itertools import chain, count, islice, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.backends.base import Settings
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.generation import Hypothesis
from heedful.pipelines import Limits, ModelMetadata, Translator
from heedful.pipelines.batching import by_length, split_among

WORDS = [f"w{number}" for number in range(40)]
TOKENIZER = train_tokenizer([" ".join(WORDS)], kind="word")


class Echo:
    """A backend that returns its source, and records its calls."""

    name, precision = "echo", "float32"
    settings = Settings(1, 2)
    capabilities = frozenset[str]()

    stop_rule = None

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.early: list[int] = []  # rows of each batch that are reported before its end
        self.waiting = 0

    def unsupported_reasons(self, rows: Any, request: Any) -> list[str]:
        return []

    def outputs(self, rows: list[list[int]], request: Any) -> list[list[Hypothesis]]:
        return self.submit(rows, request)()

    def submit(self, rows: list[list[int]], request: Any) -> Callable[[], list[list[Hypothesis]]]:
        self.batches.append(len(rows))
        self.waiting += 1

        def wait() -> list[list[Hypothesis]]:
            self.waiting -= 1
            results = [[Hypothesis(row, 0.0, True, 0.0, [])] for row in rows]
            for index in self.early:
                if request.on_output and index < len(rows):
                    request.on_output(index, results[index])
            return results

        return wait


@pytest.fixture
def model() -> Translator:
    config = SimpleNamespace(max_length=32)
    metadata = ModelMetadata("vaswani2017", "translation", limits=Limits())
    translator = Translator(None, config, metadata, TOKENIZER, TOKENIZER)
    translator.backend = Echo()
    return translator


def sentence(number: int) -> str:
    return " ".join(WORDS[(number + place) % 40] for place in range(1 + number % 7))


@pytest.mark.parametrize("early", [[], [1], [2, 0]])
def test_every_output_is_reported_once_with_its_index(model: Translator, early: list[int]) -> None:
    model.backend.early = early
    prompts = [sentence(3), "", *map(sentence, [5, 1, 9, 4, 6, 2])]
    reported: list[tuple[int, Any]] = []

    def on_output(index: int, outputs: Any) -> None:
        reported.append((index, outputs))

    windows = [prompts[:5], prompts[5:]]
    outputs = [*model.iterate_generations(windows, on_output=on_output, batch_tokens=24)]
    assert len(model.backend.batches) > len(windows)
    assert sorted(index for index, _ in reported) == list(range(len(prompts)))
    assert [outputs for _, outputs in sorted(reported, key=lambda pair: pair[0])] == outputs
    assert outputs[0][0].text == prompts[0]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_endless_stream_is_processed_by_windows(model: Translator, ahead: int) -> None:
    drawn = 0

    def windows() -> Iterator[list[str]]:
        nonlocal drawn
        for first in count(0, 8):
            drawn += 1
            yield [sentence(number) for number in range(first, first + 8)]

    most = 0
    for number, outputs in enumerate(
        islice(model.iterate_generations(windows(), ahead=ahead), 800)
    ):
        assert outputs[0].text == sentence(number)
        most = max(most, drawn - number // 8)
    assert most == ahead + 1


def test_the_next_window_is_submitted_before_the_first_is_complete(model: Translator) -> None:
    backend: Any = model.backend
    actual = model.iterate_generations(iter([["w1"], ["w2"], ["w3"]]), ahead=1)
    next(actual)
    assert (backend.batches, backend.waiting) == ([1, 1], 1)


def test_started_windows_are_returned_before_a_later_one_fails(model: Translator) -> None:
    long = " ".join(["w1"] * 40)
    actual = model.iterate_generations(iter([["w1", "w2"], ["w3", long]]), ahead=1)
    assert [next(actual)[0].text for _ in range(2)] == ["w1", "w2"]
    with pytest.raises(UserError, match=r"line 4 has 41 tokens"):
        next(actual)


def test_batches_are_of_similar_length_and_as_large_as_the_backend_was_measured(
    model: Translator,
) -> None:
    backend: Any = model.backend
    texts = [" ".join(["w1"] * (1 + number % 9)) for number in range(90)]
    model.generate(texts, beam_size=1, return_details=True)
    assert backend.batches == [45, 45]  # one for each worker
    backend.batches.clear()
    backend.settings = Settings(1, 2, batch_tokens=40)
    model.generate(texts, beam_size=1, return_details=True)
    assert sum(backend.batches) == 90
    assert backend.batches[:2] == [4, 4]  # of ten tokens, the end counted
    backend.batches.clear()
    model.generate(texts, beam_size=1, batch_tokens=20, return_details=True)
    assert backend.batches[0] == 2  # set by the caller


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=60),
    budget=st.integers(1, 50),
    workers=st.integers(1, 4),
)
def test_workers_have_batches_of_equal_work_within_the_budget(
    lengths: list[int], budget: int, workers: int
) -> None:
    rows = [[5] * length for length in lengths]
    whole = [*by_length(rows, budget, workers)]
    batches = split_among(workers, whole)
    assert sorted(chain(*batches)) == [row for row, length in enumerate(lengths) if length]
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
    for batch in whole:
        parts = split_among(workers, [batch])
        assert len(parts) == min(workers, len(batch))
        for one, other in pairwise(parts):  # each row of the other is no longer than one of these
            assert len(one) - len(other) in (0, 1)
            assert all(lengths[a] >= lengths[b] for a, b in zip(one, other, strict=False))
            assert all(lengths[b] >= lengths[a] for a, b in zip(one[1:], other, strict=False))
