"""Documents of each format: all but the targets stays byte for byte, and targets are marked."""

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import docx
import polib
import pysubs2
import pytest
from lxml import etree
from markdown_it import MarkdownIt

from document_samples import (
    DOCX_RUNS,
    HTML,
    MARKDOWN,
    OVERWRITE,
    PO,
    SRT,
    TEXTS,
    TMX,
    VTT,
    XLIFF,
    XLIFF2,
    Stub,
    as_text,
    make_docx,
    make_zip,
    translated,
)
from heedful import extras
from heedful.data.row_files import open_rows
from heedful.data.rows import collect
from heedful.documents import (
    Counts,
    Policy,
    Segment,
    language_review,
    read_document,
    translate_document,
)
from heedful.documents.segments import Result
from heedful.errors import UserError
from heedful.fidelity import differences
from heedful.pipelines.generations import Generation

IN_PLACE = [name for name in TEXTS if Path(name).suffix in (".srt", ".vtt", ".html", ".md", ".txt")]


def replaced(**words: str) -> Callable[[str], str]:
    """A translator that replaces some words."""

    def translate(text: str) -> str:
        for old, new in words.items():
            text = text.replace(old, new)
        return text

    return translate


@pytest.mark.parametrize("name", TEXTS)
def test_without_a_result_a_file_is_the_same(name: str) -> None:
    data = TEXTS[name].encode()
    assert read_document(data, name, ("en", "de")).to_bytes() == data


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_copied_text_changes_no_byte(name: str) -> None:
    content, counts, _ = translated(name, TEXTS[name])
    assert content == TEXTS[name].encode()
    assert counts.translated > 0


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_byte_order_mark_and_line_ends_are_kept(name: str, end: str, bom: str) -> None:
    text = bom + TEXTS[name].replace("\r\n", "\n").replace("\n", end)
    content = as_text(translated(name, text, replaced(Hello="Hallo"), policy=OVERWRITE))
    assert content.startswith(bom)
    # Lines that were written have the ends of the file. XML writes no line end into a target.
    assert len(re.findall(r"(?<!\r)\n", content)) in (0, content.count("\n"))
    assert content.count("\r") == (content.count("\n") if end == "\r\n" else 0)


def test_po_marks_and_keeps() -> None:
    content, counts, _ = translated("a.po", PO, replaced(Hello="Hallo", old="neu"))
    text = content.decode()
    assert '#, fuzzy, c-format\nmsgid "Hello %s.\\nBye"\nmsgstr "Hallo %s.\\nBye"' in text
    # A copied text has the lines of its source.
    assert 'msgid ""\n"long "\n"text"\nmsgstr ""\n"long "\n"text"\n' in text
    assert '#, fuzzy\nmsgctxt "menu"' in text
    assert '#, fuzzy\n#| msgid "older"\nmsgid "old"\nmsgstr "neu"' in text
    assert 'msgid "kept"\nmsgstr "behalten"\n\n#~ msgid "gone"' in text
    assert '"Plural-Forms: nplurals=2; plural=(n != 1);\\n"' in text
    assert (counts.segments, counts.kept, counts.replaced) == (6, 1, 1)
    assert counts.skipped == {"obsolete messages": 1}
    catalogue = polib.pofile(text)
    assert [entry.msgstr for entry in catalogue if entry.msgid == "old"] == ["neu"]
    assert sum(entry.fuzzy for entry in catalogue) == 4


def loud(text: str) -> str:
    """In capital letters, but with the same placeholders."""
    return text.upper().replace("%S", "%s").replace("%D", "%d")


def test_po_without_marks_and_targets_is_the_source() -> None:
    """Nothing else has changed: the marks removed, the file is what it was."""
    source = PO.replace(
        'charset=UTF-8\\n"',
        'charset=UTF-8\\n"\n"Plural-Forms: nplurals=2; plural=n!=1;\\n"\n"Language: de\\n"',
    )
    text = as_text(translated("a.po", source, loud, policy=Policy(only_empty=True)))
    lines = text.replace("#, fuzzy, ", "#, ").split("\n")
    targets = ("msgstr", '"HELLO', '"BYE')
    kept = [line for line in lines if not line.startswith(targets)]
    original = [line for line in source.split("\n") if not line.startswith("msgstr")]
    marks = [line for line in kept if line == "#, fuzzy"]
    assert len(marks) == 3  # the entry that was fuzzy is kept
    assert [line for line in kept if line != "#, fuzzy"] == [
        line for line in original if line != "#, fuzzy"
    ]


@pytest.mark.parametrize(
    ("language", "num_forms"), [("de", 2), ("ja", 1), ("pl", 3), ("ar", 6), ("pt-BR", 2)]
)
def test_po_has_the_plural_forms_of_the_target_language(language: str, num_forms: int) -> None:
    text = as_text(translated("a.po", PO, str.upper, ("en", language)))
    [entry] = [entry for entry in polib.pofile(text) if entry.msgid_plural]
    assert [*entry.msgstr_plural] == [*range(num_forms)]
    singular = {0} if num_forms > 1 else set()
    singular = {1} if language == "ar" else singular
    for form, target in entry.msgstr_plural.items():
        assert target == ("ONE FILE" if form in singular else "%D FILES")
    assert f"nplurals={num_forms}" in text


@pytest.mark.parametrize(
    ("language", "singular", "source"),
    [
        ("ru", "One file", "%d files"),  # the first form is also for 21 and 31
        ("ru", "%d file", "%d file"),
        ("sl", "One file", "%d files"),  # and for 101 here
        ("fr", "One file", "One file"),  # and for 0 only
        ("ru", "100%% of a file", "%d files"),
    ],
)
def test_forms_of_many_numbers_have_the_number(language: str, singular: str, source: str) -> None:
    """The text for 1, without a number, was also that of 21."""
    catalogue = PO.replace("one file", singular)
    assert catalogue != PO
    text = as_text(translated("a.po", catalogue, str.upper, ("en", language)))
    [entry] = [entry for entry in polib.pofile(text) if entry.msgid_plural]
    assert entry.msgstr_plural[0] == source.upper()


def test_a_template_becomes_a_catalogue() -> None:
    fields = 'Language: \\n"\n"Plural-Forms: nplurals=INTEGER; plural=EXPRESSION;\\n"'
    template = PO.replace('charset=UTF-8\\n"', f'charset=CHARSET\\n"\n"{fields}')
    content = as_text(translated("a.pot", template, lambda text: "é", ("en", "zh-CN")))
    metadata = polib.pofile(content).metadata
    assert metadata["Language"] == "zh_CN"
    assert metadata["Plural-Forms"] == "nplurals=1; plural=0;"
    assert metadata["Content-Type"] == "text/plain; charset=UTF-8"


def test_flags_of_an_obsolete_message_are_its_own() -> None:
    """Without a blank line behind it they were those of the next message, which was replaced."""
    source = '#, fuzzy\n#~ msgid "old"\n#~ msgstr "alt"\nmsgid "live"\nmsgstr "lebt"\n'
    content, counts, _ = translated("a.po", source, str.upper)
    assert (counts.kept, counts.skipped) == (1, {"obsolete messages": 1})
    assert content.decode() == source


def test_flags_without_fuzzy_keep_their_line_end() -> None:
    source = '#, c-format, fuzzy\r\nmsgid "%s a"\r\nmsgstr ""\r\n'
    content, _, _ = translated("a.po", source, memory={"%s a": "%s b"})
    expected = source.replace(", fuzzy", "").replace('msgstr ""', 'msgstr "%s b"')
    assert content.decode() == expected


def test_codes_of_bytes_in_po_are_characters() -> None:
    """Each byte was a character."""
    source = r'msgid "caf\303\251 \x41\\303 \351"' + '\nmsgstr ""\n'
    [segment] = read_document(source.encode(), "a.po").segments
    assert segment.text == "café A\\303 é"


def test_po_in_another_charset() -> None:
    source = PO.replace("UTF-8", "ISO-8859-1").encode("latin-1")
    content, _, _ = translated("a.po", source, replaced(Hello="Grüß"))
    assert "Grüß" in content.decode("latin-1")


@pytest.mark.parametrize(
    ("charset", "text", "is_wrong"),
    [
        ("ISO-8859-1", "Größe", True),
        ("US-ASCII", "Größe", True),
        ("windows-1251", "Größe", True),
        ("ISO-8859-1", "Size", False),
        ("UTF-8", "Größe", False),
        ("GBK", "大小", False),
        ("idna", "Größe", None),
    ],
)
def test_po_that_is_utf8_beside_its_charset_is_refused(
    charset: str, text: str, is_wrong: bool | None, tmp_path: Path
) -> None:
    """It was read as other letters, silently."""
    header = f'msgid ""\nmsgstr "Content-Type: text/plain; charset={charset}\\n"'
    source = f'{header}\n\nmsgid "a"\nmsgstr "{text}"\n'
    data = source.encode("gbk" if charset == "GBK" else "utf-8")
    (tmp_path / "a.po").write_bytes(data)
    reads: list[Callable[[], Any]] = [
        lambda: read_document(data, "a.po", ("en", "de")),
        lambda: collect(open_rows([tmp_path / "a.po"], {"src": None, "tgt": None})),
    ]
    for read in reads:
        if is_wrong is None:
            with pytest.raises(UserError, match=f"{charset}.*which is unknown"):
                read()
        elif is_wrong:
            with pytest.raises(UserError, match=f"the charset {charset}, but is UTF-8"):
                read()
        else:
            read()


