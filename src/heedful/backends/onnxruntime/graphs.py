"""Nets as ONNX graphs, written by torch's exporter and compared with the net in ONNX Runtime.

An encoder is one graph; a language model is one step, which reads some tokens after those of its
cache; an encoder-decoder is both. Batches, lengths and caches of any size are accepted.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heedful.backends.aot.compile import quiet
from heedful.errors import UserError
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.cache import FREE, Cache, LayerGroup, layers_by_window
from heedful.parts.heads import ClassificationHead
from heedful.parts.tokens import Tokens, padding_mask
from heedful.progress import track

PRECISIONS = ("float32", "int8")
TOLERANCE = {"float32": 1e-4, "int8": 0.25}
"""Largest error of an output, root mean square, as a share of that of the output itself."""
_EXTERNAL = 1 << 30  # bytes of weights above which they are in a file of their own: ONNX ends at 2
_DYNAMIC = torch.export.Dim.DYNAMIC
_BOTH = {0: _DYNAMIC, 1: _DYNAMIC}


class _Graph(NamedTuple):
    """A module with the names of its inputs and outputs, and which sizes of the inputs vary."""

    module: nn.Module
    inputs: list[str]
    outputs: list[str]
    sizes: list[dict[int, Any]]
    examples: list[list[Tensor]]  # the first is traced, and all are checked


def write_graphs(net: Any, config: Any, directory: Path, precision: str) -> tuple[list[str], float]:
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
        graphs = _graphs(net, config)
        with track("onnx", len(graphs)) as advance:
            for name, graph in graphs.items():
                _write(graph, directory / f"{name}.onnx", precision)
                errors.append(_prove(graph, directory / f"{name}.onnx", precision))
                advance(1)
    return [*graphs], max(errors)


class _Encoder(nn.Module):
    """States and logits of an encoder-only net."""

    def __init__(self, net: EncoderOnly) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, lengths: Tensor, types: Tensor | None = None) -> Any:
        states = self.net.encode(Tokens.from_ids(ids, lengths), types)
        head: Any = self.net.head
        if head is None:
            return states
        return states, head(states[:, 0] if isinstance(head, ClassificationHead) else states)


class _Sources(nn.Module):
    """Keys and values of the sources in each layer of an encoder-decoder's decoder."""

    def __init__(self, net: EncoderDecoder) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: Tensor, lengths: Tensor) -> list[Tensor]:
        states = self.net.encode(Tokens.from_ids(ids, lengths)).states
        blocks: Any = self.net.decoder.blocks
        return [block.cross_attention.sublayer.project_memory(states) for block in blocks]


