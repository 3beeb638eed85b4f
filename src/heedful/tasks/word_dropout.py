"""Word dropout: tokens that a net reads are hidden by chance while it learns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from heedful.data.collate import Batch
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.parts.losses import LossSum
from heedful.parts.tokens import Tokens
from heedful.training.step import LossFunction


class WordDropoutLoss:
    """A loss of batches in which each ordinary token is hidden with probability `p`.

    Iyyer et al. 2015, sec. 3.1; for both sides of pairs Sennrich et al. 2016, "Edinburgh Neural
    Machine Translation Systems for WMT 16", after Gal and Ghahramani 2016. What is hidden becomes
    the mask, or is unknown where the tokenizer has none. Targets stay.

    Args:
        loss: the loss that gets the batches.
        tokenizers: of source and target, or of the one text twice.

    Raises:
        UserError: a tokenizer without mask and unknown token.
    """

    def __init__(
        self,
        loss: LossFunction,
        tokenizers: Sequence[Tokenizer],
        p: float,
        device: torch.device,
    ) -> None:
        self._loss, self._p = loss, p
        self._replaced = [_replacements(tokenizer).to(device) for tokenizer in tokenizers]

    def __call__(self, net: Any, batch: Batch) -> LossSum:
        if net.training:
            src, tgt = self._replaced
            source = None if batch.source is None else self._hidden(batch.source, src)
            batch = replace(batch, tokens=self._hidden(batch.tokens, tgt), source=source)
        return self._loss(net, batch)

    def _hidden(self, tokens: Tokens, replaced: torch.Tensor) -> Tokens:
        ids = tokens.ids
        drawn = torch.rand(ids.shape, device=ids.device) < self._p
        return replace(tokens, ids=torch.where(drawn, replaced[ids], ids))


def _replacements(tokenizer: Tokenizer) -> torch.Tensor:
    """By id what stands in its place when it is hidden; for specials the same."""
    mask_id = tokenizer.specials.mask_id
    hidden_id = tokenizer.unk_id if mask_id is None else mask_id
    if hidden_id < 0:
        raise UserError("training.word_dropout needs a mask or an unknown token in the tokenizer")
    special = sorted(tokenizer.special_ids)
    table = torch.full((tokenizer.vocab_size,), hidden_id)
    table[special] = torch.tensor(special)
    return table
