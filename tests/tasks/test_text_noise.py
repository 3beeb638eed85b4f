"""Noise in the texts of pairs: what it changes, and which rows have it in which epoch."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heedful
from encoder_runs import PreparedTask
from heedful.errors import UserError
from heedful.fidelity import CHARACTERS, Keep
from heedful.tasks.epochs import EpochBatches
from heedful.tasks.text_noise import title_case, upper_case, with_typos, without_stops

KEPT = "open <b>file.txt</b> of {name} at https://a.example/x, %s &amp; x " + CHARACTERS[0]


@pytest.mark.parametrize(
    ("text", "language", "upper", "title"),
    [
        ("die Straße ist groß.", "de", "DIE STRASSE IST GROSS.", "Die Straße Ist Groß."),
        ("ılık iyi istanbul", "tr", "ILIK İYİ İSTANBUL", "Ilık İyi İstanbul"),
        ("iyi", "az-Latn", "İYİ", "İyi"),
        ("big", None, "BIG", "Big"),
        ("don't stop l’été ǆep", "en", "DON'T STOP L’ÉTÉ ǄEP", "Don't Stop L’été ǅep"),
        ("ßa 中文 123", "de", "SSA 中文 123", "Ssa 中文 123"),
    ],
)
def test_capitals(text: str, language: str | None, upper: str, title: str) -> None:
    assert upper_case(text, language) == upper
    assert title_case(text, language) == title
    assert len(upper.split()) == len(title.split()) == len(text.split())


@pytest.mark.parametrize("seed", range(20))
def test_pieces_stay_in_every_noise(seed: int) -> None:
    pieces = Keep().mask(KEPT.replace(CHARACTERS[0], "")).pieces.values()
    for noisy in (upper_case(KEPT), title_case(KEPT), with_typos(KEPT, random.Random(seed))):
        assert noisy != KEPT
        assert all(piece in noisy for piece in pieces)
        assert noisy.endswith(CHARACTERS[0])
        assert len(noisy.split()) == len(KEPT.split())


def test_stops_are_dropped_on_both_sides_or_on_none() -> None:
    assert without_stops("A dog.", "Ein Hund !") == ("A dog", "Ein Hund")
    assert without_stops("什么？", "What?! ") == ("什么", "What")
    for pair in [("A dog.", "Ein Hund"), ("...", "..."), ("see *.", "nimm *."), ("", "")]:
        kept = pair if pair[0] != "see *." else ("see *", "nimm *")
        assert without_stops(*pair) == (kept if any(map(str.isalnum, pair[0])) else pair)


def test_typos_change_letters_inside_of_words() -> None:
    text = "the quick brown fox jumps over lazy dogs"
    seen = {with_typos(text, random.Random(seed)) for seed in range(40)}
    assert len(seen) > 20
    for noisy in seen:
        changed = [(a, b) for a, b in zip(text.split(), noisy.split(), strict=True) if a != b]
        assert len(changed) <= 1  # of seven long words; letters of "oo" may be exchanged
        assert all(a[0] == b[0] and abs(len(a) - len(b)) <= 1 for a, b in changed)
    assert with_typos("a to be", random.Random(0)) == "a to be"


def prepared(folder: Path, **changes: Any) -> PreparedTask:
    """Pairs of which the letter case and the end show the noise."""
    names = ["alpha", "bravo", "charlie", "delta"]
    rows = [
        f"{a} {b} has {{x}} page {n}."
        for n, (a, b) in enumerate(zip(names * 20, names[::-1] * 20, strict=True))
    ]
    rows += ["THE QUICK BROWN FOX JUMPS OVER LAZY DOGS {x} page 5 has"]  # letters of the vocabulary
    folder.mkdir(exist_ok=True)
    (folder / "pairs.tsv").write_text("".join(f"{row}\t{row}\n" for row in rows))
    keys: dict[str, Any] = {
        "data.train.file": str(folder / "pairs.tsv"),
        "data.train.src_field": 1,
        "data.train.tgt_field": 2,
        "data.valid_size": 8,
        "data.keep": True,
        "tokenizer.kind": "unigram",
        "tokenizer.vocab_size": "auto",
        "training.noise.upper": 0.3,
        "training.noise.title": 0.3,
        "training.noise.no_stop": 0.5,
        "training.noise.typos": 0.5,
        "model": {"architecture": "vaswani2017", "d_model": 16, "num_heads": 2, "d_ff": 16},
        **changes,
    }
    return PreparedTask(heedful.load_recipe("translation", keys), folder / "data")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    return prepared(tmp_path_factory.mktemp("noise"))


def texts_of(run: PreparedTask, epochs: EpochBatches, epoch: int) -> dict[int, tuple[str, str]]:
    """The pairs of an epoch by row."""
    pairs = {}
    for item in epochs.plan_epoch(epoch):
        batch = epochs.load_batch(epoch, item)
        rows = zip(batch.indices, batch.source.ids.tolist(), batch.tokens.ids.tolist(), strict=True)
        for index, src, tgt in rows:
            texts = [run.tokenizer.decode(ids) for ids in (src, tgt)]
            pairs[int(index)] = texts[0], texts[1]
    return pairs


def test_rows_have_noise_by_epoch_and_row(run: PreparedTask) -> None:
    one, other = EpochBatches(run.task, run.data), EpochBatches(run.task, run.data)
    first, second = texts_of(run, one, 0), texts_of(run, one, 1)
    assert texts_of(run, other, 1) == second
    assert first != second
    sides = [*first.values(), *second.values()]
    assert {src.endswith(".") for src, _ in sides} == {True, False}
    assert all(src.endswith(".") == tgt.endswith(".") for src, tgt in sides)
    assert 0.2 < np.mean([src != tgt for src, tgt in sides]) < 0.8
    assert all(
        CHARACTERS[64] <= c <= CHARACTERS[-1] for src, _ in sides for c in src if c > "\ue03f"
    )
    plain = [run.tokenizer.decode(ids.tolist()) for ids in run.data.ids("train", "tgt")]
    for index, (_, tgt) in first.items():
        assert tgt.rstrip(".").casefold() == plain[index].rstrip(".").casefold()
    for is_noisy in (str.isupper, lambda text: " Has " in text, lambda text: " has " in text):
        assert 0.2 < np.mean([is_noisy(tgt) for _, tgt in sides]) < 0.6
    assert all(src.isupper() == tgt.isupper() for src, tgt in sides)


def test_noise_is_refused_where_it_has_no_meaning(tmp_path: Path) -> None:
    for changes, problem in [
        ({"training.compile": True}, "but training.noise gives"),
        ({"training.noise.title": 0.9}, "their sum may be at most 1"),
    ]:
        with pytest.raises(UserError, match=problem):
            prepared(tmp_path, **changes)
    recipe = heedful.load_recipe(
        "language-model", {"training.noise.upper": 0.1, "data.train.text": "x"}
    )
    with pytest.raises(UserError, match=r"noise is for pairs of texts"):
        heedful.plugins.task.get(recipe.task)(recipe).check()
    lowered = prepared(tmp_path, **{"tokenizer.lowercase": True})
    with pytest.raises(UserError, match="upper and title have no effect with"):
        EpochBatches(lowered.task, lowered.data)
