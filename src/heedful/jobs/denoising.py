"""Learning to repair texts: a model of two stacks reads a corrupted text and writes what is lost.

What is pre-trained so on plain texts may go on as any task of pairs (`init_from`): Lewis et al.
2020 (BART) and Raffel et al. 2020 (T5).
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from heedful.config import Recipe
from heedful.data.batches import PairBatch, collate, plan_epoch
from heedful.data.pair_store import PairStore
from heedful.data.store import pack_ids
from heedful.data.tokenizer import Template, Tokenizer
from heedful.errors import UserError
from heedful.evaluation.metrics import perplexity
from heedful.files import write_json, write_text
from heedful.inference import GenerationIds, Limits, ModelCard
from heedful.jobs.encoders import check_encoder_recipe
from heedful.jobs.job import FinalScores, Job, Say, make_tokenizer
from heedful.jobs.masked_lm import MASK
from heedful.jobs.sources import check_distillation, pair_sizes
from heedful.jobs.texts import SPLITS, open_texts, read_splits, store_texts
from heedful.parts.losses import LossSum
from heedful.tasks.masking import example_rng
from heedful.tasks.noise import Noise, NoiseTokens, T5Noise, read_noise
from heedful.tasks.noise_t5 import span_counts
from heedful.tasks.translation import pair_loss
from heedful.training.events import Sample
from heedful.training.trainer import Evaluation

# Held-out texts are corrupted by this seed whatever the run's, so that runs can be compared.
_HELD_OUT_SEED = 0
_STOPS = (".", "!", "?", "…", "。", "！", "？")


class NoisyRows(NamedTuple):
    """A planned batch: some texts as an epoch corrupts them."""

    epoch: int
    indices: Int64[np.ndarray, " B"]


class Denoising(Job):
    """Texts, corrupted anew in every epoch by the noise that `objective` names (`kind`: bart, t5).

    A text is stored with EOS. The encoder reads it corrupted; the decoder says the whole text
    (bart), or the spans that are missing (t5).
    """

    default_model: ClassVar[dict[str, Any]] = {"architecture": "vaswani2017", "size": "tiny"}

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        noise = noise_of(recipe)
        check_encoder_recipe(recipe, ("text",))
        check_distillation(recipe, levels=())
        longest = int(max(side.max() for side in longest_sides(noise, recipe.data.max_length)))
        if longest > recipe.data.max_length:
            raise UserError(
                f"objective: a text of data.max_length {recipe.data.max_length} may become "
                f"{longest} tokens; lower density, or raise mean_span_length or data.max_length"
            )

    @property
    def noise(self) -> Noise:
        """The recipe's objective."""
        return noise_of(self.recipe)

    def prepare(self, say: Say) -> dict[str, Any]:
        splits = read_splits(self.recipe, say)
        tokenizer = self._tokenizer(splits["train"].texts)
        say(f"tokenizer  {tokenizer.kind}, {tokenizer.vocab_size:,} entries")
        check_tokens(self.noise, noise_tokens(tokenizer), self.recipe.data.max_length)
        counts = store_texts(splits, with_eos(tokenizer), self.directory, self.recipe, say)
        tokenizer.save(self.directory / "tokenizer.json")
        return counts

    def open(self) -> None:
        tokenizer = Tokenizer.load(self.directory / "tokenizer.json")
        self.tokenizers = (tokenizer, tokenizer)
        self.tokens = noise_tokens(tokenizer)
        self.texts = open_texts(self.directory)
        self.num_train, self.num_valid = (len(self.texts[name]) for name in SPLITS[:2])

    def sizes(self, recipe: Recipe, name: str) -> dict[str, object]:
        return pair_sizes(recipe, name, self.tokenizers, recipe.data.max_length)

    def card(self, name: str) -> ModelCard:
        tokenizer, pairs = self.tokenizers[0], self.valid_pairs
        ids = GenerationIds()
        if isinstance(self.noise, T5Noise):  # its outputs are made of sentinels
            never = tokenizer.special_ids - {tokenizer.eos_id, tokenizer.unk_id}
            ids = GenerationIds(
                start=(tokenizer.bos_id,),
                end=(tokenizer.eos_id,),
                never=tuple(sorted(never.difference(self.tokens.sentinel_ids))),
            )
        language, limits = self.recipe.data.src_language, Limits.of(*lengths_of(pairs))
        return ModelCard(name, self.recipe.task, language, language, limits, generation=ids)

    def plan(self, epoch: int) -> Sequence[NoisyRows]:
        """By the texts' own lengths, so that a plan does not hang on what the noise draws."""
        settings = self.recipe.training
        lengths = self.texts["train"].lengths
        src, tgt = longest_sides(self.noise, int(lengths.max()))
        batches = plan_epoch(
            src[lengths],
            tgt[lengths],
            max_tokens=settings.batch_tokens,
            max_sentences=settings.batch_sentences,
            seed=settings.seed,
            epoch=epoch,
        )
        return [NoisyRows(epoch, indices) for indices in batches]

    def load(self, item: NoisyRows) -> PairBatch:
        pairs = self._corrupted("train", item, self.recipe.training.seed)
        tokenizer = self.tokenizers[0]
        batch = collate(
            pairs,
            np.arange(len(pairs)),
            bos_id=tokenizer.bos_id,
            pad_id=tokenizer.pad_id,
            device=self.model.device,
        )
        return replace(batch, indices=item.indices)

    def loss(self, batch: PairBatch) -> LossSum:
        return pair_loss(
            self.model.net, batch, label_smoothing=self.recipe.training.label_smoothing
        )

    @cached_property
    def valid_pairs(self) -> PairStore:
        """The held-out texts as they are always corrupted."""
        return self._held_out("valid")

    def evaluate(self) -> Evaluation:
        smoothing = self.recipe.training.label_smoothing
        found = self.model.teacher_forced_sums(self.valid_pairs, smoothing)
        nll, accuracy = float(found.nll) / found.tokens, float(found.correct) / found.tokens
        values = {"loss": -nll, "token_accuracy": accuracy, "accuracy": accuracy}
        return Evaluation(
            loss=float(found.loss) / found.tokens,
            perplexity=perplexity(float(found.nll), found.tokens),
            token_accuracy=accuracy,
            scores={},
            samples=self._samples(),
            value=values[self.recipe.evaluation.metric],
        )

    def finish(self, out: Path) -> FinalScores:
        """Loss (without label smoothing), perplexity and token accuracy; the samples as text."""
        name = "test" if "test" in self.texts else "valid"
        pairs = self.valid_pairs if name == "valid" else self._held_out(name)
        found = self.model.teacher_forced_sums(pairs)
        scores = {
            "perplexity": perplexity(float(found.nll), found.tokens),
            "loss": float(found.nll) / found.tokens,
            "token_accuracy": float(found.correct) / found.tokens,
        }
        counts = {"num_texts": len(pairs), "num_targets": found.tokens}
        write_json(out / "scores.json", {"set": name, **counts, "scores": scores})
        shown_samples = [
            f"corrupted: {sample.source}\noriginal:  {sample.reference}\n"
            f"output:    {sample.output}\n"
            for sample in self._samples()
        ]
        write_text(out / "samples.txt", "\n".join(shown_samples))
        return FinalScores(dict(scores))

    def _tokenizer(self, texts: list[str]) -> Tokenizer:
        if self.given is not None:
            return self.given[0]
        specials = needed_specials(self.noise, self.recipe.data.max_length)
        return make_tokenizer(self.recipe.tokenizer, texts, extra_specials=specials)

    def _held_out(self, name: str) -> PairStore:
        rows = NoisyRows(0, np.arange(len(self.texts[name])))
        return self._corrupted(name, rows, _HELD_OUT_SEED)

    def _corrupted(self, name: str, rows: NoisyRows, seed: int) -> PairStore:
        """Some texts, each corrupted by what (seed, epoch, its index) alone say."""
        store = self.texts[name]
        sides: tuple[list[list[int]], list[list[int]]] = ([], [])
        for index in rows.indices.tolist():
            rng = example_rng(seed, rows.epoch, index)
            pair = corrupt(store[index], self.noise, rng, self.tokens, self.recipe.data.max_length)
            for side, ids in zip(sides, pair, strict=True):
                side.append(ids.tolist())
        vocab_size = self.tokenizers[0].vocab_size
        return PairStore(pack_ids(sides[0], vocab_size), pack_ids(sides[1], vocab_size))

    def _samples(self) -> list[Sample]:
        """The first held-out texts: corrupted, as they were, and what the model writes of them."""
        tokenizer, texts, pairs = self.tokenizers[0], self.texts["valid"], self.valid_pairs
        count = min(self.recipe.evaluation.num_samples, len(texts))
        sources = [pairs.src[index].tolist() for index in range(count)]
        if not sources:
            return []
        outputs = self.model.generations(sources)
        return [
            Sample(
                shown(tokenizer, source),
                shown(tokenizer, texts[index].tolist()),
                shown(tokenizer, output[0].ids),
            )
            for index, (source, output) in enumerate(zip(sources, outputs, strict=True))
        ]


