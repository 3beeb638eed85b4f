"""Subword regularization: the papers' distributions, unchanged text, seeds, epochs and lengths."""

import json
import math
import random
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from heedful.data import subword_sampling
from heedful.data.columns import Columns, Sequences, pack_ids
from heedful.data.encoding import TextColumn, encode_rows
from heedful.data.plans import pack_rows
from heedful.data.rows import Rows
from heedful.data.subword_sampling import SubwordSampler
from heedful.data.subwords import BpeDropout, UnigramSampling, make_splitter
from heedful.data.tokenizer import Tokenizer, train_tokenizer
from heedful.errors import UserError

TEXTS = [
    "the cats sat on the mats, and the bats ate the oats",
    "a cat that sat is a fat cat; 12 cats sat",
    "don't eat the hats: that's what 1234 rats ate",
    "the oats",
]
DRAWS = 20_000
# a b c d e; ab, abc, de, bc: two ways to abc, and de apart.
MERGES = {(1, 2): 6, (6, 3): 7, (4, 5): 8, (2, 3): 9}


def tokenizer_of(kind: str) -> Tokenizer:
    size = {"byte_bpe": 290, "unigram": 35}.get(kind, 60)
    return train_tokenizer(TEXTS, kind=kind, vocab_size=size)


def columns_of(tokenizer: Tokenizer) -> Columns:
    column = TextColumn(tokenizer, ("text",), "document")
    return encode_rows(Rows({"text": TEXTS}), {"text": column})


def columns_of_bpe() -> Columns:
    return columns_of(tokenizer_of("bpe"))


def sampler_of(
    tokenizer: Tokenizer, strength: float, columns: Columns | None = None, **keys: int
) -> SubwordSampler:
    columns = columns or columns_of(tokenizer)
    return SubwordSampler(columns, {"text": tokenizer}, strength, **({"seed": 1} | keys))


def sampled(sampler: SubwordSampler, epoch: int = 0, name: str = "text") -> Sequences:
    """All rows of an epoch, taken at once."""
    rows = sampler.epoch(epoch).sequences(name)
    return rows.take(np.arange(len(rows)))


def frequencies(samples: list[list[int]]) -> dict[tuple[int, ...], float]:
    return {ids: count / len(samples) for ids, count in Counter(map(tuple, samples)).items()}


def assert_frequencies(samples: list[list[int]], expected: dict[tuple[int, ...], float]) -> None:
    """Frequencies within five standard deviations, and no other outcomes."""
    actual = frequencies(samples)
    assert actual.keys() <= expected.keys()
    for ids, p in expected.items():
        deviation = math.sqrt(p * (1 - p) / len(samples))
        assert actual.get(ids, 0.0) == pytest.approx(p, abs=5 * deviation), ids


