"""The proof that a converted backend gives what the net gives, on held-out texts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heedful.backends.base import Backend
from heedful.errors import UserError
from heedful.evaluation.metrics import corpus_scores
from heedful.pipelines.base import SavedModel, by_length
from heedful.pipelines.encoders import Classifier
from heedful.pipelines.language_model import LanguageModel
from heedful.pipelines.text_generation import Generator
from heedful.pipelines.translation import Translator

CLOSE = 1e-4  # nats a token
_BATCH_TOKENS = 8_192
# Allowed losses: points of BLEU and of accuracy, per cent of perplexity and of likeness.
TOLERANCES = {"bleu": 0.3, "accuracy": 0.3, "perplexity": 1.0, "likeness": 1.0}


@dataclass(frozen=True)
class Proof:
    """Metrics of a converted backend and of the net itself, on the same texts.

    Attributes:
        metric: bleu, perplexity, accuracy (per cent) or likeness (cosine of vectors, per cent).
        eager, backend: its values.
        others: further metrics, as (eager, backend): chrF, perplexity.
        num_texts: that it was proven on.
        same: the share of outputs that are the same to the token.
        difference: the largest of log-probabilities (of encoders: logits or states) of given texts,
            in nats a token.
    """

    precision: str
    metric: str
    eager: float
    backend: float
    num_texts: int
    same: float
    difference: float
    others: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The loss against the net, in the units of `TOLERANCES`; below 0: it is better."""
        if self.metric == "perplexity":
            return 100 * (self.backend / self.eager - 1)
        return self.eager - self.backend

    def fails(self, tolerance: float | None = None) -> str | None:
        """Why the form is not to be used, if it is not.

        One in float32 must do what the net does; another may lose `tolerance` (`TOLERANCES`).
        """
        if self.precision == "float32":
            if self.same < 1:
                return f"it writes {100 * (1 - self.same):.2g}% of the outputs otherwise"
            if self.difference > CLOSE:
                return f"log-probabilities differ by {self.difference:.2g}, above {CLOSE:g}"
            return None
        most = TOLERANCES[self.metric] if tolerance is None else tolerance
        if self.loss > most:
            return (
                f"it has {self.metric} {self.backend:.4g} where the net has {self.eager:.4g}, and "
                f"may lose {most:g}"
            )
        return None


@dataclass(frozen=True)
class _Found:
    """For each text the output of a backend, and numbers to compare backends by."""

    outputs: list[Any]
    numbers: list[np.ndarray]


