"""ONNX Runtime as a backend of nets that generate: outputs equal to those of the net itself."""

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from architectures import DECODERS, one_layer
from backend_models import TEXTS, VOCAB, model_of
from heedful import extras
from heedful.backends.base import Settings
from heedful.backends.registry import open_conversion
from heedful.deploy.convert import convert_model
from heedful.deploy.optimize import default_backends, optimize
from heedful.errors import UserError
from heedful.parts.tokens import Tokens

pytest.importorskip("onnx", reason="onnx is not installed")
from heedful.backends.onnxruntime.session import open_session

# A conversion takes seconds: one of each family runs with the slow tests, the others with the
# benchmarks.
FEW = ("gpt2", "t5")
CASES = [
    pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.benchmarks)
    for name in DECODERS
]
REQUESTS = 18


def reopened(
    folder: Path, facts: dict[str, Any], precision: str = "float32", *, threads: int = 1
) -> Any:
    """The backend of a conversion."""
    settings = Settings(threads)
    return open_conversion(folder, folder, "onnxruntime", precision, facts, settings)


@pytest.fixture(scope="module")
def converted_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, ...]]:
    """Model, folder and facts of an architecture with one layer per stack, in float32."""

    @cache
    def convert(name: str) -> tuple[Any, ...]:
        model, folder = model_of(name, **one_layer(name)), tmp_path_factory.mktemp(name)
        return model, folder, convert_model(model, folder, "float32", "onnxruntime")

    return convert


def random_rows(draw: random.Random) -> list[list[int]]:
    """Rows of different lengths, so that batches have padding."""
    lengths = [draw.randint(1, 14) for _ in range(draw.choice((1, 1, 2, 5)))]
    return [[draw.randrange(4, VOCAB) for _ in range(length)] for length in lengths]


def random_options(draw: random.Random, number: int) -> dict[str, Any]:
    """Options of a search: greedy, beam, sampling or with constraints."""
    options: dict[str, Any] = {"max_new_tokens": draw.randint(4, 24)}
    options |= {"min_new_tokens": draw.choice((0, 0, 4))}
    options |= draw.choice(({"beam_size": 1}, {"beam_size": draw.randint(2, 4)}))
    if number % 5 == 0:
        options |= {"beam_size": 1, "temperature": 1.0, "num_return": 2, "seed": number}
    if number % 5 == 1:
        options |= {"beam_size": 3, "num_return": 3, "no_repeat_ngram_size": 2}
    if number % 5 == 2:
        options |= {"beam_size": 4, "require": [[7]]}
    return options


@pytest.mark.parametrize("name", CASES)
def test_outputs_equal_those_of_the_net(name: str, converted_once: Any) -> None:
    """Batches with padding; greedy, beam, sampling and constraints; and given tokens' scores."""
    model, folder, facts = converted_once(name)
    backend = reopened(folder, facts)
    draw = random.Random(1)
    for number in range(REQUESTS):
        rows, options = random_rows(draw), random_options(draw, number)
        request = model.request(rows, **options)
        assert backend.unsupported_reasons(rows, request) == []
        ours, reference = (each.outputs(rows, request) for each in (backend, model.eager))
        for one, other in zip(ours, reference, strict=True):
            assert [o.ids for o in one] == [o.ids for o in other], (number, options)
            for a, b in zip(one, other, strict=True):
                assert abs(a.log_prob - b.log_prob) < 1e-3, (a, b)
                assert a.finished == b.finished
    rows = [[5, 6, 7, 9], [8, 11], [12, 5, 8]]
    targets = [row[::-1] for row in rows] if backend.net.is_encoder_decoder else None
    request = model.request(rows)
    step = model.request(rows[:1], beam_size=1, max_new_tokens=8)
    assert [*backend.stream_tokens(rows[0], step)] == [*model.eager.stream_tokens(rows[0], step)]
    both = (each.log_probs(rows, targets, request) for each in (backend, model.eager))
    for actual, expected_scores in zip(*both, strict=True):
        assert actual == pytest.approx(expected_scores, abs=1e-4)


@pytest.mark.slow
def test_calls_side_by_side_have_the_outputs_of_calls_one_by_one(converted_once: Any) -> None:
    """A backend with two threads a graph is called from four threads."""
    model, folder, facts = converted_once("t5")
    one, two = (reopened(folder, facts, threads=threads) for threads in (1, 2))
    draw = random.Random(3)
    calls = []
    for number in range(REQUESTS):
        rows = random_rows(draw)
        calls.append((rows, model.request(rows, **random_options(draw, number))))
    expected = [one.outputs(*call) for call in calls]
    with ThreadPoolExecutor(4) as pool:
        actual = [*pool.map(lambda call: two.outputs(*call), calls)]
    for ours, reference in zip(actual, expected, strict=True):
        ids = [[output.ids for output in outputs] for outputs in ours]
        assert ids == [[output.ids for output in outputs] for outputs in reference]


