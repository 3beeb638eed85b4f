"""Check of cached decoding: outputs token by token equal those of whole prefixes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from heedful.backends.torch.state import DecodingState
from heedful.insight.checks import Failed, Outcome, Skipped, check, distance
from heedful.insight.kind import parameters_of
from heedful.insight.probe import PADDING_SIDES, NetInputs, Probe
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import Tokens

# Rows to select before a step, by its number: two beams for each source, beams reordered, one
# source removed. The beams of a source are adjacent, equally many for each.
_REORDERS: dict[int, list[int]] = {1: [0, 0, 1, 1, 2, 2], 2: [1, 0, 3, 3, 4, 5], 3: [1, 0, 4, 5]}

_Step = Callable[[Tensor], Tensor]  # new ids (N, t) -> logits (N, t, V) after each
_Reorder = Callable[[Tensor], None]  # row i continues the former row `rows[i]`


@dataclass(frozen=True)
class _Scenario:
    """A scenario of decoding three rows.

    Attributes:
        steps: the number of new tokens at each step.
        source: the sources of an encoder-decoder.
        pads: for each row, the number of tokens of left padding in the first step.
        reorders: select rows before some steps (`_REORDERS`).
        note: description of the scenario, for messages.
    """

    steps: Sequence[int]
    source: NetInputs = field(default_factory=lambda: NetInputs({}))
    pads: tuple[int, int, int] = (0, 0, 0)
    reorders: bool = True
    note: str = ""


@check(
    "cached = uncached",
    requirement="decoding token by token with a cache, also after reordering, has the "
    "outputs of whole prefixes",
    hint="The position of a new token is off by one, keys are cached too early or too late, the "
    "causal mask is aligned to the wrong corner with fewer queries than keys, or reordering "
    "leaves out a layer or the source.",
    single_hint="The position of a new token is off by one or counts padding, keys are cached "
    "too early or too late, the causal mask is aligned to the wrong corner with fewer queries "
    "than keys, or reordering leaves out a layer or the padding.",
    needs=("causality",),
)
def cached_decoding(probe: Probe) -> Outcome:
    """Compare the logits of steps with a cache with those of whole prefixes."""
    if not probe.causal:
        raise Skipped("an encoder does not decode")
    is_heedful_net = isinstance(probe.net, DecoderOnly | EncoderDecoder)
    if not is_heedful_net and not (hasattr(probe.net, "start") and hasattr(probe.net, "step")):
        begin = "rows" if probe.is_single_stack else "src, src_lengths"
        raise Skipped(f"the net has no start({begin}, capacity=...) and step(ids, cache)")
    worst = 0.0
    make_scenarios = _decoder_scenarios if probe.is_single_stack else _encoder_decoder_scenarios
    start = _begin_heedful_net if is_heedful_net else _begin
    for scenario in make_scenarios(probe):
        step, reorder = start(probe, scenario)
        error, where = _decode(probe, scenario, step, reorder)
        if error > probe.tolerance:
            detail = f"{probe.outputs_name} at {where} differ by {error:.1e}{scenario.note}"
            raise Failed(detail, error)
        worst = max(worst, error)
    return "equal (the cache has no reorder(rows))" if reorder is None else "equal", worst


def _encoder_decoder_scenarios(probe: Probe) -> Iterator[_Scenario]:
    """Sources without padding, and with padding on either side."""
    source, steps = NetInputs({"src": probe.batch(3).ids["src"]}), [1] * probe.width("tgt")
    yield _Scenario(steps, source)
    for where in PADDING_SIDES if "src_lengths" in probe.accepts else ():
        if probe.no_padding_reason("src", where) is None:
            padded = probe.pad(source, "src", probe.row_lengths("src"), where)
            yield _Scenario(steps, padded, note=f", source padded on the {where}")


def _decoder_scenarios(probe: Probe) -> Iterator[_Scenario]:
    """Prompts, steps of one and of two tokens; reordering, with left padding if supported."""
    width = probe.width("ids")
    yield _Scenario([2, *[1] * (width - 4), 2], reorders=False)
    steps = [3, *[1] * (width - 3)]
    net: Any = probe.net
    takes_pads = isinstance(net, DecoderOnly) or "starts" in parameters_of(net.start)
    if takes_pads and probe.no_padding_reason("ids", "left") is None:
        yield _Scenario(steps, pads=(0, 1, 2), note=", the prompt padded on the left")
    else:
        yield _Scenario(steps)


def _begin(probe: Probe, scenario: _Scenario) -> tuple[_Step, _Reorder | None]:
    """Start decoding with a net's `start` and `step`; `reorder(rows)` of its cache is optional."""
    net, capacity = cast(Any, probe.net), probe.width(probe.output_side)
    if probe.is_single_stack:
        pads = torch.tensor(scenario.pads, device=probe.device)
        starts = {"starts": pads} if any(scenario.pads) else {}
        cache = net.start(3, capacity=capacity, **starts)
    else:
        side = {"padding_side": "left"} if scenario.source.padding_side == "left" else {}
        source = scenario.source.ids["src"], scenario.source.lengths.get("src")
        cache = net.start(*source, capacity=capacity, **side)
    return lambda ids: net.step(ids, cache), getattr(cache, "reorder", None)


