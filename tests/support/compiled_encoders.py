"""Encoders as compiled graphs, for `compiled_forms.py`, and as exported graphs.

Functions fail where a property does not hold; in a process without checked shapes, which cannot be
compiled.
"""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heedful
from architectures import one_layer
from backend_models import TEXTS, VOCAB, model_of
from heedful.backends.aot.compiled_net import CompiledFacts
from heedful.backends.aot.encoder import CompiledEncoder, encoder_facts, encoder_graphs
from heedful.backends.base import Settings
from heedful.backends.manifest import Manifest
from heedful.backends.registry import open_conversion
from heedful.backends.torch.threads import ThreadPolicy

# Architecture, head and precisions; the other encoders have the modules of these.
ENCODERS = (
    ("bert", "classify", ("float32", "int8", "bfloat16")),
    ("distilbert", "classify", ("int8",)),
    ("modernbert", "mlm", ("float32", "int8")),
)
COMPILED = "int8"  # in the one compilation: float32 has nothing that it has not
CLOSE = {"float32": 1e-4, "int8": 0.5, "bfloat16": 0.5}  # of the norm; random nets are sharp
FLIPPED = 0.01  # where a rounding to int8 falls to the other side
REQUESTS = 40


class Exported:
    """A stand-in for `CompiledNet` with graphs that are only exported."""

    def __init__(self, net: Any, precision: str) -> None:
        net = copy.deepcopy(net)
        self._graphs = {}
        for name, (module, examples, shapes) in encoder_graphs(net, precision).items():
            exported = torch.export.export(module, examples, dynamic_shapes=(shapes,))
            self._graphs[name] = exported.module()
        self.facts = CompiledFacts(
            **encoder_facts(net), cache_layers=[], max_length=48, graphs=[*self._graphs]
        )

    def run(self, name: str, inputs: list[torch.Tensor]) -> Any:
        return self._graphs[name](*inputs)


def graphs() -> None:
    """Graphs exported from texts of some lengths are correct for others, in every family.

    With one layer, except in the family whose layers differ. bfloat16 is tested with one family,
    since its code is the same for all.
    """
    draw = random.Random(2)
    for name, head, precisions in ENCODERS:
        model = model_of(name, head=head, **({} if name == "modernbert" else one_layer(name)))
        for precision in precisions:
            backend = exported(model, precision)
            for _ in range(4):
                check_backend(backend, model.eager, random_rows(draw, 30), draw, CLOSE[precision])


def exported(model: Any, precision: str) -> CompiledEncoder:
    """A backend of exported graphs."""
    backend = CompiledEncoder.__new__(CompiledEncoder)
    backend.net, backend.settings = Exported(model.net, precision), Settings(1)
    backend.threads = ThreadPolicy(backend.settings)
    return backend


def check_backend(backend: Any, other: Any, rows: Any, draw: random.Random, close: float) -> None:
    """States and logits of texts and of pairs of texts equal the other's."""
    types = [[draw.randrange(2) for _ in row] for row in rows]
    for kinds in (None, types):
        for what in ("states", "logits"):
            ours, reference = (getattr(item, what)(rows, kinds) for item in (backend, other))
            for actual, expected in zip(ours, reference, strict=True):
                check_close(actual, expected, close, what)


def random_rows(draw: random.Random, longest: int = 14) -> list[list[int]]:
    lengths = [draw.randint(1, longest) for _ in range(draw.choice((1, 1, 2, 5)))]
    return [[draw.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def check_close(actual: np.ndarray, expected: np.ndarray, close: float, name: str) -> None:
    """Equal within the tolerance; a lower precision does differ."""
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    assert actual.dtype == np.float32
    lost = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    assert lost < close, (name, close, lost)
    assert lost > 0 or close < CLOSE[COMPILED], "nothing was rounded"


def answers(backend: Any) -> Iterator[np.ndarray]:
    """The results of the same requests."""
    draw = random.Random(1)
    for _ in range(REQUESTS):
        rows = random_rows(draw)
        for kinds in (None, [[draw.randrange(2) for _ in row] for row in rows]):
            yield np.concatenate(backend.states(rows, kinds))


def make(folder: Path) -> None:
    """Compile, prove and measure an encoder; save the outputs of its graph before Inductor.

    The graph of a head, one small module, is exported in `graphs`.
    """
    from heedful.deploy.optimize import optimize

    model_of("bert", head="none", num_layers=1).save(folder)
    model = heedful.load(folder, device="cpu", backend="eager")
    keys: dict[str, Any] = {"backends": ["compiled"], "threads": [1], "uses": ["throughput"]}
    actual = optimize(model, folder, TEXTS, precisions=[COMPILED], tolerance=100, **keys)
    assert actual.refused == {}, actual.refused
    assert [*actual.proofs] == [f"compiled {COMPILED}"]
    np.savez(folder / "answers.npz", *answers(exported(model, COMPILED)))


def use(folder: Path) -> None:
    """Requests of any size have the results before Inductor, close to the net's, and nothing is
    compiled."""
    eager = heedful.load(folder, backend="eager", device="cpu")
    model = heedful.load(folder, backend="compiled", precision=COMPILED)
    assert model.backend.capabilities == {"states"}
    assert model.backend.precision == COMPILED
    stored = np.load(folder / "answers.npz")
    for actual, name in zip(answers(model.backend), stored.files, strict=True):
        check_close(actual, stored[name], FLIPPED, name)
    check_close(model.vectors(TEXTS), eager.vectors(TEXTS), CLOSE[COMPILED], "vectors")
    facts = Manifest.read(folder).backends["compiled"].facts
    several = open_conversion(folder, folder, "compiled", COMPILED, facts, Settings(1, 3))
    expected = model.vectors(TEXTS * 20, batch_tokens=16)
    model.backend = several  # of three workers, with the same batches
    assert several.settings.workers == 3
    np.testing.assert_allclose(model.vectors(TEXTS * 20, batch_tokens=16), expected, atol=1e-5)
    assert model._net is None  # the net itself was not called
