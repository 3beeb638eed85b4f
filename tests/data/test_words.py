"""Texts encoded word by word: equal to texts encoded whole, and a limit of the words in memory."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.data.words import WordCache
from heedful.errors import UserError

TEXT = [
    "Ein kleines Mädchen (vier Jahre alt) klettert in ein Spielhaus aus Holz!",
    "they're near many bushes, aren't they? \u201egut\u201c 3.50 € #1 a_b 100%",
    "今天天气很好，我们 去公园吧！",
    "a <s> b</s> ▁c ﷺ ¨ İ",
    *["a   \n\n  b    c "] * 9,  # pieces of several spaces
]
SIZES = {"bpe": 200, "unigram": 120, "wordpiece": 200, "byte_bpe": 300}
ALPHABET = "".join(sorted({c for line in TEXT for c in line}))
CACHED = ("bpe", "unigram", "wordpiece", "word", "byte_bpe")
WHITESPACE = " \t\n\x1c\x85\xa0\u2003\u2028\u3000"
MARKS = (
    "\u0301\u0345\u0308\xa8\uffe3\ufdfa\u2581\u0130\u03a3"  # accents, and what expands to spaces
)


@cache
def _trained(kind: str, normalization: Any) -> Tokenizer:
    return train_tokenizer(
        TEXT,
        kind=kind,
        vocab_size=SIZES.get(kind),
        or_fewer=True,
        lowercase=True,
        normalization=normalization,
    )


@pytest.mark.parametrize("normalization", ["nfkc", "none"])
@pytest.mark.parametrize("kind", CACHED)
@given(
    texts=st.lists(
        st.text(
            st.sampled_from(ALPHABET + MARKS)
            | st.sampled_from(WHITESPACE)
            | st.characters(exclude_categories=["Cs"])
        )
    )
)
@settings(max_examples=40, deadline=None)
def test_texts_encoded_word_by_word_equal_texts_encoded_whole(
    kind: str, normalization: Any, texts: list[str]
) -> None:
    tokenizer = _trained(kind, normalization)
    texts = [*texts, *TEXT]
    assert tokenizer._words is not None
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_the_words_that_are_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.data.words._MAX_CHARACTERS", 12)
    encoded: list[str] = []

    def encode(words: list[str]) -> list[list[int]]:
        encoded.extend(sorted(words))
        return [[len(word)] for word in words]

    words = WordCache(encode, "spaces")
    for text, new in [
        ("aa bbb aa", ["aa", "bbb"]),
        ("bbb cccc", ["cccc"]),
        ("aa dddd", ["aa", "dddd"]),  # over the limit: only this batch's words are kept
        ("aa bbb", ["bbb"]),
        ("aa " + "e" * 13, ["aa", "e" * 13]),  # over the limit by itself: none is kept
        ("aa", ["aa"]),
    ]:
        encoded.clear()
        assert words.encode_batch([text, ""]) == [[len(w) for w in text.split()], [0]]
        assert [word for word in encoded if word] == new
    for wrong in ([None], [b"a"], "ab"):
        with pytest.raises(UserError, match="texts must be a list of texts"):
            _trained("bpe", "nfkc").encode_batch(wrong)  # type: ignore[arg-type]
