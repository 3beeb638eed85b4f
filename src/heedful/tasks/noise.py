"""Recipes of noise for denoising: from a text to what the encoder reads and the decoder says."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Int64, Integer
from pydantic import BaseModel, ConfigDict, Field

from heedful.tasks.noise_bart import (
    delete_tokens,
    find_sentence_ends,
    infill_spans,
    mask_tokens,
    permute_sentences,
    rotate,
)
from heedful.tasks.noise_t5 import mark_spans, span_mask


@dataclass(frozen=True)
class NoiseTokens:
    """What a noise has to know of a vocabulary.

    Args:
        mask_id: what BART's masking and infilling write.
        sentinel_ids: what T5's spans become, in the order of their use.
        full_stop_ids: what ends a sentence.
    """

    eos_id: int
    bos_id: int | None = None
    mask_id: int | None = None
    sentinel_ids: tuple[int, ...] = ()
    full_stop_ids: frozenset[int] = frozenset()

    @property
    def mask(self) -> int:
        """The mask, of a vocabulary that has one."""
        assert self.mask_id is not None
        return self.mask_id


Share = Annotated[float, Field(ge=0, lt=1)]
SpanLength = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class _Noise(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def corrupt(
        self, ids: Integer[np.ndarray, " n"], rng: np.random.Generator, tokens: NoiseTokens
    ) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
        """What the encoder reads of a text, and what the decoder says. Both end in EOS.

        BOS and EOS at the ends of `ids`, where they stand, are no part of the text; a BOS stays
        at the head of the source.
        """
        start = int(len(ids) > 0 and ids[0] == tokens.bos_id)
        has_eos = len(ids) > start and ids[-1] == tokens.eos_id
        text = ids[start : len(ids) - int(has_eos)].astype(np.int64)
        source, target = self.sides(text, rng, tokens)
        return np.concatenate([ids[:start].astype(np.int64), source]), target

    def sides(
        self, text: Int64[np.ndarray, " n"], rng: np.random.Generator, tokens: NoiseTokens
    ) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
        """Both sides of a text without BOS and EOS."""
        raise NotImplementedError


class T5Noise(_Noise):
    """Span corruption (Raffel et al. 2020): the text with sentinels, and the spans behind theirs.

    See `noise_t5`. The numbers are the paper's. `random_roll` is the authors' later option, off by
    default in their code. On here, because without it a text of less than 31 tokens loses its last
    tokens and no others. Set it and `final_sentinel` to false for what the authors' code makes.
    """

    kind: Literal["t5"] = Field("t5", description="the missing spans are written")
    density: Share = Field(0.15, description="of the tokens, dropped in spans")
    mean_span_length: SpanLength = Field(3.0, description="tokens in a span on average")
    random_roll: bool = Field(True, description="every token may be dropped, not the last ones")
    final_sentinel: bool = Field(True, description="targets end in one sentinel more")

    def sides(
        self, text: Int64[np.ndarray, " n"], rng: np.random.Generator, tokens: NoiseTokens
    ) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
        mask = span_mask(
            len(text),
            rng=rng,
            density=self.density,
            mean_length=self.mean_span_length,
            random_roll=self.random_roll,
        )
        return mark_spans(
            text,
            mask,
            sentinel_ids=tokens.sentinel_ids,
            eos_id=tokens.eos_id,
            final_sentinel=self.final_sentinel,
        )


class BartNoise(_Noise):
    """BART's noises (Lewis et al. 2020): the noisy text and the original.

    See `noise_bart`. Defaults are those of the paper's sec. 5.1. The noises come in the order
    sentence permutation, deletion, masking, infilling, rotation. Shares are of the tokens that the
    noise before has left.
    """

    kind: Literal["bart"] = Field("bart", description="the whole text is written")
    infilling: Share = Field(0.3, description="of the tokens, masked in spans, one mask a span")
    mean_span_length: SpanLength = Field(
        3.0, description="tokens in a span on average; a span of none adds a mask"
    )
    masking: Share = Field(0.0, description="of the tokens, masked one by one")
    deletion: Share = Field(0.0, description="of the tokens, gone without a trace")
    permute_sentences: bool = Field(True, description="sentences of a text in another order")
    rotate: bool = Field(False, description="the text begins at some other token")

    def sides(
        self, text: Int64[np.ndarray, " n"], rng: np.random.Generator, tokens: NoiseTokens
    ) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
        noisy = text
        if self.permute_sentences:
            ends = find_sentence_ends(text, tokens.full_stop_ids)
            noisy = permute_sentences(text, rng, sentence_ends=ends)
        if self.deletion:
            noisy = delete_tokens(noisy, rng, share=self.deletion)
        if self.masking:
            noisy = mask_tokens(noisy, rng, share=self.masking, mask_id=tokens.mask)
        if self.infilling:
            share, mean = self.infilling, self.mean_span_length
            noisy = infill_spans(noisy, rng, share=share, mean_length=mean, mask_id=tokens.mask)
        if self.rotate:
            noisy = rotate(noisy, rng)
        return np.append(noisy, tokens.eos_id), np.append(text, tokens.eos_id)


Noise = T5Noise | BartNoise
"""`noise.corrupt(ids, rng, tokens) -> (source, target)`; the vocabulary has what it needs."""
