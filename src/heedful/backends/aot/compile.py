"""Nets compiled ahead of time by Inductor, for `heedful.backends.aot.decoder` to open."""

import copy
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.package.package import package_aoti

from heedful.backends.aot.decoder import CONSTANTS, GRAPHS, KERNEL, TABLE, CompiledFacts, open_graph
from heedful.backends.aot.encoder import Graph, encoder_facts, encoder_parts
from heedful.backends.aot.kernels import KERNELS, SOURCES, attention, exchange_linears, pack
from heedful.errors import UserError
from heedful.files import write_json
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.cache import Cache, LayerGroup, layers_by_window
from heedful.parts.tokens import Tokens
from heedful.progress import track
from heedful.zoo.names import weights_of
from heedful.zoo.saved import save_tensors

NO_COMPILER = "there is no C++ compiler: install one, for example by `apt install g++`"
_DYNAMIC = torch.export.Dim.DYNAMIC

Memory = tuple[Any, ...]  # the tensors of a `Cache`, in the order of `Cache.tensors`


def compile_net(net: Any, max_length: int, directory: Path, precision: str) -> CompiledFacts:
    """Compile a net into a directory that is there.

    Its graphs take batches, texts, beams and caches of any size, so that nothing is compiled later.
    Weights stay in the model's own file; what is not in it stands in `constants`.

    Args:
        max_length: positions that the net has.

    Raises:
        UserError: there is no compiler, or torch cannot compile the net.
    """
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(NO_COMPILER) from None
    saved = weights_of(net)
    net = copy.deepcopy(net).eval().float()
    for tensor in net.parameters():
        tensor.data = tensor.data.contiguous()  # as the model's file has them
    facts: dict[str, Any]
    if isinstance(net, EncoderOnly):
        parts, facts = encoder_parts(net, precision), encoder_facts(net)
    else:
        exchange_linears(net, precision)
        two_stacks = isinstance(net, EncoderDecoder)
        parts = _parts(net)
        facts = {"family": "encoder_decoder" if two_stacks else "decoder_only"}
        facts["cache_layers"] = [*net.decoder.cache_layers]
    programs: dict[str, Any] = {}
    found: dict[str, dict[str, Tensor]] = {}
    try:
        if not isinstance(net, EncoderOnly):
            _build_kernel(directory)
        with torch.no_grad(), _quiet(), _linked_with(directory):
            for name in parts:
                with track(f"compiling {precision}: {name}", 1) as advance:
                    programs[name], found[name] = _compile(name, *parts[name])
                    advance(1)
            package_aoti(str(directory / GRAPHS), programs)
    except Exception as error:  # of any part of torch, of which there are many
        raise UserError(f"torch cannot compile it: {str(error).strip().splitlines()[0]}") from error
    _write_constants(directory, saved, found)
    return CompiledFacts(**{"cache_layers": []} | facts, max_length=max_length, graphs=[*parts])


def _compile(
    name: str, module: nn.Module, args: tuple[Any, ...], shapes: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """The files of a graph, and what its constants may be."""
    program = torch.export.export(module, args, dynamic_shapes=(shapes,))
    if name == "step":  # few queries, each of all that is held
        plain: Any = {torch.ops.aten.scaled_dot_product_attention.default: _attention}
        program = program.run_decompositions(plain)
    # Of what writes only the products have threads: the loops between them are small.
    is_encoder = isinstance(module.net, EncoderOnly)
    options = {
        "aot_inductor.package": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": KERNELS,
        **({"cpp.dynamic_threads": True} if is_encoder else {"cpp.threads": 1}),
    }
    module_of: Any = program.module(check_guards=False)
    for fqn, constant in program.constants.items():  # a plain attribute would lose its name
        *path, own = fqn.split(".")
        place = module_of.get_submodule(".".join(path))
        delattr(place, own)
        place.register_buffer(own, constant, persistent=False)
    files: Any = torch._inductor.aot_compile(module_of, args, options=options)
    tensors: dict[str, Any] = {**program.state_dict, **program.constants}
    sources = (".cpp", ".h")  # which are for nobody
    return (
        [file for file in files if not str(file).endswith(sources)],
        {fqn: each.detach() for fqn, each in tensors.items()},
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says of its own insides."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch._inductor")]
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
    """Let the graphs call the kernels of a directory, where there are any."""
    before = os.environ.get("LIBRARY_PATH")
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(directory), before]))
    libraries = [f":{KERNEL}"] if (directory / KERNEL).is_file() else []
    try:
        with torch._inductor.config.patch({"aot_inductor.custom_op_libs": libraries}):
            yield
    finally:
        del os.environ["LIBRARY_PATH"]
        if before is not None:
            os.environ["LIBRARY_PATH"] = before


def _build_kernel(directory: Path) -> None:
    """The library of the kernels, for this processor, by whose name the graphs know it."""
    flags = [f"-Wl,-soname,{KERNEL}", "-ffp-contract=fast"]
    options = CppTorchOptions(vec_isa=pick_vec_isa(), extra_flags=flags)
    built = CppBuilder("linears", [*map(str, SOURCES)], options, str(directory))
    built.build()
    made = Path(built.get_target_file_path())
    if made != directory / KERNEL:
        shutil.move(made, directory / KERNEL)


