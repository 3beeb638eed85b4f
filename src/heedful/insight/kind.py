"""The kind of a net: its inputs, its outputs and its attention (causal or not, windows)."""

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
class NetKind:
    """The kind of a net, which determines the checks.

    Attributes:
        sides: the sequences of a call; outputs are at the positions of the last one.
        causal: positions must not depend on later ones.
        output_kind: tokens: logits (B, T, V); classes: logits (B, C), one row per text; states:
            (B, T, D); vectors: (B, D), one per text; None: not known yet.
        reach: largest distance, in tokens, at which a token must have an effect; None: any. It is 1
            if attention may be restricted to windows.
        max_distance: for one stack: largest distance at which a token may have an effect, since
            every layer has a window; None: any, or unknown.
    """

    sides: tuple[Side, ...]
    causal: bool
    output_kind: Outputs | None
    reach: int | None
    max_distance: int | None

    @property
    def output_side(self) -> Side:
        """The side at whose positions the outputs are."""
        return self.sides[-1]

    @property
    def is_single_stack(self) -> bool:
        """True for decoder-only and encoder-only nets, False for encoder-decoders."""
        return len(self.sides) == 1

    @property
    def is_pooled(self) -> bool:
        """True if there is one output per text, not per position."""
        return self.output_kind in ("classes", "vectors")

    @property
    def outputs_name(self) -> str:
        """The word for the outputs in messages: logits, states or vectors."""
        return self.output_kind if self.output_kind in ("states", "vectors") else "logits"

    @property
    def terms(self) -> dict[str, str]:
        """Replacements in the texts of checks: `{outputs}`, `{target}` before "token", `{size}`."""
        return {
            "outputs": self.outputs_name,
            "target": "" if self.is_single_stack else "target ",
            "size": "C" if self.output_kind == "classes" else "V",
        }


def infer_kind(
    net: nn.Module,
    call: Callable[..., Any] | None,
    stacks: Stacks | None,
    causal: bool | None,
    outputs: Outputs | None,
    sizes: dict[Side, int | None],
) -> NetKind:
    """The kind of a net, by the arguments of `verify`, else by its class, signature and layers.

    Raises:
        UserError: the kind cannot be determined, or the arguments contradict each other.
    """
    if stacks not in (None, 1, 2):
        raise UserError(f"stacks must be 1 or 2, not {stacks}")
    if outputs is not None and outputs not in get_args(Outputs):
        raise UserError(f"outputs must be one of {', '.join(get_args(Outputs))}, not {outputs}")
    # Names of the arguments that are only for nets with this number of stacks.
    specific = {
        2: [SIZES[side] for side in ("src", "tgt") if sizes[side] is not None],
        1: [SIZES["ids"]] * (sizes["ids"] is not None)
        + ["causal"] * (causal is not None)
        + ["outputs"] * (outputs is not None),
    }
    count = stacks or _count_stacks(net, call, specific)
    if wrong := specific[3 - count]:
        actual, other = ("one stack", "two") if count == 1 else ("two stacks", "one")
        raise UserError(
            f"{wrong[0]}= is not for a net with {actual}; pass stacks={3 - count} if it has {other}"
        )
    if count == 2:
        return NetKind(
            ("src", "tgt"), causal=True, output_kind="tokens", reach=1, max_distance=None
        )
    is_heedful_net = isinstance(net, DecoderOnly | EncoderOnly)
    if causal is None and not is_heedful_net:
        raise UserError(
            "a net with one stack: pass causal=True for a decoder, causal=False for an encoder; "
            "stacks=2 if it takes a source and a target"
        )
    causal = isinstance(net, DecoderOnly) if causal is None else causal
    if is_heedful_net and outputs is None:
        outputs = "tokens" if isinstance(net.head, OutputHead) else None
        if net.head is None or isinstance(net.head, ClassificationHead):
            outputs = "states" if net.head is None else "classes"
    kind = NetKind(("ids",), causal, outputs, reach=1, max_distance=None)
    layers = [module for module in net.modules() if isinstance(module, Attention)]
    windows = [layer.window for layer in layers]
    if is_heedful_net and windows and None not in windows:
        kind.max_distance = sum(window - 1 for window in windows if window is not None)
    # Other nets with one output per position can have windows.
    if None in windows if is_heedful_net else kind.is_pooled:
        kind.reach = None
    return kind


def _count_stacks(
    net: nn.Module, call: Callable[..., Any] | None, specific: dict[int, list[str]]
) -> int:
    """The number of stacks by class, by specific arguments, or by required parameters."""
    if call is None and isinstance(net, EncoderDecoder | DecoderOnly | EncoderOnly):
        return 2 if isinstance(net, EncoderDecoder) else 1
    if specific[2]:
        return 2
    required = _num_required(net.forward) if call is None else _num_required(call) - 1
    if required in (1, 2):
        return required
    if specific[1]:
        return 1
    raise UserError(
        f"cannot tell from the parameters of {'forward' if call is None else 'call'} how the net "
        "is called; pass stacks=2 if it takes a source and a target, stacks=1 if one text"
    )


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """A function's parameters by name; {} without a signature (some compiled functions)."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}


def _num_required(function: Callable[..., Any]) -> int:
    """The number of required positional parameters."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = parameters_of(function).values()
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
