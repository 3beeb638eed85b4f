"""The checks of `make docs`: translations, other hosts, and the table of formulas."""

import ast
import importlib
import re
import runpy
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from babel.messages.catalog import Catalog
from babel.messages.pofile import write_po
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.directives.code import LiteralIncludeReader
from sphinx.errors import ExtensionError
from sphinx.search import IndexBuilder

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = {"Attention": "注意力", "A changed paragraph.": "改过的段落。"}


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(DOCS / name))


def write_catalog(path: Path, messages: Mapping[str, str], fuzzy: str = "") -> None:
    catalog = Catalog(locale="zh_CN", fuzzy=False)
    for text, translation in messages.items():
        catalog.add(text, translation, flags=["fuzzy"] if text == fuzzy else [])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write_po(file, catalog)


def problems(folder: Path, translations: Mapping[str, str], fuzzy: str = "") -> list[str]:
    """The problems of a page with the paragraphs of PAGE and these translations."""
    write_catalog(folder / "templates/handbook/page.pot", dict.fromkeys(PAGE, ""))
    write_catalog(folder / "templates/cli.pot", {"Not translated": ""})
    write_catalog(folder / "catalogues/handbook/page.po", translations, fuzzy)
    check = script("make_site.py")["translation_problems"]
    result: list[str] = check(folder / "templates", folder / "catalogues", ["cli"])
    return result


def test_translated_pages_have_no_problems(tmp_path: Path) -> None:
    assert problems(tmp_path, PAGE) == []


@pytest.mark.parametrize(
    ("translations", "fuzzy", "expected"),
    [
        ({"Attention": "注意力"}, "", ["handbook/page: not translated: A changed paragraph."]),
        ({**PAGE, "Attention": ""}, "", ["handbook/page: not translated: Attention"]),
        (PAGE, "Attention", ["handbook/page: fuzzy: Attention"]),
        (
            {**PAGE, "An old paragraph.": "旧"},
            "",
            ["handbook/page: not on the page: An old paragraph."],
        ),
    ],
)
def test_a_changed_paragraph_without_its_translation_is_a_problem(
    tmp_path: Path, translations: dict[str, str], fuzzy: str, expected: list[str]
) -> None:
    assert problems(tmp_path, translations, fuzzy) == expected


def test_a_page_without_a_catalogue_is_a_problem(tmp_path: Path) -> None:
    problems(tmp_path, PAGE)
    (tmp_path / "catalogues/handbook/page.po").unlink()
    check = script("make_site.py")["translation_problems"]
    assert check(tmp_path / "templates", tmp_path / "catalogues", ["cli"]) == [
        "handbook/page: has no catalogue page.po"
    ]


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example.org/x.js"></script>',
        "<img alt='' src='//example.org/x.png'>",
        '<link rel="stylesheet" type="text/css" href="https://example.org/x.css" />',
        "@import url(https://example.org/x.css);",
        "p { background: url('https://example.org/x.png') }",
    ],
)
def test_a_page_that_loads_from_another_host_is_found(tmp_path: Path, text: str) -> None:
    check = script("make_site.py")["loads_from_other_hosts"]
    local = '<script src="_static/x.js"></script><a href="https://arxiv.org">paper</a>'
    (tmp_path / "page.html").write_text(local, encoding="utf-8")
    assert list(check(tmp_path)) == []
    (tmp_path / "page.html").write_text(local + text, encoding="utf-8")
    assert [line.split(" loads")[0] for line in check(tmp_path)] == ["page.html"]


def test_a_page_without_a_picture_of_its_cell_is_found(tmp_path: Path) -> None:
    check = script("make_site.py")["missing_pictures"]
    source, page = tmp_path / "docs" / "a" / "b.md", tmp_path / "site" / "a" / "b.html"
    for path in (source, page):
        path.parent.mkdir(parents=True)
    source.write_text("```{code-cell}\nx.plot()\n```\n\n```{code-cell}\ny; plt.show()\n```\n")
    page.write_text('<img src="../_images/x.png"><img alt="y" src="../_images/y.png">')
    assert list(check(tmp_path / "docs", tmp_path / "site")) == []
    page.write_text('<img src="../_images/x.png">')
    [line] = check(tmp_path / "docs", tmp_path / "site")
    assert line == "a/b.html has 1 pictures of 2 cells"


def test_every_formula_has_a_line_of_code_and_a_test() -> None:
    """`render` looks up the line and the test of each row, and each formula of the handbook."""
    formulas = script("make_formulas.py")
    page = formulas["render"]()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(formulas["rows"]()) > 50
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_a_formula_whose_code_is_missing_is_an_error() -> None:
    number = script("make_formulas.py")["_number"]
    with pytest.raises(SystemExit, match="has no line with: no such line"):
        number(DOCS / "make_formulas.py", "no such " + "line")


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (r"\operatorname{softmax}(x)", '<mo lspace="0" rspace="0">softmax</mo>'),
        (r"\operatorname{norm}\left(x\right)", '<mo lspace="0" rspace="0">norm</mo>'),
        (r"m \cos x", '<mo lspace="0.17em" rspace="0.17em">cos</mo>'),
        (r"\sum_j \log p_j", '<mo lspace="0.17em" rspace="0.17em">log</mo>'),
    ],
)
def test_names_of_functions_are_spaced(formula: str, expected: str) -> None:
    """latex2mathml makes operators of some and identifiers of others: with a gap, or without."""
    space = script("_ext/mathml.py")["_space_names"]
    assert expected in space(convert(formula))


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        (r"\begin{pmatrix} a & b \end{pmatrix}_{i}", "4 children of one msub"),
        (r"\frac{a}{b}", ""),
        (r"\unknown_{", "cannot convert"),
    ],
)
def test_markup_that_browsers_cannot_draw_stops_the_build(formula: str, problem: str) -> None:
    convert_node = script("_ext/mathml.py")["_markup"]
    if not problem:
        assert "<mfrac>" in convert_node(nodes.math(formula, formula), "block")
        return
    with pytest.raises(ExtensionError, match=problem):
        convert_node(nodes.math(formula, formula), "block")


