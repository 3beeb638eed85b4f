"""What kind of net it is: how it is called, what its outputs are of, and what may see what."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.attention import Attention
from heedful.parts.heads import ClassificationHead, OutputHead

Side = Literal["src", "tgt", "ids"]
Outputs = Literal["tokens", "classes", "states", "vectors"]
Stacks = Literal[1, 2]

NAMES: dict[Side, str] = {"src": "source", "tgt": "target", "ids": "text"}
LENGTHS: dict[Side, str] = {"src": "src_lengths", "tgt": "tgt_lengths", "ids": "lengths"}
SIZES: dict[Side, str] = {"src": "src_vocab_size", "tgt": "tgt_vocab_size", "ids": "vocab_size"}


@dataclass
class Kind:
    """What is asked of a net.

    Attributes:
        sides: the sequences it is called with; outputs stand at the positions of the last one.
        causal: whether a position must not see those after it.
        output_kind: tokens: logits (B, T, V); classes: logits (B, C), one row a text; states:
            (B, T, D); vectors: (B, D), one a text; None: not known yet.
        reach: how many places away a token must still be seen; None: however far. 1 where some
            layer may look through a window.
    """

    sides: tuple[Side, ...]
    causal: bool
    output_kind: Outputs | None
    reach: int | None

    @property
    def written(self) -> Side:
        """The side whose positions the outputs stand at."""
        return self.sides[-1]

    @property
    def single(self) -> bool:
        """Whether it has one stack."""
        return len(self.sides) == 1

    @property
    def of_text(self) -> bool:
        """Whether there is one output a text, and not one a position."""
        return self.output_kind in ("classes", "vectors")

    @property
    def outputs_name(self) -> str:
        """What the outputs are called: logits, states or vectors."""
        return self.output_kind if self.output_kind in ("states", "vectors") else "logits"

    @property
    def words(self) -> dict[str, str]:
        """What checks call things: `{outputs}`, `{written}` (before "token"), `{size}`."""
        return {
            "outputs": self.outputs_name,
            "written": "" if self.single else "target ",
            "size": "C" if self.output_kind == "classes" else "V",
        }


def kind_of(
    net: nn.Module,
    call: Callable[..., Any] | None,
    stacks: Stacks | None,
    causal: bool | None,
    outputs: Outputs | None,
    sizes: dict[Side, int | None],
) -> Kind:
    """The kind of a net; what the caller says goes before what is seen.

    Raises UserError where neither is enough.
    """
    if stacks not in (None, 1, 2):
        raise UserError(f"stacks must be 1 or 2, not {stacks}")
    if outputs is not None and outputs not in get_args(Outputs):
        raise UserError(f"outputs must be one of {', '.join(get_args(Outputs))}, not {outputs}")
    given = {
        2: [SIZES[side] for side in ("src", "tgt") if sizes[side] is not None],
        1: [SIZES["ids"]] * (sizes["ids"] is not None)
        + ["causal"] * (causal is not None)
        + ["outputs"] * (outputs is not None),
    }
    count = stacks or _count_stacks(net, call, given)
    if wrong := given[3 - count]:
        have, other = ("one stack", "two") if count == 1 else ("two stacks", "one")
        raise UserError(
            f"{wrong[0]}= is not for a net of {have}; pass stacks={3 - count} if it has {other}"
        )
    if count == 2:
        return Kind(("src", "tgt"), causal=True, output_kind="tokens", reach=1)
    ours = isinstance(net, DecoderOnly | EncoderOnly)
    if causal is None and not ours:
        raise UserError(
            "a net of one stack: pass causal=True if no token may see later ones (a decoder), "
            "causal=False if all may see all (an encoder); stacks=2 if it reads a source and a "
            "target"
        )
    causal = isinstance(net, DecoderOnly) if causal is None else causal
    if ours and outputs is None:
        outputs = "tokens" if isinstance(net.head, OutputHead) else None
        if net.head is None or isinstance(net.head, ClassificationHead):
            outputs = "states" if net.head is None else "classes"
    kind = Kind(("ids",), causal, outputs, reach=1)
    layers = [module for module in net.modules() if isinstance(module, Attention)]
    # Of a foreign net nothing is known of windows; a classifier reads whole texts all the same.
    if any(layer.window is None for layer in layers) if ours else kind.of_text:
        kind.reach = None
    return kind


def _count_stacks(
    net: nn.Module, call: Callable[..., Any] | None, given: dict[int, list[str]]
) -> int:
    if call is None and isinstance(net, EncoderDecoder | DecoderOnly | EncoderOnly):
        return 2 if isinstance(net, EncoderDecoder) else 1
    if given[2]:
        return 2
    required = _num_required(net.forward) if call is None else _num_required(call) - 1
    if required in (1, 2):
        return required
    if given[1]:
        return 1
    raise UserError(
        f"cannot tell from the arguments of {'forward' if call is None else 'call'} how the net is "
        "called; pass stacks=2 if it reads a source and a target, stacks=1 if it reads one text"
    )


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's parameters by name; none where it does not say, as compiled code may not."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _num_required(function: Callable[..., Any]) -> int:
    """How many arguments it must be given by place."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = parameters_of(function).values()
    return sum(p.kind in by_place and p.default is p.empty for p in parameters)
