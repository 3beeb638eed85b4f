"""Values of options: ranges of those that reshape a distribution, and the kinds of all."""

import collections.abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from heedful.errors import UserError


class Range(NamedTuple):
    """The allowed numbers of an option, and their description in errors."""

    contains: Callable[[float], bool]
    description: str

    def check(self, name: str, value: float) -> None:
        """Raise UserError for a number outside."""
        try:
            is_allowed = self.contains(float(value))
        except OverflowError:  # of an integer
            is_allowed = False
        if not is_allowed:
            hint = "; temperature 0 of generate is greedy decoding"
            raise UserError(
                f"{name} must be {self.description}, not {value}"
                f"{hint if name == 'temperature' else ''}"
            )


FINITE = Range(math.isfinite, "a finite number")
_POSITIVE = Range(lambda x: 0 < x < math.inf, "a finite number above 0")
_FRACTION = Range(lambda x: 0 < x <= 1, "above 0 and at most 1")
_CUTOFF = Range(lambda x: 0 < x < 1, "above 0 and below 1, or 0 for none")
RANGES: Mapping[str, Range] = {
    **dict.fromkeys(("temperature", "repetition_penalty", "encoder_repetition_penalty"), _POSITIVE),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), FINITE),
    **dict.fromkeys(("top_p", "top_h", "typical_p"), _FRACTION),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), _CUTOFF),
    "top_k": Range(lambda k: k >= 1, "at least 1"),
    "min_p": Range(lambda p: 0 <= p <= 1, "from 0 to 1"),
}
OFF_AT_0 = ("temperature", "epsilon_cutoff", "eta_cutoff")  # 0 is no rule: `Options` alone takes it


# --- Kinds of values ---------------------------------------------------------------------------


class Kind(NamedTuple):
    """The values that an option accepts, besides None where that is its default."""

    accepts: Callable[[Any], bool]
    description: str


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_list_of(*accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Lists and the like, whose items one of the functions accepts."""

    def is_list(value: Any) -> bool:
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__"):
            return False
        return all(any(accept(item) for accept in accepts) for item in value)

    return is_list


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_forced(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_whole, [*value, *value.values()]))


def plain_number(value: Any) -> Any:
    """A number of another library, such as `numpy.int64`, as one of Python; else the value."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


_IDS = _is_list_of(_is_whole)
_NUMBERS = _is_list_of(_is_number)


def _is_bias(value: Any) -> bool:
    def is_pair(item: Any) -> bool:
        if not isinstance(item, Sequence) or len(item) != 2:
            return False
        return _IDS(item[0]) and _is_number(item[1])

    return _is_list_of(is_pair)(value)


def _is_decay(value: Any) -> bool:
    return _NUMBERS(value) and len(value) == 2 and _is_whole(value[0])


_BY_TYPE = {
    int: Kind(_is_whole, "a whole number"),
    float: Kind(_is_number, "a number"),
    bool: Kind(lambda value: isinstance(value, bool), "True or False"),
}
_BY_NAME = {
    "seed": Kind(lambda value: _is_whole(value) or _IDS(value), "a whole number, or one a prompt"),
    "stop": Kind(_is_list_of(_is_text), "a list of texts"),
    "json_schema": Kind(
        lambda value: _is_text(value) or isinstance(value, Mapping), "a JSON schema, or its path"
    ),
    "regex": Kind(_is_text, "a regular expression"),
    "src_language": Kind(_is_text, "a language code, such as en"),
    "tgt_language": Kind(_is_text, "a language code, such as de"),
    "prefixes": Kind(_is_list_of(_is_text), "a list of texts, one for each prompt"),
    "banned": Kind(_is_list_of(_is_text, _is_whole, _IDS), "a list of texts, ids or lists of ids"),
    "require": Kind(_is_list_of(_is_text, _IDS), "a list of texts or lists of ids"),
    "numbers": Kind(_IDS, "a list of whole numbers, one for each prompt"),
    "stop_ids": Kind(_IDS, "a list of token ids"),
    "begin_suppress_tokens": Kind(_IDS, "a list of token ids"),
    "sequence_bias": Kind(_is_bias, "a list of pairs of token ids and a number"),
    "exponential_decay_length_penalty": Kind(_is_decay, "a whole number and a number"),
    "forced": Kind(_is_forced, "a mapping from positions to token ids"),
}


def kind_of(option: "Field[Any]") -> Kind | None:
    """The values of an option, by its name or annotation; None: any."""
    if option.name in _BY_NAME:
        return _BY_NAME[option.name]
    hints = [hint for hint in get_args(option.type) if hint is not NoneType] or [option.type]
    if get_origin(option.type) is Literal:
        hints = [option.type]
    if get_origin(hints[0]) is Literal:
        names = get_args(hints[0])
        return Kind(lambda value: isinstance(value, str) and value in names, ", ".join(names))
    if get_origin(hints[0]) is collections.abc.Callable:
        return Kind(callable, "a function")
    return _BY_TYPE.get(hints[0])
