"""The cases of all parity tests, by architecture: what other tests need of each model."""

from importlib import import_module
from typing import Any

from heedful.zoo import ARCHITECTURES, architecture

CASES: dict[str, Any] = {
    name: getattr(import_module(f"test_{name}"), name.upper())
    for name in ARCHITECTURES
    if "hf" in architecture(name).formats and architecture(name).formats["hf"].config
}
