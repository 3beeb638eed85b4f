"""Terms of glossaries: where a text has them, and files that are no glossary."""

from pathlib import Path

import pytest

from backend_models import model_of
from heedful.data.tokenizer import Tokenizer
from heedful.errors import UserError
from heedful.fidelity import Glossary, as_glossary

TERMS = {
    "text": "Text",
    "text document|text documents": "Textdokument|Textdokumente",
    "IT": "EDV",
    "C++": "C++",
    "straße": "street",
    "文档": "document",
    "size 12": "Größe 12",
    "cafe\u0301": "Kaffeehaus",
    "का": "ka",
}


@pytest.fixture(scope="module")
def glossary() -> Glossary:
    return as_glossary(TERMS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A text, TEXT and Text.", ["text", "TEXT", "Text"]),
        ("context texts text_1", []),
        ("_Text, a _text document, &text, ~Text", ["Text", "text document", "text", "Text"]),
        ("Text  documents of text documents.", ["Text  documents", "text documents"]),
        ("text-document", ["text"]),
        ("it IT It", ["IT"]),
        ("C++ and C", ["C++"]),
        ("STRASSE Straße", ["STRASSE", "Straße"]),
        ("打开文档。", ["文档"]),
        ("the café", ["café"]),
        ("काम का", ["का"]),
        ("see {text} <a title='text'>text</a> text.txt http://a.example/text", ["text"]),
        ("a size 12 font", ["size 12"]),
        ("a size 12.5 font", []),
        ("", []),
    ],
)
def test_terms_are_whole_words_the_longest_first(
    glossary: Glossary, text: str, found: list[str]
) -> None:
    assert [text[one.start : one.end] for one in glossary.find(text)] == found


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        ("Der Text und das Textdokument", []),
        ("_Text und das _Textdokument", []),
        ("der text: Textdokumente", []),  # `Text` is exact
        ("Kontext, Textdokumente", ["text"]),
        ("Textdokumentation", ["text", "text document"]),
    ],
)
def test_a_translation_has_one_of_the_forms(
    glossary: Glossary, output: str, missing: list[str]
) -> None:
    found = glossary.find("the text of text documents")
    expected = ["text"] if output.startswith("der text") else missing
    actual = [term.sources[0] for term in glossary.missing(found, output)]
    assert sorted(actual) == sorted(expected)
    twice = glossary.find("text and text")
    assert glossary.missing(twice, "Text")
    assert not glossary.missing(twice, "Text Text")


TBX = """<?xml version="1.0"?><martif type="TBX"><text><body>
<termEntry id="1"><langSet xml:lang="en-US"><tig><term>file</term></tig>
<tig><term>files</term></tig></langSet>
<langSet xml:lang="de"><ntig><termGrp><term>Datei</term></termGrp></ntig></langSet></termEntry>
<conceptEntry><langSec xml:lang="en"><termSec><term>cell</term></termSec></langSec></conceptEntry>
</body></text></martif>"""


def test_files_of_glossaries(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    path.write_bytes("\ufeffSource\tTarget\r\n\r\nfile|files\tDatei\r\nfile\tDatei\n".encode())
    [first, second] = as_glossary(path, ("en", "de")).terms
    assert (first.sources, first.targets, first.line) == (("file", "files"), ("Datei",), 3)
    assert second.line == 4
    path.write_text(TBX)
    [term] = as_glossary(str(path), ("en", "de")).terms
    assert (term.sources, term.targets) == (("file", "files"), ("Datei",))
    status = '</term><termNote type="administrativeStatus">{}Term-admn-sts</termNote>'
    marked = TBX.replace("files</term>", f"files{status.format('deprecated')}").replace(
        "</termGrp></ntig>",
        "</termGrp></ntig><tig><term>Akte</term></tig>"
        f"<tig><term>Kartei{status.format('superseded')}</tig>"
        f"<tig><term>Ordner{status.format('preferred')}</tig>",
    )
    path.write_text(marked)
    [term] = as_glossary(str(path), ("en", "de")).terms
    assert (term.sources, term.targets) == (("file",), ("Ordner", "Datei", "Akte"))
    with pytest.raises(UserError, match="the target language of the model is not known; give"):
        as_glossary(path, ("en", None))


def test_a_term_of_several_entries_of_a_termbase_has_all_their_translations(tmp_path: Path) -> None:
    """Meanings are entries of their own; the file was refused, with advice for tables."""

    def entry(sources: str, targets: str) -> str:
        sides = [
            f'<langSet xml:lang="{tag}">{"".join(f"<tig><term>{t}</term></tig>" for t in terms)}'
            for tag, terms in (("en", sources.split()), ("de", targets.split()))
        ]
        return f"<termEntry>{''.join(f'{side}</langSet>' for side in sides)}</termEntry>\n"

    body = entry("file record", "Akte") + entry("file", "Datei") + entry("bank", "Bank Ufer")
    path = tmp_path / "a.tbx"
    path.write_text(f'<martif type="TBX"><text><body>\n{body}</body></text></martif>')
    glossary = as_glossary(path, ("en", "de"))
    assert [(term.sources, term.targets, term.line) for term in glossary.terms] == [
        (("file",), ("Akte", "Datei"), 2),
        (("record",), ("Akte",), 2),
        (("bank",), ("Bank", "Ufer"), 4),
    ]
    assert glossary.missing(glossary.find("the file"), "die Datei") == []


def test_the_terms_of_several_glossaries_in_turn_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server whose requests had two glossaries encoded all terms at each request."""
    encode, encoded = Tokenizer.encode_batch, []

    def noted(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        encoded.append(texts)
        return encode(tokenizer, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)
    glossaries = [as_glossary({"cat": "mat"}), as_glossary({"dog": "sat"})]
    model, other = model_of("vaswani2017"), model_of("vaswani2017")
    for _ in range(2):
        for glossary in glossaries:
            assert model.options(glossary=glossary).glossary is glossary
    assert encoded == [["mat"], ["sat"]]
    other.options(glossary=glossaries[0])  # of another tokenizer, which may lack some
    assert encoded[2:] == [["mat"]]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a\tb\na\tc\n", r"line 2: 'a' has another target than in line 1; write both"),
        ("a\tb\nA\tc\nx|a\tb|c\n", r"line 3: 'a' has another target"),
        ("a\tb\n\t c\n", r"line 2: the term '' is empty"),
        ("a\tb|\n", r"line 1: the translation 'b\|' is empty, or one of its alternatives"),
        ("a\tb\tc\n", "line 1: a glossary has 2 columns"),
        ("one word\n", "line 1: a glossary has 2 columns"),
        ("\n", "has no terms"),
        ("de\ten\na\tb\n", "exchange the columns"),
        ("<a", "line 1, column"),
        (TBX.replace("<martif", "<!DOCTYPE a [<!ENTITY b 'c'>]><martif"), "declares the entity b"),
        (b"\xff\t\xfe", "is not UTF-8"),
    ],
)
def test_what_is_no_glossary_is_one_line(
    tmp_path: Path, content: str | bytes, problem: str
) -> None:
    path = tmp_path / "terms.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=problem) as error:
        as_glossary(path, ("en", "de"))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    with pytest.raises(UserError, match="glossary must be a file, or a mapping"):
        as_glossary(["a", "b"])
