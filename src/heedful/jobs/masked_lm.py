"""Learning words from the text around them: rows of texts with some tokens hidden."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from heedful.config import Recipe
from heedful.data.sequences import pack_sentences
from heedful.data.store import IdStore
from heedful.data.tokenizer import Tokenizer
from heedful.evaluation.metrics import perplexity
from heedful.files import write_json
from heedful.inference import ModelCard, SavedModel
from heedful.inference.language_model import total
from heedful.jobs.encoders import (
    check_encoder_recipe,
    encoder_sizes,
    evaluation_plan,
    training_plan,
)
from heedful.jobs.job import FinalScores, Job, Say, make_tokenizer, objective
from heedful.jobs.sources import check_distillation, ready_teacher
from heedful.jobs.texts import SPLITS, open_texts, read_splits, store_texts
from heedful.parts.losses import LossSum
from heedful.tasks.distillation import distilled_masked
from heedful.tasks.masked_lm import MaskedBatch, fill_in, mask_id_of, masked_batch, masked_loss
from heedful.tasks.masking import Masking
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation

MASK = "<mask>"
# Held-out text is masked by this seed whatever the run's, so that runs can be compared.
_HELD_OUT_SEED = 0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Objective(Masking):
    """How much of a text is hidden, as `Masking` says, and what a row of a batch is.

    Args:
        pack: fill each row up to `data.max_length` with texts that follow each other, all of them
            whole and each in its own marks (FULL-SENTENCES of Liu et al. 2019, sec. 4.2); else one
            text a row. The texts of a row see each other.
    """

    pack: bool = False


class MaskedRows(NamedTuple):
    """A planned batch: some rows as an epoch masks them."""

    epoch: int
    indices: Int64[np.ndarray, " B"]


class MaskedLm(Job):
    """Texts, of which some tokens are hidden anew in every epoch.

    Texts come from `data.train.text`, cut by `data.documents`; or from `data.train.file`, a file of
    labelled texts (TSV or JSONL) of which the texts alone are read, so that a model can be
    pre-trained on what it is to classify later. Of pairs both texts are taken, each for itself.
    """

    default_model: ClassVar[dict[str, Any]] = {"architecture": "bert", "size": "tiny"}

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        objective(recipe, Objective)
        check_encoder_recipe(recipe, ("text", "file"))
        check_distillation(recipe)

    @property
    def settings(self) -> Objective:
        """The recipe's objective."""
        return objective(self.recipe, Objective)

    def prepare(self, say: Say) -> dict[str, Any]:
        splits = read_splits(self.recipe, say)
        tokenizer = self._tokenizer(splits["train"].texts)
        mask_id_of(tokenizer)
        say(f"tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} entries")
        counts = store_texts(splits, tokenizer, self.directory, self.recipe, say)
        tokenizer.save(self.directory / "tokenizer.json")
        return counts

    def open(self) -> None:
        tokenizer = Tokenizer.load(self.directory / "tokenizer.json")
        self.tokenizers = (tokenizer, tokenizer)
        self.texts = open_texts(self.directory)
        self.rows = {name: self._rows(store) for name, store in self.texts.items()}
        self.num_train, self.num_valid = (len(self.rows[name]) for name in SPLITS[:2])

    @classmethod
    def stand_in_sizes(cls, recipe: Recipe, name: str) -> dict[str, object]:
        return encoder_sizes(recipe, name, 8, head="mlm")

    def sizes(self, recipe: Recipe, name: str) -> dict[str, object]:
        return encoder_sizes(recipe, name, self.tokenizers[0].vocab_size, head="mlm")

    def learn_from(self, teacher: SavedModel, *, resume: bool) -> None:
        """From what it says at each hidden place."""
        longest = self.recipe.data.max_length
        say = (lambda line: None) if resume else self.say
        self.teacher = ready_teacher(teacher, self.model, self.recipe, longest=longest, say=say)

    def card(self, name: str) -> ModelCard:
        return ModelCard(name, self.recipe.task, self.recipe.data.src_language)

    def plan(self, epoch: int) -> Sequence[MaskedRows]:
        batches = training_plan(self.recipe, self.rows["train"].lengths, epoch)
        return [MaskedRows(epoch, indices) for indices in batches]

    def load(self, item: MaskedRows) -> MaskedBatch:
        seed = self.recipe.training.seed
        return self._masked(self.rows["train"], item, self.settings, seed)

    def loss(self, batch: MaskedBatch) -> LossSum:
        net, smoothing = self.model.net, self.recipe.training.label_smoothing
        if self.teacher is None:
            return masked_loss(net, batch, label_smoothing=smoothing)
        settings = self.recipe.distillation
        return distilled_masked(net, self.teacher.net, batch, settings, label_smoothing=smoothing)

    def evaluate(self) -> Evaluation:
        """Loss and accuracy at places of the held-out rows that are always the same."""
        found = self._scored("valid")
        accuracy = float(found.correct) / found.tokens
        loss = float(found.loss) / found.tokens
        values = {"loss": -float(found.nll) / found.tokens}
        values |= {"accuracy": accuracy, "token_accuracy": accuracy}
        return Evaluation(
            loss=loss,
            perplexity=perplexity(float(found.nll), found.tokens),
            token_accuracy=accuracy,
            scores={},
            samples=self._samples("valid"),
            value=values[self.recipe.evaluation.metric],
        )

    def finish(self, out: Path) -> FinalScores:
        """Loss (without label smoothing), perplexity and accuracy at the hidden tokens."""
        name = "test" if "test" in self.rows else "valid"
        found = self._scored(name)
        scores = {
            "accuracy": float(found.correct) / found.tokens,
            "perplexity": perplexity(float(found.nll), found.tokens),
            "loss": float(found.nll) / found.tokens,
        }
        write_json(
            out / "scores.json",
            {"set": name, "num_texts": len(self.texts[name]), "num_masked": found.tokens}
            | {"scores": scores},
        )
        return FinalScores(dict(scores))

    def _tokenizer(self, texts: list[str]) -> Tokenizer:
        if self.given is not None:
            return self.given[0]
        return make_tokenizer(self.recipe.tokenizer, texts, extra_specials=(MASK,), template="both")

    def _rows(self, texts: IdStore) -> IdStore:
        """What stands in one row of a batch: a text, or as many as fit."""
        if not self.settings.pack:
            return texts
        borders = pack_sentences(texts.lengths, self.recipe.data.max_length)
        return IdStore(texts.ids, texts.offsets[borders])

    def _masked(self, rows: IdStore, item: MaskedRows, masking: Masking, seed: int) -> MaskedBatch:
        return masked_batch(
            rows,
            item.indices,
            tokenizer=self.tokenizers[0],
            masking=masking,
            seed=seed,
            epoch=item.epoch,
            device=self.model.device,
        )

    @torch.inference_mode()
    def _scored(self, name: str) -> LossSum:
        """Sums over a held-out split."""
        self.model.net.eval()
        rows = self.rows[name]
        parts = []
        for indices in evaluation_plan(rows.lengths):
            batch = self._masked(rows, MaskedRows(0, indices), self.settings, _HELD_OUT_SEED)
            smoothing = self.recipe.training.label_smoothing
            parts.append(
                masked_loss(self.model.net, batch, label_smoothing=smoothing, count_correct=True)
            )
        return total(parts)

    @torch.inference_mode()
    def _samples(self, name: str) -> list[Sample]:
        """The first held-out texts with all that is selected masked, and as the model fills it."""
        tokenizer, texts = self.tokenizers[0], self.texts[name]
        first = np.arange(min(self.recipe.evaluation.num_samples, len(texts)))
        if not len(first):
            return []
        all_masked = Masking(self.settings.fraction, 1.0, 0.0, self.settings.whole_word)
        batch = self._masked(texts, MaskedRows(0, first), all_masked, _HELD_OUT_SEED)
        filled = fill_in(self.model.net, batch, tokenizer.special_ids).tolist()
        return [
            Sample(
                shown(tokenizer, ids[:length]),
                tokenizer.decode(texts[index].tolist()),
                tokenizer.decode(row[:length]),
            )
            for index, (ids, row, length) in enumerate(
                zip(batch.ids.tolist(), filled, batch.lengths.tolist(), strict=True)
            )
        ]


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A text with the mask's name where it is masked; other specials are left out."""
    mask_id = mask_id_of(tokenizer)
    name = tokenizer.tokens([mask_id])[0]
    pieces = [
        name if is_mask else tokenizer.decode(list(run)).strip()
        for is_mask, group in groupby(ids, key=lambda token: token == mask_id)
        for run in ([[token] for token in group] if is_mask else [group])
    ]
    return " ".join(piece for piece in pieces if piece)
