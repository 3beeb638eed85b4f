"""A rule for tokens that each output must have a certain number of times."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.generation.outputs import Counts
from heedful.generation.token_rules import Context, check_vocabulary


@dataclass(frozen=True)
class ExactCounts:
    """Each output has as many tokens of each group as is given for its sentence.

    A token is forbidden where the new tokens have all of its group, and EOS while they lack one. A
    group that only other sentences have is empty.
    """

    counts: Sequence[Counts]

    def __call__(self, log_probs: Float[Tensor, "N V"], context: Context) -> Float[Tensor, "N V"]:
        if not any(self.counts):
            return log_probs
        tokens, groups, limits = self._tables(log_probs, context)
        generated = context.generated
        numbers = torch.zeros_like(limits[context.sentence])
        numbers.scatter_add_(1, groups[generated], torch.ones_like(generated))
        left = limits[context.sentence] - numbers
        is_used = (left <= 0).index_select(1, groups[tokens])
        lacks = (left > 0)[:, :-1].any(dim=1, keepdim=True)
        log_probs = log_probs if context.in_place else log_probs.clone()
        eos_ids = context.table((id(self), "eos"), list(context.eos_ids))
        for ids, is_banned in ((tokens, is_used), (eos_ids, lacks)):
            values = log_probs.index_select(1, ids).masked_fill(is_banned, -torch.inf)
            log_probs.index_copy_(1, ids, values)
        return log_probs

    def _tables(
        self, log_probs: Float[Tensor, "N V"], context: Context
    ) -> tuple[Int[Tensor, "T"], Int[Tensor, "V"], Int[Tensor, "B G"]]:
        """The counted tokens, the group of each token of the vocabulary, and the numbers.

        The last group is that of all other tokens.
        """
        key = id(self)
        if (key, "groups") not in context.memory:
            groups = [*dict.fromkeys(group for counts in self.counts for group in counts)]
            tokens = [token for group in groups for token in group]
            check_vocabulary("counted", max(tokens), log_probs)
            of_tokens = [len(groups)] * log_probs.shape[1]
            for index, group in enumerate(groups):
                for token in group:
                    of_tokens[token] = index
            limits = [[counts.get(group, 0) for group in groups] + [0] for counts in self.counts]
            context.table((key, "groups"), of_tokens)
            context.table((key, "tokens"), tokens)
            context.table((key, "limits"), limits)
        memory = context.memory
        return memory[key, "tokens"], memory[key, "groups"], memory[key, "limits"]
