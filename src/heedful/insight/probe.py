"""How the checks reach a net: a copy of it, the ways it can be called, and ids to call it with."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heedful.errors import UserError

Side = Literal["src", "tgt"]
PaddingSide = Literal["right", "left"]
Call = Callable[..., Tensor]
IGNORED = -100  # the label of positions that a loss leaves out
PADDING_SIDES: tuple[PaddingSide, PaddingSide] = ("right", "left")
NAMES: dict[Side, str] = {"src": "source", "tgt": "target"}


@dataclass(frozen=True)
class Batch:
    """What one call is given. Lengths None: every token is real."""

    src: Int[Tensor, "B S"]
    tgt: Int[Tensor, "B T"]
    src_lengths: Int[Tensor, "B"] | None = None
    tgt_lengths: Int[Tensor, "B"] | None = None
    padding_side: PaddingSide = "right"


@dataclass
class Probe:
    """A private copy of the net in evaluation mode, and everything that is known about it.

    Attributes:
        call: `call(net, src, tgt, **keywords)` gives the logits.
        accepts: those keywords of `src_lengths`, `tgt_lengths`, `padding_side` that it takes.
        pad_id: the id that padding is shown as; None: any id, as lengths tell what is real.
        left_padding: whether the net claims to be right for batches padded on the left.
        length: the longest sequence that it is shown, padding included.
        tolerance: largest difference, in standard deviations of the logits, that is rounding.
    """

    net: nn.Module
    call: Call
    accepts: frozenset[str]
    pad_id: int | None
    left_padding: bool
    src_vocab_size: int
    tgt_vocab_size: int
    length: int
    tolerance: float
    fresh: bool
    overfit: bool
    overfit_seconds: float
    generator: torch.Generator

    @property
    def src_width(self) -> int:
        """Real source tokens of a row, so that three of padding still fit."""
        return self.length - 3

    @property
    def tgt_width(self) -> int:
        """Real target tokens of a row; not the source's number, so that mix-ups show."""
        return self.length - 4

    @property
    def device(self) -> torch.device:
        """Where the net is."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))

    def vocab_size(self, side: Side) -> int:
        """Of the source or of the target."""
        return self.src_vocab_size if side == "src" else self.tgt_vocab_size

    def tokens(self, side: Side) -> Int[Tensor, "n"]:
        """The ids that stand for real tokens: all but those of padding."""
        return torch.tensor(real_tokens(self.net, self.vocab_size(side), self.pad_id))

    def ids(self, side: Side, rows: int, width: int) -> Int[Tensor, "{rows} {width}"]:
        """Random real tokens, within a row all different as far as the vocabulary goes."""
        tokens = self.tokens(side)
        picks = [torch.randperm(len(tokens), generator=self.generator) for _ in range(rows)]
        column = torch.arange(width) % len(tokens)
        return torch.stack([tokens[pick[column]] for pick in picks]).to(self.device)

    def others(self, side: Side, ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """For each real token another one."""
        tokens = self.tokens(side)
        following = torch.zeros(self.vocab_size(side), dtype=torch.int64)
        following[tokens] = tokens.roll(-1)
        return following.to(ids.device)[ids]

    def batch(self, rows: int) -> Batch:
        """Random sequences without padding."""
        src = self.ids("src", rows, self.src_width)
        return Batch(src, self.ids("tgt", rows, self.tgt_width))

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
        ids: Tensor = getattr(batch, side)
        columns = self.pad(side, ids, lengths, ids.size(1) + extra, where)
        told = torch.tensor(list(lengths), dtype=torch.int64, device=self.device)
        if side == "src":
            return replace(batch, src=columns, src_lengths=told, padding_side=where)
        return replace(batch, tgt=columns, tgt_lengths=told, padding_side=where)

    def cannot_pad(self, side: Side, where: PaddingSide = "right") -> str | None:
        """Why the net cannot be shown padding there; None: it can."""
        if f"{side}_lengths" not in self.accepts and self.pad_id is None:
            return f"the net takes no {side}_lengths and no pad_id was given"
        if where == "left" and not self.left_padding:
            return "the net takes no padding_side; left_padding=True holds it to left padding"
        return None

    def logits(self, batch: Batch) -> Float[Tensor, "B T V"]:
        """Without gradients."""
        with torch.no_grad():
            return self.logits_with_grad(batch)

    def logits_with_grad(self, batch: Batch) -> Float[Tensor, "B T V"]:
        """With gradients, whatever the caller's mode."""
        return self.forward(self.net, batch)

    def forward(self, net: nn.Module, batch: Batch) -> Any:
        """Call `net`, this one or another copy, telling it what it can be told."""
        keywords: dict[str, Any] = {}
        for name in ("src_lengths", "tgt_lengths"):
            lengths = getattr(batch, name)
            if lengths is not None and name in self.accepts:
                keywords[name] = lengths
        if batch.padding_side == "left" and "padding_side" in self.accepts:
            keywords["padding_side"] = "left"
        return self.call(net, batch.src, batch.tgt, **keywords)


