"""Pairs of TMX, XLIFF, PO, MO and CSV files and of subtitles, as rows of training data."""

import gzip
from pathlib import Path
from typing import Any

import polib
import pytest

from document_samples import PO, SRT, TMX, XLIFF, XLIFF2, as_text, translated
from heedful.config import Recipe
from heedful.data.row_files import open_rows
from heedful.data.rows import Rows, collect
from heedful.documents import read_document
from heedful.errors import UserError
from heedful.tasks.prepared_data import prepared_key
from heedful.tasks.run_data import Inherited

PAIR: dict[str, Any] = {"src": None, "tgt": None}
LANGUAGES = {"src": "en", "tgt": "de"}
THREE = """<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="en-US"><seg>a</seg></tuv><tuv xml:lang="de"><seg>b</seg></tuv>
    <tuv xml:lang="FR-fr"><seg>c</seg></tuv></tu>
<tu><tuv xml:lang="en-US"><seg>d</seg></tuv><tuv xml:lang="fr"><seg>f &lt;x></seg></tuv></tu>
<tu><tuv xml:lang="en-US"><seg> </seg></tuv><tuv xml:lang="de"><seg>g</seg></tuv></tu>
</body></tmx>
"""


def rows_of(
    folder: Path,
    name: str,
    content: str | bytes,
    fields: dict[str, Any] = PAIR,
    languages: dict[str, str] = LANGUAGES,
    header: bool | None = None,
) -> Rows:
    """The rows of a file with this content."""
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return collect(open_rows([path], fields, languages=languages, header=header))


def pairs_of(rows: Rows) -> list[tuple[str, str]]:
    """The sources with their targets."""
    return [*zip(rows["src"], rows["tgt"], strict=True)]


def test_tmx_has_any_pair_of_its_languages(tmp_path: Path) -> None:
    for (src, tgt), expected, left_out in (
        (("en", "de"), [("a", "b")], {"without en and de": 1}),
        (("fr", "en-GB"), [("c", "a"), ("f <x>", "d")], {"without fr and en-GB": 1}),
        (("de", "fr"), [("b", "c")], {"without de and fr": 2}),
    ):
        rows = rows_of(tmp_path, "a.tmx", THREE, languages={"src": src, "tgt": tgt})
        assert pairs_of(rows) == expected
        assert rows.report.left_out == left_out
        assert rows.report.num_lines == 3
    assert rows.location(0).endswith("a.tmx, line 2")
    assert "2 left out as without de and fr" in rows.report.summary()


def test_tmx_has_the_variant_in_the_script_of_its_language(tmp_path: Path) -> None:
    content = THREE.replace('"de"', '"zh-TW"').replace('"FR-fr"', '"zh-SG"').replace('"fr"', '"zh"')
    for language, texts in (
        ("zh", ["c", "f <x>"]),
        ("zh-CN", ["c", "f <x>"]),
        ("zh-HK", ["b", "f <x>"]),
        ("zh-TW", ["b", "f <x>"]),
    ):
        rows = rows_of(tmp_path, "a.tmx", content, languages={"src": "en", "tgt": language})
        assert rows["tgt"] == texts, language


def test_tmx_inline_codes_are_tags(tmp_path: Path) -> None:
    codes = '<bpt i="1">x</bpt>you<ept i="1">y</ept> <ph x="2"/><hi>h</hi>'
    content = THREE.replace("<seg>a</seg>", f"<seg>Hi {codes}</seg>")
    assert rows_of(tmp_path, "a.tmx", content)["src"] == ["Hi <g1>you</g1> <x2/><g3>h</g3>"]


def test_tmx_packed_and_in_utf_16(tmp_path: Path) -> None:
    packed = gzip.compress(THREE.encode())
    wide = ('<?xml version="1.0" encoding="utf-16"?>' + THREE).encode("utf-16")
    for name, content in (("a.tmx.gz", packed), ("b.tmx", wide)):
        assert pairs_of(rows_of(tmp_path, name, content)) == [("a", "b")]


