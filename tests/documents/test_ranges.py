"""Ranges of text that begin and end by empty elements are pairs of codes."""

import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from document_samples import XLIFF, XLIFF2, make_zip, translated
from heedful.data.inline import InlinePiece, TagError, tagged, trimmed
from heedful.data.row_files import read_rows
from heedful.documents import Counts, Document, read_document
from heedful.documents.word_links import TokenAlignment

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def reversed_words(text: str) -> str:
    """A translation in which all words move."""
    return " ".join(text.split()[::-1])


def align_reversed(texts: Sequence[str], outputs: Sequence[Any]) -> list[TokenAlignment]:
    """The alignment of texts and their reversed words."""
    found = []
    for text, output in zip(texts, outputs, strict=True):
        sides = [
            [match.span() for match in re.finditer(r"\S+", side)] for side in (text, output.text)
        ]
        found.append(TokenAlignment(*sides, np.eye(len(sides[0]))[::-1]))
    return found


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("a.xlf", '<bx id="1"/>', '<ex id="1"/>'),
        ("a.xlf", '<bx id="1" rid="7"/>', '<ex id="2" rid="7"/>'),
        ("a.xlf", '<bx id="7"/>', '<ex id="2" rid="7"/>'),
        ("b.xliff", '<sc id="1"/>', '<ec startRef="1"/>'),
        ("b.xliff", '<sm id="m1" type="comment"/>', '<em startRef="m1"/>'),
    ],
)
def test_ranges_of_xliff_stay_around_their_words(name: str, begin: str, end: str) -> None:
    """Both ends followed the word before them, so that the range was empty."""
    old, sample = ("Three", XLIFF) if name == "a.xlf" else ("Two", XLIFF2)
    sample = sample.replace("<target>Zwei</target>", "").replace(
        '<target state="final">Drei</target>', ""
    )
    data = sample.replace(f"<source>{old}<", f"<source>one {begin}two{end} three<")
    content, _, document = translated(name, data, reversed_words, align=align_reversed)
    assert [one.text for one in document.segments if "two" in one.text] == [
        "one <g1>two</g1> three"
    ]
    assert f">three {begin}two{end} one</target>" in content.decode()
    lost, _, document = translated(name, data, lambda text: text.replace("two", ""))
    assert f"{begin}" in lost.decode()
    assert f"{end}" in lost.decode()
    assert any("tags is uncertain: two" in reason for reason in reasons_of(document))
    alone = data.replace(end, "")
    assert "one <x1/>two three" in [
        one.text for one in read_document(alone.encode(), name).segments
    ]


def reasons_of(document: Document) -> list[str]:
    """All reasons for a review."""
    return [str(reason) for one in document.segments for reason in one.reasons]


def test_a_range_is_no_pair_with_a_code_of_the_same_id() -> None:
    source = '<bpt id="1">b</bpt>one <bx id="1"/>two<ept id="1">b</ept> three<ex id="1"/> four'
    data = XLIFF.replace("<source>Three<", f"<source>{source}<").replace("final", "new")
    segments = read_document(data.encode(), "a.xlf").segments
    assert segments[2].text == "<g1>one <g2>two</g1> three</g2> four"


def test_ranges_of_training_pairs_have_equal_tags(tmp_path: Path) -> None:
    path = tmp_path / "a.xliff"
    for source, target, expected in (
        (
            '<sc id="1"/>a<ec startRef="1"/> <sc id="2"/>b<ec startRef="2"/>',
            '<sc id="2"/>B<ec startRef="2"/> <sc id="1"/>A<ec startRef="1"/>',
            ("<g1>a</g1> <g2>b</g2>", "<g2>B</g2> <g1>A</g1>"),
        ),
        (
            '<bpt id="1"/>a<ept id="1"/> <bx id="1"/>b<ex id="1"/>',
            '<bx id="1"/>B<ex id="1"/> <bpt id="1"/>A<ept id="1"/>',
            ("<g1>a</g1> <g2>b</g2>", "<g2>B</g2> <g1>A</g1>"),
        ),
        ('<ec startRef="1"/>a <ph id="1"/>', '<ph id="1"/>A <ec startRef="1"/>', None),
    ):
        expected = expected or ("<x1/>a <x2/>", "<x2/>A <x1/>")
        pair = f"<source>{source}</source><target>{target}</target>"
        path.write_text(XLIFF2.replace("<source>Two</source><target>Zwei</target>", pair))
        rows = read_rows([path], {"src": None, "tgt": None})
        assert [*zip(rows["src"], rows["tgt"], strict=True)] == [expected]


def word_text(body: str) -> tuple[str, str, Counts]:
    """The text of a paragraph of Word, and the document with its words reversed."""
    document = f'<w:document xmlns:w="{WORD}"><w:body><w:p>{body}</w:p></w:body></w:document>'
    data = make_zip({"word/document.xml": document.encode()})
    content, counts, read = translated("a.docx", data, reversed_words, align=align_reversed)
    written = zipfile.ZipFile(io.BytesIO(content)).read("word/document.xml").decode()
    [segment] = read.segments
    return segment.text, written.replace(' xml:space="preserve"', ""), counts


def run(text: str) -> str:
    """A run of Word."""
    return f"<w:r><w:t>{text}</w:t></w:r>"


@pytest.mark.parametrize("name", ["commentRange", "bookmark", "perm"])
def test_ranges_of_word_stay_around_their_words(name: str) -> None:
    begin, end = f'<w:{name}Start w:id="3" w:name="x"/>', f'<w:{name}End w:id="3"/>'
    other = '<w:bookmarkStart w:id="4"/>', '<w:bookmarkEnd w:id="4"/>'
    body = f"{run('one ')}{begin}{run('two')}{end}{run(' three')}"
    text, written, _ = word_text(body)
    assert text == "one <g1>two</g1> three"
    assert f"{run('three ')}{begin}{run('two')}{end}{run(' one')}" in written
    # Around all words, and before them, they are no part of the text.
    text, written, _ = word_text(f"{begin}{other[0]}{run('one two')}{end}{other[1]}")
    assert text == "one two"
    assert f"{begin}{other[0]}{run('two one')}{end}{other[1]}" in written
    assert word_text(f"{begin}{end}{run('one two')}")[0] == "one two"
    assert word_text(f"{run('one ')}{begin}{run('two')}")[0] == "one <x1/>two"


def test_the_range_of_a_field_of_word_is_kept_with_it() -> None:
    begin, separate, last = (
        f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end")
    )
    start, end = '<w:bookmarkStart w:id="0"/>', '<w:bookmarkEnd w:id="0"/>'
    field = f"{begin}{start}<w:r><w:instrText>FORMTEXT</w:instrText></w:r>{separate}"
    text, written, _ = word_text(f"{run('See ')}{field}{run('12')}{last}{end}{run(' now')}")
    assert text == "See <g1>12</g1><x2/> now"
    assert f"{field}{run('12')}{last}{end}" in written


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