class Prover:
    """Holds forms of one model against the net itself, whose own answers are worked out once.

    A translator translates the texts greedily, and scores the references (without them: what the
    net wrote); a language model goes on with the first half of each and scores it; a classifier
    names the classes; of others the vectors are compared.

    Args:
        model: with its net; its backend does not matter.
        texts: validation texts, not all blank.
        answers: for each text its reference or its label; default: none.

    Raises:
        UserError: not as many answers as texts.
    """

    def __init__(
        self, model: SavedModel, texts: Sequence[str], answers: Sequence[str] | None = None
    ) -> None:
        if answers is not None and len(answers) != len(texts):
            raise UserError(f"{len(texts)} validation texts but {len(answers)} answers")
        self.model, self.answers = model, answers
        self.eager = model.eager
        self._rows = self._read(texts)
        self._targets: list[list[int]] | None = None
        written = self._outputs(self.eager)
        if isinstance(model, Translator):
            ends, tokenizer = set(model.end_ids()), model.tgt_tokenizer
            given = written if answers is None else tokenizer.encode_batch(list(answers))
            longest = model.config.max_length - len(model.ids.start)
            self._targets = [[i for i in row if i not in ends][:longest] for row in given]
        self._by_net = _Found(written, self._numbers(self.eager))

    def prove(self, backend: Backend) -> Proof:
        """The metrics of a backend on the texts, beside those of the net."""
        found = _Found(self._outputs(backend), self._numbers(backend))
        values, own = self._values(found), self._values(self._by_net)
        metric = next(iter(values))
        pairs = zip(self._rows, self._by_net.outputs, found.outputs, strict=True)
        differences = zip(self._by_net.numbers, found.numbers, strict=True)
        return Proof(
            backend.precision,
            metric,
            own[metric],
            values[metric],
            len(self._rows),
            float(np.mean([self._is_same(*each) for each in pairs])),
            max(float(np.abs(a - b).max(initial=0)) for a, b in differences),
            {name: (own[name], value) for name, value in values.items() if name != metric},
        )

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """A translator's source ids with the target ids that are scored, without ends."""
        return [*zip(self._rows, self._targets or [], strict=True)]

    def _read(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of the texts that are not blank, cut to what the model reads."""
        rows = cut_ids(self.model, texts)
        if self.answers is not None:
            self.answers = [a for a, row in zip(self.answers, rows, strict=True) if row]
        return [row[: self.model.config.max_length] for row in rows if row]

    def _outputs(self, backend: Any) -> list[Any]:
        """New tokens by greedy decoding, or classes."""
        model = self.model
        if isinstance(model, Generator):
            rows, new = self._rows, {}
            if isinstance(model, LanguageModel):
                rows = [row[: max(1, len(row) // 2)] for row in rows]
                # As many as surely fit.
                new = {"max_new_tokens": max(1, min(32, model.config.max_length // 2))}
            request = model.request(rows, beam_size=1, **new)
            found = self._in_batches(
                rows, lambda p: backend.outputs(_of(rows, p), request.select(p))
            )
            return [outputs[0].ids for outputs in found]
        if isinstance(model, Classifier):
            return [int(row.argmax()) for row in self._numbers(backend)]
        return [None] * len(self._rows)

    def _numbers(self, backend: Any) -> list[np.ndarray]:
        """Log-probabilities of given tokens, logits of classes, or vectors."""
        model, rows, targets = self.model, self._rows, self._targets
        if isinstance(model, Generator):
            request = model.request(rows)

            def scored(p: list[int]) -> list[np.ndarray]:
                told = None if targets is None else _of(targets, p)
                return backend.log_probs(_of(rows, p), told, request.select(p))

            return self._in_batches(rows, scored)
        if isinstance(model, Classifier):
            return self._in_batches(rows, lambda p: backend.logits(_of(rows, p)))
        states = self._in_batches(rows, lambda p: backend.states(_of(rows, p)))
        return [each.mean(0) for each in states]

    def _in_batches(
        self, rows: list[list[int]], answer: Callable[[list[int]], list[Any]]
    ) -> list[Any]:
        found: list[Any] = [None] * len(rows)
        for places in by_length(rows, _BATCH_TOKENS):
            for place, each in zip(places, answer(places), strict=True):
                found[place] = each
        return found

    def _values(self, found: _Found) -> dict[str, float]:
        """The metrics, the one that decides first."""
        model, answers = self.model, self.answers
        if isinstance(model, Classifier):
            wanted = self._by_net.outputs
            if answers is not None:
                wanted = [model.labels.index(label) for label in answers]
            return {"accuracy": 100 * float(np.mean(np.array(found.outputs) == np.array(wanted)))}
        if not isinstance(model, Generator):
            pairs = zip(self._by_net.numbers, found.numbers, strict=True)
            return {"likeness": 100 * float(np.mean([_cosine(*pair) for pair in pairs]))}
        told = np.concatenate(found.numbers)
        values = {"perplexity": math.exp(-float(told.mean())) if told.size else 1.0}
        if isinstance(model, Translator) and answers is not None:
            lines = model.tgt_tokenizer.decode_batch(found.outputs)
            scores = corpus_scores(
                lines,
                list(answers),
                trg_lang=model.card.tgt_language,
                metrics=("bleu", "chrf"),
                lowercase=model.tgt_tokenizer.lowercases,
            )
            values = scores.values() | values
        return values

    def _is_same(self, row: list[int], ours: Any, theirs: Any) -> bool:
        """Whether outputs are equal, or part where the net itself finds two tokens equal."""
        if ours == theirs or not isinstance(self.model, Generator):
            return bool(ours == theirs)
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)  # noqa: B905
        if place is None:
            return False
        one, other = (self._last_log_prob(row, each[: place + 1]) for each in (ours, theirs))
        return abs(one - other) < CLOSE

    def _last_log_prob(self, row: list[int], ids: list[int]) -> float:
        """The net's log-probability of the last of some new tokens."""
        assert isinstance(self.model, Generator)
        if self._targets is None:
            half = row[: max(1, len(row) // 2)]
            [found] = self.eager.log_probs([half + ids], None, self.model.request([half]))
            return float(found[-1])
        [found] = self.eager.log_probs([row], [ids], self.model.request([row]))
        return float(found[-2])


def cut_ids(model: SavedModel, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts; those of an encoder and of sources cut to what the model reads."""
    if isinstance(model, Generator):
        return model.prompt_ids(texts, model.options(too_long="truncate"))
    return model.encode(texts, too_long="truncate")


def _of(rows: Sequence[Any], places: list[int]) -> list[Any]:
    return [rows[place] for place in places]


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))
