"""Bad documents are one line of error that names the place; nothing is read outside of a file."""

import gzip
from contextlib import suppress
from pathlib import Path

import pytest

from document_samples import PO, TMX, XLIFF, make_docx, make_zip, translated
from heedful.documents import open_document, read_document
from heedful.errors import UserError

BOMB = """<?xml version="1.0"?>
<!DOCTYPE tmx [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>&b;</seg></tuv></tu>
</body></tmx>
"""
OUTSIDE = """<!DOCTYPE tmx [<!ENTITY a SYSTEM "file:///etc/passwd">]>
<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>&a;</seg></tuv></tu>
</body></tmx>
"""
DEEP = "<xliff>" + "<group>" * 50_000
CASES = {
    "not closed": (
        "a.xlf",
        XLIFF.replace("</source>", "", 1),
        "line 7, column 5: broken XML: mism",
    ),
    "cut off": ("a.xlf", XLIFF[:400], "line 8, column 61: broken XML: unclosed token"),
    "empty XML": ("a.tmx", "", "line 1, column 1: broken XML: no element found"),
    "billion laughs": ("a.tmx", BOMB, "a.tmx, line 2: it declares the entity a"),
    "external entity": ("a.tmx", OUTSIDE, "a.tmx, line 1: it declares the entity a"),
    "unknown entity": (
        "a.tmx",
        TMX.replace("Hi", "&nbsp;"),
        "line 5: the entity &nbsp; is not known",
    ),
    "deep": ("a.xlf", DEEP, "nested more than 256 deep"),
    "other root": ("a.xlf", "<html/>", "is not XLIFF: its root is html"),
    "no source": (
        "a.xlf",
        XLIFF.replace("source>", "sauce>"),
        "line 5: a trans-unit without source",
    ),
    "encoding": (
        "a.xlf",
        XLIFF.replace("UTF-8", "klingon"),
        "encoding 'klingon', which is unknown",
    ),
    "codec": ("a.xlf", XLIFF.replace("UTF-8", "base64"), "encoding 'base64', which is unknown"),
    "wrong charset": ("a.po", PO.replace("Hello", "Grüß").encode("latin-1"), "line 10: not UTF-8"),
    "wrong UTF-16": (
        "a.po",
        # The second letter has a byte 0A, which ends no line.
        b"\xff\xfe" + 'msgid "a"\nmsgstr "\u010a\u0a0a'.encode("utf-16-le") + b"\x00\xdc",
        "line 2: not utf-16-le at byte",
    ),
    "unknown charset": ("a.po", PO.replace("UTF-8", "latin-99"), "'latin-99', which is unknown"),
    "no catalogue": ("a.po", "# nothing\n", "has no messages"),
    "prose": ("a.po", "Hello\n", "line 1: neither a comment, a keyword"),
    "open quote": ("a.po", PO.replace('text"', "text"), "line 16: neither"),
    "text first": ("a.po", '"x"\n', "line 1: a text without its keyword"),
    "no msgstr": (
        "a.po",
        'msgid "a"\n\nmsgid "b"\nmsgstr ""\n',
        "line 1: a message without msgstr",
    ),
    "twice": ("a.po", 'msgid "a"\nmsgstr ""\nmsgstr ""\n', "line 3: a second msgstr"),
    "huge form": ("a.po", PO.replace("msgstr[1]", "msgstr[99]"), "msgstr[99] is not a plural form"),
    "plural rule": (
        "a.po",
        PO.replace("Project-Id-Version: x", "Plural-Forms: nplurals=2; plural=n ** n;"),
        "are no rule",
    ),
    "huge plural rule": (
        "a.po",
        PO.replace("Project-Id-Version: x", f"Plural-Forms: nplurals=2; plural={'(' * 9_000}n"),
        "are no rule",
    ),
    "division by zero": (
        "a.po",
        PO.replace("Project-Id-Version: x", "Plural-Forms: nplurals=2; plural=n/0;"),
        "are no rule",
    ),
    "no cues": ("a.srt", "Hello\n", "has no cues"),
    "times of a cue": (
        "a.srt",
        "1\n00:00:01,000 --> 00:00:02,000\na\n\n2\n00:00:03,000 -> 00:00:04,000\nb\n",
        "line 6: the times of a cue cannot be read",
    ),
    "times of WebVTT": (
        "a.vtt",
        "WEBVTT\n\n00:01.000 --> 00:02.000\na\n\n00:03.000 -->\nb\n",
        "line 6: the times of a cue cannot be read",
    ),
    "open code": ("a.html", "<p>a <code>b</p>", "line 1: <code> is not closed"),
    "long segment": ("a.txt", "x" * 10_000_000, "a segment has 10,000,000 characters"),
    "long source": ("a.xlf", XLIFF.replace("Three", "x" * 10_000_000), "line 9: a segment has"),
    "not a ZIP": ("a.docx", "PK", "is not a Word document, or damaged"),
    "other ZIP": ("a.docx", make_zip({"a": b""}), "is not a Word document; name"),
    "ZIP bomb": (
        "a.docx",
        make_zip({"word/document.xml": b"<a/>", "b": bytes(1 << 24)}),
        "its part b unpacks to 16,777,216 bytes",
    ),
    "part twice": (
        "a.docx",
        make_zip(dict.fromkeys(("word/document.xml", "word/documenu.xml"), b"<a/>")).replace(
            b"documenu", b"document"
        ),
        "a.docx holds a part twice",
    ),
    "broken part": ("a.docx", make_zip({"word/document.xml": b"<a>"}), "word/document.xml, line 1"),
    "other ending": ("a.exe", "x", "no ending of a document"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_document_is_one_line(name: str) -> None:
    file, data, message = CASES[name]
    with pytest.raises(UserError) as error:
        translated(file, data)
    assert message in str(error.value)
    assert str(error.value).startswith("a.")
    assert "\n" not in str(error.value)


def test_a_catalogue_without_rules_needs_a_known_language() -> None:
    for languages, message in (
        ((None, None), "has messages with plurals, but no Plural-Forms"),
        (("en", "xx"), "the rules of xx are not known"),
    ):
        with pytest.raises(UserError, match=message):
            read_document(PO.encode(), "a.po", languages)


def test_files_of_other_languages_are_refused() -> None:
    german = PO.replace('UTF-8\\n"', 'UTF-8\\n"\n"Language: de_AT\\n"')
    read_document(german.encode(), "a.po", ("en", "de"))
    for name, text, languages, listed in (
        ("a.po", german, ("en", "fr"), "an unnamed language to de_AT, not from en to fr"),
        ("a.xlf", XLIFF, ("en", "fr"), "en to de, not from en to fr"),
        ("a.xlf", XLIFF, ("fr", None), "en to de, not from fr to any language"),
    ):
        with pytest.raises(UserError, match=f"{name} is from {listed}"):
            read_document(text.encode(), name, languages)


def test_a_memory_without_the_source_language_names_its_languages() -> None:
    with pytest.raises(UserError, match="no unit in fr; it has EN, de-DE, en-US"):
        read_document(TMX.encode(), "a.tmx", ("fr", "de"))
    with pytest.raises(UserError, match="give target_language=CODE"):
        read_document(TMX.encode(), "a.tmx", ("en", None))


def test_a_character_that_the_charset_lacks() -> None:
    latin = PO.replace("UTF-8", "ISO-8859-1")
    with pytest.raises(UserError, match=r"ISO-8859-1 has no code for '好' \(U\+597D\)"):
        translated("a.po", latin, lambda text: "好")
    xml = XLIFF.replace("UTF-8", "ISO-8859-1")
    assert b"&#22909;" in translated("a.xlf", xml, lambda text: "好")[0]


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.po").mkdir()
    for name, problem in (("none.po", "No such file"), ("a.po", "Is a directory")):
        with pytest.raises(UserError, match=f"cannot read .*{name}: {problem}"):
            open_document(tmp_path / name)


def test_a_damaged_part_of_a_zip() -> None:
    data = bytearray(make_docx([[("Hello", False)]]))
    for place in range(30, len(data), 997):
        data[place] ^= 0x55
        with suppress(UserError):
            translated("a.docx", bytes(data), str.upper)
        data[place] ^= 0x55


def test_characters_that_xml_lacks_are_left_out() -> None:
    content, _, _ = translated("a.xlf", XLIFF, lambda text: f"{text}\x00\x1b\ufffeé")
    targets = [own.target for own in read_document(content, "a.xlf", ("en", "de")).segments]
    assert targets[1:] == ["All boldé", "Drei", "Fouré"]


def test_packed_files_are_no_documents() -> None:
    with pytest.raises(UserError, match="packed by gzip"):
        read_document(gzip.compress(TMX.encode()), "a.tmx", ("en", "de"))


CUE = "1\n00:00:01,000 --> 00:00:02,000\na"
REPEATED = {  # by the name of a file: what comes once, and what comes after it
    "a.html": [("", part) for part in ("<!--", "<a href='", "<a =", "&", "<", "<title>", "<b>")]
    + [("", "]"), ("", "<b></c>"), ("", "<script/></b>"), ("<li translate=no>", "<ul><dd></ol>")]
    + [("<p translate=no>", "<p translate=no>"), ("<li translate=no><dl>", "<dd></p></li>")],
    "a.md": [("", part) for part in ("[", "*", "`", "*a ", "![[", "[a](", "<a ", "**a* ", "> a\n")]
    + [("", part) for part in ("{.a", "{: ", '{a="', "`a`{.b}", "[a]{.b}", "*a*{.b}", "[!a[", "# ")]
    + [("`a`", "{:b}"), ("{.a", " "), ("# ", "#"), ("> [!a]\n", "> [!a]\n")]
    + [("a ", "<!--"), ("a", " "), ("$$", " "), ("<div>", "<!--"), ("<div>", "<style ")],
    "a.txt": [("", part) for part in ("x. ", "<g1> ", "x", ", ", "\u2028", "~a ")]
    + [("%", "0"), ("%.", "1"), ("", "vnd.")],
    "a.srt": [(CUE, part) for part in ("<a", "<v x>", " ", "\t", "-a")],
    "a.po": [('msgid "a"\nmsgstr ""\n', '"a"\n'), ("", "#, a\n")],
}


@pytest.mark.parametrize(
    ("name", "head", "part"),
    [(name, head, part) for name, cases in REPEATED.items() for head, part in cases],
)
def test_repetitions_take_no_time(name: str, head: str, part: str) -> None:
    """Each would take seconds to hours if a part of a file were read again for each of them."""
    with suppress(UserError):
        translated(name, head + part * 5_000, fits=lambda text: len(text) < 1_000)


def test_an_empty_message_with_plural_forms_is_no_header() -> None:
    message = b'msgid ""\nmsgid_plural ""\nmsgstr[0] ""\n\nmsgid "a"\nmsgstr ""\n'
    assert b'msgid "a"\nmsgstr "A"\n' in translated("a.po", message, str.upper)[0]
