"""Conversions of models are made, proven and opened, and hold for what they were made for alone."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heedful
from backend_models import TEXTS, model_of, saved
from heedful.backends import registry
from heedful.backends.base import Settings
from heedful.backends.ctranslate2.runtime import CTranslate2
from heedful.backends.manifest import BackendChoice, FileDigest, Manifest
from heedful.backends.registry import open_conversion
from heedful.deploy.convert import convert_model
from heedful.deploy.optimize import PRECISIONS_OF, optimize
from heedful.deploy.prove import Proof, Prover
from heedful.errors import UserError
from heedful.pipelines import Translator
from option_cases import model_that_ends


@pytest.fixture
def translator(tmp_path: Path) -> tuple[Path, Any]:
    """A translator's directory with its form."""
    directory = tmp_path / "model"
    return directory, saved("vaswani2017", directory)


def change(directory: Path, **keys: Any) -> None:
    """Say something else in the manifest."""
    path = directory / "backends" / "backends.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | keys), encoding="utf-8")


def test_a_converted_model_runs_its_backend_and_eager_selects_the_net(translator: Any) -> None:
    directory, model = translator
    fast = heedful.load(directory)
    assert isinstance(fast, Translator)
    assert isinstance(fast.backend, CTranslate2)
    assert fast.backend.settings == Settings(1)
    options = {"beam_size": 1, "max_new_tokens": 12}
    assert fast.translate(TEXTS, **options) == model.translate(TEXTS, **options)
    assert heedful.load(directory, backend="eager").backend is None
    assert heedful.load(directory, threads=1).backend.settings.threads == 1
    assert heedful.load(directory, backend="ctranslate2", precision="float32").backend is not None


@pytest.mark.parametrize(
    ("name", "keys"), [("gpt2", {}), ("bert", {"head": "classify"}), ("bert", {"head": "mlm"})]
)
def test_each_kind_of_model_opens_with_its_class(name: str, keys: Any, tmp_path: Path) -> None:
    model = saved(name, tmp_path / "model", **keys)
    fast = heedful.load(tmp_path / "model")
    assert type(fast) is type(model)
    assert fast.backend is not None
    assert np.allclose(fast.vectors(TEXTS), model.vectors(TEXTS), atol=1e-4)
    if keys.get("head") == "classify":
        assert [f.label for f in fast.classify(TEXTS)] == [f.label for f in model.classify(TEXTS)]
    if keys.get("head") == "mlm":  # what the backend lacks is the net's
        assert fast.backend.capabilities == {"states"}


