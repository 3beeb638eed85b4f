"""Base of the backends whose decoding steps are graphs, called by the searches of `Searcher`."""

from dataclasses import replace
from typing import Any

import torch

from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.torch.cached_net import CachedNet
from heedful.backends.torch.generating import TorchGenerator
from heedful.backends.torch.target_scoring import LogProbs
from heedful.backends.torch.threads import ThreadPolicy
from heedful.data.collate import Batch
from heedful.evaluation.target_scores import log_softmax


class GraphGenerator(TorchGenerator):
    """The graphs of an encoder-decoder or decoder-only net as a backend; CPU only.

    Args:
        net: with `start`, `decode`, `head` and `logits`; `decode` returns logits.
        max_length: positions of the net.
        has_shortlist: the model has a shortlist.
    """

    capabilities: frozenset[Capability] = frozenset()

    def __init__(
        self,
        net: Any,
        max_length: int,
        precision: str,
        settings: Settings,
        *,
        is_encoder_decoder: bool,
        has_shortlist: bool,
    ) -> None:
        self.net = net
        self.precision = precision
        self.settings = replace(settings, threads=settings.threads or 1, workers=1)
        self._has_shortlist = has_shortlist
        self.decoding = CachedNet(net, max_length, is_encoder_decoder, torch.device("cpu"))
        super().__init__(self.decoding, ThreadPolicy(self.settings), self._log_probs_of)

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """See `GenerationBackend.unsupported_reasons`."""
        reasons = [] if request.draft is None else ["it has no option draft"]
        if request.options.coverage_penalty:
            reasons.append("its graphs return no attention weights for option coverage_penalty")
        if self._has_shortlist and request.options.shortlist:
            reasons.append("it takes no shortlist, give shortlist=False")
        return reasons

    def _log_probs_of(self, batch: Batch) -> LogProbs:
        """The graphs return the logits of all tokens at once."""
        sides = [batch.tokens] if batch.source is None else [batch.source, batch.tokens]
        ids, lengths = [side.ids for side in sides], [side.lengths for side in sides]
        logits = (
            self.net.logits(*ids, *lengths).flatten(0, 1).index_select(0, batch.target_positions)
        )
        return lambda rows: log_softmax(logits[rows])
