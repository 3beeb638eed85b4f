"""How text is generated: every option once, with the description that the commands show too."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from heedful.errors import UserError
from heedful.plugins import nearest

TooLong = Literal["error", "truncate", "leave_out"]
LARGEST = 1_000_000  # of tokens, beams and the like: more is a slip, and would never end
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
USUAL: Mapping[str, Any] = {  # where neither call nor card says anything
    "length_penalty": 1.0,
    "normalization": "average",
    "stop_rule": "optimal",
    "no_repeat_ngram_size": 0,
    "batch_tokens": 8_192,
}


def _option(
    help: str,
    default: Any = None,
    flag: str | None = None,
    least: int | None = None,
    most: int = LARGEST,
) -> Any:
    """A field; `flag` is the command's (None: only Python has the option).

    `least`, `most`: between which a whole number must be; least None: it is no such number.
    """
    limits = None if least is None else (least, most)
    return field(default=default, metadata={"help": help, "flag": flag, "limits": limits})


@dataclass(frozen=True)
class Options:
    """How a text is gone on with, or a source answered.

    What is None is as the model's card says (`ModelCard.options`), and else as described here.
    Raises UserError for options that exclude each other.
    """

    max_new_tokens: int | None = _option(
        "Most new tokens, the end counted. Default: what a source's length allows, or 64.",
        flag="--max-new-tokens", least=1,
    )  # fmt: skip
    min_new_tokens: int = _option("Fewest new tokens, the end counted.", 0, "--min-new-tokens", 0)
    beam_size: int | None = _option("Beam size; 1 is no beam search.", None, "--beam-size", 1)
    num_return: int = _option("Outputs for each prompt, best first.", 1, "--num-return", 1)
    length_penalty: float | None = _option("Exponent of the length.", flag="--length-penalty")
    normalization: Literal["average", "gnmt", "none"] | None = _option(
        "Of scores by length: average, gnmt or none.", flag="--normalization"
    )
    stop_rule: Literal["optimal", "beam_full", "heuristic"] | None = _option(
        "When a beam search stops: optimal, beam_full or heuristic. CTranslate2 always stops about "
        "as beam_full does; another rule that is asked for here runs eager.",
        flag="--stop-rule",
    )
    num_groups: int = _option("Groups of a diverse beam search.", 1, "--num-groups", 1)
    diversity_penalty: float = _option(
        "Nats that a token costs for each earlier group with it.", 0.0, "--diversity-penalty"
    )
    coverage_penalty: float = _option(
        "What source tokens that got little attention cost a beam search's output (Wu et al. 2016, "
        "equation 14): by the mean of the heads in the decoder's last layer; runs eager.",
        0.0,
        "--coverage-penalty",
    )
    temperature: float | None = _option(
        "Draw tokens; below 1 closer to the likeliest. 0: greedy.", flag="--temperature"
    )
    top_k: int | None = _option("Draw from the k likeliest.", flag="--top-k")
    top_p: float | None = _option("Draw from the likeliest of this share.", flag="--top-p")
    min_p: float | None = _option(
        "Draw from those at least this share of the likeliest.", flag="--min-p"
    )
    typical_p: float | None = _option("Draw from the typical of this share.", flag="--typical-p")
    seed: int | Sequence[int] | None = _option(
        "Of drawing; in Python also one for each prompt. Default: another each time.",
        flag="--seed", least=0, most=2**63 - 1,
    )  # fmt: skip
    repetition_penalty: float | None = _option(
        "Divide the scores of tokens that were there; 1: none.", flag="--repetition-penalty"
    )
    presence_penalty: float | None = _option(
        "Subtract this from tokens that were there.", flag="--presence-penalty"
    )
    frequency_penalty: float | None = _option(
        "Subtract this for each time that a token was there.", flag="--frequency-penalty"
    )
    no_repeat_ngram_size: int | None = _option(
        "No n-gram of this size twice; 0: no rule.", flag="--no-repeat-ngram-size", least=0
    )
    banned: Sequence[str | int | Sequence[int]] = _option(
        "A text that may not be written (in Python also ids); repeatable.", (), "--banned"
    )
    require: Sequence[str | Sequence[int]] = _option(
        "A phrase that each output must hold, by beam search (in Python also ids); repeatable.",
        (),
        "--require",
    )
    no_unknown: bool = _option("Write no token for what is unknown.", False, "--no-unknown")
    stop: Sequence[str] = _option("End the output before this text; repeatable.", (), "--stop")
    draft: Any = _option(
        "Write the same in fewer steps: a small model of the same vocabulary, or lookup.",
        flag="--draft",
    )
    num_draft_tokens: int = _option(
        "How many a draft proposes at a time.", 4, "--num-draft-tokens", 1
    )
    prefixes: Sequence[str] | None = _option("How each output must begin.")
    forced: Mapping[int, int] | None = _option("Place among the new tokens -> the token there.")
    prefix_function: Callable[[int, list[int]], Sequence[int]] | None = _option(
        "`(prompt's number, new ids) -> ids that may come next`."
    )
    shortlist: bool = _option(
        "Write only what the source's tokens can become, where the model has a shortlist "
        "(heedful optimize --shortlist).", True, "--shortlist/--no-shortlist",
    )  # fmt: skip
    scores: bool = _option(
        "Score each output. Without, a backend may leave out what only scores need, and give NaN.",
        True,
    )
    too_long: TooLong = _option(
        "Of a prompt longer than the net allows: error, truncate, or leave_out, which tells of it "
        "and gives a blank output.", "error",
    )  # fmt: skip
    first_number: int = _option("What errors call the first prompt.", 1)
    batch_tokens: int | None = _option(
        "Padded tokens times beams that are worked on at once.", least=1, most=2**63 - 1
    )
    progress: Callable[[int], None] | None = _option("Called with the prompts of each batch.")
    said: frozenset[str] = _option("Names of what the call says itself.", frozenset())

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            hint = "; the rule of a beam search is stop_rule" if self.stop else ""
            raise UserError(f"stop must be a list of texts, not {self.stop!r}{hint}")
        if self.too_long not in get_args(TooLong):
            raise UserError(f"too_long must be {', '.join(get_args(TooLong))}, not {self.too_long}")
        for name, (least, most) in _LIMITS.items():
            number = getattr(self, name)
            if isinstance(number, int) and not least <= number <= most:
                bound = f"at least {least}" if number < least else f"at most {most:,}"
                raise UserError(f"{name} must be {bound}, not {number}")
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name} must be a finite number, not {value}")
        if self.coverage_penalty < 0:
            raise UserError(f"coverage_penalty must be at least 0, not {self.coverage_penalty}")
        if (self.beam_size or 1) > 1:
            if self.draws:
                raise UserError("beam_size above 1 and sampling options exclude each other")
            if self.stop or self.draft is not None:
                raise UserError("stop texts and a draft go with beam_size 1 alone")
        if self.beam_size == 1 and self.num_return > 1 and not self.draws:
            raise UserError(
                f"num_return {self.num_return} greedy outputs would all be the same; "
                "give a temperature, or a beam_size"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """From keywords; raises UserError naming the nearest to an unknown one."""
        for name in given:
            if name not in _NAMES:
                raise UserError(f"unknown generation option {name}; {nearest(name, _NAMES)}")
        return cls(**{"said": frozenset(given), **given})

    @cached_property
    def rows(self) -> int:
        """Beams or samples of each prompt."""
        return max(self.beam_size or 1, self.num_return)

    @property
    def row_tokens(self) -> int:
        """Padded tokens of prompts that are worked on at once."""
        return max(1, (self.batch_tokens or USUAL["batch_tokens"]) // self.rows)

    @cached_property
    def draws(self) -> bool:
        """Whether tokens are drawn, not chosen."""
        if self.temperature is not None:
            return self.temperature != 0
        return any(getattr(self, name) is not None for name in DRAWING)

    def with_defaults(self, card: Mapping[str, Any]) -> "Options":
        """Nothing left open: what was not asked for is the card's, where it goes with the rest."""
        known = {**USUAL, **card}
        taken = {name: value for name, value in known.items() if getattr(self, name) is None}
        by_beams = (self.beam_size or 1) > 1
        one_row = self.temperature is not None or self.draws or self.stop or self.draft is not None
        for name in DRAWING if by_beams or self.temperature == 0 else ():
            taken.pop(name, None)
        if one_row:
            taken.pop("beam_size", None)
        drawn = self.draws or any(name in taken for name in DRAWING)
        size = self.beam_size or taken.get("beam_size") or 1
        if not drawn and self.num_return > 1 and self.beam_size != 1:
            size = max(size, self.num_return)
        if self.num_groups > 1 and (size % self.num_groups or size == 1):
            raise UserError(
                f"num_groups {self.num_groups} must divide the beam, whose size is {size}; "
                "give another --beam-size"
            )
        if self.diversity_penalty and self.num_groups == 1:
            raise UserError("diversity_penalty is of groups: give num_groups (--num-groups) too")
        if self.require and (size < 2 or self.num_groups > 1):
            raise UserError("require needs a beam search without groups: give a beam size above 1")
        if self.coverage_penalty and (size < 2 or self.require):
            raise UserError(
                "coverage_penalty needs a beam search without required phrases: give a beam size "
                "above 1"
            )
        return replace(self, **taken | {"beam_size": size})

    def seeds(self, numbers: Sequence[int]) -> list[int] | None:
        """Those of prompts by their numbers, from 0; None where nothing is drawn."""
        if not self.draws:
            return None
        seed = self.seed
        assert seed is not None
        if isinstance(seed, int):
            return [seed + (number << 32) for number in numbers]
        return [seed[number] for number in numbers]


# Looked up once: a small model answers in the time that it takes to do so at each call.
_NAMES = {option.name: option for option in fields(Options)}
_LIMITS = {
    name: option.metadata["limits"] for name, option in _NAMES.items() if option.metadata["limits"]
}
