"""The type of logit rules, and the context that they can read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int, Num
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
        sources: ids of each sentence that the output is made from: the encoder's input; None: the
            prompts.
        eos_ids: ids that end an output.
    """

    prompts: list[list[int]]
    generated: Int[Tensor, "N t"]
    sentence: Int[Tensor, "N"]
    memory: dict[object, Tensor] = field(default_factory=dict, repr=False, compare=False)
    model_log_probs: Float[Tensor, "N V"] | None = None
    is_open: Sequence[bool] | None = None
    in_place: bool = False
    sources: list[list[int]] | None = None
    eos_ids: Sequence[int] = ()

    @property
    def length(self) -> int:
        """The number of new tokens of each row."""
        return self.generated.shape[1]

    def table(self, key: object, numbers: Sequence[Any]) -> Num[Tensor, "..."]:
        """Constant numbers as a tensor on the device of the search, kept by `key`."""
        if key not in self.memory:
            self.memory[key] = torch.tensor(numbers, device=self.generated.device)
        return self.memory[key]

    def history(self) -> Int[Tensor, "N all"]:
        """Prompt and new tokens of each row, padded with -1 on the left."""
        prompts = self._padded("prompts", self.prompts)[self.sentence]
        return torch.cat([prompts, self.generated], dim=1)

    def source_ids(self) -> Int[Tensor, "N s"]:
        """The source of each row, padded with -1 on the left."""
        rows = self.prompts if self.sources is None else self.sources
        return self._padded("sources", rows)[self.sentence]

    def _padded(self, key: str, rows: list[list[int]]) -> Int[Tensor, "B s"]:
        """Ids of each sentence, padded with -1 on the left; kept for the whole search."""
        if key not in self.memory:
            width = max(map(len, rows), default=0)
            padded = [[-1] * (width - len(ids)) + list(ids) for ids in rows]
            table = torch.tensor(padded, dtype=torch.long, device=self.generated.device)
            self.memory[key] = table.view(len(padded), width)
        return self.memory[key]


Rule = Callable[[Float[Tensor, "N V"], Context], Float[Tensor, "N V"]]
"""`rule(log_probs, context)` returns new log-probabilities; -inf forbids a token.

A rule must not write to its argument unless `context.in_place`. Its result need not sum to 1; a
rule that needs probabilities normalizes its argument.
"""