def test_tmx_says_its_languages_where_it_has_two(tmp_path: Path) -> None:
    two = TMX.replace("<tu>\n", '<tu><tuv xml:lang="de"><seg>Hallo</seg></tuv>', 1)
    for languages in ({}, {"src": "en"}, {"tgt": "de"}):
        assert rows_of(tmp_path, "a.tmx", two, languages=languages)["tgt"] == ["Hallo", "Zwei"]
    with pytest.raises(UserError, match=r"has units in en-US, de, FR-fr; set data.src_language"):
        rows_of(tmp_path, "a.tmx", THREE, languages={})


def test_tmx_is_read_in_parts(tmp_path: Path) -> None:
    """The first rows are there before the end, which is broken, is read."""
    unit = '<tu><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="de"><seg>b</seg></tuv></tu>'
    path = tmp_path / "a.tmx"
    path.write_text(f'<tmx version="1.4"><body>{unit * 20_000}<tu>')
    chunks = open_rows([path], PAIR, languages=LANGUAGES).chunks()
    assert len(next(chunks).parse()) == 4_096
    with pytest.raises(
        UserError, match=r"a\.tmx, line 1, column \d+: broken XML: no element found"
    ):
        list(chunks)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.tmx", THREE.replace("de", "nl"), "no unit in en and de, it has en-US, nl, FR-fr, fr"),
        ("a.tmx", "<!DOCTYPE x [<!ENTITY a 'b'>]><tmx/>", "line 1: it declares the entity a"),
        ("a.tmx", "<xliff/>", "is not TMX: its root is xliff"),
        ("a.tmx", "<tmx><body><tu></body></tmx>", "line 1, column 18: broken XML"),
        ("a.xlf", XLIFF.replace('"de"', '"fr"'), "is from en to fr, not from en to de"),
        ("a.xlf", "<tmx/>", "is not XLIFF: its root is tmx"),
        ("a.po", PO.replace('charset=UTF-8\\n"', 'charset=UTF-8\\n"\n"Language: nl\\n"'), "to nl"),
        ("a.po", b'msgid "\xff"\nmsgstr ""\n', "a.po, line 1: not utf-8"),
        ("a.po", "text\n", "line 1: neither a comment"),
        ("a.po", PO[:100], "is empty: it holds no pair"),
        ("a.po", 'msgid "a"\nmsgstr ""\n', "in 1 units (without a translation 1); leave it out"),
        ("a.mo", b"\xde\x12\x04\x95" + b"\xff" * 40, "not a compiled catalogue, or damaged"),
        ("a.mo", b"no", "not a compiled catalogue, or damaged"),
        ("a.mo.gz", gzip.compress(b"no", mtime=0), "a.mo.gz is a packed .mo file; unpack it"),
        ("a.csv", 'a,"b\n', "line 1: broken CSV: unexpected end of data; end each quote"),
        (
            "a.csv",
            f"a,b\nc,{'d' * 131_073}\n",
            "line 2: a text of more than 131,072 characters; end",
        ),
        ("a.csv", "a,b\rc,d\r", "line 1: a carriage return in a text without quotes; put"),
        ("a.csv", "a,b\nc\n", "line 2: 1 columns where there must be 2"),
        ("a.csv", "a,b,c\n", "line 1: 3 columns where there must be 2"),
        ("a.csv", b"a,\xff\n", "line 1: not UTF-8"),
        ("a.csv", "", "is empty: it holds no pair"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, name: str, content: str | bytes, problem: str
) -> None:
    with pytest.raises(UserError) as error:
        rows_of(tmp_path, name, content)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_xliff_leaves_out_what_is_not_translated(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "a.xlf", XLIFF)
    assert pairs_of(rows) == [("Three", "Drei")]
    assert rows.report.left_out == {"without a translation": 3, "unfinished": 1}
    swapped = rows_of(tmp_path, "a.xlf", XLIFF, languages={"src": "de", "tgt": "en"})
    assert pairs_of(swapped) == [("Drei", "Three")]
    assert pairs_of(rows_of(tmp_path, "b.xliff", XLIFF2)) == [("Two", "Zwei")]


