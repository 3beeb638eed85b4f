"""The check of cached decoding: what is written token by token is what whole prefixes give."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from heedful.insight.checks import Failed, Seen, Skipped, distance
from heedful.insight.kind import parameters_of
from heedful.insight.probe import PADDING_SIDES, Batch, Probe
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.cache import Cache
from heedful.parts.tokens import Tokens

# Before which step which rows go on: every source gets two beams, beams change places, one source
# leaves. The rows of a source stand side by side, equally many for each.
_REORDERS: dict[int, list[int]] = {1: [0, 0, 1, 1, 2, 2], 2: [1, 0, 3, 3, 4, 5], 3: [1, 0, 4, 5]}


@dataclass(frozen=True)
class _Decoding:
    """One way to decode three rows.

    Attributes:
        arguments, keywords: what `start` is given by place and by name.
        steps: how many tokens are new at each step.
        known: what every call of the whole net is given besides: the sources.
        pads: of each row, how many tokens of the first step are padding on the left.
        note: how this way differs from the plain one.
    """

    arguments: tuple[Any, ...]
    steps: Sequence[int]
    keywords: dict[str, Any] = field(default_factory=dict)
    known: Batch = field(default_factory=lambda: Batch({}))
    pads: tuple[int, int, int] = (0, 0, 0)
    note: str = ""


def cached(probe: Probe) -> Seen:
    """Step by step = whole prefixes, also after rows were reordered."""
    if not probe.kind.causal:
        raise Skipped("an encoder: nothing is decoded")
    if not hasattr(probe.net, "start") or not hasattr(_stepped(probe), "step"):
        begin = "rows" if probe.kind.single else "src, src_lengths"
        raise Skipped(f"the net has no start({begin}, capacity=...) and step(ids, cache)")
    worst, reorders = 0.0, False
    for way in _of_one_stack(probe) if probe.kind.single else _of_two_stacks(probe):
        error, where, reorders = _decode(probe, way)
        if error > probe.tolerance:
            seen = f"{probe.outputs_name} at {where} differ by {error:.1e}{way.note}"
            raise Failed(seen, error)
        worst = max(worst, error)
    return "equal" if reorders else "equal (the cache has no reorder(rows))", worst


def _of_two_stacks(probe: Probe) -> Iterator[_Decoding]:
    """Sources without padding, and with it on either side."""
    source, steps = Batch({"src": probe.batch(3).ids["src"]}), [1] * probe.width("tgt")
    yield _Decoding((source.ids["src"], None), steps, known=source)
    lengths = [probe.width("src") - cut for cut in (0, 1, 3)]
    for where in PADDING_SIDES if "src_lengths" in probe.accepts else ():
        if probe.cannot_pad("src", where) is None:
            padded = probe.padded(source, "src", lengths, where)
            begin = padded.ids["src"], padded.lengths["src"]
            keywords = {} if where == "right" else {"padding_side": "left"}
            note = f", source padded on the {where}"
            yield _Decoding(begin, steps, keywords, padded, note=note)


def _of_one_stack(probe: Probe) -> Iterator[_Decoding]:
    """A prompt, single tokens and two at once; and a prompt that is padded on the left."""
    width = probe.width("ids")
    yield _Decoding((3,), [2, *[1] * (width - 4), 2])
    takes_starts = "starts" in parameters_of(_stepped(probe).start)
    if takes_starts and probe.cannot_pad("ids", "left") is None:
        pads = (0, 1, 2)
        starts = {"starts": torch.tensor(pads, device=probe.device)}
        note = ", the prompt padded on the left"
        yield _Decoding((3,), [3, *[1] * (width - 3)], starts, pads=pads, note=note)


@torch.no_grad()
def _decode(probe: Probe, way: _Decoding) -> tuple[float, str, bool]:
    """Largest difference of a step from whole prefixes, where it was, and whether rows moved."""
    net = _stepped(probe)
    cache = net.start(*way.arguments, capacity=probe.width(probe.written), **way.keywords)
    plan = _REORDERS if hasattr(cache, "reorder") else {}
    owners = torch.arange(3, device=probe.device)
    pads = torch.tensor(way.pads, device=probe.device)
    prefixes = probe.ids(probe.written, 3, 0)
    worst, where = 0.0, ""
    for number, count in enumerate(way.steps):
        if number in plan:
            rows = torch.tensor(plan[number], device=probe.device)
            cache.reorder(rows)
            owners, prefixes = owners[rows], prefixes[rows]
        tokens = probe.ids(probe.written, owners.numel(), count)
        if number == 0 and probe.pad_id is not None:
            tokens[torch.arange(count, device=probe.device) < pads[:, None]] = probe.pad_id
        prefixes = torch.cat([prefixes, tokens], dim=1)
        batch = way.known.rows(owners).replaced(probe.written, prefixes)
        if any(way.pads):
            lengths = {probe.written: prefixes.size(1) - pads[owners]}
            batch = replace(batch, lengths=lengths, padding_side="left")
        whole, step = probe.outputs(batch)[:, -count:], net.step(tokens, cache)
        real = max(way.pads) if number == 0 else 0  # from here on all rows are
        error = distance(whole[:, real:], step[:, real:])
        if error > worst:
            reordered = " (after a reorder)" if any(p <= number for p in plan) else ""
            worst, where = error, f"step {number}{reordered}"
    return worst, where, bool(plan)


class _OwnCache:
    """A cache of ours, rows of which are reordered, and how many tokens it holds."""

    def __init__(self, cache: Cache, starts: Tensor | None) -> None:
        self.cache, self.starts, self.filled = cache, starts, 0

    def reorder(self, rows: Tensor) -> None:
        self.cache = self.cache.select(rows)
        self.starts = None if self.starts is None else self.starts[rows]


class _OwnNet:
    """A net of ours with `start` and `step` on ids."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def start(
        self, *begin: Any, capacity: int, starts: Any = None, padding_side: Any = "right"
    ) -> _OwnCache:
        if len(begin) == 2:
            src, lengths = begin
            begin = (Tokens.of(src, lengths, padding_side),)
        return _OwnCache(self.net.start(*begin, capacity=capacity), starts)

    def step(self, ids: Tensor, own: _OwnCache) -> Tensor:
        columns = torch.arange(own.filled, own.filled + ids.size(1), device=ids.device)[None]
        own.filled += ids.size(1)
        tokens = Tokens(ids, columns)
        if own.starts is not None:
            positions = columns - own.starts[:, None]
            tokens = Tokens(ids, positions.clamp(min=0), positions >= 0)
        logits: Tensor = self.net.head(self.net.decode(tokens, own.cache))
        return logits


def _stepped(probe: Probe) -> Any:
    own = isinstance(probe.net, DecoderOnly | EncoderDecoder)
    return _OwnNet(probe.net) if own else probe.net
