"""`heedful translate` of documents: the file whole or not at all, what is kept and what is said."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polib
import pytest

from backend_models import model_of
from commands import GONE, Outcome, assert_refused, tree
from document_samples import DOCX_RUNS, HTML, PO, SRT, make_docx
from heedful import load
from heedful.cli.documents import DocumentFlags, translate_documents
from heedful.cli.review import ReviewTable
from heedful.documents.segments import Result, Segment
from heedful.errors import UserError
from heedful.pipelines.generations import Generation


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    model_of("vaswani2017").save(folder)
    return folder


SHORT = ("--beam-size", 1, "--max-new-tokens", 4)


def test_a_catalogue_with_a_memory(commands: Any, model: Path, tmp_path: Path) -> None:
    def translate(*words: object) -> Outcome:
        return commands.run("translate", model, *words, *SHORT)

    source, output, memory = (tmp_path / name for name in ("a.po", "b.po", "memory.csv"))
    source.write_text(PO)
    memory.write_text('en,de\n"long text","langer, Text"\n')
    result = translate("-i", source, "-o", output, "--memory", memory, "--tgt-lang", "de")
    # The tiny model names no languages.
    assert result.code == 2
    assert "no --tgt-lang de" in result.err
    source.write_text(PO.replace('UTF-8\\n"', 'UTF-8\\n"\n"Language: de\\n"'))
    (tmp_path / "wrong.tsv").write_text("tgt\tsrc\nx\ty\n")
    result = translate("-i", source, "-o", output, "--memory", tmp_path / "wrong.tsv")
    assert (result.code, output.exists()) == (2, False)
    assert "exchange the columns" in result.err
    assert "data.train" not in result.err
    result = translate("-i", source, "-o", output, "--memory", memory)
    assert result.code == 0, result.err
    assert "1 from the memory" in result.err
    assert "1 kept" in result.err
    catalogue = polib.pofile(str(output))
    assert catalogue.find("long text").msgstr == "langer, Text"
    assert catalogue.find("kept").msgstr == "behalten"
    again = translate("-i", output, "-o", tmp_path / "c.po", "--only-empty")
    assert again.code == 0
    assert (tmp_path / "c.po").read_bytes() == output.read_bytes()


def test_lines_in_parts_are_counted_and_numbered_as_lines(
    commands: Any, model: Path, tmp_path: Path
) -> None:
    words = " ".join(["the cat sat on a dog,"] * 30)
    (tmp_path / "a.txt").write_text(f"a cat\n{words}\n{'x' * 999}\n")
    result = commands.run("translate", model, "-i", tmp_path / "a.txt", *SHORT)
    assert result.code == 0
    assert "translated in parts: 1" in result.err
    assert "line 3 has" in result.err
    assert "translations cut off by the length limit: 2\n" in result.err


def test_documents_on_stdout_and_in_binary(commands: Any, model: Path, tmp_path: Path) -> None:
    def translate(*words: object) -> Outcome:
        return commands.run("translate", model, *words, *SHORT)

    page, book = tmp_path / "a.html", tmp_path / "a.docx"
    page.write_text(HTML)
    book.write_bytes(make_docx(DOCX_RUNS))
    result = translate("-i", page)
    assert result.code == 0
    assert "<code>x=1</code>" in result.out
    assert "5 segments" in result.err
    result = translate("-i", book)
    assert result.code == 2
    assert "name the translated file with --output" in result.err
    assert translate("-i", book, "-o", tmp_path / "b.docx").code == 0
    assert (tmp_path / "b.docx").stat().st_size > 1_000


def test_a_folder_is_translated_and_continued(commands: Any, model: Path, tmp_path: Path) -> None:
    def translate(*words: object) -> Outcome:
        return commands.run("translate", model, *words, *SHORT, cwd=tmp_path)

    files = {"b/c.html": HTML, "a.txt": "One.\nTwo.\n", "b/d.xlf": "<xliff>", ".git/e.md": "e"}
    for name, text in {**files, "b/f.png": "no text"}.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    result = translate("-i", "in", "-o", "out", "--review", "r.tsv")
    assert result.code == 0, result.err
    rows = [line.split("\t") for line in (tmp_path / "r.tsv").read_text().splitlines()]
    assert {"a.txt:1", "a.txt:2"} < {row[0] for row in rows}
    assert "a.txt: 2 segments; 2 translated" in result.err
    assert "b/d.xlf: left out: in/b/d.xlf, line 1, column" in result.err
    assert "files translated: 2; left out: 1; no documents: 1\n" in result.err
    assert set(tree(tmp_path / "out")) == {"a.txt", "b", "b/c.html"}
    one = translate("-i", "in/b/c.html", "-o", "one.html", "--quality")
    assert one.code == 0
    assert "note: --quality has no place in a .html file; --review has it\n" in one.err
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "out/b/c.html").read_bytes()
    (tmp_path / "out/a.txt").write_text("mine")
    before = (tmp_path / "r.tsv").read_text()
    assert_refused(translate("-i", "in", "-o", "out", "--review", "r.tsv"), "r.tsv may have")
    assert_refused(translate("-i", "in", "-o", "out", "--review", "in/a.txt"), "is a document in")
    assert (tmp_path / "r.tsv").read_text() == before
    assert (tmp_path / "in/a.txt").read_text() == files["a.txt"]
    again = translate("-i", "in", "-o", "out")
    assert "files translated: 0; already there: 2; left out: 1; no documents: 1\n" in again.err
    assert (tmp_path / "out/a.txt").read_text() == "mine"
    for words, problem in (
        (("in",), "in is a folder: name a folder for its translations with --output"),
        (("in", "-o", "one.html"), "in is a folder: name a folder"),
        (("in", "-o", "in/out"), "in/out is inside in"),
    ):
        assert_refused(translate("-i", *words), problem)
    (tmp_path / "in/b/c.html").unlink()
    strict = translate("-i", "in/b", "-o", "new", "--strict")
    assert_refused(strict, "in/b/d.xlf, line 1, column")
    none = translate("-i", "in/b", "-o", "new")
    assert none.code == 2
    assert none.err.endswith("error: no file can be translated; the reasons are above\n")


def test_a_fault_in_one_file_costs_no_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.txt", "b.html", "c.txt"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("One.\n")
    monkeypatch.setattr("heedful.documents.html.HtmlDocument.to_bytes", lambda document: 1 / 0)
    flags = DocumentFlags(None, None, False, False, False, True)
    in_out: Any = SimpleNamespace(
        input=tmp_path / "in", output=tmp_path / "out", texts=None, strict=False
    )
    options = {"beam_size": 1, "max_new_tokens": 4}
    translator = load(model, backend="eager")
    with pytest.raises(UserError, match=r"faults of heedful in b\.html; report them"):
        translate_documents(translator, in_out, flags, options, refused={}, review=None)
    assert "b.html: left out: a fault of heedful, ZeroDivisionError" in capsys.readouterr().err
    assert set(tree(tmp_path / "out")) == {"a.txt", "c.txt"}
    # The table of what was written is not lost, since the next command keeps these files.
    shutil.rmtree(tmp_path / "out")
    table = ReviewTable(tmp_path / "r.tsv", [])
    with pytest.raises(UserError, match="faults of heedful"):
        translate_documents(translator, in_out, flags, options, refused={}, review=table)
    rows = [line.split("\t")[0] for line in (tmp_path / "r.tsv").read_text().splitlines()]
    assert sorted(rows) == ["a.txt:1", "c.txt:1", "line"]
    shutil.rmtree(tmp_path / "out")
    in_out.strict = True
    with pytest.raises(ZeroDivisionError):
        translate_documents(translator, in_out, flags, options, refused={}, review=None)


@pytest.mark.parametrize("name", ["a.json", "A.TSV", "a.mdx", "a.ttml", "a.ipynb"])
def test_files_of_other_formats_are_not_read_as_lines(
    commands: Any, model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text('{"key": "One."}\n')
    outcome = commands.run("translate", model, "-i", name, "-o", "out", cwd=tmp_path)
    assert_refused(outcome, f"{name} is not lines of text, by its name")
    assert not (tmp_path / "out").exists()


def test_terms_and_a_table_of_the_worst_translations(
    commands: Any, model: Path, tmp_path: Path
) -> None:
    def translate(*words: object) -> list[list[str]]:
        result = commands.run("translate", model, *words, *SHORT, "--review", table)
        assert result.code == 0, result.err
        rows = [line.split("\t") for line in table.read_text().splitlines()]
        assert rows[0] == ["line", "quality", "reasons", "source", "output"]
        qualities = [float(row[1]) for row in rows[1:]]
        assert qualities == sorted(qualities)
        return rows[1:]

    table, lines, source = tmp_path / "r.tsv", tmp_path / "a.txt", tmp_path / "a.po"
    lines.write_text("the cat sat\n\nthe dog\n" + "the cat sat. " * 30 + "\n")
    (tmp_path / "terms.tsv").write_text("cat\tdog|cat\n")
    for more in ([], ["--no-split-sentences"]):
        rows = translate("-i", lines, "--glossary", tmp_path / "terms.tsv", *more)
        assert sorted(row[0] for row in rows) == ["1", "3", "4"]
        assert bool(rows[0][4]) != bool(more)  # a long line that is left out is the worst
        for row in rows:
            is_met = "cat" not in row[3] or {"dog", "cat"} & {*row[4].split()}
            assert is_met or not row[4] or "the term cat is not always translated" in row[2]
    source.write_text(PO.replace('UTF-8\\n"', 'UTF-8\\n"\n"Language: de\\n"'))
    output = tmp_path / "b.po"
    rows = translate("-i", source, "-o", output)
    assert any("cut off by the length limit" in row[2] for row in rows)
    assert "quality: " not in output.read_text()
    assert translate("-i", source, "-o", output, "--quality") == rows
    assert output.read_text().count("# quality: ") > 1


def test_a_review_has_what_has_no_translation_and_pieces_that_differ(tmp_path: Path) -> None:
    def output(text: str, log_prob: float = 0.0) -> Generation:
        return Generation(text, [2], log_prob, log_prob, True)

    table = ReviewTable(tmp_path / "r.tsv", [])
    rows = {
        "fine": [output("gut", -0.5)],
        "": [output("")],
        "blank": [output("")],
        "open 5 %s": [output("auf")],
        "One. Two.": [output("Eins."), output("")],
    }
    list(table.remember(iter([[*rows]])))
    for outputs in rows.values():
        table.add(" ".join(one.text for one in outputs).strip(), outputs)
    segments = [
        Segment("kept", 1, "behalten"),
        Segment("blank", 2, is_blank=True),
        Segment("5", 3, result=Result("6", ("5 is missing",), origin="memory")),
        Segment("a", 4, result=Result("b", origin="memory")),
    ]
    document: Any = SimpleNamespace(segments=segments)
    table.add_document(document, "a.po")
    table.write()
    found = [line.split("\t")[:3] for line in (tmp_path / "r.tsv").read_text().splitlines()[1:]]
    assert found[:3] == [
        ["a.po:3", "", "5 is missing"],
        ["3", "0.0", "it has no translation"],
        ["a.po:2", "0.0", "it has no translation"],
    ]
    assert [row[0] for row in found[3:]] == ["1", "4", "5"]
    assert "%s" in found[4][2]
    assert found[5][1:] == ["75.0", "parts without a translation: 1"]
    assert output("").quality == 0


def test_a_closed_pipe_is_no_error_for_a_document_larger_than_a_buffer(
    commands: Any, model: Path, tmp_path: Path
) -> None:
    html = f"<p>cat</p><!--{'x' * 2_000_000}-->"
    (tmp_path / "a.html").write_text(html, encoding="utf-8")
    words = ("translate", model, "-i", tmp_path / "a.html", *SHORT)
    ended = commands.run(*words, stdout=GONE)
    assert ended.code == 0
    assert "Broken pipe" not in ended.err
    full = commands.run(*words, stdout="/dev/full")
    assert_refused(full, "cannot write to stdout: No space left")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-i", "a.srt", "--json"), "--json is for lines of text, not for documents"),
        (("-i", "a.srt", "--scores"), "--scores is for lines of text"),
        (("-i", "a.srt", "--num-return", 2, "--temperature", 1), "--num-return is for lines"),
        (("-i", "a.srt", "--alignments", "x"), "--alignments is for lines"),
        (("-i", "a.srt", "-o", "b.vtt"), "a translated .srt file is .srt again"),
        (("-i", "a.srt", "-o", "b.srt/c.srt"), "cannot write"),
        (("-i", "none.po"), "none.po: No such file"),
        (("-i", "broken.xlf", "-o", "b.xlf"), "broken.xlf, line 1, column"),
        (("-i", "a.srt", "--only-empty", "--overwrite-targets"), "not both"),
        (("-i", "a.srt", "--memory", "none.tmx"), "none.tmx"),
        (("-i", "a.srt", "--memory", "broken.xlf"), "broken.xlf, line 1, column"),
        (("text", "-i", "a.srt"), "give texts or --input, not both"),
        (("text", "--memory", "a.tmx"), "--memory is for documents"),
        (("text", "--only-empty"), "--only-empty is for documents"),
        (("text", "--quality"), "for lines there is --review"),
        (("-i", "a.srt", "--review", "a.srt"), "--review a.srt is the input or the output"),
        (("-i", "lines", "--alignments", "lines"), "lines is read and cannot be written too"),
        (("text", "--alignments", "x", "-o", "x"), "--alignments and --output are both x"),
        (("text", "--alignments", "x", "--review", "x"), "--review and --alignments are both x"),
        (("text", "--glossary", "a.tsv", "-o", "a.tsv"), "a.tsv is read and cannot be written"),
        (("-i", "a.srt", "--memory", "a.tsv", "--review", "a.tsv"), "a.tsv is read and cannot be"),
        (("text", "--glossary", "a.tsv", "--review", "a.tsv"), "a.tsv is read and cannot be"),
        (("text", "--glossary", "none.tsv"), "cannot read none.tsv"),
        (("text", "--glossary", "a.srt"), "a.srt, line 1: a glossary has 2 columns"),
    ],
)
def test_wrong_uses_are_one_line(
    commands: Any,
    model: Path,
    tmp_path: Path,
    words: tuple[object, ...],
    problem: str,
) -> None:
    (tmp_path / "a.srt").write_text(SRT)
    (tmp_path / "lines").write_text("cat\n")
    (tmp_path / "a.tsv").write_text("cat\tKatze\n")
    (tmp_path / "b.srt").write_text("no folder")
    (tmp_path / "broken.xlf").write_text("<xliff>")
    before = tree(tmp_path)
    outcome = commands.run("translate", model, *words, cwd=tmp_path)
    assert_refused(outcome, problem)
    assert tree(tmp_path) == before


def test_a_review_replaces_no_file_of_the_model(commands: Any, model: Path) -> None:
    before = tree(model)
    outcome = commands.run("translate", model, "cat", "--review", model / "config.json")
    assert_refused(outcome, f"is inside {model}, which is read; give another --review")
    assert tree(model) == before
