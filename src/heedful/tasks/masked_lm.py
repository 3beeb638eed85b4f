"""Learning words from the text around them: rows of texts with some tokens hidden."""

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
from heedful.evaluation.likelihood import token_metrics
from heedful.evaluation.target_scores import target_states
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.losses import LossSum
from heedful.pipelines import MaskedLanguageModel
from heedful.tasks.inputs import joint_tokenizer, plan_training, read_text_data
from heedful.tasks.net_keys import check_derived_keys, encoder_keys
from heedful.tasks.run_data import Data, InheritedParts, PlannedRows, RawData
from heedful.tasks.scoring import FinalScores, held_out_loss, make_evaluation, write_scores
from heedful.tasks.task import HELD_OUT_SEED, MASK, ObjectiveSettings, Task
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation


class Masking(ObjectiveSettings):
    """BERT's masking and its numbers (Devlin et al. 2019, sec. 3.1 and appendix A).

    With `pack` the texts of a row follow each other, all of them whole and each in its own special
    tokens (FULL-SENTENCES of Liu et al. 2019, sec. 4.2); they see each other.
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
        # The room is for sums such as 0.1 + 0.9, which need not be exact.
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError(
                f"mask_share {self.mask_share} and random_share {self.random_share} make more"
                " than 1; lower one of them"
            )
        return self


class MaskedLm(Task):
    """Texts, of which some tokens are hidden anew in every epoch.

    Texts come from `data.train.text`, cut by `data.text_unit`; or from `data.train.file`, a file of
    labelled texts (TSV or JSONL) of which the texts alone are read, so that a model can be
    pre-trained on what it is to classify later. Of pairs both texts are taken, each for itself.
    """

    objective_class = Masking
    recipe_keys = task_keys.MASKED_LM
    row_columns: ClassVar[tuple[str, ...]] = ("text",)

    def check(self) -> None:
        super().check()
        check_derived_keys(self.recipe)

    def read_raw_data(self) -> RawData:
        return read_text_data(self.recipe)

    def train_tokenizers(self, train: Rows) -> tuple[Tokenizer, Tokenizer]:
        return joint_tokenizer(self.recipe, train, extra_specials=(MASK,), template="both")

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        mask_id_of(tokenizers[0])
        return {"text": TextColumn(tokenizers[0], ("text",))}

    def encode_options(self, split: str, raw: RawData, inherited: InheritedParts) -> dict[str, Any]:
        return super().encode_options(split, raw, inherited) | {"drop_unknown": True}

    def split_size(self, data: Data, split: str) -> int:
        """Rows of batches."""
        return len(self.rows(data, split))

    def rows(self, data: Data, split: str) -> Sequences:
        """The rows of batches: a text each, or with `pack` as many as fit."""
        texts = data.ids(split)
        return _packed(texts, self.recipe.data.max_length) if self.objective.pack else texts

    def model_keys(self, data: Data | None, name: str) -> dict[str, object]:
        return encoder_keys(self.recipe, data, name, "mlm")

    def plan_epoch(self, data: Data, epoch: int) -> Sequence[PlannedRows]:
        batches = plan_training(self.recipe, epoch, *self.row_lengths(data))
        return [PlannedRows(epoch, indices) for indices in batches]

    def row_lengths(self, data: Data) -> tuple[Int64[np.ndarray, " N"], ...]:
        return (self.rows(data, "train").lengths,)

    def collate(self, data: Data, item: PlannedRows) -> Batch:
        seed = self.recipe.training.seed
        return masked_batch(
            self.rows(data, "train"), item, data.tokenizer, masking=self.objective, seed=seed
        )

    def evaluate(self, model: MaskedLanguageModel, data: Data) -> Evaluation:
        """Loss and accuracy at places of the held-out rows that are always the same."""
        return make_evaluation(
            self.recipe, self._split_sums(model, data, "valid"), self._samples(model, data)
        )

    def compute_final_scores(
        self, model: MaskedLanguageModel, data: Data, out: Path
    ) -> FinalScores:
        """Loss (without label smoothing), perplexity and accuracy at the hidden tokens."""
        found = self._split_sums(model, data, data.final)
        mean = token_metrics(found)
        scores = {"accuracy": mean.pop("token_accuracy"), **mean}
        counts = {"num_texts": len(data.splits[data.final]), "num_masked": found.tokens}
        return write_scores(data, out, counts, scores)

    def _held_out(
        self, data: Data, rows: Sequences, indices: Int64[np.ndarray, " B"], masking: Masking
    ) -> Batch:
        item = PlannedRows(0, indices)
        return masked_batch(rows, item, data.tokenizer, masking=masking, seed=HELD_OUT_SEED)

    def _split_sums(self, model: MaskedLanguageModel, data: Data, name: str) -> LossSum:
        rows = self.rows(data, name)
        return held_out_loss(
            model.net,
            self.loss,
            lambda indices: self._held_out(data, rows, indices, self.objective),
            rows.lengths,
            label_smoothing=self.recipe.training.label_smoothing,
        )

    @torch.inference_mode()
    def _samples(self, model: MaskedLanguageModel, data: Data) -> list[Sample]:
        """The first held-out texts with all that is selected masked, and as the model fills it."""
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


@lru_cache(maxsize=3)  # asked for with every batch
def _packed(texts: Sequences, max_length: int) -> Sequences:
    return Sequences(texts.ids, texts.offsets[pack_rows(texts.lengths, max_length)])


def fill_masks(net: EncoderOnly, batch: Batch, never: frozenset[int]) -> Int64[Tensor, "B T"]:
    """The texts with the likeliest token at each selected place, none of those in `never`."""
    assert net.head is not None
    logits = net.head(target_states(net, batch))
    logits[:, sorted(never)] = -torch.inf
    ids = batch.tokens.ids
    return ids.flatten().index_copy(0, batch.target_positions, logits.argmax(-1)).view_as(ids)


def masked_batch(
    rows: Sequences,
    item: PlannedRows,
    tokenizer: Tokenizer,
    *,
    masking: Masking,
    seed: int,
) -> Batch:
    """Some rows, each masked by what is drawn from (seed, epoch, its own index) alone.

    Raises:
        UserError: the tokenizer has no mask.
    """
    batch = collate_texts(rows, item.indices, pad_id=tokenizer.pad_id)
    ids = batch.tokens.ids.numpy()
    hidden, selected = ids.copy(), np.zeros(ids.shape, dtype=np.bool_)
    mask_id = mask_id_of(tokenizer)
    for row, index in enumerate(item.indices.tolist()):
        length = int(rows.lengths[index])
        text = ids[row, :length]
        starts = np.array(tokenizer.word_starts(text.tolist())) if masking.whole_word else None
        hidden[row, :length], selected[row, :length] = mask_ids(
            text,
            rng=example_rng(seed, item.epoch, index),
            masking=masking,
            mask_id=mask_id,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_ids,
            word_starts=starts,
        )
    return replace(
        batch,
        tokens=replace(batch.tokens, ids=torch.from_numpy(hidden)),
        targets=torch.from_numpy(ids[selected]),
        target_positions=torch.from_numpy(np.flatnonzero(selected)),
    )


def mask_id_of(tokenizer: Tokenizer) -> int:
    """The id that stands for a hidden token; raises UserError where the tokenizer has none."""
    if tokenizer.specials.mask_id is None:
        raise UserError(
            "this model's tokenizer has no mask, so none of its words can be hidden; start from a"
            " model that was trained as a masked language model"
        )
    return tokenizer.specials.mask_id


def decode_with_specials(tokenizer: Tokenizer, ids: Integer[np.ndarray, " n"] | list[int]) -> str:
    """A text with the names of its masks and sentinels; other specials are left out."""
    specials = tokenizer.specials
    named = {*specials.sentinel_ids, specials.mask_id}
    pieces: list[str] = []
    for special, group in groupby(ids, key=lambda token: token in named):
        run = list(group)
        pieces += tokenizer.tokens(run) if special else [tokenizer.decode(run).strip()]
    return " ".join(piece for piece in pieces if piece)


def example_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The randomness of one example in one epoch, whatever batch the example comes in.

    A new epoch masks the same text anew, as RoBERTa does (Liu et al. 2019, sec. 4.1).
    """
    # A spawn key: as parts of the seed, trailing zeros would not count, and index 0 would share
    # its numbers with everything else that is drawn from (seed, epoch).
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
    """The text with some tokens hidden, and which: the model has to say `ids[selected]`.

    Selected are round(`mlm_probability` x ordinary tokens), at least 1, each set of that size as
    likely as any other. The number is not left to chance because BERT's authors fix it as well
    (`create_masked_lm_predictions`), so that every text has something to learn from and batches
    weigh alike; they also count the specials, which would make it depend on the frame of a text.
    A text without an ordinary token has nothing selected.

    With `word_starts`, words in a random order are selected until that number is reached. It is
    exceeded by less than a word, because to skip the words that are too long for what is left,
    as the authors do, would hardly ever mask a long word of a short text.

    Each selected token is masked, replaced or kept independently of the others (as the authors
    do, also inside a word). A replacement is uniform over the ordinary ids, the original included.

    Args:
        vocab_size: ids are below it.
        special_ids: never selected, and never a replacement; so is `mask_id`.
        word_starts: where words begin, for `whole_word`; None: each token is a word. A special
            token ends a word too.
    """
    special = np.array(sorted(special_ids | {mask_id}))
    assert special[-1] < vocab_size, (special, vocab_size)
    ordinary = ~np.isin(ids, special)
    starts = np.ones(len(ids), dtype=np.bool_) if word_starts is None else word_starts.copy()
    starts[1:] |= ~ordinary[:-1]
    _, word = np.unique(np.cumsum(starts)[ordinary], return_inverse=True)  # numbered from 0
    lengths = np.bincount(word)
    order = rng.permutation(len(lengths))
    wanted = max(1, round(masking.mlm_probability * len(word)))
    num_words = int(np.searchsorted(np.cumsum(lengths[order]), wanted)) + 1
    selected = np.zeros(len(ids), dtype=np.bool_)
    selected[ordinary] = np.isin(word, order[:num_words])
    places = np.flatnonzero(selected)
    fate = rng.random(len(places))
    inputs = ids.astype(np.int64)
    inputs[places[fate < masking.mask_share]] = mask_id
    others = places[
        (fate >= masking.mask_share) & (fate < masking.mask_share + masking.random_share)
    ]
    drawn = rng.integers(vocab_size - len(special), size=len(others))
    # The k-th ordinary id is k plus the number of special ids below it.
    inputs[others] = drawn + np.searchsorted(special - np.arange(len(special)), drawn, "right")
    return inputs, selected
