"""Ahead-of-time compilation of nets by Inductor; `heedful.backends.aot.compiled_net` opens them."""

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from heedful.backends.aot import ENCODER_PRECISIONS, GENERATOR_PRECISIONS, private
from heedful.backends.aot.compiled_net import (
    CONSTANTS,
    GRAPHS,
    KERNEL,
    TABLE,
    CompiledFacts,
    copy_code,
    open_graph,
    open_kernel,
)
from heedful.backends.aot.encoder import Graph, encoder_facts, encoder_graphs
from heedful.backends.aot.kernels import (
    KERNELS,
    SOURCES,
    attention,
    pack,
    packed_linear,
    replace_linears,
)
from heedful.backends.aot.trust import described, digest_of, record, records
from heedful.errors import UserError
from heedful.files import write_json
from heedful.kernels.build import (
    NO_COMPILER,
    build_library,
    has_cpp_compiler,
    use_own_inductor_cache,
)
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.cache import Cache, LayerGroup, layers_by_window
from heedful.parts.tokens import Tokens
from heedful.progress import track
from heedful.zoo.saved import save_tensors, weights_of

_DYNAMIC = torch.export.Dim.DYNAMIC

CacheTensors = tuple[Any, ...]  # of a `Cache`, in the order of `Cache.tensors`
GraphSpec = tuple[nn.Module, tuple[Any, ...], Any]
"""A module, an example of its inputs, and which of their sizes vary."""


def compile_net(net: Any, max_length: int, directory: Path, precision: str) -> CompiledFacts:
    """Compile a net into an existing directory.

    The graphs take batches, rows, beams and caches of any size, so that nothing is compiled later.
    Weights stay in the model's own file; constants that it lacks are written to `constants`. The
    result is recorded as made here (`heedful.backends.aot.trust`).

    Args:
        max_length: positions of the net.

    Raises:
        UserError: a precision that the net's graphs do not have; no C++ compiler, an early torch,
            or torch cannot compile the net.
    """
    is_encoder = isinstance(net, EncoderOnly)
    known = ENCODER_PRECISIONS if is_encoder else GENERATOR_PRECISIONS
    if precision not in known:
        raise UserError(f"compiled graphs of this net are in {', '.join(known)}, not {precision}")
    if reason := private.unsupported_reason():
        raise UserError(reason)
    if not has_cpp_compiler():
        raise UserError(NO_COMPILER)
    saved = weights_of(net)
    net = copy.deepcopy(net).eval().float()
    for tensor in net.parameters():
        tensor.data = tensor.data.contiguous()  # as in the model's file
    facts: dict[str, Any]
    if is_encoder:
        graphs, facts = encoder_graphs(net, precision), encoder_facts(net)
    else:
        replace_linears(net, partial(packed_linear, precision=precision))
        graphs = decoder_graphs(net)
        is_encoder_decoder = isinstance(net, EncoderDecoder)
        facts = {"family": "encoder_decoder" if is_encoder_decoder else "decoder_only"}
        facts["cache_layers"] = [*net.decoder.cache_layers]
    files: dict[str, list[str]] = {}
    constants: dict[str, dict[str, Tensor]] = {}
    compiled = CompiledFacts(**facts, max_length=max_length, graphs=[*graphs])
    records()  # it can be written
    use_own_inductor_cache()
    # In a folder that no other user can write, so that what is recorded is what was compiled.
    with TemporaryDirectory(prefix="heedful-") as place:
        folder = Path(place)
        try:
            build_library(SOURCES, folder / KERNEL)
            with torch.no_grad(), quiet("torch.export", "torch._inductor"), _linked_with(folder):
                for name in graphs:
                    with track(f"compiling {precision}: {name}", 1) as advance:
                        files[name], constants[name] = _compile(name, *graphs[name])
                        advance(1)
                private.write_package(folder / GRAPHS, files)
        except Exception as error:  # torch raises many types
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"torch cannot compile it: {reason}") from error
        code = copy_code(folder, directory)
        open_kernel(folder, code[KERNEL])
        described_constants = _write_constants(folder, directory, saved, constants)
    record(digest_of(code, compiled, described_constants))
    return compiled