@pytest.mark.parametrize(
    ("name", "source"), [("a.tmx", TMX), ("a.xlf", XLIFF), ("b.xliff", XLIFF2)]
)
def test_translations_of_heedful_are_no_data_before_a_review(
    tmp_path: Path, name: str, source: str
) -> None:
    """They were, as if a person had made them, and models learned their own errors."""
    before = pairs_of(rows_of(tmp_path, name, source))
    content = as_text(translated(name, source, str.upper))
    rows = rows_of(tmp_path, name, content)
    assert pairs_of(rows) == before
    num_new = sum(text in content for text in ("HELLO", "HI ", "CLICK", "ALL BOLD", "FOUR<"))
    assert rows.report.left_out["machine translations"] == num_new > 0
    assert f"{num_new} left out as machine translations" in rows.report.summary()
    reviewed = {
        "a.tmx": ('<tuv xml:lang="de"><', '<tuv xml:lang="de" changeid="ann"><'),
        "a.xlf": ('state="needs-review-translation"', 'state="translated"'),
        "b.xliff": ('state="translated"', 'state="reviewed"'),
    }[name]
    assert reviewed[0] in content
    rows = rows_of(tmp_path, name, content.replace(*reviewed))
    assert len(rows) == len(before) + num_new
    assert "machine translations" not in rows.report.left_out


@pytest.mark.parametrize(
    ("unit", "target", "definition", "is_data"),
    [
        ("", "", "", True),
        ("", 'state-qualifier="leveraged-mt"', "", False),
        ("", 'state="needs-review-l10n" state-qualifier="mt-suggestion"', "", False),
        ("", 'state="needs-review-translation" state-qualifier="exact-match"', "", True),
        ("", 'state="final" state-qualifier="leveraged-mt"', "", True),
        ('approved="yes"', 'state-qualifier="leveraged-mt"', "", True),
        ('m:trans-origin="mt" m:confirmed="0"', "", "", False),
        ('m:trans-origin="mt"', "", "", False),
        ('m:trans-origin="mt" m:confirmed="1"', "", "", True),
        ('m:trans-origin="tm" m:confirmed="0"', "", "", True),
        ("", "", 'conf="Draft" origin="mt"', False),
        ("", "", 'origin="nmt"', False),
        ("", "", 'conf="Translated" origin="mt"', True),
        ("", "", 'conf="ApprovedSignOff" origin="amt"', True),
        ("", "", 'conf="Draft" origin="interactive"', True),
        ("", "", 'conf="Draft"', True),
    ],
)
def test_machine_translations_of_other_tools_are_no_data(
    tmp_path: Path, unit: str, target: str, definition: str, is_data: bool
) -> None:
    mark = '<mrk mtype="seg" mid="1">{}</mrk>'
    segments = f"<sdl:seg-defs><sdl:seg id='1' {definition}/></sdl:seg-defs>" if definition else ""
    content = f"""<xliff version="1.2" xmlns:m="memsource" xmlns:sdl="sdl">
<file source-language="en" target-language="de"><body><trans-unit id="1" {unit}>
<source>One</source><seg-source>{mark.format("One")}</seg-source>
<target {target}>{mark.format("Eins")}</target>{segments}</trans-unit>
<trans-unit id="2"><source>Two</source><target>Zwei</target></trans-unit></body></file></xliff>"""
    for languages in (LANGUAGES, {"src": "de", "tgt": "en"}):
        rows = rows_of(tmp_path, "a.xlf", content, languages=languages)
        assert len(rows) == 1 + is_data
        assert rows.report.left_out == ({} if is_data else {"machine translations": 1})


