"""Proves on held-out texts that a conversion computes the same as the net."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heedful import extras
from heedful.backends.base import Backend
from heedful.errors import UserError
from heedful.evaluation.metrics import corpus_scores, metric_problem
from heedful.generation.outputs import Hypothesis
from heedful.pipelines.base import SavedModel
from heedful.pipelines.batching import by_length
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator

CLOSE = 1e-4  # nats per token
_BATCH_TOKENS = 8_192
_BEAM_TEXTS = 32
_CLOSE_SCORES = 1e-3  # of different outputs of beams that rank equally high
_BEAM_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stop_rule": "beam_full"},
    {"stop_rule": "beam_full", "renormalize_logits": True, "min_new_tokens": 6},
    {"stop_rule": "beam_full", "renormalize_logits": True, "no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "length_penalty": 0.5, "num_return": 2},
)
# Allowed losses: points of BLEU and of accuracy, percent of perplexity and of similarity.
TOLERANCES = {"bleu": 0.3, "accuracy": 0.3, "perplexity": 1.0, "similarity": 1.0}


@dataclass(frozen=True)
class Proof:
    """Metrics of a converted backend and of the net itself, on the same texts.

    Attributes:
        metric: bleu, perplexity, accuracy (percent) or similarity (cosine of vectors, percent).
        eager, backend: values of the metric.
        num_texts: texts of the proof.
        same: the share of outputs with equal tokens.
        same_beams: the share of equal outputs of beam searches with and without constraints; None:
            the backend runs none, or was proved before they were compared.
        difference: the largest difference of log-probabilities of given tokens, in nats; for
            encoders of logits or states.
        others: further metrics as (eager, backend): chrF, perplexity.
    """

    precision: str
    metric: str
    eager: float
    backend: float
    num_texts: int
    same: float
    difference: float
    others: dict[str, tuple[float, float]] = field(default_factory=dict)
    same_beams: float | None = None

    @property
    def loss(self) -> float:
        """The loss against the net, in the units of `TOLERANCES`; negative: a gain."""
        if self.metric == "perplexity":
            return 100 * (self.backend / self.eager - 1)
        return self.eager - self.backend

    def failure(self, tolerance: float | None = None) -> str | None:
        """The reason why the conversion is not used; None: it passed.

        In float32 outputs must be equal and numbers close; other precisions may lose `tolerance`
        (`TOLERANCES`).
        """
        if self.precision == "float32":
            if self.same < 1:
                return f"{100 * (1 - self.same):.2g}% of its outputs differ"
            if not self.difference <= CLOSE:  # NaN too
                return f"log-probabilities differ by {self.difference:.2g}, above {CLOSE:g}"
            return None
        most = TOLERANCES[self.metric] if tolerance is None else tolerance
        if not self.loss <= most:
            return (
                f"its {self.metric} is {self.backend:.4g}, that of the net {self.eager:.4g}, and "
                f"the allowed loss is {most:g}"
            )
        return None


@dataclass(frozen=True)
class _Results:
    """For each text the output of a backend, and the numbers that backends are compared by."""

    outputs: list[Any]
    numbers: list[np.ndarray]


class Prover:
    """Compares conversions of one model with the net, whose results are computed once.

    Translators translate the texts greedily and score the references (without references: the
    net's translations); language models continue the first half of each text and score the text;
    both search the first texts by beams, with the constraints that the backend supports;
    classifiers predict the classes, or values; of other encoders the mean states are compared.

    Args:
        model: opened eager.
        texts: validation texts, at least one of them not blank.
        answers: the reference or label of each text; None: without.

    Raises:
        UserError: another number of answers than of texts; answers for a classifier whose labels
            do not exclude each other.
    """

    def __init__(
        self, model: SavedModel, texts: Sequence[str], answers: Sequence[str] | None = None
    ) -> None:
        if answers is not None and len(answers) != len(texts):
            raise UserError(f"{len(texts)} validation texts but {len(answers)} answers")
        problem = model.metadata.problem
        if answers is not None and isinstance(model, Classifier) and problem != "single_label":
            raise UserError(
                f"labels of the texts are compared with one class each, but the model is a "
                f"{problem} classifier; give the texts alone"
            )
        if answers is not None and isinstance(model, Translator):
            extras.require("eval", "the proof of a backend by BLEU")
        self.model, self.answers = model, answers
        self.eager = model.eager
        self._rows = self._validation_rows(texts)
        self._targets: list[list[int]] | None = None
        outputs = self._outputs(self.eager)
        if isinstance(model, Translator):
            ends, tokenizer = set(model.end_ids()), model.tgt_tokenizer
            targets = outputs if answers is None else tokenizer.encode_batch(list(answers))
            longest = model.config.max_length - len(model.ids.decoder_start_ids)
            self._targets = [[i for i in row if i not in ends][:longest] for row in targets]
        self._by_net = _Results(outputs, self._numbers(self.eager))
        self._beams_of_net: dict[str, list[list[Hypothesis]]] = {}  # by their options

    def prove(self, backend: Backend) -> Proof:
        """The metrics of a backend and of the net on the texts."""
        results = _Results(self._outputs(backend), self._numbers(backend))
        values, net_values = self._metrics(results), self._metrics(self._by_net)
        metric = next(iter(values))
        pairs = zip(self._rows, self._by_net.outputs, results.outputs, strict=True)
        differences = zip(self._by_net.numbers, results.numbers, strict=True)
        return Proof(
            backend.precision,
            metric,
            net_values[metric],
            values[metric],
            len(self._rows),
            float(np.mean([self._is_same(*pair) for pair in pairs])),
            float(np.max([np.abs(a - b).max(initial=0) for a, b in differences])),
            {name: (net_values[name], value) for name, value in values.items() if name != metric},
            self._same_beams(backend),
        )

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Source and target ids of a translator, without EOS."""
        return [*zip(self._rows, self._targets or [], strict=True)]

    def _validation_rows(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the texts that are not blank, cut to the model's length."""
        rows = cut_ids(self.model, texts)
        if self.answers is not None:
            self.answers = [a for a, row in zip(self.answers, rows, strict=True) if row]
        return [row[: self.model.config.max_length] for row in rows if row]

    def _outputs(self, backend: Any) -> list[Any]:
        """New tokens of greedy decoding, or classes."""
        model = self.model
        if isinstance(model, Generator):
            rows = self._prompts(self._rows)
            # Also of a model whose default is to sample.
            request = model.request(rows, beam_size=1, temperature=0, **self._limit)
            results = self._in_batches(
                rows, lambda batch: backend.outputs(_select(rows, batch), request.select(batch))
            )
            # Where a backend has no output the net runs in its place.
            return [
                outputs[0].ids if outputs else self._by_net.outputs[number]
                for number, outputs in enumerate(results)
            ]
        if isinstance(model, Classifier) and model.metadata.problem == "multi_label":
            return [tuple((row >= 0).tolist()) for row in self._numbers(backend)]
        if isinstance(model, Classifier) and model.metadata.problem == "single_label":
            return [int(row.argmax()) for row in self._numbers(backend)]
        return [None] * len(self._rows)

    @property
    def _limit(self) -> dict[str, Any]:
        """The limit of a language model's new tokens, few enough for the net's positions."""
        if not isinstance(self.model, LanguageModel):
            return {}
        return {"max_new_tokens": max(1, min(32, self.model.config.max_length // 2))}

    def _prompts(self, rows: list[list[int]]) -> list[list[int]]:
        """Sources, or the first halves of a language model's texts."""
        if not isinstance(self.model, LanguageModel):
            return rows
        return [row[: max(1, len(row) // 2)] for row in rows]

    def _same_beams(self, backend: Any) -> float | None:
        """The share of equal outputs, of the beam searches that a backend supports."""
        model = self.model
        if not isinstance(model, Generator):
            return None
        rows = self._prompts(self._rows[:_BEAM_TEXTS])
        same: list[bool] = []
        for options in _BEAM_OPTIONS:
            least = options.get("min_new_tokens", 0)
            settled = model.options(**self._limit)
            fits = [row for row in rows if least <= model.length_limit(row, settled)]
            request = model.request(fits, beam_size=4, **options, **self._limit)
            if not fits or backend.unsupported_reasons(fits, request):
                continue
            by_net = self._beams_of_net.setdefault(str(options), [])
            by_net += [] if by_net else self.eager.outputs(fits, request)
            pairs = zip(by_net, backend.outputs(fits, request), strict=True)
            same += [_are_same_beams(*pair) for pair in pairs if pair[1]]
        return float(np.mean(same)) if same else None

    def _numbers(self, backend: Any) -> list[np.ndarray]:
        """Log-probabilities of given tokens, logits of classes, or mean states."""
        model, rows, targets = self.model, self._rows, self._targets
        if isinstance(model, Generator):
            request = model.request(rows)

            def log_probs(batch: list[int]) -> list[np.ndarray]:
                batch_targets = None if targets is None else _select(targets, batch)
                return backend.log_probs(_select(rows, batch), batch_targets, request.select(batch))

            return self._in_batches(rows, log_probs)
        if isinstance(model, Classifier):
            return self._in_batches(rows, lambda batch: backend.logits(_select(rows, batch)))
        states = self._in_batches(rows, lambda batch: backend.states(_select(rows, batch)))
        return [row_states.mean(0) for row_states in states]

    def _in_batches(
        self, rows: list[list[int]], run: Callable[[list[int]], list[Any]]
    ) -> list[Any]:
        """The results of `run(indices of a batch)` in the order of the rows."""
        results: list[Any] = [None] * len(rows)
        for indices in by_length(rows, _BATCH_TOKENS):
            for index, result in zip(indices, run(indices), strict=True):
                results[index] = result
        return results

    def _metrics(self, results: _Results) -> dict[str, float]:
        """The metrics, the deciding one first."""
        model, answers = self.model, self.answers
        if isinstance(model, Classifier) and model.metadata.problem == "regression":
            return {"similarity": 100 * _explained(self._by_net.numbers, results.numbers)}
        if isinstance(model, Classifier):
            classes = self._by_net.outputs
            if answers is not None:
                classes = [model.labels.index(label) for label in answers]
            return {
                "accuracy": 100 * float(np.mean(np.array(results.outputs) == np.array(classes)))
            }
        if not isinstance(model, Generator):
            pairs = zip(self._by_net.numbers, results.numbers, strict=True)
            return {"similarity": 100 * float(np.mean([_cosine(*pair) for pair in pairs]))}
        log_probs = np.concatenate(results.numbers)
        mean = float(log_probs.mean()) if log_probs.size else 0.0
        values = {"perplexity": math.exp(-mean)}
        if isinstance(model, Translator) and answers is not None:
            lines = model.tgt_tokenizer.decode_batch(results.outputs)
            language = model.metadata.tgt_language
            scores = corpus_scores(
                lines,
                list(answers),
                tgt_language=language,
                metrics=[m for m in ("bleu", "chrf") if metric_problem(m, language) is None],
                lowercase=model.tgt_tokenizer.lowercases,
            )
            values = scores.values() | values
        return values

    def _is_same(self, row: list[int], expected: Any, output: Any) -> bool:
        """Outputs are equal, or first differ in two tokens that the net finds equally likely."""
        if expected == output or not isinstance(self.model, Generator):
            return bool(expected == output)
        pairs = enumerate(zip(expected, output, strict=False))
        length = next((index + 1 for index, (a, b) in pairs if a != b), None)
        if length is None:
            return False
        log_probs = [self._last_log_prob(row, ids[:length]) for ids in (expected, output)]
        return abs(log_probs[0] - log_probs[1]) < CLOSE

    def _last_log_prob(self, row: list[int], ids: list[int]) -> float:
        """The net's log-probability of the last of some new tokens."""
        assert isinstance(self.model, Generator)
        if self._targets is None:
            half = row[: max(1, len(row) // 2)]
            [log_probs] = self.eager.log_probs([half + ids], None, self.model.request([half]))
            return float(log_probs[-1])
        [log_probs] = self.eager.log_probs([row], [ids], self.model.request([row]))
        return float(log_probs[-2])


def _are_same_beams(expected: list[Hypothesis], actual: list[Hypothesis]) -> bool:
    """Outputs are equal with close scores, or different ones have nearly the same score."""
    if len(expected) != len(actual):
        return False
    return all(
        abs(one.score - other.score) < (CLOSE if one.ids == other.ids else _CLOSE_SCORES)
        for one, other in zip(expected, actual, strict=True)
    )


def cut_ids(model: SavedModel, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts; those of encoders and of sources are cut to the model's length."""
    if isinstance(model, Generator):
        return model.prompt_ids(texts, model.options(too_long="truncate"))
    return model.encode(texts, too_long="truncate")


def _select(rows: Sequence[Any], indices: list[int]) -> list[Any]:
    return [rows[index] for index in indices]


def _explained(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The share of the variance of values that others explain; 1 if they are equal.

    Of values without variance it is the share of their squares.
    """
    one, other = np.stack(values), np.stack(others)
    error, spread = float(((one - other) ** 2).sum()), float(((one - one.mean(0)) ** 2).sum())
    return 1 - error / (spread or float((one**2).sum()) or 1.0)


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
