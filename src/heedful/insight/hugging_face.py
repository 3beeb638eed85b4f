"""The call convention of transformers' nets: `input_ids`, `attention_mask`, `past_key_values`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.insight.kind import parameters_of
from heedful.parts.tokens import PaddingSide, padding_mask


class Arguments(NamedTuple):
    """Arguments of `verify` for a net of this convention."""

    call: Callable[..., Any]
    causal: bool | None
    pad_id: int | None
    left_padding: bool


def main_tensor(outputs: Any) -> Any:
    """The logits, or else the last states, of an object or a dictionary with fields."""
    if not isinstance(outputs, Tensor):
        for name in ("logits", "last_hidden_state"):
            is_mapping = isinstance(outputs, Mapping)
            value = outputs.get(name) if is_mapping else getattr(outputs, name, None)
            if isinstance(value, Tensor):
                return value
    return outputs


def takes_input_ids(net: nn.Module) -> bool:
    """True for nets of transformers, and others whose `forward` has the same names."""
    return {"input_ids", "attention_mask"} <= parameters_of(net.forward).keys()


def arguments_for(
    net: nn.Module, causal: bool | None, pad_id: int | None, left_padding: bool | None
) -> Arguments:
    """The arguments of a caller of `verify`, with what the net and its configuration say.

    A net that generates is causal. Left padding needs `position_ids`, which `generate` computes.
    """
    parameters = parameters_of(net.forward)
    configured = getattr(getattr(net, "config", None), "pad_token_id", None)
    if pad_id is None and isinstance(configured, int) and configured >= 0:
        pad_id = configured
    if "decoder_input_ids" in parameters:
        return Arguments(call_two_stacks, causal, pad_id, bool(left_padding))
    if causal is None:
        name, can_generate = type(net).__name__, getattr(net, "can_generate", None)
        if "ForMaskedLM" in name or "ForSequenceClassification" in name:
            causal = False
        elif can_generate is not None and can_generate():
            causal = True
    if left_padding is None:
        left_padding = bool(causal) and "position_ids" in parameters
    return Arguments(call_one_stack, causal, pad_id, left_padding)


def call_one_stack(
    net: nn.Module,
    ids: Int[Tensor, "B T"],
    lengths: Int[Tensor, "B"] | None = None,
    *,
    padding_side: PaddingSide = "right",
) -> Any:
    """Call a decoder or an encoder; on the left, positions are passed as in `generate`."""
    keywords = _options(net)
    if lengths is not None:
        mask = padding_mask(lengths, ids.size(1), padding_side).long()
        keywords["attention_mask"] = mask
        if padding_side == "left":
            keywords["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return net(input_ids=ids, **keywords)


def call_two_stacks(
    net: nn.Module,
    src: Int[Tensor, "B S"],
    tgt: Int[Tensor, "B T"],
    src_lengths: Int[Tensor, "B"] | None = None,
    tgt_lengths: Int[Tensor, "B"] | None = None,
    *,
    padding_side: PaddingSide = "right",
) -> Any:
    """Call an encoder-decoder; `tgt` begins with the start token of the decoder."""
    keywords = _options(net)
    if src_lengths is not None:
        keywords["attention_mask"] = padding_mask(src_lengths, src.size(1), padding_side).long()
    if tgt_lengths is not None:
        mask = padding_mask(tgt_lengths, tgt.size(1), padding_side)
        keywords["decoder_attention_mask"] = mask.long()
    return net(input_ids=src, decoder_input_ids=tgt, **keywords)


def _options(net: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in parameters_of(net.forward) else {}


class PastKeyValues:
    """Decoding with `past_key_values`, which the net makes at the first step.

    Attributes:
        starts: (N,), tokens of left padding of each row of a decoder; None: no padding.
        encoded: output of the encoder, for an encoder-decoder.
        source_mask: (N, S), its attention mask.
    """

    def __init__(
        self,
        net: nn.Module,
        starts: Int[Tensor, "N"] | None = None,
        src: Int[Tensor, "N S"] | None = None,
        src_lengths: Int[Tensor, "N"] | None = None,
        padding_side: PaddingSide = "right",
    ) -> None:
        self.net, self.starts = net, starts
        self.past: Any = None
        self.length = 0
        self.encoded: Any = None
        self.source_mask: Tensor | None = None
        if src is not None:
            if src_lengths is not None:
                mask = padding_mask(src_lengths, src.size(1), padding_side)
                self.source_mask = mask.long()
            encoder = cast(Any, net).get_encoder()
            self.encoded = encoder(input_ids=src, attention_mask=self.source_mask)

    def step(self, ids: Int[Tensor, "N t"]) -> Float[Tensor, "N t V"]:
        """Logits after each new token, or states of a net without a head."""
        columns = torch.arange(self.length + ids.size(1), device=ids.device)
        first, self.length = self.length, len(columns)
        keywords: dict[str, Any] = {"input_ids": ids}
        if self.encoded is not None:
            keywords = {"decoder_input_ids": ids, "encoder_outputs": self.encoded}
            keywords["attention_mask"] = self.source_mask
        elif self.starts is not None:
            real = columns >= self.starts[:, None]
            keywords["attention_mask"] = real.long()
            keywords["position_ids"] = (columns - self.starts[:, None]).clamp(min=0)[:, first:]
        out = self.net(**keywords, past_key_values=self.past, use_cache=True)
        self.past = out.past_key_values
        outputs: Tensor = main_tensor(out)
        return outputs

    def reorder(self, rows: Int[Tensor, "M"]) -> None:
        """Row i continues the former row `rows[i]`."""
        self.past.reorder_cache(rows)
        self.starts = None if self.starts is None else self.starts[rows]
        if self.encoded is not None:
            states = self.encoded.last_hidden_state[rows]
            self.encoded = type(self.encoded)(last_hidden_state=states)
        self.source_mask = None if self.source_mask is None else self.source_mask[rows]
