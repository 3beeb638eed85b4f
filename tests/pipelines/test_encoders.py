"""Saved encoders: texts that are left out have blank results, the others are not affected."""

import math
from typing import Any

import numpy as np
import pytest

from backend_models import TEXTS, VOCAB, model_of
from heedful.data.tokenizer import train_tokenizer
from heedful.errors import UserError
from heedful.pipelines import open_net

LONG = " ".join(TEXTS * 9)


@pytest.fixture
def classifier() -> Any:
    return model_of("bert", head="classify")


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("too_long", ["leave_out", "truncate", "error"])
def test_texts_that_are_too_long_are_left_out_truncated_or_refused(
    classifier: Any, paired: bool, too_long: str
) -> None:
    texts = [TEXTS[0], LONG, TEXTS[1]]
    pairs = [TEXTS[2], TEXTS[1], TEXTS[3]] if paired else None
    options = {"pairs": pairs, "too_long": too_long}
    if too_long == "error":
        with pytest.raises(UserError, match=f"{'pair' if paired else 'text'} 2 has"):
            classifier.class_logits(texts, **options)
        return
    logits = classifier.class_logits(texts, **options)
    actual = classifier.classify(texts, **options)
    others = classifier.class_logits(texts[::2], pairs=pairs and pairs[::2])
    np.testing.assert_allclose(logits[::2], others, rtol=1e-5)
    if too_long == "truncate":
        assert np.isfinite(logits).all()
        assert classifier.num_truncated == 2
        return
    assert np.isnan(logits[1]).all()
    assert actual[1].label == ""
    assert math.isnan(actual[1].probability)
    assert all(item.label in classifier.labels for item in actual[::2])
    assert (classifier.num_left_out, classifier.num_truncated) == (2, 0)


def test_an_empty_text_is_refused_by_its_number(classifier: Any) -> None:
    with pytest.raises(UserError, match="text 2 is empty"):
        classifier.classify([[5, 6], []], too_long="leave_out")


def test_masks_of_a_list_are_those_of_each_text_and_a_left_out_text_has_none() -> None:
    random_model = model_of("bert", head="mlm")
    tokenizer = train_tokenizer(TEXTS, vocab_size=VOCAB, extra_specials=["<mask>"])
    model: Any = open_net(random_model.net, random_model.config, random_model.metadata, tokenizer)
    assert model.fill(f"{LONG} [MASK]", too_long="leave_out") == []
    assert model.num_left_out == 1
    texts = [f"{TEXTS[0]} [MASK]", f"{LONG} [MASK]", "[MASK] <mask>", f"{TEXTS[1]} [MASK]"]
    counts: list[int] = []
    filled = model.fill(
        texts, top_k=2, too_long="leave_out", batch_tokens=12, progress=counts.append
    )
    assert len(counts) > 1
    assert sum(counts) == 3, "of the texts that are not left out"
    for masks, text in zip(filled, texts, strict=True):
        alone = model.fill(text, top_k=2, too_long="leave_out")
        assert [[(f.id, f.text) for f in mask] for mask in masks] == [
            [(f.id, f.text) for f in mask] for mask in alone
        ]
        for mask, expected in zip(masks, alone, strict=True):
            assert [f.probability for f in mask] == pytest.approx(
                [f.probability for f in expected], rel=1e-4
            )
    assert model.fill(texts[0], top_k=np.int64(2)) == model.fill(texts[0], top_k=2)
    with pytest.raises(UserError, match="text 2 has no <mask>"):
        model.fill([texts[0], "a"])
