"""Search and sampling over any next-token function, batched, with logit rules and a state."""

from heedful.generation.logits import (
    BannedTokens,
    Context,
    ForcedTokens,
    FrequencyPenalty,
    MinP,
    NoRepeatNgram,
    PrefixFunction,
    PresencePenalty,
    RepetitionPenalty,
    Rule,
    Temperature,
    TopK,
    TopP,
    Typical,
    apply_rules,
    sampling_rules,
)
from heedful.generation.next_token import NextLogProbs, State
from heedful.generation.sampling import (
    SampledStep,
    StopFunction,
    StopStrings,
    cut,
    sample,
    sample_steps,
)
from heedful.generation.scoring import Hypothesis, LengthScore, Normalization
from heedful.generation.search import beam_search, greedy_search
from heedful.generation.speculative import (
    Draft,
    DraftModel,
    PromptLookup,
    Scorer,
    SpeculativeResult,
    speculative_decode,
)
from heedful.generation.stopping import Stop

__all__ = [
    "BannedTokens",
    "Context",
    "Draft",
    "DraftModel",
    "ForcedTokens",
    "FrequencyPenalty",
    "Hypothesis",
    "LengthScore",
    "MinP",
    "NextLogProbs",
    "NoRepeatNgram",
    "Normalization",
    "PrefixFunction",
    "PresencePenalty",
    "PromptLookup",
    "RepetitionPenalty",
    "Rule",
    "SampledStep",
    "Scorer",
    "SpeculativeResult",
    "State",
    "Stop",
    "StopFunction",
    "StopStrings",
    "Temperature",
    "TopK",
    "TopP",
    "Typical",
    "apply_rules",
    "beam_search",
    "cut",
    "greedy_search",
    "sample",
    "sample_steps",
    "sampling_rules",
    "speculative_decode",
]
