"""Every option of search with values, and the outputs of a backend against those of the net."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Literal

import pytest

from backend_models import model_of
from heedful.backends.base import GenerationBackend
from heedful.errors import UserError
from heedful.options import Options
from heedful.pipelines import GenerationIds, Generator

Kind = Literal["greedy", "beams", "sampling"]
KINDS: dict[Kind, dict[str, Any]] = {
    "greedy": {"beam_size": 1},
    "beams": {"beam_size": 5},
    "sampling": {"beam_size": 1, "temperature": 1.0},
}
CLOSE = 1e-4  # nats per token
# Of all fields of `Options` those that do not change what a search computes, those of the kinds of
# search, and `json_schema`, which is a prefix function like `regex`.
NO_SEARCH = {
    "json_schema",
    *(
        "too_long",
        "first_number",
        "numbers",
        "batch_tokens",
        "progress",
        "on_output",
        "explicit",
        "scores",
    ),
    *("beam_size", "seed", "src_language", "tgt_language", "shortlist", "keep", "glossary"),
}
# Values by option, chosen so that outputs or scores change; the name of a second case of the same
# option has the options that it needs.
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_new_tokens": {"min_new_tokens": 9},
    "min_new_tokens, renormalize_logits": {"min_new_tokens": 9, "renormalize_logits": True},
    "num_return": {"num_return": 3},
    "num_return, stop_rule beam_full": {"num_return": 3, "stop_rule": "beam_full"},
    "length_penalty": {"length_penalty": 0.2},
    "length_penalty, stop_rule beam_full": {"length_penalty": 0.2, "stop_rule": "beam_full"},
    "normalization": {"normalization": "gnmt"},
    "normalization none, stop_rule beam_full": {
        "normalization": "none",
        "stop_rule": "beam_full",
    },
    "stop_rule": {"stop_rule": "heuristic", "length_penalty": 0.2},
    "stop_rule beam_full": {"stop_rule": "beam_full", "length_penalty": 0.2},
    "num_groups": {"num_groups": 5},
    "diversity_penalty": {"num_groups": 5, "diversity_penalty": 2.0},
    "coverage_penalty": {"coverage_penalty": 2.0, "max_new_tokens": 3},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 2},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.7},
    "typical_p": {"typical_p": 0.3},
    "top_h": {"top_h": 0.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "eta_cutoff": {"eta_cutoff": 0.5},
    "min_tokens_to_keep": {"top_p": 0.1, "min_tokens_to_keep": 9},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size, renormalize_logits": {
        "no_repeat_ngram_size": 1,
        "renormalize_logits": True,
    },
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 5.0},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "sequence_bias": {"sequence_bias": [([token], -1.5) for token in range(5, 20)]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 0.6)},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(4, 30)]},
    "renormalize_logits": {"renormalize_logits": True, "banned": [*range(20, 40)]},
    "banned": {"banned": ["a", "t"]},
    "banned ids": {"banned": [*range(20, 40)]},
    "banned ids, renormalize_logits": {
        "banned": [*range(20, 40)],
        "renormalize_logits": True,
    },
    "banned sequences of ids": {"banned": [[a, b] for a in range(5, 40) for b in range(25, 40)]},
    "require": {"require": ["dog"]},
    "regex": {"regex": "the (cat|dog)s?"},
    "no_unknown": {"no_unknown": True},
    "stop": {"stop": ["a", "o"]},
    "stop_ids": {"stop_ids": [*range(10, 30)]},
    "draft": {"draft": "lookup"},
    "num_draft_tokens": {"draft": "lookup", "num_draft_tokens": 2},
    "prefixes": {"prefixes": ["the cat", "a dog", "cats", "the"]},
    "forced": {"forced": {1: 9}},
    "prefix_function": {"prefix_function": lambda number, ids: [*range(2, 20)]},
}
# Cases whose option has no effect: the command line has a note for those with a flag, and drafts
# have none by their nature.
IDLE: dict[Kind, set[str]] = {
    "greedy": {"stop_rule", "stop_rule beam_full", "renormalize_logits", "draft"},
    "beams": set(),
    "sampling": {"stop_rule", "stop_rule beam_full", "renormalize_logits"},
}
IDLE["greedy"].add("num_draft_tokens")


@cache
def model_that_ends(name: str, **keys: Any) -> Any:
    """A random model whose outputs end: its EOS is a token that is often in them."""
    model = model_of(name, **keys)
    rows = rows_of(model)
    request = model.request(rows, beam_size=1, max_new_tokens=12)
    written = [outputs[0].ids for outputs in model.eager.outputs(rows, request)]
    early = {token for ids in written for token in ids[:2]}
    later = [token for ids in written for token in ids[1:]]
    [(end, _)] = Counter([t for t in later if t not in early] or later).most_common(1)
    ids = GenerationIds(model.ids.decoder_start_ids, (end,))
    model.metadata = replace(model.metadata, generation=ids)
    return model


def rows_of(model: Generator) -> list[list[int]]:
    """The prompts of all cases; those of a language model are equally long, with a frequent id."""
    texts = ["the cat sat", "a dog ran", "cats and dogs", "the dog"]
    rows = model.prompt_ids(texts)
    return rows if model.kind == "translator" else [[row[0], 15] for row in rows]


def request_of(
    model: Generator,
    kind: Kind,
    case: str,
    *,
    has_seed: bool = True,
    left_out: str | None = None,
) -> Any:
    """The request of a case; raises UserError for options that exclude each other.

    Args:
        left_out: an option of the case that is not given.
    """
    given = {name: value for name, value in CASES[case].items() if name != left_out}
    options = {"max_new_tokens": 14} | KINDS[kind] | given
    request = model.request(rows_of(model), **options)
    if has_seed and request.options.samples:  # so that all samples of a case are the same
        request = model.request(rows_of(model), **options, seed=3)
    return request


@cache
def expected(model: Generator, kind: Kind, case: str, stop_rule: str | None = None) -> Any:
    """The net's outputs of a case, also with another stop rule; its error if it refuses them."""
    try:
        request = request_of(model, kind, case)
        if stop_rule is not None:
            request = request._replace(options=replace(request.options, stop_rule=stop_rule))
        return model.eager.outputs(rows_of(model), request)
    except UserError as error:
        return error


