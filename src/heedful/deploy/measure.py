"""Measures the speed of a model with each candidate backend and setting."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, product
from typing import Any

from heedful.backends.base import Backend
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.hardware import cores
from heedful.backends.manifest import BackendChoice, Use
from heedful.backends.torch.eager import Eager
from heedful.deploy.prove import cut_ids
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.text_generation import Generator
from heedful.progress import track

_NUM_SINGLE, _NUM_BATCHED = 12, 256  # texts measured one at a time, and in one call
_NUM_SEQUENTIAL = 64  # texts in one call of a backend without workers
# For each round of timing, the share of the best median rate that a setting must reach.
SURVIVAL_SHARES = (0.7, 0.7, 0.9, 0.9, 0.9, 0.9)
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
    # Graphs take no shortlist.
    has_graphs = ("compiled", "onnxruntime")
    to_measure += [c for c in conversions if c[0] not in has_graphs or not model.shortlist]
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
) -> list[tuple[Use, BackendChoice, float]]:
    """Each setting with its median tokens per second, sorted by use, the fastest first.

    Successive halving: the settings are measured in rounds, and a setting stays only while its
    median reaches its round's share of the best median (`SURVIVAL_SHARES`).
    """
    count = min(_NUM_SINGLE, len(texts))
    singles = [[texts[number * len(texts) // count]] for number in range(count)]
    rates: dict[tuple[Use, BackendChoice], list[float]] = {setting: [] for setting in settings}
    medians: dict[tuple[Use, BackendChoice], float] = {}
    remaining, num_rounds = settings, len(SURVIVAL_SHARES)
    with track("measuring", len(settings) * num_rounds) as advance:
        for number, share in enumerate(SURVIVAL_SHARES, 1):
            for use, choice in remaining:
                size = _NUM_BATCHED if _has_workers(choice.backend, model) else _NUM_SEQUENTIAL
                parts = [texts[first : first + size] for first in range(0, len(texts), size)]
                with _using_backend(model, open_choice(choice)):
                    _rate(model, singles[:1], choice)  # the first call of a backend is slower
                    rate = _rate(model, singles if use == "latency" else parts, choice)
                rates[use, choice].append(rate)
                medians[use, choice] = statistics.median(rates[use, choice])
                advance(1)
            best = {
                use: max(medians[setting] for setting in remaining if setting[0] == use)
                for use, _ in remaining
            }
            survivors = [s for s in remaining if medians[s] >= share * best[s[0]]]
            advance((len(remaining) - len(survivors)) * (num_rounds - number))
            remaining = survivors
    rates_by_setting = [(use, choice, medians[use, choice]) for use, choice in settings]
    return sorted(rates_by_setting, key=lambda row: (row[0], -row[2]))


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