@pytest.mark.parametrize(
    ("unit", "target", "is_data"),
    [
        ('creationid="MT!"', "", False),
        ("", 'creationid="MT!"', False),
        ('creationid="MT!" changeid="ann"', "", True),
        ('creationid="MT!"', 'changeid="ann"', True),
        ('creationid="ann" changeid="MT!"', "", False),
        ('creationid="ann"', "", True),
    ],
)
def test_units_of_a_machine_in_memories(
    tmp_path: Path, unit: str, target: str, is_data: bool
) -> None:
    content = f"""<tmx version="1.4"><header srclang="en"/><body>
<tu {unit}><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="de" {target}><seg>b</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>c</seg></tuv><tuv xml:lang="de"><seg>d</seg></tuv></tu>
</body></tmx>"""
    rows = rows_of(tmp_path, "a.tmx", content)
    assert pairs_of(rows) == [("a", "b"), ("c", "d")][not is_data :]
    assert rows.report.left_out == ({} if is_data else {"machine translations": 1})


def test_xliff_of_several_languages_has_the_pairs_of_its_languages(tmp_path: Path) -> None:
    """Each file in an XLIFF file names its languages."""
    unit = '<trans-unit id="1"><source>{}</source><target>{}</target></trans-unit>'
    inside = '<file source-language="{}" target-language="{}"><body>' + unit + "</body></file>"
    parts = [("en-US", "de", "Two", "Zwei"), ("en", "fr", "One", "Un"), ("de", "en", "Eins", "One")]
    content = "".join(inside.format(*part) for part in parts)
    for languages, pairs, num_others in (
        (LANGUAGES, [("Two", "Zwei"), ("One", "Eins")], 1),
        ({"src": "fr"}, [("Un", "One")], 2),
        ({}, [("Two", "Zwei"), ("One", "Eins")], 1),
    ):
        rows = rows_of(tmp_path, "a.xlf", f"<xliff>{content}</xliff>", languages=languages)
        assert pairs_of(rows) == pairs
        assert rows.report.left_out == {"in other languages": num_others}


def test_segments_of_xliff_are_pairs(tmp_path: Path) -> None:
    """Marks of segments, which sources do not have, were tags of translations."""
    unit = "<source>{}</source>{}<target{}>{}</target>"
    bold = '<g id="1">{}</g>'
    source = "Seg one. Seg two."
    one, two = ("Seg one.", "Satz eins."), ("Seg two.", "Satz zwei.")
    inner = '<mrk mtype="seg" mid="{}">{}</mrk>'

    def segmented(*texts: str, ids: str = "123") -> str:
        return " ".join(inner.format(mid, text) for mid, text in zip(ids, texts, strict=False))

    both = f"<seg-source>{segmented(one[0], two[0])}</seg-source>"
    nested = f"<seg-source>{bold.format(segmented(one[0], two[0]))}</seg-source>"
    german = segmented(one[1], two[1])
    whole = (source, f"{one[1]} {two[1]}")
    codes = segmented(f"{bold.format('Seg')} one.", two[0])
    without, unfinished = {"without a translation": 1}, {"unfinished": 1}
    for segments, state, target, expected, left_out in (
        (both, "", german, [one, two], {}),
        (nested, "", bold.format(german), [one, two], {}),
        (both, "", segmented(two[1], one[1], ids="21"), [one, two], {}),
        (both, "", segmented(one[1], ""), [one], without),
        (both, "", segmented(two[1], ids="2"), [two], without),
        (both, ' state="new"', german, [], unfinished),
        (both, "", german.replace('"2"', '"3"'), [whole], {}),
        (both, "", german.replace('"2"', '"1"'), [whole], {}),
        (both, "", f"{one[1]} {two[1]}", [whole], {}),
        ("", "", german, [whole], {}),
        ("", "", segmented(one[1], ""), [], unfinished),
        ("", ' state="final"', segmented(whole[1], ""), [(source, f"{whole[1]} ")], {}),
        (
            f"<seg-source>{codes}</seg-source>",
            "",
            segmented(bold.format("Satz") + " eins.", two[1]),
            [("<g1>Seg</g1> one.", "<g1>Satz</g1> eins."), two],
            {},
        ),
    ):
        old = '<source>Three</source><target state="final">Drei</target>'
        more = unit.format(source, segments, state, target) + '</trans-unit><trans-unit id="0">'
        content = XLIFF.replace(old, more + old)
        rows = rows_of(tmp_path, "a.xlf", content)
        found = [(src.strip(), tgt) for src, tgt in pairs_of(rows)]
        assert found == [*expected, ("Three", "Drei")], target
        others = {"without a translation": 3, "unfinished": 1}
        assert rows.report.left_out == {
            name: count + left_out.get(name, 0) for name, count in others.items()
        }
        back = rows_of(tmp_path, "a.xlf", content, languages={"src": "de", "tgt": "en"})
        assert pairs_of(back) == [pair[::-1] for pair in pairs_of(rows)]


