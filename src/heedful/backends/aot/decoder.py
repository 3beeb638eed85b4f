"""The compiled backend of nets that generate: decoding steps as graphs."""

from dataclasses import replace
from pathlib import Path

import torch

from heedful.backends.aot.compiled_net import CompiledFacts, CompiledNet
from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.manifest import SHORTLIST
from heedful.backends.torch.cached_net import CachedNet
from heedful.backends.torch.generating import TorchGenerator
from heedful.backends.torch.target_scoring import LogProbs
from heedful.backends.torch.threads import ThreadPolicy
from heedful.data.collate import Batch
from heedful.evaluation.likelihood import log_softmax


class Compiled(TorchGenerator):
    """The compiled graphs of an encoder-decoder or decoder-only net as a backend; CPU only.

    Args:
        directory: of the graphs (`heedful.backends.aot.compile`).
        weights: the model's own file of weights.
        trusted: as in `CompiledNet`.

    Raises:
        UserError: as in `CompiledNet`.
    """

    name = "compiled"
    capabilities: frozenset[Capability] = frozenset()

    def __init__(
        self,
        directory: Path,
        weights: Path,
        facts: CompiledFacts,
        precision: str,
        settings: Settings,
        *,
        trusted: bool = False,
    ) -> None:
        self.net = CompiledNet(directory, weights, facts, trusted=trusted)
        self.precision = precision
        self.settings = replace(settings, threads=settings.threads or 1, workers=1)
        self._has_shortlist = (directory.parents[1] / SHORTLIST).is_file()
        is_encoder_decoder = facts.family == "encoder_decoder"
        cpu = torch.device("cpu")
        decoding = CachedNet(self.net, facts.max_length, is_encoder_decoder, cpu)
        super().__init__(decoding, ThreadPolicy(self.settings), self._log_probs_of)

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """See `GenerationBackend.unsupported_reasons`."""
        reasons = unsupported_options(request)
        if self._has_shortlist and request.options.shortlist:
            reasons.append("it takes no shortlist, give shortlist=False")
        longest = self.decoding.max_length
        if not self.decoding.is_encoder_decoder and any(
            len(row) + limit > longest
            for row, limit in zip(rows, request.max_new_tokens, strict=True)
        ):
            reasons.append(f"prompt and output may exceed the {longest} tokens of the net")
        return reasons

    def _log_probs_of(self, batch: Batch) -> LogProbs:
        """The graphs return the logits of all tokens at once."""
        sides = [batch.tokens] if batch.source is None else [batch.source, batch.tokens]
        ids, lengths = [side.ids for side in sides], [side.lengths for side in sides]
        logits = (
            self.net.logits(*ids, *lengths).flatten(0, 1).index_select(0, batch.target_positions)
        )
        return lambda rows: log_softmax(logits[rows])


def unsupported_options(request: GenerationRequest) -> list[str]:
    """The reasons against a request that no compiled net can run."""
    reasons = [] if request.draft is None else ["it has no option draft"]
    if request.options.coverage_penalty:
        reasons.append("its graphs return no attention weights for option coverage_penalty")
    return reasons
