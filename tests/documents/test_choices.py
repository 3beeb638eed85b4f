"""Choices of texts (ICU) are translated text by text, and pieces are not cut at sentence ends."""

import pytest

from document_samples import OVERWRITE, translated
from heedful.documents.choices import choice_of
from heedful.documents.sentences import SplitText, sentences

FILES = "You have {n, plural, =0 {no file} one {# file} other {# files}} in {folder}."


def german(text: str) -> str:
    """A translator of some words, which keeps the pieces."""
    words = {"You have": "Sie haben", "no file": "keine Datei", "files": "Dateien", "in": "in"}
    for old, new in (*words.items(), ("file", "Datei")):
        text = text.replace(old, new)
    return text


def catalogue(text: str) -> str:
    """A catalogue with one message."""
    header = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"'
    return f'{header}\n\nmsgid "{text}"\nmsgstr ""\n'


def test_each_text_is_translated_in_its_sentence() -> None:
    content, counts, _ = translated("a.po", catalogue(FILES), german, policy=OVERWRITE)
    assert (
        "{n, plural, =0 {Sie haben keine Datei in {folder}.} one {Sie haben # Datei in {folder}.} "
        "other {Sie haben # Dateien in {folder}.}}" in content.decode()
    )
    assert counts.to_review == 0
    assert counts.segments == 1


def test_a_copied_choice_is_the_same() -> None:
    content, counts, _ = translated("a.po", catalogue(FILES), policy=OVERWRITE)
    assert f'msgstr "{FILES}"' in content.decode()
    assert counts.to_review == 0


@pytest.mark.parametrize(
    ("language", "keys"),
    [
        ("de", ["=0", "one", "other"]),
        ("zh-CN", ["=0", "other"]),
        ("pl", ["=0", "one", "few", "many", "other"]),
        ("ar", ["=0", "zero", "one", "two", "few", "many", "other"]),
        ("tlh-unknown", ["=0", "one", "other"]),
        (None, ["=0", "one", "other"]),
    ],
)
def test_the_texts_are_those_of_the_plural_categories(
    language: str | None, keys: list[str]
) -> None:
    choice = choice_of(FILES)
    assert choice is not None
    assert [*choice.of_language(language)] == keys


def unit(source: str) -> str:
    """A file of XLIFF with one unit."""
    return (
        '<xliff version="1.2"><file source-language="en"><body><trans-unit id="1"><source>'
        f"{source}</source></trans-unit></body></file></xliff>"
    )


ANGULAR = (
    '{VAR_PLURAL, plural, =0 {no file} =1 {one file} other {<x id="N"/> files}}',
    '{VAR_PLURAL, plural, =0 {keine Datei} =1 {one Datei} other {<x id="N"/> Dateien}}',
)


def test_texts_with_codes_are_translated_too() -> None:
    content, counts, _ = translated("a.xlf", unit(ANGULAR[0]), german)
    assert ANGULAR[1] in content.decode()
    assert counts.to_review == 0


def test_plural_forms_that_a_choice_with_codes_lacks_are_named() -> None:
    content, counts, _ = translated("a.xlf", unit(ANGULAR[0]), german, ("en", "pl"))
    assert ANGULAR[1] in content.decode()
    assert (
        "needs review: plural forms that the choice of texts lacks: few, many" in content.decode()
    )
    assert counts.to_review == 1


@pytest.mark.parametrize(
    "source",
    [
        'see <x id="a"/> {n, select, a {the <x id="b"/> file} other {files}}',
        'see {n, select, a {the {m, select, other {<x id="b"/>}} file} other {files}}',
        "see {n, select, a {the <g id='1'>file} other {files</g>}}",
    ],
)
def test_codes_of_other_choices_stay_in_them(source: str) -> None:
    def translate(text: str) -> str:
        return text.replace("see", "siehe").replace("file", "Datei")

    content, counts, document = translated("a.xlf", unit(source), translate)
    assert f">{source}</target>" in content.decode()
    assert counts.to_review == 1
    [reason] = document.segments[0].reasons
    assert reason.startswith("a choice of texts that is not translated: {n, select, a {the ")


def test_codes_beside_a_choice_are_placed_around_it() -> None:
    def translate(text: str) -> str:
        return text.replace("see", "siehe")

    choice = "{n, select, a {file} other {files}}"
    content, counts, _ = translated("a.xlf", unit(f'see <x id="a"/> {choice}'), translate)
    assert f'siehe <x id="a"/> {choice}</target>' in content.decode()
    assert counts.to_review == 1, "its texts are not translated"


def test_a_selection_keeps_its_keys() -> None:
    choice = choice_of("{who, select, male {He} female {She} other {They}} came.")
    assert choice is not None
    assert choice.of_language("zh") == {
        "male": "He came.",
        "female": "She came.",
        "other": "They came.",
    }
    assert (
        choice.joined({"male": "Er kam.", "female": "Sie kam.", "other": "Sie kamen."})
        == "{who, select, male {Er kam.} female {Sie kam.} other {Sie kamen.}}"
    )


def test_signs_of_the_syntax_in_a_translation_are_quoted() -> None:
    choice = choice_of("{n, plural, one {the # of {x}} other {the # of {x}}}")
    assert choice is not None
    actual = choice.joined({"one": "l'{n} no. # de l'{x}", "other": "les {n}"})
    assert actual == "{n, plural, one {l''# no. '#' de l''{x}} other {les #}}"
    assert choice.joined({"one": "}{", "other": "{n}"}) is None


@pytest.mark.parametrize(
    "text",
    [
        "no choice {n}",
        "{n, selectordinal, one {#st} other {#th}}",
        "{n, plural, offset:1 one {# file} other {# files}}",
        "{n, plural, one {a {m, plural, one {b} other {c}}} other {d}}",
        "{n, plural, one {a} other {b}} and {m, plural, one {a} other {b}}",
        "{n, plural, one {a '{'} other {b}}",
        "no. # of {n, plural, one {a} other {b}}",
        "{n, plural, one {a}}",
    ],
)
def test_other_choices_stay_as_they_are(text: str) -> None:
    assert choice_of(text) is None


def test_a_choice_that_is_not_read_and_copied_is_reviewed() -> None:
    """A model without masks that copied it left no reason."""
    ordinal = "{n, selectordinal, one {#st} other {#th}}"
    content, counts, _ = translated("a.po", catalogue(f"The {ordinal} file"), german)
    assert f'"The {ordinal} Datei"' in content.decode()
    assert f"# needs review: a choice of texts that is not translated: {ordinal}" in (
        content.decode()
    )
    assert counts.to_review == 1


def test_a_choice_that_is_not_read_and_changed_is_reviewed() -> None:
    text = "{n, selectordinal, one {#st. A file} other {#th. A file}} of May."
    content, counts, _ = translated("a.po", catalogue(text), german, policy=OVERWRITE)
    assert counts.to_review == 1
    assert f"# needs review: missing: {text.removesuffix(' of May.')}" in content.decode()


def test_no_sentence_ends_in_a_piece() -> None:
    assert sentences("Use <%= a. B %> here. Then stop.", "en") == [
        "Use <%= a. B %> here. ",
        "Then stop.",
    ]
    choice = "{n, plural, one {A file. It is new.} other {Files. They are new.}}"
    assert any(choice in part for part in sentences(f"{choice} Now. Open it.", "en"))
    long = "a {n, plural, one {b; c, d} other {e; f, g}} h i"
    rows = SplitText(long, lambda text: len(text) < 10 or "{" in text, "en").rows
    assert any("{n, plural, one {b; c, d} other {e; f, g}}" in row for row in rows)
