"""Masks: sources come back as they were, and pairs mask what both sides have."""

from hypothesis import given
from hypothesis import strategies as st

from heedful.fidelity.masking import (
    CHARACTERS,
    Masked,
    count_masks,
    has_masks,
    mask_pair,
    mask_text,
    unmask,
)
from heedful.fidelity.pieces import find_pieces

PIECES = ["%s", "{0}", "<b>", "</b>", "$(ARG1)", "1,000.5", "12", "12", "https://a.org/b", "&amp;"]


def masked_text(text: str) -> Masked:
    """A text with masks, without regard to capitals."""
    return mask_text(text, [*find_pieces(text)])


texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=70).map(" ".join)


@given(texts)
def test_masks_of_a_source_come_back_as_they_were(text: str) -> None:
    masked = masked_text(text)
    assert unmask(masked.text, masked.pieces) == text
    assert {*count_masks(masked.text)} == {*masked.pieces} or has_masks(text)


@given(texts, texts)
def test_masks_of_a_pair_are_equally_often_on_both_sides(src: str, tgt: str) -> None:
    masked = mask_pair(src, tgt)
    if has_masks(src + tgt):
        assert masked == (src, tgt)
        return
    assert count_masks(masked[0]) == count_masks(masked[1])


def test_only_pieces_of_both_sides_are_masked() -> None:
    src, tgt = mask_pair("Open %s on page 3", "Öffne %s")
    assert count_masks(src) == count_masks(tgt)
    assert count_masks(src).total() == 1
    assert src.endswith(" on page 3")


def test_a_number_in_the_format_of_the_target_has_a_mask_of_its_own() -> None:
    src, tgt = mask_pair("1,000.5 m", "1.000,5 m")
    assert src[1:] == tgt[1:] == " m"
    assert ord(tgt[0]) - ord(src[0]) == 32
    source = masked_text("2,500.25 m")
    other = chr(ord(source.text[0]) + 32)
    assert unmask(f"{other} m", source.pieces) == "2.500,25 m"


def test_all_masks_are_trained() -> None:
    """Texts number their masks from different offsets."""
    used = {mask for n in range(400) for mask in mask_pair(f"a{n} %s <b>", f"{n} %s <b>")[1]}
    assert {*CHARACTERS[:32], *CHARACTERS[64:]} <= used


def test_a_text_with_private_characters_is_not_masked() -> None:
    text = f"{CHARACTERS[3]} and 5"
    assert masked_text(text).text == text
    assert mask_pair(text, "5") == (text, "5")


def test_more_pieces_than_masks_stay_as_they_are() -> None:
    text = " ".join(map(str, range(40)))
    masked = masked_text(text)
    assert masked.text.endswith("39")
    assert unmask(masked.text, masked.pieces) == text
