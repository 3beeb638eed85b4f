"""Options of text generation, each declared once, with the help text of its command-line flag."""

import collections.abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin

from heedful.errors import UserError, describe
from heedful.option_ranges import OFF_AT_0, RANGES
from heedful.plugins import nearest

# Sections of --help.
SEARCH, SAMPLING, CONSTRAINTS = "Search", "Sampling", "Constraints on the output"

TooLong = Literal["error", "truncate", "leave_out"]
StopRule = Literal["optimal", "beam_full", "heuristic"]
LARGEST = 1_000_000  # tokens, beams and the like: a larger number is a mistake
# Temperatures below and above act as these: in fp32 quotients could be -inf or NaN. There only the
# most probable tokens, or all with equal probability, are left anyway.
TEMPERATURES = (1e-30, 1e30)
SAMPLING_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("top_h", "epsilon_cutoff", "eta_cutoff"),
)
DEFAULTS: Mapping[str, Any] = {  # where neither the call nor the model's metadata has a value
    "min_new_tokens": 0,
    "stop": (),
    "length_penalty": 1.0,
    "normalization": "average",
    "stop_rule": "optimal",
    "no_repeat_ngram_size": 0,
    "batch_tokens": 8_192,
}


def _option(
    help: str,
    default: Any = None,
    panel: str | None = None,
    least: int | None = None,
    most: int = LARGEST,
    shown: str = "",
    flag: str = "",
) -> Any:
    """A field of `Options`, which the command line offers as a flag of the same name.

    Args:
        panel: the section of `--help` that lists the flag; None: the option is Python's alone.
        least, most: range of a whole number; `least` None: the option is no such number.
        shown: the default in `--help`, where `default` does not say it.
        flag: another name of the flag than that of the field.
    """
    limits = None if least is None else (least, most)
    metadata = {"help": help, "panel": panel, "limits": limits, "shown": shown, "flag": flag}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Options of search and sampling, for prompts and for sources.

    None means the default of the model (`ModelMetadata.options`), else the one given here.
    Raises UserError for options that exclude each other.
    """

    max_new_tokens: int | None = _option(
        "Largest number of new tokens, the end token counted.",
        panel=SEARCH, least=1, shown="by the source's length, 64, or 512 in a chat",
    )  # fmt: skip
    min_new_tokens: int | None = _option(
        "Smallest number of new tokens, the end token counted.",
        panel=SEARCH, least=0, shown="the model's, or 0",
    )  # fmt: skip
    beam_size: int | None = _option(
        "Hypotheses kept by beam search; 1 is greedy search or sampling.",
        panel=SEARCH, least=1, shown="the model's, or 5 for translators, 1 for others",
    )  # fmt: skip
    num_return: int = _option("Outputs per prompt, best first.", 1, SEARCH, least=1)
    length_penalty: float | None = _option(
        "Exponent of the length in the score of a hypothesis.",
        panel=SEARCH, shown="the model's, or 1.0",
    )  # fmt: skip
    normalization: Literal["average", "gnmt", "none"] | None = _option(
        "Division of scores by length: average (length ** penalty), gnmt (Wu et al. 2016) or none.",
        panel=SEARCH, shown="the model's, or average",
    )  # fmt: skip
    stop_rule: StopRule | None = _option(
        "End of a beam search: optimal (no hypothesis can still win), beam_full (beam-size "
        "hypotheses ended) or heuristic (a bound at the current length). CTranslate2 supports "
        "beam_full only, and has it where no rule is given.",
        panel=SEARCH, shown="the model's, or optimal",
    )  # fmt: skip
    num_groups: int = _option(
        "Groups of a diverse beam search (Vijayakumar et al. 2018).", 1, SEARCH, least=1
    )
    diversity_penalty: float = _option(
        "Nats subtracted from a token for each earlier group that chose it.", 0.0, SEARCH
    )
    coverage_penalty: float = _option(
        "Weight of the penalty on source tokens with little attention, averaged over the heads of "
        "the last decoder layer (Wu et al. 2016, equation 14); runs eager.",
        0.0,
        SEARCH,
    )
    temperature: float | None = _option(
        "Sample, with logits divided by this; 0 is greedy search.",
        panel=SAMPLING, shown="no sampling",
    )  # fmt: skip
    top_k: int | None = _option("Sample among the k most probable tokens.", panel=SAMPLING)
    top_p: float | None = _option(
        "Nucleus sampling: the smallest set of tokens with total probability p.",
        panel=SAMPLING,
    )
    min_p: float | None = _option(
        "Sample among tokens with at least this share of the largest probability.",
        panel=SAMPLING,
    )
    typical_p: float | None = _option(
        "Locally typical sampling (Meister et al. 2023) with total probability p.",
        panel=SAMPLING,
    )
    top_h: float | None = _option(
        "Sample among the most probable tokens with this share of the entropy (Potraghloo et al. "
        "2025)."
    )
    epsilon_cutoff: float | None = _option(
        "Sample among tokens of at least this probability (Hewitt et al. 2022); 0: among all."
    )
    eta_cutoff: float | None = _option(
        "Sample among tokens of at least a probability that falls with the entropy (Hewitt et al. "
        "2022); 0: among all."
    )
    min_tokens_to_keep: int = _option(
        "Tokens that each of top_k, top_p, min_p, typical_p, epsilon_cutoff and eta_cutoff keeps.",
        1, least=1,
    )  # fmt: skip
    seed: int | Sequence[int] | None = _option(
        "Seed of sampling (in Python also one per prompt).",
        panel=SAMPLING, least=0, most=2**63 - 1, shown="a new one each time",
    )  # fmt: skip
    repetition_penalty: float | None = _option(
        "Divide the scores of tokens that occurred before; 1 is no penalty.",
        panel=CONSTRAINTS, shown="the model's, or 1.0",
    )  # fmt: skip
    presence_penalty: float | None = _option(
        "Subtracted from the score of a token that occurred before.",
        panel=CONSTRAINTS, shown="the model's, or 0.0",
    )  # fmt: skip
    frequency_penalty: float | None = _option(
        "Subtracted from the score of a token for each earlier occurrence.",
        panel=CONSTRAINTS, shown="the model's, or 0.0",
    )  # fmt: skip
    no_repeat_ngram_size: int | None = _option(
        "Forbid a second occurrence of any n-gram of this size, the prompt of a language model "
        "included; 0 forbids none.",
        panel=CONSTRAINTS, least=0, shown="the model's, or 0",
    )  # fmt: skip
    encoder_repetition_penalty: float | None = _option(
        "Multiply the scores of tokens of the source (of the prompt, in a language model)."
    )
    encoder_no_repeat_ngram_size: int | None = _option(
        "Forbid every n-gram of this size of the source (of the prompt, in a language model); 0 "
        "forbids none.", least=0,
    )  # fmt: skip
    sequence_bias: Sequence[tuple[Sequence[int], float]] | None = _option(
        "Pairs of ids and a number that is added to the log-probability of the last id after the "
        "others."
    )
    exponential_decay_length_penalty: Sequence[float] | None = _option(
        "Number of new tokens after which the end token becomes more probable, and the factor by "
        "which its log-probability does with each further token."
    )
    begin_suppress_tokens: Sequence[int] | None = _option("Ids that do not begin an output.")
    renormalize_logits: bool | None = _option(
        "Let beam search rank by probabilities that sum to 1 after all rules."
    )
    banned: Sequence[str | int | Sequence[int]] = _option(
        "Text that no output contains, not even inside a word (in Python also ids); repeatable.",
        (),
        CONSTRAINTS,
    )
    require: Sequence[str | Sequence[int]] = _option(
        "Phrase that every output contains, by beam search (in Python also ids); repeatable.",
        (),
        CONSTRAINTS,
    )
    json_schema: str | Mapping[str, Any] | None = _option(
        "Write JSON of this JSON schema (text, or path of a file; extra `grammar`); runs eager.",
        None, CONSTRAINTS,
    )  # fmt: skip
    regex: str | None = _option(
        "Write a text that matches this regular expression (extra `grammar`); runs eager.",
        None, CONSTRAINTS,
    )  # fmt: skip
    tgt_language: str | None = _option(
        "Language to translate into, such as de, for a model with several.",
        panel=CONSTRAINTS, shown="the model's, if it has one", flag="--tgt-lang",
    )  # fmt: skip
    no_unknown: bool = _option("Forbid the unknown token.", False, CONSTRAINTS)
    stop: Sequence[str] | None = _option(
        "End the output before this text; repeatable.", panel=CONSTRAINTS
    )
    stop_ids: Sequence[int] = _option("Ids that end the output, besides the model's EOS.", ())
    draft: Any = _option(
        "Speculative decoding: a small model with the same vocabulary, or `lookup` for n-grams of "
        "the prompt. The output is the same, in fewer steps.",
        panel=SEARCH, shown="no draft",
    )  # fmt: skip
    num_draft_tokens: int = _option("Tokens that the draft proposes per step.", 4, SEARCH, least=1)
    prefixes: Sequence[str] | None = _option("Beginning of each output, one per prompt.")
    forced: Mapping[int, int] | None = _option("Position among the new tokens -> its token id.")
    prefix_function: Callable[[int, list[int]], Sequence[int]] | None = _option(
        "`(index of the prompt, new ids) -> ids allowed next`."
    )
    shortlist: bool = _option(
        "Restrict the output vocabulary by the model's shortlist, if it has one "
        "(heedful optimize --shortlist).", True, CONSTRAINTS,
    )  # fmt: skip
    scores: bool = _option(
        "Score each output. Without, a backend may skip work for scores and return NaN.", True
    )
    too_long: TooLong = _option(
        "Prompts longer than the net allows: error, truncate, or leave_out (reported, with a blank "
        "output).", "error",
    )  # fmt: skip
    first_number: int = _option("Number of the first prompt in error messages.", 1)
    batch_tokens: int | None = _option(
        "Padded tokens times beams per batch.", least=1, most=2**63 - 1
    )
    progress: Callable[[int], None] | None = _option("Called with the prompts of each batch.")
    on_output: Callable[[int, list[Any]], None] | None = _option(
        "Called once for each prompt, with its index and its `Generation`s, as soon as they are "
        "complete, while others of the batch may be in progress."
    )
    explicit: frozenset[str] = _option("Names of the options given by the caller.", frozenset())

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            hint = "; the rule of a beam search is stop_rule" if self.stop else ""
            raise UserError(f"stop must be a list of texts, not {self.stop!r}{hint}")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            is_default = value is None and _NAMES[name].default is None
            if not is_default and not kind.accepts(value):
                raise UserError(f"{name} must be {kind.description}, not {describe(value)}")
        for name, (least, most) in _LIMITS.items():
            number = getattr(self, name)
            if isinstance(number, Integral) and not least <= number <= most:
                bound = f"at least {least}" if number < least else f"at most {most:,}"
                raise UserError(f"{name} must be {bound}, not {number}")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name} must be a finite number, not {value}")
        for name, limits in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (value == 0 and name in OFF_AT_0):
                limits.check(name, value)
        if (self.json_schema is not None) and (self.regex is not None):
            raise UserError(
                "option json_schema and option regex exclude each other; give one of them"
            )
        if self.coverage_penalty < 0:
            raise UserError(f"coverage_penalty must be at least 0, not {self.coverage_penalty}")
        if self.by_beams:
            if self.samples:
                raise UserError("beam_size above 1 and sampling options exclude each other")
            if self.stop or self.draft is not None:
                raise UserError("option stop and option draft go with beam_size 1 alone")
        if self.beam_size == 1 and self.num_return > 1 and not self.samples:
            raise UserError(
                f"num_return {self.num_return} greedy outputs would all be the same; "
                "give option temperature or beam_size"
            )

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> "Options":
        """From keyword arguments; raises UserError with the nearest name to an unknown one."""
        for name in given:
            if name not in _NAMES:
                raise UserError(f"unknown generation option {name}; {nearest(name, _NAMES)}")
        return cls(**{"explicit": frozenset(given), **given})

    @property
    def by_beams(self) -> bool:
        """True for a beam search."""
        return (self.beam_size or 1) > 1

    @cached_property
    def rows(self) -> int:
        """Beams or samples per prompt."""
        return max(self.beam_size or 1, self.num_return)

    @property
    def row_tokens(self) -> int:
        """Padded tokens of the prompts of a batch, beams not counted."""
        return max(1, (self.batch_tokens or DEFAULTS["batch_tokens"]) // self.rows)

    @cached_property
    def samples(self) -> bool:
        """True if tokens are sampled."""
        if self.temperature is not None:
            return self.temperature != 0
        return any(getattr(self, name) is not None for name in SAMPLING_OPTIONS)

    def with_defaults(self, metadata: Mapping[str, Any]) -> "Options":
        """None replaced by the model's metadata, where it agrees with the rest, or `DEFAULTS`."""
        known = {**DEFAULTS, **metadata}
        values = {name: value for name, value in known.items() if getattr(self, name) is None}
        excludes_beams = self.stop or self.draft is not None
        excludes_beams = excludes_beams or self.samples or self.temperature is not None
        for name in SAMPLING_OPTIONS if self.by_beams or self.temperature == 0 else ():
            values.pop(name, None)
        if excludes_beams:
            values.pop("beam_size", None)
        elif self.by_beams or (self.beam_size is None and values.get("beam_size", 1) > 1):
            values["stop"] = ()
        if self.max_new_tokens is not None and "min_new_tokens" in values:
            values["min_new_tokens"] = min(values["min_new_tokens"], self.max_new_tokens)
        samples = self.samples or any(name in values for name in SAMPLING_OPTIONS)
        size = self.beam_size or values.get("beam_size") or 1
        if not samples and self.num_return > 1 and self.beam_size != 1:
            size = max(size, self.num_return)
        if self.num_groups > 1 and (size % self.num_groups or size == 1):
            raise UserError(
                f"num_groups {self.num_groups} must divide the beam, whose size is {size}; "
                "give another beam_size=N"
            )
        if self.diversity_penalty and self.num_groups == 1:
            raise UserError("diversity_penalty needs num_groups above 1")
        if self.require and (size < 2 or self.num_groups > 1):
            raise UserError("require needs a beam search without groups: give a beam size above 1")
        if self.coverage_penalty and (size < 2 or self.require):
            raise UserError("coverage_penalty needs beam_size above 1, without required phrases")
        return replace(self, **values | {"beam_size": size})

    def seeds(self, numbers: Sequence[int]) -> list[int] | None:
        """Seeds of the prompts with these indices, from 0; None without sampling."""
        if not self.samples:
            return None
        seed = self.seed
        assert seed is not None
        if isinstance(seed, int):
            return [seed + (number << 32) for number in numbers]
        return [seed[number] for number in numbers]


