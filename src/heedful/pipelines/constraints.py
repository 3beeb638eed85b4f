"""Constraints on outputs that are given as texts, for one tokenizer."""

from collections.abc import Sequence
from typing import Any

from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError


def required_ids(phrase: str, banned: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The ids of a required phrase; raises UserError for one that no output can contain.

    Args:
        banned: texts that no output contains.
    """
    ids = _known_ids("required phrase", phrase, tokenizer)
    if not ids:
        raise UserError(f"the required phrase {phrase!r} is empty: give it a text")
    if found := next((text for text in banned if text in tokenizer.decode(ids)), None):
        raise UserError(f"the required phrase {phrase!r} contains {found!r}, which is banned")
    return ids


def prefix_ids(prefix: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of the beginning of an output; raises UserError for one that no output can have."""
    return _known_ids("prefix", prefix, tokenizer)


def banned_texts(texts: list[str], tokenizer: Tokenizer) -> Any:
    """The rule that keeps texts out of outputs."""
    from heedful.generation.token_rules import BannedTexts

    tokenizer.encode_batch(texts)  # refuses lone surrogates
    return BannedTexts(texts, tokenizer.token_texts)


def _known_ids(noun: str, text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text)
    if tokenizer.unk_id in ids:
        raise UserError(
            f"no output can contain the {noun} {text!r}: the tokenizer has no tokens for a part of "
            f"it; without that part it is {tokenizer.decode(ids)!r}"
        )
    return ids