def test_codes_of_a_translation_have_the_tags_of_its_source(tmp_path: Path) -> None:
    """Also where their order differs; codes without a name are numbered in their order."""
    bold, line = '<bpt i="{}" x="1"/>{}<ept i="{}"/>', '<ph x="2"/>'
    for source, target, expected in (
        (
            f"A {bold.format(1, 'b', 1)} {line}",
            f"{line} {bold.format(2, 'b', 2)} A",
            ("A <g1>b</g1> <x2/>", "<x2/> <g1>b</g1> A"),
        ),
        (f"{line}<ph/>", f"<ph/><hi>c</hi>{line}", ("<x1/><x2/>", "<x2/><g3>c</g3><x1/>")),
        ("<ph/><hi>a</hi>", "<hi>a</hi><ph/>", ("<x1/><g2>a</g2>", "<g1>a</g1><x2/>")),
        (f"a {line}", f"&lt;x1/> {line}{line}", ("a <x1/>", "<x1/> <x2/><x3/>")),
        (f"a {line}", f"{line}{line}", ("a <x1/>", "<x1/><x2/>")),
        (f"{line}", "<hi x='2'>a</hi>", ("<x1/>", "<g1>a</g1>")),
        ("&lt;g1>a&lt;/g1>", "<hi>b</hi>", ("<g1>a</g1>", "<g2>b</g2>")),  # text of the source
    ):
        tuvs = f'<tuv xml:lang="en"><seg>{source}</seg></tuv><tuv xml:lang="de"><seg>{target}</seg>'
        content = f'<tmx version="1.4"><body><tu>{tuvs}</tuv></tu></body></tmx>'
        assert pairs_of(rows_of(tmp_path, "a.tmx", content)) == [expected]
    unit = '<source>{}</source><target state="final">{}</target>'
    swapped = unit.format('<g id="a">A</g> <x id="b"/>', '<x id="b"/> <g id="a">B</g>')
    content = XLIFF.replace(unit.format("Three", "Drei"), swapped)
    assert content != XLIFF
    expected = ("<g1>A</g1> <x2/>", "<x2/> <g1>B</g1>")
    assert pairs_of(rows_of(tmp_path, "a.xlf", content)) == [expected]
    back = rows_of(tmp_path, "a.xlf", content, languages={"src": "de", "tgt": "en"})
    assert pairs_of(back) == [expected[::-1]]


