"""Decorator for the Config of a published model: a frozen dataclass that checks its values."""

import math
from dataclasses import fields
from typing import Any, Protocol, TypeVar, dataclass_transform, runtime_checkable

from heedful.parts.helpers import checked_dataclass

T = TypeVar("T")
_MOST_MODULES, _MOST = 1_024, 2**31 - 1  # DeepNet had 1,000 layers


@runtime_checkable
class HasCheck(Protocol):
    """A Config with a rule that only its architecture has."""

    def check(self) -> None:
        """Raises ValueError for what the architecture cannot have."""


@dataclass_transform(frozen_default=True)
def model_config(cls: type[T]) -> type[T]:
    """A frozen dataclass that refuses unknown keys and wrong sizes; `check()` may add rules."""
    cls.__post_init__ = _check  # type: ignore[attr-defined]
    return checked_dataclass(cls)


def _check(config: Any) -> None:
    """Check values that hold for all models; raises ValueError naming the key.

    * Integers are at least 1 and below 2³¹, numbers of layers and experts at most 1,024; dropouts
      are in [0, 1); other floats are positive and finite.
    * num_heads divides d_model (unless `head_dim` is given), and num_kv_heads divides num_heads.
    * Rotary positions need an even width of a head.
    * One matrix for source and target (any `tie_embeddings` but none and decoder) needs
      vocabularies of equal size.
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if "dropout" in name:
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        elif isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        elif isinstance(value, int):
            most = _MOST_MODULES if name.endswith(("layers", "experts")) else _MOST
            if value > most:
                raise ValueError(f"{name} must be at most {most:,}, not {value:,}")
        elif isinstance(value, float) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value}")
    width, heads = values["d_model"], values["num_heads"]
    for name in ("num_heads", "num_decoder_heads"):
        count = values.get(name)
        if values.get("head_dim") is None and count is not None and width % count:
            raise ValueError(f"d_model {width} is not divisible by {name} {count}")
    groups = values.get("num_kv_heads")
    if groups is not None and heads % groups:
        raise ValueError(f"num_heads {heads} is not divisible by num_kv_heads {groups}")
    is_rotary = "rope_base" in values or values.get("positions") == "rotary"
    if is_rotary and (head_dim := values.get("head_dim") or width // heads) % 2:
        raise ValueError(f"rotary positions need an even head_dim, not {head_dim}")
    if "src_vocab_size" in values and values.get("tie_embeddings") not in ("none", "decoder"):
        check_one_vocabulary(config)
    if isinstance(config, HasCheck):
        config.check()


def check_one_vocabulary(config: Any) -> None:
    """Raise ValueError if source and target share a matrix but not the size of the vocabulary."""
    if config.src_vocab_size != config.tgt_vocab_size:
        raise ValueError(
            "one matrix for source and target needs one vocabulary, but src_vocab_size is "
            f"{config.src_vocab_size} and tgt_vocab_size {config.tgt_vocab_size}; "
            "use a joint tokenizer, or tie_embeddings=decoder where the model has it"
        )
