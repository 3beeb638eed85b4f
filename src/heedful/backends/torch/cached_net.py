"""Nets that predict one token after the other with a cache, and the state of a search over one."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from heedful.backends.torch.captured import FixedStep, Recorder, recorder_for
from heedful.backends.torch.threads import adapt
from heedful.errors import UserError
from heedful.parts.cache import Cache, capacity_for
from heedful.parts.heads import OutputHead
from heedful.parts.tokens import Tokens

STEPS_AT_FIRST = 16  # new tokens that a cache has slots for before it grows


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
    ) -> tuple[Int[Tensor, "B t"], "DecodingState"]:
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


class DecodingState:
    """The `State` of a search over B sentences with W beams each: the net's cache.

    Args:
        net: encoder-decoder or decoder-only, with `decode` and `head`.
        cache: of the sentences' starts, in which nothing but sources is stored yet. It grows to
            powers of two.
        longest: positions of the net. A decoder-only sentence that exceeds them is continued from
            its last half alone, as often as needed; sentences that may do so must be equally long,
            so that none depends on another.
        left_padding: padding tokens on the left of each sentence; None: 0 each.
        restriction: the allowed tokens of each sentence; None: the whole vocabulary.
        record: records steps of one token, which are then replayed; None: each step is run.
    """

    def __init__(
        self,
        net: Any,
        cache: Cache,
        *,
        longest: int,
        left_padding: Int[Tensor, "B"] | None = None,
        restriction: "RestrictedVocabulary | None" = None,
        record: Recorder | None = None,
    ) -> None:
        self.net = net
        self.cache = cache
        self.longest = longest
        self._is_rewound = False  # then every slot is kept
        self._filled = 0  # tokens of each row, padding included
        self._left_padding = left_padding
        self._restriction = restriction
        self.record = record
        self._step: FixedStep | None = None

    def reorder(self, parents: Int[Tensor, "B W"]) -> None:
        """Row w of sentence b continues its former row parents[b, w]."""
        if parents.size(1) > 1:
            self.cache.reorder(parents)

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Keep only these sentences."""
        self.cache, self._step = self.cache.select(sentences), None
        if self._left_padding is not None:
            self._left_padding = self._left_padding[sentences]
        if self._restriction is not None:
            self._restriction.select(sentences)

    def next_log_probs(
        self, prefixes: Int[Tensor, "N t"], state: "DecodingState"
    ) -> Float[Tensor, "N V"]:
        """Log-probabilities after each prefix: the whole start at the first call, then one new
        token a call."""
        assert state is self
        states = self._next_states(prefixes)
        if self._restriction is not None:
            return self._restriction.log_probs(states[:, 0])
        return _log_softmax(self.net.head(states).select(1, 0))

    @property
    def has_logits(self) -> bool:
        """`next_logits` can be called: the vocabulary is not restricted."""
        return self._restriction is None

    def next_logits(self, prefixes: Int[Tensor, "N t"]) -> Float[Tensor, "N V"]:
        """See `next_log_probs`, before the softmax."""
        logits: Tensor = self.net.head(self._next_states(prefixes))
        return logits.select(1, 0)

    def _next_states(self, prefixes: Int[Tensor, "N t"]) -> Float[Tensor, "N 1 D"]:
        new = prefixes if self._filled == 0 or prefixes.size(1) == 1 else prefixes[:, -1:]
        if self._filled + new.size(1) > self.longest:
            new = prefixes[:, -max(1, self.longest // 2) :]
            num_texts, beams = self.cache.num_texts, self.cache.branches
            self.cache = self.net.start(num_texts, capacity=self.cache.capacity, branches=beams)
            self._filled, self._left_padding, self._step = 0, None, None
        begins = self._filled == 0
        adapt()
        tokens = self.tokens(new)
        if self.record is None or begins:
            states: Tensor = self.net.decode(tokens, self.cache)
            return states if states.size(1) == 1 else states[:, -1:]
        if self._step is None:
            self._step = FixedStep(self.net, self.cache, self.record)
        return self._step(tokens)

    def feed(self, tokens: Int[Tensor, "t"]) -> Float[Tensor, "t V"]:
        """Log-probabilities after each of several new tokens of one sentence (`Scorer.feed`)."""
        self._is_rewound = True
        new = self.tokens(tokens[None].to(self.cache.device))
        return _log_softmax(self.net.head(self.net.decode(new, self.cache))[0])

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens of the only sentence (`Scorer.rewind`)."""
        self._filled = min(self._filled, length)
        self.cache.rewind(length)

    def tokens(self, new: Int[Tensor, "N t"]) -> Tokens:
        """New tokens with their positions; the cache grows where it must."""
        rows, count = new.shape
        beams = rows // self.cache.num_texts
        columns = torch.arange(self._filled, self._filled + count, device=new.device).unsqueeze(0)
        begins = self._filled == 0
        self._filled += count
        if self.cache.reserve(beams * count, drops_hidden=not self._is_rewound):
            self._step = None
        if self._left_padding is None:
            return Tokens(new, columns)
        positions = columns - self._left_padding.repeat_interleave(beams)[:, None]
        if begins:
            return Tokens(new, positions.clamp(min=0), positions >= 0)
        return Tokens(new, positions)


class RestrictedVocabulary:
    """The allowed tokens of each of B sentences; all others get log-probability -inf.

    Logits are computed for the U tokens that are allowed for any of the sentences.

    Args:
        allowed_ids: for each sentence.
    """

    def __init__(self, head: OutputHead, allowed_ids: Sequence[Sequence[int]]) -> None:
        device = head.out.weight.device
        self.size = head.out.out_features
        rows = [torch.tensor(row, dtype=torch.long, device=device) for row in allowed_ids]
        self.ids = torch.cat(rows).unique()
        self.head = head.restrict_vocabulary(self.ids)
        self.allowed = torch.stack([torch.isin(self.ids, row) for row in rows])

    def select(self, sentences: Int[Tensor, "M"]) -> None:
        """Keep only these sentences."""
        self.allowed = self.allowed[sentences]

    def log_probs(self, states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Log-probabilities over the vocabulary; each sentence has equally many adjacent rows."""
        allowed = self.allowed.repeat_interleave(len(states) // len(self.allowed), dim=0)
        logits = self.head(states).float().masked_fill(~allowed, -torch.inf)
        log_probs = logits.new_full((len(states), self.size), -torch.inf)
        return log_probs.index_copy_(1, self.ids, logits.log_softmax(-1))


def _log_softmax(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N V"]:
    """In place on a CPU, where allocating the result takes longer than computing it."""
    logits = logits.float()
    if torch.is_grad_enabled() or logits.device.type != "cpu":
        return logits.log_softmax(-1)
    return torch.log_softmax(logits, -1, out=logits)


def left_padded(
    rows: Sequence[Sequence[int]], device: torch.device
) -> tuple[Int[Tensor, "N t"], Int[Tensor, "N"] | None]:
    """Rows padded on the left with id 0, and the padding of each; None: no row has any."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    padding = [width - len(row) for row in rows]
    return ids, torch.tensor(padding, device=device) if any(padding) else None


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
