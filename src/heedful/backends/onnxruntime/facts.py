"""Facts of nets in ONNX Runtime, and the check that they can run here."""

from dataclasses import dataclass, field

from heedful import extras
from heedful.backends.manifest import NetFacts
from heedful.errors import UserError


@dataclass(frozen=True, kw_only=True)
class OnnxFacts(NetFacts):
    """Facts of a net that its graphs do not hold.

    Attributes:
        has_head: the graph of an encoder has logits.
        first_token_only: they are those of the class, one row a text.
        max_length: positions of a net that generates.
        cache_layers: the `LayerShape` of each layer of its decoder.
    """

    has_head: bool = False
    first_token_only: bool = False
    max_length: int = 0
    cache_layers: list[tuple[int, int, int | None]] = field(default_factory=list)


def check_runs(device: str) -> None:
    """Raises UserError where ONNX Runtime is not installed, and for another device than the CPU."""
    extras.require("onnx", "the backend onnxruntime")
    if device != "cpu":
        raise UserError(f"the backend onnxruntime runs on the CPU, not on {device}")
