"""Base of the backends that generate with torch: `GenerationBackend` by a search and a scorer."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from heedful.backends.base import GenerationRequest
from heedful.backends.shortlist import Shortlist
from heedful.backends.torch.cached_net import DecodingNet
from heedful.backends.torch.searching import Searcher
from heedful.backends.torch.target_scoring import LogProbs, TargetScorer
from heedful.backends.torch.threads import ThreadPolicy
from heedful.data.collate import Batch
from heedful.generation.outputs import Hypothesis
from heedful.options import StopRule


class TorchGenerator:
    """Runs the requests of a `GenerationBackend` with a `Searcher` and a `TargetScorer`.

    Args:
        net: of the searches.
        log_probs_of: see `TargetScorer`.
        shortlist: see `Searcher`.
    """

    stop_rule: StopRule | None = None

    def __init__(
        self,
        net: DecodingNet,
        threads: ThreadPolicy,
        log_probs_of: Callable[[Batch], LogProbs],
        shortlist: Shortlist | None = None,
    ) -> None:
        self.searcher = Searcher(net, threads, shortlist)
        self.scorer = TargetScorer(log_probs_of, net, threads)

    def prepare(self) -> None:
        """Called before each pass: puts nets into evaluation mode."""

    def outputs(self, rows: list[list[int]], request: GenerationRequest) -> list[list[Hypothesis]]:
        """See `GenerationBackend.outputs`."""
        self.prepare()
        return self.searcher.outputs(rows, request)

    def submit(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> Callable[[], list[list[Hypothesis]]]:
        """A function that computes `outputs`; nothing runs before it is called."""
        return partial(self.outputs, rows, request)

    def stream_tokens(
        self, row: list[int], request: GenerationRequest
    ) -> Iterator[tuple[list[int], bool]]:
        """See `GenerationBackend.stream_tokens`."""
        self.prepare()
        return self.searcher.stream_tokens(row, request)

    def log_probs(
        self, rows: list[list[int]], targets: list[list[int]] | None, request: GenerationRequest
    ) -> list[np.ndarray]:
        """See `GenerationBackend.log_probs`."""
        self.prepare()
        return self.scorer.log_probs(rows, targets, request)
