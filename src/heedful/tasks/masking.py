"""Which tokens masked language modelling hides, and what stands in their place."""

import numpy as np
from jaxtyping import Bool, Int64, Integer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from heedful.errors import UserError


class Masking(BaseModel):
    """BERT's masking and its numbers (Devlin et al. 2019, sec. 3.1 and appendix A)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fraction: float = Field(
        0.15, gt=0, le=1, description="of the ordinary tokens, selected to be predicted"
    )
    mask_share: float = Field(0.8, ge=0, le=1, description="of the selected ones, masked")
    random_share: float = Field(
        0.1, ge=0, le=1, description="of the selected ones, replaced; the rest is kept"
    )
    whole_word: bool = Field(False, description="select all pieces of a word or none")

    @model_validator(mode="after")
    def _shares(self) -> "Masking":
        # The room is for sums such as 0.1 + 0.9, which need not be exact.
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UserError(
                f"mask_share {self.mask_share} and random_share {self.random_share} make more"
                " than 1; lower one of them"
            )
        return self


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

    Selected are round(`fraction` x ordinary tokens), at least 1, each set of that size as likely
    as any other. The number is not left to chance because BERT's authors fix it as well
    (`create_masked_lm_predictions`), so that every text has something to learn from and batches
    weigh alike; they also count the specials, which would make it depend on the frame of a text.
    A text without an ordinary token has nothing selected.

    With `whole_word`, words in a random order are selected until that number is reached. It is
    exceeded by less than a word, because to skip the words that are too long for what is left,
    as the authors do, would hardly ever mask a long word of a short text.

    Each selected token is masked, replaced or kept independently of the others (as the authors
    do, also inside a word). A replacement is uniform over the ordinary ids, the original included.

    Args:
        vocab_size: ids are below it.
        special_ids: never selected, and never a replacement; so is `mask_id`.
        word_starts: where words begin, for `whole_word`. A special token ends a word too.

    Raises:
        UserError: `whole_word` without `word_starts`.
    """
    special = np.array(sorted(special_ids | {mask_id}))
    assert special[-1] < vocab_size, (special, vocab_size)
    ordinary = ~np.isin(ids, special)
    if masking.whole_word:
        if word_starts is None:
            raise UserError(
                "whole_word needs to know where words begin, which this tokenizer does not tell;"
                " set it to false"
            )
        starts = word_starts.copy()
        starts[1:] |= ~ordinary[:-1]
    else:
        starts = np.ones(len(ids), dtype=np.bool_)
    selected = _select_words(ordinary, starts, masking.fraction, rng)
    places = np.flatnonzero(selected)
    fate = rng.random(len(places))
    inputs = ids.astype(np.int64)
    inputs[places[fate < masking.mask_share]] = mask_id
    others = places[
        (fate >= masking.mask_share) & (fate < masking.mask_share + masking.random_share)
    ]
    inputs[others] = _draw_ordinary(rng, len(others), vocab_size, special)
    return inputs, selected


def _select_words(
    ordinary: Bool[np.ndarray, " n"],
    starts: Bool[np.ndarray, " n"],
    fraction: float,
    rng: np.random.Generator,
) -> Bool[np.ndarray, " n"]:
    """Whole words, in a random order, until their ordinary tokens are `fraction` of all."""
    selected = np.zeros(len(ordinary), dtype=np.bool_)
    num_ordinary = int(ordinary.sum())
    if num_ordinary == 0:
        return selected
    # Words are numbered from 0 over the ordinary tokens alone.
    _, word = np.unique(np.cumsum(starts)[ordinary], return_inverse=True)
    lengths = np.bincount(word)
    order = rng.permutation(len(lengths))
    wanted = max(1, round(fraction * num_ordinary))
    num_words = int(np.searchsorted(np.cumsum(lengths[order]), wanted)) + 1
    chosen = np.zeros(len(lengths), dtype=np.bool_)
    chosen[order[:num_words]] = True
    selected[ordinary] = chosen[word]
    return selected


def _draw_ordinary(
    rng: np.random.Generator, count: int, vocab_size: int, special: Integer[np.ndarray, " s"]
) -> Int64[np.ndarray, " count"]:
    """Ids below `vocab_size` without the special ones (ascending), all equally likely."""
    drawn = rng.integers(vocab_size - len(special), size=count)
    for special_id in special:
        drawn += drawn >= special_id
    return drawn
