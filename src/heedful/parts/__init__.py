"""The parts that Transformers are built from; each can be used alone.

Attention
    `Attention`, `CrossAttention`: multi-head attention with masks, grouped keys, windows, a cache.
    `attend`: scaled dot-product attention as a function.
    `MaskSpec`: keys that each query may attend to. `Tokens`: ids with positions, padding, segments.
    `Cache`: keys and values of the tokens decoded so far.
Positions
    `SinusoidalTable`, `LearnedTable`: tables added to the embeddings.
    `RotaryPositions`: rotation of queries and keys; stretched over longer texts by
    `LinearScaling`, `NtkScaling`, `Llama3Scaling` or `YarnScaling`.
    `AlibiBias`, `RelativePositionBias`: biases of the attention scores.
Other layers
    `TokenEmbedding`: token ids to states. `FeedForward`: plain or gated. `Experts`: mixture of
    experts. `Dropout`, `ZeroCenteredRMSNorm`.
    `PostNorm`, `PreNorm`, `OutputNorm`, `SandwichNorm`: residual connections around a sub-layer.
Heads and losses
    `OutputHead`, `MaskedTokenTransform`, `MaskedTokenHead`, `ClassificationHead`: states to logits.
    `cross_entropy`, `head_loss`: losses as a sum and a count. `balance_loss`: of experts.
Weights
    `init_weights`: initialize each parameter once, by `xavier` or `normal`.
    `tied_linear`: an output layer that shares the weight of an embedding.

Names are imported on first use, so that `import heedful.parts` alone imports no torch.
"""

from typing import TYPE_CHECKING

from heedful.extras import lazily

if TYPE_CHECKING:
    from heedful.parts.attention import Attention, attend
    from heedful.parts.cache import Cache
    from heedful.parts.cross_attention import CrossAttention
    from heedful.parts.embeddings import LearnedTable, SinusoidalTable, TokenEmbedding
    from heedful.parts.experts import Experts, balance_loss
    from heedful.parts.feedforward import FeedForward
    from heedful.parts.heads import (
        ClassificationHead,
        MaskedTokenHead,
        MaskedTokenTransform,
        OutputHead,
        tied_linear,
    )
    from heedful.parts.init import init_weights, normal, xavier
    from heedful.parts.losses import cross_entropy, head_loss
    from heedful.parts.positions import (
        AlibiBias,
        LinearScaling,
        Llama3Scaling,
        NtkScaling,
        RelativePositionBias,
        RotaryPositions,
        YarnScaling,
    )
    from heedful.parts.residual import (
        Dropout,
        OutputNorm,
        PostNorm,
        PreNorm,
        SandwichNorm,
        ZeroCenteredRMSNorm,
    )
    from heedful.parts.tokens import MaskSpec, Tokens

__all__ = [  # noqa: RUF022
    "Attention",
    "CrossAttention",
    "attend",
    "MaskSpec",
    "Tokens",
    "Cache",
    "SinusoidalTable",
    "LearnedTable",
    "RotaryPositions",
    "LinearScaling",
    "NtkScaling",
    "Llama3Scaling",
    "YarnScaling",
    "AlibiBias",
    "RelativePositionBias",
    "TokenEmbedding",
    "FeedForward",
    "Experts",
    "Dropout",
    "ZeroCenteredRMSNorm",
    "PostNorm",
    "PreNorm",
    "OutputNorm",
    "SandwichNorm",
    "OutputHead",
    "MaskedTokenTransform",
    "MaskedTokenHead",
    "ClassificationHead",
    "cross_entropy",
    "head_loss",
    "balance_loss",
    "init_weights",
    "xavier",
    "normal",
    "tied_linear",
]

if not TYPE_CHECKING:
    __getattr__ = lazily(
        __name__,
        {
            "attention": ("Attention", "attend"),
            "cache": ("Cache",),
            "cross_attention": ("CrossAttention",),
            "embeddings": ("LearnedTable", "SinusoidalTable", "TokenEmbedding"),
            "experts": ("Experts", "balance_loss"),
            "feedforward": ("FeedForward",),
            "heads": (
                *("ClassificationHead", "MaskedTokenHead", "MaskedTokenTransform", "OutputHead"),
                "tied_linear",
            ),
            "init": ("init_weights", "normal", "xavier"),
            "losses": ("cross_entropy", "head_loss"),
            "positions": (
                *("AlibiBias", "LinearScaling", "Llama3Scaling", "NtkScaling"),
                *("RelativePositionBias", "RotaryPositions", "YarnScaling"),
            ),
            "residual": (
                *("Dropout", "OutputNorm", "PostNorm", "PreNorm", "SandwichNorm"),
                "ZeroCenteredRMSNorm",
            ),
            "tokens": ("MaskSpec", "Tokens"),
        },
    )


def __dir__() -> list[str]:
    return [*globals(), *__all__]
