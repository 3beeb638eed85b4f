"""The check of cached decoding: what is written token by token is what whole prefixes give."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from heedful.backends.torch.state import DecodingState
from heedful.insight.checks import Failed, Seen, Skipped, check, distance
from heedful.insight.kind import parameters_of
from heedful.insight.probe import PADDING_SIDES, Batch, Probe
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import Tokens

# Before which step which rows go on: every source gets two beams, beams change places, one source
# leaves. The rows of a source stand side by side, equally many for each.
_REORDERS: dict[int, list[int]] = {1: [0, 0, 1, 1, 2, 2], 2: [1, 0, 3, 3, 4, 5], 3: [1, 0, 4, 5]}

_Step = Callable[[Tensor], Tensor]  # new ids (N, t) -> logits (N, t, V) after each
_Reorder = Callable[[Tensor], None]  # row i goes on from what was row `rows[i]`


@dataclass(frozen=True)
class _Way:
    """One way to decode three rows.

    Attributes:
        steps: how many tokens are new at each step.
        source: what every call of the whole net is given besides: the sources.
        pads: of each row, how many tokens of the first step are padding on the left.
        reorders: whether rows go on in another order.
        note: how this way differs from the plain one.
    """

    steps: Sequence[int]
    source: Batch = field(default_factory=lambda: Batch({}))
    pads: tuple[int, int, int] = (0, 0, 0)
    reorders: bool = True
    note: str = ""


@check(
    "cached = uncached",
    holds="decoding token by token with a cache, also reordered, gives what whole prefixes give",
    hint="The position of a new token is off by one, keys are cached before or after they "
    "should be, the causal mask is aligned to the wrong corner when there are fewer "
    "queries than keys, or a reorder forgets a layer or the source.",
    single_hint="The position of a new token is off by one or counts padding, keys are cached "
    "before or after they should be, the causal mask is aligned to the wrong corner when there "
    "are fewer queries than keys, or a reorder forgets a layer or where the padding is.",
    needs=("causality",),
)
def cached(probe: Probe) -> Seen:
    """Step by step = whole prefixes, also after rows were reordered."""
    if not probe.causal:
        raise Skipped("an encoder: nothing is decoded")
    own = isinstance(probe.net, DecoderOnly | EncoderDecoder)
    if not own and not (hasattr(probe.net, "start") and hasattr(probe.net, "step")):
        begin = "rows" if probe.single else "src, src_lengths"
        raise Skipped(f"the net has no start({begin}, capacity=...) and step(ids, cache)")
    worst = 0.0
    for way in _of_one_stack(probe) if probe.single else _of_two_stacks(probe):
        step, reorder = _begin_ours(probe, way) if own else _begin(probe, way)
        error, where = _decode(probe, way, step, reorder)
        if error > probe.tolerance:
            seen = f"{probe.outputs_name} at {where} differ by {error:.1e}{way.note}"
            raise Failed(seen, error)
        worst = max(worst, error)
    return "equal (the cache has no reorder(rows))" if reorder is None else "equal", worst


def _of_two_stacks(probe: Probe) -> Iterator[_Way]:
    """Sources without padding, and with it on either side."""
    source, steps = Batch({"src": probe.batch(3).ids["src"]}), [1] * probe.width("tgt")
    yield _Way(steps, source)
    for where in PADDING_SIDES if "src_lengths" in probe.accepts else ():
        if probe.cannot_pad("src", where) is None:
            padded = probe.padded(source, "src", probe.ragged("src"), where)
            yield _Way(steps, padded, note=f", source padded on the {where}")


def _of_one_stack(probe: Probe) -> Iterator[_Way]:
    """A prompt, single tokens and two at once; and rows that move, padded on the left if at all."""
    width = probe.width("ids")
    yield _Way([2, *[1] * (width - 4), 2], reorders=False)
    steps = [3, *[1] * (width - 3)]
    net: Any = probe.net
    takes_pads = isinstance(net, DecoderOnly) or "starts" in parameters_of(net.start)
    if takes_pads and probe.cannot_pad("ids", "left") is None:
        yield _Way(steps, pads=(0, 1, 2), note=", the prompt padded on the left")
    else:
        yield _Way(steps)


def _begin(probe: Probe, way: _Way) -> tuple[_Step, _Reorder | None]:
    """A net with `start` and `step`, and a cache that may have `reorder(rows)`."""
    net, capacity = cast(Any, probe.net), probe.width(probe.written)
    if probe.single:
        starts = {"starts": torch.tensor(way.pads, device=probe.device)} if any(way.pads) else {}
        cache = net.start(3, capacity=capacity, **starts)
    else:
        side = {"padding_side": "left"} if way.source.padding_side == "left" else {}
        given = way.source.ids["src"], way.source.lengths.get("src")
        cache = net.start(*given, capacity=capacity, **side)
    return lambda ids: net.step(ids, cache), getattr(cache, "reorder", None)


def _begin_ours(probe: Probe, way: _Way) -> tuple[_Step, _Reorder | None]:
    """A net of ours, whose cache knows beams."""
    net, longest = cast(Any, probe.net), probe.width(probe.written)
    rows: Any = 3
    if not probe.single:
        given = way.source.ids["src"], way.source.lengths.get("src")
        rows = Tokens.from_ids(*given, way.source.padding_side)
    beams = 2 if way.reorders else 1
    cache = net.start(rows, capacity=longest * beams, beams=beams)
    pads = torch.tensor(way.pads, device=probe.device) if any(way.pads) else None
    state = DecodingState(net, cache, longest=longest, left_padding=pads)

    def reorder(rows: Int[Tensor, "M"]) -> None:
        if rows.tolist() != _REORDERS[1]:  # the first token was that of all beams of a source
            state.select(rows[::2] // 2)
            state.reorder((rows % 2).view(-1, 2))

    return lambda ids: net.head(net.decode(state.tokens(ids), state.cache)), reorder


@torch.no_grad()
def _decode(probe: Probe, way: _Way, decode: _Step, reorder: _Reorder | None) -> tuple[float, str]:
    """Largest difference of a step from whole prefixes, and where it was."""
    plan = _REORDERS if way.reorders else {}
    owners = torch.arange(3, device=probe.device)
    pads = torch.tensor(way.pads, device=probe.device)
    prefixes = probe.ids(probe.written, 3, 0)
    worst, where = 0.0, ""
    for number, count in enumerate(way.steps):
        if number in plan and reorder is not None:
            rows = torch.tensor(plan[number], device=probe.device)
            reorder(rows)
            owners, prefixes = owners[rows], prefixes[rows]
        tokens = probe.ids(probe.written, owners.numel(), count)
        if number == 0 and probe.pad_id is not None:
            tokens[torch.arange(count, device=probe.device) < pads[:, None]] = probe.pad_id
        prefixes = torch.cat([prefixes, tokens], dim=1)
        batch = way.source.rows(owners).replaced(probe.written, prefixes)
        if any(way.pads):
            lengths = {probe.written: prefixes.size(1) - pads[owners]}
            batch = replace(batch, lengths=lengths, padding_side="left")
        whole, step = probe.outputs(batch)[:, -count:], decode(tokens)
        real = max(way.pads) if number == 0 else 0  # from here on all rows are
        error = distance(whole[:, real:], step[:, real:])
        if error > worst:
            reordered = " (after a reorder)" if reorder and any(p <= number for p in plan) else ""
            worst, where = error, f"step {number}{reordered}"
    return worst, where