def _begin_heedful_net(probe: Probe, scenario: _Scenario) -> tuple[_Step, _Reorder | None]:
    """Start decoding with one of heedful's nets, whose cache supports beams."""
    net, longest = cast(Any, probe.net), probe.width(probe.output_side)
    rows: Any = 3
    if not probe.is_single_stack:
        source = scenario.source.ids["src"], scenario.source.lengths.get("src")
        rows = Tokens.from_ids(*source, scenario.source.padding_side)
    beams = 2 if scenario.reorders else 1
    cache = net.start(rows, capacity=longest * beams, beams=beams)
    pads = torch.tensor(scenario.pads, device=probe.device) if any(scenario.pads) else None
    state = DecodingState(net, cache, longest=longest, left_padding=pads)

    def reorder(rows: Int[Tensor, "M"]) -> None:
        if rows.tolist() != _REORDERS[1]:  # in the first step a source has one row
            state.select(rows[::2] // 2)
            state.reorder((rows % 2).view(-1, 2))

    return lambda ids: net.head(net.decode(state.tokens(ids), state.cache)), reorder


@torch.no_grad()
def _decode(
    probe: Probe, scenario: _Scenario, decode: _Step, reorder: _Reorder | None
) -> tuple[float, str]:
    """The largest difference between a step and the whole prefix, and the step's name."""
    plan = _REORDERS if scenario.reorders else {}
    owners = torch.arange(3, device=probe.device)
    pads = torch.tensor(scenario.pads, device=probe.device)
    prefixes = probe.ids(probe.output_side, 3, 0)
    worst, where = 0.0, ""
    for number, count in enumerate(scenario.steps):
        if number in plan and reorder is not None:
            rows = torch.tensor(plan[number], device=probe.device)
            reorder(rows)
            owners, prefixes = owners[rows], prefixes[rows]
        tokens = probe.ids(probe.output_side, owners.numel(), count)
        if number == 0 and probe.pad_id is not None:
            tokens[torch.arange(count, device=probe.device) < pads[:, None]] = probe.pad_id
        prefixes = torch.cat([prefixes, tokens], dim=1)
        batch = scenario.source.select_rows(owners).replace_ids(probe.output_side, prefixes)
        if any(scenario.pads):
            lengths = {probe.output_side: prefixes.size(1) - pads[owners]}
            batch = replace(batch, lengths=lengths, padding_side="left")
        whole, step = probe.outputs(batch)[:, -count:], decode(tokens)
        first_real = max(scenario.pads) if number == 0 else 0  # no padding from here on
        error = distance(whole[:, first_real:], step[:, first_real:])
        if error > worst:
            reordered = " (after a reorder)" if reorder and any(p <= number for p in plan) else ""
            worst, where = error, f"step {number}{reordered}"
    return worst, where