def _compile(
    name: str, module: nn.Module, args: tuple[Any, ...], shapes: Any
) -> tuple[list[str], dict[str, Tensor]]:
    """The files of a graph, and the tensors that it can have as constants, by name."""
    program = torch.export.export(module, args, dynamic_shapes=(shapes,))
    if name == "step":  # few queries over the whole cache
        decompositions: Any = {torch.ops.aten.scaled_dot_product_attention.default: _step_attention}
        program = program.run_decompositions(decompositions)
    # In decoders only the matrix products are parallel: the loops between them are small.
    is_encoder = isinstance(module.net, EncoderOnly)
    options = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": KERNELS,
        **({"cpp.dynamic_threads": True} if is_encoder else {"cpp.threads": 1}),
    }
    exported: Any = program.module(check_guards=False)
    for fqn, constant in program.constants.items():  # a plain attribute would lose its name
        *path, attribute = fqn.split(".")
        owner = exported.get_submodule(".".join(path))
        delattr(owner, attribute)
        owner.register_buffer(attribute, constant, persistent=False)
    files = private.compile_graph(exported, args, options)
    tensors: dict[str, Any] = {**program.state_dict, **program.constants}
    return (
        [file for file in files if not file.endswith((".cpp", ".h"))],
        {fqn: tensor.detach() for fqn, tensor in tensors.items()},
    )


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Suppress warnings, and those of the loggers with these names."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, before, strict=True):
                logger.setLevel(level)