def test_a_memory_does_not_choose_between_plural_forms_of_one_source() -> None:
    """The form for 2 was written for 5 too, without a mark."""
    rule = "nplurals=3; plural=n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2;"
    header = f'msgid ""\nmsgstr ""\n"Language: pl\\n"\n"Plural-Forms: {rule}\\n"\n\n'
    source = header + 'msgid "%d file"\nmsgid_plural "%d files"\nmsgstr[0] ""\n'
    memory = {"%d file": "%d plik", "%d files": "%d pliki"}
    content, counts, _ = translated("a.po", source, str.upper, ("en", "pl"), memory=memory)
    [entry] = polib.pofile(content.decode())
    assert entry.msgstr_plural == {0: "%d plik", 1: "%D FILES", 2: "%D FILES"}
    assert (counts.from_memory, counts.translated, entry.fuzzy) == (1, 2, True)
    units = "".join(
        f'<trans-unit id="1[{form}]"><source>%d {noun}</source></trans-unit>'
        for form, noun in enumerate(["file", "files", "files"])
    )
    group = f'<group restype="x-gettext-plurals">{units}</group>'
    xliff = re.sub(r"(?s)(<body>).*(</body>)", rf"\1{group}\2", XLIFF)
    content, counts, _ = translated("a.xlf", xliff, str.upper, memory=memory)
    assert (counts.from_memory, counts.translated) == (1, 2)
    two = source.replace("pl\\n", "de\\n").replace(rule, "nplurals=2; plural=n!=1;")
    content, counts, _ = translated("a.po", two, str.upper, memory=memory)
    assert (counts.from_memory, counts.translated) == (2, 0)


def test_po_memory_is_not_fuzzy_and_reviews_are_comments() -> None:
    content, counts, _ = translated(
        "a.po",
        PO,
        loud,
        memory={"old": "alt!", "long text": "Langtext"},
        review=lambda segment, text: ["number 3 is\nmissing"] if "%d" in text else [],
    )
    text = content.decode()
    assert '#| msgid "older"\nmsgid "old"\nmsgstr "alt!"' in text
    assert '\n\nmsgctxt "menu"\nmsgid ""\n"long "\n"text"\nmsgstr "Langtext"' in text
    assert "# needs review: number 3 is missing\n" in text
    assert (counts.from_memory, counts.to_review) == (2, 1)
    again = as_text(translated("a.po", text, loud, policy=OVERWRITE))
    assert "needs review" not in again  # the note of the translation that was replaced


def test_a_changed_placeholder_asks_for_a_review() -> None:
    content, counts, _ = translated("a.po", PO, str.upper)
    assert "# needs review: missing: %d\n" in content.decode()
    assert counts.to_review == 2


def test_xliff_states_and_codes() -> None:
    content, counts, _ = translated(
        "a.xlf",
        XLIFF,
        replaced(Click="Klick"),
        review=lambda segment, text: ["a & b"] * (text == "Four"),
    )
    root = etree.fromstring(content)
    names = {"x": "urn:oasis:names:tc:xliff:document:1.2"}
    targets = {
        unit.get("id"): unit.find("x:target", names)
        for unit in root.iterfind(".//x:trans-unit", names)
    }
    inner = etree.tostring(targets["1"], encoding="unicode", with_tail=False)
    assert '>Klick <g id="1">here &amp; now</g>. Then <x id="2"/> go.</target>' in inner
    assert targets["1"].get("state") == "needs-review-translation"
    assert targets["1"].get("state-qualifier") == "leveraged-mt"
    assert [*targets["2"][0].itertext()] == ["All bold"]
    assert (targets["3"].text, targets["3"].get("state")) == ("Drei", "final")
    assert targets["4"].get("state") == "needs-review-translation"
    assert targets["5"] is None
    assert b'</target><note from="heedful">needs review: a &amp; b</note></trans-unit>' in content
    assert (counts.segments, counts.kept, counts.to_review) == (4, 1, 1)
    assert counts.skipped == {"units with translate=no": 1}
    note = b'<note from="heedful">needs review: a &amp; b</note>'
    target = rb'\s*<target state="needs-review[^>]*>.*?</target>|<target/>'
    target += rb'|<target state="new">.*?</target>'
    without = re.sub(target, b"", content).replace(note, b"")
    assert without == re.sub(target, b"", XLIFF.encode())


def test_xliff_of_several_languages_and_nested_flags() -> None:
    """Files of another language were translated too; `translate` counts at the nearest element."""
    unit = '<trans-unit id="2" translate="yes"><source>Own</source></trans-unit>'
    source = XLIFF.replace(' translate="no"><source>Five</source></trans-unit>', "/>").replace(
        '<trans-unit id="5"/>',
        f'<group translate="no"><group>{unit}{unit.replace("yes", "")}</group></group>',
    )
    french = """ <file original="b" source-language="en" target-language="fr"><body>
  <trans-unit id="1"><source>Other</source></trans-unit></body></file>\n"""
    for text in (
        source.replace("</xliff>", f"{french}</xliff>"),
        source.replace(" <file", f"{french} <file", 1),
    ):
        content, counts, _ = translated("a.xlf", text, loud)
        assert b">OWN</target></trans-unit>" in content
        assert content.count(b">OWN<") == 1
        assert french.encode() in content
        assert counts.skipped == {
            "units of files in other languages": 1,
            "units with translate=no": 1,
        }
    with pytest.raises(UserError, match="is from en to fr, not from en to de"):
        translated("a.xlf", XLIFF.replace('"de"', '"fr"'), loud)


@pytest.mark.parametrize(("name", "source"), [("a.xlf", XLIFF), ("a.tmx", TMX)])
def test_lines_of_translations_in_xml_end_as_those_of_the_file(name: str, source: str) -> None:
    data = source.replace("Two<", "Two\nand<").replace("Three<", "Three\nand<")
    data = data.replace("\n", "\r\n")
    content, _, _ = translated(name, data, replaced(Two="2", Three="3"), policy=OVERWRITE)
    assert re.search(rb"[23]\r\nand", content)
    assert not re.search(rb"(?<!\r)\n", content)


@pytest.mark.parametrize(
    ("name", "source", "mark"),
    [
        ("a.xlf", XLIFF, 'mtype="protected"'),
        ("b.xlf", XLIFF2, 'id="m9" translate="no"'),
    ],
)
def test_protected_text_of_xliff_is_one_code(name: str, source: str, mark: str) -> None:
    """It was translated."""
    protected = f"<mrk {mark}>make all</mrk>"
    head, _, tail = source.partition("</source>")
    data = f"{head} and {protected} now</source>{tail}"
    content, _, document = translated(
        name, data, replaced(make="mache", now="jetzt"), policy=OVERWRITE
    )
    assert re.search(r" and <x\d+/> now", document.segments[0].text)
    assert f" and {protected} jetzt</target>" in content.decode()


def test_xliff_2_states_and_notes() -> None:
    content = as_text(
        translated("b.xliff", XLIFF2, replaced(Hello="Hallo"), review=lambda *_: ["why"])
    )
    assert '<segment state="translated" subState="heedful:model">' in content
    assert '<target>Hallo <pc id="1">you</pc></target>' in content
    assert 'trgLang="de"' in content
    assert re.search(
        r'<notes><note category="heedful" [^>]*>needs review: why</note></notes>\s*<orig', content
    )
    assert '<segment state="final"><source>Two</source><target>Zwei</target></segment>' in content
    etree.fromstring(content.encode())


def test_tmx_gets_the_missing_variants() -> None:
    content, counts, _ = translated("a.tmx", TMX, replaced(Hi="Hallo"), (None, "de"))
    new = (
        '<tuv xml:lang="de"><prop type="x-origin">machine</prop><seg>Hallo <bpt i="1">&lt;b></bpt>'
    )
    assert new in content.decode()
    assert counts.kept == 1
    assert re.sub(rb'\n  <tuv xml:lang="de"><prop.*?</tuv>', b"", content) == TMX.encode()


