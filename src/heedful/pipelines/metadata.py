"""The metadata of a saved model: `config.json` without the architecture's own keys."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from heedful.data.labels import ProblemType
from heedful.fidelity import Keep
from heedful.pipelines.pooling import Pooling


@dataclass(frozen=True)
class Limits:
    """The default output limit: ⌈factor · source tokens⌉ + offset, at most the net's length."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    factor: float = 2.0
    offset: int = 10

    @classmethod
    def from_lengths(cls, src_lengths: np.ndarray, tgt_lengths: np.ndarray) -> "Limits":
        """The limit that 99.9% of the training pairs keep."""
        factors = (tgt_lengths - cls.offset) / src_lengths
        return cls(round(max(0.1, float(np.quantile(factors, 0.999))), 2))

    def for_source(self, length: int) -> int:
        """Most output tokens, EOS included, for a source of `length` tokens."""
        return math.ceil(self.factor * length) + self.offset


@dataclass(frozen=True)
class GenerationIds:
    """Token ids with a role in generation.

    Attributes:
        decoder_start_ids: first ids of an encoder-decoder's target (BOS; T5 and Marian: padding).
        eos_ids: ids that end an output.
        suppressed_ids: ids that are excluded from outputs (padding, a second BOS).
        forced_bos_id: the first id of each output; None: any.
        forced_eos_id: the id at the length limit; None: any.
        suppressed_sequences: sequences of ids that are excluded from outputs.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    decoder_start_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    forced_bos_id: int | None = None
    forced_eos_id: int | None = None
    suppressed_sequences: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ModelMetadata:
    """The task, languages and generation defaults of a model.

    Attributes:
        limits: the default output limit of an encoder-decoder.
        labels: of a classifier, in the order of its logits.
        options: defaults of `heedful.options.Options`.
        plugins: names of the plugins that the architecture needs.
        language_tags: the token before a source, by the target language that it selects.
        language_codes: the token of each language of a model for many directions: the first one of
            a source in this language, and the first one of an output in it.
        pooling, normalize: how vectors of texts are made, where `embed` names nothing else.
        prompts: texts that `embed` can put before its texts, by name.
        default_prompt: the name of the one that it puts there; None: none.
        problem: what the logits of a classifier mean: the log-probabilities of classes that
            exclude each other; those of classes of which several can be true (by sigmoid); values.
        keep: a translator was trained with masks of what it must keep (`data.keep`).
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
    language_tags: dict[str, str] = field(default_factory=dict)
    language_codes: dict[str, str] = field(default_factory=dict)
    pooling: Pooling = "mean"
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    problem: ProblemType = "single_label"
    keep: Keep | None = None

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "ModelMetadata":
        """The metadata of a dictionary; raises TypeError for wrong keys or values."""
        try:
            return TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            raise TypeError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
