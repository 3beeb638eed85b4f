"""Forms of a net for engines, made of its own tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heedful.data.tokenizer import Tokenizer
from heedful.engines.ctranslate2_engine import HEAD, INSTALL, Facts
from heedful.engines.ctranslate2_spec import embeddings_of, longest_prompt, write
from heedful.engines.vocabulary import vocabulary_of
from heedful.errors import UserError
from heedful.models.decoder_only import DecoderOnly
from heedful.models.encoder_decoder import EncoderDecoder
from heedful.parts.heads import ClassificationHead


def write_form(
    net: Any,
    tokenizers: Sequence[Tokenizer | None],
    directory: Path,
    precision: str,
    **roles: Any,
) -> Facts:
    """Write a net as what CTranslate2 opens into a directory that is there, and what to know of it.

    Args:
        tokenizers: of the source and the target; of a net of one stack the first counts.
        roles: start, end and adds_end of `vocabulary_of`.

    Raises:
        UserError: CTranslate2 is not installed, or cannot run the net: with every reason.
    """
    try:
        import ctranslate2  # noqa: F401
    except ImportError:
        raise UserError(INSTALL) from None
    sizes = [embedding.tokens.num_embeddings for embedding in embeddings_of(net)]
    write(net, directory, vocabulary_of(sizes, tokenizers[: len(sizes)], **roles), precision)
    if isinstance(net.head, ClassificationHead):
        parts = (net.head.labels.weight, net.head.labels.bias)
        weight, bias = (part.detach().to(torch.float32).cpu().numpy() for part in parts)
        np.savez(directory / HEAD, weight=weight, bias=bias)
    if isinstance(net, EncoderDecoder):
        return Facts("encoder_decoder")
    if isinstance(net, DecoderOnly):
        return Facts("decoder_only", longest_prompt(net))
    types = net.embedding.types
    return Facts("encoder_only", num_types=0 if types is None else types.num_embeddings)
