"""The net under test: a copy of it, the ways to call it, and random inputs."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.errors import UserError
from heedful.insight.hugging_face import main_tensor
from heedful.insight.kind import LENGTHS, SIZES, NetKind, Side
from heedful.insight.lookups import EmbeddingLookups
from heedful.parts.tokens import PaddingSide, padding_mask

Call = Callable[..., Tensor]
PADDING_SIDES: tuple[PaddingSide, PaddingSide] = ("right", "left")
_DOUBLE_TOLERANCE = 2e-6  # larger than rounding errors of operations that an fp64 net does in fp32


@dataclass(frozen=True)
class NetInputs:
    """Inputs of a call: the ids of each side. Sides without lengths have no padding."""

    ids: dict[Side, Int[Tensor, "B _"]]
    lengths: dict[Side, Int[Tensor, "B"]] = field(default_factory=dict)
    padding_side: PaddingSide = "right"

    def replace_ids(self, side: Side, ids: Int[Tensor, "B _"]) -> "NetInputs":
        """The batch with other ids on one side."""
        return replace(self, ids={**self.ids, side: ids})

    def select_rows(self, rows: Any) -> "NetInputs":
        """The rows of a slice or of a tensor of indices."""
        ids = {side: ids[rows] for side, ids in self.ids.items()}
        lengths = {side: lengths[rows] for side, lengths in self.lengths.items()}
        return replace(self, ids=ids, lengths=lengths)


@dataclass
class Probe(NetKind):
    """A copy of the net in evaluation mode, and the settings of the checks.

    Attributes:
        call: `call(net, src, tgt, **keywords)` or `call(net, ids, **keywords)`; None: call the net.
        pad_id: the id of padding; None: padding has random ids and is determined by lengths.
        accepts: the supported keywords, out of the lengths of the sides and `padding_side`.
        left_padding: the net must be correct for batches padded on the left.
        vocab_sizes: vocabulary size of each side; 0: determined from the embeddings.
        length: maximum length of a sequence, padding included.
        max_long_length: of the sequences that show effects of distant tokens (`long_length`).
        tolerance: maximum rounding error, in standard deviations of the outputs.
        fresh: the net is untrained, so that its initial loss is checked.
        overfit, overfit_seconds: train a copy on one batch, for at most this time.
        generator: random generator of the inputs.
        original: the net itself, which is never called.

    Raises:
        UserError: the net cannot be copied, or its vocabulary sizes cannot be determined.
    """

    net: nn.Module
    call: Call | None
    accepts: frozenset[str]
    pad_id: int | None
    left_padding: bool
    vocab_sizes: dict[Side, int]
    length: int
    max_long_length: int
    tolerance: float
    fresh: bool
    overfit: bool
    overfit_seconds: float
    generator: torch.Generator
    original: nn.Module = field(init=False, repr=False)
    _tokens: dict[Side, Int[Tensor, "n"]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.original = self.net
        if self.length < 8:
            raise UserError(f"length {self.length} is too short for the checks; give at least 8")
        try:
            self.net = copy.deepcopy(self.net).eval()
        except Exception as error:  # the module's __deepcopy__ may raise any exception
            why = f"verify works on a copy of the net, and copying it raised {first_line(error)}"
            raise UserError(why) from error
        self.net.zero_grad(set_to_none=True)
        if self.output_kind is None or not all(self.vocab_sizes.values()):
            self._infer_from_call()
        for side, size in self.vocab_sizes.items():
            if self.pad_id is not None and not 0 <= self.pad_id < size:
                raise UserError(f"pad_id {self.pad_id} is not an id of a vocabulary of {size}")
            if len(self.tokens(side)) < 2:
                raise UserError(f"a vocabulary of {size} has fewer than two tokens besides padding")

    @property
    def device(self) -> torch.device:
        """The device of the net."""
        return next((p.device for p in self.net.parameters()), torch.device("cpu"))

    def width(self, side: Side) -> int:
        """Length of a row without padding: three tokens of padding fit; the sides differ."""
        return self.length - (3 if side == "src" else 4)

    def row_lengths(self, side: Side) -> list[int]:
        """Different lengths for three rows, the first of them the full width."""
        return [self.width(side) - cut for cut in (0, 1, 3)]

    def tokens(self, side: Side) -> Int[Tensor, "n"]:
        """All ids except `pad_id` and the `padding_idx` of embeddings."""
        if side in self._tokens:
            return self._tokens[side]
        padding = {m.padding_idx for m in self.net.modules() if isinstance(m, nn.Embedding)}
        padding.add(self.pad_id)
        self._tokens[side] = torch.tensor(
            [token for token in range(self.vocab_sizes[side]) if token not in padding]
        )
        return self._tokens[side]

    def ids(self, side: Side, rows: int, width: int) -> Int[Tensor, "{rows} {width}"]:
        """Random tokens, different within a row if the vocabulary is large enough."""
        tokens = self.tokens(side)
        picks = [torch.randperm(len(tokens), generator=self.generator) for _ in range(rows)]
        column = torch.arange(width) % len(tokens)
        return torch.stack([tokens[pick[column]] for pick in picks]).to(self.device)

    def other_tokens(self, side: Side, ids: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
        """For each token a different one."""
        tokens = self.tokens(side)
        following = torch.zeros(self.vocab_sizes[side], dtype=torch.int64)
        following[tokens] = tokens.roll(-1)
        return following.to(ids.device)[ids]

    def batch(self, rows: int) -> NetInputs:
        """Random sequences without padding."""
        return NetInputs({side: self.ids(side, rows, self.width(side)) for side in self.sides})

    def long_batch(self, rows: int, length: int | None = None) -> NetInputs:
        """Random sequences of this length on each side; default: `long_length`."""
        length = length or self.long_length
        return NetInputs({side: self.ids(side, rows, length) for side in self.sides})

    @cached_property
    def long_length(self) -> int:
        """Length of the long sequences: `max_long_length`, or less if the net raises for them.

        Tried on a CPU: an index out of range makes a CUDA device unusable.
        """
        tried = self.to_cpu()

        def takes(length: int) -> bool:
            try:
                tried.outputs(tried.long_batch(2, length))
            except Exception:  # of any kind: a table of positions is too short
                return False
            return True

        if takes(self.max_long_length):
            return self.max_long_length
        low, high = self.width(self.output_side), self.max_long_length  # taken, not taken
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if takes(middle) else (low, middle)
        return low

    @property
    def at_lengths(self) -> str:
        """The length of the long sequences, for observations."""
        limit = ", the most that the net takes" if self.long_length < self.max_long_length else ""
        return f"texts of {self.long_length} tokens{limit}"

    def pad(
        self,
        batch: NetInputs,
        side: Side,
        lengths: Sequence[int],
        where: PaddingSide = "right",
        extra: int = 3,
    ) -> NetInputs:
        """`batch` with the rows of one side cut to `lengths`, and padded to its width + `extra`.

        Padding is `pad_id`, or random tokens without a `pad_id`.
        """
        ids = batch.ids[side]
        width = ids.size(1) + extra
        columns = self.ids(side, ids.size(0), width)
        if self.pad_id is not None:
            columns.fill_(self.pad_id)
        for row, length in enumerate(lengths):
            start = 0 if where == "right" else width - length
            columns[row, start : start + length] = ids[row, :length]
        all_lengths = torch.tensor(list(lengths), dtype=torch.int64, device=self.device)
        return NetInputs({**batch.ids, side: columns}, {**batch.lengths, side: all_lengths}, where)

    def padding(self, batch: NetInputs, side: Side) -> Bool[Tensor, "B _"]:
        """True at the padding of `side`."""
        ids, lengths = batch.ids[side], batch.lengths.get(side)
        if lengths is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return ~padding_mask(lengths, ids.size(1), batch.padding_side)

    def real(self, batch: NetInputs) -> Bool[Tensor, "B P"]:
        """True for outputs at real tokens, and for all outputs of whole texts."""
        real = ~self.padding(batch, self.output_side)
        return torch.ones_like(real[:, :1]) if self.is_pooled else real

    def no_padding_reason(self, side: Side, where: PaddingSide = "right") -> str | None:
        """The reason why the net does not support padding of this kind; None if it does."""
        if LENGTHS[side] not in self.accepts and self.pad_id is None:
            return f"the net takes no {LENGTHS[side]} and no pad_id was given"
        if where == "left" and not self.left_padding:
            return "the net takes no padding_side; pass left_padding=True to check left padding"
        return None

    def outputs(self, batch: NetInputs, *, grad: bool = False) -> Float[Tensor, "B P V"]:
        """Outputs of the net; P is the number of positions, or 1 for one output per text."""
        with torch.set_grad_enabled(grad):
            outputs = self.call_net(batch)
            return outputs.unsqueeze(1) if self.is_pooled else outputs

    def call_net(self, batch: NetInputs) -> Any:
        """Call the net with the keywords that it accepts.

        Returns the tensor of logits or states, if the output is an object with a field of them
        (those of transformers), else the output.
        """
        keywords: dict[str, Any] = {LENGTHS[side]: n for side, n in batch.lengths.items()}
        if batch.padding_side == "left":
            keywords["padding_side"] = "left"
        keywords = {name: value for name, value in keywords.items() if name in self.accepts}
        ids = (batch.ids[side] for side in self.sides)
        function = self.net if self.call is None else partial(self.call, self.net)
        return main_tensor(function(*ids, **keywords))

    def copy_net(self) -> "Probe":
        """A probe with another copy of the net."""
        other = copy.copy(self)
        other.net = copy.deepcopy(self.net)
        return other

    def to_cpu(self) -> "Probe":
        """A probe with a copy of the net on a CPU; the probe itself if the net is on one."""
        if self.device.type == "cpu":
            return self
        other = self.copy_net()
        other.net.cpu()
        return other

    def to_double(self) -> "Probe | None":
        """A probe with a copy of the net in fp64; None if the net cannot run in fp64."""
        try:
            double = self.copy_net()
            double.tolerance = _DOUBLE_TOLERANCE
            double.net.double()
            double.outputs(double.batch(2))
        except Exception:  # the net requires its type, or the device lacks fp64 or memory
            return None
        return double

    def random_loss(
        self, outputs: Float[Tensor, "B P V"], real: Bool[Tensor, "B P"] | None = None
    ) -> Float[Tensor, ""]:
        """The mean of outputs times random numbers: a loss to check gradients with.

        Args:
            real: the positions to include; default: all. Outputs of -inf are always left out.
        """
        noise = torch.randn(outputs.shape, generator=self.generator).to(outputs.device)
        products = outputs.float().masked_fill(outputs == -math.inf, 0.0) * noise
        return (products if real is None else products[real]).mean()

    def token_gradient(
        self, batch: NetInputs, side: Side, score: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "B T D"] | None:
        """Gradient of `score(outputs)` with respect to the embeddings of a side.

        None if no lookup of its ids was recorded. Zeros if the score requires no gradient, which
        the check "gradient flow" reports.
        """
        with EmbeddingLookups() as lookups:
            outputs = self.outputs(batch, grad=True)
        lookup = lookups.find(batch.ids[side])
        if lookup is None:
            return None
        total, embedded = score(outputs), lookup[1]
        if not total.requires_grad:
            return torch.zeros_like(embedded)
        return torch.autograd.grad(total, [embedded], materialize_grads=True)[0]

    def _infer_from_call(self) -> None:
        """Determine unknown vocabulary sizes and the kind of outputs by a first call.

        A vocabulary has the size of the matrix in which ids are looked up. The kind of outputs is
        determined by their shape; wrong shapes are reported by the check "output shape".
        """
        first = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 1, 1, 0]], device=self.device)
        second = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], device=self.device)
        ids = dict(zip(self.sides, (first, second), strict=False))
        outputs, why = None, "no embedding lookup of its ids was recorded"
        with torch.no_grad(), EmbeddingLookups() as lookups:
            try:
                outputs = self.call_net(NetInputs(ids))
            except Exception as error:  # of any kind; earlier lookups are possible
                why = f"calling it raised {first_line(error)}"
        for side in (side for side, size in self.vocab_sizes.items() if not size):
            lookup = lookups.find(ids[side])
            if lookup is None:
                name = SIZES[side]
                raise UserError(f"cannot tell the net's {name} ({why}); pass {name}=...")
            self.vocab_sizes[side] = lookup[0].size(0)
        if self.output_kind is not None:
            return
        self.output_kind, shape = "tokens", getattr(outputs, "shape", ())
        if len(shape) == 2:
            self.output_kind, self.reach = "classes", None
        elif len(shape) == 3 and self.vocab_sizes[self.output_side] not in shape:
            self.output_kind = "states"


def first_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
