"""What is recognized as a piece that must be kept, and what is text."""

import pytest

from heedful.fidelity.pieces import counts, differences, find_pieces, localized

WHOLE = [
    *("%s", "%1$s", "%-5.2f", "%lld", "%(name)s", "%1", "%L2", "%PRODUCTNAME", "%PRODUCTVERSION%"),
    *("{}", "{0}", "{name}", "{count:,}", "{{user.name}}", "{0,number,#.##}", "%{count}"),
    *("$(ARG1)", "${HOME}", "$[officename]", "$name$", "$1", "#PAGECOUNT#", "<?>"),
    *("<b>", "</b>", "<br/>", "<BR>", '<a href="x?y=1">', "<!-- a > b -->", "<ui:item/>"),
    *("&nbsp;", "&#160;", "&#xA0;", "user@example.org", "*.odt", "readme.html"),
    *("https://example.org/a?b=c#d", "mailto:a@b.org", "1", "1,000.5", "3.4.5", "007"),
    *("--help", "--no-messages", "--utf8-out", "%%", "0x1F", "1e-5", "2.5E3"),
    *("{n, plural, one {# file} other {# of {all}}}", "{g,select, a {He} other {They}}"),
]


@pytest.mark.parametrize("piece", WHOLE)
@pytest.mark.parametrize("around", ["{}", "See {} here.", "({})", "“{}”,", "{}.", "für{}用"])
def test_a_piece_is_found_whole_in_any_surroundings(piece: str, around: str) -> None:
    text = around.replace("{}", piece)
    letters_join = (piece[0].isalnum() or piece[:2] == "--") and around.startswith("für")
    if letters_join and not piece[0].isdigit():
        return  # an address or a file name begins at the beginning of a word
    if around.startswith("für") and piece[-1].isalpha():
        return  # and ends at the end of one
    assert [found.text for found in find_pieces(text)] == [piece]
    [found] = find_pieces(text)
    assert text[found.start : found.end] == piece


@pytest.mark.parametrize(
    "text",
    [
        *(
            "100 % of it",
            "50% of",
            "a < b and c > d",
            "<None>",
            "<All Files>",
            "AT&T; R&D",
            "$ and #",
        ),
        *("e.g. this", "a {b c} d", "C# and F#", "x_1", "…", "", "a@b", "$50", "$5.99"),
        *("he went--so", "he -- so", "a --Not b", "---x", "so--"),
    ],
)
def test_text_is_no_placeholder(text: str) -> None:
    assert {piece.kind for piece in find_pieces(text)} <= {"number"}, [*find_pieces(text)]


def test_other_names_are_tags_with_a_closing_tag() -> None:
    assert [*counts("<Name> of <none>")] == []
    assert counts("<Name>x</Name>") == {"<Name>": 1, "</Name>": 1}


def test_what_stands_in_angle_brackets_is_searched() -> None:
    assert counts("<page 12 of %s>") == {"12": 1, "%s": 1}


def test_patterns_of_a_caller_come_first() -> None:
    assert counts("item ABC-12", (r"[A-Z]{3}-\d+",)) == {"ABC-12": 1}


def test_formats_of_numbers_are_equal() -> None:
    assert counts("1,000.5 and 3") == counts("3 und 1.000,5")
    assert counts("1,000.5") != counts("1,000.6")
    assert differences("1.5 m", "15 m") == ["missing: 1.5", "not in the source: 15"]
    assert (localized("1,000.5"), localized("12")) == ("1.000,5", None)
    assert localized("12,34,567.8e-5") == "12.34.567,8e-5"
    for code in ("192.168.0.1", "3.4.5", "12.05.2020", "1,2,3", "0x1F", "1e5"):
        assert localized(code) is None


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("%d%% of it", "%d % davon"),
        ("the value 0x1F", "der Wert 0x1"),
        ("{n, plural, one {# file} other {# files}}", "{n, eine {#-Datei}"),
        ("at most 1e-5", "höchstens 1-5"),
        ("at 192.168.0.1", "unter 192,168,0,1"),
    ],
)
def test_codes_that_changed_are_no_formats(source: str, target: str) -> None:
    """They passed without a reason for a review."""
    assert differences(source, target)
