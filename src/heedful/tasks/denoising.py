"""Denoising: an encoder-decoder is trained to restore corrupted texts.

The pre-training of Lewis et al. 2020 (BART) and Raffel et al. 2020 (T5), for models that are then
fine-tuned on pairs of texts (`init_from`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int64
from pydantic import Field

from heedful import task_keys
from heedful.config import Recipe
from heedful.data.collate import Batch, collate_pairs
from heedful.data.columns import Sequences, pack_ids
from heedful.data.encoding import TextColumn
from heedful.data.rows import Rows
from heedful.data.special_tokens import language_tokens
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.evaluation.likelihood import token_metrics
from heedful.evaluation.sharing import from_main
from heedful.files import write_text
from heedful.parts.losses import LossSum
from heedful.pipelines import GenerationIds, Limits, ModelMetadata, Translator
from heedful.tasks.inputs import (
    TWO_STACKS,
    SomeRows,
    joint_tokenizer,
    raw_text_data,
    two_stack_keys,
)
from heedful.tasks.masked_lm import decode_with_specials, example_rng
from heedful.tasks.noise import BartNoise, Noise, NoiseTokens, T5Noise
from heedful.tasks.run_data import Inherited, RawData, RunData
from heedful.tasks.scoring import (
    FinalScores,
    corpus_losses,
    held_out_loss,
    make_evaluation,
    write_scores,
)
from heedful.tasks.task import HELD_OUT_SEED, Task
from heedful.training.events import EvaluationResult, Sample

_STOPS = (".", "!", "?", "…", "。", "！", "？")


class Pairs(NamedTuple):
    """Corrupted texts and their targets."""

    src: Sequences
    tgt: Sequences


class Denoising(Task):
    """Denoising of texts, corrupted differently in every epoch by the noise of `objective.kind`.

    Texts are stored with EOS. The source is the corrupted text; the target is the whole text
    (bart), or the dropped spans (t5).
    """

    objective_class = Annotated[BartNoise | T5Noise, Field(discriminator="kind")]
    default_model = TWO_STACKS
    recipe_keys = task_keys.DENOISING
    row_columns: ClassVar[tuple[str, ...]] = ("text",)

    def __init__(self, recipe: Recipe) -> None:
        if not recipe.objective:
            # A text is a line by default, mostly a single sentence, so none are permuted.
            keys = {"kind": "bart", "permute_sentences": False}
            recipe = recipe.model_copy(update={"objective": keys})
        super().__init__(recipe)
        self.noise: Noise = self.objective

    def check(self) -> None:
        """See `Task.check`: noise must not make texts longer than the net allows."""
        super().check()
        longest = self.recipe.data.max_length
        side = int(self.noise.max_side_lengths(longest).max())
        if side > longest:
            raise UserError(
                f"objective: the noise may extend a text of data.max_length {longest} to {side} "
                "tokens; lower noise_density, or raise mean_span_length or data.max_length"
            )
        if self.recipe.training.compile and getattr(self.noise, "infilling", False):
            raise UserError(
                "training.compile: objective.infilling makes some sources longer than their texts, "
                "and so than any fixed shape; set it to 0 or objective.kind to t5, or leave "
                "training.compile out"
            )

    def raw_data(self) -> RawData:
        return raw_text_data(self.recipe)

    def train_tokenizers(self, sample: Rows) -> tuple[Tokenizer, Tokenizer]:
        specials = self.noise.specials(self.recipe.data.max_length)
        return joint_tokenizer(self.recipe, sample, extra_specials=specials)

    def text_columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        self.noise.check(noise_tokens(tokenizers[0]), self.recipe.data.max_length)
        if self.recipe.init_from is not None and language_tokens(tokenizers[0]):
            raise UserError(
                f"{self.recipe.init_from} puts the token of its language before each text, which "
                "the task denoising does not; train it on pairs (task translation)"
            )
        return {"text": TextColumn(tokenizers[0], ("text",), "target")}

    def encode_options(
        self, split: str, labels: Sequence[str], inherited: Inherited
    ) -> dict[str, Any]:
        return super().encode_options(split, labels, inherited) | {"drop_unknown": True}

    def model_keys(self, data: RunData | None, name: str) -> dict[str, object]:
        return two_stack_keys(self.recipe, data, name)

    def describe_model(self, data: RunData, name: str) -> ModelMetadata:
        """See `Task.describe_model`: with the special ids of the noise for generation."""
        tokenizer, pairs = data.tokenizer, self.held_out_pairs(data, "valid")
        ids = GenerationIds()
        if isinstance(self.noise, T5Noise):  # outputs contain sentinels
            suppressed = tokenizer.special_ids - {tokenizer.eos_id, tokenizer.unk_id}
            sentinels = noise_tokens(tokenizer).sentinel_ids
            ids = GenerationIds(
                decoder_start_ids=(tokenizer.bos_id,),
                eos_ids=(tokenizer.eos_id,),
                suppressed_ids=tuple(sorted(suppressed.difference(sentinels))),
            )
        limits = Limits.from_lengths(pairs.src.lengths, pairs.tgt.lengths)
        language = self.recipe.data.src_language
        return ModelMetadata(name, self.recipe.task, language, language, limits, generation=ids)

    def row_lengths(self, data: RunData, rows: SomeRows) -> tuple[Int64[np.ndarray, " n"], ...]:
        """Upper bounds of the source and target lengths of each training text."""
        lengths = data.ids("train").lengths_of(rows)
        src, tgt = self.noise.max_side_lengths(int(lengths.max(initial=0)))
        return src[lengths], tgt[lengths]

    def collate(self, data: RunData, item: Int64[np.ndarray, " n"]) -> Batch:
        seed = self.recipe.training.seed
        pairs = self.corrupt(data, "train", item, seed=seed, epoch=data.epoch)
        return replace(self._batch(data, pairs, np.arange(len(pairs.src))), indices=item)

    def evaluate(self, model: Translator, data: RunData) -> EvaluationResult:
        sums, by_corpus = self._split_sums(model, data, "valid")
        return make_evaluation(self.recipe, sums, self._samples(model, data), corpora=by_corpus)

    def compute_final_scores(self, model: Translator, data: RunData, out: Path) -> FinalScores:
        """Loss without label smoothing, perplexity and token accuracy; samples in a text file."""
        sums, by_corpus = self._split_sums(model, data, data.final)
        counts = {"num_texts": len(data.splits[data.final]), "num_targets": sums.tokens}
        samples = [
            f"corrupted: {sample.source}\ntarget:    {sample.reference}\n"
            f"output:    {sample.output}\n"
            for sample in self._samples(model, data)
        ]
        write_text(out / "samples.txt", "\n".join(samples))
        return write_scores(data, out, counts, token_metrics(sums) | corpus_losses(by_corpus))

    def held_out_pairs(self, data: RunData, split: str) -> Pairs:
        """The texts of a held-out split with the same noise at every evaluation."""
        rows = np.arange(len(data.splits[split]))
        return self.corrupt(data, split, rows, seed=HELD_OUT_SEED)

    def corrupt(
        self,
        data: RunData,
        split: str,
        rows: Int64[np.ndarray, " n"],
        *,
        seed: int,
        epoch: int = 0,
    ) -> Pairs:
        """Texts of a split, with noise that depends on (seed, epoch, index of the text)."""
        store, tokens = data.ids(split), noise_tokens(data.tokenizer)
        longest = self.recipe.data.max_length
        pairs = [
            self.noise.corrupt(store[i], example_rng(seed, epoch, i), tokens, longest)
            for i in rows.tolist()
        ]
        sides = ([ids.tolist() for ids in side] for side in zip(*pairs, strict=True))
        return Pairs(*(pack_ids(side, data.tokenizer.vocab_size) for side in sides))

    def _batch(self, data: RunData, pairs: Pairs, indices: Int64[np.ndarray, " B"]) -> Batch:
        pad_id = data.tokenizer.pad_id
        return collate_pairs(*pairs, indices, start_ids=[data.start_id], pad_id=pad_id)

    def _split_sums(
        self, model: Translator, data: RunData, split: str
    ) -> tuple[LossSum, dict[str, float]]:
        pairs = self.held_out_pairs(data, split)
        return held_out_loss(
            model.net,
            self.loss,
            lambda indices: self._batch(data, pairs, indices),
            *(side.lengths for side in pairs),
            corpora=data.splits[split].corpora,
            label_smoothing=self.recipe.training.label_smoothing,
        )

    @from_main
    def _samples(self, model: Translator, data: RunData) -> list[Sample]:
        """The first validation texts: corrupted, their targets, and outputs of greedy search."""
        count = min(self.recipe.evaluation.num_samples, len(data.splits["valid"]))
        if not count:
            return []
        pairs = self.corrupt(data, "valid", np.arange(count), seed=HELD_OUT_SEED)
        src, tgt = ([side[i].tolist() for i in range(count)] for side in pairs)
        outputs = [
            list(best.ids) for best, *_ in model.generate(src, beam_size=1, return_details=True)
        ]
        return [
            Sample(*(decode_with_specials(data.tokenizer, ids) for ids in texts))
            for texts in zip(src, tgt, outputs, strict=True)
        ]


@lru_cache(maxsize=4)  # called for every batch
def noise_tokens(tokenizer: Tokenizer) -> NoiseTokens:
    """The token ids of a tokenizer that noise needs."""
    pieces = tokenizer.tokens(range(tokenizer.vocab_size))
    stops = {
        index
        for index, piece in enumerate(pieces)
        if piece.endswith(_STOPS) and index not in tokenizer.special_ids
    }
    specials = tokenizer.specials
    return NoiseTokens(
        eos_id=tokenizer.eos_id,
        bos_id=specials.bos_id,
        mask_id=-1 if specials.mask_id is None else specials.mask_id,
        sentinel_ids=specials.sentinel_ids,
        full_stop_ids=frozenset(stops),
    )