@pytest.mark.parametrize(
    ("name", "source"), [("a.tmx", TMX), ("a.xlf", XLIFF), ("b.xliff", XLIFF2), ("a.po", PO)]
)
def test_marks_of_a_second_translation_replace_those_of_the_first(name: str, source: str) -> None:
    keys: Any = {"policy": OVERWRITE, "review": lambda *_: ["a <b>"]}
    first, _, document = translated(name, source, loud, **keys)
    assert translated(name, first, loud, **keys)[0] == first
    assert b"needs review: a " in first
    memory = {segment.text: segment.text.replace("e", "é") for segment in document.segments}
    again = as_text(translated(name, first, policy=OVERWRITE, memory=memory))
    for mark in ("machine", "leveraged-mt", 'subState="heedful:model', "fuzzy"):
        assert mark not in again
    assert "needs review: " not in again
    assert "<notes" not in again, "an element without a note is not valid"


def test_notes_of_people_and_of_other_segments_stay() -> None:
    """Of XLIFF 2 each translation left its notes beside those of the one before."""
    own = '<notes><note>Own</note><note category="heedful">quality: ?</note></notes>'
    source = XLIFF2.replace('<unit id="1">', f'<unit id="1">\n  {own}')
    text = as_text(translated("b.xliff", source, loud, review=lambda *_: ["a"]))
    assert "quality: ?" in text, "of a segment that is kept"
    for number in range(3):
        keys: Any = {"policy": OVERWRITE, "review": lambda *_, n=number: [f"b{n}"]}
        text = as_text(translated("b.xliff", text, loud, **keys))
        notes = [*re.findall("<note[^>]*>([^<]*)</note>", text)]
        assert [notes[0], *notes[2:]] == ["Own", *[f"needs review: b{number}"] * 2]
        assert "place of tags" in notes[1]


def test_drafts_of_po_do_not_accumulate() -> None:
    """Each translation of a message that nobody had finished left one more comment."""
    text = PO.replace('msgstr "alt"', 'msgstr "Ä"')
    for number in range(4):
        text = as_text(translated("a.po", text, lambda source, n=number: f"{source} {n}"))
    found = re.findall(r"# previous translation(.*)", text)
    assert found == [
        *(
            ': "Hello %s. 2\\nBye 2"',
            ': "Hello %s. 0\\nBye 0"',
            ': "long text 2"',
            ': "long text 0"',
        ),
        *(' [0]: "one file 2"', ' [1]: "%d files 2"', ' [0]: "one file 0"', ' [1]: "%d files 0"'),
        *(': "old 2"', ': "Ä"'),
    ]


@pytest.mark.parametrize(
    ("name", "source", "mark", "count"),
    [
        ("a.tmx", TMX.replace("Two", "–").replace("Zwei", ""), "machine", 1),
        ("a.xlf", XLIFF.replace("Four", "–"), "leveraged-mt", 2),
        ("b.xliff", XLIFF2.replace("Hello", "–").replace("you", "–"), "heedful:model", 0),
        ("a.po", PO.replace('"menu"\nmsgid ""\n"long "\n"text"', '"menu"\nmsgid "–"'), "fuzzy", 3),
    ],
)
def test_a_text_without_words_is_not_marked_as_of_a_machine(
    name: str, source: str, mark: str, count: int
) -> None:
    """No model saw it: it is as in the source."""
    content, counts, document = translated(name, source, loud)
    origins = [segment.result.origin for segment in document.segments if segment.result]
    assert counts.without_words == origins.count("source") == 1
    assert content.decode().count(mark) == count


def test_a_model_reads_no_tags_and_cannot_damage_them() -> None:
    """It read `<g1>` as text, and what it made of it was repaired between the tags."""
    seen: list[str] = []

    def translate(text: str) -> str:
        seen.append(text)
        return re.sub(r"</?[gx]\d+/?>", "?", text).replace("go", "geh")

    content, counts, _ = translated("a.xlf", XLIFF, translate)
    expected = '>Click <g id="1">here &amp; now</g>. Then <x id="2"/> geh.</target>'
    assert expected in content.decode()
    assert seen == ["Click here & now.", "Then go.", "All bold", "Four"]
    assert counts.to_review == 0


@pytest.mark.parametrize("name", ["a.po", "a.srt"])
def test_tags_in_the_text_are_placed_as_those_of_a_page(name: str) -> None:
    """They were read by the model, which lost them, crossed them, or put blanks beside them."""
    read: list[str] = []

    def translate(text: str) -> str:
        read.append(text)
        return text.replace("Click here", "Klick hier")

    text = '<i>Click <b>here</b></i> now<br> and <a href="%s">here</a>.'.replace('"', "'")
    files = {
        "a.po": f'msgid "{text}"\nmsgstr ""\n',
        "a.srt": f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n",
    }
    content, _, _ = translated(name, files[name], translate)
    assert "<i>Klick <b>hier</b></i> now<br> and <a href='%s'>here</a>." in content.decode()
    assert not any("<i>" in row or "</" in row for row in read)


@pytest.mark.parametrize(
    "source",
    [
        "<ul>\\n<li>One file</li>\\n<li>Two files</li>\\n</ul>\\n",
        "<p>\\n  A file. And more.\\n</p>",
        "A line\\n<b>bold line</b> with\\n<i>\\nanother</i>",
        "<b>See one</b>:\\n<pre>\\n...\\n</pre>",
    ],
)
def test_tags_on_lines_of_their_own_stay_there(source: str) -> None:
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'

    def translate(text: str) -> str:
        return re.sub(r"[A-Za-z]", "x", text)

    text = f'{header}msgid "{source}"\nmsgstr ""\n'
    [entry] = polib.pofile(as_text(translated("a.po", text, translate)))
    tags_and_lines = re.compile(r"</?\w+>|\n *|\w+")
    expected = [re.sub(r"^\w+", "x", one) for one in tags_and_lines.findall(entry.msgid)]
    found = [re.sub(r"^\w+", "x", one) for one in tags_and_lines.findall(entry.msgstr)]
    assert found == expected


def test_a_memory_with_other_tags_is_not_used() -> None:
    memory = {"Click <g1>here & now</g1>. Then <x2/> go.": "Klick <g1>hier. Dann <x2/> geh."}
    content, counts, _ = translated("a.xlf", XLIFF, str.upper, memory=memory)
    assert '>CLICK <g id="1">HERE &amp; NOW</g>. THEN <x id="2"/> GO.</target>' in content.decode()
    assert (counts.from_memory, counts.translated) == (0, 3)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("a.html", "<p>{}</p>"),
        ("a.po", 'msgid "{}"\nmsgstr ""\n'),
        ("a.xlf", XLIFF.replace("Four</source", "{}</source")),
        ("a.txt", "{}"),
    ],
)
def test_a_memory_with_tags_that_the_text_lacks_is_not_used(name: str, page: str) -> None:
    """They were written as text. Tags that are text in both stay."""
    code = "<g id='7'>Save</g> it" if name == "a.xlf" else "<b>Save</b> it"
    texts = [
        ("Save it", "Save it", "<g1>Es</g1> sichern", False),
        ("Save it", "Save it", "<x1/>Es sichern", False),
        ("Use it", "Use it", "Es nutzen", True),
    ]
    if name in ("a.html", "a.xlf"):
        texts += [
            (code, "<g1>Save</g1> it", "<g1>Es</g1><x2/> sichern", False),
            (code, "<g1>Save</g1> it", "<g1>Es</g1> sichern", True),
            ("&lt;g1&gt; it", "<g1> it", "Nimm <g1>", True),
            ("&lt;g1&gt; it", "<g1> it", "Nimm <g1><x2/>", False),
        ]
    for text, source, target, is_used in texts:
        written = page.replace("{}", text)
        content, counts, _ = translated(name, written, str.upper, memory={source: target})
        assert counts.from_memory == is_used, (text, target)
        assert (b"IT" in content) is not is_used, (text, target)
        assert not re.search(rb"x[12]", content)


def test_a_sentence_without_a_translation_keeps_its_source() -> None:
    content, counts, _ = translated("a.txt", "One. Two.", lambda t: "" if "Two" in t else "Eins.")
    assert content == b"Eins. Two."
    assert (counts.to_review, counts.blank) == (1, 0)


def test_a_memory_is_for_texts_without_the_blanks_around_them() -> None:
    content, counts, _ = translated("a.html", HTML, memory={"tail": "Ende", "Hello": "Hallo"})
    assert content == HTML.replace(" tail", " Ende").replace("Hello", "Hallo").encode()
    assert counts.from_memory == 2


def test_subtitles_keep_times_and_lines() -> None:
    content = as_text(translated("a.srt", SRT, replaced(friend="very old friend", Yes="Ja")))
    assert "00:00:02,000\r\nHello my <i>dear</i>\r\nvery old friend\r\n\r\n2\r\n" in content
    assert content.endswith("- Ja.\r\n- No.\r\n")
    before, after = (pysubs2.SSAFile.from_string(text) for text in (SRT, content))
    assert [(line.start, line.end) for line in before] == [(line.start, line.end) for line in after]
    text = as_text(translated("a.vtt", VTT, replaced(you="dich --> x")))
    assert text == VTT.replace("<b>you</b>", "<b>dich -&gt; x</b>")