def _write_constants(
    directory: Path, saved: Mapping[str, Tensor], found: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Where each graph's constants stand: in the model's file, or in one beside the graphs."""
    own: dict[str, Tensor] = {}
    table: dict[str, dict[str, str]] = {}
    for graph, tensors in found.items():
        table[graph] = {}
        for fqn in open_graph(directory, graph).get_constant_fqns():
            name, tensor = fqn.removeprefix("net."), tensors[fqn]
            place = _place(name, tensor, saved)
            if place is None:
                name = name if fqn != name else f"{graph}.{name}"  # of the net, or of its graph
                own[name], place = tensor, f"own:{name}"
            table[graph][fqn] = place
    save_tensors(directory / CONSTANTS, own)
    write_json(directory / TABLE, table)


def _place(name: str, tensor: Tensor, saved: Mapping[str, Tensor]) -> str | None:
    """Where a tensor stands in the model's file, under its own name or that of what it is tied to;
    None: it does not."""
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


# --- the graphs ---------------------------------------------------------------------------------


def _encode(net: Any, ids: Tensor, positions: Tensor, real: Tensor) -> list[Tensor]:
    """Keys and values of the sources in each layer of the decoder."""
    states = net.encode(Tokens(ids, positions, real)).states
    attentions = [block.cross_attention.sublayer for block in net.decoder.blocks]
    return [attention.project_memory(states).contiguous() for attention in attentions]


def _read(
    net: Any, wanted: Tensor, ids: Tensor, positions: Tensor, real: Tensor, memory: Memory
) -> Tensor:
    """Logits after some of the new tokens, `wanted` (R), of one row a text: (B, R, V)."""
    states = net.decode(Tokens(ids, positions, real), _cache(net, *memory))
    logits: Tensor = net.head(states.index_select(1, wanted))
    return logits


def _step(net: Any, ids: Tensor, positions: Tensor, memory: Memory) -> Tensor:
    """Logits after one new token of each beam."""
    tokens = Tokens(ids.flatten()[:, None], positions.flatten()[:, None])
    logits: Tensor = net.head(net.decode(tokens, _cache(net, *memory)))[:, 0]
    return logits


def _parts(net: Any) -> dict[str, tuple[nn.Module, tuple[Any, ...], Any]]:
    """Each graph with an example of its inputs, and which of their sizes vary."""
    texts, beams, length, sources = 3, 2, 5, 7
    ids = torch.ones(texts, length, dtype=torch.long)
    positions = torch.arange(length).expand(texts, -1).contiguous()
    real = torch.ones(texts, length, dtype=torch.bool)
    cross: list[Tensor] = []
    source_real = None
    batch, both = {0: _DYNAMIC}, {0: _DYNAMIC, 1: _DYNAMIC}
    parts: dict[str, tuple[nn.Module, tuple[Any, ...], Any]] = {}
    if isinstance(net, EncoderDecoder):
        source = torch.ones(texts, sources, dtype=torch.long)
        source_real = torch.ones(texts, sources, dtype=torch.bool)
        given = (source, torch.arange(sources)[None], source_real)
        cross = _encode(net, *given)
        parts["encode"] = (Graph(net, _encode), given, (both, {1: _DYNAMIC}, both))
    groups, of_groups = _groups(net, texts, beams)
    memory = (groups, cross, source_real)
    of_memory = (
        of_groups,
        [{0: _DYNAMIC, 2: _DYNAMIC}] * len(cross),
        None if source_real is None else both,
    )
    of_beams = torch.ones(texts, beams, dtype=torch.long)
    wanted = torch.arange(2)
    read = (wanted, ids, positions, real, memory)
    parts["read"] = (Graph(net, _read), read, (batch, both, both, both, of_memory))
    parts["step"] = (Graph(net, _step), (of_beams, of_beams * 3, memory), (both, both, of_memory))
    return parts


def _groups(net: Any, texts: int, beams: int) -> tuple[list[Any], list[Any]]:
    """The tensors of each `LayerGroup` of a cache, and which of their sizes vary."""
    cache = Cache.empty(net.decoder.cache_layers, texts, 31, beams, torch.empty(0))
    batch, both = {0: _DYNAMIC}, {0: _DYNAMIC, 1: _DYNAMIC}
    groups, sizes = [], []
    for number, group in enumerate(cache.groups):
        group = group.resized(31 + number)  # sizes that are equal here would have to stay so
        groups.append((group.stores, group.positions, group.used, group.seen))
        sizes.append(([both] * len(group.stores), both, batch, both | {2: _DYNAMIC}))
    return groups, sizes


def _cache(net: Any, groups: list[Any], cross: list[Tensor], source_real: Tensor | None) -> Cache:
    """The cache that these tensors are of."""
    windows = layers_by_window(net.decoder.cache_layers)
    made = []
    for tensors, (window, layers) in zip(groups, windows.items(), strict=True):
        stores, positions, used, seen = tensors
        made.append(LayerGroup(stores, positions, used, seen, layers, window))
    return Cache(made, cross, source_real)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert not is_causal
    scale = query.size(-1) ** -0.5 if scale is None else scale
    bias = query.new_zeros(1, 1, 1, key.size(2)) if bias is None else bias
    return attention(query * scale, key, value, bias)
