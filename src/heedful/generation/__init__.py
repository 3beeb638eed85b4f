"""Search over any next-token function: greedy and beam, batched, with a state."""

from heedful.generation.scoring import Hypothesis, LengthScore, Normalization
from heedful.generation.search import NextLogProbs, State, beam_search, greedy_search
from heedful.generation.stopping import Stop

__all__ = [
    "Hypothesis",
    "LengthScore",
    "NextLogProbs",
    "Normalization",
    "State",
    "Stop",
    "beam_search",
    "greedy_search",
]
