"""Stacks of global and local layers: which is which, and the rotary positions of either."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from heedful.errors import UserError
from heedful.parts.rotary import RotaryPositions
from heedful.zoo.build import Keys
from heedful.zoo.rope import head_width, rope_from_hf

GLOBAL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LocalLayers:
    """How a model type says which layers are global, and the rotary base of either type.

    Args:
        is_global: whether a layer is, by its number from 0 and our `global_every`.
        every: their key of `global_every`, and its value where a file leaves it out.
        global_base, local_base: the same of the bases.
    """

    is_global: Callable[[int, int], bool]
    every: tuple[str, int]
    global_base: tuple[str, float]
    local_base: tuple[str, float]

    def attention(self, config: Any, window: int) -> Callable[[int], Keys]:
        """Position and window of a layer by its number, as `stack` takes them."""
        width, scaling = head_width(config), getattr(config, "rope_scaling", None)
        far = RotaryPositions(width, config.rope_base, scaling=scaling)
        near = RotaryPositions(width, config.local_rope_base)

        def of(number: int) -> Keys:
            if self.is_global(number, config.global_every):
                return {"position": far}
            return {"position": near, "window": window}

        return of

    def read(self, content: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """Our `global_every`, `rope_base`, `rope_scaling` and `local_rope_base`.

        Raises UserError for layers without such a rule, and as `rope_from_hf`; old files have bases
        and `rope_scaling`, those of transformers 5 `rope_parameters` for each type of layers.
        """
        given = content.get("rope_parameters") or {}
        if unknown := given.keys() - {GLOBAL, LOCAL}:
            raise UserError(
                f"config.json: {min(unknown)} of rope_parameters is not known here; it holds those "
                f"of {GLOBAL} and {LOCAL}"
            )
        far, near = (
            rope_from_hf(
                {
                    **content,
                    "rope_theta": content.get(*base),
                    "rope_parameters": given.get(kind),
                    "rope_scaling": scaling,
                },
                ours["max_length"],
            )
            for kind, base, scaling in (
                (GLOBAL, self.global_base, content.get("rope_scaling")),
                (LOCAL, self.local_base, None),
            )
        )
        if near["rope_scaling"] is not None:
            raise UserError(
                f"config.json: rope_type of {LOCAL} is {near['rope_scaling']['type']}, but here "
                "only the positions of global layers are stretched"
            )
        return {"global_every": self._every(content), "local_rope_base": near["rope_base"], **far}

    def write(self, config: Any) -> dict[str, Any]:
        """Their keys but for the bases."""
        types = self._types(config.global_every, config.num_layers)
        return {self.every[0]: config.global_every, "layer_types": types}

    def _every(self, content: Mapping[str, Any]) -> int:
        stated: int = content.get(*self.every)
        types = content.get("layer_types")
        if types is None:
            return stated
        for every in (stated, *range(1, len(types) + 2)):
            if list(types) == self._types(every, len(types)):
                return every
        raise UserError(
            f"config.json: layer_types is {', '.join(types)}, but here every k-th layer is "
            f"{GLOBAL} and the others are {LOCAL}"
        )

    def _types(self, every: int, count: int) -> list[str]:
        return [GLOBAL if self.is_global(number, every) else LOCAL for number in range(count)]
