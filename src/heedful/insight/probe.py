"""How the checks reach a net: a copy of it, the ways it can be called, and ids to call it with."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.insight.kind import LENGTHS, SIZES, Kind, Side
from heedful.insight.lookups import Lookups
from heedful.parts.tokens import PaddingSide, padding_mask

Call = Callable[..., Tensor]
PADDING_SIDES: tuple[PaddingSide, PaddingSide] = ("right", "left")
_FINE = 2e-6  # above the rounding of what a net that is in fp64 still does in fp32


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
        ids = {side: ids[which] for side, ids in self.ids.items()}
        lengths = {side: lengths[which] for side, lengths in self.lengths.items()}
        return replace(self, ids=ids, lengths=lengths)


@dataclass
class Probe(Kind):
    """A private copy of the net in evaluation mode, and everything that is known about it.

    Raises UserError where the net cannot be copied or its vocabularies are not to be found.

    Attributes:
        call: `call(net, src, tgt, **keywords)`, or `call(net, ids, **keywords)`; None: plainly.
        pad_id: the id that padding is shown as; None: any id, as lengths tell what is real.
        accepts: those keywords of the sides' lengths and `padding_side` that it takes.
        left_padding: whether the net claims to be right for batches padded on the left.
        vocab_sizes: of each side; 0: what its embeddings have.
        length: the longest sequence that it is shown, padding included.
        tolerance: largest difference, in standard deviations of the outputs, that is rounding.
    """

    net: nn.Module
    call: Call | None
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

    def __post_init__(self) -> None:
        if self.length < 8:
            raise UserError(f"length {self.length} is too short to tell anything; give at least 8")
        try:
            self.net = copy.deepcopy(self.net).eval()
        except Exception as error:  # whatever a module's own __deepcopy__ may raise
            why = f"verify works on a copy of the net, and copying it raised {first_line(error)}"
            raise UserError(why) from error
        self.net.zero_grad(set_to_none=True)
        if self.output_kind is None or not all(self.vocab_sizes.values()):
            self._look()
        for side, size in self.vocab_sizes.items():
            if self.pad_id is not None and not 0 <= self.pad_id < size:
                raise UserError(f"pad_id {self.pad_id} is not an id of a vocabulary of {size}")
            if len(self.tokens(side)) < 2:
                raise UserError(f"a vocabulary of {size} has no two tokens to tell apart")

    @property
    def device(self) -> torch.device:
        """Where the net is."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))

    def width(self, side: Side) -> int:
        """Real tokens of a row, so that three of padding still fit; sides differ: mix-ups show."""
        return self.length - (3 if side == "src" else 4)

    def ragged(self, side: Side) -> list[int]:
        """Lengths of three rows, the first of them whole."""
        return [self.width(side) - cut for cut in (0, 1, 3)]

    def tokens(self, side: Side) -> Int[Tensor, "n"]:
        """All ids but `pad_id` and what the net's embeddings treat as padding."""
        padding = {m.padding_idx for m in self.net.modules() if isinstance(m, nn.Embedding)}
        padding.add(self.pad_id)
        return torch.tensor(
            [token for token in range(self.vocab_sizes[side]) if token not in padding]
        )

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
        return Batch({side: self.ids(side, rows, self.width(side)) for side in self.sides})

    def padded(
        self,
        batch: Batch,
        side: Side,
        lengths: Sequence[int],
        where: PaddingSide = "right",
        extra: int = 3,
    ) -> Batch:
        """`batch` with the rows of one side cut to `lengths` and padded to `extra` more columns.

        Padding is `pad_id`; where lengths tell what is real it is random tokens, as then the ids
        must not matter.
        """
        ids = batch.ids[side]
        width = ids.size(1) + extra
        columns = self.ids(side, ids.size(0), width)
        if self.pad_id is not None:
            columns.fill_(self.pad_id)
        for row, length in enumerate(lengths):
            start = 0 if where == "right" else width - length
            columns[row, start : start + length] = ids[row, :length]
        told = torch.tensor(list(lengths), dtype=torch.int64, device=self.device)
        return Batch({**batch.ids, side: columns}, {**batch.lengths, side: told}, where)

    def padding(self, batch: Batch, side: Side) -> Bool[Tensor, "B _"]:
        """True where `side` is padding."""
        ids, lengths = batch.ids[side], batch.lengths.get(side)
        if lengths is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return ~padding_mask(lengths, ids.size(1), batch.padding_side)

    def real(self, batch: Batch) -> Bool[Tensor, "B P"]:
        """True for the outputs that stand at real tokens: all, where they are of whole texts."""
        real = ~self.padding(batch, self.written)
        return torch.ones_like(real[:, :1]) if self.of_text else real

    def cannot_pad(self, side: Side, where: PaddingSide = "right") -> str | None:
        """Why the net cannot be shown padding there; None: it can."""
        if LENGTHS[side] not in self.accepts and self.pad_id is None:
            return f"the net takes no {LENGTHS[side]} and no pad_id was given"
        if where == "left" and not self.left_padding:
            return "the net takes no padding_side; left_padding=True holds it to left padding"
        return None

    def outputs(self, batch: Batch, *, grad: bool = False) -> Float[Tensor, "B P V"]:
        """P positions, or one where outputs are of whole texts."""
        with torch.set_grad_enabled(grad):
            raw = self.raw(batch)
            return raw.unsqueeze(1) if self.of_text else raw

    def raw(self, batch: Batch) -> Any:
        """Call the net, with those keywords that it takes."""
        keywords: dict[str, Any] = {LENGTHS[side]: n for side, n in batch.lengths.items()}
        if batch.padding_side == "left":
            keywords["padding_side"] = "left"
        keywords = {name: value for name, value in keywords.items() if name in self.accepts}
        ids = (batch.ids[side] for side in self.sides)
        function = self.net if self.call is None else partial(self.call, self.net)
        return function(*ids, **keywords)

    def copied(self) -> "Probe":
        """With another copy of the net."""
        other = copy.copy(self)
        other.net = copy.deepcopy(self.net)
        return other

    def in_double(self) -> "Probe | None":
        """With a copy of the net in fp64, to tell small effects from rounding; None: it cannot."""
        try:
            finer = self.copied()
            finer.tolerance = _FINE
            finer.net.double()
            finer.outputs(finer.batch(1))
        except Exception:  # a net may insist on its type, a device may have no fp64 or no room
            return None
        return finer

    def random_loss(
        self, outputs: Float[Tensor, "B P V"], real: Bool[Tensor, "B P"] | None = None
    ) -> Float[Tensor, ""]:
        """A loss for the ways of gradients alone: the mean product with random numbers.

        Forbidden tokens (-inf) do not count. `real`: what counts; default: all.
        """
        noise = torch.randn(outputs.shape, generator=self.generator).to(outputs.device)
        products = outputs.float().masked_fill(outputs == -math.inf, 0.0) * noise
        return (products if real is None else products[real]).mean()

    def token_gradient(
        self, batch: Batch, side: Side, score: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T D"] | None:
        """Of `score(outputs)` at the embeddings of a side; None: no lookup of its ids was seen.

        Zeros where the score is cut off from all parameters, which is gradient flow's to report.
        """
        with Lookups() as lookups:
            outputs = self.outputs(batch, grad=True)
        found = lookups.of(batch.ids[side])
        if found is None:
            return None
        scored = score(outputs)
        if not scored.requires_grad:
            return torch.zeros_like(found[1])
        return torch.autograd.grad(scored, [found[1]], materialize_grads=True)[0]

    def _look(self) -> None:
        """Find out by a first call what was not said: vocabularies, and what outputs are of.

        A vocabulary is as large as the matrix that ids 0 and 1 are looked up in. Outputs are told
        by their shape; what is neither is left to the check of it.
        """
        first = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]], device=self.device)
        second = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], device=self.device)
        ids = dict(zip(self.sides, (first, second), strict=False))
        seen, why = None, "no embedding lookup of its ids was seen"
        with torch.no_grad(), Lookups() as lookups:
            try:
                seen = self.raw(Batch(ids))
            except Exception as error:  # any net may raise anything; sizes may be known by then
                why = f"calling it raised {first_line(error)}"
        for side in (side for side, size in self.vocab_sizes.items() if not size):
            lookup = lookups.of(ids[side])
            if lookup is None:
                name = SIZES[side]
                raise UserError(f"cannot tell the net's {name} ({why}); pass {name}=...")
            self.vocab_sizes[side] = lookup[0].size(0)
        if self.output_kind is not None:
            return
        self.output_kind, shape = "tokens", getattr(seen, "shape", ())
        if len(shape) == 2:
            # A classifier reads whole texts; nothing says that it looks through windows.
            self.output_kind, self.reach = "classes", None
        elif len(shape) == 3 and self.vocab_sizes[self.written] not in shape:
            self.output_kind = "states"


def first_line(error: BaseException) -> str:
    """Type and first line of what was raised: torch adds pages to some."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
