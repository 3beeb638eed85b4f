"""How many threads a net is run with: threads that wait for each other lose more than they gain.

A step of a small model is a hundred products of microseconds each, and at the end of each the
threads meet; beside another busy process one of them is often not there. So more than one is taken
only where a step is long (docs/log.md has the figures).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

LONG = 2**27  # multiplications of a step that is long
READ = 8  # multiplications that take as long as reading their weight from memory


def threads_for(weights: int, rows: int, available: int) -> int:
    """How many of the available threads a step of `rows` tokens through `weights` is worth."""
    return available if weights * max(rows, READ) >= LONG else 1


def weights_of_step(net: Any) -> int:
    """Weights that a new token is multiplied with: of the stack that writes, and of the head."""
    parts = [getattr(net, name, None) for name in ("decoder", "head")]
    if parts[0] is None:
        parts = [getattr(net, "encoder", net)]
    found = {id(p): p for part in parts if part is not None for p in part.parameters()}
    return sum(p.numel() for p in found.values() if p.dim() > 1)


@contextmanager
def run_with(count: int) -> Iterator[None]:
    """torch with so many threads, and then with as many as before."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)
