"""What every architecture's sizes must fulfil, said once."""

import math
from dataclasses import fields
from typing import Any


def check_sizes(config: Any) -> None:
    """Refuse sizes that no model can have; raises ValueError naming the key.

    Whole numbers must be at least 1, dropouts in [0, 1), epsilons and bases above 0; heads must
    divide the width (unless `head_dim` is given) and be divided by `num_kv_heads`.
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
        elif isinstance(value, float) and not 0 < value < math.inf:
            raise ValueError(f"{name} must be above 0, not {value}")
    width, heads = values["d_model"], values["num_heads"]
    if values.get("head_dim") is None and width % heads:
        raise ValueError(f"d_model {width} is not divisible by num_heads {heads}")
    groups = values.get("num_kv_heads")
    if groups is not None and heads % groups:
        raise ValueError(f"num_heads {heads} is not divisible by num_kv_heads {groups}")
