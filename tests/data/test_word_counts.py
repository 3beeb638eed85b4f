"""Training on distinct words: the same tokenizer as training on the texts."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.data.rows import INVISIBLE_CHARACTER
from heedful.data.tokenizer import train_tokenizer
from heedful.data.tokenizer_training import (
    SPECIALS,
    TrainingSettings,
    _canonical,
    _trainer,
    _untrained,
)
from heedful.data.words import SPLIT, _batches, _repeated, count_words, train_on_words
from heedful.errors import UserError

ALPHABET = "aaabbéΣİ.,3 \t\n\x1c\x85\xa0\u3000 \u0301\u0345\u0308\xa8\uffe3\ufdfa\u2581今😀<>"
TEXTS = st.lists(st.text(ALPHABET, max_size=12), max_size=12)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "byte_bpe"])
@given(texts=TEXTS, repeats=st.integers(1, 9), normalization=st.sampled_from(["nfkc", "nfc", None]))
@settings(max_examples=40, deadline=None)
def test_training_on_words_equals_training_on_texts(
    kind: str, texts: list[str], repeats: int, normalization: Any
) -> None:
    texts = ["ab. Aa b", *texts, *texts[:3] * repeats]
    choices = TrainingSettings(kind, 300, True, normalization, SPECIALS, False, "none", True)
    words = count_words(texts, "borders" if kind == "byte_bpe" else "spaces")
    known = {*INVISIBLE_CHARACTER.findall("".join(texts))}
    one, other = _untrained(choices, known), _untrained(choices, known)
    trainer = _trainer(one, texts, texts, choices)
    one.train_from_iterator(texts, trainer=trainer)
    train_on_words(other, words, _trainer(other, texts, words, choices))
    expected, actual = (json.loads(_canonical(b, choices).to_str()) for b in (one, other))
    assert actual == expected


@pytest.mark.parametrize("separation", ["spaces", "borders"])
def test_words_have_the_order_and_counts_of_one_process(
    separation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    texts = [" ".join(draw.choices(f"{ALPHABET}\ud800", k=draw.randint(0, 9))) for _ in range(300)]
    texts = [*map("".join, zip(texts, map(str, range(300)), strict=True))]  # new words everywhere
    split = SPLIT[separation]
    expected = Counter(word for text in texts for word in split(text))
    monkeypatch.setattr("heedful.data.words._WORKER_CHARACTERS", 1)
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr("heedful.data.words._BATCH_BYTES", size)
        batches = [*_batches(texts)]
        sent = [text.decode("utf-8", "surrogatepass") for batch in batches for text in batch]
        assert sent == texts
        assert all(sum(map(len, batch[:-1])) < size for batch in batches)
        for num_workers in (1, 2, 3) if size == 100 else (1,):
            words = count_words(texts, separation, num_workers)
            assert [*words.items()] == [*expected.items()]
    assert not count_words([], separation, 2)


def test_texts_for_trainers_have_each_piece_as_often_as_it_occurs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("heedful.data.words._PIECES", 4)
    counts = Counter({"a": 9, "b": 1, "c": 4, "d": 3, "e": 3})
    texts = [*_repeated(counts)]
    assert Counter(piece for text in texts for piece in text.split("\n") if piece) == counts
    assert max(len(text.split("\n")) for text in texts) < 8


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "2", None])
def test_a_wrong_number_of_workers_is_one_line(number: Any) -> None:
    with pytest.raises(UserError, match=r"^num_workers must be a whole number from 1, not "):
        train_tokenizer(["a b c"], kind="word", num_workers=number)
