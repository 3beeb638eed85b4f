"""How the checks reach a net: a copy of it, the ways it can be called, and ids to call it with."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.errors import UserError
from heedful.insight.kind import LENGTHS, SIZES, Kind, Outputs, Side, Stacks, kind_of
from heedful.insight.lookups import Lookups

PaddingSide = Literal["right", "left"]
Call = Callable[..., Tensor]
# Above the rounding of what a net that is in fp64 still does in fp32.
_FINE = 2e-6
IGNORED = -100  # the label of positions that a loss leaves out
PADDING_SIDES: tuple[PaddingSide, PaddingSide] = ("right", "left")


@dataclass(frozen=True)
class Batch:
    """What one call is given: the ids of each side. Sides without lengths hold real tokens only."""

    ids: dict[Side, Int[Tensor, "B _"]]
    lengths: dict[Side, Int[Tensor, "B"]] = field(default_factory=dict)
    padding_side: PaddingSide = "right"

    def replaced(self, side: Side, ids: Int[Tensor, "B _"]) -> "Batch":
        """With other tokens on one side."""
        return replace(self, ids={**self.ids, side: ids})

    def rows(self, which: Any) -> "Batch":
        """Some of the rows, by a slice or a tensor of their numbers."""
        return replace(
            self,
            ids={side: ids[which] for side, ids in self.ids.items()},
            lengths={side: lengths[which] for side, lengths in self.lengths.items()},
        )


@dataclass
class Probe:
    """A private copy of the net in evaluation mode, and everything that is known about it.

    Attributes:
        call: `call(net, src, tgt, **keywords)`, or `call(net, ids, **keywords)`.
        accepts: those keywords of the sides' lengths and `padding_side` that it takes.
        pad_id: the id that padding is shown as; None: any id, as lengths tell what is real.
        left_padding: whether the net claims to be right for batches padded on the left.
        vocab_sizes: of each side.
        length: the longest sequence that it is shown, padding included.
        tolerance: largest difference, in standard deviations of the outputs, that is rounding.
    """

    net: nn.Module
    kind: Kind
    call: Call
    accepts: frozenset[str]
    pad_id: int | None
    left_padding: bool
    vocab_sizes: dict[Side, int]
    length: int
    tolerance: float
    fresh: bool
    overfit: bool
    overfit_seconds: float
    generator: torch.Generator

    @property
    def written(self) -> Side:
        """The side whose positions the outputs stand at."""
        return self.kind.written

    @property
    def device(self) -> torch.device:
        """Where the net is."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))

    def width(self, side: Side) -> int:
        """Real tokens of a row, so that three of padding still fit; sides differ: mix-ups show."""
        return self.length - (3 if side == "src" else 4)

    def tokens(self, side: Side) -> Int[Tensor, "n"]:
        """The ids that stand for real tokens: all but those of padding."""
        return torch.tensor(real_tokens(self.net, self.vocab_sizes[side], self.pad_id))

    def ids(self, side: Side, rows: int, width: int) -> Int[Tensor, "{rows} {width}"]:
        """Random real tokens, within a row all different as far as the vocabulary goes."""
        tokens = self.tokens(side)
        picks = [torch.randperm(len(tokens), generator=self.generator) for _ in range(rows)]
        column = torch.arange(width) % len(tokens)
        return torch.stack([tokens[pick[column]] for pick in picks]).to(self.device)

    def others(self, side: Side, ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """For each real token another one."""
        tokens = self.tokens(side)
        following = torch.zeros(self.vocab_sizes[side], dtype=torch.int64)
        following[tokens] = tokens.roll(-1)
        return following.to(ids.device)[ids]

    def batch(self, rows: int) -> Batch:
        """Random sequences without padding."""
        return Batch({side: self.ids(side, rows, self.width(side)) for side in self.kind.sides})

    def pad(
        self,
        side: Side,
        ids: Int[Tensor, "B T"],
        lengths: Sequence[int],
        width: int,
        where: PaddingSide = "right",
    ) -> Int[Tensor, "B {width}"]:
        """The first `lengths` tokens of each row, padded to `width`.

        Padding is `pad_id`; where lengths tell what is real it is random tokens, as then the ids
        must not matter.
        """
        if self.pad_id is None:
            padded = self.ids(side, ids.size(0), width)
        else:
            padded = ids.new_full((ids.size(0), width), self.pad_id)
        for row, length in enumerate(lengths):
            start = 0 if where == "right" else width - length
            padded[row, start : start + length] = ids[row, :length]
        return padded

    def padded(
        self,
        batch: Batch,
        side: Side,
        lengths: Sequence[int],
        where: PaddingSide = "right",
        extra: int = 3,
    ) -> Batch:
        """`batch` with the rows of one side cut to `lengths` and padded to `extra` more columns."""
        ids = batch.ids[side]
        columns = self.pad(side, ids, lengths, ids.size(1) + extra, where)
        told = torch.tensor(list(lengths), dtype=torch.int64, device=self.device)
        return Batch({**batch.ids, side: columns}, {**batch.lengths, side: told}, where)

    def padding(self, batch: Batch, side: Side) -> Bool[Tensor, "B _"]:
        """True where `side` is padding."""
        ids = batch.ids[side]
        if side not in batch.lengths:
            return torch.zeros_like(ids, dtype=torch.bool)
        columns = torch.arange(ids.size(1), device=ids.device)
        if batch.padding_side == "left":
            columns = columns.flip(0)
        return columns >= batch.lengths[side][:, None]

    def real(self, batch: Batch) -> Bool[Tensor, "B P"]:
        """True for the outputs that stand at real tokens: all, where they are of whole texts."""
        real = ~self.padding(batch, self.written)
        return torch.ones_like(real[:, :1]) if self.kind.of_text else real

    def cannot_pad(self, side: Side, where: PaddingSide = "right") -> str | None:
        """Why the net cannot be shown padding there; None: it can."""
        if LENGTHS[side] not in self.accepts and self.pad_id is None:
            return f"the net takes no {LENGTHS[side]} and no pad_id was given"
        if where == "left" and not self.left_padding:
            return "the net takes no padding_side; left_padding=True holds it to left padding"
        return None

    def outputs(self, batch: Batch) -> Float[Tensor, "B P V"]:
        """Without gradients. P positions, or one where outputs are of whole texts."""
        with torch.no_grad():
            return self.outputs_with_grad(batch)

    def outputs_with_grad(self, batch: Batch) -> Float[Tensor, "B P V"]:
        """With gradients, whatever the caller's mode."""
        return self.forward(self.net, batch)

    def forward(self, net: nn.Module, batch: Batch) -> Any:
        """What `net`, this one or another copy, gives, whole texts having one position."""
        raw = self.raw(net, batch)
        return raw.unsqueeze(1) if self.kind.of_text else raw

    def raw(self, net: nn.Module, batch: Batch) -> Any:
        """Call `net`, telling it what it can be told."""
        keywords: dict[str, Any] = {
            LENGTHS[side]: lengths
            for side, lengths in batch.lengths.items()
            if LENGTHS[side] in self.accepts
        }
        if batch.padding_side == "left" and "padding_side" in self.accepts:
            keywords["padding_side"] = "left"
        return self.call(net, *(batch.ids[side] for side in self.kind.sides), **keywords)

    def in_double(self) -> "Probe | None":
        """With a copy of the net in fp64, to tell small effects from rounding; None: it cannot."""
        try:
            finer = replace(self, net=copy.deepcopy(self.net).double(), tolerance=_FINE)
            finer.outputs(finer.batch(1))
        except Exception:  # a net may insist on its type, a device may have no fp64 or no room
            return None
        return finer

    def random_loss(
        self, outputs: Float[Tensor, "B P V"], real: Bool[Tensor, "B P"] | None = None
    ) -> Float[Tensor, ""]:
        """A loss that says nothing, for the ways of gradients: cross-entropy with random labels.

        Of states, which have no labels, and of a single class it is their mean product with random
        numbers. `real`: what of the outputs counts; default: all.
        """
        rows, places, size = outputs.shape
        if real is None:
            real = torch.ones(rows, places, dtype=torch.bool, device=outputs.device)
        if self.kind.no_loss or size == 1:  # of one class all logits have the same loss
            noise = torch.randn(outputs.shape, generator=self.generator).to(outputs.device)
            return (outputs.float() * noise)[real].mean()
        if self.kind.outputs == "classes":
            labels = torch.randint(size, (rows, places), generator=self.generator)
        else:
            labels = self.ids(self.written, rows, places)
        return loss_of(outputs, labels.to(outputs.device).masked_fill(~real, IGNORED))


def make_probe(
    net: nn.Module,
    *,
    stacks: Stacks | None,
    causal: bool | None,
    outputs: Outputs | None,
    sizes: dict[Side, int | None],
    pad_id: int | None,
    left_padding: bool | None,
    call: Call | None,
    length: int,
    tolerance: float | None,
    fresh: bool,
    overfit: bool,
    overfit_seconds: float,
    seed: int,
) -> Probe:
    """Copy the net and learn what is not told; `UserError` where that cannot be done."""
    if length < 8:
        raise UserError(f"length {length} is too short to tell anything; give at least 8")
    kind, known = kind_of(net, call, stacks=stacks, causal=causal, outputs=outputs, sizes=sizes)
    try:
        copied = copy.deepcopy(net).eval()
    except Exception as error:  # whatever a module's own __deepcopy__ may raise
        why = f"verify works on a copy of the net, and copying it raised {first_line(error)}"
        raise UserError(why) from error
    copied.zero_grad(set_to_none=True)
    accepts = _keywords(copied.forward if call is None else call, kind)
    probe = Probe(
        net=copied,
        kind=kind,
        call=_plain_call if call is None else call,
        accepts=accepts,
        pad_id=pad_id,
        left_padding="padding_side" in accepts if left_padding is None else left_padding,
        vocab_sizes={side: sizes[side] or 0 for side in kind.sides},
        length=length,
        tolerance=_rounding(copied) if tolerance is None else tolerance,
        fresh=fresh,
        overfit=overfit,
        overfit_seconds=overfit_seconds,
        generator=torch.Generator().manual_seed(seed),
    )
    _find_vocabularies(probe)
    for size in probe.vocab_sizes.values():
        if pad_id is not None and not 0 <= pad_id < size:
            raise UserError(f"pad_id {pad_id} is not an id of a vocabulary of {size}")
        if len(real_tokens(copied, size, pad_id)) < 2:
            raise UserError(f"a vocabulary of {size} has no two tokens to tell apart")
    if not known:
        _look_at_outputs(probe)
    return probe


def real_tokens(net: nn.Module, vocab_size: int, pad_id: int | None) -> list[int]:
    """All ids but `pad_id` and what the net's embeddings treat as padding."""
    padding = {m.padding_idx for m in net.modules() if isinstance(m, nn.Embedding)} | {pad_id}
    return [token for token in range(vocab_size) if token not in padding]


def _plain_call(net: nn.Module, *ids: Tensor, **keywords: Any) -> Any:
    return net(*ids, **keywords)


def _keywords(function: Callable[..., Any], kind: Kind) -> frozenset[str]:
    """Only what is named counts: `**kwargs` may be passed on to something that knows none."""
    try:
        named = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # compiled code may have none
        return frozenset()
    return frozenset({"padding_side", *(LENGTHS[side] for side in kind.sides)} & named)


def _rounding(net: nn.Module) -> float:
    """Differences below this are rounding: fp32 sums in another order, or 16-bit numbers."""
    halves = (torch.float16, torch.bfloat16)
    return 5e-2 if any(p.dtype in halves for p in net.parameters()) else 1e-4


def _find_vocabularies(probe: Probe) -> None:
    """Fill in the sizes that were not given from the matrices that ids 0 and 1 are looked up in."""
    if all(probe.vocab_sizes.values()):
        return
    first = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]], device=probe.device)
    second = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], device=probe.device)
    ids = dict(zip(probe.kind.sides, (first, second), strict=False))
    why = "no embedding lookup of its ids was seen"
    with torch.no_grad(), Lookups() as lookups:
        try:
            probe.raw(probe.net, Batch(ids))
        except Exception as error:  # any net may raise anything; sizes may be known by then
            why = f"calling it raised {first_line(error)}"
    for side, known in probe.vocab_sizes.items():
        if known:
            continue
        lookup = lookups.of(ids[side])
        if lookup is None:
            name = SIZES[side]
            raise UserError(f"cannot tell the net's {name} ({why}); pass {name}=...")
        probe.vocab_sizes[side] = lookup[0].size(0)


def _look_at_outputs(probe: Probe) -> None:
    """What the outputs are of, by their shape; what is neither is left to the check of it."""
    try:
        with torch.no_grad():
            seen = probe.raw(probe.net, probe.batch(3))
    except Exception:  # the first check calls it again, and reports it
        return
    if not isinstance(seen, Tensor):
        return
    if seen.dim() == 2:
        # A classifier reads whole texts; nothing says that it looks through windows.
        probe.kind = replace(probe.kind, outputs="classes", reach=None)
    elif seen.dim() == 3 and probe.vocab_sizes[probe.written] not in seen.shape:
        probe.kind = replace(probe.kind, outputs="states")


def first_line(error: BaseException) -> str:
    """Type and first line of what was raised: torch adds pages to some."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def loss_of(logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Mean cross-entropy, in fp32, of the labels that are not `IGNORED`."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
