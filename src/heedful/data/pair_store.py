"""Pairs of sentences as token ids on disk: two stores of equal length."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Int64

from heedful.data.corpus import CorpusReport, Pair
from heedful.data.store import CHUNK, IdStore, joined, open_ids, pack_ids, write_store
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError


class PairStore:
    """The source and target sides of a corpus, of equal length; every sequence ends in EOS."""

    def __init__(self, src: IdStore, tgt: IdStore) -> None:
        assert len(src) == len(tgt), (len(src), len(tgt))
        self.src = src
        self.tgt = tgt

    def __len__(self) -> int:
        return len(self.src)

    @property
    def src_lengths(self) -> Int64[np.ndarray, " N"]:
        """Source lengths in tokens, EOS counted."""
        return self.src.lengths

    @property
    def tgt_lengths(self) -> Int64[np.ndarray, " N"]:
        """Target lengths in tokens, EOS counted; the decoder's input is as long."""
        return self.tgt.lengths


def open_pairs(directory: Path) -> PairStore:
    """Open what `encode_pairs` wrote into a directory.

    Raises:
        UserError: a file is missing or damaged, or the sides differ in length.
    """
    src, tgt = open_ids(directory / "src"), open_ids(directory / "tgt")
    if len(src) != len(tgt):
        raise UserError(
            f"{directory} holds {len(src)} sources but {len(tgt)} targets; encode the corpus again"
        )
    return PairStore(src, tgt)


def encode_pairs(
    pairs: Sequence[Pair],
    src_tokenizer: Tokenizer,
    tgt_tokenizer: Tokenizer,
    directory: Path,
    *,
    max_length: int,
    too_long: Literal["error", "drop", "truncate"],
    report: CorpusReport | None = None,
) -> tuple[PairStore, CorpusReport]:
    """Tokenise a corpus into `directory` and open it.

    Both sides are stored as their tokens and EOS (an imported model's with what else it expects
    around a text); what the decoder hears first is put before the target when a batch is made.
    Lengths and `max_length` count these marks.

    Args:
        too_long: what becomes of a pair with a side above `max_length`: an error, left out, or
            cut so that EOS is still its last token.
        report: the one of `read_pairs`, for line numbers and to count on from.

    Returns:
        The store, and the report with over-long pairs, tokens (marks not counted) and unknown
        tokens filled in.

    Raises:
        UserError: an over-long pair under "error"; nothing left; the directory not writable.
    """
    if report is None:
        report = CorpusReport(num_lines=len(pairs), num_kept=len(pairs))
    tokenizers = (src_tokenizer, tgt_tokenizer)
    chunks: list[tuple[IdStore, IdStore]] = []
    num_over = 0
    for start in range(0, len(pairs), CHUNK):
        encoded = _encode(pairs[start : start + CHUNK], tokenizers)
        kept = []
        for index, pair in enumerate(encoded, start):
            if max(map(len, pair)) > max_length:
                num_over += 1
                if too_long == "error":
                    raise _over_long(report.place(index), pair, max_length)
                if too_long == "drop":
                    continue
                for ids in pair:
                    ids[:] = [*ids[: max_length - 1], ids[-1]] if len(ids) > max_length else ids
            kept.append(pair)
        src_ids, tgt_ids = [pair[0] for pair in kept], [pair[1] for pair in kept]
        chunks.append(
            (
                pack_ids(src_ids, src_tokenizer.vocab_size),
                pack_ids(tgt_ids, tgt_tokenizer.vocab_size),
            )
        )
    src, tgt = joined([chunk[0] for chunk in chunks]), joined([chunk[1] for chunk in chunks])
    if len(src) == 0:
        raise UserError(
            f"no pair is left: all {len(pairs)} are longer than max_length {max_length}; raise it"
        )
    write_store(directory / "src", src)
    write_store(directory / "tgt", tgt)
    return open_pairs(directory), replace(
        report,
        num_kept=len(src),
        num_dropped=num_over if too_long == "drop" else 0,
        num_truncated=num_over if too_long == "truncate" else 0,
        num_src_tokens=len(src.ids) - len(src) * len(src_tokenizer.frame([])),
        num_tgt_tokens=len(tgt.ids) - len(tgt) * len(tgt_tokenizer.frame([])),
        num_src_unknown=int((src.ids == src_tokenizer.unk_id).sum()),
        num_tgt_unknown=int((tgt.ids == tgt_tokenizer.unk_id).sum()),
        origins=(),  # they name the pairs as they were before any was dropped
    )


def _encode(
    pairs: Sequence[Pair], tokenizers: tuple[Tokenizer, Tokenizer]
) -> list[tuple[list[int], list[int]]]:
    src, tgt = (
        [tokenizer.frame(ids) for ids in tokenizer.encode_batch([pair[side] for pair in pairs])]
        for side, tokenizer in enumerate(tokenizers)
    )
    return list(zip(src, tgt, strict=True))


def _over_long(place: str, pair: tuple[list[int], list[int]], max_length: int) -> UserError:
    return UserError(
        f"{place}: {len(pair[0])} source and {len(pair[1])} target tokens (end mark counted),"
        f" more than max_length {max_length}; raise it, or set too_long to drop or truncate"
    )
