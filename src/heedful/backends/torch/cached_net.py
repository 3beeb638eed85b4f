"""Nets that predict one token after the other with a cache."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heedful.backends.torch.captured import recorder_for
from heedful.backends.torch.state import (
    STEPS_AT_FIRST,
    DecodingState,
    RestrictedVocabulary,
    left_padded,
)
from heedful.errors import UserError
from heedful.parts.cache import capacity_for
from heedful.parts.tokens import Tokens


@runtime_checkable
class DecodingNet(Protocol):
    """A net, or several together, that computes next-token distributions for a search.

    Attributes:
        max_length: positions of the net.
        is_encoder_decoder: a search begins with start ids, and the rows are sources.
    """

    max_length: int
    is_encoder_decoder: bool

    @property
    def device(self) -> torch.device:
        """The device of the net's inputs and outputs."""

    @property
    def vocab_size(self) -> int:
        """Entries of the output distribution."""

    def open(
        self,
        rows: list[list[int]],
        start_ids: Sequence[int],
        capacity: int,
        beams: int,
        allowed_ids: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Int[Tensor, "B t"], Any]:
        """The ids (B, t) that a search starts from, and a `State` that has read the rest.

        Args:
            rows: ids of B sources, or of B prompts.
            start_ids: first ids of an encoder-decoder's target.
            capacity: most new tokens.
            beams: rows of each sentence that will be searched.
            allowed_ids: the ids that each of the B outputs consists of; None: the vocabulary.
        """


class CachedNet:
    """An encoder-decoder or decoder-only net, eager or compiled, as a `DecodingNet`.

    Args:
        net: with `start`, `decode` and `head`.
        device: None: the device of its parameters.
        records_steps: record the steps of searches where the device can (`recorder_for`).
    """

    def __init__(
        self,
        net: Any,
        max_length: int,
        is_encoder_decoder: bool,
        device: torch.device | None = None,
        *,
        records_steps: bool = False,
    ) -> None:
        self.net = net
        self.max_length = max_length
        self.is_encoder_decoder = is_encoder_decoder
        self._device = device
        self._records_steps = records_steps

    @property
    def device(self) -> torch.device:
        """See `DecodingNet.device`."""
        if self._device is not None:
            return self._device
        device: torch.device = next(self.net.parameters()).device
        return device

    @property
    def vocab_size(self) -> int:
        """See `DecodingNet.vocab_size`; 0 for an encoder without an output layer."""
        out = getattr(self.net.head, "out", None)
        return 0 if out is None else int(out.weight.size(0))

    def open(
        self,
        rows: list[list[int]],
        start_ids: Sequence[int],
        capacity: int,
        beams: int,
        allowed_ids: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Int[Tensor, "B t"], DecodingState]:
        """See `DecodingNet.open`."""
        device = self.device
        record = recorder_for(self.net, device) if self._records_steps else None
        first_steps = beams * min(capacity, STEPS_AT_FIRST)
        if not self.is_encoder_decoder:
            assert allowed_ids is None, "a restricted vocabulary needs a source"
            begin, padding = left_padded(rows, device)
            slots = capacity_for(begin.size(1) + first_steps)
            cache = self.net.start(len(rows), capacity=slots, branches=beams)
            longest = self.max_length
            return begin, DecodingState(
                self.net, cache, longest=longest, left_padding=padding, record=record
            )
        source = Tokens.from_ids(*right_padded(rows, device))
        begin = torch.tensor([list(checked_start_ids(start_ids))] * len(rows), device=device)
        slots = capacity_for(begin.size(1) + first_steps)
        cache = self.net.start(source, capacity=slots, branches=beams)
        restriction = (
            None if allowed_ids is None else RestrictedVocabulary(self.net.head, allowed_ids)
        )
        longest = capacity + begin.size(1) - 1
        return begin, DecodingState(
            self.net, cache, longest=longest, restriction=restriction, record=record
        )


def right_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B"] | None]:
    """Rows padded on the right with id 0, and their lengths; None: no row has padding."""
    ids = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True)
    lengths = [len(row) for row in rows]
    if min(lengths) == max(lengths):
        return ids.to(device), None
    return ids.to(device), torch.tensor(lengths, device=device)


def checked_start_ids(ids: Sequence[int]) -> Sequence[int]:
    """The first ids of an encoder-decoder's target; raises UserError where the model has none."""
    if not ids:
        raise UserError("this model has no start token; import it with its generation_config")
    return ids
