"""Word dropout: random replacement of input tokens in training."""

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
    """A loss on batches in which each ordinary input token is replaced with probability `p`.

    Iyyer et al. 2015, sec. 3.1; for both sides of pairs Sennrich et al. 2016, "Edinburgh Neural
    Machine Translation Systems for WMT 16", after Gal and Ghahramani 2016. The replacement is
    the mask token, or the unknown token if the tokenizer has no mask. Targets are unchanged.

    Args:
        loss: the loss of the changed batches.
        tokenizers: of source and target; the same one twice for a task with one side.

    Raises:
        UserError: a tokenizer with neither mask nor unknown token.
    """

    def __init__(
        self,
        loss: LossFunction,
        tokenizers: Sequence[Tokenizer],
        p: float,
        device: torch.device,
    ) -> None:
        self._loss, self._p = loss, p
        self._replacements = [_replacement_table(tokenizer).to(device) for tokenizer in tokenizers]

    def __call__(self, net: Any, batch: Batch) -> LossSum:
        if net.training:
            src, tgt = self._replacements
            source = None if batch.source is None else self._replace(batch.source, src)
            batch = replace(batch, tokens=self._replace(batch.tokens, tgt), source=source)
        return self._loss(net, batch)

    def _replace(self, tokens: Tokens, table: torch.Tensor) -> Tokens:
        ids = tokens.ids
        is_replaced = torch.rand(ids.shape, device=ids.device) < self._p
        return replace(tokens, ids=torch.where(is_replaced, table[ids], ids))


def _replacement_table(tokenizer: Tokenizer) -> torch.Tensor:
    """(V,): the replacement of each token id; special tokens map to themselves."""
    mask_id = tokenizer.specials.mask_id
    replacement = tokenizer.unk_id if mask_id is None else mask_id
    if replacement < 0:
        raise UserError("training.word_dropout needs a mask or an unknown token in the tokenizer")
    special = sorted(tokenizer.special_ids)
    table = torch.full((tokenizer.vocab_size,), replacement)
    table[special] = torch.tensor(special)
    return table
