"""Log-probabilities of given target tokens, by teacher forcing."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heedful.backends.base import GenerationRequest
from heedful.backends.torch.cached_net import checked_start_ids, right_padded
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import SCORED_ROWS, Net, log_softmax, target_states
from heedful.parts.tokens import Tokens

LogProbs = Callable[[slice], Float[Tensor, "n V"]]
"""Log-probabilities of all entries for a slice of a batch's targets; see `score_targets`."""


def forced_batch(
    rows: list[list[int]],
    targets: list[list[int]] | None,
    request: GenerationRequest,
    device: torch.device,
) -> tuple[Batch, list[int]]:
    """The batch of `GenerationBackend.log_probs`, and the number of scored tokens of each row."""
    if targets is None:
        inputs, scored, source = rows, [row[1:] for row in rows], None
        first_scored = 0
    else:
        start = checked_start_ids(request.decoder_start_ids)
        inputs = [[*start, *target] for target in targets]
        scored = [[*target, request.eos_ids[0]] for target in targets]
        source = Tokens.from_ids(*right_padded(rows, device))
        first_scored = len(start) - 1
    tokens = Tokens.from_ids(*right_padded(inputs, device))
    counts = [len(row) for row in scored]
    positions = [torch.arange(count) for count in counts]
    width = tokens.ids.size(1)
    batch = Batch(
        tokens=tokens,
        source=source,
        targets=torch.tensor([*chain.from_iterable(scored)], dtype=torch.long),
        target_positions=torch.cat([p + n * width + first_scored for n, p in enumerate(positions)]),
        indices=np.arange(len(rows)),
        num_tokens=sum(map(len, inputs)),
    )
    return batch, counts


def net_log_probs(net: Net, batch: Batch) -> LogProbs:
    """The log-probabilities of a net's output distributions."""
    states, head = target_states(net, batch), net.head
    assert head is not None
    return lambda rows: log_softmax(head(states[rows]))


RowScores = tuple[list[float], list[list[tuple[int, float]]]]
"""Of each token of a row but the first: its log-probability, and the most probable tokens there
with theirs, best first."""


@torch.inference_mode()
def row_scores(eager: Any, rows: list[list[int]], num_top: int) -> list[RowScores]:
    """The scores of rows by a decoder-only net.

    Args:
        eager: the net's `Eager`.
        num_top: most probable tokens at each place.
    """
    eager.prepare()
    with eager.threads.for_tokens(sum(map(len, rows))):
        states = eager.net.decode(Tokens.from_ids(*right_padded(rows, eager.device)))
        results: list[RowScores] = []
        for row, of_row in zip(rows, states, strict=True):
            results.append(([], []))
            for first in range(0, len(row) - 1, SCORED_ROWS):
                targets = row[first + 1 : first + 1 + SCORED_ROWS]
                scores = log_softmax(eager.net.head(of_row[first : first + len(targets)]))
                ids = torch.tensor(targets, device=scores.device)
                results[-1][0].extend(scores.gather(1, ids[:, None])[:, 0].tolist())
                best = scores.topk(min(num_top, scores.size(1)), dim=1)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                results[-1][1].extend([*zip(*pair, strict=True)] for pair in pairs)
    return results
