"""Several nets of one vocabulary as one engine: the mean of their probabilities is searched."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.backends.base import GenerationRequest, Settings
from heedful.backends.torch.eager import Eager
from heedful.backends.torch.state import Decoding, Listed
from heedful.data.collate import Batch
from heedful.errors import UserError


class _Decodings:
    """What a search remembers of several nets: the memory of each. It is the search's `State`."""

    def __init__(self, parts: Sequence[Decoding], weights: Sequence[float]) -> None:
        self.parts = parts
        self.longest = min(part.longest for part in parts)
        self.weights = weights

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """As `Decoding.reorder`."""
        for part in self.parts:
            part.reorder(parents)

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """As `Decoding.select`."""
        for part in self.parts:
            part.select(sentences)

    def next_log_probs(
        self, prefixes: Int[Tensor, "N t"], state: "_Decodings"
    ) -> Float[Tensor, "N V"]:
        """The log of the weighted mean of the nets' probabilities."""
        assert state is self
        found = [part.next_log_probs(prefixes, part) for part in self.parts]
        return log_of_mean(found, self.weights)


class Ensemble(Eager):
    """Nets that read and write the same ids, each of its own architecture, as an `Backend`.

    Args:
        nets: as engines, of two stacks each or of one each.
        weights: of their probabilities, in any unit; default: all alike.
    """

    name = "ensemble"
    reads = frozenset({"scores"})

    def __init__(self, nets: Sequence[Eager], weights: Sequence[float] | None = None) -> None:
        settings = Settings(nets[0].settings.threads)
        modules = nn.ModuleList([net.net for net in nets])
        super().__init__(modules, min(net.max_length for net in nets), settings=settings)
        self.nets = list(nets)
        self.two_stacks = nets[0].two_stacks
        self.weights = [1.0] * len(self.nets) if weights is None else list(weights)
        if len(self.weights) != len(self.nets):
            raise UserError(f"{len(self.weights)} weights for {len(self.nets)} models")
        largest = max(self.weights)
        for weight in self.weights:
            if not 0 < weight < math.inf or not weight / largest:
                raise UserError(
                    f"weights must be finite, comparable numbers above 0, not {weight:g}"
                )
        self.weights = [weight / largest for weight in self.weights]  # whose sum is finite

    @property
    def vocab_size(self) -> int:
        """How many ids the output of each net has."""
        return self.nets[0].vocab_size

    @cached_property
    def _weights_of_step(self) -> int:
        return sum(net._weights_of_step for net in self.nets)

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """Nothing that one net alone could give; raises UserError for a draft."""
        if request.draft is not None:
            raise UserError("an ensemble takes no draft; leave it out, or give one model")
        if request.options.coverage_penalty:
            raise UserError("an ensemble takes no coverage_penalty; leave it out")
        return []

    def open(
        self,
        rows: list[list[int]],
        start: Sequence[int],
        capacity: int,
        beams: int,
        listed: Listed | None = None,
    ) -> tuple[Int[Tensor, "B t"], Any]:
        """As `Eager.open`, of each net."""
        assert listed is None, "an ensemble has no shortlist"
        opened = [net.open(rows, start, capacity, beams) for net in self.nets]
        return opened[0][0], _Decodings([state for _, state in opened], self.weights)

    def log_probs_of(self, batch: Batch) -> Callable[[slice], Float[Tensor, "n V"]]:
        """As `Eager.log_probs_of`, of the mean of the nets' probabilities."""
        functions = [net.log_probs_of(batch) for net in self.nets]
        return lambda rows: log_of_mean([of(rows) for of in functions], self.weights)


def log_of_mean(
    log_probs: Sequence[Float[Tensor, "N V"]], weights: Sequence[float]
) -> Float[Tensor, "N V"]:
    """log Σ wᵢ pᵢ, the weights divided by their sum."""
    shares = [math.log(weight / sum(weights)) for weight in weights]
    parts = [part + share for part, share in zip(log_probs, shares, strict=True)]
    return torch.stack(parts).logsumexp(0)
