"""Saved encoder-only models: mask filling, text classification and embedding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from heedful.data.encoding import truncate_pair
from heedful.data.labels import values_text
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.option_ranges import plain_number
from heedful.options import TooLong
from heedful.pipelines.base import SavedModel, Texts
from heedful.pipelines.batching import in_batches, map_batches
from heedful.pipelines.inputs import EmptyTextError, NoMaskError, as_batch, check_strings
from heedful.pipelines.keywords import ClassificationKeywords

MASK_NAMES = ("<mask>", "[MASK]")
_MOST_LOGITS = 2**26  # of a batch of `fill`: they are of all positions


@dataclass(frozen=True)
class Filling:
    """One candidate for a mask: the token, its probability, and the text with the mask filled."""

    token: str
    probability: float
    text: str
    id: int


@dataclass(frozen=True)
class Classification:
    """The prediction of a classifier for a text; blank and NaN for a text that was left out.

    Attributes:
        label: the most probable class; blank for a regression.
        probability: that of `label`.
        probabilities: of each class; empty for a regression. Those of a multi-label classifier are
            independent of each other.
        labels: the classes of probability 0.5 or more of a multi-label classifier; else `label`.
        values: the outputs of a regression by name; else empty.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    labels: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """The probabilities, or the values of a regression."""
        return self.values or self.probabilities

    @property
    def text(self) -> str:
        """The labels, separated by commas, or the values of a regression, by tabs."""
        if self.values:
            return values_text(self.values.values())
        return ",".join(self.labels)

    @property
    def is_finite(self) -> bool:
        """False if the net computed NaN or infinity, and for a text that was left out."""
        return all(map(math.isfinite, self.scores.values()))