def test_po_and_mo_have_plural_forms_and_no_fuzzy_messages(tmp_path: Path) -> None:
    content = PO.replace('charset=UTF-8\\n"', 'charset=UTF-8\\n"\n"Language: de\\n"')
    content = content.replace('[0] ""', '[0] "eine Datei"').replace('[1] ""', '[1] "%d Dateien"')
    rows = rows_of(tmp_path, "a.po", content)
    expected = [("one file", "eine Datei"), ("%d files", "%d Dateien"), ("kept", "behalten")]
    assert pairs_of(rows) == expected
    assert rows.report.left_out == {"without a translation": 2, "fuzzy": 1, "obsolete": 1}
    swapped = rows_of(tmp_path, "a.po", content, languages={"src": "de", "tgt": "en"})
    assert pairs_of(swapped) == [pair[::-1] for pair in expected]
    forms = "Plural-Forms: nplurals=2; plural=(n%10!=1 || n%100==11);"  # of Icelandic
    often = content.replace('charset=UTF-8\\n"', f'charset=UTF-8\\n"\n"{forms}\\n"')
    often = often.replace("eine Datei", "%d Datei")
    sources = [src for src, _ in pairs_of(rows_of(tmp_path, "a.po", often))]
    assert sources == ["%d files", "%d files", "kept"]
    polib.pofile(content).save_as_mofile(str(tmp_path / "b.mo"))
    compiled = rows_of(tmp_path, "c.mo", (tmp_path / "b.mo").read_bytes())
    assert sorted(pairs_of(compiled)) == sorted(expected)


def test_of_two_varieties_of_a_language_the_one_with_text_counts(tmp_path: Path) -> None:
    segments = {"en": "a", "de-AT": " ", "de-DE": "b"}
    unit = "".join(f'<tuv xml:lang="{k}"><seg>{v}</seg></tuv>' for k, v in segments.items())
    memory = f'<tmx version="1.4"><header srclang="en"/><body><tu>{unit}</tu></body></tmx>'
    assert pairs_of(rows_of(tmp_path, "a.tmx", memory)) == [("a", "b")]
    [segment] = read_document(memory.encode(), "a.tmx", ("en", "de")).segments
    assert segment.target == "b"
    [segment] = read_document(memory.encode(), "a.tmx", ("en", "de-AT")).segments
    assert segment.target == ""


def test_csv_has_quotes_separators_and_headers(tmp_path: Path) -> None:
    expected = [("a, b", 'say "c"'), ("d\ne", "f")]
    for separator in (",", ";", "\t", "|"):
        content = separator.join(['"a, b"', '"say ""c"""']) + "\r\n"
        content += separator.join(['"d\ne"', "f"]) + "\n\n"
        assert pairs_of(rows_of(tmp_path, "a.csv", content)) == expected
        named = f"en{separator}de\n" + content
        rows = rows_of(tmp_path, "a.csv", named)
        assert pairs_of(rows) == expected
        assert (rows.report.num_headers, rows.report.left_out) == (1, {})
        assert rows.location(1).endswith("line 3")
        assert pairs_of(rows_of(tmp_path, "a.csv", named, header=False))[0] == ("en", "de")
    table = "id,German,English\n1,Hund,dog\n"
    by_name = rows_of(tmp_path, "a.csv", table, {"src": "English", "tgt": "German"})
    assert pairs_of(by_name) == [("dog", "Hund")]
    assert by_name.report.summary() == "1 lines read, 1 pairs kept"
    by_number = rows_of(tmp_path, "a.csv", table, {"src": 3, "tgt": 2}, header=True)
    assert pairs_of(by_number) == [("dog", "Hund")]
    blank = rows_of(tmp_path, "a.csv", "\nen,de\n,\ndog,Hund\n\n , , ,\n")
    assert pairs_of(blank) == [("dog", "Hund")]
    assert (blank.report.num_lines, blank.report.num_headers, blank.report.num_empty) == (6, 1, 4)
    labels = rows_of(tmp_path, "b.csv", '"x, y",no\n', {"text": None, "label": None})
    assert (labels["text"], labels["label"]) == (["x, y"], ["no"])


