"""Encoders opened for use: filling in masked words, naming a text's class, embedding texts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heedful.data.encoding import truncate_pair
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.options import TooLong
from heedful.pipelines.base import SavedModel, Texts, in_batches

MASK_NAMES = ("<mask>", "[MASK]")


@dataclass(frozen=True)
class Filling:
    """One candidate for a masked place: the token, how likely it is, and the text with it."""

    token: str
    probability: float
    text: str
    id: int


@dataclass(frozen=True)
class Classification:
    """A text's likeliest class, and how likely each one is.

    A text that is left out has a blank label, and probabilities of NaN.
    """

    label: str
    probability: float
    probabilities: dict[str, float]


class Encoder(SavedModel):
    """A net of one stack in which every token sees all others; its states embed texts.

    Attributes:
        net: the bare module, `net(ids, lengths)`.
    """

    kind = "encoder"

    def encode_pairs(
        self, texts: Texts, others: Sequence[str] | None, too_long: TooLong
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        """Ids of each text (and the one that goes with it), and which of the two each is of.

        A pair that is too long is cut as in training: the longer of the two gives way.

        Raises:
            UserError: an empty text; one that is too long, where `too_long` is "error".
        """
        rows, types = self._encode_pairs(texts, others, too_long)
        for number, row in enumerate(rows, 1):
            if not row:
                raise UserError(f"text {number} is empty")
        self.check_lengths(rows, "text" if others is None else "pair", too_long)
        return rows, types

    def _encode_pairs(
        self, texts: Texts, others: Sequence[str] | None, too_long: TooLong
    ) -> tuple[list[list[int]], list[list[int]] | None]:
        if others is None:
            return self.rows_of(texts, Tokenizer.add_special_tokens), None
        if len(others) != len(texts):
            raise UserError(f"{len(texts)} texts but {len(others)} to go with them")
        tokenizer, longest = self.tokenizer, self.config.max_length
        num_special = len(tokenizer.add_special_tokens([], []))
        rows, types = [], []
        for text, other in zip(texts, others, strict=True):
            if not isinstance(text, str):
                raise UserError("pairs are given as text, not as ids")
            first, second = tokenizer.encode(text), tokenizer.encode(other)
            if len(first) + len(second) + num_special > longest and too_long == "truncate":
                first, second = truncate_pair(first, second, longest - num_special)
                self.num_truncated += 1
            rows.append(tokenizer.add_special_tokens(first, second))
            after = len(second) + len(tokenizer.suffix_ids)
            # BERT counts the mark between the texts to the first, and RoBERTa has no types.
            types.append([0] * (len(rows[-1]) - after) + [1] * after)
        return rows, types


class MaskedLanguageModel(Encoder):
    """Says which word belongs where one is masked."""

    kind = "masked language model"

    @property
    def mask_token(self) -> str:
        """What stands for a masked word in a text."""
        return self.tokenizer.tokens([self._mask_id()])[0]

    def fill(
        self, text: str, *, top_k: int = 5, too_long: TooLong = "error"
    ) -> list[list[Filling]]:
        """The `top_k` likeliest tokens for each masked place, in the text's order.

        Masks are written `<mask>` or `[MASK]`. Each place is filled with the others still masked.

        No places where the text is left out.

        Raises:
            UserError: no mask in the text; a text that is longer than the net allows.
        """
        if top_k < 1:
            raise UserError(f"top_k must be at least 1, not {top_k}")
        ids = self._masked_ids(text)
        self.check_lengths([ids], "text", too_long)
        if not ids:
            return []
        mask_id = self._mask_id()
        places = [place for place, token in enumerate(ids) if token == mask_id]
        if not places:
            raise UserError(f"the text holds no {self.mask_token}: say which word is to be filled")
        [logits] = self.backend_with("logits").logits([ids])
        logits[:, sorted(self.tokenizer.special_ids)] = -np.inf
        chances = _softmax(logits[places])
        best = np.argsort(-chances, axis=-1, kind="stable")[:, :top_k]
        fillings = []
        for place, of_place, tokens in zip(places, chances, best.tolist(), strict=True):
            row = []
            for token in tokens:
                chance = float(of_place[token])
                text = self._shown([*ids[:place], token, *ids[place + 1 :]])
                row.append(Filling(self.tokenizer.decode([token]).strip(), chance, text, token))
            fillings.append(row)
        return fillings

    def _masked_ids(self, text: str) -> list[int]:
        """Ids of a text with masks; the pieces between masks are encoded on their own, but by a
        tokenizer that finds specials in a text, which knows what space belongs to them.
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

    def _shown(self, ids: list[int]) -> str:
        """The text of some ids, with what is still masked."""
        mask_id, pieces = self._mask_id(), []
        start = 0
        for place in [*(p for p, token in enumerate(ids) if token == mask_id), len(ids)]:
            pieces.append(self.tokenizer.decode(ids[start:place]))
            start = place + 1
        return f" {self.mask_token} ".join(pieces).strip()

    def _mask_id(self) -> int:
        mask_id = self.tokenizer.specials.mask_id
        if mask_id is None:
            raise UserError("this model's tokenizer has no mask")
        return mask_id


class Classifier(Encoder):
    """Names the class of a text."""

    kind = "classifier"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits."""
        return self.card.labels or tuple(map(str, range(self.config.num_labels)))

    def classify(self, texts: Texts, **options: Any) -> list[Classification]:
        """The likeliest class of each text, with the probabilities of all; see `class_logits`."""
        found = []
        for row in _softmax(self.class_logits(texts, **options)):
            chances = dict(zip(self.labels, row.tolist(), strict=True))
            is_left_out = bool(np.isnan(row).any())
            label = "" if is_left_out else self.labels[int(row.argmax())]
            found.append(Classification(label, chances.get(label, math.nan), chances))
        return found

    def class_logits(
        self,
        texts: Texts,
        *,
        pairs: Sequence[str] | None = None,
        too_long: TooLong = "truncate",
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """(N, C): what the head says of each text, in order; NaN for a text that is left out.

        Args:
            pairs: for each text the one that goes with it, for models trained on pairs.
            too_long: what to do with a text longer than the net allows.
        """
        rows, types = self.encode_pairs(texts, pairs, too_long)
        runner = self.backend_with("logits")

        def logits(chosen: list[int]) -> list[np.ndarray]:
            kinds = None if types is None else [types[row] for row in chosen]
            return runner.logits([rows[row] for row in chosen], kinds)

        found = in_batches(runner, rows, len(self.labels), logits, batch_tokens, progress)
        found[[not row for row in rows]] = np.nan
        return found


class Embedder(Encoder):
    """Gives the states of a text: `embed`, and `net` for one vector a token."""

    kind = "embedder"


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
