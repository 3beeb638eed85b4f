"""What a caller of a search asks for, checked and brought into tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from heedful.errors import UserError
from heedful.generation.constraints import Constraints

Starts = Int[Tensor, "B t0"] | Sequence[Sequence[int]]
PerSentence = int | Sequence[int] | Int[Tensor, "B"]
EosIds = int | Sequence[int]


@dataclass(frozen=True)
class Request:
    """Where each of `B` sentences starts, and its rules."""

    start: Int[Tensor, "B t0"]
    constraints: Constraints


def read_request(
    start: Starts,
    *,
    eos_id: EosIds,
    max_new_tokens: PerSentence,
    min_new_tokens: PerSentence,
    no_repeat_ngram_size: int,
    forced_prefix: Sequence[Sequence[int]] | None,
    force_eos: bool,
) -> Request:
    """Check the arguments that say what may be generated; raises UserError."""
    starts = _read_start(start)
    batch = len(starts)
    longest = _per_sentence("max_new_tokens", max_new_tokens, batch, least=1)
    shortest = _per_sentence("min_new_tokens", min_new_tokens, batch, least=0)
    for sentence, (low, high) in enumerate(zip(shortest, longest, strict=True)):
        if low > high:
            raise UserError(
                f"sentence {sentence}: min_new_tokens = {low} is above max_new_tokens = {high}"
            )
    eos_ids = _read_eos(eos_id)
    if no_repeat_ngram_size < 0:
        raise UserError(f"no_repeat_ngram_size must be 0 or more, not {no_repeat_ngram_size}")
    forced = _read_forced(forced_prefix, batch)
    for sentence, tokens in enumerate(forced):
        room = longest[sentence]
        _check_forced(sentence, tokens, eos_ids, shortest[sentence], room, force_eos)

    def tensor(numbers: Sequence[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=starts.device)

    width = max((len(tokens) for tokens in forced), default=0)
    padded = [tokens + [-1] * (width - len(tokens)) for tokens in forced]
    constraints = Constraints(
        eos_ids=eos_ids,
        min_lengths=tensor(shortest),
        max_lengths=tensor(longest),
        no_repeat_ngram_size=no_repeat_ngram_size,
        forced=tensor(padded).view(batch, width),
        force_eos=force_eos,
        largest_forced=max((max(tokens, default=-1) for tokens in forced), default=-1),
    )
    return Request(starts, constraints)


def read_prompts(prompts: Sequence[Sequence[int]] | None, batch: int) -> list[list[int]]:
    """The prompt tokens of each sentence, none where none are given; raises UserError."""
    if prompts is None:
        return [[] for _ in range(batch)]
    if len(prompts) != batch:
        raise UserError(f"prompts has {len(prompts)} prompts for {batch} sentences")
    return [[int(token) for token in tokens] for tokens in prompts]


def _read_eos(eos_id: EosIds) -> tuple[int, ...]:
    ids = (eos_id,) if isinstance(eos_id, int) else tuple(int(token) for token in eos_id)
    if not ids or min(ids) < 0:
        raise UserError(f"eos_id must be a token id, or some, not {eos_id}")
    return tuple(dict.fromkeys(ids))


def _read_start(start: Starts) -> Int[Tensor, "B t0"]:
    if isinstance(start, Tensor):
        return start.long()
    lengths = {len(ids) for ids in start}
    if len(lengths) > 1:
        raise UserError(f"starts must be equally long, but there are lengths {sorted(lengths)}")
    ids = [list(row) for row in start]
    return torch.tensor(ids, dtype=torch.long).view(len(ids), max(lengths, default=0))


def _per_sentence(name: str, value: PerSentence, batch: int, least: int) -> list[int]:
    numbers = [value] * batch if isinstance(value, int) else [int(number) for number in value]
    if len(numbers) != batch:
        raise UserError(f"{name} has {len(numbers)} numbers for {batch} sentences")
    for number in numbers:
        if number < least:
            raise UserError(f"{name} must be at least {least}, not {number}")
    return numbers


def _read_forced(forced_prefix: Sequence[Sequence[int]] | None, batch: int) -> list[list[int]]:
    if forced_prefix is None:
        return [[] for _ in range(batch)]
    if len(forced_prefix) != batch:
        raise UserError(f"forced_prefix has {len(forced_prefix)} prefixes for {batch} sentences")
    return [[int(token) for token in tokens] for tokens in forced_prefix]


def _check_forced(
    sentence: int,
    tokens: list[int],
    eos_ids: tuple[int, ...],
    shortest: int,
    longest: int,
    force_eos: bool,
) -> None:
    where = f"forced_prefix of sentence {sentence}"
    ends = bool(tokens) and tokens[-1] in eos_ids
    early = [token for token in tokens[:-1] if token in eos_ids]
    if min(tokens, default=0) < 0:
        raise UserError(f"{where} holds {min(tokens)}, which is no token id")
    if early:
        raise UserError(f"{where} holds EOS ({early[0]}) before its last token")
    if ends and len(tokens) < shortest:
        raise UserError(f"{where} ends after {len(tokens)} tokens, below min_new_tokens")
    room = longest - 1 if force_eos and not ends else longest
    if len(tokens) > room:
        raise UserError(f"{where} has {len(tokens)} tokens, but max_new_tokens leaves {room}")