@contextmanager
def _linked_with(directory: Path) -> Iterator[None]:
    """Link graphs with the kernels of a directory."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(directory), before]))
    try:
        with private.link_libraries([f":{KERNEL}"]):
            yield
    finally:
        del os.environ["LIBRARY_PATH"]
        if before is not None:
            os.environ["LIBRARY_PATH"] = before


def _write_constants(
    folder: Path,
    directory: Path,
    saved: Mapping[str, Tensor],
    constants: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, dict[str, list[Any]]]:
    """Write the table of each graph's constants, and those that the model's file lacks.

    Args:
        folder: of the package.
        directory: to write into.

    Returns:
        `trust.described` of each graph's constants, by name.
    """
    own: dict[str, Tensor] = {}
    table: dict[str, dict[str, str]] = {}
    known: dict[str, dict[str, list[Any]]] = {}
    for graph, tensors in constants.items():
        table[graph], known[graph] = {}, {}
        for fqn in open_graph(folder, graph, directory).get_constant_fqns():
            name, tensor = fqn.removeprefix("net."), tensors[fqn]
            source = _source(name, tensor, saved)
            if source is None:
                name = name if fqn != name else f"{graph}.{name}"  # of the net, or of its graph
                own[name], source = tensor, f"own:{name}"
            table[graph][fqn] = source
            known[graph][fqn] = described(source, tensor)
    save_tensors(directory / CONSTANTS, own)
    write_json(directory / TABLE, table)
    return known


def _source(name: str, tensor: Tensor, saved: Mapping[str, Tensor]) -> str | None:
    """The tensor of the model's file that equals a constant, of the same or a tied name.

    `model:NAME`, or `packed:NAME` for its packed form; None: the file has no such tensor.
    """
    for other in (name, *saved):
        if other in saved and _equal(saved[other], tensor):
            return f"model:{other}"
        if other in saved and tensor.dim() == 3 and saved[other].dim() == 2:
            rows, width = saved[other].shape
            fits = tensor.shape[1] == width and -(-rows // tensor.shape[2]) == len(tensor)
            if fits and _equal(pack(saved[other]), tensor):
                return f"packed:{other}"
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


# --- graphs of decoders -------------------------------------------------------------------------


def decoder_graphs(net: Any) -> dict[str, GraphSpec]:
    """The graphs of an encoder-decoder or decoder-only net.

    `encode`: keys and values of sources; `read`: logits after several tokens; `step`: logits after
    one token of each beam.
    """
    rows, beams, length, source_length = 3, 2, 5, 7
    ids = torch.ones(rows, length, dtype=torch.long)
    positions = torch.arange(length).expand(rows, -1).contiguous()
    real = torch.ones(rows, length, dtype=torch.bool)
    cross: list[Tensor] = []
    source_real = None
    batch, both = {0: _DYNAMIC}, {0: _DYNAMIC, 1: _DYNAMIC}
    graphs: dict[str, GraphSpec] = {}
    if isinstance(net, EncoderDecoder):
        source = torch.ones(rows, source_length, dtype=torch.long)
        source_real = torch.ones(rows, source_length, dtype=torch.bool)
        inputs = (source, torch.arange(source_length)[None], source_real)
        cross = _encode(net, *inputs)
        graphs["encode"] = (Graph(net, _encode), inputs, (both, {1: _DYNAMIC}, both))
    groups, group_sizes = _groups(net, rows, beams)
    tensors = (groups, cross, source_real)
    cache_sizes = (
        group_sizes,
        [{0: _DYNAMIC, 2: _DYNAMIC}] * len(cross),
        None if source_real is None else both,
    )
    beam_ids = torch.ones(rows, beams, dtype=torch.long)
    read = (torch.arange(2), ids, positions, real, tensors)
    step = (beam_ids, beam_ids * 3, tensors)
    graphs["read"] = (Graph(net, _read), read, (batch, both, both, both, cache_sizes))
    graphs["step"] = (Graph(net, _step), step, (both, both, cache_sizes))
    return graphs


def _encode(net: Any, ids: Tensor, positions: Tensor, real: Tensor) -> list[Tensor]:
    """Keys and values of the sources for each layer of the decoder."""
    states = net.encode(Tokens(ids, positions, real)).states
    attentions = [block.cross_attention.sublayer for block in net.decoder.blocks]
    return [attention.project_memory(states).contiguous() for attention in attentions]


def _read(
    net: Any, indices: Tensor, ids: Tensor, positions: Tensor, real: Tensor, tensors: CacheTensors
) -> Tensor:
    """Logits (B, R, V) after the new tokens at `indices` (R), one row a sentence."""
    states = net.decode(Tokens(ids, positions, real), _cache(net, *tensors))
    logits: Tensor = net.head(states.index_select(1, indices))
    return logits


def _step(net: Any, ids: Tensor, positions: Tensor, tensors: CacheTensors) -> Tensor:
    """Logits (B * W, V) after one new token of each beam; ids and positions are (B, W)."""
    tokens = Tokens(ids.flatten()[:, None], positions.flatten()[:, None])
    logits: Tensor = net.head(net.decode(tokens, _cache(net, *tensors)))[:, 0]
    return logits


def _groups(net: Any, rows: int, beams: int) -> tuple[list[Any], list[Any]]:
    """The tensors of each `LayerGroup` of a cache, and which of their sizes vary."""
    cache = Cache.empty(net.decoder.cache_layers, rows, 31, beams, torch.empty(0))
    batch, both = {0: _DYNAMIC}, {0: _DYNAMIC, 1: _DYNAMIC}
    groups, sizes = [], []
    for number, group in enumerate(cache.groups):
        group = group.resized(31 + number)  # sizes that are equal here would have to stay so
        groups.append((group.stores, group.positions, group.used, group.visible))
        sizes.append(([both] * len(group.stores), both, batch, both | {2: _DYNAMIC}))
    return groups, sizes


def _cache(net: Any, groups: list[Any], cross: list[Tensor], source_real: Tensor | None) -> Cache:
    """The cache of a graph's input tensors."""
    windows = layers_by_window(net.decoder.cache_layers)
    layer_groups = []
    for tensors, (window, layers) in zip(groups, windows.items(), strict=True):
        stores, positions, used, visible = tensors
        layer_groups.append(LayerGroup(stores, positions, used, visible, layers, window))
    return Cache(layer_groups, cross, source_real)


def _step_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel of `attention.cpp` in place of torch's attention."""
    assert not is_causal
    scale = query.size(-1) ** -0.5 if scale is None else scale
    bias = query.new_zeros(1, 1, 1, key.size(2)) if bias is None else bias
    return attention(query * scale, key, value, bias)