class Encoder(SavedModel):
    """An encoder-only net, `net(ids, lengths)`, with its tokenizer."""

    kind = "encoder"

    def encode_pairs(
        self, texts: Texts, others: Sequence[str] | None, too_long: TooLong
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Ids of each text or pair of texts, and token types: 0 for the first, 1 for the second.

        A pair that is too long is cut as in training: the longer side first.

        Raises:
            UserError: an empty text; one that is too long, where `too_long` is "error".
        """
        rows, types = self._encode_pairs(texts, others, too_long)
        for number, row in enumerate(rows, 1):
            if not row:
                raise EmptyTextError(f"text {number} is empty")
        self.check_lengths(rows, "text" if others is None else "pair", too_long)
        return rows, types

    def _encode_pairs(
        self, texts: Texts, others: Sequence[str] | None, too_long: TooLong
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        if others is None:
            return self.rows_of(texts, Tokenizer.add_special_tokens), None
        check_strings(others, "pairs")
        if len(others) != len(texts):
            raise UserError(f"{len(texts)} texts but {len(others)} second texts")
        tokenizer, longest = self.tokenizer, self.config.max_length
        num_special = len(tokenizer.add_special_tokens([], []))
        rows, types = [], []
        for text, other in zip(texts, others, strict=True):
            if not isinstance(text, str):
                raise UserError("pairs must be texts, not ids")
            first: Sequence[int] = tokenizer.encode(text)
            second: Sequence[int] = tokenizer.encode(other)
            if len(first) + len(second) + num_special > longest and too_long == "truncate":
                first, second = truncate_pair(first, second, longest - num_special)
                self.num_truncated += 1
            rows.append(tokenizer.add_special_tokens(first, second))
            after = len(second) + len(tokenizer.suffix_ids)
            # BERT counts the separator to the first text; RoBERTa has no types.
            types.append([0] * (len(rows[-1]) - after) + [1] * after)
        return rows, types


class MaskedLanguageModel(Encoder):
    """A masked language model: predicts the tokens of masked positions.

    >>> import heedful
    >>> model = heedful.load_masked_language_model("runs/masked")
    >>> [fillings] = model.fill("A dog <mask> home.")
    >>> fillings[0].probability >= fillings[1].probability
    True
    """

    kind = "masked language model"

    @property
    def mask_token(self) -> str:
        """The mask in a text."""
        return self.tokenizer.tokens([self._mask_id()])[0]

    @overload
    def fill(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self,
        texts: str,
        *,
        top_k: int = ...,
        too_long: TooLong = ...,
        batch_tokens: int | None = ...,
        progress: Callable[[int], None] | None = ...,
    ) -> list[list[Filling]]: ...

    @overload
    def fill(
        self,
        texts: Sequence[str],
        *,
        top_k: int = ...,
        too_long: TooLong = ...,
        batch_tokens: int | None = ...,
        progress: Callable[[int], None] | None = ...,
    ) -> list[list[list[Filling]]]: ...

    def fill(
        self,
        texts: str | Sequence[str],
        *,
        top_k: int = 5,
        too_long: TooLong = "error",
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Any:
        """The `top_k` most probable tokens for each mask of a text, or of each text of a list.

        Masks are written `<mask>` or `[MASK]`. Each is filled while the others stay masked. The
        result is empty for a text that was left out.

        Args:
            batch_tokens: padded tokens of a batch; fewer where the logits would take more than
                256 MiB.
            progress: called with the number of texts of each batch.

        Raises:
            UserError: no mask in a text; a text that is longer than the net allows.
        """
        top_k = plain_number(top_k)
        if not isinstance(top_k, int) or top_k < 1:
            raise UserError(f"top_k must be at least 1, not {top_k!r}")
        rows = self.masked_rows(texts, too_long)
        results: list[list[list[Filling]]] = [[] for _ in rows]
        batches = map_batches(
            self.backend_with("logits"),
            rows,
            lambda indices: self.fill_rows([rows[index] for index in indices], top_k),
            batch_tokens,
            max(1, _MOST_LOGITS // self.tokenizer.vocab_size),
        )
        for indices, fillings in batches:
            for index, own in zip(indices, fillings, strict=True):
                results[index] = own
            if progress is not None:
                progress(len(indices))
        return results[0] if isinstance(texts, str) else results

    def masked_rows(
        self, texts: str | Sequence[str], too_long: TooLong = "error"
    ) -> list[list[int]]:
        """Ids of texts with at least one mask; empty if left out. Errors as in `fill`."""
        is_single = isinstance(texts, str)
        batch = [texts] if isinstance(texts, str) else texts
        check_strings(batch, "texts")
        rows = [self.ids_with_masks(text) for text in batch]
        self.check_lengths(rows, "text", too_long)
        for number, ids in enumerate(rows, 1):
            if ids and self._mask_id() not in ids:
                raise NoMaskError("the text" if is_single else f"text {number}", self.mask_token)
        return rows

    def fill_rows(self, rows: list[list[int]], top_k: int) -> list[list[list[Filling]]]:
        """`fill` for the ids of several texts, in one batch."""
        return [
            self._fillings(ids, logits, top_k)
            for ids, logits in zip(rows, self.backend_with("logits").logits(rows), strict=True)
        ]

    def _fillings(
        self, ids: list[int], logits: NDArray[np.float32], top_k: int
    ) -> list[list[Filling]]:
        mask_id = self._mask_id()
        positions = [position for position, token in enumerate(ids) if token == mask_id]
        logits[:, sorted(self.tokenizer.special_ids)] = -np.inf
        probabilities = _softmax(logits[positions])
        best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
        fillings = []
        for position, distribution, tokens in zip(
            positions, probabilities, best.tolist(), strict=True
        ):
            candidates = []
            for token in tokens:
                text = self._with_masks([*ids[:position], token, *ids[position + 1 :]])
                word = self.tokenizer.decode([token]).strip()
                candidates.append(Filling(word, float(distribution[token]), text, token))
            fillings.append(candidates)
        return fillings

    def ids_with_masks(self, text: str) -> list[int]:
        """Ids of a text with masks.

        The pieces between masks are encoded one by one, unless the tokenizer recognizes special
        tokens in a text, and so the spaces around them.
        """
        text = text.replace("\0", " ")
        for name in (*MASK_NAMES, self.mask_token):
            text = text.replace(name, "\0")
        if not self.tokenizer.specials_are_text:
            text = text.replace("\0", self.mask_token)
        ids: list[int] = []
        for number, piece in enumerate(text.split("\0")):
            ids += [self._mask_id()] if number else []
            ids += self.tokenizer.encode(piece)
        return self.tokenizer.add_special_tokens(ids)

    def _with_masks(self, ids: list[int]) -> str:
        """The text of ids, the remaining masks included."""
        mask_id, pieces = self._mask_id(), []
        start = 0
        for end in [*(i for i, token in enumerate(ids) if token == mask_id), len(ids)]:
            pieces.append(self.tokenizer.decode(ids[start:end]))
            start = end + 1
        return f" {self.mask_token} ".join(pieces).strip()

    def _mask_id(self) -> int:
        mask_id = self.tokenizer.specials.mask_id
        if mask_id is None:
            raise UserError("this model's tokenizer has no mask")
        return mask_id


class Classifier(Encoder):
    """A text classifier.

    >>> import heedful
    >>> model = heedful.load_classifier("runs/labels")
    >>> outputs = model.classify(["A warm film.", "A dull one."])
    >>> outputs[0].label in model.labels and outputs[0].probability >= 0.5
    True
    """

    kind = "classifier"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits."""
        return self.metadata.labels or tuple(map(str, range(self.config.num_labels)))

    @overload
    def classify(  # type: ignore[overload-overlap]  # a text is a sequence, too
        self, texts: str, **options: Unpack[ClassificationKeywords]
    ) -> Classification: ...

    @overload
    def classify(
        self, texts: Texts, **options: Unpack[ClassificationKeywords]
    ) -> list[Classification]: ...

    def classify(self, texts: str | Texts, **options: Any) -> Classification | list[Classification]:
        """The most probable class of a text, or of each text of a list; see `class_logits`.

        Probabilities are a softmax of the logits; a multi-label classifier has a sigmoid of each,
        and a regression the logits themselves as values (`metadata.problem`). With one text,
        `pairs` is one text too.

        Example: `model.classify("a warm and funny film").label`
        """
        batch, is_single = as_batch(texts)
        if is_single and isinstance(options.get("pairs"), str):
            options["pairs"] = [options["pairs"]]
        classifications = self._classifications(self.class_logits(batch, **options))
        return classifications[0] if is_single else classifications

    def classify_rows(
        self, rows: list[list[int]], types: Sequence[list[int] | None]
    ) -> list[Classification]:
        """`classify` for the ids and token types of texts (`encode_pairs`), in one batch."""
        batch_types = None if types[0] is None else [row or [] for row in types]
        logits = self.backend_with("logits").logits(rows, batch_types)
        return self._classifications(np.stack(logits))

    def _classifications(self, logits: NDArray[np.float32]) -> list[Classification]:
        problem = self.metadata.problem
        if problem == "regression":
            rows = [dict(zip(self.labels, row.tolist(), strict=True)) for row in logits]
            return [Classification("", math.nan, {}, values=values) for values in rows]
        is_multi = problem == "multi_label"
        return [
            self._classification(row, is_multi)
            for row in (_sigmoid(logits) if is_multi else _softmax(logits))
        ]

    def _classification(self, row: NDArray[np.float32], is_multi: bool) -> Classification:
        """The classification by the probabilities (C) of a text."""
        probabilities = dict(zip(self.labels, row.tolist(), strict=True))
        if np.isnan(row).any():  # the text was left out
            return Classification("", math.nan, probabilities)
        label = self.labels[int(row.argmax())]
        labels = [name for name, value in probabilities.items() if value >= 0.5]
        return Classification(
            label, probabilities[label], probabilities, tuple(labels) if is_multi else (label,)
        )

    def class_logits(
        self,
        texts: Texts,
        *,
        pairs: Sequence[str] | None = None,
        too_long: TooLong = "truncate",
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Logits (N, C) of each text; NaN for a text that was left out.

        Args:
            pairs: the second text of each pair, for models trained on pairs.
            too_long: as in `Options`.
        """
        rows, types = self.encode_pairs(texts, pairs, too_long)
        backend = self.backend_with("logits")

        def batch_logits(indices: list[int]) -> list[np.ndarray]:
            batch_types = None if types is None else [types[index] for index in indices]
            return backend.logits([rows[index] for index in indices], batch_types)

        logits = in_batches(backend, rows, len(self.labels), batch_logits, batch_tokens, progress)
        logits[[not row for row in rows]] = np.nan
        return logits


class Embedder(Encoder):
    """An encoder without a head: `embed` returns one vector per text.

    >>> import heedful
    >>> model = heedful.load("runs/vectors")
    >>> dog, cat = model.embed(["A dog.", "A cat."], normalize=True)
    >>> similarity = float(dog @ cat)
    """

    kind = "embedder"


def _sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return ((1 + np.tanh(logits / 2)) / 2).astype(np.float32)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