def refusal(model: Generator, kind: Kind, case: str) -> str | None:
    """The error of options that exclude each other; None: there is none."""
    outputs = expected(model, kind, case)
    return str(outputs) if isinstance(outputs, UserError) else None


def unsupported(backend: GenerationBackend, model: Generator, kind: Kind, case: str) -> list[str]:
    """The reasons of a backend against a case; samples have no seed in CTranslate2."""
    request = request_of(model, kind, case, has_seed=backend.name != "ctranslate2")
    return backend.unsupported_reasons(rows_of(model), request)


def compare(backend: Any, model: Generator, kind: Kind, case: str) -> int:
    """Hold the outputs of a backend against the net's; the number of those that it gave itself.

    CTranslate2's stop rule is `beam_full`, also where none is given. Its samples have other random
    numbers, so that only their log-probabilities are compared. Outputs that it leaves to the net
    (empty) are not compared.
    """
    rows, is_ctranslate2 = rows_of(model), backend.name == "ctranslate2"
    request = request_of(model, kind, case, has_seed=not is_ctranslate2)
    stop_rule = "beam_full" if is_ctranslate2 and kind == "beams" else None
    found = backend.outputs(rows, request)
    for row, actual, reference in zip(
        rows, found, expected(model, kind, case, stop_rule), strict=True
    ):
        if not actual:  # the net gives it
            continue
        if is_ctranslate2 and request.options.samples and case != "top_k 1":
            for one in actual:
                log_prob = net_log_prob(model, row, one.ids)
                assert one.log_prob == pytest.approx(log_prob, abs=CLOSE * len(one.ids))
            continue
        assert [each.ids for each in actual] == [each.ids for each in reference], (kind, case)
        for one, other in zip(actual, reference, strict=True):
            assert (one.finished, one.failure) == (other.finished, other.failure), (kind, case)
            close = CLOSE * max(1, len(one.ids))
            assert one.log_prob == pytest.approx(other.log_prob, abs=close), (kind, case)
            assert one.score == pytest.approx(other.score, abs=close), (kind, case)
    return sum(map(bool, found))


def hold_options(backend: Any, model: Generator) -> None:
    """Each case is refused with the name of its option, or has the outputs of the net."""
    num_own = 0
    for kind, case in product(KINDS, CASES):
        if refusal(model, kind, case) is not None:
            continue
        reasons = unsupported(backend, model, kind, case)
        if not reasons:
            num_own += compare(backend, model, kind, case)
            continue
        names = {name for reason in reasons for name in CASES[case] if f"option {name}" in reason}
        assert names, f"{backend.name} does not name the option of {case}: {reasons}"
    assert num_own > 60


def net_log_prob(model: Generator, row: list[int], ids: list[int]) -> float:
    """The net's log-probability of an output."""
    request = model.request([row], max_new_tokens=14)
    if model.kind == "translator":
        [values] = model.eager.log_probs([row], [ids], request)
        return float(values[: len(ids)].sum())
    [values] = model.eager.log_probs([row + ids], None, request)
    return float(values[len(values) - len(ids) :].sum())


def has_effect(model: Generator, kind: Kind, case: str) -> bool:
    """The option that begins the name of a case changes outputs or scores of the net."""
    option = case.split(",")[0].split()[0]
    others = {name for name in CASES[case] if name != option}
    if others:
        request = request_of(model, kind, case, left_out=option)
        before = model.eager.outputs(rows_of(model), request)
    else:
        before = expected(model, kind, "none")
    return _rounded(before) != _rounded(expected(model, kind, case))


def _rounded(outputs: Any) -> Any:
    return [[(each.ids, round(each.score, 3)) for each in of_row] for of_row in outputs]


def all_options() -> set[str]:
    """The fields of `Options` that a case must have."""
    return {name for name in Options.__dataclass_fields__ if name not in NO_SEARCH}
