"""Nets built from parts: stacks of blocks and the three families of Transformers.

`Block`, `Stack`: self-attention, cross-attention and feed-forward, and a sequence of such blocks.
`DecoderOnly`: a language model, `net(ids)` -> next-token logits.
`EncoderDecoder`: sequence to sequence, `net(src, tgt)` -> next-token logits of the target.
`EncoderOnly`: `net(ids)` -> masked-token logits, class logits or states.
`LoRA`, `add_lora`, `merge_lora`, `freeze`: low-rank adapters and frozen parameters of a net.

Names are imported on first use, so that `import heedful.models` alone imports no torch.
"""

from typing import TYPE_CHECKING

from heedful.extras import lazily

if TYPE_CHECKING:
    from heedful.models.adapters import LoRA, add_lora, freeze, merge_lora
    from heedful.models.decoder_only import DecoderOnly
    from heedful.models.encoder_decoder import EncoderDecoder
    from heedful.models.encoder_only import EncoderOnly
    from heedful.models.stack import Block, Stack

__all__ = [
    "Block",
    "DecoderOnly",
    "EncoderDecoder",
    "EncoderOnly",
    "LoRA",
    "Stack",
    "add_lora",
    "freeze",
    "merge_lora",
]

if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "adapters": ("LoRA", "add_lora", "freeze", "merge_lora"),
            "decoder_only": ("DecoderOnly",),
            "encoder_decoder": ("EncoderDecoder",),
            "encoder_only": ("EncoderOnly",),
            "stack": ("Block", "Stack"),
        },
    )


def __dir__() -> list[str]:
    return [*globals(), *__all__]
