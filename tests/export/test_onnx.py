"""ONNX directories: graphs equal to the net, run by the example without heedful and torch."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heedful
from architectures import DECODERS, SIZES, config_of, decodes, one_layer
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.export import onnx as onnx_export
from heedful.export.onnx import export_onnx
from heedful.export.onnx_graphs import Graph
from heedful.pipelines.metadata import GenerationIds
from heedful.zoo import ARCHITECTURES, architecture
from option_space import randomized

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
ROOT = Path(__file__).parents[2]
TEXT = "it is a heedful test of words, and of 12 more"
FEW = ("gpt2", "bert")  # exports take seconds: the others run in `make test-benchmarks`
CASES = [
    pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.benchmarks)
    for name in ARCHITECTURES
]


def model_of(name: str, **keys: Any) -> Any:
    """A model of random weights with a tokenizer."""
    tokenizer = train_tokenizer([TEXT], kind="byte_bpe", vocab_size=270)
    sizes = SIZES | dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), 270)
    config = config_of(name, sizes, keys)
    torch.manual_seed(0)
    with torch.no_grad():
        net = randomized(architecture(name).build(config))
    start = () if name in DECODERS and not hasattr(net, "encode") else (1,)
    ids = GenerationIds(decoder_start_ids=start, eos_ids=(2,), suppressed_ids=(0, 1, 3))
    return heedful.from_net(net, config, tokenizer, generation=ids)


@pytest.mark.parametrize("name", CASES)
def test_graphs_agree_with_the_net(name: str, tmp_path: Path) -> None:
    model = model_of(name, **(one_layer(name) if name in FEW else {}))
    notices: list[str] = []
    export_onnx(model, tmp_path / "out", on_notice=notices.append)
    assert [notice[:8] for notice in notices] == ["float32:"]
    if decodes(name):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / "onnx_greedy.py", tmp_path / "out"],
            input=f"{TEXT}\nwords\n",
            capture_output=True,
            text=True,
            check=True,
        )
        length = model.config.max_length
        prompts = [TEXT, "words"]
        rows = model.prompt_ids(prompts)
        if hasattr(model.net, "encode"):  # sources take no room of the decoder
            rows = [model.ids.decoder_start_ids] * len(prompts)
        expected = [
            model.generate(text, beam_size=1, max_new_tokens=min(64, length - len(row)))
            for text, row in zip(prompts, rows, strict=True)
        ]
        assert done.stdout == "".join(f"{text}\n" for text in expected)
        assert len({*expected}) == 2
        return
    session = onnxruntime.InferenceSession(tmp_path / "out" / "encoder.onnx")
    ids = torch.randint(270, (3, 11))
    lengths = torch.tensor([11, 2, 7])
    feed = {"ids": ids.numpy(), "lengths": lengths.numpy()}
    more: dict[str, Tensor] = {}
    if any(item.name == "types" for item in session.get_inputs()):
        more["types"] = torch.randint(model.net.embedding.types.num_embeddings, ids.shape)
        feed["types"] = more["types"].numpy()
    logits = session.run(["logits"], feed)[0]
    with torch.no_grad():
        expected_logits = model.net(ids, lengths, **more).numpy()
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected_logits[row, :length], atol=1e-4)


def test_the_facts_say_what_the_model_is() -> None:
    """All that another program needs to have the outputs of the model."""
    translator = model_of("vaswani2017")
    ids = replace(translator.ids, forced_bos_id=1, forced_eos_id=2, suppressed_sequences=((5, 6),))
    codes = {"en": translator.tgt_tokenizer.piece(1)}
    translator.metadata = replace(translator.metadata, generation=ids, language_codes=codes)
    facts = onnx_export._facts(translator, "float32", ["encoder", "decoder"])
    assert (facts["forced_bos_id"], facts["forced_eos_id"]) == (1, 2)
    assert (facts["suppressed_sequences"], facts["language_ids"]) == ([[5, 6]], {"en": 1})
    classifier = model_of("bert", head="classify", num_labels=2)
    classifier.metadata = replace(classifier.metadata, problem="multi_label")
    assert onnx_export._facts(classifier, "float32", ["encoder"])["problem"] == "multi_label"
    embedder = model_of("bert", head="none")
    embedder.metadata = replace(embedder.metadata, pooling="max", normalize=True)
    facts = onnx_export._facts(embedder, "float32", ["encoder"])
    assert (facts["pooling"], facts["normalize"], facts["prompts"]) == ("max", True, {})
    json.dumps(facts)


class Small(nn.Module):
    """An embedding and a matrix: exports of whole nets take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.out(self.embedding(ids)) * lengths[:, None, None]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that is exported as a `Small`."""
    examples = [[torch.randint(5, size), torch.tensor([2])] for size in ((1, 4), (1, 2))]
    sizes = ({1: torch.export.Dim.DYNAMIC}, None)
    graph = Graph(Small(), ["ids", "lengths"], ["states"], sizes, examples)
    monkeypatch.setattr(onnx_export, "graphs_of", lambda net, config: {"encoder": graph})
    return model_of("bert", num_layers=1)


@pytest.mark.slow
def test_int8_is_measured_and_holds_integers(small: Any, tmp_path: Path) -> None:
    notices: list[str] = []
    export_onnx(small, tmp_path / "out", precision="int8", on_notice=notices.append)
    graph = onnx.load(tmp_path / "out" / "encoder.onnx").graph
    assert sum(node.op_type == "MatMulInteger" for node in graph.node) == 1
    error = float(notices[0].split()[3])
    assert 1e-4 < error < 0.25
    facts = json.loads((tmp_path / "out" / "onnx.json").read_text())
    assert facts["precision"] == "int8"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "encoder.onnx",
        "onnx.json",
        "tokenizer.json",
    }


@pytest.mark.slow
def test_a_graph_that_differs_is_refused(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = onnx_export._write

    def write_other(graph: Any, path: Path, precision: str) -> None:
        write(graph, path, precision)
        with torch.no_grad():
            next(graph.module.parameters()).mul_(1.01)

    monkeypatch.setattr(onnx_export, "_write", write_other)
    with pytest.raises(UserError, match="the ONNX graph encoder in float32 differs from the net"):
        export_onnx(small, tmp_path / "out")
    monkeypatch.setattr(onnx_export, "_write", lambda graph, path, precision: path.write_text("x"))
    with pytest.raises(UserError, match="ONNX Runtime cannot open the graph encoder: "):
        export_onnx(small, tmp_path / "out")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="precision of ONNX"):
        export_onnx(small, tmp_path / "out", precision="int4")