def test_the_best_backend_of_each_use_is_selected(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    saved("vaswani2017", directory, ("float32", "int8"))
    manifest = Manifest.read(directory)
    assert manifest is not None
    best = {
        "latency": BackendChoice("ctranslate2", "int8", threads=1),
        "throughput": BackendChoice("eager", "float32"),
    }
    replace(manifest, best=best).write(directory)  # type: ignore[arg-type]
    assert heedful.load(directory).backend.precision == "int8"
    assert heedful.load(directory, use="throughput").backend is None
    named = heedful.load(directory, use="throughput", backend="ctranslate2", precision="float32")
    assert named.backend.precision == "float32"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"heedful": "0.0.1"}, "made by heedful 0.0.1"),
        ({"instruction_set": "z80"}, "made for z80"),
        ({"weights": {"sha256": "0", "size": 1, "mtime_ns": 1}}, "other weights"),
        ({"cores": "many"}, "cores"),
    ],
)
def test_a_mismatched_conversion_is_ignored_and_reported(
    keys: dict[str, Any], words: str, translator: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory, _ = translator
    change(directory, **keys)
    assert heedful.load(directory).backend is None
    [message] = [manifest.getMessage() for manifest in caplog.records]
    assert words in message
    assert "heedful optimize" in message
    with pytest.raises(UserError, match=words):
        heedful.load(directory, backend="ctranslate2")
    with pytest.raises(UserError, match=words):
        heedful.load(directory, precision="int8")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("3.1.0", r"made with ctranslate2 4\.\S+, this is 3\.1\.0"),
        (None, r"pip install 'heedful\[fast\]'"),
    ],
)
def test_a_missing_backend_or_another_version_is_reported(
    found: str | None, words: str, translator: Any, monkeypatch: Any
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise registry.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(registry, "version", version)
    with pytest.raises(UserError, match=words):
        heedful.load(translator[0], backend="ctranslate2")
    assert heedful.load(translator[0]).backend is None


def test_changed_weights_of_equal_size_are_detected_and_a_copy_is_not_read_again(
    translator: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    directory, _ = translator
    shutil.copytree(directory, tmp_path / "copy", copy_function=shutil.copyfile)
    assert heedful.load(tmp_path / "copy").backend is not None
    monkeypatch.setattr(FileDigest, "from_file", lambda path: pytest.fail("the file was read"))
    assert heedful.load(directory).backend is not None
    monkeypatch.undo()
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(UserError, match="other weights"):
        heedful.load(directory, backend="ctranslate2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "compiled"}, "no backend compiled"),
        ({"precision": "int8"}, "no ctranslate2 in int8, only in float32"),
        ({"threads": 10_000}, "threads must be from 1 to"),
        ({"backend": "eager", "precision": "int8"}, "no int8"),
        ({"backend": "fastest"}, "backend must be"),
        ({"precision": "int3"}, "precision must be"),
    ],
)
def test_unavailable_backends_are_refused(
    options: dict[str, Any], words: str, translator: Any
) -> None:
    with pytest.raises(UserError, match=words):
        heedful.load(translator[0], **options)


def test_a_model_without_conversions_runs_eager_unless_a_backend_is_named(tmp_path: Path) -> None:
    model_of("gpt2").save(tmp_path)
    assert heedful.load(tmp_path).backend is None
    assert str(next(heedful.load(tmp_path, precision="bfloat16").net.parameters()).dtype).endswith(
        "bfloat16"
    )
    for options in ({"backend": "ctranslate2"}, {"precision": "int8"}):
        with pytest.raises(UserError, match="heedful optimize"):
            heedful.load(tmp_path, **options)  # type: ignore[arg-type]


def test_an_optimized_model_can_be_saved_exported_and_ensembled(
    tmp_path: Path,
) -> None:
    """Its net and Config are opened when something needs them."""
    saved("bart", tmp_path / "model")
    options = {"beam_size": 1, "max_new_tokens": 9}
    wanted = heedful.load(tmp_path / "model", backend="eager").translate(TEXTS, **options)
    heedful.load(tmp_path / "model").save(tmp_path / "again")
    assert heedful.load(tmp_path / "again").translate(TEXTS, **options) == wanted
    heedful.export_hf(heedful.load(tmp_path / "model"), tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    joint = heedful.ensemble([heedful.load(tmp_path / "model")])
    assert joint.translate(TEXTS, **options) == wanted


# --- proofs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "metric"),
    [
        ("vaswani2017", {}, "bleu"),
        ("llama", {}, "perplexity"),
        ("mistral", {"window": 30}, "perplexity"),
        ("bert", {"head": "classify"}, "accuracy"),
        ("bert", {"head": "none"}, "similarity"),
    ],
)
def test_a_float32_conversion_is_proved_and_a_wrong_one_is_not(
    name: str, keys: Any, metric: str, tmp_path: Path
) -> None:
    model = saved(name, tmp_path, ("float32", "int8"), **keys)
    answers = {"bleu": TEXTS, "accuracy": ["good", "bad", "bad", "good"]}.get(metric)
    prover = Prover(model, TEXTS, answers)
    manifest = Manifest.read(tmp_path)
    assert manifest is not None
    facts = manifest.backends["ctranslate2"].facts
    proof = prover.prove(
        open_conversion(tmp_path, tmp_path, "ctranslate2", "float32", facts, Settings(1))
    )
    assert proof.metric == metric
    assert proof.failure() is None
    assert proof.same == 1
    assert proof.same_beams in (None if name == "bert" else 1, None)
    assert proof.eager == pytest.approx(proof.backend, rel=1e-4)
    rough = prover.prove(
        open_conversion(tmp_path, tmp_path, "ctranslate2", "int8", facts, Settings(1))
    )
    assert rough.difference > 1e-4
    with torch.no_grad():  # other weights than the form's
        for parameter in model.net.parameters():
            parameter.add_(torch.randn_like(parameter))
    spoilt = Prover(model, TEXTS, answers)
    assert spoilt.prove(
        open_conversion(tmp_path, tmp_path, "ctranslate2", "float32", facts, Settings(1))
    ).failure()


def test_beams_run_on_the_net_if_those_of_ctranslate2_differ(tmp_path: Path) -> None:
    """Here the model suppresses tokens that it finds probable."""
    model = model_that_ends("vaswani2017", num_decoder_layers=1)
    suppressed = tuple(token for token in range(27, 37) if token not in model.end_ids())
    generation = replace(model.ids, suppressed_ids=suppressed)
    model.metadata = replace(model.metadata, generation=generation)
    model.save(tmp_path)
    keys: dict[str, Any] = {"precisions": ["float32"], "uses": ["latency"], "threads": [1]}
    findings = optimize(model, tmp_path, TEXTS, backends=["ctranslate2"], **keys)
    assert findings.proofs["ctranslate2 float32"].same == 1
    assert (findings.proofs["ctranslate2 float32"].same_beams or 1) < 1
    opened, rows = heedful.load(tmp_path), model.prompt_ids(TEXTS)
    greedy, beams = (opened.request(rows, beam_size=size) for size in (1, 3))
    assert opened.backend.unsupported_reasons(rows, greedy) == []
    [reason] = opened.backend.unsupported_reasons(rows, beams)
    assert "option beam_size above 1" in reason
    assert opened.generate(TEXTS) == model.generate(TEXTS)


@pytest.mark.parametrize(
    ("problem", "metric"), [("multi_label", "accuracy"), ("regression", "similarity")]
)
def test_several_labels_and_values_are_proved_by_all_logits(problem: Any, metric: str) -> None:
    """The class of the greatest logit does not tell values of one output apart."""
    model = model_of("bert", head="classify", num_labels=1)
    model.metadata = replace(model.metadata, problem=problem, labels=("score",))
    prover = Prover(model, TEXTS)
    own = prover.prove(model.eager)
    assert (own.metric, own.backend, own.failure()) == (metric, 100, None)
    with torch.no_grad():  # the same net with other values
        middle = float(np.median(prover._by_net.numbers))
        model.net.head.labels.bias.sub_(middle)
        model.net.head.labels.weight.neg_()
    other = replace(prover.prove(model.eager), precision="int8")
    assert "the allowed loss is" in str(other.failure())
    with pytest.raises(UserError, match=f"the model is a {problem} classifier; give the texts al"):
        Prover(model, TEXTS, ["score"] * len(TEXTS))


def test_a_conversion_may_lose_at_most_its_tolerance() -> None:
    proof = Proof("int8", "bleu", 38.0, 37.8, 100, 0.9, 0.05)
    assert proof.failure() is None
    assert "allowed loss is 0.1" in str(proof.failure(0.1))
    worse = Proof("int8", "perplexity", 5.0, 5.1, 100, 0.9, 0.05)
    assert worse.loss == pytest.approx(2)
    assert "perplexity is 5.1, that of the net 5" in str(worse.failure())
    assert "10% of its outputs differ" in str(replace(proof, precision="float32").failure())


def test_a_conversion_whose_numbers_are_nan_is_refused() -> None:
    """No comparison with NaN holds: those of fp16 that overflowed passed."""
    proof = Proof("float16", "perplexity", 5.0, math.nan, 100, 1.0, math.nan)
    assert "perplexity is nan" in str(proof.failure())
    assert "differ by nan" in str(replace(proof, precision="float32").failure())


def test_ties_may_be_broken_differently(translator: Any) -> None:
    """Two tokens that the net itself finds equally likely."""
    _, model = translator
    prover = Prover(model, TEXTS)
    place, row = 0, prover._rows[0]
    ours = prover._by_net.outputs[place]
    other = [*ours[:-1], (ours[-1] + 1) % 40]
    assert not prover._is_same(row, ours, other)
    with torch.no_grad():
        model.net.head.out.weight[other[-1]] = model.net.head.out.weight[ours[-1]]
    assert prover._is_same(row, ours, other)


def test_texts_and_answers_must_have_equal_numbers() -> None:
    with pytest.raises(UserError, match="2 validation texts but 1 answers"):
        Prover(model_of("gpt2"), TEXTS[:2], TEXTS[:1])


def test_an_unknown_backend_is_not_taken_for_the_compiled_one(tmp_path: Path) -> None:
    """The constructor of compiled graphs would find no file, and their compiler no net."""
    with pytest.raises(UserError, match="ctranslate2, compiled, not for onnx"):
        convert_model(object(), tmp_path, "float32", "onnx")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="ctranslate2, compiled, not for onnx"):
        open_conversion(tmp_path, tmp_path, "onnx", "float32", {}, Settings(1))


