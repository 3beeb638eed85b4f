"""Tags of a translation with masks are nested, and have no blanks that the source does not have."""

import pytest

from heedful.fidelity import Keep, unmask
from heedful.fidelity.tag_order import TagOrder


def restored(source: str, output: str) -> tuple[str, bool]:
    """The output, given with pieces, in the order of the source's tags."""
    masked = Keep().mask(source)
    for mask, piece in masked.pieces.items():
        output = output.replace(piece, mask)
    text, has_moved = TagOrder(masked).restored(output)
    return unmask(text, masked.pieces), has_moved


@pytest.mark.parametrize(
    ("output", "expected", "has_moved"),
    [
        ("Klicken Sie <b>hier</b> jetzt", "Klicken Sie <b>hier</b> jetzt", False),
        ("Klicken Sie <b> hier </b> jetzt", "Klicken Sie <b>hier</b> jetzt", False),
        ("Klicken Sie<b> hier </b>jetzt", "Klicken Sie <b>hier</b> jetzt", False),
        ("Klicken </b> hier <b> jetzt", "Klicken <b>hier</b> jetzt", True),
        ("<b> Hier </b>", "<b>Hier</b>", False),
    ],
)
def test_a_pair_is_in_order_around_its_words(output: str, expected: str, has_moved: bool) -> None:
    assert restored("Click <b>here</b> now", output) == (expected, has_moved)


def test_pairs_that_cross_are_nested_again() -> None:
    source = '<a href="%s">A <em>b</em></a> c <br> d'
    actual, moved = restored(source, 'X <em>y <a href="%s">z</em> q</a> <br> d')
    assert (actual, moved) == ('X <a href="%s">y <em>z</em> q</a> <br> d', True)
    assert restored(source, source) == (source, False)


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("<b>a <i>b</b> c</i>", "</i> a <b> b </b> c <i>"),
        ("</b> a <b>", "<b> a </b>"),
        ("a <b> b", "<b> a b"),
        ("<br/> a", "a <br/>"),
        ("<p>a <p>b", "a <p> b <p>"),
        ("5 %s", "%s 5"),
    ],
)
def test_tags_that_are_not_nested_in_the_source_stay_as_they_are(source: str, output: str) -> None:
    assert restored(source, output) == (output, False)
    assert restored(source, source) == (source, False)


def test_blanks_that_the_source_has_between_tags_stay() -> None:
    source = "a <b> b </b> c"
    assert restored(source, source) == (source, False)