class _Step(nn.Module):
    """The logits after some new tokens, and the cache with them."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.num_layers = len(net.decoder.cache_layers)

    def forward(
        self, ids: Tensor, lengths: Tensor, past_lengths: Tensor, *stores: Tensor
    ) -> list[Tensor]:
        """`stores`: the past of each layer; then the lengths of the sources and their keys."""
        past, sources = stores[: self.num_layers], stores[self.num_layers :]
        cross = [*sources[1:]]
        real = padding_mask(lengths, ids.size(1))
        columns = torch.arange(ids.size(1), device=ids.device)
        tokens = Tokens(ids, past_lengths[:, None] + columns, real)
        slots = torch.arange(past[0].size(1) + ids.size(1) + 1, device=ids.device)
        slots = slots.expand(ids.size(0), -1)  # the last one is for padding
        filled = torch.where(slots < past_lengths[:, None], slots, FREE)
        visible = torch.zeros_like(filled, dtype=torch.bool)[:, None]
        groups, full = [], {}
        for window, layers in layers_by_window(self.net.decoder.cache_layers).items():
            for layer in layers:
                store = past[layer]
                more = store.new_zeros(store.size(0), ids.size(1) + 1, *store.shape[2:])
                full[layer] = torch.cat([store, more], 1)
            own = [full[layer] for layer in layers]
            used = past_lengths.clone()
            groups.append(LayerGroup(own, filled.clone(), used, visible.clone(), layers, window))
        source_real = padding_mask(sources[0], cross[0].size(2)) if cross else None
        states = self.net.decode(tokens, Cache(groups, cross, source_real))
        rows = torch.arange(ids.size(0), device=ids.device)
        logits = self.net.head(states[rows, lengths - 1])
        return [logits, *(full[layer][:, :-1] for layer in range(self.num_layers))]


def _graphs(net: Any, config: Any) -> dict[str, _Graph]:
    """The graphs of a net, with inputs of several sizes to check them with."""
    if isinstance(net, EncoderOnly):
        types = net.embedding.types
        num_types = 0 if types is None else types.num_embeddings
        names = ["ids", "lengths", "types"][: 3 if num_types > 1 else 2]
        outputs = ["states"] if net.head is None else ["states", "logits"]
        examples = []
        for rows, width in _sizes(config.max_length):
            inputs = [*_padded(rows, width, config.vocab_size)]
            if num_types > 1:
                inputs.append(torch.randint(num_types, (rows, width)))
            examples.append(inputs)
        sizes = [_BOTH, {0: _DYNAMIC}, _BOTH][: len(names)]
        return {"encoder": _Graph(_Encoder(net), names, outputs, sizes, examples)}
    graphs: dict[str, _Graph] = {}
    cross: list[list[Tensor]] = []
    if isinstance(net, EncoderDecoder):
        examples = [
            [*_padded(rows, width, config.src_vocab_size)]
            for rows, width in _sizes(config.max_length)
        ]
        names = [f"cross_{layer}" for layer in range(len(net.decoder.blocks))]
        sizes = [_BOTH, {0: _DYNAMIC}]
        graphs["encoder"] = _Graph(_Sources(net), ["ids", "lengths"], names, sizes, examples)
        with torch.no_grad():
            cross = [[lengths, *_Sources(net)(ids, lengths)] for ids, lengths in examples]
    graphs["decoder"] = _decoder_graph(net, config, cross)
    return graphs


def _decoder_graph(net: Any, config: Any, sources: list[list[Tensor]]) -> _Graph:
    layers = net.decoder.cache_layers
    past = [f"past_{layer}" for layer in range(len(layers))]
    cross = [f"cross_{layer}" for layer in range(len(layers))] if sources else []
    names = ["ids", "lengths", "past_lengths", *past]
    names += ["source_lengths", *cross] if cross else []
    size = getattr(config, "tgt_vocab_size", None) or config.vocab_size
    examples = []
    half = config.max_length // 2
    for number, (rows, width) in enumerate(_sizes(half)):
        before = min(half, (3, 0, 1, 4)[number])
        ids, lengths = _padded(rows, width, size)
        pasts = torch.randint(before + 1, (rows,))
        pasts[0] = before
        stores = [torch.randn(rows, before, 2 * heads, head_dim) for heads, head_dim, _ in layers]
        examples.append([ids, lengths, pasts, *stores, *(sources[number] if sources else ())])
    one = {0: _DYNAMIC}
    sizes: list[dict[int, Any]] = [_BOTH, one, one, *[_BOTH] * len(past)]
    sizes += [one, *[{0: _DYNAMIC, 2: _DYNAMIC}] * len(cross)] if cross else []
    outputs = ["logits", *(f"cache_{layer}" for layer in range(len(layers)))]
    return _Graph(_Step(net), names, outputs, sizes, examples)


def _sizes(longest: int) -> Iterator[tuple[int, int]]:
    """Rows and widths of the batches that a graph is checked with; the first one is traced."""
    for rows, width in ((3, 5), (1, 1), (2, 7), (4, 2)):
        yield rows, max(1, min(width, longest))


def _padded(rows: int, width: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Random ids (B, T), and lengths of at least 1, the first of which is T."""
    generator = torch.Generator().manual_seed(rows * 100 + width)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    return torch.randint(vocab_size, (rows, width), generator=generator), lengths


# --- files --------------------------------------------------------------------------------------


def _write(graph: _Graph, path: Path, precision: str) -> None:
    """Write a graph, quantized for int8."""
    example = tuple(graph.examples[0])
    is_step = isinstance(graph.module, _Step)
    shapes: Any = (*graph.sizes[:3], tuple(graph.sizes[3:])) if is_step else tuple(graph.sizes)
    is_large = sum(p.numel() * 4 for p in graph.module.parameters()) > _EXTERNAL
    with quiet("torch.onnx", "torch.export"):
        try:
            exported = torch.export.export(graph.module, example, dynamic_shapes=shapes)
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


def _prove(graph: _Graph, path: Path, precision: str) -> float:
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


def _real_cells(graph: _Graph, name: str, example: list[Tensor], output: Tensor) -> Any:
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


def open_session(path: Path, threads: int = 1) -> Any:
    """An ONNX Runtime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