def test_chinese_pages_are_found_by_pairs_of_characters() -> None:
    pairs = script("_ext/chinese_search.py")["SearchPairs"]({})
    terms = pairs.split("多头注意力：GPT-2 的 KV 缓存")
    assert terms[:8] == [*"多头注意力", "多头", "头注", "注意"]
    assert terms[8:] == ["意力", "GPT", "2", "的", "KV", "缓", "存", "缓存"]
    assert [term for term in terms if not pairs.word_filter(term)] == ["2"]
    # The browser runs this script up to the first name that is not defined.
    stemmer = IndexBuilder.get_js_stemmer_code(SimpleNamespace(lang=pairs))
    name = re.search(r"window\.Stemmer = (\w+);", stemmer)
    assert name is not None
    assert f"var {name[1]}=" in stemmer


def fences(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The kind and the lines of each block of code of a page."""
    for kind, text in re.findall(
        r"^ *```(\S+.*)\n((?:.*\n)*?) *```$", page.read_text("utf-8"), re.M
    ):
        yield kind, text.splitlines()


def test_lines_of_code_fit_the_column() -> None:
    """Of pages that people write; `site.css` has the width."""
    pages = [page for page in DOCS.glob("*.md") if page.stem != "log"]
    pages += [
        page for name in ("handbook", "tutorials", "guides") for page in DOCS.glob(f"{name}/*.md")
    ]
    blocks = [
        (page.name, lines) for page in pages for kind, lines in fences(page) if "math" not in kind
    ]
    assert len(blocks) > 200
    assert not [(name, line) for name, lines in blocks for line in lines if len(line) > 100]


def labels_of(source: str) -> Iterator[str]:
    """Texts that a cell writes into its plots, with `{}` for each value."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    for call in calls:
        texts = [word.value for word in call.keywords if word.arg in ("label", "xlabel", "ylabel")]
        if getattr(call.func, "attr", "") in ("xlabel", "ylabel", "set_ylabel", "title"):
            texts += call.args[:1]
        if getattr(call.func, "attr", "") == "set":
            texts += [word.value for word in call.keywords if word.arg == "title"]
        for text in texts:
            if isinstance(text, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in text.values]
                yield "".join(part if isinstance(part, str) else "{}" for part in parts)
            elif isinstance(text, ast.Constant):
                yield text.value


def test_labels_of_plots_are_translated() -> None:
    plots = script("_ext/plots.py")
    labels = plots["read_labels"](DOCS / "locale" / "zh_CN" / "plots.po")
    cells = [
        "\n".join(line for line in lines if not line.startswith((":", "%")))
        for page in DOCS.rglob("*.md")
        for kind, lines in fences(page)
        if kind.startswith("{code-cell}") and "%%" not in lines[0]
    ]
    used = {label for cell in cells for label in labels_of(cell)} - {"z"}
    assert len(used) > 30
    assert used <= labels.keys()
    title = plots["translated"]("cross attention, layer 1, head 2", labels)
    assert title == "交叉注意力，第 1 层，第 2 个头"
    assert plots["translated"]("head 2", labels) == "第 2 个头"
    assert plots["translated"]("▁cat", labels) == "▁cat"


def test_words_of_diagrams_fit_and_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wide font; on a telephone a diagram is about as wide as its numbers say."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    drawings = importlib.import_module("diagrams").DRAWINGS
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 100)
    for name, draw in drawings.items():
        for language in ("en", "zh_CN"):
            for text, size, room in (canvas := draw(language)).words:
                narrow = "".join(sign for sign in text if sign < "\u2e80")
                width = (font.getlength(narrow) / 100 + len(text) - len(narrow)) * size
                assert size >= 11
                assert width <= room <= 350, f"{name}: {text} {width}"
                words = set(re.findall("[A-Za-z]{3,}", text)) - {"softmax", "logits", "ALiBi"}
                assert language == "en" or not words, f"{name}: {text}"
            assert ElementTree.fromstring(canvas.render()).get("aria-label")
    pages = "".join(page.read_text("utf-8") for page in DOCS.glob("handbook/*.md"))
    assert set(re.findall(r"```\{diagram\} (\w+)\n", pages)) == drawings.keys()


def test_pages_in_english_only_exist() -> None:
    names = script("conf.py")["ENGLISH_ONLY"]
    made = {"reference/registries", "reference/architectures", "handbook/formulas"}
    made.add("reference/api/*")
    missing = [name for name in names if name not in made and not list(DOCS.glob(f"{name}.md"))]
    assert not missing


def test_excerpts_of_code_are_whole_statements() -> None:
    """Chosen by names or words, which `make docs` looks for; line numbers would move unnoticed."""
    found = 0
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name, lines in re.findall(r"```\{literalinclude\} (\S+)\n((?::.*\n)*)", text):
            options: Any = dict(re.findall(r":([\w-]+): *(.*)\n", lines))
            assert "lines" not in options, f"{page.name}: {name}"
            if options.get("language") == "python":
                options["dedent"] = int(options.get("dedent", 0))
                reader = LiteralIncludeReader(
                    str(page.parent / name), options, SimpleNamespace(source_encoding="utf-8")
                )
                assert ast.parse(textwrap.dedent(reader.read()[0])).body, f"{page.name}: {name}"
                found += 1
    assert found