def noise_of(recipe: Recipe) -> Noise:
    """The noise of a recipe's objective; without one BART's, its sentences in their order.

    Sentences stay, because a text is a line by default and so mostly one sentence.
    """
    return read_noise(recipe.objective or {"kind": "bart", "permute_sentences": False}, "objective")


def corrupt(
    ids: Integer[np.ndarray, " n"],
    noise: Noise,
    rng: np.random.Generator,
    tokens: NoiseTokens,
    max_length: int,
) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
    """What the encoder reads of a stored text, and what the decoder says; both end in EOS.

    The target has no BOS, which `collate` puts before it. Masks for spans of no tokens may make a
    source longer than the model reads; it then loses its last tokens but EOS.
    """
    source, target = noise.corrupt(ids, rng, tokens)
    if len(source) > max_length:
        source = np.concatenate([source[: max_length - 1], source[-1:]])
    return source, target[int(target[0] == tokens.bos_id) :]


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


def with_eos(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, but that `wrap` does what `frame` does: ends a text in EOS."""
    if tokenizer.suffix_ids[-1:] == (tokenizer.eos_id,):
        return tokenizer
    framed = copy(tokenizer)
    framed.template = Template(tokenizer.prefix_ids, (*tokenizer.suffix_ids, tokenizer.eos_id))
    return framed


def shown(tokenizer: Tokenizer, ids: list[int]) -> str:
    """A text with the names of its masks and sentinels; other specials are left out."""
    specials = tokenizer.specials
    named = {*specials.sentinel_ids, specials.mask_id}
    pieces: list[str] = []
    for special, group in groupby(ids, key=lambda token: token in named):
        run = list(group)
        pieces += tokenizer.tokens(run) if special else [tokenizer.decode(run).strip()]
    return " ".join(piece for piece in pieces if piece)


def lengths_of(pairs: PairStore) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of both sides."""
    return pairs.src_lengths, pairs.tgt_lengths


def _spans(noise: T5Noise, length: int) -> tuple[int, int]:
    """Tokens that are dropped of a stored text, and in how many spans at most: one more if rolled.

    `length` counts EOS, which is never dropped.
    """
    dropped, spans = span_counts(
        length - 1, density=noise.density, mean_length=noise.mean_span_length
    )
    cut = bool(noise.random_roll and dropped > spans)
    return dropped, spans + cut
