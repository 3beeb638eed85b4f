"""The check of cached decoding: what is written token by token is what whole prefixes give."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from heedful.insight.checks import check, distance, failed, passed, skipped
from heedful.insight.probe import PADDING_SIDES, Batch, Probe
from heedful.insight.report import CheckResult
from heedful.insight.sight_checks import causality

# Before which step which rows go on: every source gets two beams, beams change places, one source
# leaves. The rows of a source stand side by side, equally many for each.
_REORDERS: dict[int, list[int]] = {1: [0, 0, 1, 1, 2, 2], 2: [1, 0, 3, 3, 4, 5], 3: [1, 0, 4, 5]}


@dataclass(frozen=True)
class _Decoding:
    """One way to decode three rows.

    Attributes:
        begin: what `start` is given by place; keywords: and by name.
        steps: how many tokens are new at each step.
        known: what every call of the whole net is given besides: the sources.
        pads: of each row, how many tokens of the first step are padding on the left.
        told: how this way differs from the plain one.
    """

    begin: tuple[Any, ...]
    keywords: dict[str, Any]
    steps: Sequence[int]
    known: Batch = field(default_factory=lambda: Batch({}))
    pads: tuple[int, int, int] = (0, 0, 0)
    told: str = ""


@check(
    "cached = uncached",
    "decoding token by token with a cache, also reordered, gives what whole prefixes give",
    "The position of a new token is off by one, keys are cached before or after they should be, "
    "the causal mask is aligned to the wrong corner when there are fewer queries than keys, or a "
    "reorder forgets a layer or the source.",
    [causality],
    single_hint="The position of a new token is off by one or counts padding, keys are cached "
    "before or after they should be, the causal mask is aligned to the wrong corner when there are "
    "fewer queries than keys, or a reorder forgets a layer or where the padding is.",
)
def cached(probe: Probe) -> CheckResult:
    if not probe.kind.causal:
        return skipped("an encoder: nothing is decoded")
    if not hasattr(probe.net, "start") or not hasattr(probe.net, "step"):
        begin = "rows" if probe.kind.single else "src, src_lengths"
        return skipped(f"the net has no start({begin}, capacity=...) and step(ids, cache)")
    worst, reorders = 0.0, False
    for way in _of_one_stack(probe) if probe.kind.single else _of_two_stacks(probe):
        error, where, reorders = _decode(probe, way)
        if error > probe.tolerance:
            outputs = probe.kind.words["outputs"]
            return failed(f"{outputs} at {where} differ by {error:.1e}{way.told}", error)
        worst = max(worst, error)
    return passed("equal" if reorders else "equal (the cache has no reorder(rows))", worst)


def _of_two_stacks(probe: Probe) -> Iterator[_Decoding]:
    """Sources without padding, and with it on either side."""
    batch, steps = probe.batch(3), [1] * probe.width("tgt")
    source = Batch({"src": batch.ids["src"]})
    yield _Decoding((source.ids["src"], None), {}, steps, source)
    lengths = [probe.width("src") - cut for cut in (0, 1, 3)]
    for where in PADDING_SIDES if "src_lengths" in probe.accepts else ():
        if probe.cannot_pad("src", where) is None:
            padded = probe.padded(source, "src", lengths, where)
            begin = padded.ids["src"], padded.lengths["src"]
            keywords = {} if where == "right" else {"padding_side": "left"}
            told = f", source padded on the {where}"
            yield _Decoding(begin, keywords, steps, padded, told=told)


def _of_one_stack(probe: Probe) -> Iterator[_Decoding]:
    """A prompt, single tokens and two at once; and a prompt that is padded on the left."""
    width = probe.width("ids")
    yield _Decoding((3,), {}, [2, *[1] * (width - 4), 2])
    named = inspect.signature(probe.net.start).parameters  # type: ignore[arg-type]
    if "starts" in named and probe.cannot_pad("ids", "left") is None:
        pads = (0, 1, 2)
        starts = {"starts": torch.tensor(pads, device=probe.device)}
        steps = [3, *[1] * (width - 3)]
        yield _Decoding((3,), starts, steps, pads=pads, told=", the prompt padded on the left")


def _decode(probe: Probe, way: _Decoding) -> tuple[float, str, bool]:
    """Largest difference of a step from whole prefixes, where it was, and whether rows moved."""
    with torch.no_grad():
        capacity = probe.width(probe.written)
        cache = probe.net.start(  # type: ignore[operator]
            *way.begin, capacity=capacity, **way.keywords
        )
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
            whole = probe.outputs(_whole(probe, way, owners, prefixes))[:, -count:]
            step = probe.net.step(tokens, cache)  # type: ignore[operator]
            real = max(way.pads) if number == 0 else 0  # from here on all rows are
            error = distance(whole[:, real:], step[:, real:])
            if error > worst:
                reordered = " (after a reorder)" if any(p <= number for p in plan) else ""
                worst, where = error, f"step {number}{reordered}"
    return worst, where, bool(plan)


def _whole(probe: Probe, way: _Decoding, owners: torch.Tensor, prefixes: torch.Tensor) -> Batch:
    """What the net is given at once: the sources of the rows, and all tokens so far."""
    batch = way.known.rows(owners).replaced(probe.written, prefixes)
    if not any(way.pads):
        return batch
    pads = torch.tensor(way.pads, device=probe.device)[owners]
    return replace(batch, lengths={probe.written: prefixes.size(1) - pads}, padding_side="left")
