"""Greedy decoding from logits, for requests without rules other than banned tokens."""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.hypotheses import Failure, Hypothesis, LengthScore
from heedful.generation.request import SearchRequest
from heedful.generation.state import State, sentences_to_keep
from heedful.generation.token_rules import check_vocabulary
from heedful.generation.topk import first_largest


@runtime_checkable
class LogitState(State, Protocol):
    """A `State` that returns logits."""

    def next_logits(self, prefixes: Int[Tensor, "N t"]) -> Float[Tensor, "N V"]:
        """Logits after each row, in memory that the caller may write to."""


def greedy_from_logits(
    state: LogitState,
    request: SearchRequest,
    banned_ids: Sequence[int],
    score: LengthScore,
    *,
    with_scores: bool = True,
) -> list[Hypothesis]:
    """The outputs of `greedy_search` for a request without rules, with fewer operations per step.

    Tokens are chosen by their logits, without normalization: the log-sum-exp is computed only for
    scores.

    Args:
        state: of a batch on the CPU, with the prompts (or sources) before the start in it.
        request: its start, length limits and EOS ids are used, but not its rules.
        banned_ids: ids that are forbidden in the output.
        with_scores: False: log-probabilities and scores are NaN.
    """
    banned = torch.tensor([*banned_ids], dtype=torch.long)
    eos_ids, largest_minimum = torch.tensor(request.eos_ids), max(request.min_new_tokens, default=0)
    outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in range(request.batch)]
    hypotheses: dict[int, Hypothesis] = {}

    def close(row: int, failure: Failure | None = None) -> None:
        """Complete the output of a row."""
        ids, log_probs = outputs[row]
        is_finished = bool(ids) and ids[-1] in request.eos_ids
        hypotheses[row] = score.hypothesis(ids, log_probs, is_finished, failure)
        if request.on_done is not None:
            request.on_done(row, [hypotheses[row]])

    rows, tokens, length = [*range(request.batch)], request.start, 0
    while rows:
        logits = state.next_logits(tokens).float()
        if length == 0:
            check_vocabulary("banned", max(banned_ids, default=0), logits)
            check_vocabulary("EOS", max(request.eos_ids), logits)
        sums = logits.logsumexp(-1) if with_scores else 0.0
        length += 1
        if banned_ids:
            logits.index_fill_(1, banned, -torch.inf)
        if length < largest_minimum:
            short = [i for i, row in enumerate(rows) if length < request.min_new_tokens[row]]
            if len(short) == len(rows):
                logits.index_fill_(1, eos_ids, -torch.inf)
            else:
                logits[torch.tensor(short, dtype=torch.long)[:, None], eos_ids] = -torch.inf
        largest, tokens = first_largest(logits)
        log_probs = (largest[:, 0] - sums).tolist()
        for row, [token], log_prob in zip(rows, tokens.tolist(), log_probs, strict=True):
            if row in hypotheses:
                continue
            if log_prob != log_prob:
                raise UserError(f"the model gave NaN at step {length}: look for an overflow in it")
            if log_prob == -math.inf:  # every token is banned
                close(row, "dead_end")
                continue
            ids, token_log_probs = outputs[row]
            ids.append(token)
            token_log_probs.append(log_prob if with_scores else math.nan)
            if request.end_reason(row, ids, None) is not None:
                close(row)
        is_open = [row not in hypotheses for row in rows]
        keep = sentences_to_keep(is_open, not any(is_open))
        if keep is not None:
            rows = [rows[index] for index in keep]
            if rows:
                state.select(torch.tensor(keep))
                tokens = tokens[keep]
    return [hypotheses[row] for row in range(request.batch)]