@pytest.mark.parametrize(
    ("lines", "translation", "expected"),
    [
        (
            'Now\n<font color="#ff0000">Monday</font>',
            '<font color="#ff0000">Montag</font> nun',
            '<font color="#ff0000">Montag</font>\nnun',
        ),
        ("saw\nnow,\n<i>him</i>", "sah nun, <i>ihn</i>", "sah\nnun,\n<i>ihn</i>"),
        ("<b>on</b>\n<b>it</b> go", "<b>auf</b> <b>es</b> gehen", "<b>auf</b> <b>es</b>\ngehen"),
        ("one\n<i>two</i> three", "eins <i> zwei</i>", "eins\n<i> zwei</i>"),
        ("one,\ntwo", "一二三，四五“六！”七", "一二三，\n四五“六！”七"),
        ("one\ntwo", "一二三四", "一二三四"),
    ],
)
def test_lines_of_subtitles_end_outside_of_tags(
    lines: str, translation: str, expected: str
) -> None:
    source = f"1\n00:00:01,000 --> 00:00:02,000\n{lines}\n"
    document = read_document(source.encode(), "a.srt")
    [segment] = document.segments
    assert segment.codes is not None
    text = translation
    for tag, code in segment.codes.codes.items():
        text = text.replace(code.raw, tag, 1)
    segment.result = Result(text, origin="model")
    assert document.to_bytes().decode() == source.replace(lines, expected)


def test_all_texts_of_subrip_are_translated() -> None:
    """One behind a blank line was left out, and a number without one before it was a text."""
    times = [f"00:00:0{i},000 --> 00:00:0{i + 1}" for i in range(4)]
    source = f"1\n{times[0]}\nHello.\n\nNOTE you\n\n2\n{times[1]}\nnext\n3\n{times[2]}\nlast\n"
    content, _, document = translated("a.srt", source, replaced(you="du", last="a\u00a0!\u3000b"))
    texts = ["Hello.", "NOTE you", "next", "last"]
    assert [segment.text for segment in document.segments] == texts
    assert content.decode() == source.replace("you", "du").replace("last", "a\u00a0!\u3000b")


def test_names_of_cues_are_no_blocks() -> None:
    """The texts of cues with these names were left out."""
    cue = "00:01.000 --> 00:02.000\ntext\n\n"
    source = f"WEBVTT\n\nNOTES\n{cue}STYLE-1\n{cue}REGION1\n{cue}NOTE text\ntext\n\nNOTE\ntext\n"
    content, counts, _ = translated("a.vtt", source, replaced(text="Text"))
    assert counts.segments == 3
    assert content.decode().split("NOTE text") == [
        source.split("NOTE text")[0].replace("text", "Text"),
        source.split("NOTE text")[1],
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_of_blanks_does_not_end_a_cue_of_webvtt(end: str) -> None:
    """YouTube's captions begin with one; their texts were lost."""
    cue = "00:01.000 --> 00:02.000 align:start\n \nHello<00:01.500><c> all</c>\n \nx"
    source = f"WEBVTT\n\n{cue}\n\n".replace("\n", end)
    content, _, document = translated("a.vtt", source, replaced(Hello="Hallo"))
    assert [segment.text for segment in document.segments] == ["Hello<x1/><g2> all</g2>", "x"]
    assert content.decode() == source.replace("Hello", "Hallo")


def test_vtt_has_entities() -> None:
    source = VTT.replace("Hi", "R&amp;D &lt;x&gt;")
    content, _, document = translated("a.vtt", source, replaced(you="a<b & c"))
    assert document.segments[0].text == "R&D <x> <g1>you</g1>"
    assert content.decode() == source.replace("<b>you</b>", "<b>a&lt;b &amp; c</b>")


def test_html_keeps_tags_code_and_attributes() -> None:
    _, _, document = translated("a.html", HTML)
    assert [segment.text for segment in document.segments] == [
        "My page",
        "Hello",
        "This is <g1>bold</g1> & <g2>a link</g2>. Café!",
        "Next <x1/> line",
        "tail",
    ]
    content = as_text(translated("a.html", HTML, replaced(This="a<b", Next="Neu", tail="Ende")))
    expected = HTML.replace("This", "a&lt;b").replace("Next", "Neu").replace("tail", "Ende")
    assert content == expected.replace("a\n   link", "a link").replace("&eacute;", "é")


def test_attributes_that_are_shown_are_counted() -> None:
    """They stay as they are, which was not said."""
    html = "<p title='A b'>a <img alt=\"c\" src='d'> <img alt=''> e <code title='f'>g</code></p>"
    _, counts, _ = translated("a.html", f"{html}<svg><a title='no'>h</a></svg>", str.upper)
    assert counts.skipped == {"attributes that are shown, such as alt and title": 3}


@pytest.mark.parametrize(
    ("name", "text", "skipped"),
    [
        ("a.html", '<p>x</p><input type="Submit" value="Send"><input value="Ann">', 1),
        ("a.html", '<meta name="description" content="My page"><meta name="a" content="b"><p>x', 1),
        ("a.html", '<select><optgroup label="Fruit"><option>x</select>', 1),
        ("a.md", '<div align="center">\nx y\n</div>\n\nx\n', 1),
        ("a.md", "<!-- a -->\n\n<img src='x'>\n\n<style>\na {}\n</style>\n\nx\n", 0),
        ("a.md", "x ![a cat](a.png) and ![](b.png) ![a dog][b]\n\n[b]: b.png\n", 2),
    ],
)
def test_texts_of_markup_that_are_kept_are_counted(name: str, text: str, skipped: int) -> None:
    """Nothing said that they were not translated."""
    content, counts, _ = translated(name, text)
    assert content.decode() == text
    assert counts.segments == 1
    assert sum(counts.skipped.values()) == skipped


def test_blanks_and_keys_between_codes_stay_where_they_are() -> None:
    """Of keys the second one came first; blanks at the start of a line went to its end."""
    html = "<p>press <kbd>A</kbd>+<kbd>B</kbd> now</p><pre>a  b\n  <code>c</code> d</pre>"
    upper = html.replace("press", "PRESS").replace("now", "NOW").replace("a  b", "A  B")
    assert as_text(translated("a.html", html, str.upper)) == upper.replace(" d<", " D<")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("<script>for(i=0;i<n;i++){}</script>", ""),
        ("<script>if(a<b)x()</script>", ""),
        ("""<script>x="</p";y='<i'</script>""", ""),
        ("<style>a</x b</style>", ""),
        ("<title>the </x of</title>", "<title>das &lt;/x of</title>"),
    ],
)
def test_what_looks_like_a_tag_in_a_script_ends_with_the_script(before: str, after: str) -> None:
    """The page was refused, as its script was not closed, or the end tag of a title was text."""
    content = as_text(translated("a.html", f"{before}<p>the page</p>", replaced(the="das")))
    assert content == f"{after or before}<p>das page</p>"


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        ("<p>a <b/b> c <i>d</i> e</p>", ["a <g1> c <g2>d</g2> e</g1>"]),
        ("<p>a <b> c <i>d</i> e</p>", ["a <g1> c <g2>d</g2> e</g1>"]),
        ("<p>a <u>b <b>c</u> d</p>", ["a <g1>b <g2>c</g2></g1> d"]),
        ("<p>a <b>b <u>c</b> d</u> e</p>", ["a <g1>b <g2>c</g1> d</g2> e"]),
        ("<p>a <b>b<p>c <i>d</i></b> e</b> f", ["a <g1>b</g1>", "<g1>c <g2>d</g2></g1> e<x3/> f"]),
        ("<u>a</u><b><p><i>c</b> d</i> e", ["a", "<g1><g2>c</g2> d</g1> e"]),
        ("<p>a <a href=x/>b</a> c</p>", ["a <g1>b</g1> c"]),
        ('<p>a <a href=x?q="y">b</a> c</p>', ["a <g1>b</g1> c"]),
        ("<p>a <b/>c</b> d</p>", ["a <g1>c</g1> d"]),
        ("<p>a <i/>c <u>d</u></p>", ["a <g1>c <g2>d</g2></g1>"]),
        ("<p>a <svg/> c <svg x=y/>d</svg> e</p>", ["a <x1/> c <x2/> e"]),
        ("<p>a <code/>b</code> <code/> c", ["a <x1/> <x2/> c"]),
        ("<script/>a<b</script><p>c</p><script x=y/>", ["c"]),
        (
            "<p>a <span/translate=no>b</span> <i/class='x notranslate'/>c</i> d</p>",
            ["a <x1/> <x2/> d"],
        ),
        ("<p/>a<pre/>b  c</pre>", ["a", "b  c"]),
        ('<?xml version="1.0"?><p>a <b/> c <i>d</i></p>', ["a <x1/> c <g2>d</g2>"]),
        ('<!DOCTYPE html>\n<html xmlns="x"><p>a <b/> c <i>d</i></p>', ["a <x1/> c <g2>d</g2>"]),
    ],
)
def test_slashes_and_missing_ends_in_html_are_read_as_browsers_do(
    page: str, texts: list[str]
) -> None:
    """`<b/b>` was put behind the link that it encloses; `<a href=x/>` had no text."""
    _, _, document = translated("a.html", page)
    assert [segment.text for segment in document.segments] == texts
    assert as_text(translated("a.html", page)) == page
    reopened = translated("a.html", translated("a.html", page, lambda text: text[:3])[0])[2]
    assert len(reopened.segments) == len(texts)


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        (
            "I live in <nobr>New York</nobr> now and <my-tip>hover text</my-tip> is good.",
            ["I live in <g1>New York</g1> now and <g2>hover text</g2> is good."],
        ),
        (
            "<p>I like <picture><source srcset=a><img></picture> very much.</p>",
            ["I like <g1><x2/><x3/></g1> very much."],
        ),
        (
            "<p>Only <meta itemprop=a content=b>5 <output>of</output> <slot>6</slot></p>",
            ["Only <x1/>5 <g2>of</g2> <g3>6</g3>"],
        ),
        (
            "<my-app><h1>One</h1>two <svg>x</svg> three</my-app> <p>four</p>",
            ["One", "two <x1/> three", "four"],
        ),
        (
            "<!doctype html>a<select>b<option>c</select>d<marquee>e</marquee>f<br>g<hr>h",
            [*"abcdefgh"],
        ),
        ("<title>a</title>b<details><summary>c</summary>d</details>", [*"abcd"]),
        ("<table>a<caption>b<tr><th>c<td>d</table>e<dl><dt>f<dd>g</dl>", [*"abcdefg"]),
    ],
)
def test_only_blocks_of_html_end_a_text(page: str, texts: list[str]) -> None:
    """Unknown elements did, so that a sentence was translated in parts."""
    content, _, document = translated("a.html", page)
    assert [segment.text for segment in document.segments] == texts
    assert content == page.encode()


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        ("<ul><li{}>a<li>b</ul><p>c</p>", [*"bc"]),
        ("<ul><li{}>a<p>a<ul><li>a<li>a</ul>a</ul><p>b", ["b"]),
        ("<ul><li{}>a<div>a</div><li title='x'>b", ["b"]),
        ("<div><li{}>a</div>b", ["b"]),
        ("<dl><dt{}>a<dd>b<dd{}>a</dl>c", [*"bc"]),
        ("<p{}>a<p>b</p>", ["b"]),
        ("<p{}>a<hr>b", ["b"]),
        ("<p{}>a <i>a</i> <br><ruby>a<rt>a</ruby> <select><option>a</select> a<h1>b</h1>", ["b"]),
        ("<p{}>a<template><p>a</template><button><div>a</div></button>a</b></p>b", ["b"]),
        ("<ul><li>a<p{}>a<li>b</ul><div><p{}>a</div>c", [*"abc"]),
        ("<table><tr><td{}>a<table><tr><td>a</table>a<td>b<td{}>a<tr><th>c</table>", [*"bc"]),
        ("<table><tr{}><td>a<td>a<tr><td>b</tr><tr{}><td>a</table>c", [*"bc"]),
        ("<table><td{}>a</div>a</table>b", ["b"]),
        ("<table><caption{}>a<thead{}><tr><th>a<tbody><tr><td>b<tbody{}><td>a</table>c", [*"bc"]),
        ("<select><optgroup><option{}>a<option>b<option{}>a</select>c", [*"bc"]),
        ("<select><optgroup{}><option>a<option>a<optgroup><option{}>a</optgroup></select>b", ["b"]),
        ("a <ruby>b<rt{}>a<rp>c<rt{}>a</ruby> d", ["a <g1>b<x2/><g3>c<x4/></g3></g1> d"]),
        ("a <ruby>b<rt{}>a", ["a <g1>b<x2/></g1>"]),
        ("<html{}><p>a<p>a</body>", []),
        ("<head><title>b</title><body{}><p>a</div>a", ["b"]),
        ("b<p{}>a", ["b"]),
        ('<?xml version="1.0"?><p{}>a<div>a</div>a</p>b', ["b"]),
    ],
)
def test_elements_without_end_tags_are_kept_up_to_their_end(page: str, texts: list[str]) -> None:
    """The page was refused, as the element was not closed."""
    for mark in (" translate=no", " class='a notranslate'"):
        marked = page.replace("{}", mark)
        content, counts, document = translated("a.html", marked)
        assert [segment.text for segment in document.segments] == texts
        assert content == marked.encode()
        assert sum(counts.skipped.values()) == page.count("title=")
        changed = as_text(translated("a.html", marked, str.upper))
        assert changed.count(mark) == marked.count(mark)


