"""The section `data.filters`: training rows that are dropped before anything is learned."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from heedful.config.base import Strict
from heedful.errors import UserError

Limit = Annotated[int, Field(ge=1)] | None
Share = Annotated[float, Field(gt=0, le=1)] | None
ScriptNames = str | list[str] | None


class Filters(Strict):
    """Conditions that each training row must meet; held-out rows are never filtered."""

    min_characters: Limit = Field(
        None,
        description="Fewest characters of a text, or of each side of a pair, without spaces at its "
        "ends; null: no limit.",
    )
    max_characters: Limit = Field(
        None,
        description="Most characters of a text, or of each side of a pair, without spaces at its "
        "ends; null: no limit.",
    )
    min_words: Limit = Field(
        None,
        description="Fewest words of a text, or of each side of a pair, separated by whitespace; "
        "null: no limit.",
    )
    max_words: Limit = Field(
        None,
        description="Most words of a text, or of each side of a pair, separated by whitespace; "
        "null: no limit.",
    )
    max_ratio: Annotated[float, Field(ge=1)] | None = Field(
        None,
        description="Largest ratio of the longer side of a pair to the shorter one, in characters; "
        "null: no limit.",
    )
    different_sides: bool = Field(
        False, description="Drop pairs whose sides are the same text, as in copied sources."
    )
    min_letters: Share = Field(
        None,
        description="Smallest share of letters among the characters of a text, or of each side of "
        "a pair, whitespace excluded; null: no limit.",
    )
    min_script: Share = Field(
        None,
        description="Smallest share of letters in the scripts of its language among the letters of "
        "a text, or of each side of a pair; null: no limit.",
    )
    src_script: ScriptNames = Field(
        None,
        description="Unicode script, or list of scripts, that `min_script` expects in sources or "
        "texts, such as Latin; null: those of `data.src_language`.",
    )
    tgt_script: ScriptNames = Field(
        None,
        description="Unicode script, or list of scripts, that `min_script` expects in targets; "
        "null: those of `data.tgt_language`.",
    )
    language: bool = Field(
        False,
        description="Drop texts, or pairs with a side, that py3langid (extra `langid`) identifies "
        "as another language than that of `data.src_language`, for targets `data.tgt_language`, or "
        "of the corpus; members of a macrolanguage, such as Norwegian, are not distinguished.",
    )
    language_probability: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5,
        description="Smallest probability of another language for which `language` drops a text; "
        "that of short texts is low, so that most are kept.",
    )
    unique: list[Literal["row", "src", "tgt", "text"]] = Field(
        [],
        description="Drop rows that repeat an earlier one in the whole row (row) or in one of its "
        "texts (src, tgt, text), found by a hash of 64 bits; empty: keep repeated rows.",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        for unit in ("characters", "words"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if low is not None and high is not None and low > high:
                raise UserError(f"min_{unit} {low} is more than max_{unit} {high}; change one")
        if self.min_script is None and (self.src_script or self.tgt_script):
            raise UserError("src_script and tgt_script have no effect without min_script; set it")
        default = type(self).model_fields["language_probability"].default
        if not self.language and self.language_probability != default:
            raise UserError("language_probability has no effect without language; set it")
        return self
