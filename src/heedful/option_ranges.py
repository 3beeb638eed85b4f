"""Ranges of the options that reshape a distribution, for every backend."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from heedful.errors import UserError


class Range(NamedTuple):
    """The numbers that an option may have, and what an error says of them."""

    contains: Callable[[float], bool]
    description: str

    def check(self, name: str, value: float) -> None:
        """Raise UserError for a number outside."""
        if not self.contains(value):
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
