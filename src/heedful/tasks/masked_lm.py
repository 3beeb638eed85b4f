"""Masked language modeling (Devlin et al. 2019)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Int64, Integer
from pydantic import Field, model_validator
from torch import Tensor

from heedful import task_keys
from heedful.data.collate import Batch, collate_texts
from heedful.data.columns import Sequences
from heedful.data.encoding import TextColumn
from heedful.data.plans import pack_rows
from heedful.data.rows import Rows
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import target_states, token_metrics
from heedful.evaluation.sharing import from_main
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.losses import LossSum
from heedful.pipelines import MaskedLanguageModel
from heedful.tasks.inputs import (
    SomeRows,
    check_derived_keys,
    encoder_keys,
    joint_tokenizer,
    raw_text_data,
)
from heedful.tasks.run_data import Inherited, RawData, RunData
from heedful.tasks.scoring import (
    FinalScores,
    corpus_losses,
    held_out_loss,
    make_evaluation,
    write_scores,
)
from heedful.tasks.task import HELD_OUT_SEED, MASK, ObjectiveSettings, Task
from heedful.training.events import EvaluationResult, Sample


class Masking(ObjectiveSettings):
    """BERT's masking; the defaults are the paper's (Devlin et al. 2019, sec. 3.1, appendix A).

    With `pack`, a row is a concatenation of whole texts, each with its special tokens, without a
    mask between them (FULL-SENTENCES of Liu et al. 2019, sec. 4.2).
    """

    mlm_probability: float = Field(
        0.15,
        gt=0,
        le=1,
        description="Share of the tokens, special ones excluded, selected for prediction.",
    )
    mask_share: float = Field(
        0.8, ge=0, le=1, description="Share of the selected tokens replaced by the mask token."
    )
    random_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the selected tokens replaced by random ones; the rest stays.",
    )
    whole_word: bool = Field(False, description="Select all tokens of a word or none.")
    pack: bool = Field(False, description="Fill each row up to data.max_length with several texts.")

    @model_validator(mode="after")
    def _shares(self) -> "Masking":
        # The tolerance is for rounding errors of sums such as 0.1 + 0.9.
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError(
                f"mask_share {self.mask_share} and random_share {self.random_share} sum to"
                " more than 1; lower one of them"
            )
        return self


class MaskedLm(Task):
    """Masked language modeling, with other masks in every epoch.

    Texts are read from `data.train.text`, split by `data.text_unit`; or from `data.train.file`,
    a file of labeled texts whose labels are ignored, so that a model can be pre-trained on the data
    of its classification task. The two texts of a pair are separate rows.
    """

    objective_class = Masking
    recipe_keys = task_keys.MASKED_LM
    row_columns: ClassVar[tuple[str, ...]] = ("text",)

    def check(self) -> None:
        super().check()
        check_derived_keys(self.recipe)
        if self.objective.pack and self.recipe.data.corpora:
            raise UserError(
                "objective.pack puts texts of several corpora into one row, so data.corpora has no "
                "weights; leave one of them out"
            )

    def raw_data(self) -> RawData:
        return raw_text_data(self.recipe)

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        return joint_tokenizer(self.recipe, sample, extra_specials=(MASK,), template="both")

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        mask_id_of(tokenizers[0])
        return {"text": TextColumn(tokenizers[0], ("text",))}

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: Inherited
    ) -> dict[str, Any]:
        return super().encode_options(split, labels, inherited) | {"drop_unknown": True}

    def split_size(self, data: RunData, split: str) -> int:
        """The number of rows."""
        return len(self.rows(data, split))

    def rows(self, data: RunData, split: str) -> Sequences:
        """The rows of a split: single texts, or with `pack` concatenated texts."""
        texts = data.ids(split)
        return _packed(texts, self.recipe.data.max_length) if self.objective.pack else texts

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        return encoder_keys(self.recipe, data, name, "mlm")

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        return (self.rows(data, "train").lengths_of(rows),)

    def num_rows(self, data: RunData) -> int:
        return len(self.rows(data, "train"))

    def collate(self, data: RunData, item: Int64[np.ndarray, " n"]) -> Batch:
        return masked_batch(
            self.rows(data, "train"),
            item,
            data.tokenizer,
            masking=self.objective,
            seed=self.recipe.training.seed,
            epoch=data.epoch,
        )

    def evaluate(self, model: MaskedLanguageModel, data: RunData) -> EvaluationResult:
        """Loss and accuracy at masked positions, the same at every evaluation."""
        sums, by_corpus = self._split_sums(model, data, "valid")
        return make_evaluation(self.recipe, sums, self._samples(model, data), corpora=by_corpus)

    def compute_final_scores(
        self, model: MaskedLanguageModel, data: RunData, out: Path
    ) -> FinalScores:
        """Loss without label smoothing, perplexity and accuracy at the masked positions."""
        sums, by_corpus = self._split_sums(model, data, data.final)
        mean = token_metrics(sums)
        scores = {"accuracy": mean.pop("token_accuracy"), **mean, **corpus_losses(by_corpus)}
        counts = {"num_texts": len(data.splits[data.final]), "num_masked": sums.tokens}
        return write_scores(data, out, counts, scores)

    def _held_out(
        self, data: RunData, rows: Sequences, indices: Int64[np.ndarray, " B"], masking: Masking
    ) -> Batch:
        """A batch of held-out rows, masked in the same way at every evaluation."""
        return masked_batch(rows, indices, data.tokenizer, masking=masking, seed=HELD_OUT_SEED)

    def _split_sums(
        self, model: MaskedLanguageModel, data: RunData, name: str
    ) -> tuple[LossSum, dict[str, float]]:
        rows = self.rows(data, name)
        return held_out_loss(
            model.net,
            self.loss,
            lambda indices: self._held_out(data, rows, indices, self.objective),
            rows.lengths,
            corpora=data.splits[name].corpora,
            label_smoothing=self.recipe.training.label_smoothing,
        )

    @from_main
    @torch.inference_mode()
    def _samples(self, model: MaskedLanguageModel, data: RunData) -> list[Sample]:
        """The first validation texts with all selected tokens masked, and with predictions."""
        tokenizer, texts, keys = data.tokenizer, data.ids("valid"), self.objective
        first = np.arange(min(self.recipe.evaluation.num_samples, len(texts)))
        if not len(first):
            return []
        masking = keys.model_copy(update={"mask_share": 1.0, "random_share": 0.0})
        batch = self._held_out(data, texts, first, masking).to(model.device)
        filled = fill_masks(model.net, batch, tokenizer.special_ids)
        rows = zip(batch.tokens.ids.tolist(), filled.tolist(), texts.lengths.tolist(), strict=False)
        return [
            Sample(
                decode_with_specials(tokenizer, ids[:length]),
                tokenizer.decode(texts[index].tolist()),
                tokenizer.decode(row[:length]),
            )
            for index, (ids, row, length) in enumerate(rows)
        ]


@lru_cache(maxsize=3)  # called for every batch
def _packed(texts: Sequences, max_length: int) -> Sequences:
    """Consecutive texts concatenated to rows of at most `max_length` tokens."""
    return texts.joined(pack_rows(texts.lengths, max_length))


def fill_masks(
    net: EncoderOnly, batch: Batch, suppressed_ids: frozenset[int]
) -> Int64[Tensor, "B T"]:
    """The token ids with the most probable token, not in `suppressed_ids`, at each target."""
    assert net.head is not None
    logits = net.head(target_states(net, batch))
    logits[:, sorted(suppressed_ids)] = -torch.inf
    ids = batch.tokens.ids
    return ids.flatten().index_copy(0, batch.target_positions, logits.argmax(-1)).view_as(ids)


def masked_batch(
    rows: Sequences,
    indices: Int64[np.ndarray, " B"],
    tokenizer: Tokenizer,
    *,
    masking: Masking,
    seed: int,
    epoch: int = 0,
) -> Batch:
    """A batch of rows, with masks that depend on (seed, epoch, index of the row).

    Raises:
        UserError: a tokenizer without mask token.
    """
    batch = collate_texts(rows, indices, pad_id=tokenizer.pad_id)
    ids = batch.tokens.ids.numpy()
    inputs, selected = ids.copy(), np.zeros(ids.shape, dtype=np.bool_)
    mask_id, lengths = mask_id_of(tokenizer), batch.tokens.lengths.tolist()
    for row, index in enumerate(indices.tolist()):
        length = lengths[row]
        text = ids[row, :length]
        starts = np.array(tokenizer.word_starts(text.tolist())) if masking.whole_word else None
        inputs[row, :length], selected[row, :length] = mask_ids(
            text,
            rng=example_rng(seed, epoch, index),
            masking=masking,
            mask_id=mask_id,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            word_starts=starts,
        )
    return replace(
        batch,
        tokens=replace(batch.tokens, ids=torch.from_numpy(inputs)),
        targets=torch.from_numpy(ids[selected]),
        target_positions=torch.from_numpy(np.flatnonzero(selected)),
    )


def mask_id_of(tokenizer: Tokenizer) -> int:
    """The id of the mask token; raises UserError for a tokenizer without one."""
    if tokenizer.specials.mask_id is None:
        raise UserError(
            "this model's tokenizer has no mask token; start from a model that was trained as a"
            " masked language model"
        )
    return tokenizer.specials.mask_id


def decode_with_specials(tokenizer: Tokenizer, ids: Integer[np.ndarray, " n"] | list[int]) -> str:
    """The text of `ids` with mask tokens and sentinels, without other special tokens."""
    specials = tokenizer.specials
    visible = {*specials.sentinel_ids, specials.mask_id}
    pieces: list[str] = []
    for special, group in groupby(ids, key=lambda token: token in visible):
        run = list(group)
        pieces += tokenizer.tokens(run) if special else [tokenizer.decode(run).strip()]
    return " ".join(piece for piece in pieces if piece)


def example_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random number generator of one example in one epoch, independent of its batch.

    Each epoch has other masks, as in RoBERTa (Liu et al. 2019, sec. 4.1).
    """
    # A spawn key, because trailing zeros of a seed sequence are ignored: index 0 would have the
    # numbers of any other generator with the seed (seed, epoch).
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(epoch, index)))