class Lookups(TorchFunctionMode):
    """Sees every embedding lookup of the calls made inside it, by whatever module or function.

    A zero that requires a gradient is added to each result, so that the gradient of a single
    position is known even where the matrix is shared with the output or is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        found = _lookup(func, args, kwargs or {})
        if found is None:
            return out
        ids, weight = found
        added = torch.zeros_like(out, requires_grad=True)
        self.seen.append((ids, weight, added))
        return out + added

    def of(self, ids: Int[Tensor, "B T"]) -> tuple[Tensor, Tensor] | None:
        """The matrix (V, D) that `ids` were looked up in, and what was added, (B, T, D)."""
        for seen, weight, added in self.seen:
            if seen.shape == ids.shape and torch.equal(seen, ids):
                return weight, added
        return None


def _lookup(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    names: tuple[str, str]
    if func is F.embedding:
        names = ("input", "weight")
    elif func is torch.embedding:
        names = ("weight", "indices")
    else:
        return None
    first, second = (
        args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)
    )
    return (first, second) if func is F.embedding else (second, first)


def make_probe(
    net: nn.Module,
    *,
    src_vocab_size: int | None,
    tgt_vocab_size: int | None,
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
    try:
        copied = copy.deepcopy(net).eval()
    except Exception as error:  # whatever a module's own __deepcopy__ may raise
        why = f"verify works on a copy of the net, and copying it raised {first_line(error)}"
        raise UserError(why) from error
    copied.zero_grad(set_to_none=True)
    accepts = _keywords(copied.forward if call is None else call)
    probe = Probe(
        net=copied,
        call=_plain_call if call is None else call,
        accepts=accepts,
        pad_id=pad_id,
        left_padding="padding_side" in accepts if left_padding is None else left_padding,
        src_vocab_size=src_vocab_size or 0,
        tgt_vocab_size=tgt_vocab_size or 0,
        length=length,
        tolerance=_rounding(copied) if tolerance is None else tolerance,
        fresh=fresh,
        overfit=overfit,
        overfit_seconds=overfit_seconds,
        generator=torch.Generator().manual_seed(seed),
    )
    _find_vocabularies(probe)
    for size in (probe.src_vocab_size, probe.tgt_vocab_size):
        if pad_id is not None and not 0 <= pad_id < size:
            raise UserError(f"pad_id {pad_id} is not an id of a vocabulary of {size}")
        if len(real_tokens(copied, size, pad_id)) < 2:
            raise UserError(f"a vocabulary of {size} has no two tokens to tell apart")
    return probe


def real_tokens(net: nn.Module, vocab_size: int, pad_id: int | None) -> list[int]:
    """All ids but `pad_id` and what the net's embeddings treat as padding."""
    padding = {m.padding_idx for m in net.modules() if isinstance(m, nn.Embedding)} | {pad_id}
    return [token for token in range(vocab_size) if token not in padding]


def _plain_call(net: nn.Module, src: Tensor, tgt: Tensor, **keywords: Any) -> Any:
    return net(src, tgt, **keywords)


def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """Only what is named counts: `**kwargs` may be passed on to something that knows none."""
    try:
        named = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # compiled code may have none
        return frozenset()
    return frozenset({"src_lengths", "tgt_lengths", "padding_side"} & named)


def _rounding(net: nn.Module) -> float:
    """Differences below this are rounding: fp32 sums in another order, or 16-bit numbers."""
    halves = (torch.float16, torch.bfloat16)
    return 5e-2 if any(p.dtype in halves for p in net.parameters()) else 1e-4


def _find_vocabularies(probe: Probe) -> None:
    """Fill in the sizes that were not given from the matrices that ids 0 and 1 are looked up in."""
    if probe.src_vocab_size and probe.tgt_vocab_size:
        return
    src = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]], device=probe.device)
    tgt = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], device=probe.device)
    why = "no embedding lookup of its ids was seen"
    with Lookups() as lookups:
        try:
            probe.logits(Batch(src, tgt))
        except Exception as error:  # any net may raise anything; sizes may be known by then
            why = f"calling it raised {first_line(error)}"
    found = {"src": lookups.of(src), "tgt": lookups.of(tgt)}
    for side, lookup in found.items():
        name = f"{side}_vocab_size"
        if getattr(probe, name):
            continue
        if lookup is None:
            raise UserError(f"cannot tell the net's {name} ({why}); pass {name}=...")
        setattr(probe, name, lookup[0].size(0))


def first_line(error: BaseException) -> str:
    """Type and first line of what was raised: torch adds pages to some."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def loss_of(logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
    """Mean cross-entropy, in fp32, of the labels that are not `IGNORED`."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
