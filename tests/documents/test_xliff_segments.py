"""Units of XLIFF 1.2 with marked segments are translated segment by segment."""

from pathlib import Path
from typing import Any

import pytest

from document_samples import DOCX_RUNS, OVERWRITE, make_docx, translated
from heedful.data.row_files import read_rows
from heedful.documents import Counts, Policy
from heedful.documents.formats import NO_LINES
from heedful.documents.translating import memory_of

SOURCE = "<source>A b. C d.</source>"
MARK = '<mrk mtype="seg" mid="{}">{}</mrk>'
EMPTY = '<mrk mtype="seg" mid="{}"/>'
NEW = 'state="needs-review-translation" state-qualifier="{}"'
XLIFF = """<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"
 xmlns:sdl="http://sdl.com/FileTypes/SdlXliff/1.0">
<file original="a" source-language="en" target-language="de" datatype="plaintext"><body>
<trans-unit id="1"{}>{}</trans-unit></body></file></xliff>"""


def marks(*texts: str) -> str:
    """Marked segments, with a blank between."""
    return " ".join(MARK.format(mid, text) for mid, text in enumerate(texts, 1))


BOTH = f"<seg-source>{marks('A b.', 'C d.')}</seg-source>"


def unit_of(
    content: str, name: str = "a.xlf", attributes: str = "", **options: Any
) -> tuple[str, Counts]:
    """What follows `seg-source` in a translated unit, and the counts."""
    data, counts, _ = translated(name, XLIFF.format(attributes, content), str.upper, **options)
    return data.decode().partition("</seg-source>")[2].partition("</trans-unit>")[0], counts


@pytest.mark.parametrize(
    ("target", "written"),
    [
        ("", marks("A B.", "C D.")),
        ("<target/>", marks("A B.", "C D.")),
        (f"<target>{marks('Mensch.', '')}</target>", marks("Mensch.", "C D.")),
        (f"<target>{MARK.format(1, 'Mensch.')}</target>", marks("Mensch.", "C D.")),
        # The order of the target's segments, and attributes of its marks, stay.
        (
            f'<target>{MARK.format(2, "Z")}<mrk mtype="seg" mid="1" x="y" /></target>',
            MARK.format(2, "Z") + '<mrk mtype="seg" mid="1" x="y">A B.</mrk>',
        ),
    ],
)
def test_empty_segments_of_a_unit_are_translated(target: str, written: str) -> None:
    """A unit was one text, whose target lost its marks and a person's segments."""
    content, counts = unit_of(SOURCE + BOTH + target)
    assert content == f"<target {NEW.format('leveraged-mt')}>{written}</target>"
    num_filled = target.count("</mrk>") - target.count("></mrk>")
    assert (counts.segments, counts.kept, counts.replaced) == (2, num_filled, 0)
    assert unit_of(SOURCE + BOTH + content)[0] == content


def test_filled_segments_are_replaced_as_whole_units_are() -> None:
    filled = f"<target>{marks('Mensch.', 'Kind.')}</target>"
    unfinished = filled.replace("<target", '<target state="new"')
    whole = '<target state="new">Mensch. Kind.</target>'
    written = f"<target {NEW.format('leveraged-mt')}>{marks('A B.', 'C D.')}</target>"
    draft = '<alt-trans alttranstype="previous-version"><target>{}</target></alt-trans>'
    draft = draft.format(marks("Mensch.", "Kind."))
    for target, expected, options in (
        (filled, filled, {}),
        (filled, written, {"policy": OVERWRITE}),
        (unfinished, written + draft, {}),
        (unfinished, unfinished, {"policy": Policy(only_empty=True)}),
        (whole, written + draft.replace(marks("Mensch.", "Kind."), "Mensch. Kind."), {}),
        (whole, whole, {"policy": Policy(only_empty=True)}),
    ):
        content, counts = unit_of(SOURCE + BOTH + target, **options)
        assert content == expected
        assert counts.replaced == 2 * (content != target)


def test_segments_keep_codes_around_and_between_them() -> None:
    coded = 'C <g id="2">d</g>.'
    inner = f"<g id='1'>{marks('A b.', coded)}</g>"
    last = MARK.format(3, '<x id="3"/>')
    content, counts = unit_of(f"{SOURCE}<seg-source>{inner}<x id='4'/>{last}</seg-source>")
    expected = inner.replace("A b", "A B").replace(">d<", ">D<")
    assert f">{expected}<x id='4'/>{last}</target>" in content
    assert counts.segments == 2
    content, counts = unit_of(f"{SOURCE}<seg-source>Outside {MARK.format(1, 'C')}</seg-source>")
    assert content.endswith(f">Outside {MARK.format(1, 'C')}</target>")
    assert counts.skipped == {"texts between segments": 1}
    outside = f"{SOURCE}<seg-source>Outside {MARK.format(1, 'C')}</seg-source>"
    content, counts = unit_of(f"{outside}<target>Draußen {EMPTY.format(1)}</target>")
    assert content.endswith(f">Draußen {MARK.format(1, 'C')}</target>")