@pytest.mark.slow
def test_an_output_may_outgrow_the_net(tmp_path: Path) -> None:
    """It is continued from its last half, for each beam; layers with a window forget."""
    model = model_of("mistral", **one_layer("mistral"), max_length=12)
    facts = convert_model(model, tmp_path, "float32", "onnxruntime")
    backend = reopened(tmp_path, facts)
    rows = [[5, 6, 7], [8, 9, 10]]
    for beam_size in (1, 3):
        request = model.request(rows, beam_size=beam_size, min_new_tokens=30, max_new_tokens=30)
        ours, reference = (each.outputs(rows, request) for each in (backend, model.eager))
        assert [o[0].ids for o in ours] == [o[0].ids for o in reference]
        assert len(ours[0][0].ids) == 30
    assert backend.unsupported_reasons(rows, model.request(rows, draft="lookup", beam_size=1)) == [
        "it has no option draft"
    ]


@pytest.mark.slow
def test_stores_are_written_in_place(converted_once: Any) -> None:
    """Bound to the memory of a cache, a step leaves every other slot as it was."""
    model, folder, facts = converted_once("gpt2")
    net = reopened(folder, facts).net
    cache = net.start(2, capacity=16)
    [store] = cache.stores
    store.normal_()
    before, address = store.clone(), store.data_ptr()
    cache.reserve(3, drops_hidden=False)
    tokens = Tokens.from_ids(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    net.decode(tokens, cache)
    assert cache.stores[0].data_ptr() == address
    changed = (store != before).flatten(2).any(2)
    assert changed.tolist() == [[True] * 3 + [False] * 14] * 2
    own = model.net.start(2, capacity=16)
    with torch.inference_mode():
        model.net.decode(tokens, own)
    torch.testing.assert_close(store[:, :3], own.stores[0][:, :3], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_optimize_keeps_it_and_a_changed_model_refuses_it(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 and float32 pass their proofs, and are opened without another conversion."""
    folder = tmp_path / "model"
    model_of("gpt2", **one_layer("gpt2")).save(folder)
    model = heedful.load(folder, device="cpu", backend="eager")
    keys: dict[str, Any] = {"uses": ["latency"], "threads": [1], "tolerance": 20.0}
    findings = optimize(
        model, folder, TEXTS, backends=["onnxruntime"], precisions=["float32", "int8"], **keys
    )
    assert findings.refused == {}
    assert findings.proofs["onnxruntime float32"].same == 1
    assert 1e-4 < findings.proofs["onnxruntime int8"].difference < 1
    monkeypatch.setattr("heedful.backends.onnxruntime.writing.write_graphs", None)
    for precision in ("float32", "int8"):
        opened = heedful.load(folder, backend="onnxruntime", precision=precision)
        assert (opened.backend.name, opened.backend.precision) == ("onnxruntime", precision)
    rows = [[5, 6, 7], [8]]
    opened = heedful.load(folder, backend="onnxruntime", precision="float32")
    assert opened.generate(rows, max_new_tokens=5) == model.generate(rows, max_new_tokens=5)
    assert opened._net is None  # the net itself was not called
    with pytest.raises(UserError, match=r"onnxruntime runs on the CPU, not on cuda"):
        heedful.load(folder, backend="onnxruntime", device="cuda")
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    (damaged / "backends/onnxruntime/int8/decoder.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match="has changed; make it again by `heedful optimize`"):
        heedful.load(damaged, backend="onnxruntime", precision="int8")
    facts = json.loads((folder / "backends" / "backends.json").read_text())
    facts = facts["backends"]["onnxruntime"]["facts"]
    with pytest.raises(UserError, match=r"ONNX Runtime cannot open .*decoder\.onnx"):
        reopened(damaged, facts, "int8")
    changed = shutil.copytree(folder, tmp_path / "changed")
    with torch.no_grad():
        model.net.embedding.tokens.weight.mul_(1.5)
    model.save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", changed)
    with pytest.raises(UserError, match="was converted from other weights than the model's"):
        heedful.load(changed, backend="onnxruntime")


def test_it_is_tried_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "onnxruntime" in default_backends()
    monkeypatch.setattr(extras, "missing_packages", lambda extra: "onnxruntime: pip install it")
    assert "onnxruntime" not in default_backends()
    with pytest.raises(UserError, match="the backend onnxruntime needs onnxruntime: pip install"):
        convert_model(model_of("gpt2"), tmp_path, "float32", "onnxruntime")
    assert [*tmp_path.iterdir()] == []


def test_a_file_that_is_no_graph_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "decoder.onnx"
    path.write_bytes(b"no graph")
    with pytest.raises(UserError, match=r"ONNX Runtime cannot open .*decoder\.onnx"):
        open_session(path)
