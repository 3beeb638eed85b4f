"""Learning to repair texts: a model of two stacks reads a corrupted text and writes what is lost.

What is pre-trained so on plain texts may go on as any task of pairs (`init_from`): Lewis et al.
2020 (BART) and Raffel et al. 2020 (T5).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer
from pydantic import Field

from heedful.config import Recipe
from heedful.data.collate import Batch, collate_pairs
from heedful.data.columns import Sequences, pack_ids
from heedful.data.encoding import TextColumn
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.files import write_text
from heedful.inference import GenerationIds, Limits, ModelCard, Translator
from heedful.parts.losses import LossSum
from heedful.tasks.inputs import evaluation_plan, training_plan
from heedful.tasks.masked_lm import MASK, shown
from heedful.tasks.masking import example_rng
from heedful.tasks.noise import BartNoise, Noise, NoiseTokens, T5Noise
from heedful.tasks.noise_t5 import span_counts
from heedful.tasks.task import (
    HELD_OUT_SEED,
    Data,
    FinalScores,
    PlannedRows,
    SeqToSeqTask,
    TextTask,
    averages,
)
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation

_STOPS = (".", "!", "?", "…", "。", "！", "？")


class Pairs(NamedTuple):
    """Corrupted texts, and what is to be written for each."""

    src: Sequences
    tgt: Sequences


class Denoising(SeqToSeqTask, TextTask):
    """Texts, corrupted anew in every epoch by the noise that `objective` names (`kind`: bart, t5).

    A text is stored with EOS. The encoder reads it corrupted; the decoder says the whole text
    (bart), or the spans that are missing (t5).
    """

    Objective = Annotated[BartNoise | T5Noise, Field(discriminator="kind")]
    levels: ClassVar[tuple[str, ...]] = ()
    template = "none"

    def __init__(self, recipe: Recipe) -> None:
        if not recipe.objective:
            # Sentences stay, because a text is a line by default and so mostly one sentence.
            keys = {"kind": "bart", "permute_sentences": False}
            recipe = recipe.model_copy(update={"objective": keys})
        super().__init__(recipe)
        self.noise: Noise = self.objective

    def check(self) -> None:
        super().check()
        longest = self.recipe.data.max_length
        side = int(max(side.max() for side in longest_sides(self.noise, longest)))
        if side > longest:
            raise UserError(
                f"objective: a text of data.max_length {longest} may become {side} tokens; lower "
                "density, or raise mean_span_length or data.max_length"
            )

    def special_tokens(self) -> Sequence[str]:
        return needed_specials(self.noise, self.recipe.data.max_length)

    def columns(self, tokenizers: tuple[Tokenizer, Tokenizer]) -> dict[str, TextColumn]:
        check_tokens(self.noise, noise_tokens(tokenizers[0]), self.recipe.data.max_length)
        return {"text": TextColumn(tokenizers[0], ("text",), "target")}

    def card(self, data: Data, name: str) -> ModelCard:
        tokenizer, pairs = data.tokenizer, self.held_out(data, "valid")
        ids = GenerationIds()
        if isinstance(self.noise, T5Noise):  # its outputs are made of sentinels
            never = tokenizer.special_ids - {tokenizer.eos_id, tokenizer.unk_id}
            sentinels = noise_tokens(tokenizer).sentinel_ids
            ids = GenerationIds(
                start=(tokenizer.bos_id,),
                end=(tokenizer.eos_id,),
                never=tuple(sorted(never.difference(sentinels))),
            )
        limits = Limits.of(pairs.src.lengths, pairs.tgt.lengths)
        language = self.recipe.data.src_language
        return ModelCard(name, self.recipe.task, language, language, limits, generation=ids)

    def batches(self, data: Data, epoch: int) -> Sequence[PlannedRows]:
        """By the texts' own lengths, so that a plan does not hang on what the noise draws."""
        lengths = data.ids("train").lengths
        src, tgt = longest_sides(self.noise, int(lengths.max()))
        batches = training_plan(self.recipe, epoch, src[lengths], tgt[lengths])
        return [PlannedRows(epoch, indices) for indices in batches]

    def collate(self, data: Data, item: PlannedRows) -> Batch:
        pairs = self.corrupted(data, "train", item, self.recipe.training.seed)
        return replace(self._batch(data, pairs, np.arange(len(pairs.src))), indices=item.indices)

    def evaluate(self, model: Translator, data: Data) -> Evaluation:
        found = self._scored(model, data, "valid")
        return self.judged(found, self._samples(model, data))

    def finish(self, model: Translator, data: Data, out: Path) -> FinalScores:
        """Loss (without label smoothing), perplexity and token accuracy; the samples as text."""
        found = self._scored(model, data, data.final)
        counts = {"num_texts": len(data.splits[data.final]), "num_targets": found.tokens}
        shown_samples = [
            f"corrupted: {sample.source}\noriginal:  {sample.reference}\n"
            f"output:    {sample.output}\n"
            for sample in self._samples(model, data)
        ]
        write_text(out / "samples.txt", "\n".join(shown_samples))
        return self.written(data, out, counts, averages(found))

    def held_out(self, data: Data, split: str) -> Pairs:
        """The held-out texts as they are always corrupted."""
        rows = PlannedRows(0, np.arange(len(data.splits[split])))
        return self.corrupted(data, split, rows, HELD_OUT_SEED)

    def corrupted(self, data: Data, split: str, rows: PlannedRows, seed: int) -> Pairs:
        """Some texts, each corrupted by what (seed, epoch, its index) alone say."""
        store, tokens = data.ids(split), noise_tokens(data.tokenizer)
        longest = self.recipe.data.max_length
        pairs = [
            corrupt(store[i], self.noise, example_rng(seed, rows.epoch, i), tokens, longest)
            for i in rows.indices.tolist()
        ]
        sides = ([ids.tolist() for ids in side] for side in zip(*pairs, strict=True))
        return Pairs(*(pack_ids(side, data.tokenizer.vocab_size) for side in sides))

    def _batch(self, data: Data, pairs: Pairs, indices: Int64[np.ndarray, " B"]) -> Batch:
        pad_id = data.tokenizer.pad_id
        return collate_pairs(*pairs, indices, bos_id=data.start_id, pad_id=pad_id)

    def _scored(self, model: Translator, data: Data, split: str) -> LossSum:
        pairs = self.held_out(data, split)
        plan = evaluation_plan(pairs.src.lengths, pairs.tgt.lengths)
        return self.sums(model.net, (self._batch(data, pairs, indices) for indices in plan))

    def _samples(self, model: Translator, data: Data) -> list[Sample]:
        """The first held-out texts: corrupted, as they were, and what the model writes of them."""
        tokenizer, texts = data.tokenizer, data.ids("valid")
        first = range(min(self.recipe.evaluation.num_samples, len(texts)))
        if not first:
            return []
        rows = PlannedRows(0, np.array(first))
        pairs = self.corrupted(data, "valid", rows, HELD_OUT_SEED)
        sources = [pairs.src[index].tolist() for index in first]
        return [
            Sample(
                shown(tokenizer, source),
                shown(tokenizer, texts[index].tolist()),
                shown(tokenizer, list(output[0].ids)),
            )
            for index, source, output in zip(
                first, sources, model.generations(sources, beam_size=1), strict=True
            )
        ]


