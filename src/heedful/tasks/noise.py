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


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class T5Noise(_Keys):
    """Span corruption (Raffel et al. 2020); see `noise_t5`. The numbers are the paper's.

    `random_roll` is the authors' later option, off by default in their code. On here, because
    without it a text of less than 31 tokens loses its last tokens and no others. Set it and
    `final_sentinel` to false for what the authors' code makes.
    """

    kind: Literal["t5"] = Field("t5", description="the missing spans are written")
    density: Share = Field(0.15, description="of the tokens, dropped in spans")
    mean_span_length: SpanLength = Field(3.0, description="tokens in a span on average")
    random_roll: bool = Field(True, description="every token may be dropped, not the last ones")
    final_sentinel: bool = Field(True, description="targets end in one sentinel more")

    def corrupt(
        self,
        ids: Integer[np.ndarray, " n"],
        rng: np.random.Generator,
        tokens: NoiseTokens,
    ) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
        """The text with sentinels, and the spans behind theirs. Both end in EOS.

        BOS and EOS at the ends of `ids`, where they stand, are no part of the text; a BOS stays
        at the head of the source.
        """
        start, stop = _text_between(ids, tokens)
        mask = span_mask(
            stop - start,
            rng=rng,
            density=self.density,
            mean_length=self.mean_span_length,
            random_roll=self.random_roll,
        )
        source, target = mark_spans(
            ids[start:stop],
            mask,
            sentinel_ids=tokens.sentinel_ids,
            eos_id=tokens.eos_id,
            final_sentinel=self.final_sentinel,
        )
        return np.concatenate([ids[:start].astype(np.int64), source]), target


class BartNoise(_Keys):
    """BART's noises (Lewis et al. 2020); see `noise_bart`. Defaults are those of its sec. 5.1.

    They come in the order sentence permutation, deletion, masking, infilling, rotation. Shares
    are of the tokens that the noise before has left.
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

    def corrupt(
        self,
        ids: Integer[np.ndarray, " n"],
        rng: np.random.Generator,
        tokens: NoiseTokens,
    ) -> tuple[Int64[np.ndarray, " s"], Int64[np.ndarray, " t"]]:
        """The noisy text and the original. Both end in EOS, and begin with BOS if `ids` does."""
        start, stop = _text_between(ids, tokens)
        text = noisy = ids[start:stop].astype(np.int64)
        if self.permute_sentences:
            noisy = permute_sentences(
                text, rng, sentence_ends=find_sentence_ends(text, tokens.full_stop_ids)
            )
        noisy = self._corrupt_tokens(noisy, rng, tokens)
        head = ids[:start].astype(np.int64)
        eos = np.array([tokens.eos_id], dtype=np.int64)
        return np.concatenate([head, noisy, eos]), np.concatenate([head, text, eos])

    def _corrupt_tokens(
        self, text: Int64[np.ndarray, " n"], rng: np.random.Generator, tokens: NoiseTokens
    ) -> Int64[np.ndarray, " m"]:
        """The noises that do not look at sentences."""
        if self.deletion:
            text = delete_tokens(text, rng, share=self.deletion)
        if self.masking:
            text = mask_tokens(text, rng, share=self.masking, mask_id=tokens.mask)
        if self.infilling:
            text = infill_spans(
                text,
                rng,
                share=self.infilling,
                mean_length=self.mean_span_length,
                mask_id=tokens.mask,
            )
        return rotate(text, rng) if self.rotate else text


Noise = T5Noise | BartNoise
"""`noise.corrupt(ids, rng, tokens) -> (source, target)`; the vocabulary has what it needs."""


def _text_between(ids: Integer[np.ndarray, " n"], tokens: NoiseTokens) -> tuple[int, int]:
    """Where the text begins and ends between the BOS and EOS that `ids` may have."""
    start = int(len(ids) > 0 and ids[0] == tokens.bos_id)
    has_eos = len(ids) > start and ids[-1] == tokens.eos_id
    return start, len(ids) - int(has_eos)
