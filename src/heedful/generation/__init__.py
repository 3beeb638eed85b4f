"""Batched search and sampling over any next-token function, with logit rules and a state.

Rules are in `heedful.generation.rules`, speculative decoding in `heedful.generation.speculative`.
"""

from typing import TYPE_CHECKING

from heedful.extras import lazily

if TYPE_CHECKING:
    from heedful.generation.outputs import Hypothesis, LengthScore
    from heedful.generation.sampling import sample, sample_steps
    from heedful.generation.search import beam_search, greedy_search

__all__ = [
    "Hypothesis",
    "LengthScore",
    "beam_search",
    "greedy_search",
    "sample",
    "sample_steps",
]
if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "outputs": ("Hypothesis", "LengthScore"),
            "sampling": ("sample", "sample_steps"),
            "search": ("beam_search", "greedy_search"),
        },
    )