@pytest.mark.parametrize("page", ["<div{}>a<p>b", "<table><td{}>a<p>b", "<p>a <b{}>b</p>"])
def test_elements_that_need_an_end_tag_are_refused_without_it(page: str) -> None:
    with pytest.raises(UserError, match=r"line 2: <\w+> is not closed; close it"):
        translated("a.html", "\n" + page.replace("{}", " translate=no"))


@pytest.mark.parametrize(
    ("tag", "languages", "expected"),
    [
        ("<html/lang=en>", ("en", "de"), "<html/lang=de>"),
        ('<html lang="en">', ("en", "ar"), '<html lang="ar" dir="rtl">'),
        ("<html lang=en-US id=a>", (None, "fa_IR"), '<html lang=fa-IR dir="rtl" id=a>'),
        ("<html dir=LTR lang='en'>", ("en", "he"), "<html dir=rtl lang='he'>"),
        ('<html lang="en" dir="auto">', ("en", "ur"), '<html lang="ur" dir="auto">'),
        ('<html dir="rtl" lang="ar">', ("ar", "en"), '<html dir="ltr" lang="en">'),
        ('<html dir="rtl" lang="ar">', ("ar", "he"), '<html dir="rtl" lang="he">'),
        ('<html lang="ar">', ("ar", "fa"), '<html lang="fa">'),
        ('<html dir="rtl" lang="az-Arab">', ("az", "az-Latn"), '<html dir="ltr" lang="az-Latn">'),
        ('<html dir="ltr" lang="fr">', ("en", "ar"), '<html dir="ltr" lang="fr">'),
        ("<html>", ("en", "ar"), "<html>"),
        ("<html title='a lang=en' lang=en>", ("en", "de"), "<html title='a lang=en' lang=de>"),
        ('<html lang="en">', ("en", "de"), '<html lang="de">'),
        (
            "<html class=a lang=en-US xml:lang='en'>",
            ("en", "zh_CN"),
            "<html class=a lang=zh-CN xml:lang='zh-CN'>",
        ),
        ('<html lang="en">', (None, "de"), '<html lang="de">'),
        ('<html lang="fr">', ("en", "de"), '<html lang="fr">'),
        ('<html lang="en">', (None, None), '<html lang="en">'),
        ("<html>", ("en", "de"), "<html>"),
    ],
)
def test_a_translated_page_names_its_language_and_direction(
    tag: str, languages: tuple[str | None, str | None], expected: str
) -> None:
    page = f"{tag}<p lang='en'>Hello <i lang='en'>you</i></p></html>"
    content, _, _ = translated("a.html", page, replaced(Hello="Hallo"), languages)
    assert content.decode() == page.replace(tag, expected).replace("Hello", "Hallo")
    assert translated("a.html", page, languages=languages)[0] == page.encode()


@pytest.mark.parametrize(
    "page",
    [
        "<p>\n    Hello there\n</p>\n",
        "<ul>\r\n  <li>One\r\n  <li>\tHello<br>\n\tthere\n</ul>",
        "<p>&nbsp;\n Hello &#160;&#xA0;\n</p>",
        "<p>\n  <b> Hello\n  </b>\n  <img>\n",
        "<p>\n  Hello <b>there\n  </p>",
        "<b><p>\n  Hello</b> there\n  </p>",
        "<pre>\n\n  Hello\n  there\n\n</pre>",
        "\n Hello<p>\n\n</p>\n<!-- a -->\n there\n",
        "<p>\n Hello\n <i translate=no>you</i>\n</p>\n",
        "<p>Hello\n\n<p> \n",
    ],
)
def test_blanks_around_the_texts_of_html_are_kept(page: str) -> None:
    """They became one blank, so that each line of an indented page was another one."""
    content, _, document = translated("a.html", page, str.upper)
    assert all(segment.text == segment.text.strip() for segment in document.segments)
    words = replaced(Hello="HELLO", there="THERE", One="ONE")
    assert content.decode() == words(page)
    assert translated("a.html", page)[0] == page.encode()


def test_a_text_of_html_is_one_line_where_its_translation_is_another() -> None:
    page = "<p>\n  Hello\n  <i>you</i> &amp;\n  me\n</p>"
    assert translated("a.html", page)[0] == page.encode()
    content = as_text(translated("a.html", page, replaced(Hello="Hallo")))
    assert content == "<p>\n  Hallo <i>you</i> &amp; me\n</p>"


