"""Export models as ONNX graphs with their tokenizers; ONNX Runtime compares each with the net."""

import copy
import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful import extras
from heedful.backends.aot.compile import quiet
from heedful.data.special_tokens import allow_in_texts, tag_id
from heedful.errors import UserError, describe
from heedful.export.hf import OnNotice
from heedful.export.onnx_graphs import Graph, graphs_of
from heedful.files import as_path, check_new, write_directory, write_json
from heedful.parts.attention import attend
from heedful.parts.tokens import padding_mask
from heedful.pipelines import AnyModel, Classifier, Generator, SavedModel
from heedful.pipelines.encoders import Encoder
from heedful.progress import track

PRECISIONS = ("float32", "int8")
TOLERANCE = {"float32": 1e-4, "int8": 0.25}
"""Largest error of an output, root mean square, as a share of that of the output itself."""
_EXTERNAL = 1 << 30  # bytes of weights above which they are in a file of their own: ONNX ends at 2
FACTS = "onnx.json"
ONNX_FILES = frozenset(
    (
        *(FACTS, "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"),
        *(f"{graph}.onnx{more}" for graph in ("encoder", "decoder") for more in ("", ".data")),
    )
)


def export_onnx(
    model: AnyModel,
    out: str | PathLike[str],
    *,
    precision: str = "float32",
    overwrite: bool = False,
    on_notice: OnNotice = lambda line: None,
) -> None:
    """Write a directory of ONNX graphs, tokenizers and `onnx.json`, which describes them.

    `encoder.onnx`: `ids` (B, S), right-padded, and `lengths` (B,) to `states` (B, S, D), and
    `logits` if the model has a head; of an encoder-decoder to `cross_i`, keys and values of layer
    i. `decoder.onnx`: new `ids` (B, T), right-padded, and `lengths` (B,), `past_lengths` (B,) and
    `past_i` (B, P, 2·G, E) of the tokens before, to `logits` (B, V) after the last new token of
    each row and `cache_i` (B, P + T, 2·G, E), which are the next `past_i`; of an encoder-decoder
    also `source_lengths` (B,) and `cross_i`.

    Args:
        precision: of the matrices, one of `PRECISIONS`; int8: quantized when they are read.
        overwrite: replace such a directory at `out`.
        on_notice: called with the largest error that was measured.

    Raises:
        UserError: a package is missing; an unknown precision; a graph that does not agree with the
            net within `TOLERANCE`; `out` holds something else.
    """
    check_precision(precision)
    extras.require("onnx", "export to ONNX")
    if not isinstance(model, SavedModel):
        raise UserError(f"export needs a model, not {describe(model)}; heedful.load makes one")
    directory = as_path(out, "out")
    check_new(directory, overwrite=overwrite, owns=ONNX_FILES)
    net, errors = model.net, []

    def fill(folder: Path) -> None:
        graphs, error = _write_graphs(net, model.config, folder, precision)
        errors.append(error)
        write_json(folder / FACTS, _facts(model, precision, graphs))
        for name, tokenizer in _tokenizers(model).items():
            tags = model.metadata.language_tags.values()
            content = allow_in_texts(tokenizer.content()["tokenizer"], tags)
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    write_directory(directory, fill, owns=ONNX_FILES)
    on_notice(f"{precision}: largest error {errors[0]:.2g} of the size of the outputs")


def check_precision(precision: str) -> None:
    """Raise UserError for a precision that this format does not support."""
    if precision not in PRECISIONS:
        raise UserError(f"precision of ONNX must be {' or '.join(PRECISIONS)}, not {precision}")


def _tokenizers(model: SavedModel) -> dict[str, Any]:
    """The tokenizers by the names of their files."""
    if not model.has_tokenizer:
        return {}
    if model.src_tokenizer is model.tgt_tokenizer:
        return {"tokenizer.json": model.src_tokenizer}
    return {
        "tokenizer.source.json": model.src_tokenizer,
        "tokenizer.target.json": model.tgt_tokenizer,
    }


def _facts(model: SavedModel, precision: str, graphs: list[str]) -> dict[str, Any]:
    """Metadata for programs that run the graphs.

    Special ids, those of languages included, and sizes of the cache; labels, and what the logits
    mean; how vectors of texts are made.
    """
    facts: dict[str, Any] = {
        "kind": model.kind,
        "precision": precision,
        "graphs": graphs,
        "tokenizers": [*_tokenizers(model)],
        "max_length": model.config.max_length,
    }
    if model.has_tokenizer:
        tokenizer, ends = model.src_tokenizer, []
        if isinstance(model, Generator) and "encoder" in graphs:  # sources end as in training
            ends = tokenizer.encode_target([])[len(tokenizer.prefix_ids) :]
        elif not isinstance(model, Generator):
            ends = list(tokenizer.suffix_ids)
        facts |= {"prefix_ids": list(tokenizer.prefix_ids), "suffix_ids": ends}
    if isinstance(model, Classifier):
        facts |= {"labels": list(model.labels), "problem": model.metadata.problem}
    if isinstance(model, Encoder):
        names = ("pooling", "normalize", "prompts", "default_prompt")
        facts |= {name: getattr(model.metadata, name) for name in names}
    if isinstance(model, Generator):
        facts |= {
            "decoder_start_ids": list(model.ids.decoder_start_ids),
            "eos_ids": list(model.ids.eos_ids),
            "suppressed_ids": list(model.ids.suppressed_ids),
            "suppressed_sequences": [list(ids) for ids in model.ids.suppressed_sequences],
            "forced_bos_id": model.ids.forced_bos_id,
            "forced_eos_id": model.ids.forced_eos_id,
            "language_tags": model.metadata.language_tags,
            "language_ids": {
                code: tag_id(model.tgt_tokenizer, token)
                for code, token in model.metadata.language_codes.items()
            },
            "cache": [
                [2 * layer.num_kv_heads, layer.head_dim] for layer in model.net.decoder.cache_layers
            ],
        }
    return facts


