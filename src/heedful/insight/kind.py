"""What kind of net it is: how it is called, what its outputs are of, and what may see what."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import nn

from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.models.encoder_only import EncoderOnly
from heedful.parts.attention import Attention
from heedful.parts.heads import ClassificationHead, OutputProjection

Side = Literal["src", "tgt", "ids"]
Outputs = Literal["tokens", "classes", "states", "vectors"]
Stacks = Literal[1, 2]

NAMES: dict[Side, str] = {"src": "source", "tgt": "target", "ids": "text"}
LENGTHS: dict[Side, str] = {"src": "src_lengths", "tgt": "tgt_lengths", "ids": "lengths"}
SIZES: dict[Side, str] = {"src": "src_vocab_size", "tgt": "tgt_vocab_size", "ids": "vocab_size"}


@dataclass(frozen=True)
class Kind:
    """What is asked of a net.

    Attributes:
        sides: the sequences it is called with; outputs stand at the positions of the last one.
        causal: whether a position must not see those after it.
        outputs: tokens: logits (B, T, V); classes: logits (B, C), one row a text; states:
            (B, T, D); vectors: (B, D), one a text.
        reach: how many places away a token must still be seen; None: however far. 1 where some
            layer may look through a window.
    """

    sides: tuple[Side, ...]
    causal: bool
    outputs: Outputs = "tokens"
    reach: int | None = 1

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
        return self.outputs in ("classes", "vectors")

    @property
    def words(self) -> dict[str, str]:
        """What checks call things: `{outputs}`, `{written}` (before "token"), `{size}`."""
        return {
            "outputs": "logits" if self.outputs in ("tokens", "classes") else self.outputs,
            "written": "" if self.single else "target ",
            "size": "C" if self.outputs == "classes" else "V",
        }

    @property
    def no_loss(self) -> str | None:
        """Why there is no loss to look at; None: there is one."""
        if self.outputs in ("tokens", "classes"):
            return None
        return f"the net gives {self.outputs}, not logits: it has no loss of its own"


def kind_of(
    net: nn.Module,
    call: Callable[..., Any] | None,
    *,
    stacks: Stacks | None,
    causal: bool | None,
    outputs: Outputs | None,
    sizes: dict[Side, int | None],
) -> tuple[Kind, bool]:
    """The kind of a net, and whether its outputs are known; else they are yet to be looked at.

    What is told goes before what is seen. Raises UserError where neither is enough.
    """
    if stacks not in (None, 1, 2):
        raise UserError(f"stacks must be 1 or 2, not {stacks}")
    if outputs is not None and outputs not in get_args(Outputs):
        raise UserError(f"outputs must be one of {', '.join(get_args(Outputs))}, not {outputs}")
    told = {
        2: [SIZES[side] for side in ("src", "tgt") if sizes[side] is not None],
        1: [SIZES["ids"]] * (sizes["ids"] is not None)
        + ["causal"] * (causal is not None)
        + ["outputs"] * (outputs is not None),
    }
    count = stacks or _count_stacks(net, call, told)
    if wrong := told[3 - count]:
        have = "one stack" if count == 1 else "two stacks"
        raise UserError(
            f"{wrong[0]}= is not for a net of {have}; pass stacks={3 - count} if it has "
            f"{'two' if count == 1 else 'one'}"
        )
    if count == 2:
        return Kind(("src", "tgt"), causal=True), True
    ours = isinstance(net, DecoderOnly | EncoderOnly)
    if causal is None:
        causal = _is_causal(net)
    seen = outputs or _own_outputs(net)
    kind = Kind(("ids",), causal, seen or "tokens")
    # Of a foreign net nothing is known of windows; a classifier reads whole texts all the same.
    reach = _reach(net) if ours else None if kind.of_text else 1
    return replace(kind, reach=reach), seen is not None


def _count_stacks(
    net: nn.Module, call: Callable[..., Any] | None, told: dict[int, list[str]]
) -> int:
    if call is None and isinstance(net, EncoderDecoder):
        return 2
    if call is None and isinstance(net, DecoderOnly | EncoderOnly):
        return 1
    if told[2]:
        return 2
    required = _required(net.forward) if call is None else _required(call) - 1
    if required in (1, 2):
        return required
    if told[1]:
        return 1
    what = "forward" if call is None else "call"
    raise UserError(
        f"cannot tell from the arguments of {what} how the net is called; pass stacks=2 if it "
        "reads a source and a target, stacks=1 if it reads one text"
    )


def _required(function: Callable[..., Any]) -> int:
    """How many arguments it must be given by place; 0 where it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # compiled code may have none
        return 0
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in by_place and p.default is p.empty for p in parameters)


def _is_causal(net: nn.Module) -> bool:
    if isinstance(net, DecoderOnly | EncoderOnly):
        return isinstance(net, DecoderOnly)
    raise UserError(
        "a net of one stack: pass causal=True if no token may see later ones (a decoder), "
        "causal=False if all may see all (an encoder); stacks=2 if it reads a source and a target"
    )


def _own_outputs(net: nn.Module) -> Outputs | None:
    """What a net of ours gives, by its head; None: not one of ours."""
    if not isinstance(net, DecoderOnly | EncoderOnly):
        return None
    if isinstance(net.head, ClassificationHead):
        return "classes"
    if net.head is None:
        return "states"
    return "tokens" if isinstance(net.head, OutputProjection) else None


def _reach(net: nn.Module) -> int | None:
    """Unlimited where a layer has no window."""
    layers = [module for module in net.modules() if isinstance(module, Attention)]
    return None if any(layer.window is None for layer in layers) else 1
