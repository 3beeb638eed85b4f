"""The eager backend: a net run by torch operation by operation, with every option."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.backends.base import Capability, GenerationRequest, Settings
from heedful.backends.shortlist import Shortlist
from heedful.backends.torch.cached_net import CachedNet, right_padded
from heedful.backends.torch.generating import TorchGenerator
from heedful.backends.torch.target_scoring import net_log_probs
from heedful.backends.torch.threads import ThreadPolicy, weights_of_step
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.tokens import Tokens


class Eager(TorchGenerator):
    """A net of any family as a backend.

    Args:
        max_length: positions of the net.
        shortlist: the target tokens that each source can become; see `TorchGenerator`.
        settings: threads; None: by the size of each pass (`ThreadPolicy`).
    """

    name = "eager"
    capabilities: frozenset[Capability] = frozenset({"states", "logits", "target_scores"})

    def __init__(
        self,
        net: Any,
        max_length: int,
        shortlist: Shortlist | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.net = net
        self.settings = settings or Settings()
        records_steps = self.settings.records_steps
        is_encoder_decoder = isinstance(net, EncoderDecoder)
        super().__init__(
            CachedNet(net, max_length, is_encoder_decoder, records_steps=records_steps),
            ThreadPolicy(self.settings, partial(weights_of_step, net)),
            partial(net_log_probs, net),
            shortlist,
        )

    def prepare(self) -> None:
        """See `TorchGenerator.prepare`."""
        self.net.eval()

    @property
    def precision(self) -> str:
        """The data type of the weights."""
        return str(next(self.net.parameters()).dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.net.parameters()).device
        return device

    @property
    def vocab_size(self) -> int:
        """Entries of the output distribution."""
        return self.decoding.vocab_size

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """No reason: every request is supported."""
        return []

    def states(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.states`; an encoder-decoder's are those of its encoder."""
        return self._read(rows, types, self._states)

    def logits(
        self, rows: list[list[int]], types: list[list[int]] | None = None
    ) -> list[np.ndarray]:
        """See `EncoderBackend.logits`."""
        return self._read(rows, types, self._logits)

    def _states(self, ids: Tensor, lengths: Tensor | None, types: Tensor | None) -> Tensor:
        tokens = Tokens.from_ids(ids, lengths)
        states: Tensor
        if isinstance(self.net, EncoderDecoder):
            states = self.net.encode(tokens).states
        elif isinstance(self.net, EncoderOnly):
            states = self.net.encode(tokens, types)
        else:
            states = self.net.decode(tokens)
        return states

    def _logits(self, ids: Tensor, lengths: Tensor | None, types: Tensor | None) -> Tensor:
        logits: Tensor = self.net(ids, lengths, types=types)
        return logits

    def _read(
        self,
        rows: list[list[int]],
        types: list[list[int]] | None,
        run: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    ) -> list[np.ndarray]:
        """The result of a pass over whole rows; without padding where it has an entry a token."""
        self.prepare()
        with torch.inference_mode(), self.threads.for_tokens(sum(map(len, rows))):
            ids, lengths = right_padded(rows, self.device)
            type_ids = None
            if types is not None and (table := self.net.embedding.types) is not None:
                # RoBERTa has a single type.
                padded = right_padded(types, self.device)[0]
                type_ids = padded.clamp(max=table.num_embeddings - 1)
            result = run(ids, lengths, type_ids).float().cpu().numpy()
        if result.ndim < 3:
            return list(result)
        return [of_row[: len(row)] for of_row, row in zip(result, rows, strict=True)]
