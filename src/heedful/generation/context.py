"""Logit rules: their type, and what they may look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """What a rule may look at, for `N` rows of `B` sentences with `t` new tokens each.

    Attributes:
        prompts: the real prompt tokens of each sentence, without padding; may be empty lists.
        generated: the new tokens of each row.
        sentence: which sentence each row belongs to.
        memory: lives as long as the search, for what a rule works out once.
        given: the log-probabilities before any rule; None: those that the rule gets.
        is_open: which rows have not ended, as far as the host knows; None: all.
        in_place: a rule may write to what it gets, which nobody needs any more.
    """

    prompts: list[list[int]]
    generated: Int[Tensor, "N t"]
    sentence: Int[Tensor, "N"]
    memory: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)
    given: Float[Tensor, "N V"] | None = None
    is_open: Sequence[bool] | None = None
    in_place: bool = False

    @property
    def length(self) -> int:
        """How many new tokens each row has."""
        return self.generated.shape[1]

    def table(self, key: object, numbers: Sequence[Any]) -> Int[Tensor, "..."]:
        """Numbers that stay the same, on the device of the search."""
        if key not in self.memory:
            self.memory[key] = torch.tensor(numbers, device=self.generated.device)
        return self.memory[key]

    def history(self) -> Int[Tensor, "N all"]:
        """Each row's prompt and new tokens, filled up with -1 on the left."""
        if "prompts" not in self.memory:
            width = max((len(ids) for ids in self.prompts), default=0)
            filled = [[-1] * (width - len(ids)) + list(ids) for ids in self.prompts]
            table = torch.tensor(filled, dtype=torch.long, device=self.generated.device)
            self.memory["prompts"] = table.view(len(filled), width)
        return torch.cat([self.memory["prompts"][self.sentence], self.generated], dim=1)


Rule = Callable[[Float[Tensor, "N V"], Context], Float[Tensor, "N V"]]
"""`rule(log_probs, context)`: -inf forbids a token. It gives a new tensor wherever it changes one,
unless the context lets it write in place.

What a rule gives need not sum to 1; one that needs probabilities normalises for itself.
"""