def by_algorithm_1(symbols: tuple[int, ...], p: float) -> dict[tuple[int, ...], float]:
    """The probability of each split: the k-th of the possible merges is made with p^k (1 - p)."""
    ranks = list(MERGES)
    possible = [i for i, pair in enumerate(pairwise(symbols)) if pair in MERGES]
    possible.sort(key=lambda i: ranks.index((symbols[i], symbols[i + 1])))
    actual = Counter({symbols: p ** len(possible)})
    for number, i in enumerate(possible):
        after = (*symbols[:i], MERGES[symbols[i], symbols[i + 1]], *symbols[i + 2 :])
        for split, chance in by_algorithm_1(after, p).items():
            actual[split] += p**number * (1 - p) * chance
    return actual


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_bpe_dropout_has_the_distribution_of_the_paper(p: float) -> None:
    expected = by_algorithm_1((1, 2, 3, 4, 5), p)
    assert sum(expected.values()) == pytest.approx(1)
    actual = BpeDropout(MERGES, p)((7, 8), DRAWS, random.Random(0))
    assert_frequencies(actual, expected)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_unigram_sampling_has_the_distribution_of_the_paper(alpha: float) -> None:
    pieces = {"a": -2.0, "b": -3.0, "ab": -1.5, "ba": -4.0, "aba": -6.0, "x": -1.0}
    numbered = {text: (score, i) for i, (text, score) in enumerate(pieces.items(), 4)}
    splits = [["a", "b", "a"], ["ab", "a"], ["a", "ba"], ["aba"]]
    weights = [math.exp(alpha * sum(pieces[text] for text in split)) for split in splits]
    expected = {
        tuple(numbered[text][1] for text in split): weight / sum(weights)
        for split, weight in zip(splits, weights, strict=True)
    }
    actual = UnigramSampling(numbered, alpha)(tuple(expected)[1], DRAWS, random.Random(0))
    assert_frequencies(actual, expected)


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "unigram"])
def test_splits_keep_the_text_and_depend_on_seed_and_epoch(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    stored = columns_of(tokenizer).sequences("text")
    one, other = sampler_of(tokenizer, 0.3), sampler_of(tokenizer, 0.3)
    sampled(other, 7)  # the samples before do not matter
    samplers = ((one, 0), (one, 1), (sampler_of(tokenizer, 0.3, seed=2), 1))
    samples = [sampled(sampler, number) for sampler, number in samplers]
    assert sampled(other, 1).ids.tolist() == samples[1].ids.tolist()
    # Rows are sampled one by one as in any batch.
    rows = other.epoch(1).sequences("text")
    assert [rows[i].tolist() for i in (2, 0)] == [samples[1][i].tolist() for i in (2, 0)]
    batch = rows.take(np.array([3, 1]))
    assert [ids.tolist() for ids in batch] == [samples[1][i].tolist() for i in (3, 1)]
    for actual in samples:
        assert actual.ids.dtype == stored.ids.dtype
        assert len(actual) == len(stored)
        for before, after in zip(stored, actual, strict=True):
            assert after[0] == tokenizer.bos_id
            assert after[-1] == tokenizer.eos_id
            assert tokenizer.decode(after.tolist()) == tokenizer.decode(before.tolist())
    assert len({item.ids.tobytes() for item in (stored, *samples)}) == 4


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe"])
def test_without_dropout_splits_equal_those_of_the_library(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    actual = sampled(sampler_of(tokenizer, 1e-12), 0)
    stored = columns_of(tokenizer).sequences("text")
    assert np.array_equal(actual.ids, stored.ids)
    assert np.array_equal(actual.offsets, stored.offsets)


def test_full_dropout_leaves_single_characters() -> None:
    tokenizer = tokenizer_of("bpe")
    actual = sampled(sampler_of(tokenizer, 1.0), 0)
    assert {len(piece) for piece in tokenizer.tokens(actual[3][1:-1].tolist())} == {1}


def test_occurrences_of_a_word_are_split_in_different_ways() -> None:
    tokenizer = tokenizer_of("bpe")
    column = TextColumn(tokenizer, ("text",), "none")
    columns = encode_rows(Rows({"text": ["cats " * 12]}), {"text": column})
    actual = sampled(sampler_of(tokenizer, 0.5, columns), 0)[0]
    words = tokenizer.tokens(actual.tolist())
    assert len({tuple(word.split()) for word in " ".join(words).split("\u2581")}) > 3


def many_rows(tokenizer: Tokenizer, count: int) -> Columns:
    """Rows of 1 to 20 random words of the texts."""
    words, draw = " ".join(TEXTS).split(), random.Random(5)
    rows = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(count)]
    return encode_rows(Rows({"text": rows}), {"text": TextColumn(tokenizer, ("text",), "document")})


@pytest.mark.parametrize("kind", ["bpe", "byte_bpe", "unigram"])
def test_lengths_are_those_of_the_samples(kind: str) -> None:
    """Also where they are computed for some rows at a time, and in another order."""
    tokenizer = tokenizer_of(kind)
    columns = many_rows(tokenizer, 1_000)
    sampler = sampler_of(tokenizer, 0.3, columns)
    for epoch in (0, 3):
        rows, actual = sampler.epoch(epoch).sequences("text"), sampled(sampler, epoch)
        assert (rows.lengths == actual.lengths).all()
        order = np.random.default_rng(epoch).permutation(1_000)[:300]
        assert (rows.lengths_of(order) == actual.lengths[order]).all()
        assert (rows.lengths_of(slice(10, 40)) == actual.lengths[10:40]).all()
    assert actual.lengths.sum() > 1.02 * columns.sequences("text").lengths.sum()


@pytest.mark.parametrize("limit", ["max_length", "max_tokens"])
def test_rows_that_would_become_too_long_are_unchanged(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all columns, also if only one is too long; the other rows are as without a limit."""
    monkeypatch.setattr(subword_sampling, "_MEASURED_ROWS", 64)
    tokenizer = tokenizer_of("bpe")
    src = many_rows(tokenizer, 400).sequences("text")
    sides = {"src": src, "tgt": src.take(np.arange(400)[::-1])}
    columns = Columns(sides, columns_of_bpe().report)
    tokenizers = dict.fromkeys(sides, tokenizer)
    bound = 60 if limit == "max_length" else 100
    free = SubwordSampler(columns, tokenizers, 0.5, seed=1)
    bounded = SubwordSampler(columns, tokenizers, 0.5, seed=1, **{limit: bound})
    samples = {name: sampled(free, 0, name) for name in sides}
    lengths = np.stack([samples[name].lengths for name in sides])
    fits = (lengths.max(0) if limit == "max_length" else lengths.sum(0)) <= bound
    assert 50 < fits.sum() < 350
    for name, stored in sides.items():
        actual = sampled(bounded, 0, name)
        assert (bounded.epoch(0).sequences(name).lengths == actual.lengths).all()
        for index, ids in enumerate(actual):
            expected = samples[name][index] if fits[index] else stored[index]
            assert ids.tolist() == expected.tolist()
    # Equal rows of two columns have different samples.
    equal = [np.array_equal(samples["src"][i], samples["tgt"][399 - i]) for i in range(400)]
    assert sum(equal) < 100


def test_words_of_rows_have_the_distribution_of_the_library() -> None:
    tokenizer = tokenizer_of("bpe")
    ids = tokenizer.encode("cats")
    sampler = sampler_of(
        tokenizer,
        0.4,
        Columns({"text": pack_ids([ids] * 3, tokenizer.vocab_size)}, columns_of_bpe().report),
    )
    actual = []
    for epoch in range(3_000):
        rows = sampler.epoch(epoch).sequences("text")
        actual.append(rows[epoch % 3].tolist())
    content = tokenizer.content()["tokenizer"]
    content["model"]["dropout"] = 0.4
    library = Backend.from_str(json.dumps(content))
    expected = [library.encode("cats", add_special_tokens=False).ids for _ in range(DRAWS)]
    assert len({*map(tuple, expected)}) > 3
    one, other = frequencies(actual), frequencies(expected)
    for split in one.keys() | other.keys():
        p = other.get(split, 0.0)
        deviation = math.sqrt(max(p, 1e-4) * (1 - p) * (1 / len(actual) + 1 / len(expected)))
        assert one.get(split, 0.0) == pytest.approx(p, abs=5 * deviation), split


def test_packed_rows_have_sampled_tokens_of_the_same_texts() -> None:
    tokenizer = tokenizer_of("bpe")
    columns = many_rows(tokenizer, 100)
    stored = columns.sequences("text")
    texts = sampler_of(tokenizer, 0.3, columns).epoch(0).sequences("text")
    borders = pack_rows(texts.lengths, 200)
    rows = texts.joined(borders)
    order = np.random.default_rng(0).permutation(len(rows))
    actual = rows.take(order)
    assert len(rows) == len(borders) - 1
    assert (actual.lengths == rows.lengths_of(order)).all()
    assert rows.lengths.max() <= 200
    for index, ids in zip(order.tolist(), actual, strict=True):
        parts = [texts[i].tolist() for i in range(borders[index], borders[index + 1])]
        assert ids.tolist() == [token for part in parts for token in part]
        assert rows[index].tolist() == ids.tolist()
    assert actual.lengths.sum() > stored.lengths.sum()


def test_the_memory_of_an_epoch_does_not_depend_on_the_rows() -> None:
    """Nothing holds the samples of an epoch, nor a number for each row."""
    tokenizer, peaks = tokenizer_of("bpe"), []
    few = many_rows(tokenizer, 500)
    for repeats in (1, 400):
        stored = few.sequences("text")
        ids = np.tile(stored.ids, repeats)
        lengths = np.tile(stored.lengths, repeats)
        columns = Columns({"text": Sequences(ids, np.append(0, np.cumsum(lengths)))}, few.report)
        tracemalloc.start()
        sampler = sampler_of(tokenizer, 0.3, columns)
        for epoch in (0, 1):
            rows = sampler.epoch(epoch).sequences("text")
            for first in range(0, 500, 100):
                indices = np.arange(first, first + 100)
                assert (rows.take(indices).lengths == rows.lengths_of(indices)).all()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 500 * 400 * 2


def test_the_start_of_the_second_text_is_updated() -> None:
    tokenizer = train_tokenizer(TEXTS, kind="bpe", vocab_size=60, template="both")
    rows = Rows({"a": TEXTS, "b": TEXTS[::-1]})
    columns = encode_rows(rows, {"text": TextColumn(tokenizer, ("a", "b"))})
    actual, order = sampler_of(tokenizer, 0.5, columns).epoch(0), np.array([2, 0, 3, 1])
    starts = actual.numbers_of("text.second", order).tolist()
    assert starts != columns.numbers_of("text.second", order).tolist()
    taken = actual.sequences("text").take(order)
    for ids, start, index in zip(taken, starts, order.tolist(), strict=True):
        assert tokenizer.decode(ids[start:].tolist()) == TEXTS[::-1][index]


def test_unknown_characters_keep_their_position() -> None:
    tokenizer = tokenizer_of("unigram")
    ids = tokenizer.encode("the cЖts")
    assert tokenizer.unk_id in ids
    columns = Columns({"text": pack_ids([ids], tokenizer.vocab_size)}, columns_of(tokenizer).report)
    actual = sampled(sampler_of(tokenizer, 0.1, columns), 0)[0]
    assert tokenizer.decode(actual.tolist()) == tokenizer.decode(ids)


def imported(model: models.Model) -> Tokenizer:
    """A tokenizer as those of SentencePiece, with a space before each text."""
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    return Tokenizer(backend, "imported", {"unk": "<unk>"})


def test_byte_pieces_of_an_imported_unigram_model_are_unchanged() -> None:
    singles = [("\u2581", -3.0), *((c, -4.0) for c in "<0xC39>cats")]
    whole = [("<unk>", 0.0), ("\u2581cats", -1.0), ("<0xC3>", -2.0), ("<0x9F>", -2.0)]
    tokenizer = imported(models.Unigram([*whole, *singles], 0, byte_fallback=True))
    text = "cats \u00df " * 12 + "cats"
    ids = tokenizer.encode(text)
    assert {2, 3} <= {*ids}
    columns = Columns({"text": pack_ids([ids], tokenizer.vocab_size)}, columns_of_bpe().report)
    actual = sampled(sampler_of(tokenizer, 0.1, columns), 1)[0].tolist()
    assert actual != ids
    assert tokenizer.decode(actual) == tokenizer.decode(ids) == text


def test_an_imported_bpe_with_word_prefixes_keeps_its_text() -> None:
    letters = ["c", "a", "t", "s", "s</w>", "t</w>"]
    merges = [("c", "a"), ("ca", "t"), ("cat", "s</w>")]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *letters, "ca", "cat", "cats</w>"])}
    backend = Backend(models.BPE(vocab, merges, end_of_word_suffix="</w>", unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    tokenizer = Tokenizer(backend, "imported", {"unk": "<unk>"})
    ids = tokenizer.encode("cats " * 20)
    assert {*ids} == {vocab["cats</w>"]}
    columns = Columns({"text": pack_ids([ids], tokenizer.vocab_size)}, columns_of_bpe().report)
    actual = sampled(sampler_of(tokenizer, 0.3, columns), 0)[0].tolist()
    assert tokenizer.decode(actual) == tokenizer.decode(ids)
    assert {vocab["cat"], vocab["s</w>"], vocab["ca"]} <= {*actual}


@pytest.mark.parametrize("kind", ["word", "char", "byte", "wordpiece"])
def test_a_tokenizer_with_a_single_segmentation_is_refused(kind: str) -> None:
    size = 60 if kind == "wordpiece" else None
    tokenizer = train_tokenizer(TEXTS, kind=kind, vocab_size=size)
    with pytest.raises(UserError, match=f"kind {kind} has only one split for each word"):
        make_splitter(tokenizer, 0.1)
