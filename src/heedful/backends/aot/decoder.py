"""A net that was compiled ahead of time as an engine: every search, by graphs that never change."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heedful.backends.aot.kernels import pack
from heedful.backends.base import GenerationRequest, Settings
from heedful.backends.manifest import SHORTLIST
from heedful.backends.torch.eager import Eager, rules_of
from heedful.data.collate import Batch
from heedful.errors import UserError
from heedful.evaluation.target_scores import log_softmax
from heedful.files import read_object
from heedful.generation.hypotheses import Hypothesis
from heedful.generation.request import read_request
from heedful.generation.state import sentences_to_keep
from heedful.generation.token_rules import BannedTokens
from heedful.generation.topk import first_largest
from heedful.parts.cache import Cache, LayerShape
from heedful.parts.tokens import Tokens

GRAPHS, KERNEL = "graphs.pt2", "linears.so"
CONSTANTS, TABLE = "constants.safetensors", "constants.json"


@dataclass(frozen=True)
class CompiledFacts:
    """What must be known of a compiled net beside its files.

    Attributes:
        cache_layers: of what writes: `LayerShape` of each layer.
        max_length: positions that the net has.
        graphs: names of those in the package.
        num_types: how many texts of a row an encoder tells apart; 0: it knows no types.
        of_first: whether an encoder's head reads the first state of a text alone.
    """

    family: Literal["encoder_decoder", "decoder_only", "encoder_only"]
    cache_layers: list[tuple[int, int, int | None]]
    max_length: int
    graphs: list[str]
    num_types: int = 0
    of_first: bool = False


class CompiledNet:
    """The graphs of a directory that `heedful.backends.aot.compile` wrote, called as a net is.

    Args:
        directory: of the form.
        weights: the model's own file.
    """

    def __init__(self, directory: Path, weights: Path, facts: CompiledFacts) -> None:
        self.facts = facts
        table = read_object(directory / TABLE)
        places = {place for each in table.values() for place in each.values()}
        tensors = _tensors(weights, directory / CONSTANTS, places)
        self._graphs = {}
        for name in facts.graphs:
            graph = open_graph(directory, name)
            constants = {fqn: tensors[place] for fqn, place in table[name].items()}
            graph.load_constants(constants, False, True, True)
            self._graphs[name] = graph
        self._tensors = tensors  # which the graphs do not own

    def run(self, name: str, given: list[Tensor]) -> Tensor:
        """What a graph gives."""
        [found] = self._graphs[name].boxed_run(given)
        return found

    def eval(self) -> "CompiledNet":
        """Itself: graphs have no other mode."""
        return self

    def start(self, given: Tokens | int, *, capacity: int, beams: int = 1) -> Cache:
        """As `EncoderDecoder.start` and `DecoderOnly.start`."""
        rows = given if isinstance(given, int) else given.ids.size(0)
        layers = [LayerShape(*layer) for layer in self.facts.cache_layers]
        cache = Cache.empty(layers, rows, capacity, beams, torch.empty(0))
        if isinstance(given, int):
            return cache
        real = torch.ones_like(given.ids, dtype=torch.bool) if given.real is None else given.real
        cross = self._graphs["encode"].boxed_run([given.ids, given.positions, real])
        return replace(cache, cross=cross, source_real=real)

    def decode(self, tokens: Tokens, cache: Cache) -> Float[Tensor, "N 1 V"]:
        """Logits after the last of some new tokens, which are written to the cache."""
        rows, length = tokens.ids.shape
        if length > 1 or rows < cache.num_sources * cache.beams:
            return self._read(tokens, cache, torch.tensor([-1]))
        shape = (cache.num_sources, -1)
        positions = tokens.positions.expand(rows, 1).reshape(shape).contiguous()
        given = [tokens.ids.reshape(shape).contiguous(), positions, *cache.tensors()]
        [logits] = self._graphs["step"].boxed_run(given)
        return logits[:, None]

    def head(self, logits: Tensor) -> Tensor:
        """`decode` gives logits already."""
        return logits

    def __call__(self, *given: Tensor) -> Float[Tensor, "B T V"]:
        """Logits of whole texts: `net(ids, lengths)`, or of source and target."""
        ids, lengths = given[len(given) // 2 - 1], given[-1]
        if self.facts.family == "encoder_decoder":
            start: Any = Tokens.from_ids(given[0], given[2])
        else:
            start = ids.size(0)
        cache = self.start(start, capacity=ids.size(1))
        return self._read(Tokens.from_ids(ids, lengths), cache, torch.arange(ids.size(1)))

    def _read(
        self, tokens: Tokens, cache: Cache, wanted: Int[Tensor, "R"]
    ) -> Float[Tensor, "B R V"]:
        """Logits after some of the new tokens, one row a text; -1 is the last."""
        ids, real = tokens.ids, tokens.real
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        positions = tokens.positions.expand(ids.shape)
        if ids.size(1) == 1:  # graphs have been told that there is more than one
            ids, positions = ids.repeat(1, 2), positions.repeat(1, 2)
            real = torch.cat([torch.zeros_like(real), real], dim=1)
            wanted = torch.ones_like(wanted)
        wanted = wanted % ids.size(1)
        given = [wanted, ids.contiguous(), positions.contiguous(), real.contiguous()]
        [logits] = self._graphs["read"].boxed_run([*given, *cache.tensors()])
        return logits


class Compiled(Eager):
    """A compiled net as an `Backend`: searches are the eager engine's own, its steps are graphs.

    Args:
        directory: of the form; weights: the model's own file.
    """

    name = "compiled"
    reads = frozenset()

    def __init__(
        self,
        directory: Path,
        weights: Path,
        facts: CompiledFacts,
        precision: str,
        settings: Settings,
    ) -> None:
        net = CompiledNet(directory, weights, facts)
        alone = replace(settings, threads=settings.threads or 1, workers=1)
        super().__init__(net, facts.max_length, settings=alone)
        self.two_stacks = facts.family == "encoder_decoder"
        self._precision = precision
        self._has_shortlist = (directory.parents[1] / SHORTLIST).is_file()

    @property
    def precision(self) -> str:
        """Of the weights."""
        return self._precision

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def unsupported_reasons(self, rows: list[list[int]], request: GenerationRequest) -> list[str]:
        """As `Backend.unsupported_reasons`."""
        found = [] if request.draft is None else ["it has no draft"]
        if request.options.coverage_penalty:
            found.append("it shows no attention")
        if self._has_shortlist and request.options.shortlist:
            found.append("it has no shortlist")
        if not self.two_stacks and any(
            len(row) + limit > self.max_length
            for row, limit in zip(rows, request.max_new_tokens, strict=True)
        ):
            found.append(f"a text may outgrow the {self.max_length} tokens of the net")
        return found

    def log_probs_of(self, batch: Batch) -> Callable[[slice], Float[Tensor, "n V"]]:
        """As `Eager.log_probs_of`; the graphs give the logits of all tokens at once."""
        sides = [batch.tokens] if batch.source is None else [batch.source, batch.tokens]
        ids = [side.ids for side in sides]
        logits = self.net(*ids, *(side.lengths for side in sides)).flatten(0, 1)
        logits = logits.index_select(0, batch.target_positions)
        return lambda rows: log_softmax(logits[rows])

    def _searched(
        self, rows: list[list[int]], request: GenerationRequest
    ) -> list[list[Hypothesis]]:
        """Greedy decoding without rules in a loop of its own, where the host has little to do."""
        options = request.options
        banned = [
            rule.tokens if isinstance(rule, BannedTokens) else None for rule in rules_of(request)
        ]
        is_plain = (
            options.rows == options.num_return == 1
            and not (options.draws or options.stop or request.required_ids)
            and request.output_prefixes is None
            and None not in banned
        )
        tokens = [_one(token) for each in banned for token in each or ()]
        if not is_plain or None in tokens:
            return super()._searched(rows, request)
        return [[each] for each in self._greedy(rows, request, tokens)]

    def _greedy(
        self, rows: list[list[int]], request: GenerationRequest, banned: list[Any]
    ) -> list[Hypothesis]:
        """One output for each row; `banned` ids are never written."""
        options = request.options
        begin, state = self.open(rows, request.decoder_start_ids, max(request.max_new_tokens), 1)
        search = read_request(begin, **self._search_arguments(rows, request))
        shortest = max(search.shortest)
        blocked = torch.tensor(banned, dtype=torch.long)
        blocked_at_first = torch.tensor([*banned, *request.eos_ids])
        found: list[tuple[list[int], list[float]]] = [([], []) for _ in rows]
        left, is_open = [*range(len(rows))], [True] * len(rows)
        tokens, length = begin, 0
        while left:
            logits = state.next_logits(tokens)
            sums = logits.logsumexp(-1) if options.scores else 0.0
            length += 1
            logits.index_fill_(1, blocked_at_first if length < shortest else blocked, -torch.inf)
            largest, tokens = first_largest(logits)
            log_probs = (largest[:, 0] - sums).tolist()
            for row, [token], part in zip(left, tokens.tolist(), log_probs, strict=True):
                if not is_open[row]:
                    continue
                if not part > -torch.inf:
                    raise UserError(f"the model gave {part} at step {length}")
                found[row][0].append(token)
                found[row][1].append(part if options.scores else math.nan)
                is_open[row] = search.end(row, found[row][0], None) is None
            opened = [is_open[row] for row in left]
            keep = sentences_to_keep(opened, not any(opened))
            if keep is not None:
                left = [left[place] for place in keep]
                if left:
                    state.select(torch.tensor(keep))
                    tokens = tokens[keep]
        score = request.score
        return [score.hypothesis(ids, parts, ids[-1] in request.eos_ids) for ids, parts in found]


def _one(banned: int | Sequence[int]) -> int | None:
    """The token of a banned sequence of one; None: it has more."""
    ids = [banned] if isinstance(banned, int) else banned
    return ids[0] if len(ids) == 1 else None


def open_graph(directory: Path, name: str) -> Any:
    """One of the graphs of a package, without its constants."""
    path = directory / GRAPHS
    if not path.is_file():
        raise UserError(f"{path}: no such file; make it again by `heedful optimize`")
    kernel = directory / KERNEL
    try:
        if kernel.is_file():
            # The graphs find it by its name. Were it global, torch would be too, and CTranslate2
            # would call functions of torch's that are called as its own are, and write nonsense.
            ctypes.CDLL(str(kernel))
        # Not `load_package`, which compiles probes to word a warning.
        return torch._C._aoti.AOTIModelPackageLoader(str(path), name, True, 1, -1)
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} is no whole package: {reason}") from None


def _tensors(weights: Path, own: Path, places: set[str]) -> dict[str, Tensor]:
    """Tensors by `model:name`, `packed:name` (of the model's, packed) and `own:name`."""
    found = {}
    for path, kinds in ((weights, ("model", "packed")), (own, ("own",))):
        try:
            with safe_open(path, framework="pt") as file:
                for place in places:
                    kind, name = place.split(":", 1)
                    if kind in kinds:
                        tensor = file.get_tensor(name)
                        found[place] = pack(tensor) if kind == "packed" else tensor
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not what was compiled with: {error}") from None
    return found
