"""Ensembles: the mean of several nets' probabilities is searched (Sutskever et al. 2014, 3.6)."""

import math
from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.torch.cached_net import DecodingNet, DecodingState
from heedful.backends.torch.eager import Eager
from heedful.backends.torch.generating import TorchGenerator
from heedful.backends.torch.target_scoring import LogProbs, net_log_probs
from heedful.backends.torch.threads import ThreadPolicy, weights_of_step
from heedful.data.collate import Batch
from heedful.errors import UserError


class EnsembleState:
    """The `State` of a search with several nets: the state of each."""

    def __init__(self, states: Sequence[DecodingState], weights: Sequence[float]) -> None:
        self.states = states
        self.longest = min(state.longest for state in states)
        self.weights = weights

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """See `DecodingState.reorder`."""
        for state in self.states:
            state.reorder(parents)

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """See `DecodingState.select`."""
        for state in self.states:
            state.select(sentences)

    def next_log_probs(
        self, prefixes: Int[Tensor, "N t"], state: "EnsembleState"
    ) -> Float[Tensor, "N V"]:
        """The log of the weighted mean of the nets' probabilities."""
        assert state is self
        parts = [part.next_log_probs(prefixes, part) for part in self.states]
        return log_of_mean(parts, self.weights)


class EnsembleNet:
    """Several nets as one `DecodingNet`.

    Args:
        nets: of one vocabulary and one family.
        weights: of their probabilities, up to a common factor.
    """

    def __init__(self, nets: Sequence[DecodingNet], weights: Sequence[float]) -> None:
        self.nets = nets
        self.weights = weights
        self.max_length = min(net.max_length for net in nets)
        self.is_encoder_decoder = nets[0].is_encoder_decoder

    @property
    def device(self) -> torch.device:
        """See `DecodingNet.device`."""
        return self.nets[0].device

    @property
    def vocab_size(self) -> int:
        """See `DecodingNet.vocab_size`."""
        return self.nets[0].vocab_size

    def open(
        self,
        rows: list[list[int]],
        start_ids: Sequence[int],
        capacity: int,
        beams: int,
        allowed_ids: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Int[Tensor, "B t"], EnsembleState]:
        """See `DecodingNet.open`, for each net."""
        assert allowed_ids is None, "ensembles have no shortlist"
        opened = [net.open(rows, start_ids, capacity, beams) for net in self.nets]
        return opened[0][0], EnsembleState([state for _, state in opened], self.weights)


class Ensemble(TorchGenerator):
    """Nets of any architectures of one family and one vocabulary as a backend.

    Args:
        nets: encoder-decoders, or decoder-only nets.
        weights: of their probabilities, up to a common factor; None: equal.

    Raises:
        UserError: wrong weights.
    """

    name = "ensemble"
    capabilities: frozenset[Capability] = frozenset({"target_scores"})

    def __init__(self, nets: Sequence[Eager], weights: Sequence[float] | None = None) -> None:
        settings = nets[0].settings
        self.settings = Settings(settings.threads, may_reduce=settings.may_reduce)
        self.weights = checked_weights(weights, len(nets))
        self._nets = [backend.net for backend in nets]
        net = EnsembleNet([backend.decoding for backend in nets], self.weights)
        threads = ThreadPolicy(self.settings, self._weights_of_step)
        super().__init__(net, threads, self._log_probs_of)

    def prepare(self) -> None:
        """See `TorchGenerator.prepare`."""
        for net in self._nets:
            net.eval()

    @property
    def precision(self) -> str:
        """The data type of the first net's weights."""
        return str(next(self._nets[0].parameters()).dtype).removeprefix("torch.")

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """Options that only a single net supports."""
        reasons = [] if request.draft is None else ["an ensemble takes no draft"]
        if request.options.coverage_penalty:
            reasons.append("an ensemble takes no coverage_penalty")
        return reasons

    def _log_probs_of(self, batch: Batch) -> LogProbs:
        functions = [net_log_probs(net, batch) for net in self._nets]
        return lambda rows: log_of_mean([function(rows) for function in functions], self.weights)

    def _weights_of_step(self) -> int:
        return sum(map(weights_of_step, self._nets))


def checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """One weight for each model, the largest 1; raises UserError for wrong ones."""
    values = [1.0] * count if weights is None else list(weights)
    if len(values) != count:
        raise UserError(f"{len(values)} weights for {count} models")
    largest = max(values)
    for weight in values:
        if not 0 < weight < math.inf or not weight / largest:
            raise UserError(f"weights must be finite, comparable numbers above 0, not {weight:g}")
    return [weight / largest for weight in values]  # so that their sum is finite


def log_of_mean(
    log_probs: Sequence[Float[Tensor, "N V"]], weights: Sequence[float]
) -> Float[Tensor, "N V"]:
    """log Σ wᵢ pᵢ, the weights divided by their sum."""
    shares = [math.log(weight / sum(weights)) for weight in weights]
    parts = (part + share for part, share in zip(log_probs, shares, strict=True))
    return reduce(torch.logaddexp, parts)  # faster than logsumexp of a stack
