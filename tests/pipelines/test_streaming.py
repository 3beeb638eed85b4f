"""Streamed text: the pieces join to the final text, or contain all of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_models import TEXTS, model_of
from heedful.backends.base import GenerationRequest
from heedful.backends.torch.eager import Eager
from heedful.data.hf_tokenizers import open_tokenizer
from heedful.data.tokenizer import Tokenizer, train_tokenizer

LINES = [*TEXTS, "don't say n't; it's naïve, we've 3 € and 今天 👍🏽", "a b . ? ! ' t s"] * 3


class FixedTokens(Eager):
    """A backend that returns given tokens, one at a time."""

    ids: list[int]

    def stream_tokens(
        self, row: list[int], request: GenerationRequest
    ) -> Iterator[tuple[list[int], bool]]:
        for place, token in enumerate(self.ids, 1):
            yield [token], place == len(self.ids)


def streamed(model: Any, ids: list[int], **options: Any) -> tuple[list[str], str]:
    """The pieces for some tokens, and the final text."""
    model.backend = FixedTokens(model.net, model.config.max_length)
    model.backend.ids = ids
    pieces, stream = [], model.stream([6], **options)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def wordpiece(directory: Path) -> Tokenizer:
    """BERT's imported tokenizer: its decoder joins apostrophes to the word before them."""
    pieces = "[PAD] [UNK] [CLS] [SEP] [MASK] do n ##n ' ##' t ##t n't 's . ##. go"
    (directory / "vocab.txt").write_text(pieces.replace(" ", "\n"))
    return open_tokenizer(directory)


KINDS = ["bpe", "unigram", "wordpiece", "byte_bpe", "word", "char", "byte", "imported"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Any:
    """A language model with a tokenizer of this kind."""
    opened = model_of("gpt2")
    size = None if request.param == "byte" else 300
    opened._src_tokenizer = opened._tgt_tokenizer = (
        wordpiece(tmp_path_factory.mktemp("wordpiece"))
        if request.param == "imported"
        else train_tokenizer(LINES, kind=request.param, vocab_size=size, or_fewer=True)
    )
    return opened


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 2**16), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["do", "n't g", " ", "a b", "\N{REPLACEMENT CHARACTER}"])),
)
def test_pieces_join_to_the_text_for_every_tokenizer(
    model: Any, numbers: list[int], stop: list[str]
) -> None:
    """Also if tokens end inside a character, or begin with punctuation."""
    ids = [number % model.tokenizer.vocab_size for number in numbers]
    pieces, text = streamed(model, ids, stop=stop)
    whole = model.tokenizer.decode(ids)
    assert text == whole[: min((whole.find(s) for s in stop if s in whole), default=None)]
    assert "".join(pieces) == text
    assert "" not in pieces
