"""Checks of what a caller gives to a model: texts, ids and sizes of batches."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any

from heedful.errors import UserError, describe

_CUT = 'split it, or let it be cut (too_long="truncate")'


class LengthError(UserError):
    """A text that is too long for the net.

    Attributes:
        problem: with both lengths, without the remedies of the command line and of Python.
        num_tokens: of the text.
        longest: most tokens that the net allows.
    """

    def __init__(self, problem: str, num_tokens: int, longest: int, hint: str = _CUT) -> None:
        super().__init__(f"{problem}; {hint}" if hint else problem)
        self.problem = problem
        self.num_tokens = num_tokens
        self.longest = longest


class EmptyTextError(UserError):
    """A text without a token, where one is needed."""


class NoMaskError(UserError):
    """A text without a mask to fill.

    Attributes:
        mask: as it is written in a text.
    """

    def __init__(self, text: str, mask: str) -> None:
        super().__init__(f"{text} has no {mask}: write it for the word to predict")
        self.mask = mask


def as_batch(texts: Any) -> tuple[Any, bool]:
    """Texts or lists of ids as a batch, and True where a single text or list of ids was given."""
    if isinstance(texts, str):
        return [texts], True
    check_list(texts, "texts")
    first = next(iter(texts), None)
    is_ids = isinstance(first, Integral) or getattr(first, "ndim", None) == 0
    return ([texts], True) if is_ids else (texts, False)


def check_list(texts: Any, name: str) -> None:
    """Raises UserError unless `texts` has a length and indices, and is no text or mapping."""
    is_list = hasattr(texts, "__len__") and hasattr(texts, "__getitem__")
    if not is_list or isinstance(texts, str | bytes | Mapping):
        hint = "; for one text write [text]" if isinstance(texts, str) else ""
        raise UserError(f"{name} must be a list of texts, or of ids, not {describe(texts)}{hint}")


def check_counts(prompts: Any, options: Mapping[str, Any]) -> None:
    """Raises UserError for another number of prefixes or seeds than of prompts."""
    for name, noun in (("prefixes", "texts"), ("seed", "prompts")):
        values = options.get(name)
        if not isinstance(values, Sequence) or isinstance(values, str):
            continue
        if len(values) != len(prompts):
            plural = "seeds" if name == "seed" else name
            raise UserError(f"{len(values)} {plural} for {len(prompts)} {noun}")


def check_strings(texts: Any, name: str) -> None:
    """Raises UserError for anything but a list of texts."""
    check_list(texts, name)
    for text in texts:
        if not isinstance(text, str):
            raise UserError(f"{name} must be a list of texts, but one is {describe(text)}")


def check_batch_tokens(batch_tokens: Any) -> None:
    """Raises UserError for a number of tokens below 1."""
    if batch_tokens is None:
        return
    if not isinstance(batch_tokens, Integral) or batch_tokens < 1:
        raise UserError(f"batch_tokens must be at least 1, not {batch_tokens!r}")


def row_ids(row: Any) -> list[int]:
    """The ids of a row as integers."""
    try:
        if not isinstance(row, bytes):
            return list(map(index, row))
    except TypeError:
        pass
    raise UserError(f"give texts, or lists of token ids, not {describe(row)}")
