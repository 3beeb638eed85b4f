"""What is recognized as a piece that must be kept, and what is text."""

import re

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
    *("-3", "−2.5", "+49", "10:30", "10:30:15", "16:9", "1/2", "2024-03-05", "½", "2¾", "100%%"),
    *("2024-03-05T10:30:00Z", "03/05/2024", "1-800-555-0199", "%d%%", "±5", "100 %%"),
    *("E-4012", "v2.3.4-beta", "1.0rc1", "2.0.0-alpha.1", "UTF-8", "A4", "H2O", "KB5001234"),
    *("00:1A:2B:3C:4D:5E", "123e4567-e89b-12d3-a456-426614174000", "#FF8800"),
    *("/usr/share/doc", "~/notes", "./run.sh", "../a/b.c", "C:\\Users\\me", "\\\\host\\share"),
    *("src/main.py", "archive.tar.gz", "www.example.org/a", "example.com", "README.PDF"),
    *("%m", "%Y", "%-d", "%Ey", "<%s>", "<%1$s>", "0x%02x", "0x%x", "-v", "-N"),
    *("%<PRIu64>", "%5<PRId32>", "%'d", "%,.2f", "%1$,d", "%1$*2$d", "%.*f", "%I64d"),
    *("%#@files@", "%1$S", "%1$tY", "%(my.name)s", "%sitename%", "{user-name}", "{ name }"),
    *("ER_NO_FILE", "PATH_MAX", "ar_member_touch", "pattern_id", "pt_BR"),
    *("<%= x %>", "<?php echo 1 ?>", "{% if a %}", "{# a note #}"),
    *("{n, plural, one {# file} other {# of {all}}}", "{g,select, a {He} other {They}}"),
]


@pytest.mark.parametrize("piece", WHOLE)
@pytest.mark.parametrize("around", ["{}", "See {} here.", "({})", "“{}”,", "{}.", "für{}用"])
def test_a_piece_is_found_whole_in_any_surroundings(piece: str, around: str) -> None:
    text = around.replace("{}", piece)
    if around.startswith("für") and (piece[0] not in "%${<&#[0123456789" or piece[-1].isalpha()):
        return  # a number, or what begins and ends by itself; others are words of their own
    if around.startswith("für") and re.match(r"[\d.]+[A-Za-z-]|[\d:]+[A-Z]", piece):
        return
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
        *("and/or", "he / she", "in / out", "A/B", "5-3", "so-x", "Ein-/Ausgabe", "vs. the.next"),
        *("he went--so", "he -- so", "a --Not b", "---x", "so--"),
        *("file(-s)", "E_xit", "v_iew", "Kund_innen", "50 % d", "-ing", "a -- b"),
    ],
)
def test_text_is_no_placeholder(text: str) -> None:
    assert {piece.kind for piece in find_pieces(text)} <= {"number"}, [*find_pieces(text)]


def test_other_names_are_tags_with_a_closing_tag() -> None:
    assert [*counts("<Name> of <none>")] == []
    assert counts("<Name>x</Name>") == {"<Name>": 1, "</Name>": 1}


def test_units_directly_behind_a_placeholder_are_text() -> None:
    """The placeholder was none, so that a translation without it had no reason for a review."""
    assert counts("%dx%d px of %.1fkB in %ds") == {"%d": 3, "%.1f": 1}
    assert counts("(%dpx), %sMB, %1$sth, %d%%") == {"%d": 1, "%s": 1, "%1$s": 1, "%d%%": 1}
    assert not counts("%dno, %ss, %sitename")


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
        ("1,000 people", "1\u202f000 personnes"),
        ("-1,234.5 km", "-1 234,5 km"),
        ("12 345 678 habitants", "12,345,678 people"),
        ("10000 of 12", "12 von 10’000"),
        ("5% of 120", "٥٪ من ١٢٠"),
        ("5 files", "５ファイル"),
    ],
)
def test_numbers_as_other_languages_write_them_are_equal(source: str, target: str) -> None:
    """They were missing, and others in their place."""
    assert differences(source, target) == []
    assert differences(target, source) == []
    assert differences(f"{source} 7", target)
    assert differences("1,000 and 2", "1 001 und 2") == [
        "missing: 1,000",
        "not in the source: 1, 001",
    ]


@pytest.mark.parametrize(
    ("source", "target", "reasons"),
    [
        ("5% and 10 %", "%5 ve %10", []),
        ("5% of 3", "%5", ["missing: 3"]),
        ("5%", "%6", ["missing: 5, %", "not in the source: %6"]),
        ("5 files", "%5 dosya", ["missing: 5", "not in the source: %5"]),
        ("%1 of 5%", "%1 / 5%", []),
        ("%1 of 1%", "1%", ["missing: %1"]),
        ("%1", "1 %", ["missing: %1", "not in the source: 1, %"]),  # a damaged placeholder
    ],
)
def test_percentages_as_in_turkish_are_no_placeholders(
    source: str, target: str, reasons: list[str]
) -> None:
    """They were missing, and placeholders in their place."""
    assert differences(source, target) == reasons


@pytest.mark.parametrize(
    ("source", "target", "reasons"),
    [
        ("Press <Enter> now", "Drücken Sie", ["missing: <Enter>"]),
        ("Press <Enter> now", "Enter drücken", ["missing: <Enter>"]),
        ("Press <Enter> now", "<Eingabe> drücken", []),  # it may be translated
        ("<Enter> or <Page Up>", "<Eingabe> oder", ["missing: <Enter> or <Page Up>"]),
        ("<Enter> or <Tab>", "<Tab> oder", ["missing: <Enter>"]),
        ("<Enter> <Enter> <Tab>", "", ["missing: <Enter>, <Enter>, <Tab>"]),
        ("<b>%s</b> <Alt>", "<b></b>", ["missing: %s, <Alt>"]),
        ("Press it", "<Enter> drücken", ["not in the source: <Enter>"]),
        ("<Enter>", "<Enter", ["missing: >"]),
        ("a < b > c", "a b c", ["missing: <, >"]),
    ],
)
def test_text_in_angle_brackets_that_is_lost_is_named(
    source: str, target: str, reasons: list[str]
) -> None:
    """Only its signs were: "missing: <, >"."""
    assert differences(source, target) == reasons


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("%d%% of it", "%d % davon"),
        ("the value 0x1F", "der Wert 0x1"),
        ("{n, plural, one {# file} other {# files}}", "{n, eine {#-Datei}"),
        ("at most 1e-5", "höchstens 1-5"),
        ("at 192.168.0.1", "unter 192,168,0,1"),
        ("at -3 degrees", "bei 3 Grad"),
        ("at 10:30", "um 10.30"),
        ("on 2024-03-05", "am 05-03-2024"),
        ("error E-4012", "Fehler e-4012"),
        ("in ~/notes", "in ~ /notes"),
        ("<%= x %> files", "<% = x %> Dateien"),
        ("½ of it", "die Hälfte"),
        ("76% of it", "76 davon"),
        ("5 € each", "je 5"),
        ("{n, plural, one {# file} other {# files}", "Die Dateien"),
        ("open %(name of it", "davon öffnen"),
        ("a <b of it", "a davon"),
    ],
)
def test_codes_that_changed_are_no_formats(source: str, target: str) -> None:
    """They passed without a reason for a review."""
    assert differences(source, target)