def mask_ids(
    ids: Integer[np.ndarray, " n"],
    *,
    rng: np.random.Generator,
    masking: Masking,
    mask_id: int,
    vocab_size: int,
    special_ids: frozenset[int],
    word_starts: Bool[np.ndarray, " n"] | None = None,
) -> tuple[Int64[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """The token ids with some masked, and the selected positions, whose targets are their ids.

    A uniformly random set of round(`mlm_probability` x ordinary tokens) positions, at least 1, is
    selected. The size is fixed as in BERT's code (`create_masked_lm_predictions`), so that every
    text has targets; unlike there, special tokens are not counted. A text without an ordinary
    token has none.

    With `word_starts`, words in random order are selected until that number is reached or exceeded
    by the last word. BERT's code skips words that would exceed it, so that long words of short
    texts are hardly ever selected.

    Each selected token is independently masked, replaced or kept, also inside a word, as in BERT's
    code. A replacement is uniform over the ordinary ids, the original one included.

    Args:
        vocab_size: an upper bound of all ids.
        special_ids: ids that are never selected and never a replacement, like `mask_id`.
        word_starts: True at the first token of each word, for `whole_word`; None: each token is a
            word. A special token also ends a word.

    Returns:
        The ids (n,) after masking, and True (n,) at the selected positions.
    """
    special = np.array(sorted(special_ids | {mask_id}))
    assert special[-1] < vocab_size, (special, vocab_size)
    ordinary = ~np.isin(ids, special)
    starts = np.ones(len(ids), dtype=np.bool_) if word_starts is None else word_starts.copy()
    starts[1:] |= ~ordinary[:-1]
    _, word = np.unique(np.cumsum(starts)[ordinary], return_inverse=True)  # numbered from 0
    lengths = np.bincount(word)
    order = rng.permutation(len(lengths))
    num_selected = max(1, round(masking.mlm_probability * len(word)))
    num_words = int(np.searchsorted(np.cumsum(lengths[order]), num_selected)) + 1
    selected = np.zeros(len(ids), dtype=np.bool_)
    selected[ordinary] = np.isin(word, order[:num_words])
    positions = np.flatnonzero(selected)
    draws = rng.random(len(positions))
    inputs = ids.astype(np.int64)
    inputs[positions[draws < masking.mask_share]] = mask_id
    replaced = positions[
        (draws >= masking.mask_share) & (draws < masking.mask_share + masking.random_share)
    ]
    ordinals = rng.integers(vocab_size - len(special), size=len(replaced))
    # The k-th ordinary id is k plus the number of special ids below it.
    num_special = np.searchsorted(special - np.arange(len(special)), ordinals, "right")
    inputs[replaced] = ordinals + num_special
    return inputs, selected
