"""Hostile documents: an error of one line, or a file that is the same but for its targets.

HEEDFUL_FUZZ is the number of files of each format (`make fuzz`); without it there are few.
"""

import io
import os
from pathlib import Path

import docx
import lxml.html
import polib
import pysubs2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lxml import etree

from document_samples import DOCX_RUNS, OVERWRITE, TEXTS, make_docx, translated
from heedful.documents import read_document
from heedful.errors import UserError

CASES = int(os.environ.get("HEEDFUL_FUZZ", "8"))
IN_PLACE = (".srt", ".vtt", ".html", ".md", ".txt")
CATALOGUES = sorted(Path("/usr/share/locale").glob("*/LC_MESSAGES/*.mo"))[::400]
fuzz = settings(
    max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck]
)
# Fragments with a meaning in some format, and characters that break lines, words or encodings.
FRAGMENTS = st.sampled_from(
    [
        *("<", ">", "&", "&amp;", "&#0;", "&eacute;", "]]>", "<!--", "-->", "<![CDATA[", "<?x?>"),
        *("<b>", "</b>", "<p>", "<code>", "<br/>", "<script>", "</script>", '<a href="', "<g1>"),
        *('<g id="1">', "</g>", '<x id="2"/>', "<target/>", "<source>", "</source>", "<note>"),
        *("msgid ", "msgstr ", '"', '\\"', "\\", "msgctxt ", "msgstr[1] ", "#, fuzzy", "#~ ", "#"),
        *("**", "_", "`", "```", "[", "](", ")", "|", "> ", "1. ", "- ", "---", "\\|", "    "),
        *("{#a}", "{: .b}", "{a=1}", "> [!NOTE]\n", "> [!a]- b\n"),
        *("00:00:05,000 --> 00:00:06,000", "WEBVTT", "NOTE", "{\\an8}", "--> "),
        *("\n", "\n\n", "\r\n", "\r", "\t", " ", "\u2028", "\x85", "\x0b", "\x00", "\ufeff"),
        *("word", "A b. C d! ", "好。", "é", "e\u0301", "🦜", "\u202e", "%s", "{name}", "</g1>"),
    ]
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A text in which fragments are put, or parts are cut out, in some places."""
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(text)))
        if draw(st.booleans()):
            text = text[:place] + draw(FRAGMENTS) + draw(FRAGMENTS) + text[place:]
        else:
            text = text[:place] + text[place + draw(st.integers(1, 12)) :]
    return text


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_documents(name: str) -> None:
    @fuzz
    @given(damaged(TEXTS[name]), st.sampled_from(["utf-8", "utf-16"]), st.booleans())
    def check(text: str, encoding: str, grows: bool) -> None:
        data = text.encode(encoding)
        try:
            document = read_document(data, name, ("en", "de"))
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return
        assert document.to_bytes() == data
        copied, _, _ = translated(name, data, policy=OVERWRITE)
        if name.endswith(IN_PLACE):
            assert copied == data
        num_segments = len(document.segments)
        assert len(read_document(copied, name, ("en", "de")).segments) == num_segments
        changed, _, _ = translated(
            name,
            data,
            (lambda t: f"x{t} <&>\\ *") if grows else (lambda t: t[:3]),
            policy=OVERWRITE,
        )
        reopened = read_document(changed, name, ("en", "de"))
        if name.endswith((".po", ".xlf", ".xliff", ".tmx")) or (name == "a.txt" and grows):
            assert len(reopened.segments) == num_segments
        try:
            _open_by_others(name, data, encoding)
        except (etree.XMLSyntaxError, pysubs2.exceptions.Pysubs2Error):
            return  # such as a namespace that is no URI
        _open_by_others(name, changed, encoding)
        if name == "a.html" and encoding == "utf-8" and "\x00" not in text:
            assert _tags(changed) == _tags(data)

    check()


def _tags(page: bytes) -> list[tuple[str, str]]:
    """The elements of a page as lxml reads it, each with the one around it, in any order: elements
    of a line may be in another order in a translation."""
    try:
        root = lxml.html.document_fromstring(page)
    except etree.ParserError:  # without any
        return []
    return sorted(
        (element.tag, "" if (around := element.getparent()) is None else str(around.tag))
        for element in root.iter()
        if isinstance(element.tag, str)
    )


def _open_by_others(name: str, data: bytes, encoding: str) -> None:
    """Open a translated file by another program's reader."""
    if name.endswith((".xlf", ".xliff", ".tmx")):
        etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True))
    elif name.endswith((".srt", ".vtt")):
        pysubs2.SSAFile.from_string(data.decode(encoding), format_=Path(name).suffix[1:])


@fuzz
@given(st.lists(st.lists(st.tuples(st.text(max_size=5) | FRAGMENTS, st.booleans()), max_size=4)))
def test_hostile_word_documents(paragraphs: list[list[tuple[str, bool]]]) -> None:
    try:
        data = make_docx(paragraphs)
    except ValueError:  # characters that XML does not have
        return
    content, counts, _ = translated("a.docx", data)
    assert content == data
    content, counts, _ = translated("a.docx", data, str.swapcase)
    before, after = (docx.Document(io.BytesIO(file)) for file in (data, content))
    assert len(before.paragraphs) == len(after.paragraphs)
    for old, new in zip(before.paragraphs, after.paragraphs, strict=True):
        assert new.text.casefold() == old.text.casefold()
    assert counts.segments >= 0


@fuzz
@given(st.binary(max_size=60), st.integers(0, 40_000))
def test_damaged_word_documents(noise: bytes, place: int) -> None:
    data = make_docx(DOCX_RUNS)
    place %= len(data)
    try:
        translated("a.docx", data[:place] + noise + data[place + len(noise) :], str.upper)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_catalogues_of_the_system(path: Path) -> None:
    """As polib writes them; a copy has the sources as targets, and polib reads it."""
    source = polib.mofile(str(path))
    text = str(source)
    data = text.encode()
    document = read_document(data, "a.po", ("en", None))
    assert document.to_bytes() == data
    copied, counts, _ = translated("a.po", data, languages=("en", None), policy=OVERWRITE)
    before, after = polib.pofile(text), polib.pofile(copied.decode())
    assert len(before) == len(after)
    assert before.metadata == after.metadata
    for old, new in zip(before, after, strict=True):
        assert (old.msgid, old.msgid_plural, old.msgctxt) == (
            new.msgid,
            new.msgid_plural,
            new.msgctxt,
        )
        if not new.msgid_plural:
            assert new.msgstr == new.msgid
    # What no model saw is not marked as a machine's.
    assert sum(not new.fuzzy for new in after if not new.msgid_plural) <= counts.without_words
    assert counts.segments >= len(before)
