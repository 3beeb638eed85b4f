"""What `config.json` says of a model beside its architecture's own keys."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError


@dataclass(frozen=True)
class Limits:
    """How long an output may be: ⌈factor · source tokens⌉ + offset, at most the net's length."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    factor: float = 2.0
    offset: int = 10

    @classmethod
    def of(cls, src_lengths: np.ndarray, tgt_lengths: np.ndarray) -> "Limits":
        """Room for all but one in a thousand of the training pairs."""
        needed = (tgt_lengths - cls.offset) / src_lengths
        return cls(round(max(0.1, float(np.quantile(needed, 0.999))), 2))

    def of_source(self, length: int) -> int:
        """Most output tokens, EOS included, for a source of `length` tokens."""
        return math.ceil(self.factor * length) + self.offset


@dataclass(frozen=True)
class GenerationIds:
    """Tokens that a generation begins and ends with, and those that it never writes.

    Attributes:
        start: what the decoder of two stacks reads first (BOS; T5 and Marian: padding).
        end: any of these ends a text.
        never: may not be written (padding, a second beginning).
        first: the token that must be written first; None: any.
        last: the token that must stand at the length limit; None: any.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    never: tuple[int, ...] = ()
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True)
class ModelCard:
    """What a model is for.

    Attributes:
        labels: a classifier's, in the order of its logits.
        options: how the model generates where a call does not say (`heedful.options.Options`).
        plugins: names of those that its architecture needs.
    """

    architecture: str
    task: str
    src_language: str | None = None
    tgt_language: str | None = None
    limits: Limits = field(default_factory=Limits)
    labels: tuple[str, ...] = ()
    generation: GenerationIds = field(default_factory=GenerationIds)
    options: dict[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ModelCard":
        """Raises TypeError where the content is not a card's."""
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            raise TypeError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
