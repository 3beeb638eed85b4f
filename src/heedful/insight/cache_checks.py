"""Check of cached decoding: outputs token by token equal those of whole prefixes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor

from heedful.backends.torch.cached_net import DecodingState
from heedful.insight import hugging_face
from heedful.insight.checks import Failed, Outcome, Skipped, check, distances
from heedful.insight.kind import parameters_of
from heedful.insight.probe import PADDING_SIDES, NetInputs, Probe
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.tokens import Tokens

# Rows to select before a step, by its number: two beams for each source, beams reordered, one
# source removed; then the beams of the others change. The beams of a source are adjacent, equally
# many for each.
_BEAMS = [0, 0, 1, 1, 2, 2]
_REORDERS: dict[int, list[int]] = {1: _BEAMS, 2: [1, 0, 3, 3, 4, 5], 3: [1, 0, 4, 5]}
_REORDERS |= {number: [[1, 0, 2, 2], [0, 0, 3, 2]][number % 2] for number in range(9, 999, 7)}

_GROWS = ", with a cache that begins with room for one token"

_Step = Callable[[Tensor], Tensor]  # new ids (N, t) -> logits (N, t, V) after each
_Reorder = Callable[[Tensor], None]  # row i continues the former row `rows[i]`
_Start = Callable[[Probe, "_Scenario"], tuple[_Step, _Reorder | None]]


@dataclass(frozen=True)
class _Scenario:
    """A scenario of decoding three rows.

    Attributes:
        steps: the number of new tokens at each step.
        source: the sources of an encoder-decoder.
        pads: for each row, the number of tokens of left padding in the first step.
        reorders: select rows before some steps (`_REORDERS`).
        note: description of the scenario, for messages.
        capacity: tokens of a row that the new cache has room for; None: all of them.
    """

    steps: Sequence[int]
    source: NetInputs = field(default_factory=lambda: NetInputs({}))
    pads: tuple[int, int, int] = (0, 0, 0)
    reorders: bool = True
    note: str = ""
    capacity: int | None = None

    @property
    def length(self) -> int:
        """Tokens of a row at the end."""
        return sum(self.steps)


@check(
    "cached = uncached",
    requirement="decoding token by token with a cache, also after reordering and when the cache "
    "grows, has the outputs of whole prefixes",
    hint="The position of a new token is off by one, keys are cached too early or too late, the "
    "causal mask is aligned to the wrong corner with fewer queries than keys, reordering leaves "
    "out a layer or the source, or a cache that grows or forgets what is outside of a window "
    "loses keys that are still needed.",
    single_hint="The position of a new token is off by one or counts padding, keys are cached "
    "too early or too late, the causal mask is aligned to the wrong corner with fewer queries "
    "than keys, reordering leaves out a layer or the padding, or a cache that grows or forgets "
    "what is outside of a window loses keys that are still needed.",
    needs=("causality", "one row, one token", "batch independence", "padding, left"),
    retry_in_double=True,
)
def cached_decoding(probe: Probe) -> Outcome:
    """Compare the logits of steps with a cache with those of whole prefixes."""
    if not probe.causal:
        raise Skipped("an encoder does not decode")
    start = _starter(probe)
    if start is None:
        begin = "rows" if probe.is_single_stack else "src, src_lengths"
        raise Skipped(f"the net has no start({begin}, capacity=...) and step(ids, cache)")
    make_scenarios = _decoder_scenarios if probe.is_single_stack else _encoder_decoder_scenarios
    worst, has_reorder, limits = 0.0, True, set()
    for scenario in make_scenarios(probe):
        grows = start is not _begin or scenario.capacity is None
        if not grows and probe.device.type != "cpu":
            limits.add("growth of the cache is tested on a CPU only")
            scenario, grows = replace(scenario, capacity=None), True
        try:
            error, where, reorder = _decode(probe, scenario, *start(probe, scenario))
        except Exception as raised:
            if grows:
                raise
            limits.add(f"beyond its capacity the cache raises {type(raised).__name__}")
            whole = replace(scenario, capacity=None)
            error, where, reorder = _decode(probe, whole, *start(probe, whole))
        if error > probe.tolerance:
            detail = f"{probe.outputs_name} {where} differ by {error:.1e}{scenario.note}"
            raise Failed(detail, error)
        worst, has_reorder = max(worst, error), reorder is not None
    if not has_reorder:
        limits.add("the cache has no reorder(rows)")
    more = f" ({'; '.join(sorted(limits))})" if limits else ""
    return f"equal, in {probe.at_lengths}{more}", worst


def _encoder_decoder_scenarios(probe: Probe) -> Iterator[_Scenario]:
    """Sources without padding, and with padding on either side; last a long target."""
    source, steps = NetInputs({"src": probe.batch(3).ids["src"]}), [1] * probe.width("tgt")
    yield _Scenario(steps, source)
    for where in PADDING_SIDES if "src_lengths" in probe.accepts else ():
        if probe.no_padding_reason("src", where) is None:
            padded = probe.pad(source, "src", probe.row_lengths("src"), where)
            yield _Scenario(steps, padded, note=f", source padded on the {where}")
    yield _Scenario([1] * probe.long_length, source, note=_GROWS, capacity=1)


def _decoder_scenarios(probe: Probe) -> Iterator[_Scenario]:
    """Prompts, steps of one and of more tokens; reordering, with left padding if supported.

    For short and for long texts.
    """
    width, length = probe.width("ids"), probe.long_length
    yield _Scenario([2, *[1] * (width - 4), 2], reorders=False)
    net: Any = probe.net
    takes_pads = _starter(probe) is not _begin or "starts" in parameters_of(net.start)
    is_padded = takes_pads and probe.no_padding_reason("ids", "left") is None
    pads = (0, 1, 2) if is_padded else (0, 0, 0)
    note = ", the prompt padded on the left" if is_padded else ""
    yield _Scenario([3, *[1] * (width - 3)], pads=pads, note=note)
    chunk = (length - 4) // 3
    steps = [1, 1, 1, chunk, 1, chunk, length - 4 - 2 * chunk]
    yield _Scenario(steps, reorders=False, note=_GROWS, capacity=1)
    yield _Scenario([3, *[1] * (length - 3)], pads=pads, note=note + _GROWS, capacity=1)


def _starter(probe: Probe) -> _Start | None:
    """The function that begins to decode with a cache of the net's kind; None: it has none."""
    if isinstance(probe.net, DecoderOnly | EncoderDecoder):
        return _begin_heedful_net
    if hasattr(probe.net, "start") and hasattr(probe.net, "step"):
        return _begin
    is_hugging_face = probe.call in (hugging_face.call_one_stack, hugging_face.call_two_stacks)
    if is_hugging_face and "past_key_values" in parameters_of(probe.net.forward):
        return _begin_hugging_face
    return None