def test_subtitles_beside_each_other_are_pairs_by_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.en.srt", tmp_path / "a.de.vtt"
    first.write_text(SRT + "\n3\n00:00:09,000 --> 00:00:10,000\nAlone\n")
    second.write_text(
        "WEBVTT\n\n00:01.100 --> 00:01.500\nHallo mein\n\n00:01.500 --> 00:02.100\n"
        " \nlieber <b>&gt;&#32;Freund &amp; x\n\n"
        "00:03.000 --> 00:04.500\n- Ja.\n- Nein.\n"
    )
    rows = collect(open_rows({"src": [first], "tgt": [second]}))
    assert pairs_of(rows) == [
        ("Hello my dear friend", "Hallo mein lieber > Freund & x"),
        ("- Yes. - No.", "- Ja. - Nein."),
    ]
    assert rows.report.left_out == {"cues without a partner": 1}
    first.write_text(SRT + "\n3\n00:00:09,000 -> 00:00:10,000\nAlone\n")
    rows = collect(open_rows({"src": [first], "tgt": [second]}))
    assert rows.report.left_out == {"cues with broken times": 1}


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ("Well, yes;Ja, ja", ("Well, yes", "Ja, ja")),
        ("Well, yes\tJa", ("Well, yes", "Ja")),
        ('"Well, yes", "Ja; ja"', ("Well, yes", "Ja; ja")),
        ("yes ; ja", ("yes ", "ja")),
        ("yes, ja", ("yes", "ja")),
        ('"yes", "a ""b"", c"', ("yes", 'a "b", c')),
    ],
)
def test_commas_of_a_text_do_not_separate_columns(
    tmp_path: Path, row: str, pair: tuple[str, str]
) -> None:
    assert pairs_of(rows_of(tmp_path, "a.csv", f"{row}\n", header=False)) == [pair]


@pytest.mark.parametrize("first", ["sep=;\r\n", '\ufeff"sep=;"\n', "SEP=;\n"])
def test_the_separator_that_excel_is_told_is_no_row(tmp_path: Path, first: str) -> None:
    rows = rows_of(tmp_path, "a.csv", first + "en;de\n1,2,3;4\n")
    assert pairs_of(rows) == [("1,2,3", "4")]
    assert (rows.report.num_lines, rows.report.num_headers) == (2, 1)
    by_name = rows_of(tmp_path, "a.csv", first + "en;de\ndog;Hund\n", {"src": "en", "tgt": "de"})
    assert pairs_of(by_name) == [("dog", "Hund")]
    with pytest.raises(UserError, match="line 2: the header has no column 'fr'"):
        rows_of(tmp_path, "a.csv", first + "en;de\n", {"src": "en", "tgt": "fr"})
    with pytest.raises(UserError, match="line 3: 3 columns where there must be 2"):
        rows_of(tmp_path, "a.csv", first + "en;de\na;b;c\n")


def test_files_of_several_formats_are_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.tmx").write_text(THREE)
    (tmp_path / "b.tsv").write_text("x\ty\n")
    (tmp_path / "c.csv").write_text('"x, y",z\n')
    files = [tmp_path / name for name in ("a.tmx", "b.tsv", "c.csv")]
    rows = collect(open_rows(files, PAIR, languages=LANGUAGES))
    assert pairs_of(rows) == [("a", "b"), ("x", "y"), ("x, y", "z")]


def test_files_of_pairs_are_for_pairs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds pairs of a source and a target, not text, label"):
        rows_of(tmp_path, "a.tmx", THREE, {"text": None, "label": None})
    with pytest.raises(UserError, match="has no columns to name"):
        rows_of(tmp_path, "a.tmx", THREE, {"src": 1, "tgt": 2})
    with pytest.raises(UserError, match="not text; it is data for translation"):
        rows_of(tmp_path, "a.tmx", THREE, {"text": None})


def test_prepared_data_of_a_memory_depend_on_the_languages(tmp_path: Path) -> None:
    (tmp_path / "a.tmx").write_text(THREE)
    (tmp_path / "a.tsv").write_text("a\tb\n")

    def key(name: str, language: str) -> Any:
        data = {"train": {"file": str(tmp_path / name)}, "tgt_language": language}
        training = {"max_steps": 1}
        content = {"task": "translation", "data": data, "training": training}
        recipe = Recipe.model_validate(content)
        return prepared_key(recipe, Inherited())

    assert key("a.tmx", "de") != key("a.tmx", "fr")
    assert key("a.tsv", "de") == key("a.tsv", "fr")