def _write_graphs(
    net: Any, config: Any, directory: Path, precision: str
) -> tuple[list[str], float]:
    """Write `NAME.onnx` for each graph of a net into an existing directory.

    Returns:
        The names of the graphs, and the largest error (`TOLERANCE`) that was measured.

    Raises:
        UserError: torch cannot export the net, or a graph differs from it.
    """
    net = copy.deepcopy(net).eval().float().cpu()
    errors = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the examples
        graphs = graphs_of(net, config)
        with track("onnx", len(graphs)) as advance:
            for name, graph in graphs.items():
                _write(graph, directory / f"{name}.onnx", precision)
                errors.append(_prove(graph, directory / f"{name}.onnx", precision))
                advance(1)
    return [*graphs], max(errors)


def _write(graph: Graph, path: Path, precision: str) -> None:
    """Write a graph, quantized for int8."""
    example = tuple(graph.examples[0])
    is_large = sum(p.numel() * 4 for p in graph.module.parameters()) > _EXTERNAL
    with quiet("torch.onnx", "torch.export"):
        try:
            exported = torch.export.export(graph.module, example, dynamic_shapes=graph.sizes)
            exported = exported.run_decompositions(
                {torch.ops.aten.scaled_dot_product_attention.default: _plain_attention}
            )
            # With examples torch 2.9 inserts checks of them, which it cannot trace again.
            exported.example_inputs = None
            program = torch.onnx.export(
                exported,
                dynamo=True,
                input_names=graph.inputs,
                output_names=graph.outputs,
                verbose=False,
            )
        except Exception as error:  # torch raises many types
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"torch cannot export {path.stem} to ONNX: {reason}") from error
    assert program is not None, "the exporter by torch.export returns a program"
    if precision == "float32":
        program.save(str(path), external_data=is_large)
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = path.with_suffix(".float.onnx")
    program.save(str(whole), external_data=is_large)
    with quiet(""):
        quantize_dynamic(
            whole,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            use_external_data_format=is_large,
        )
    for left in path.parent.glob(f"{whole.name}*"):
        left.unlink()


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the queries scaled: the exporter's own also multiplies all keys."""
    assert (dropout, is_causal, enable_gqa) == (0.0, False, False)
    return attend(query, key, value, bias, scale=scale)[0]


def _prove(graph: Graph, path: Path, precision: str) -> float:
    """The largest error of an output; raises UserError if it is above the tolerance."""
    session = _open(path)
    largest = 0.0
    for example in graph.examples:
        expected = graph.module(*example)
        expected = [expected] if isinstance(expected, Tensor) else [*expected]
        feed = dict(zip(graph.inputs, (tensor.numpy() for tensor in example), strict=True))
        actual = session.run(None, feed)
        for name, one, other in zip(graph.outputs, expected, actual, strict=True):
            real = _real_cells(graph, name, example, one)
            error = _relative_error(one.numpy()[real], other[real])
            largest = max(largest, error)
            if not error <= TOLERANCE[precision]:
                raise UserError(
                    f"the ONNX graph {path.stem} in {precision} differs from the net: the error of "
                    f"{name} is {error:.2g} of its size, above {TOLERANCE[precision]}"
                )
    return largest


def _open(path: Path) -> Any:
    """A session of ONNX Runtime; raises UserError for a graph that it cannot open."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime has no base class for its errors
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"ONNX Runtime cannot open the graph {path.stem}: {reason}") from None


def _real_cells(graph: Graph, name: str, example: list[Tensor], output: Tensor) -> Any:
    """The cells of an output that are not padding, as an index."""
    ids, lengths = example[:2]
    mask = padding_mask(lengths, ids.size(1)).numpy()
    if name.startswith("cross_"):  # (B, 2·G, S, E)
        return np.broadcast_to(mask[:, None, :, None], output.shape)
    if name.startswith("cache_"):
        filled = padding_mask(example[2] + lengths, output.size(1)).numpy()
        return np.broadcast_to(filled[:, :, None, None], output.shape)
    if output.dim() == 3:
        return np.broadcast_to(mask[:, :, None], output.shape)
    return slice(None)


def _relative_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """Root mean square of the difference, as a share of that of the expected values."""
    size = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
    error = np.sqrt(np.mean(np.square(actual.astype(np.float64) - expected)))
    return float(error / max(size, 1e-9))
