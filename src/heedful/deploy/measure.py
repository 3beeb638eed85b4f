"""Timing a model under each backend and setting that may be the fastest."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, product
from typing import Any

from heedful.backends.base import Backend
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.hardware import cores
from heedful.backends.manifest import Choice, Use
from heedful.backends.torch.eager import Eager
from heedful.deploy.prove import cut_ids
from heedful.pipelines.base import SavedModel
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.text_generation import Generator
from heedful.progress import track

_SINGLES, _TOGETHER = 12, 256  # texts that are timed one at a time, and together
_ALONE = 64  # texts together where nothing runs side by side
# For each round of timing, the share of the best median rate that a setting must reach.
SURVIVAL_SHARES = (0.7, 0.7, 0.9, 0.9, 0.9, 0.9)
_SHORTEST, _LONGEST = 0.1, 2.0  # seconds of one: again from the first text, and no further text
_BATCHES = (8, 16, 32, 64)  # prompts of mean length that are worked on together
_NEW_TOKENS = 32  # that a language model goes on with

Form = tuple[str, str]  # backend and precision


def candidates(
    model: SavedModel,
    forms: Collection[Form],
    texts: Sequence[str],
    backends: Sequence[str],
    threads: Sequence[int],
    uses: Sequence[Use],
) -> list[tuple[Use, Choice]]:
    """Settings worth timing: one worker for one text, all cores in some way for many.

    Args:
        forms: converted ones; the net itself is a candidate where `backends` names it.
    """
    writes = isinstance(model, Generator)
    beams = model.options().rows if isinstance(model, Generator) else 1
    more = _NEW_TOKENS if isinstance(model, LanguageModel) else 0
    lengths = [len(row) + more for row in _rows(model, texts[:_TOGETHER])]
    mean = sum(lengths) / len(lengths)
    budgets = [max(1, round(mean * size * beams)) for size in _BATCHES]
    tried = [(Eager.name, "float32")] if Eager.name in backends else []
    # Compiled graphs take no shortlist.
    tried += [form for form in forms if form[0] != "compiled" or not model.shortlist]
    found: list[tuple[Use, Choice]] = []
    for (backend, precision), count in product(tried, sorted(set(threads) or {1, cores()})):
        is_alone = backend != CTranslate2.name
        workers = 1 if is_alone else max(1, cores() // count)
        if "latency" in uses:
            found.append(("latency", Choice(backend, precision, count)))
        if "throughput" in uses:
            sizes = budgets[-1:] if is_alone and writes else budgets
            chosen = [Choice(backend, precision, count, workers, each) for each in sizes]
            found += [("throughput", choice) for choice in chosen]
    return found


def measure(
    model: SavedModel,
    texts: Sequence[str],
    settings: list[tuple[Use, Choice]],
    open_choice: Callable[[Choice], Backend],
) -> list[tuple[Use, Choice, float]]:
    """Each setting with its median tokens a second, of a use the best first.

    The settings are timed in turn for some rounds, and `SURVIVAL_SHARES` ends the slow ones.
    """
    count = min(_SINGLES, len(texts))
    singles = [[texts[number * len(texts) // count]] for number in range(count)]
    rates: dict[tuple[Use, Choice], list[float]] = {each: [] for each in settings}
    medians: dict[tuple[Use, Choice], float] = {}
    left, num_rounds = settings, len(SURVIVAL_SHARES)
    with track("measuring", len(settings) * num_rounds) as advance:
        for number, share in enumerate(SURVIVAL_SHARES, 1):
            for use, choice in left:
                size = _TOGETHER if choice.backend == CTranslate2.name else _ALONE
                parts = [texts[first : first + size] for first in range(0, len(texts), size)]
                with _run_by(model, open_choice(choice)):
                    _rate(model, singles[:1], choice)  # the first call of a backend is no measure
                    rate = _rate(model, singles if use == "latency" else parts, choice)
                rates[use, choice].append(rate)
                medians[use, choice] = statistics.median(rates[use, choice])
                advance(1)
            best = {use: max(medians[each] for each in left if each[0] == use) for use, _ in left}
            kept = [each for each in left if medians[each] >= share * best[each[0]]]
            advance((len(left) - len(kept)) * (num_rounds - number))  # not timed any more
            left = kept
    found = [(use, choice, medians[use, choice]) for use, choice in settings]
    return sorted(found, key=lambda each: (each[0], -each[2]))


@contextmanager
def _run_by(model: SavedModel, backend: Any) -> Iterator[None]:
    """Run the model by another backend inside the context."""
    before, model.backend = model.backend, backend
    try:
        yield
    finally:
        model.backend = before


def _rate(model: SavedModel, parts: Sequence[Sequence[str]], choice: Choice) -> float:
    """Tokens a second, written or read, over parts of the texts."""
    budget = {} if choice.batch_tokens is None else {"batch_tokens": choice.batch_tokens}
    options: dict[str, Any] = {**budget, "too_long": "truncate", "scores": False}
    if isinstance(model, LanguageModel):
        options["max_new_tokens"] = _NEW_TOKENS
    units, seconds, began = 0, 0.0, time.perf_counter()
    for number, part in enumerate(cycle(parts)):
        if seconds > (_SHORTEST if number >= len(parts) else _LONGEST):
            break
        if isinstance(model, Generator):
            found = model.generations(_rows(model, part), **options)
            units += sum(len(outputs[0].ids) for outputs in found)
        else:
            rows = _rows(model, part)
            units += sum(map(len, rows))
            read: Any = model.classify if isinstance(model, Classifier) else model.vectors
            read(rows, **budget)
        seconds = time.perf_counter() - began
    return units / seconds


def _rows(model: SavedModel, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, cut to what the model reads; a language model goes on from their beginnings."""
    rows = cut_ids(model, texts)
    if not isinstance(model, LanguageModel):
        return rows
    longest = max(1, min(_NEW_TOKENS, model.config.max_length // 2))
    return [row[:longest] for row in rows]
