"""The section `data.corpora`: several training corpora with weights, tags and held-out files."""

import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from heedful.config.base import Strict
from heedful.config.files import Files
from heedful.errors import UserError, format_names

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TAG = re.compile(r"\S+")


class WeightFrom(Strict):
    """A weight from a step on."""

    from_step: int = Field(ge=0, description="Steps before the first one with the weight.")
    weight: float = Field(ge=0, description="Passes over the corpus in an epoch.")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: object) -> object:
        if isinstance(content, dict) and content.keys() != {"from_step", "weight"}:
            names = format_names([*content], str) or "none"
            raise UserError(f"a weight by step has the keys from_step and weight, not {names}")
        return content


WeightValue = float | list[tuple[int, float]] | list[WeightFrom]


def _check_weight(weight: WeightValue) -> WeightValue:
    changes = _changes(weight)
    firsts = [first for first, _ in changes]
    if not changes or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise UserError(
            "weights of a list begin at epoch or step 0 and ascend, as [[0, 1], [5, 0.2]] by epoch "
            "or [{from_step: 0, weight: 1}, {from_step: 5000, weight: 0.2}] by step, not "
            f"{changes}"
        )
    if min(value for _, value in changes) < 0 or not any(value for _, value in changes):
        raise UserError(
            f"a corpus of weight {weight if isinstance(weight, float) else changes} is never read; "
            "raise it, or leave it out"
        )
    return weight


def _changes(weight: WeightValue) -> list[tuple[int, float]]:
    """The weight from each epoch or step on at which it changes."""
    if not isinstance(weight, list):
        return [(0, weight)]
    return [(w.from_step, w.weight) if isinstance(w, WeightFrom) else w for w in weight]


def _check_tag(tag: str | None) -> str | None:
    if tag is not None and not _TAG.fullmatch(tag):
        raise UserError(f"a tag is one token without spaces, as <2de>, not {tag!r}")
    return tag


def check_names(corpora: dict[str, "Corpus"]) -> dict[str, "Corpus"]:
    """The corpora; raises UserError for a name that cannot be part of a dotted key."""
    for name in corpora:
        if not _NAME.fullmatch(name):
            raise UserError(f"a corpus has a name of letters, digits, _ and -, not {name!r}")
    return corpora


Weight = Annotated[WeightValue, AfterValidator(_check_weight)]
Tag = Annotated[str | None, AfterValidator(_check_tag)]


class Corpus(Files):
    """One corpus of `data.corpora`: the keys of `data.train` for its files, and these."""

    valid: Files = Field(
        default_factory=Files,
        description="Files of its validation rows, with the keys of `data.train`; if no corpus has "
        "any, rows of all corpora are held out (`data.valid_size`).",
    )
    test: Files = Field(
        default_factory=Files,
        description="Files of its test rows, with the keys of `data.train`, scored for each corpus "
        "when the run ends.",
    )
    weight: Weight = Field(
        1.0,
        description="Passes over the corpus in an epoch: 2 reads each row twice, 0.25 another "
        "quarter of the rows in each epoch; a list of [epoch, weight] changes it from these epochs "
        "on (the first is 0), a list of {from_step, weight} after these steps, at which an epoch "
        "ends.",
    )
    src_tag: Tag = Field(
        None,
        description="Token put before each source, after `tgt_tag`, that marks the source, such as "
        "`<bt>` for back-translated ones (translation); null: none.",
    )
    tgt_tag: Tag = Field(
        None,
        description="Token put before each source that names the language of the target, such as "
        "`<2de>`, for models with several target languages (translation); null: none.",
    )
    src_language: str | None = Field(
        None,
        description="Language code of its sources or texts; null: that of `data.src_language`.",
    )
    tgt_language: str | None = Field(
        None,
        description="Language code of its targets, by which `heedful translate --tgt-lang` finds "
        "`tgt_tag` (translation); null: that of `data.tgt_language`.",
    )

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if not self.paths():
            raise UserError("names no files of training rows: give src and tgt, file or text")
        return self

    def changes_by_step(self) -> bool:
        """True for a list of weights by step."""
        return isinstance(self.weight, list) and isinstance(self.weight[0], WeightFrom)

    def weights(self) -> list[tuple[int, float]]:
        """The weight from each epoch on (with `changes_by_step` each step) at which it changes."""
        return _changes(self.weight)