def test_html_keeps_the_lines_of_pre() -> None:
    """They became one line."""
    page = "<pre>the  cat\n\n  a <b>dog</b></pre><p>one\ntwo</p>"
    expected = "<pre>Die  cat\n\n  a <b>dog</b></pre><p>1 two</p>"
    assert as_text(translated("a.html", page, replaced(the="Die", one="1"))) == expected


def test_markdown_has_the_same_blocks() -> None:
    _, _, document = translated("a.md", MARKDOWN)
    texts = [segment.text for segment in document.segments]
    assert "A para with <x1/> and a <g2>link</g2> continued here. See <g3>bold</g3> text." in texts
    assert texts[0] == "Hello <g1>world</g1>"
    assert "item <g1>two</g1>" in texts
    content = as_text(
        translated("a.md", MARKDOWN, lambda t: t.replace("c1", "a|b").replace("para", "P*"))
    )
    kinds = [
        [token.type for token in MarkdownIt("commonmark").enable("table").parse(text)]
        for text in (MARKDOWN, content)
    ]
    assert kinds[0] == kinds[1]
    assert "| a\\|b | c **2** |" in content
    assert '`code` and a [link](http://x.y/a_b "t") continued' in content
    breaks = as_text(
        translated("a.md", "> A line  \n> and *one*\\\n> more\n", replaced(line="row"))
    )
    assert breaks == "> A row  \n> and *one*\\\n> more\n"
    starts = as_text(translated("a.md", "A paragraph\n", lambda t: "1. not a list"))
    assert starts == "1\\. not a list\n"


MORE_MARKDOWN = r"""See [the ref], [`x`][], [a b][the ref] and [none].[^1]

[the ref]: http://x.y
[`x`]: http://x.y
[^1]: one note
[^n-2]: two notes

- [ ] to do
- [x] done

| a \| b | c |
|---|---|

!!! note "Title"
    in it

::: tip
in this
:::

term
: what it is

$$
x = y
$$

with $x_1$, $$y z$$, 5 $ and {ref}`a b`.
"""


@pytest.mark.parametrize("end", ["\r", "\n", "\r\n"])
@pytest.mark.parametrize("front", ["", "---\ntitle: x\n---\n"])
def test_lines_of_markdown_end_as_for_its_parser(front: str, end: str) -> None:
    """A table after a line that a lone CR ends was an IndexError."""
    page = f"{front}# the top\n\n|the|y|\n|-|-|\n|the|z|\n\nthe last\nof it\n"
    page = page.replace("\n", end)
    content, counts, _ = translated("a.md", page)
    assert (content.decode(), counts.translated) == (page, 6)
    content = as_text(translated("a.md", f"a\r{page}", replaced(the="das")))
    assert content.count("das") == 4
    assert content.count("the") == 0


def test_signs_beside_links_and_at_the_end_of_headings_are_text() -> None:
    """A link behind the sign became an image, and the sign at the end was left out."""
    document = read_document(b"# About C\n\nSay [it](x)\n", "a.md")
    for segment, text in zip(document.segments, ("C #", "Say!<g1>it</g1>"), strict=True):
        segment.result = Result(text, origin="model")
    html = MarkdownIt().render(document.to_bytes().decode())
    assert html == '<h1>C #</h1>\n<p>Say!<a href="x">it</a></p>\n'


@pytest.mark.parametrize("page", ["word\n: what\n: this\n", "word\n\n:   what\n\n: \tthis\n"])
def test_the_mark_of_a_definition_is_no_text(page: str) -> None:
    """A translation without the colon made an ordinary paragraph of it."""
    content, _, document = translated("a.md", page, lambda text: text.strip(": ").upper())
    assert [segment.text for segment in document.segments] == ["word", "what", "this"]
    assert content.decode() == re.sub(r"\w+", lambda match: match[0].upper(), page)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("name", "page"), [("a.md", "|a|b|\n|-|-|\n|c|d|\n\n* e\n"), ("a.txt", "a\nb\n\nc\n")]
)
def test_line_breaks_of_a_translation_are_blanks(name: str, page: str, end: str) -> None:
    """Of a model that learned them, or of a memory: a row of a table became a paragraph."""
    content, _, _ = translated(name, page, lambda text: f"{text}{end}z")
    assert content.decode() == re.sub(r"\w", lambda match: f"{match[0]} z", page)


def test_code_of_markdown_stays_apart() -> None:
    """Two codes side by side are one, with the marks between in it."""
    content = as_text(translated("a.md", "a `b` or `c` d", lambda text: "Q"))
    assert content == "Q `b` `c`"


def test_markdown_of_other_programs_keeps_its_meaning() -> None:
    """Links by their label, footnotes and boxes of tasks were escaped, and lines of admonitions,
    directives and definitions joined."""
    content, counts, _ = translated("a.md", MORE_MARKDOWN, str.upper)
    expected = MORE_MARKDOWN
    for old, new in (
        (
            "See [the ref], [`x`][], [a b][the ref] and [none].",
            "SEE [THE REF][the ref], [`x`][`x`], ",
        ),
        *(("to do", "TO DO"), ("done", "DONE"), ("a \\| b | c", "A \\| B | C"), ("in it", "IN IT")),
        *(("one note", "ONE NOTE"), ("two notes", "TWO NOTES"), ("in this", "IN THIS")),
        *(
            ("\nterm\n: what it is", "\nTERM\n: WHAT IT IS"),
            ("with $", "WITH $"),
            ("5 $ and", "5 $ AND"),
        ),
    ):
        new += "[A B][the ref] AND \\[NONE\\]." if old.startswith("See") else ""
        assert old in expected
        expected = expected.replace(old, new)
    assert content.decode() == expected
    assert counts.skipped == {"lines of extensions of Markdown": 6}


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("Open the file $HOME/$USER and $HOME/${USER} now.", []),
        ("It costs US$5, or A$ 6 for all files.", []),
        ("The $n$th of $x_1$ and ($y$).", ["$n$", "$x_1$", "$y$"]),
        ("其中$x$是输入。", ["$x$"]),
    ],
)
def test_variables_and_amounts_are_no_formulas(text: str, codes: list[str]) -> None:
    (segment,) = read_document(text.encode(), "a.md", ("en", "de")).segments
    assert re.sub(r"<x\d+/>", lambda match: codes.pop(0), segment.text) == text
    assert codes == []


def test_text_beside_templates_and_behind_marks_is_translated() -> None:
    """A line was kept if it began as a template or as an admonition does."""
    kept = [
        *("{{ a }}", "{{< b c >}} {{ d }}", '{% set a = {"b": 1} %}{% if a %}', "{% include"),
        *("!!! note", '??? "Title"', '???+ tip "A title"', "!!! note inline end", "{%- endif -%}"),
        '!!! danger big red ""',
    ]
    texts = [
        "{{ product }} opens the file\nand closes the window.",
        "{% if a %}Some {% b %} text{% endif %}",
        *("??? What is this and why", "!!! no one knows"),
    ]
    page = "\n\n".join([*kept, *texts]) + "\n"
    content, counts, document = translated("a.md", page, replaced(the="das"))
    segments = [segment.text for segment in document.segments]
    assert segments[0] == texts[0].replace("\n", " ")
    assert re.sub(r"<x\d+/>", "*", segments[1]) == "Some * text", "tags of templates are kept"
    assert segments[2:] == texts[2:]
    assert content.decode() == page.replace("the file\nand closes the", "das file and closes das")
    assert counts.skipped == {"lines of extensions of Markdown": len(kept)}


def test_docx_keeps_formats_and_other_parts() -> None:
    data = make_docx(DOCX_RUNS)
    content, counts, document = translated("a.docx", data)
    assert content == data
    assert [segment.text for segment in document.segments] == [
        "Some <g1>bold</g1> text & more. Second.",
        "All bold",
    ]
    content, counts, _ = translated("a.docx", data, replaced(Some="Ein <", more="mehr"))
    assert counts.translated == 2
    first, second, third = docx.Document(io.BytesIO(content)).paragraphs
    assert first.text == "Ein < bold text & mehr. Second."
    assert [(run.text, run.bold) for run in first.runs if run.bold] == [("bold", True)]
    assert second.runs[0].bold
    assert third.text == ""
    before, after = (zipfile.ZipFile(io.BytesIO(file)) for file in (data, content))
    assert before.namelist() == after.namelist()
    different = [name for name in before.namelist() if before.read(name) != after.read(name)]
    assert different == ["word/document.xml"]


