"""Options of text generation, and of where and how a model runs, each declared once.

From here come the flags of the command line, fields of the server, and the checks of keywords.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

from heedful.errors import UserError, describe
from heedful.option_ranges import OFF_AT_0, RANGES, kind_of, plain_number
from heedful.plugins import nearest

# Sections of --help.
SEARCH, SAMPLING, CONSTRAINTS = "Search", "Sampling", "Constraints on the output"
RUN_TIME = "Run time"

TooLong = Literal["error", "truncate", "leave_out"]
Normalization = Literal["average", "gnmt", "none"]  # of scores by length
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


def option(
    help: str,
    default: Any = None,
    panel: str | None = None,
    least: float | None = None,
    most: float = LARGEST,
    shown: str = "",
    flag: str = "",
    metavar: str = "",
) -> Any:
    """A field of a dataclass of options, which the command line offers as a flag of the same name.

    Args:
        panel: the section of `--help` that lists the flag; None: the option is Python's alone.
        least, most: range of a number; `least` None: the option is no such number.
        shown: the default in `--help`, where `default` does not say it.
        flag: another name of the flag than that of the field.
        metavar: of the value in `--help`; "": by the field's type.
    """
    limits = None if least is None else (least, most)
    metadata = {"help": help, "panel": panel, "limits": limits, "shown": shown, "flag": flag}
    return field(default=default, metadata={**metadata, "metavar": metavar})


BACKENDS = (
    "eager (the torch module), compiled, ctranslate2, or auto: the fastest that `heedful optimize` "
    "found, else eager. With auto a request that the backend does not support runs eager; of a "
    "backend by name, options that it does not support are an error."
)


@dataclass(frozen=True)
class RunTimeOptions:
    """Where and how a model runs: in `heedful.load`, in commands and in the server."""

    device: str = option("auto, cpu, cuda, cuda:N or mps.", "auto", RUN_TIME, metavar="DEVICE")
    backend: str = option(BACKENDS, "auto", RUN_TIME, metavar="NAME")
    precision: str = option(
        "float32, bfloat16, int8, or auto: the one that is best for the backend.",
        "auto", RUN_TIME, metavar="NAME",
    )  # fmt: skip
    threads: int | None = option(
        "CPU cores per worker.",
        panel=RUN_TIME, least=1, shown="found by heedful optimize, or by the size of the work",
    )  # fmt: skip
    trust_compiled: bool = option(
        "Run the native code in MODEL/backends/compiled even if it was not compiled by you on this "
        "machine; it can do all that you can.", False, RUN_TIME,
    )  # fmt: skip
    batch_tokens: int | None = option(
        "Padded tokens (times beams) per batch.",
        panel=RUN_TIME, least=1, most=2**63 - 1,
        shown=f"found by heedful optimize, or {DEFAULTS['batch_tokens']:,}",
    )  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of search and sampling, for prompts and for sources.

    None means the default of the model (`ModelMetadata.options`), else the one given here.
    Raises UserError for options that exclude each other.
    """

    max_new_tokens: int | None = option(
        "Largest number of new tokens, the end token counted.",
        panel=SEARCH, least=1, shown="by the source's length, 64, or 512 in a chat",
    )  # fmt: skip
    min_new_tokens: int | None = option(
        "Smallest number of new tokens, the end token counted.",
        panel=SEARCH, least=0, shown="the model's, or 0",
    )  # fmt: skip
    beam_size: int | None = option(
        "Hypotheses kept by beam search; 1 is greedy search or sampling.",
        panel=SEARCH, least=1, shown="the model's, or 5 for translators, 1 for others",
    )  # fmt: skip
    num_return: int = option("Outputs per prompt, best first.", 1, SEARCH, least=1)
    length_penalty: float | None = option(
        "Exponent of the length in the score of a hypothesis.",
        panel=SEARCH, shown="the model's, or 1.0",
    )  # fmt: skip
    normalization: Normalization | None = option(
        "Division of scores by length: average (length ** penalty), gnmt (Wu et al. 2016) or none.",
        panel=SEARCH, shown="the model's, or average",
    )  # fmt: skip
    stop_rule: StopRule | None = option(
        "End of a beam search: optimal (no hypothesis can still win), beam_full (beam-size "
        "hypotheses ended) or heuristic (a bound at the current length). CTranslate2 supports "
        "beam_full only, and has it where no rule is given.",
        panel=SEARCH, shown="the model's, or optimal",
    )  # fmt: skip
    num_groups: int = option(
        "Groups of a diverse beam search (Vijayakumar et al. 2018).", 1, SEARCH, least=1
    )
    diversity_penalty: float = option(
        "Nats subtracted from a token for each earlier group that chose it.", 0.0, SEARCH
    )
    coverage_penalty: float = option(
        "Weight of the penalty on source tokens with little attention, averaged over the heads of "
        "the last decoder layer (Wu et al. 2016, equation 14); runs eager.",
        0.0,
        SEARCH,
    )
    temperature: float | None = option(
        "Sample, with logits divided by this; 0 is greedy search.",
        panel=SAMPLING, shown="no sampling",
    )  # fmt: skip
    top_k: int | None = option("Sample among the k most probable tokens.", panel=SAMPLING)
    top_p: float | None = option(
        "Nucleus sampling: the smallest set of tokens with total probability p.",
        panel=SAMPLING,
    )
    min_p: float | None = option(
        "Sample among tokens with at least this share of the largest probability.",
        panel=SAMPLING,
    )
    typical_p: float | None = option(
        "Locally typical sampling (Meister et al. 2023) with total probability p.",
        panel=SAMPLING,
    )
    top_h: float | None = option(
        "Sample among the most probable tokens with this share of the entropy (Potraghloo et al. "
        "2025)."
    )
    epsilon_cutoff: float | None = option(
        "Sample among tokens of at least this probability (Hewitt et al. 2022); 0: among all."
    )
    eta_cutoff: float | None = option(
        "Sample among tokens of at least a probability that falls with the entropy (Hewitt et al. "
        "2022); 0: among all."
    )
    min_tokens_to_keep: int = option(
        "Tokens that each of top_k, top_p, min_p, typical_p, epsilon_cutoff and eta_cutoff keeps.",
        1, least=1,
    )  # fmt: skip
    seed: int | Sequence[int] | None = option(
        "Seed of sampling (in Python also one per prompt).",
        panel=SAMPLING, least=0, most=2**63 - 1, shown="a new one each time",
    )  # fmt: skip
    repetition_penalty: float | None = option(
        "Divide the scores of tokens that occurred before; 1 is no penalty.",
        panel=CONSTRAINTS, shown="the model's, or 1.0",
    )  # fmt: skip
    presence_penalty: float | None = option(
        "Subtracted from the score of a token that occurred before.",
        panel=CONSTRAINTS, shown="the model's, or 0.0",
    )  # fmt: skip
    frequency_penalty: float | None = option(
        "Subtracted from the score of a token for each earlier occurrence.",
        panel=CONSTRAINTS, shown="the model's, or 0.0",
    )  # fmt: skip
    no_repeat_ngram_size: int | None = option(
        "Forbid a second occurrence of any n-gram of this size, the prompt of a language model "
        "included; 0 forbids none.",
        panel=CONSTRAINTS, least=0, shown="the model's, or 0",
    )  # fmt: skip
    encoder_repetition_penalty: float | None = option(
        "Multiply the scores of tokens of the source (of the prompt, in a language model)."
    )
    encoder_no_repeat_ngram_size: int | None = option(
        "Forbid every n-gram of this size of the source (of the prompt, in a language model); 0 "
        "forbids none.", least=0,
    )  # fmt: skip
    sequence_bias: Sequence[tuple[Sequence[int], float]] | None = option(
        "Pairs of ids and a number that is added to the log-probability of the last id after the "
        "others."
    )
    exponential_decay_length_penalty: Sequence[float] | None = option(
        "Number of new tokens after which the end token becomes more probable, and the factor by "
        "which its log-probability does with each further token."
    )
    begin_suppress_tokens: Sequence[int] | None = option("Ids that do not begin an output.")
    renormalize_logits: bool | None = option(
        "Let beam search rank by probabilities that sum to 1 after all rules."
    )
    banned: Sequence[str | int | Sequence[int]] = option(
        "Text that no output contains, not even inside a word (in Python also ids); repeatable.",
        (),
        CONSTRAINTS,
    )
    require: Sequence[str | Sequence[int]] = option(
        "Phrase that every output contains, by beam search (in Python also ids); repeatable.",
        (),
        CONSTRAINTS,
    )
    json_schema: str | Mapping[str, Any] | None = option(
        "Write JSON of this JSON schema (text, or path of a file; extra `grammar`); runs eager.",
        None, CONSTRAINTS,
    )  # fmt: skip
    regex: str | None = option(
        "Write a text that matches this regular expression (extra `grammar`); runs eager.",
        None, CONSTRAINTS,
    )  # fmt: skip
    src_language: str | None = option(
        "Language of the texts, such as en, for a model that reads several; of a document that "
        "does not say it.",
        panel=CONSTRAINTS, shown="the model's, if it has one", flag="--src-lang",
    )  # fmt: skip
    tgt_language: str | None = option(
        "Language to translate into, such as de, for a model with several.",
        panel=CONSTRAINTS, shown="the model's, if it has one", flag="--tgt-lang",
    )  # fmt: skip
    no_unknown: bool = option("Forbid the unknown token.", False, CONSTRAINTS)
    keep: bool = option(
        "Write placeholders, tags, addresses and numbers of the source as they are, each as often; "
        "for translators that were trained with data.keep.", True, CONSTRAINTS,
    )  # fmt: skip
    glossary: Any = option(
        "Terms and their translations, TERM<tab>TRANSLATION a line, or TBX (in Python also a "
        "mapping); with forms by |. A translation without one has a reason for a review. Terms "
        "that the model's vocabulary cannot write are left out, with a note.",
        panel=CONSTRAINTS, shown="no glossary", metavar="FILE",
    )  # fmt: skip
    stop: Sequence[str] | None = option(
        "End the output before this text; repeatable.", panel=CONSTRAINTS
    )
    stop_ids: Sequence[int] = option("Ids that end the output, besides the model's EOS.", ())
    draft: Any = option(
        "Speculative decoding: a small model with the same vocabulary, or `lookup` for n-grams of "
        "the prompt. The output is the same, in fewer steps.",
        panel=SEARCH, shown="no draft",
    )  # fmt: skip
    num_draft_tokens: int = option("Tokens that the draft proposes per step.", 4, SEARCH, least=1)
    prefixes: Sequence[str] | None = option("Beginning of each output, one per prompt.")
    forced: Mapping[int, int] | None = option("Position among the new tokens -> its token id.")
    prefix_function: Callable[[int, list[int]], Sequence[int]] | None = option(
        "`(index of the prompt, new ids) -> ids allowed next`."
    )
    shortlist: bool = option(
        "Restrict the output vocabulary by the model's shortlist, if it has one "
        "(heedful optimize --shortlist).", True, CONSTRAINTS,
    )  # fmt: skip
    scores: bool = option(
        "Score each output. Without, a backend may skip work for scores and return NaN.", True
    )
    too_long: TooLong = option(
        "Prompts longer than the net allows: error, truncate, or leave_out (reported, with a blank "
        "output).", "error",
    )  # fmt: skip
    first_number: int = option("Number of the first prompt in error messages.", 1)
    numbers: Sequence[int] | None = option(
        "Number of each prompt in error messages, such as lines whose parts are prompts; it may "
        "grow while prompts are read; default: from `first_number` on."
    )
    batch_tokens: int | None = option(
        "Padded tokens times beams per batch.", least=1, most=2**63 - 1
    )
    progress: Callable[[int], None] | None = option("Called with the prompts of each batch.")
    on_output: Callable[[int, list[Any]], None] | None = option(
        "Called once for each prompt, with its index and its `Generation`s, as soon as they are "
        "complete, while others of the batch may be in progress."
    )
    explicit: frozenset[str] = option("Names of the options given by the caller.", frozenset())

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
        given = {name: plain_number(value) for name, value in given.items()}
        explicit = frozenset(name for name, value in given.items() if value is not None)
        return cls(**{"explicit": explicit, **given})

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

    def number(self, index: int) -> int:
        """The number in messages of the prompt with an index, from 0."""
        if self.numbers is None or index >= len(self.numbers):
            return self.first_number + index
        return self.numbers[index]

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


_KINDS = {name: kind for name, option in _NAMES.items() if (kind := kind_of(option)) is not None}
