"""The type of logit rules, and the context that they can read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """The state of a search for its rules: `N` rows of `B` sentences with `t` new tokens each.

    Attributes:
        prompts: the prompt tokens of each sentence, without padding; may be empty lists.
        generated: the new tokens of each row.
        sentence: the sentence of each row.
        memory: tensors that a rule computes once; kept for the whole search.
        model_log_probs: the log-probabilities before any rule; None: the argument of the rule.
        is_open: False for rows that have ended, as far as the host knows; None: all are open.
        in_place: rules may write to their argument.
    """

    prompts: list[list[int]]
    generated: Int[Tensor, "N t"]
    sentence: Int[Tensor, "N"]
    memory: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)
    model_log_probs: Float[Tensor, "N V"] | None = None
    is_open: Sequence[bool] | None = None
    in_place: bool = False

    @property
    def length(self) -> int:
        """The number of new tokens of each row."""
        return self.generated.shape[1]

    def table(self, key: object, numbers: Sequence[Any]) -> Int[Tensor, "..."]:
        """Constant numbers as a tensor on the device of the search, kept by `key`."""
        if key not in self.memory:
            self.memory[key] = torch.tensor(numbers, device=self.generated.device)
        return self.memory[key]

    def history(self) -> Int[Tensor, "N all"]:
        """Prompt and new tokens of each row, padded with -1 on the left."""
        if "prompts" not in self.memory:
            width = max((len(ids) for ids in self.prompts), default=0)
            padded = [[-1] * (width - len(ids)) + list(ids) for ids in self.prompts]
            table = torch.tensor(padded, dtype=torch.long, device=self.generated.device)
            self.memory["prompts"] = table.view(len(padded), width)
        return torch.cat([self.memory["prompts"][self.sentence], self.generated], dim=1)


Rule = Callable[[Float[Tensor, "N V"], Context], Float[Tensor, "N V"]]
"""`rule(log_probs, context)` returns new log-probabilities; -inf forbids a token.

A rule must not write to its argument unless `context.in_place`. Its result need not sum to 1; a
rule that needs probabilities normalizes its argument.
"""
