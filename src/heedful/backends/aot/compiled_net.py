"""The compiled graphs of a net: opened from a directory, and called as the net is."""

import ctypes
import hashlib
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heedful.backends.aot.kernels import pack
from heedful.backends.aot.private import load_graph
from heedful.backends.aot.trust import check_recorded, described, digest_of
from heedful.backends.manifest import NetFacts
from heedful.errors import UserError
from heedful.files import read_object, user_errors
from heedful.parts.cache import Cache, LayerShape
from heedful.parts.tokens import Tokens

GRAPHS, KERNEL = "graphs.pt2", "linears.so"
CONSTANTS, TABLE = "constants.safetensors", "constants.json"
_kernels: dict[str, ctypes.CDLL] = {}  # opened ones, by SHA-256


@dataclass(frozen=True, kw_only=True)
class CompiledFacts(NetFacts):
    """Facts of a compiled net that its files do not hold.

    Attributes:
        max_length: positions of the net.
        graphs: names of the graphs in the package.
        cache_layers: the `LayerShape` of each layer of a decoder.
        first_token_only: an encoder's head reads only the first state of each row.
    """

    max_length: int
    graphs: list[str]
    cache_layers: list[tuple[int, int, int | None]] = field(default_factory=list)
    first_token_only: bool = False


