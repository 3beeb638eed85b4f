"""Measures the speed of a model with each candidate backend and setting."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from typing import Any

from heedful.backends.base import Backend
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.manifest import BackendChoice, Use
from heedful.backends.torch.eager import Eager
from heedful.deploy.prove import cut_ids
from heedful.deploy.rounds import SURVIVAL_SHARES, Outcome, find_fastest
from heedful.hardware import cores
from heedful.openmp import seconds_of_others
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.text_generation import Generator
from heedful.progress import track

_NUM_SINGLE, _NUM_BATCHED = 12, 256  # texts measured one at a time, and in one call
_NUM_SEQUENTIAL = 64  # texts in one call of a backend without workers
_MIN_SECONDS, _MAX_SECONDS = 0.1, 2.0  # least and most seconds of a measurement
_BATCH_SIZES = (8, 16, 32, 64)  # prompts of mean length in a batch
_NEW_TOKENS = 32  # of a language model

Conversion = tuple[str, str]  # backend and precision


def candidates(
    model: SavedModel,
    conversions: Collection[Conversion],
    texts: Sequence[str],
    backends: Sequence[str],
    threads: Sequence[int],
    uses: Sequence[Use],
) -> list[tuple[Use, BackendChoice]]:
    """Settings to measure: one worker for latency, workers on all cores for throughput.

    Args:
        conversions: candidates; the net itself is one where `backends` names it.
    """
    is_generator = isinstance(model, Generator)
    beams = model.options().rows if isinstance(model, Generator) else 1
    num_new = _NEW_TOKENS if isinstance(model, LanguageModel) else 0
    lengths = [len(row) + num_new for row in _rows(model, texts[:_NUM_BATCHED])]
    mean = sum(lengths) / len(lengths)
    budgets = [max(1, round(mean * size * beams)) for size in _BATCH_SIZES]
    to_measure = [(Eager.name, "float32")] if Eager.name in backends else []
    # Compiled graphs take no shortlist.
    to_measure += [c for c in conversions if c[0] != "compiled" or not model.shortlist]
    choices: list[tuple[Use, BackendChoice]] = []
    for (backend, precision), count in product(to_measure, sorted(set(threads) or {1, cores()})):
        has_workers = _has_workers(backend, model)
        workers = max(1, cores() // count) if has_workers else 1
        if "latency" in uses:
            choices.append(("latency", BackendChoice(backend, precision, count)))
        if "throughput" in uses:
            sizes = budgets[-1:] if is_generator and not has_workers else budgets
            for size in sizes:
                choice = BackendChoice(backend, precision, count, workers, size)
                choices.append(("throughput", choice))
    return choices


def _has_workers(backend: str, model: SavedModel) -> bool:
    """The backend runs batches side by side: CTranslate2, and the graphs of an encoder."""
    return backend == CTranslate2.name or (
        backend == "compiled" and not isinstance(model, Generator)
    )


def measure(
    model: SavedModel,
    texts: Sequence[str],
    settings: list[tuple[Use, BackendChoice]],
    open_choice: Callable[[BackendChoice], Backend],
) -> tuple[dict[Use, Outcome[BackendChoice]], float]:
    """Each use with the tokens per second of its settings, the fastest first, and the number of
    cores that other programs used meanwhile; 0 where it is unknown."""
    count = min(_NUM_SINGLE, len(texts))
    singles = [[texts[number * len(texts) // count]] for number in range(count)]

    def rate(use: Use, choice: BackendChoice) -> float:
        size = _NUM_BATCHED if _has_workers(choice.backend, model) else _NUM_SEQUENTIAL
        parts = [texts[first : first + size] for first in range(0, len(texts), size)]
        with _using_backend(model, open_choice(choice)):
            _rate(model, singles[:1], choice)  # the first call of a backend is slower
            return _rate(model, singles if use == "latency" else parts, choice)

    began, used = time.monotonic(), seconds_of_others()
    with track("measuring", len(settings) * (1 + len(SURVIVAL_SHARES))) as advance:
        outcomes = {
            use: find_fastest(
                [choice for other, choice in settings if other == use], partial(rate, use), advance
            )
            for use in dict.fromkeys(use for use, _ in settings)
        }
    used = (seconds_of_others() - used) / (time.monotonic() - began)
    return outcomes, max(0.0, used)


@contextmanager
def _using_backend(model: SavedModel, backend: Any) -> Iterator[None]:
    """Run the model with another backend inside the context."""
    before, model.backend = model.backend, backend
    try:
        yield
    finally:
        model.backend = before


def _rate(model: SavedModel, parts: Sequence[Sequence[str]], choice: BackendChoice) -> float:
    """Tokens per second, generated or encoded, over parts of the texts."""
    budget = {} if choice.batch_tokens is None else {"batch_tokens": choice.batch_tokens}
    options: dict[str, Any] = {**budget, "too_long": "truncate", "scores": False}
    if isinstance(model, LanguageModel):
        options["max_new_tokens"] = _NEW_TOKENS
    num_tokens, seconds, began = 0, 0.0, time.perf_counter()
    for number, part in enumerate(cycle(parts)):
        if seconds > (_MIN_SECONDS if number >= len(parts) else _MAX_SECONDS):
            break
        if isinstance(model, Generator):
            generations = model.generate(_rows(model, part), **options, return_details=True)
            num_tokens += sum(len(outputs[0].ids) for outputs in generations)
        else:
            rows = _rows(model, part)
            num_tokens += sum(map(len, rows))
            encode: Any = model.classify if isinstance(model, Classifier) else model.vectors
            encode(rows, **budget)
        seconds = time.perf_counter() - began
    return num_tokens / seconds


def _rows(model: SavedModel, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, cut to the model's length; of a language model the prompts alone."""
    rows = cut_ids(model, texts)
    if not isinstance(model, LanguageModel):
        return rows
    longest = max(1, min(_NEW_TOKENS, model.config.max_length // 2))
    return [row[:longest] for row in rows]
