"""Graphs of nets, written as ONNX by torch and compared with the net in ONNX Runtime.

Batches, lengths and caches of any size are accepted.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful.backends.aot.compile import quiet
from heedful.backends.onnxruntime.cached_step import cached_step_graph
from heedful.backends.onnxruntime.graphs import Graph, encoder_graphs, step_graph
from heedful.backends.onnxruntime.session import open_session
from heedful.errors import UserError
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.attend_products import attend
from heedful.parts.tokens import padding_mask
from heedful.progress import track

PRECISIONS = ("float32", "int8")
TOLERANCE = {"float32": 1e-4, "int8": 0.25}
"""Largest error of an output, root mean square, as a share of that of the output itself."""
_EXTERNAL = 1 << 30  # bytes of weights above which they are in a file of their own: ONNX ends at 2


def write_graphs(
    net: Any, config: Any, directory: Path, precision: str, *, for_search: bool = False
) -> tuple[list[str], float]:
    """Write `NAME.onnx` for each graph of a net into an existing directory.

    Args:
        for_search: the decoder is a `CachedStep`, whose cache is a `Cache`; without it a step whose
            cache is a tensor per layer, which other programs can call.

    Returns:
        The names of the graphs, and the largest error (`TOLERANCE`) that was measured.

    Raises:
        UserError: torch cannot export the net, or a graph differs from it.
    """
    net = copy.deepcopy(net).eval().float().cpu()
    errors = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the examples
        graphs = encoder_graphs(net, config)
        if not isinstance(net, EncoderOnly):
            make_step = cached_step_graph if for_search else step_graph
            graphs["decoder"] = make_step(net, config, graphs.get("encoder"))
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
    session = open_session(path)
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


def _real_cells(graph: Graph, name: str, example: list[Tensor], output: Tensor) -> Any:
    """The cells of an output that are not padding, as an index."""
    if graph.inputs[1] != "lengths":  # without padding
        return slice(None)
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