def test_hyphens_and_other_parts_of_word() -> None:
    """A blank was read in place of a hyphen; nothing named the comments, and the main part had to
    have the name that Word gives to it."""
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    text = (
        "<w:r><w:t>an e</w:t><w:noBreakHyphen/><w:t>mail to co</w:t><w:softHyphen/>"
        "<w:t>operate</w:t></w:r>"
    )
    document = f'<w:document xmlns:w="{space}"><w:body><w:p>{text}</w:p></w:body></w:document>'
    comments = document.replace("document", "comments").replace("body", "comment")
    parts = {"word/document2.xml": document, "word/comments.xml": comments}
    data = make_zip({name: part.encode() for name, part in parts.items()})
    content, counts, read = translated("a.docx", data, replaced(an="eine"))
    assert [segment.text for segment in read.segments] == ["an e-mail to cooperate"]
    assert counts.skipped == {"comments, charts and diagrams": 1}
    written = zipfile.ZipFile(io.BytesIO(content))
    assert ">eine e-mail to cooperate<" in written.read("word/document2.xml").decode()
    assert written.read("word/comments.xml").decode() == comments


def test_the_marks_of_a_field_of_word_stay_in_their_order() -> None:
    """They were codes of their own: the end of a field could come before its beginning."""
    marks = [
        f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end")
    ]
    begin, separate, end = marks
    code = "<w:r><w:instrText> PAGEREF x </w:instrText></w:r>"
    runs = [f"<w:r><w:t>{text}</w:t></w:r>" for text in ("See page ", "12", " now")]
    body = f"{runs[0]}{begin}{code}{separate}{runs[1]}{end}{runs[2]}{begin}{code}{end}"
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    document = f'<w:document xmlns:w="{space}"><w:body><w:p>{body}</w:p></w:body></w:document>'
    data = make_zip({"word/document.xml": document.encode()})
    content, _, read = translated("a.docx", data, lambda text: " ".join(text.split()[::-1]))
    assert read.segments[0].text == "See page <g1>12</g1> now"
    written = zipfile.ZipFile(io.BytesIO(content)).read("word/document.xml").decode()
    assert f"{begin}{code}{separate}<w:r><w:t" in written
    assert re.findall('fldCharType="(.*?)"', written) == [
        "begin",
        "separate",
        "end",
        "begin",
        "end",
    ]
    assert written.endswith(f"{begin}{code}{end}</w:p></w:body></w:document>")


def test_a_field_in_the_code_of_a_field_of_word_is_code() -> None:
    """The name that a condition compares was translated, as a part of the text around."""
    begin, separate, end = (
        f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end")
    )
    code, equal = (f"<w:r><w:instrText>{text}</w:instrText></w:r>" for text in ("IF ", '= "m"'))
    dear, value, shown, rest = (
        f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'
        for text in ("Dear ", "m", "Mr", " Lee")
    )
    whole = f"{begin}{code}{begin}{code}{separate}{value}{end}{equal}{separate}"
    unshown = f"{begin}{code}{begin}{code}{separate}{value}{end}{end}"
    body = f"{dear}{whole}{shown}{end}{rest}{unshown}"
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    document = f'<w:document xmlns:w="{space}"><w:body><w:p>{body}</w:p></w:body></w:document>'
    data = make_zip({"word/document.xml": document.encode()})
    content, counts, read = translated("a.docx", data, str.upper)
    assert [segment.text for segment in read.segments] == ["Dear <g1>Mr</g1> Lee"]
    assert counts.skipped == {}
    written = zipfile.ZipFile(io.BytesIO(content)).read("word/document.xml").decode()
    assert f'{whole}<w:r><w:t xml:space="preserve">MR<' in written
    assert written.endswith(f"{unshown}</w:p></w:body></w:document>")


@pytest.mark.parametrize(
    ("body", "texts", "skipped"),
    [
        ("{one}<w:r>{box}</w:r>{two}", ["one", " two", "box"], 0),
        ("<w:ins>{one}</w:ins><w:moveTo>{two}</w:moveTo>", ["<g1>one</g1><g2> two</g2>"], 0),
        ("{one}<w:moveFrom>{two}</w:moveFrom>", ["one"], 0),
        ('{one}<w:bdo w:val="rtl">{two}</w:bdo>', ["one<g1> two</g1>"], 0),
        ("{one}<w:r><w:ruby>{two}</w:ruby></w:r>", ["one"], 1),
        ("<w:r><w:t>one</w:t>{box}</w:r>", ["box"], 1),
    ],
)
def test_texts_of_word_are_translated_or_counted(body: str, texts: list[str], skipped: int) -> None:
    """The text beside a text box, text that was moved and text of a direction were left out."""
    runs = {word.strip(): f"<w:r><w:t>{word}</w:t></w:r>" for word in ("one", " two", "box")}
    runs["box"] = f"<w:pict><w:txbxContent><w:p>{runs['box']}</w:p></w:txbxContent></w:pict>"
    space = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    paragraph = f"<w:p>{body.format_map(runs)}</w:p>"
    document = f'<w:document xmlns:w="{space}"><w:body>{paragraph}</w:body></w:document>'
    data = make_zip({"word/document.xml": document.encode()})
    content, counts, read = translated("a.docx", data, replaced(one="1", two="2", box="3"))
    assert [segment.text for segment in read.segments] == texts
    assert sum(counts.skipped.values()) == skipped
    written = zipfile.ZipFile(io.BytesIO(content)).read("word/document.xml").decode()
    for old, new in {"one": "1", " two": " 2", "box": "3"}.items():
        if any(old in text for text in texts):
            document = document.replace(f">{old}<", f' xml:space="preserve">{new}<')
    assert written == document


def test_sentences_are_translated_one_by_one_and_joined() -> None:
    seen: list[str] = []

    def shout(text: str) -> str:
        seen.append(text)
        return text.upper()

    text = as_text(translated("a.txt", "  One two.  Mr. Smith came.\tOk!\n", shout))
    assert text == "  ONE TWO.  MR. SMITH CAME.\tOK!\n"
    assert seen == ["One two.", "Mr. Smith came.", "Ok!"]
    chinese = as_text(translated("a.txt", "One. Two.\n", lambda t: f"好{len(t)}。", ("en", "zh")))
    assert chinese == "好4。好4。\n"
    english = as_text(translated("a.txt", "一个。两个。\n", lambda t: "Good.", ("zh", "en")))
    assert english == "Good. Good.\n"


def test_columns_are_translated_one_by_one() -> None:
    seen: list[str] = []

    def shout(text: str) -> str:
        seen.append(text)
        return " ".join(text.upper().split())  # as a model writes blanks

    source = "  all, every      do not  hide\n\tname\t\tits value   \n"
    assert as_text(translated("a.txt", source, shout)) == (
        "  ALL, EVERY      DO NOT HIDE\n\tNAME\t\tITS VALUE   \n"
    )
    assert seen == ["all, every", "do not  hide", "name", "its value"]


def test_a_reason_of_the_model_is_not_repeated() -> None:
    class Reviewed(Stub):
        """A translator that compares the pieces itself."""

        def translate(self, texts: list[str], **options: Any) -> list[list[Generation]]:
            found = super().translate(texts, **options)
            reasons = tuple(differences("at 5", "at"))
            return [[replace(one, reasons=reasons) for one in own] for own in found]

    document = read_document(b"at 5", "a.txt")
    translate_document(Reviewed(lambda text: "at"), document)
    assert document.segments[0].reasons == ("missing: 5",)


def test_long_sentences_are_cut_at_clauses() -> None:
    seen: list[str] = []
    text = "one two three, four five six; seven eight nine " * 3 + "x" * 50
    content, counts, _ = translated(
        "a.txt", text, lambda t: (seen.append(t), t)[1], fits=lambda t: len(t) <= 20
    )
    assert content.decode() == text
    assert counts.to_review == 1  # the word of 50 letters
    assert max(map(len, seen)) <= 20
    assert seen[0] in ("one two three,", "one two three, four five six;")


def test_a_text_is_translated_once() -> None:
    seen: list[str] = []
    translated("a.txt", "same\n" * 2_000, lambda t: (seen.append(t), t)[1])
    assert seen == ["same"]


@pytest.mark.parametrize("name", ["a.txt", "a.html", "a.srt", "a.md"])
def test_a_blank_translation_leaves_the_source(name: str) -> None:
    content, counts, _ = translated(name, TEXTS[name], lambda text: "")
    assert content == TEXTS[name].encode()
    assert counts.blank == counts.segments


def test_a_fuzzy_draft_that_is_replaced_stays_as_a_comment() -> None:
    source = PO.replace('msgstr[0] ""\nmsgstr[1] ""', 'msgstr[0] "a \\"x\\""\nmsgstr[1] "b"')
    source = source.replace('msgid "one', '#, fuzzy\nmsgid "one').replace("\n", "\r\n")
    text = as_text(translated("a.po", source, loud))
    assert '\r\n# previous translation: "alt"\r\n#, fuzzy\r\n#| msgid "older"' in text
    assert '# previous translation [0]: "a \\"x\\""\r\n# previous translation [1]: "b"\r\n' in text
    assert text.count("# previous") == 3, "what is finished is not a draft"
    again = as_text(translated("a.po", text.replace('"OLD"', '"alt"'), loud))
    assert again.count("# previous") == 3, "a draft is kept once"
    assert translated("a.po", text, loud)[0] == text.encode()


