"""What every architecture's Config is: frozen, without unknown keys, of sizes that can be."""

import math
from dataclasses import fields
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from heedful.errors import UserError
from heedful.plugins import nearest

T = TypeVar("T")
_MOST = {True: 1_024, False: 2**31 - 1}  # layers, which DeepNet had 1,000 of; any other number


@dataclass_transform(frozen_default=True)
def model_config(cls: type[T]) -> type[T]:
    """A frozen dataclass without unknown keys that checks its sizes, and by its own `check()`."""
    cls.__post_init__ = _check  # type: ignore[attr-defined]
    made: Any = dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    return cast(type[T], made)


def validated(cls: type[T], keys: dict[str, Any], where: str) -> T:
    """An object of a dataclass from plain keys; raises UserError naming the first wrong one."""
    known = [field.name for field in fields(cast(Any, cls))]
    # A recipe's section is the beginning of its keys, a file stands in front of all.
    front, section = ("", "model.") if where == "model" else (f"{where}: ", "")
    for key in keys:
        if key not in known:
            raise UserError(f"{front}unknown key {section}{key}; {nearest(key, known)}")
    try:
        return TypeAdapter(cls).validate_python(keys)
    except ValidationError as error:
        first = error.errors()[0]
        key, message = ".".join(map(str, first["loc"])), first["msg"]
        place = f"{front}{section}{key}" if key else where
        raise UserError(f"{place}: {message.removeprefix('Value error, ')}") from None


def _check(config: Any) -> None:
    """Refuse what no model can have; raises ValueError naming the key.

    Whole numbers must be at least 1 and below 2³¹, dropouts in [0, 1), epsilons and bases above 0;
    heads must divide the width (unless `head_dim` is given) and be divided by `num_kv_heads`.
    """
    values = check_numbers(config)
    width, heads = values["d_model"], values["num_heads"]
    for name in ("num_heads", "num_decoder_heads"):
        count = values.get(name)
        if values.get("head_dim") is None and count is not None and width % count:
            raise ValueError(f"d_model {width} is not divisible by {name} {count}")
    groups = values.get("num_kv_heads")
    if groups is not None and heads % groups:
        raise ValueError(f"num_heads {heads} is not divisible by num_kv_heads {groups}")
    if hasattr(config, "check"):
        config.check()


def check_numbers(config: Any) -> dict[str, Any]:
    """The fields of a dataclass, each number in the range of its kind; raises ValueError."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for name, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if "dropout" in name:
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
        elif isinstance(value, int) and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
        elif isinstance(value, int) and value > (most := _MOST["layers" in name]):
            raise ValueError(f"{name} must be at most {most:,}, not {value:,}")
        elif isinstance(value, float) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value}")
    return values


def check_one_vocabulary(config: Any) -> None:
    """Refuse two vocabularies where one matrix serves both; raises ValueError with both sizes."""
    if config.src_vocab_size != config.tgt_vocab_size:
        raise ValueError(
            "one matrix for source and target needs one vocabulary, but src_vocab_size is "
            f"{config.src_vocab_size} and tgt_vocab_size {config.tgt_vocab_size}; "
            "use a joint tokenizer, or tie_embeddings=decoder where the model has it"
        )
