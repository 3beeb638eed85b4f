"""Ranges of text that begin and end by empty elements are pairs of codes."""

import pytest

from heedful.data.inline import InlinePiece, TagError, tagged, trimmed


def test_pairs_around_all_words_are_no_part_of_a_text() -> None:
    def pieces(codes: str) -> list[InlinePiece]:
        """Upper case opens a pair, lower case closes it; "." is a code alone, "w" is a word."""
        kinds = {".": InlinePiece("alone", "x"), "w": InlinePiece("text", "w")}
        kinds |= {" ": InlinePiece("text", " ")}
        kinds |= {one: InlinePiece("open", one, one) for one in "ABC"}
        kinds |= {one: InlinePiece("close", one, one.upper()) for one in "abc"}
        return [kinds[code] for code in codes]

    for codes, inner in (
        ("AwBwba", "wBwb"),
        ("ABwab", "w"),  # they cross
        ("ABwawb", "ABwawb"),
        ("BAwbwa", "BAwbwa"),
        ("Aa.w Bb", "w"),
        (". Aaw.wBb", "w.w"),
        ("A.w.a w", "A.w.a w"),
        ("Bw.", "w"),
        (". Aa", ""),
        ("", ""),
    ):
        start, stop = trimmed(pieces(codes))
        assert codes[start:stop] == inner, codes


def test_a_translation_may_cross_just_those_pairs_that_cross() -> None:
    """A bookmark across the end of a link let a link end within another element."""
    opened = {one: InlinePiece("open", one, one) for one in "abc"}
    closed = {one: InlinePiece("close", one, one) for one in "abc"}
    source = tagged([opened["a"], opened["b"], closed["b"], opened["c"], closed["a"], closed["c"]])
    assert source.text == "<g1><g2></g2><g3></g1></g3>"
    source.restored("<g3><g2></g2><g1></g3></g1>")
    for text in ("<g1><g2></g1></g2><g3></g3>", "<g1><g3><g2></g3></g1></g2>"):
        with pytest.raises(TagError, match="crosses another"):
            source.restored(text)