class CompiledNet:
    """The graphs in a directory that `heedful.backends.aot.compile` wrote.

    Args:
        weights: the model's own file of weights, which the graphs share.
        workers: graphs that can run at the same time; each runs in one thread at a time.
        trusted: run the code even if it was not compiled here.

    Raises:
        UserError: files that are missing, damaged, of another model, or not to be trusted.
    """

    def __init__(
        self,
        directory: Path,
        weights: Path,
        facts: CompiledFacts,
        workers: int = 1,
        *,
        trusted: bool = False,
    ) -> None:
        self.facts = facts
        table = read_object(directory / TABLE)
        try:
            sources = {source for constants in table.values() for source in constants.values()}
            tensors = _read_tensors(weights, directory / CONSTANTS, sources)
            known = {
                name: {
                    fqn: described(source, tensors[source]) for fqn, source in table[name].items()
                }
                for name in facts.graphs
            }
        except UserError:  # which is a ValueError
            raise
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{directory / TABLE} is damaged") from None
        self._free: SimpleQueue[dict[str, Any]] = SimpleQueue()
        # What is hashed is opened: a copy in a folder that no other user can write.
        with user_errors("open", directory), TemporaryDirectory(prefix="heedful-") as copy:
            code = copy_code(directory, Path(copy))
            if not trusted:
                check_recorded(digest_of(code, facts, known), directory, weights.parent)
            open_kernel(Path(copy), code[KERNEL])
            for _ in range(workers):
                graphs = {}
                for name in facts.graphs:
                    graphs[name] = open_graph(Path(copy), name, directory)
                    constants = {fqn: tensors[source] for fqn, source in table[name].items()}
                    graphs[name].load_constants(constants, False, True, True)
                self._free.put(graphs)
        self._tensors = tensors  # the graphs do not keep them alive

    def run_all(self, name: str, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs of a graph that no other thread is running."""
        graphs = self._free.get()
        try:
            return graphs[name].boxed_run(inputs)
        finally:
            self._free.put(graphs)

    def run(self, name: str, inputs: list[Tensor]) -> Tensor:
        """The output of a graph that has only one."""
        [output] = self.run_all(name, inputs)
        return output

    def start(self, given: Tokens | int, *, capacity: int, branches: int = 1) -> Cache:
        """See `EncoderDecoder.start` and `DecoderOnly.start`."""
        rows = given if isinstance(given, int) else given.ids.size(0)
        layers = [LayerShape(*layer) for layer in self.facts.cache_layers]
        cache = Cache.empty(layers, rows, capacity, branches, torch.empty(0))
        if isinstance(given, int):
            return cache
        real = torch.ones_like(given.ids, dtype=torch.bool) if given.real is None else given.real
        cross = self.run_all("encode", [given.ids, given.positions, real])
        return replace(cache, cross=cross, source_real=real)

    def decode(self, tokens: Tokens, cache: Cache) -> Float[Tensor, "N 1 V"]:
        """Logits after the last of the new tokens, whose keys and values the cache stores."""
        rows, length = tokens.ids.shape
        if length > 1 or rows < cache.num_texts * cache.branches:
            return self._read(tokens, cache, torch.tensor([-1]))
        shape = (cache.num_texts, -1)
        positions = tokens.positions.expand(rows, 1).reshape(shape).contiguous()
        ids = tokens.ids.reshape(shape).contiguous()
        return self.run("step", [ids, positions, *cache.tensors()])[:, None]

    def head(self, logits: Tensor) -> Tensor:
        """The identity: `decode` returns logits."""
        return logits

    def logits(self, *inputs: Tensor) -> Float[Tensor, "B T V"]:
        """Logits of whole rows, given ids and lengths, or source and target ids and lengths."""
        ids, lengths = inputs[len(inputs) // 2 - 1], inputs[-1]
        if self.facts.family == "encoder_decoder":
            start: Any = Tokens.from_ids(inputs[0], inputs[2])
        else:
            start = ids.size(0)
        cache = self.start(start, capacity=ids.size(1))
        return self._read(Tokens.from_ids(ids, lengths), cache, torch.arange(ids.size(1)))

    def _read(
        self, tokens: Tokens, cache: Cache, indices: Int[Tensor, "R"]
    ) -> Float[Tensor, "B R V"]:
        """Logits after some of the new tokens, one row a sentence; -1 is the last."""
        ids, real = tokens.ids, tokens.real
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        positions = tokens.positions.expand(ids.shape)
        if ids.size(1) == 1:  # the graph was exported for two tokens or more
            ids, positions = ids.repeat(1, 2), positions.repeat(1, 2)
            real = torch.cat([torch.zeros_like(real), real], dim=1)
            indices = torch.ones_like(indices)
        indices = indices % ids.size(1)
        inputs = [indices, ids.contiguous(), positions.contiguous(), real.contiguous()]
        return self.run("read", [*inputs, *cache.tensors()])


def copy_code(directory: Path, copy: Path) -> dict[str, str]:
    """Copy the files with code to another folder; returns the SHA-256 of the copies by name."""
    hashes = {}
    for name in (GRAPHS, KERNEL):
        try:
            shutil.copyfile(directory / name, copy / name)
        except FileNotFoundError:  # encoders made by earlier versions have no kernels
            raise UserError(
                f"{directory / name}: no such file; make it again by `heedful optimize`"
            ) from None
        with (copy / name).open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def open_kernel(folder: Path, sha256: str) -> None:
    """Open the kernels in a folder, which graphs are linked with; equal ones only once.

    Raises UserError for a file that is no library.
    """
    if sha256 not in _kernels:
        # Loaded without RTLD_GLOBAL, which would make torch's symbols global too: CTranslate2
        # would then call functions of torch with the same names, and return wrong results.
        try:
            _kernels[sha256] = ctypes.CDLL(str(folder / KERNEL))
        except OSError as error:
            raise UserError(f"{KERNEL} is damaged: {str(error).splitlines()[0]}") from None


def open_graph(folder: Path, name: str, origin: Path) -> Any:
    """One graph of a folder's package, without its constants.

    Args:
        origin: the folder to name in a UserError, which is raised for a damaged package.
    """
    try:
        return load_graph(folder / GRAPHS, name)
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{origin / GRAPHS} is damaged: {reason}") from None


def _read_tensors(weights: Path, constants: Path, sources: set[str]) -> dict[str, Tensor]:
    """Tensors by `model:name`, `packed:name` (of the model, packed) and `own:name` (constants)."""
    tensors = {}
    for path, kinds in ((weights, ("model", "packed")), (constants, ("own",))):
        try:
            with safe_open(path, framework="pt") as file:
                for source in sources:
                    kind, name = source.split(":", 1)
                    if kind in kinds:
                        tensor = file.get_tensor(name)
                        tensors[source] = pack(tensor) if kind == "packed" else tensor
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path} is not the file that the graphs were compiled with: {error}"
            ) from None
    return tensors
