"""Rules on next-token log-probabilities: what may not, or must, come next."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Constraints:
    """The rules of one search, each with its own numbers for each of `B` sentences.

    Any of `eos_ids` ends a hypothesis; a forced end is the first of them. `forced` holds the
    forced first tokens, filled up with -1. A forced token wins over the other rules; a search
    checks that it does not contradict the lengths.
    """

    eos_ids: tuple[int, ...]
    min_lengths: Int[Tensor, "B"]
    max_lengths: Int[Tensor, "B"]
    no_repeat_ngram_size: int
    forced: Int[Tensor, "B F"]
    force_eos: bool
    largest_forced: int = -1

    def __call__(
        self,
        log_probs: Float[Tensor, "N V"],
        generated: Int[Tensor, "N t"],
        sentence: Int[Tensor, "N"],
        unruled: Float[Tensor, "N V"] | None = None,
    ) -> Float[Tensor, "N V"]:
        """The log-probabilities under all rules; a new tensor wherever one of them changes it.

        `generated` are each row's new tokens so far, `sentence` the sentence it belongs to.
        Forced tokens take their value from `unruled`, where logit rules came before.
        """
        given, t = log_probs if unruled is None else unruled, generated.shape[1]
        log_probs = self.forbid_early_end(log_probs, t, sentence)
        if self.no_repeat_ngram_size:
            log_probs = forbid_repeats(log_probs, generated, self.no_repeat_ngram_size)
        if self.force_eos:
            last = self.max_lengths[sentence] == t + 1
            log_probs = allow_only(log_probs, last, torch.full_like(sentence, self.eos_ids[0]))
        if t < self.forced.shape[1]:
            tokens = self.forced[sentence, t]
            forced = tokens >= 0
            unforced = torch.where(forced[:, None], given, log_probs)
            log_probs = allow_only(unforced, forced, tokens.clamp(min=0))
        return log_probs

    def forbid_early_end(
        self, log_probs: Float[Tensor, "N V"], t: int, sentence: Int[Tensor, "N"]
    ) -> Float[Tensor, "N V"]:
        """-inf for every EOS in the rows that are too short, with `t` tokens, to end now."""
        return forbid_tokens(log_probs, self.min_lengths[sentence] > t + 1, self.eos_ids)


def forbid_tokens(
    log_probs: Float[Tensor, "N V"], rows: Bool[Tensor, "N"], tokens: tuple[int, ...]
) -> Float[Tensor, "N V"]:
    """-inf for some tokens in the marked rows."""
    if not rows.any():
        return log_probs
    log_probs = log_probs.clone()
    for token in tokens:
        log_probs[rows, token] = -torch.inf
    return log_probs


def forbid_repeats(
    log_probs: Float[Tensor, "N V"], generated: Int[Tensor, "N t"], size: int
) -> Float[Tensor, "N V"]:
    """-inf for every token that would complete an n-gram of `size` which `generated` holds.

    Ids outside the vocabulary, such as a filling of -1 on the left, cannot come and are passed
    over.
    """
    t = generated.shape[1]
    if t < size:
        return log_probs
    # Windows that have a next token, against the last size - 1 tokens; with size 1 both are
    # empty and every window matches.
    windows = generated[:, : t - 1].unfold(1, size - 1, 1) if size > 1 else None
    if windows is None:
        seen = torch.ones_like(generated, dtype=torch.bool)
    else:
        seen = (windows == generated[:, None, t - size + 1 :]).all(dim=2)
    rows, starts = seen.nonzero(as_tuple=True)
    if not len(rows):
        return log_probs
    tokens = generated[rows, starts + size - 1]
    known = (tokens >= 0) & (tokens < log_probs.shape[1])
    log_probs = log_probs.clone()
    log_probs[rows[known], tokens[known]] = -torch.inf
    return log_probs


def allow_only(
    log_probs: Float[Tensor, "N V"], rows: Bool[Tensor, "N"], tokens: Int[Tensor, "N"]
) -> Float[Tensor, "N V"]:
    """-inf for everything but one token a row, in the marked rows; that token's value stays."""
    marked = rows.nonzero()[:, 0]
    if not len(marked):
        return log_probs
    value = log_probs[marked, tokens[marked]]
    log_probs = log_probs.clone()
    log_probs[marked] = -torch.inf
    log_probs[marked, tokens[marked]] = value
    return log_probs