def test_forms_of_an_incomplete_message_stay_as_comments() -> None:
    """They were replaced without a copy, and not counted, as if the message had none."""
    source = PO.replace('msgstr[0] ""\nmsgstr[1] ""', 'msgstr[0] "eine"\nmsgstr[1] ""')
    content, counts, _ = translated("a.po", source, loud)
    assert '# previous translation [0]: "eine"\n#, fuzzy\nmsgid "one file"' in content.decode()
    assert counts.replaced == 2
    kept = as_text(translated("a.po", source, loud, policy=Policy(only_empty=True)))
    assert 'msgstr[0] "eine"\nmsgstr[1] "%d FILES"' in kept
    assert "# previous" not in kept
    more = source.replace('msgstr[1] ""', 'msgstr[1] "zwei"\nmsgstr[2] "drei"')
    overwritten = as_text(translated("a.po", more, loud, policy=OVERWRITE))
    assert '# previous translation [2]: "drei"' in overwritten, "the language has no such form"


@pytest.mark.parametrize("state", ["new", "needs-translation", "initial"])
def test_an_unfinished_target_that_is_replaced_stays_beside_it(state: str) -> None:
    """It was replaced without a copy; a target that is the source is nobody's work."""
    source = XLIFF.replace('"new">Four', f'"{state}">Vier <x id="9"/>')
    content, counts, _ = translated("a.xlf", source, loud)
    draft = b'<target>Vier <x id="9"/></target>'
    assert b'>FOUR</target><alt-trans alttranstype="previous-version">' + draft in content
    assert counts.replaced == 1
    etree.fromstring(content)
    assert translated("a.xlf", content, loud)[0] == content
    assert b"alt-trans" not in translated("a.xlf", XLIFF, loud)[0]
    assert b"alt-trans" not in translated("a.xlf", source, loud, policy=Policy(only_empty=True))[0]
    marked = '<mrk mtype="seg" mid="1">Four</mrk>'
    copied = XLIFF.replace('"new">Four', f'"{state}">{marked}')
    copied = copied.replace("Four</source>", f"Four</source><seg-source>{marked}</seg-source>")
    assert b"alt-trans" not in translated("a.xlf", copied, loud)[0]
    source = XLIFF2.replace('state="final"', f'state="{state}"')
    content, _, _ = translated("b.xliff", source, loud)
    assert b">previous translation: Zwei</note>" in content
    assert b"previous" not in translated("b.xliff", source.replace(">Two", ">Zwei"), loud)[0]


def test_prepared_segments_of_xliff_are_translated() -> None:
    """Marks without text were a translation, which was kept."""
    inner = '<mrk mtype="seg" mid="{}">{}</mrk>'
    segments = f"{inner.format(1, 'Seg one.')} {inner.format(2, 'Seg two.')}"
    loud_segments = segments.replace("Seg one", "SEG ONE").replace("Seg two", "SEG TWO")
    unit = f"<source>Seg one. Seg two.</source><seg-source>{segments}</seg-source>"
    old = '<source>Four</source><target state="new">Four</target>'

    def found(target: str, **options: Any) -> tuple[str, Counts]:
        source = XLIFF.replace(old, unit + target).replace('<trans-unit id="4">', "<trans-unit {}>")
        source = source.format(options.pop("attributes", ""))
        content, counts, _ = translated("a.xlf", source, loud, **options)
        return content.decode().partition("</seg-source>")[2].partition("</trans-unit>")[0], counts

    empty, both = '<mrk mtype="seg" mid="{}"/>', [("1", ""), ("2", "")]
    only_empty = Policy(only_empty=True)
    for marks in (
        f"{empty.format(1)} {empty.format(2)}",
        "\n".join(inner.format(*one) for one in both),
        f'<g id="9">{empty.format(1)}</g>',
    ):
        for options in ({}, {"policy": only_empty}, {"attributes": 'approved="yes"'}):
            content, counts = found(f"<target>{marks}</target>", **options)
            assert content.endswith(f">{loud_segments}</target>"), marks
            assert (counts.kept, counts.replaced) == (1, 0)
    for marks in (f"{inner.format(1, 'Eins.')} {empty.format(2)}", inner.format(1, "Eins.")):
        target = f"<target>{marks}</target>"
        for options in ({}, {"policy": only_empty}):
            content, counts = found(target, **options)
            assert content.endswith(f">{loud_segments.replace('SEG ONE', 'Eins')}</target>")
            assert (counts.kept, counts.replaced) == (2, 0)
        assert found(target, attributes='approved="yes"')[0] == target
        finished = f'<target state="final">{marks}</target>'
        assert found(finished)[0] == finished
    for target in (f"<target>{segments}</target>", '<target><x id="1"/></target>'):
        assert found(target)[0] == target


@pytest.mark.parametrize("notes", ["", "<notes/>", "<notes><note>Own</note></notes>"])
def test_a_unit_of_xliff_2_has_one_element_of_notes(notes: str) -> None:
    """Each segment with a note wrote one, which the format does not allow."""
    source = XLIFF2.replace('<unit id="1">', f'<unit id="1">{notes}')
    content, _, _ = translated("b.xliff", source, loud, policy=OVERWRITE, with_quality=True)
    unit = etree.fromstring(content)[0][0]
    names = [etree.QName(node).localname for node in unit]
    assert names == ["notes", "originalData", "segment", "segment"]
    texts = [note.text for note in unit[0]]
    assert texts.count("Own") == ("Own" in notes)
    assert sum("quality: " in text for text in texts) == 2


@pytest.mark.parametrize(
    ("head", "encoding", "notes"),
    [
        ("", "cp1252", 1),
        ("", "utf-8", 0),
        ('<meta charset="ISO-8859-1">', "cp1252", 0),
        ("<!-- <meta charset=big5> --><meta charset=utf-16>", "utf-8", 0),
        ('<meta http-equiv="Content-Type" content="text/html; charset=gb2312">', "gb18030", 0),
        ("\ufeff<meta charset=big5>", "utf-8", 0),
    ],
)
def test_html_is_read_as_browsers_do(head: str, encoding: str, notes: int) -> None:
    page = f"{head}<p>caf\u00e9 \u201cHello\u201d"
    content, _, document = translated("a.html", page.encode(encoding), replaced(Hello="Tee"))
    assert document.segments[0].text == "caf\u00e9 \u201cHello\u201d"
    assert content == page.replace("Hello", "Tee").encode(encoding)
    assert len(document.notes) == notes


def test_a_text_in_another_language_asks_for_a_review(monkeypatch: pytest.MonkeyPatch) -> None:
    german = "Bitte wählen Sie zuerst eine <g1>Vorlage</g1> für %s aus"
    english = "Please select a template for the new document first"
    chinese = "请先选择新文档的模板。"

    def found(language: str | None) -> list[bool]:
        review = language_review(language)
        texts = (german, english, chinese, "Vorlage", "CPU 0x10 <b>", "Norsk bokmål")
        return [bool(review(Segment(text, 1), "")) for text in texts]

    assert found("en") == [True, False, True, False, False, False]
    assert found("deu") == [False, True, True, False, False, False]
    assert found("zh_CN") == [True, True, False, False, False, False]
    for language in (None, "tlh"):
        assert not any(found(language))
    reasons = language_review("en")(Segment(german, 1), "")
    assert reasons == ["language: the text is in de, not in en"]
    monkeypatch.setitem(extras.EXTRAS, "langid", ("no_such_package",))
    assert not any(found("en"))


def test_policies() -> None:
    def targets(**options: Any) -> list[str]:
        text = as_text(translated("a.po", PO, str.upper, **options))
        return [e.msgstr for e in polib.pofile(text) if e.msgid in ("old", "kept")]

    assert targets() == ["OLD", "behalten"]
    assert targets(policy=Policy(only_empty=True)) == ["alt", "behalten"]
    assert targets(policy=OVERWRITE) == ["OLD", "KEPT"]


@pytest.mark.parametrize("text", [PO, XLIFF, XLIFF2, TMX])
def test_a_quality_is_a_note_beside_the_translation(text: str) -> None:
    name = "a.po" if text is PO else "a.tmx" if text is TMX else "a.xlf"
    document = read_document(text.encode(), name, ("en", "de"))
    document.segments[0].result = Result(
        document.segments[0].text, ("odd",), origin="model", quality=71.6
    )
    written = document.to_bytes()
    assert written.count(b"quality: 72") == 1
    assert written.count(b"needs review: odd") == 1
    again = read_document(written, name, ("en", "de"))
    again.segments[0].result = Result(again.segments[0].text, origin="model")
    if text is not XLIFF2:  # whose unit has another segment, which is kept
        assert b"quality" not in again.to_bytes()