# Built once: to do so at every call takes as long as a small model takes for a sentence.
_NAMES = {option.name: option for option in fields(Options)}
_LIMITS = {
    name: option.metadata["limits"] for name, option in _NAMES.items() if option.metadata["limits"]
}


class _Kind(NamedTuple):
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
    int: _Kind(_is_whole, "a whole number"),
    float: _Kind(_is_number, "a number"),
    bool: _Kind(lambda value: isinstance(value, bool), "True or False"),
}
_BY_NAME = {
    "seed": _Kind(lambda value: _is_whole(value) or _IDS(value), "a whole number, or one a prompt"),
    "stop": _Kind(_is_list_of(_is_text), "a list of texts"),
    "json_schema": _Kind(
        lambda value: _is_text(value) or isinstance(value, Mapping), "a JSON schema, or its path"
    ),
    "regex": _Kind(_is_text, "a regular expression"),
    "tgt_language": _Kind(_is_text, "a language code, such as de"),
    "prefixes": _Kind(_is_list_of(_is_text), "a list of texts, one for each prompt"),
    "banned": _Kind(_is_list_of(_is_text, _is_whole, _IDS), "a list of texts, ids or lists of ids"),
    "require": _Kind(_is_list_of(_is_text, _IDS), "a list of texts or lists of ids"),
    "stop_ids": _Kind(_IDS, "a list of token ids"),
    "begin_suppress_tokens": _Kind(_IDS, "a list of token ids"),
    "sequence_bias": _Kind(_is_bias, "a list of pairs of token ids and a number"),
    "exponential_decay_length_penalty": _Kind(_is_decay, "a whole number and a number"),
    "forced": _Kind(_is_forced, "a mapping from positions to token ids"),
}


def _kind_of(option: "Field[Any]") -> _Kind | None:
    """The values of an option, by its annotation; None: any."""
    hints = [hint for hint in get_args(option.type) if hint is not NoneType] or [option.type]
    if get_origin(option.type) is Literal:
        hints = [option.type]
    if get_origin(hints[0]) is Literal:
        names = get_args(hints[0])
        return _Kind(lambda value: isinstance(value, str) and value in names, ", ".join(names))
    if get_origin(hints[0]) is collections.abc.Callable:
        return _Kind(callable, "a function")
    return _BY_TYPE.get(hints[0])


_KINDS = {
    name: kind
    for name, option in _NAMES.items()
    if (kind := _BY_NAME.get(name) or _kind_of(option)) is not None
}