DRAFT = 'conf="Draft" origin="{}" origin-system="heedful"'


def test_segments_that_trados_has_locked_are_kept() -> None:
    locked = '<sdl:seg-defs><sdl:seg id="1" locked="true"/><sdl:seg id="2"/></sdl:seg-defs>'
    for target, written, state in (
        (marks("Mensch.", ""), marks("Mensch.", "C D."), f" {NEW.format('leveraged-mt')}"),
        (marks("", ""), f"{EMPTY.format(1).replace('/>', '></mrk>')} {MARK.format(2, 'C D.')}", ""),
    ):
        for options in ({}, {"policy": OVERWRITE}):
            unit = f"{SOURCE}{BOTH}<target>{target}</target>{locked}"
            content, counts = unit_of(unit, **options)
            known = locked.replace('id="2"', f'id="2" {DRAFT.format("mt")}')
            assert content == f"<target{state}>{written}</target>{known}"
            assert (counts.segments, counts.skipped) == (1, {"locked segments": 1})


def test_trados_sees_the_state_of_new_segments() -> None:
    """They were shown as not translated."""
    percent = '<sdl:seg id="{}" conf="{}" percent="100">x</sdl:seg>'
    first, second = percent.format(1, "Translated"), percent.format(2, "Draft")
    old = f"<sdl:seg-defs>{first}{second}</sdl:seg-defs>"
    unit = f"{SOURCE}{BOTH}<target>{marks('Mensch.', '')}</target>{old}"
    content, _ = unit_of(unit, memory={"C d.": "Kind."})
    new = f'<sdl:seg id="2" {DRAFT.format("tm")}>x</sdl:seg>'
    assert content.endswith(old.replace(second, new))


def test_a_memory_has_the_segments_of_units(tmp_path: Path) -> None:
    target = f'<target state="final">{marks("Mensch.", "Kind.")}</target>'
    path = tmp_path / "memory.xlf"
    path.write_text(XLIFF.format("", SOURCE + BOTH + target))
    rows = read_rows([path], {"src": None, "tgt": None})
    memory = memory_of(zip(rows["src"], rows["tgt"], strict=True))
    content, counts = unit_of(SOURCE + BOTH, memory=memory)
    expected = marks("Mensch.", "Kind.")
    assert content == f"<target {NEW.format('exact-match')}>{expected}</target>"
    assert counts.from_memory == 2
    del memory["C d."]
    content, counts = unit_of(SOURCE + BOTH, memory=memory)
    assert NEW.format("leveraged-mt") in content
    assert marks("Mensch.", "C D.") in content


def test_notes_on_segments_that_are_kept_stay() -> None:
    note = '<note from="heedful">quality: 7</note>'
    unit = f"{SOURCE}{BOTH}<target>{marks('Mensch.', '')}</target>{note}"
    content, _ = unit_of(unit, with_quality=True)
    assert content.count("<note") == 2
    assert note in content
    content, _ = unit_of(unit, with_quality=True, policy=OVERWRITE)
    assert note not in content


def test_xliff_of_other_programs_is_read(tmp_path: Path) -> None:
    """Their lines were texts, with all XML."""
    unit = f"<source>A b.</source>{BOTH}<target>{marks('Mensch.', 'Kind.')}</target>"
    for name in ("a.sdlxliff", "A.MQXLIFF", "a.mxliff"):
        assert unit_of(SOURCE + BOTH, name)[0].startswith(f"<target {NEW.format('leveraged-mt')}")
        (tmp_path / name).write_text(XLIFF.format("", unit))
        rows = read_rows([tmp_path / name], {"src": None, "tgt": None})
        assert [*rows["tgt"]] == ["Mensch.", "Kind."]


@pytest.mark.parametrize("attribute", ['mq:locked="locked"', 'm:locked="true"'])
def test_units_that_memoq_and_phrase_have_locked_are_kept(attribute: str) -> None:
    content, counts = unit_of(SOURCE + BOTH, attributes=f" {attribute}")
    assert content == ""
    assert (counts.segments, counts.skipped) == (0, {"locked segments": 1})
    free = attribute.replace('"locked"', '"false"').replace('"true"', '"false"')
    assert unit_of(SOURCE + BOTH, attributes=f" {free}")[1].segments == 2
    locked = BOTH.replace('mid="2"', f'mid="2" {attribute}')
    content, counts = unit_of(SOURCE + locked)
    assert (counts.segments, counts.skipped) == (1, {"locked segments": 1})
    assert f"{MARK.format(1, 'A B.')} " in content
    assert "C" not in content


def test_files_of_other_formats_are_no_lines() -> None:
    endings = ".mdx .qmd .ttml .dfxp .sbv .dita .ftl .ipynb .vue .xml .ts .yaml .properties"
    assert NO_LINES.issuperset(endings.split())


def test_templates_of_word_are_documents() -> None:
    for name in ("a.docm", "a.dotx", "a.dotm"):
        data, counts, _ = translated(name, make_docx(DOCX_RUNS), str.upper)
        assert counts.translated == 2
        assert data != make_docx(DOCX_RUNS)