def _begin_hugging_face(probe: Probe, scenario: _Scenario) -> tuple[_Step, _Reorder]:
    """Start decoding with a net of transformers."""
    starts = torch.tensor(scenario.pads, device=probe.device) if any(scenario.pads) else None
    given = scenario.source
    source = given.ids.get("src"), given.lengths.get("src"), given.padding_side
    cache = hugging_face.PastKeyValues(probe.net, starts, *source)
    return cache.step, cache.reorder


def _begin(probe: Probe, scenario: _Scenario) -> tuple[_Step, _Reorder | None]:
    """Start decoding with a net's `start` and `step`; `reorder(rows)` of its cache is optional."""
    net, capacity = cast(Any, probe.net), scenario.capacity or scenario.length
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
    net, longest = cast(Any, probe.net), scenario.length
    rows: Any = 3
    if not probe.is_single_stack:
        source = scenario.source.ids["src"], scenario.source.lengths.get("src")
        rows = Tokens.from_ids(*source, scenario.source.padding_side)
    beams = 2 if scenario.reorders else 1
    capacity = scenario.capacity or longest * beams
    cache = net.start(rows, capacity=capacity, branches=beams)
    pads = torch.tensor(scenario.pads, device=probe.device) if any(scenario.pads) else None
    state = DecodingState(net, cache, longest=longest, left_padding=pads)

    def reorder(rows: Int[Tensor, "M"]) -> None:
        if rows.tolist() != _BEAMS:  # in the first step a source has one row
            state.select(rows[::2] // 2)
            state.reorder((rows % 2).view(-1, 2))

    return lambda ids: net.head(net.decode(state.tokens(ids), state.cache)), reorder


@torch.no_grad()
def _decode(
    probe: Probe, scenario: _Scenario, decode: _Step, reorder: _Reorder | None
) -> tuple[float, str, _Reorder | None]:
    """The largest difference between steps and whole prefixes, its position, and `reorder`.

    The outputs of a row's earlier steps are reordered with it. Short prefixes are compared after
    each step, a long one at the end.
    """
    plan = _REORDERS if scenario.reorders and reorder is not None else {}
    side = probe.output_side
    owners = torch.arange(3, device=probe.device)
    pads = torch.tensor(scenario.pads, device=probe.device)
    prefixes, outputs = probe.ids(side, 3, 0), None
    worst, where = 0.0, ""
    for number, count in enumerate(scenario.steps):
        if number in plan and reorder is not None:
            rows = torch.tensor(plan[number], device=probe.device)
            reorder(rows)
            owners, prefixes = owners[rows], prefixes[rows]
            outputs = None if outputs is None else outputs[rows]
        tokens = probe.ids(side, owners.numel(), count)
        if number == 0 and probe.pad_id is not None:
            tokens[torch.arange(count, device=probe.device) < pads[:, None]] = probe.pad_id
        prefixes = torch.cat([prefixes, tokens], dim=1)
        # No padding after the first tokens.
        step = decode(tokens)[:, max(scenario.pads) if number == 0 else 0 :]
        outputs = step if outputs is None else torch.cat([outputs, step], dim=1)
        size = prefixes.size(1)
        if probe.length < size < scenario.length:
            continue
        batch = scenario.source.select_rows(owners).replace_ids(side, prefixes)
        if any(scenario.pads):
            batch = replace(batch, lengths={side: size - pads[owners]}, padding_side="left")
        whole = probe.outputs(batch)[:, -outputs.size(1) :]
        errors = distances(whole, outputs)
        if float(errors.max()) > worst:
            position = size - outputs.size(1) + int(errors.argmax())
            reordered = " (after a reorder)" if any(p <= number for p in plan) else ""
            worst, where = float(errors.max()), f"at {position}{reordered}"
        if worst > probe.tolerance:
            break
    return worst, where, reorder
