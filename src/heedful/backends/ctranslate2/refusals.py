"""Requests that CTranslate2 cannot run as the net does, and the reasons, by option."""

from operator import attrgetter
from typing import Any

from heedful.backends.base import GenerationRequest
from heedful.options import Options

# Options that CTranslate2 lacks, with the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_groups": (1,),
    "coverage_penalty": (0,),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (None, 0)),
    "typical_p": (None, 1),
    "top_h": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "min_tokens_to_keep": (1,),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), (None, 1)),
    **dict.fromkeys(("sequence_bias", "begin_suppress_tokens"), (None, (), [])),
    "exponential_decay_length_penalty": (None,),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (None, 0)),
    **dict.fromkeys(("stop", "require"), ((), [])),
    **dict.fromkeys(("draft", "prefixes", "regex", "json_schema"), (None,)),
    "forced": (None, {}),
}
_unsupported_values = attrgetter(*_UNSUPPORTED)


def option_reasons(request: GenerationRequest, family: str) -> list[str]:
    """The reasons against a request that do not depend on its rows.

    A message names an option as `option NAME`, which the command line shows as its flag.
    """
    options = request.options
    values = _unsupported_values(options)
    reasons = [
        f"it has no {_named(name, options)}"
        for (name, idle), value in zip(_UNSUPPORTED.items(), values, strict=True)
        if value not in idle
    ]
    is_grammar = options.regex is not None or options.json_schema is not None
    if options.prefix_function is not None and not is_grammar:
        reasons.append("it has no option prefix_function")
    if request.counts is not None:
        reasons.append("it cannot count tokens")
    if request.banned_texts is not None:
        reasons.append("it bans tokens, but not the texts of option banned")
    if options.by_beams:
        reasons += _beam_reasons(request)
    elif options.top_k == 1 and options.num_return > 1:
        reasons.append(
            "option num_return is above 1, but with option top_k 1 it returns one output"
        )
    if options.samples and "seed" in options.explicit:
        reasons.append("its samples do not depend on option seed")
    if family == "encoder_decoder" and len(request.decoder_start_ids) != 1:
        reasons.append("its decoder starts with one token")
    if family == "decoder_only":
        if any(len(ids) > 1 for ids in request.bad_words_ids):
            reasons.append("its sequences of option banned do not see the prompt")
        if options.no_repeat_ngram_size:
            name = _named("no_repeat_ngram_size", options)
            reasons.append(f"its {name} does not see the prompt")
    return reasons


def _beam_reasons(request: GenerationRequest) -> list[str]:
    """The reasons against a beam search.

    The stop rule of CTranslate2 is `beam_full`. Where none is given, it is taken for the default
    one if the score is the mean log-probability, with which the rules find the same outputs of most
    texts; with others they do not. Tokens are excluded before the
    softmax, which ranks hypotheses in another order unless probabilities are renormalized.
    """
    options, reasons = request.options, []
    if options.stop_rule != "beam_full":
        others = {
            "normalization": options.normalization == "none",
            "length_penalty": options.length_penalty != 1,
        }
        if "stop_rule" in options.explicit:
            reasons.append(f"it has no option stop_rule {options.stop_rule}")
        elif name := next((name for name, differs in others.items() if differs), None):
            reasons.append(
                f"with {_named(name, options)} its stop rule finds other outputs than the default "
                "one (give stop_rule=beam_full)"
            )
    if options.num_return > 1:  # of more than `beam_size` outputs that ended it keeps the best ones
        reasons.append("with option num_return it keeps other outputs")
    if len(request.eos_ids) > 1:  # it continues after EOS where several rank high
        name = "option stop_ids" if options.stop_ids else "the EOS ids of the model"
        reasons.append(f"its beam search has a single EOS, without {name}")
    if options.normalization not in ("average", "none"):
        reasons.append(f"it has no {_named('normalization', options)} {options.normalization}")
    if (options.length_penalty or 0) < 0:
        reasons.append(f"it has no {_named('length_penalty', options)} below 0")
    excluding = {
        "banned": bool(options.banned) and request.banned_texts is None,
        "min_new_tokens": (options.min_new_tokens or 0) > 1,
        "no_repeat_ngram_size": bool(options.no_repeat_ngram_size),
        "no_unknown": options.no_unknown,
    }
    if not options.renormalize_logits:
        for name in (name for name, is_given in excluding.items() if is_given):
            reasons.append(f"its beams rank in another order with {_named(name, options)}")
        if request.bad_words_ids and not options.banned:
            reasons.append("its beams rank in another order with the model's suppressed sequences")
    return reasons


def _named(name: str, options: Options) -> str:
    """An option in a message."""
    return f"option {name}" + ("" if name in options.explicit else " of the model")