@pytest.mark.parametrize(
    ("name", "precision"), [("gpt2", "bfloat16"), ("gpt2", "float16"), ("bert", "float16")]
)
def test_graphs_are_not_compiled_in_float32_under_another_name(
    name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.backends.aot.compile.has_cpp_compiler", lambda: False)
    with pytest.raises(UserError, match=f"are in float32, .*int8, not {precision}"):
        convert_model(model_of(name), tmp_path, precision, "compiled")


def test_only_the_precisions_that_a_backend_has_are_converted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A precision that one backend gains is not one of the others."""
    tried = []

    def refuse(model: Any, directory: Path, precision: str, backend: str) -> Any:
        tried.append((backend, precision))
        raise UserError("tried")

    monkeypatch.setattr("heedful.deploy.optimize.convert_model", refuse)
    monkeypatch.setitem(PRECISIONS_OF, "ctranslate2", ("float32", "float16"))
    monkeypatch.setattr("heedful.deploy.optimize.PRECISIONS", ("float32", "bfloat16", "float16"))
    for name in ("bert", "gpt2"):
        model = model_of(name)
        model.save(tmp_path / name)
        with pytest.raises(UserError, match="no requested backend runs this model"):
            optimize(
                *(model, tmp_path / name, TEXTS),
                backends=("ctranslate2", "compiled"),
                precisions=("float32", "bfloat16", "float16"),
            )
    assert tried == [
        *(("ctranslate2", "float32"), ("ctranslate2", "float16")),
        *(("compiled", "float32"), ("compiled", "bfloat16")),
        *(("ctranslate2", "float32"), ("ctranslate2", "float16")),
        *(("compiled", "float32"),),
    ]


def test_an_unknown_use_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown use speed"):
        optimize(object(), tmp_path, TEXTS, uses=["speed"])  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("backend", ["ctranslate2", "compiled"])
def test_an_unknown_family_of_nets_is_not_taken_for_another(backend: str, tmp_path: Path) -> None:
    facts = {"family": "prefix_lm", "max_length": 8, "graphs": []}
    facts = {"family": "prefix_lm"} if backend == "ctranslate2" else facts
    with pytest.raises(UserError, match=r"facts: family must be .*, not 'prefix_lm'"):
        open_conversion(tmp_path, tmp_path, backend, "float32", facts, Settings(1))
