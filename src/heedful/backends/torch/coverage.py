"""The coverage penalty of a beam search: low scores for source tokens with little attention."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.backends.torch.cached_net import DecodingState


class Coverage:
    """The `State` of a beam search that sums the attention of each beam to its source.

    A beam's score is changed by β Σᵢ log(min(Σⱼ pᵢⱼ, 1)) (Wu et al. 2016, "Google's Neural Machine
    Translation System", equation 14), where pᵢⱼ is the attention to source token i at step j: the
    mean over the heads of the decoder's last layer.

    Args:
        decoding: of B sources of S tokens, before the first target token.
        weight: β.
    """

    def __init__(self, decoding: DecodingState, weight: float) -> None:
        self.decoding, self.weight = decoding, weight
        decoding.record = None  # a replay calls no hooks
        self._attention: Any = decoding.net.decoder.blocks[-1].cross_attention.sublayer
        memory = decoding.cache.cross[-1]
        self._sums = torch.zeros(len(memory), 1, memory.size(2), device=memory.device)

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """See `DecodingState.reorder`."""
        self.decoding.reorder(parents)
        self._sums = self._sums.gather(1, parents[..., None].expand(-1, -1, self._sums.size(2)))

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """See `DecodingState.select`."""
        self.decoding.select(sentences)
        self._sums = self._sums[sentences]

    def next_log_probs(
        self, prefixes: Int[Tensor, "N t"], state: "Coverage"
    ) -> Float[Tensor, "N V"]:
        """See `DecodingState.next_log_probs`."""
        assert state is self
        with self._attention.weights_hook.register_forward_hook(self._add):
            return self.decoding.next_log_probs(prefixes, self.decoding)

    def penalties(self) -> Float[Tensor, "N"]:
        """The penalty of an output that ends with each row, to be added to its score."""
        covered = self._sums.clamp(torch.finfo(self._sums.dtype).tiny, 1).log()
        real = self.decoding.cache.source_real
        if real is not None:
            covered = covered * real[:, None]
        return self.weight * covered.sum(-1).flatten()

    def _add(self, pattern: Any, inputs: Any, weights: Float[Tensor, "B H T S"]) -> None:
        """Add the attention of each beam's last token to the sums."""
        beam_weights = weights.float().mean(1).unflatten(1, (self._sums.size(1), -1))
        self._sums = self._sums + beam_weights[:, :, -1]