def corrupt(
    ids: Integer[np.ndarray, " n"],
    noise: Noise,
    rng: np.random.Generator,
    tokens: NoiseTokens,
    max_length: int,
) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
    """What the encoder reads of a stored text, and what the decoder says; both end in EOS.

    Masks for spans of no tokens may make a source longer than the model reads; it then loses its
    last tokens but EOS.
    """
    source, target = noise.corrupt(ids, rng, tokens)
    if len(source) > max_length:
        source = np.concatenate([source[: max_length - 1], source[-1:]])
    return source, target


def longest_sides(
    noise: Noise, max_length: int
) -> tuple[Int64[np.ndarray, " lengths"], Int64[np.ndarray, " lengths"]]:
    """Tokens of source and target at most, by the length of the text; EOS counted in all."""
    lengths = np.arange(max_length + 1)
    if not isinstance(noise, T5Noise):
        return lengths, lengths
    sides = np.zeros((2, max_length + 1), dtype=np.int64)
    for length in lengths[1:].tolist():
        dropped, spans = _spans(noise, length)
        sides[0, length] = length - dropped + spans
        sides[1, length] = dropped + spans + noise.final_sentinel + 1
    return sides[0], sides[1]


def needed_specials(noise: Noise, max_length: int) -> tuple[str, ...]:
    """Names of the special tokens that a noise writes: the mask, or sentinels for every span."""
    if isinstance(noise, T5Noise):
        spans = max(_spans(noise, length)[1] for length in range(1, max_length + 1))
        return tuple(f"<extra_{number}>" for number in range(spans + noise.final_sentinel))
    return (MASK,) if noise.infilling or noise.masking else ()


@lru_cache(maxsize=4)  # asked for with every batch
def noise_tokens(tokenizer: Tokenizer) -> NoiseTokens:
    """What a noise has to know of a tokenizer. A token that ends as a sentence does is a stop."""
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
        mask_id=specials.mask_id,
        sentinel_ids=specials.sentinel_ids,
        full_stop_ids=frozenset(stops),
    )


def check_tokens(noise: Noise, tokens: NoiseTokens, max_length: int) -> None:
    """Refuse a vocabulary that lacks what the noise writes or looks for."""
    needed = needed_specials(noise, max_length)
    if isinstance(noise, T5Noise):
        if len(needed) > len(tokens.sentinel_ids):
            raise UserError(
                f"objective.kind t5 needs {len(needed)} sentinels for texts of {max_length} "
                f"tokens, but the vocabulary has {len(tokens.sentinel_ids)}; lower "
                "data.max_length, or leave out init_from"
            )
        return
    if needed and tokens.mask_id is None:
        raise UserError(
            "objective.kind bart needs a mask, but the vocabulary has none; leave out init_from, "
            "or set infilling and masking to 0"
        )
    if noise.permute_sentences and not tokens.full_stop_ids:
        raise UserError(
            "objective.permute_sentences: no token of the vocabulary ends a sentence; set it to "
            "false"
        )


def _spans(noise: T5Noise, length: int) -> tuple[int, int]:
    """Tokens that are dropped of a stored text, and in how many spans at most: one more if rolled.

    `length` counts EOS, which is never dropped.
    """
    dropped, spans = span_counts(
        length - 1, density=noise.density, mean_length=noise.mean_span_length
    )
    cut = bool(noise.random_roll and dropped > spans)
    return dropped, spans + cut
