"""Noise for denoising: from a text to a corrupted source and its target.

T5's span corruption (Raffel et al. 2020, sec. 3.1.4 and 3.3.4; details that the paper leaves open
are those of the authors' `random_spans_noise_mask`), and BART's five transformations (Lewis et al.
2020, sec. 2.2). A text is an array of ids without BOS and EOS; it is not modified.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

import numpy as np
from jaxtyping import Bool, Int64, Integer
from pydantic import Field

from heedful.config import Strict
from heedful.errors import UserError
from heedful.tasks.task import MASK

Ids: TypeAlias = Int64[np.ndarray, " _"]
Share = Annotated[float, Field(ge=0, lt=1)]
SpanLength = Annotated[float, Field(ge=1)]


@dataclass(frozen=True)
class NoiseTokens:
    """The token ids that noise needs.

    Args:
        mask_id: the mask token of BART's masking and infilling; -1 if the vocabulary has none.
        sentinel_ids: the sentinels of T5's spans, in the order of their use.
        full_stop_ids: tokens that end a sentence.
    """

    eos_id: int
    bos_id: int | None = None
    mask_id: int = -1
    sentinel_ids: tuple[int, ...] = ()
    full_stop_ids: frozenset[int] = frozenset()


class Noise(Strict):
    """A corruption of texts.

    Attributes:
        restores_bos: the targets are whole texts, which begin with the text's BOS if it has one.
    """

    restores_bos: ClassVar[bool] = False

    def corrupt(
        self,
        ids: Integer[np.ndarray, " n"],
        rng: np.random.Generator,
        tokens: NoiseTokens,
        max_length: int | None = None,
    ) -> tuple[Ids, Ids]:
        """The source and the target of a stored text; both end in EOS.

        BOS at the start and EOS at the end of `ids` are not corrupted; BOS stays at the start of
        the source, and of the target if that is the whole text. Masks for empty spans may make a
        source longer than `max_length`; it is then truncated before its EOS.
        """
        start = int(len(ids) > 0 and ids[0] == tokens.bos_id)
        stop = len(ids) - int(len(ids) > start and ids[-1] == tokens.eos_id)
        text = ids.astype(np.int64)
        source, target = self.sides(text[start:stop], rng, tokens)
        source = np.concatenate([text[:start], source])
        if self.restores_bos:
            target = np.concatenate([text[:start], target])
        if max_length is not None and len(source) > max_length:
            source = np.concatenate([source[: max_length - 1], source[-1:]])
        return source, target

    def sides(self, text: Ids, rng: np.random.Generator, tokens: NoiseTokens) -> tuple[Ids, Ids]:
        """Source and target of a text without BOS and EOS."""
        raise NotImplementedError

    def max_side_lengths(self, max_length: int) -> Int64[np.ndarray, "2 lengths"]:
        """Upper bounds of the lengths of source and target for texts of 0 to `max_length` tokens;
        all lengths include EOS."""
        raise NotImplementedError

    def specials(self, max_length: int) -> tuple[str, ...]:
        """The special tokens that it inserts into texts of up to `max_length` tokens."""
        raise NotImplementedError

    def check(self, tokens: NoiseTokens, max_length: int) -> None:
        """Raise UserError for a vocabulary without the tokens that it needs."""
        raise NotImplementedError


class T5Noise(Noise):
    """Span corruption: each dropped span becomes a sentinel; the target has sentinels and spans.

    The defaults are the paper's. `random_roll` is a later option of the authors' code, off by
    default there; it is on here, because without it texts of less than 31 tokens always lose
    their last tokens. With it and `final_sentinel` false, the results are those of that code.
    """

    kind: Literal["t5"] = Field("t5", description="T5 noise: the targets are the missing spans.")
    noise_density: Share = Field(0.15, description="Share of the tokens dropped in spans.")
    mean_span_length: SpanLength = Field(3.0, description="Mean length of a span in tokens.")
    random_roll: bool = Field(
        True,
        description="Rotate the spans at random; false: short texts always lose their last tokens.",
    )
    final_sentinel: bool = Field(True, description="End each target in one more sentinel.")

    def counts(self, length: int) -> tuple[int, int]:
        """The number of dropped tokens of a text of `length` tokens, and the number of spans.

        round(length x noise_density) tokens, at least 1 and never all, in round(dropped /
        `mean_span_length`) spans, at least 1 and at most the number of kept tokens. A text of one
        token is unchanged. Halves are rounded to even in double precision, as in the authors'
        `random_spans_helper`; their mask uses single precision and differs at a few halves, first
        at 190 tokens.
        """
        if self.noise_density == 0 or length < 2:
            return 0, 0
        dropped = min(max(round(length * self.noise_density), 1), length - 1)
        return dropped, min(max(round(dropped / self.mean_span_length), 1), length - dropped)

    def mask(self, length: int, rng: np.random.Generator) -> Bool[np.ndarray, " length"]:
        """True (length,) for dropped tokens: a uniformly random mask with the numbers of `counts`.

        Kept and dropped spans alternate, starting with a kept and ending with a dropped one.
        `random_roll` rolls the mask by a random number of positions, so that all tokens are
        dropped with equal probability; a span may then continue at the start of the text.
        """
        dropped, spans = self.counts(length)
        if not spans:
            return np.zeros(length, dtype=np.bool_)
        sizes = [_random_composition(total, spans, rng) for total in (dropped, length - dropped)]
        mask = np.repeat(np.tile([False, True], spans), np.stack(sizes[::-1], axis=1).ravel())
        return np.roll(mask, rng.integers(length)) if self.random_roll else mask

    def insert_sentinels(
        self, ids: Integer[np.ndarray, " n"], mask: Bool[np.ndarray, " n"], tokens: NoiseTokens
    ) -> tuple[Ids, Ids]:
        """Source with a sentinel for each span of the mask, and target of sentinels with spans.

        With `final_sentinel` the target ends with one more sentinel, as in the paper. The authors'
        code adds it only if kept text follows the last span, thus never without `random_roll`;
        their `random_spans_helper` does not count it.

        Raises:
            UserError: more spans than sentinels.
        """
        starts = mask.copy()
        starts[1:] &= ~mask[:-1]
        num_spans = int(starts.sum())
        needed = num_spans + self.final_sentinel
        if needed > len(tokens.sentinel_ids):
            raise UserError(
                f"a text of {len(ids)} tokens has {num_spans} spans and needs {needed} sentinels,"
                f" but the vocabulary has {len(tokens.sentinel_ids)}; add sentinels, cut the text"
                " into shorter ones, or raise mean_span_length"
            )
        sentinels = np.array(tokens.sentinel_ids[:needed], dtype=np.int64)
        inputs = ids.astype(np.int64)
        spans = np.insert(inputs[mask], np.flatnonzero(starts[mask]), sentinels[:num_spans])
        inputs[starts] = sentinels[:num_spans]
        inputs = np.append(inputs[starts | ~mask], tokens.eos_id)
        return inputs, np.concatenate([spans, sentinels[num_spans:], inputs[-1:]])

    def sides(self, text: Ids, rng: np.random.Generator, tokens: NoiseTokens) -> tuple[Ids, Ids]:
        return self.insert_sentinels(text, self.mask(len(text), rng), tokens)

    def max_side_lengths(self, max_length: int) -> Int64[np.ndarray, "2 lengths"]:
        sides = np.zeros((2, max_length + 1), dtype=np.int64)
        for length in range(1, max_length + 1):
            dropped, spans = self._most_spans(length)
            target = dropped + spans + self.final_sentinel + 1
            sides[:, length] = length - dropped + spans, target
        return sides

    def specials(self, max_length: int) -> tuple[str, ...]:
        spans = max(self._most_spans(length)[1] for length in range(1, max_length + 1))
        return tuple(f"<extra_{number}>" for number in range(spans + self.final_sentinel))

    def check(self, tokens: NoiseTokens, max_length: int) -> None:
        needed = len(self.specials(max_length))
        if needed > len(tokens.sentinel_ids):
            raise UserError(
                f"objective.kind t5 needs {needed} sentinels for texts of {max_length} tokens, but "
                f"the vocabulary has {len(tokens.sentinel_ids)}; lower data.max_length, or leave "
                "out init_from"
            )

    def _most_spans(self, length: int) -> tuple[int, int]:
        """Upper bounds of `counts` for a stored text, with an EOS that is never dropped."""
        dropped, spans = self.counts(length - 1)
        return dropped, spans + bool(self.random_roll and dropped > spans)


class BartNoise(Noise):
    """BART's noise: the source is the corrupted text, the target the original.

    The defaults are those of the paper's sec. 5.1. The order is sentence permutation, deletion,
    masking, infilling, rotation. Shares refer to the tokens left by the step before, and select
    exactly round(share x n) of n tokens, halves to even.
    """

    restores_bos: ClassVar[bool] = True
    kind: Literal["bart"] = Field(
        "bart", description="BART noise: the targets are the whole texts."
    )
    infilling: Share = Field(
        0.3, description="Share of the tokens masked in spans, by one mask per span."
    )
    mean_span_length: SpanLength = Field(
        3.0, description="Mean length of a span in tokens; an empty span adds a mask."
    )
    masking: Share = Field(0.0, description="Share of the tokens masked one by one; 0: none.")
    deletion: Share = Field(0.0, description="Share of the tokens deleted without a mask; 0: none.")
    permute_sentences: bool = Field(True, description="Shuffle the sentences of each text.")
    rotate: bool = Field(False, description="Rotate each text to start at a random token.")

    def sides(self, text: Ids, rng: np.random.Generator, tokens: NoiseTokens) -> tuple[Ids, Ids]:
        """Ids of a noisy source and of its target, each with EOS.

        Sentences are permuted first, then tokens deleted, masked and infilled; rotation is last.
        """
        noisy = text.copy()
        if self.permute_sentences:
            sentences = np.split(noisy, sentence_ends(noisy, tokens))
            noisy = np.concatenate([sentences[i] for i in rng.permutation(len(sentences))])
        if self.deletion:
            noisy = np.delete(noisy, _sample_positions(len(noisy), self.deletion, rng))
        if self.masking:
            noisy[_sample_positions(len(noisy), self.masking, rng)] = tokens.mask_id
        if self.infilling:
            lengths = self.span_lengths(round(self.infilling * len(noisy)), rng)
            noisy = _infilled(noisy, lengths, rng, tokens.mask_id)
        if self.rotate and len(noisy):
            noisy = np.roll(noisy, -rng.integers(len(noisy)))
        return np.append(noisy, tokens.eos_id), np.append(text, tokens.eos_id)

    def span_lengths(self, total: int, rng: np.random.Generator) -> Ids:
        """Samples of Poisson(`mean_span_length`) up to the sum `total`; the last one is reduced."""
        lengths = np.zeros(0, dtype=np.int64)
        while lengths.sum() < total:
            lengths = np.append(lengths, rng.poisson(self.mean_span_length, size=total))
        ends = np.minimum(np.cumsum(lengths), total)
        num_spans = int(np.searchsorted(ends, total)) + 1 if total else 0
        return np.diff(ends[:num_spans], prepend=0)

    def max_side_lengths(self, max_length: int) -> Int64[np.ndarray, "2 lengths"]:
        return np.tile(np.arange(max_length + 1), (2, 1))

    def specials(self, max_length: int) -> tuple[str, ...]:
        return (MASK,) if self.infilling or self.masking else ()

    def check(self, tokens: NoiseTokens, max_length: int) -> None:
        if self.specials(max_length) and tokens.mask_id < 0:
            raise UserError(
                "objective.kind bart needs a mask token, but the vocabulary has none; leave out "
                "init_from, or set infilling and masking to 0"
            )
        if self.permute_sentences and not tokens.full_stop_ids:
            raise UserError(
                "objective.permute_sentences: no token of the vocabulary ends a sentence; set it "
                "to false"
            )


def sentence_ends(ids: Ids, tokens: NoiseTokens) -> Ids:
    """The positions after each run of full stops; "?!" or "..." ends one sentence."""
    stops = np.isin(ids, sorted(tokens.full_stop_ids))
    return np.flatnonzero(stops[:-1] & ~stops[1:]) + 1


def _infilled(ids: Ids, lengths: Ids, rng: np.random.Generator, mask_id: int) -> Ids:
    """The text with spans of the given lengths replaced by one mask each; an empty span adds one.

    The order of kept tokens and spans is uniformly random, so that two spans may be adjacent.
    """
    num_slots = len(ids) - int(lengths.sum()) + len(lengths)
    slots = np.sort(rng.choice(num_slots, len(lengths), replace=False))
    # Before span i are slots[i] - i kept tokens and the tokens of all earlier spans.
    starts = slots - np.arange(len(lengths)) + np.cumsum(lengths) - lengths
    is_kept = np.ones(len(ids), dtype=np.bool_)
    for start, length in zip(starts, lengths, strict=True):
        is_kept[start : start + length] = False
    filled = np.full(num_slots, mask_id, dtype=np.int64)
    filled[np.delete(np.arange(num_slots), slots)] = ids[is_kept]
    return filled


def _sample_positions(length: int, share: float, rng: np.random.Generator) -> Ids:
    return rng.choice(length, round(share * length), replace=False)


def _random_composition(total: int, num_parts: int, rng: np.random.Generator) -> Ids:
    """A uniformly random composition of `total` into `num_parts` positive integers."""
    cuts = np.sort(rng.choice(total - 1, num_parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
