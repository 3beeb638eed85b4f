"""A program: encoders as compiled graphs. Without checked shapes, which cannot be compiled.

`python compiled_encoders.py graphs`, `... make DIR NAME HEAD` and `... use DIR`; each fails where a
law does not hold.
"""

import copy
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import heedful
from engine_models import TEXTS, VOCAB, model_of
from heedful.engines.compiled import CompiledFacts
from heedful.engines.compiled_encoder import CompiledEncoder, encoder_facts, encoder_parts
from heedful.engines.engine import Settings

ENCODERS = {"bert": "classify", "roberta": "mlm", "distilbert": "classify", "modernbert": "mlm"}
PRECISIONS = ("float32", "bfloat16", "int8")
COMPILED = ("float32", "int8")  # in the one compilation
CLOSE = {"float32": 1e-4, "bfloat16": 0.5, "int8": 0.5}  # of the norm; random nets are sharp
REQUESTS = 40


class Exported:
    """What a `CompiledNet` is, of graphs that are exported alone."""

    def __init__(self, net: Any, precision: str) -> None:
        net = copy.deepcopy(net)
        self._graphs = {}
        for name, (module, given, shapes) in encoder_parts(net, precision).items():
            exported = torch.export.export(module, given, dynamic_shapes=shapes)
            self._graphs[name] = exported.module()
        self.facts = CompiledFacts(
            **encoder_facts(net), cache_shapes=[], max_length=48, graphs=[*self._graphs]
        )

    def run(self, name: str, given: list[torch.Tensor]) -> Any:
        return self._graphs[name](*given)


def graphs() -> None:
    """What is exported from texts of some lengths answers for others, in every family."""
    draw = random.Random(2)
    for name, head in ENCODERS.items():
        model = model_of(name, head=head)
        for precision in PRECISIONS:
            engine = CompiledEncoder.__new__(CompiledEncoder)
            engine.net, engine.settings = Exported(model.net, precision), Settings(1)
            for _ in range(4):
                hold_engine(engine, model.eager, random_rows(draw, 30), draw, precision)


def hold_engine(engine: Any, eager: Any, rows: Any, draw: random.Random, precision: str) -> None:
    """States and logits of texts and of pairs of texts are the net's."""
    types = [[draw.randrange(2) for _ in row] for row in rows]
    for kinds in (None, types):
        for what in ("states", "logits"):
            ours, theirs = (getattr(each, what)(rows, kinds) for each in (engine, eager))
            for one, other in zip(ours, theirs, strict=True):
                hold(one, other, precision, what)


def random_rows(draw: random.Random, longest: int = 14) -> list[list[int]]:
    lengths = [draw.randint(1, longest) for _ in range(draw.choice((1, 1, 2, 5)))]
    return [[draw.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def hold(found: np.ndarray, wanted: np.ndarray, precision: str, name: str) -> None:
    """Equal within what a precision may lose."""
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    assert found.dtype == np.float32
    lost = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    assert lost < CLOSE[precision], (name, precision, lost)
    assert lost > 0 or precision == "float32", "nothing was rounded"


def make(folder: Path, name: str, head: str) -> None:
    """Compile, prove and measure a model."""
    from heedful.inference.optimizing import optimize

    model_of(name, head=head, num_layers=1).save(folder)
    model = heedful.load(folder, device="cpu", engine="eager")
    keys: dict[str, Any] = {"engines": ["compiled"], "threads": [1], "uses": ["throughput"]}
    keys |= {"precisions": COMPILED, "tolerance": 100}
    found = optimize(model, folder, TEXTS, **keys)
    assert found.refused == {}, found.refused
    assert [*found.proofs] == [f"compiled {precision}" for precision in COMPILED]
    assert found.proofs["compiled float32"].difference < 1e-4


def use(folder: Path) -> None:
    """Requests of any size are answered as the net does, and nothing is compiled."""
    eager = heedful.load(folder, engine="eager", device="cpu")
    draw = random.Random(1)
    for precision in COMPILED:
        model = heedful.load(folder, engine="compiled", precision=precision)
        assert model.engine.reads == {"states", "logits"}
        assert model.engine.precision == precision
        for _ in range(REQUESTS):
            rows = random_rows(draw)
            hold(model.vectors(rows), eager.vectors(rows), precision, "vectors")
            hold_engine(model.engine, eager.eager, rows, draw, precision)
        assert model._net is None  # nothing was asked of the net itself
    compilers = [name for name in sys.modules if name.startswith("torch._inductor")]
    assert compilers == [], compilers


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "graphs":
        graphs()
    else:
        {"make": make, "use": use}[command](Path(rest[0]), *rest[1:])
