"""Marks, code and links of Markdown mean the same around a translation."""

import re
from random import Random

import pytest
from markdown_it import MarkdownIt

from document_samples import as_text, translated
from heedful.data.inline import InlinePiece
from heedful.documents.emphasis import with_emphasis
from heedful.documents.markdown import MarkdownDocument


def rendered(text: str) -> str:
    """The page of Markdown in one line, without line breaks between elements."""
    return MarkdownIt("commonmark").enable("table").render(text).strip().replace("\n", " ")


def german(text: str) -> str:
    """A translation of the same length, in the same order."""
    words = r"(?<![<\w/])[a-z]+(?![>\w])"
    return re.sub(words, lambda match: "x" * len(match[0]), text)


def pairs_of(text: str) -> list[str]:
    """The texts that a model reads, with the tags of codes."""
    return [segment.text for segment in MarkdownDocument(text.encode(), "a.md").segments]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("see ***both words*** here", "see <g1>both words</g1> here"),
        ("see _**both words**_ here", "see <g1><g2>both words</g2></g1> here"),
        ("see **_both_ words** here", "see <g1><g2>both</g2> words</g1> here"),
        ("see **both *words*** here", "see <g1>both <g2>words</g2></g1> here"),
        ("see ***both* words** here", "see <g1><g2>both</g2> words</g1> here"),
        ("see ***both** words* here", "see <g1><g2>both</g2> words</g1> here"),
        ("an *a **b** c", "an *a <g1>b</g1> c"),
    ],
)
def test_marks_beside_marks_are_pairs(source: str, expected: str) -> None:
    assert pairs_of(source) == [expected]
    assert rendered(as_text(translated("a.md", source, german))) == german(rendered(source))


@pytest.mark.parametrize(
    "source",
    [
        "see [`a[0]`](u) here",
        "see [an `a[0]` and ``b`]`` there](u) here",
        "see [`[[Name]]`][ref] here\n\n[ref]: u",
        r"see [an \[index\]](u) here",
        r"see [an index \]](u) here",
    ],
)
def test_brackets_in_a_link_do_not_end_it(source: str) -> None:
    out = as_text(translated("a.md", source, lambda text: text.replace("see", "siehe")))
    assert rendered(out) == rendered(source).replace("see", "siehe")


def test_many_brackets_and_ticks_are_read_in_linear_time() -> None:
    for part in ("[`a", "[ ` ", "[``x` ", r"[\]", "[[a] "):
        assert len(pairs_of(f"see {part * 20_000}")) == 1


@pytest.mark.parametrize(
    ("translation", "expected"),
    [
        ("x打开<g1>文件</g1>菜单", "x打开*文件*菜单"),
        ("x打开 <g1>文件</g1> 菜单", "x打开 _文件_ 菜单"),
        ("x打开<g1>“文件”</g1>菜单", "x打开<em>“文件”</em>菜单"),
        ("<g1>Datei</g1>menü x", "*Datei*menü x"),
        ("Das <g1>Datei</g1>-Menü x", "Das _Datei_-Menü x"),
    ],
)
def test_emphasis_is_read_where_there_are_no_blanks(translation: str, expected: str) -> None:
    document = MarkdownDocument(b"Open the _File_ menu", "a.md", ("en", "zh"))
    [span] = document._spans
    out = document._rendered(span, translation)
    assert out == expected
    assert "<em>" in rendered(out)


def test_marks_that_would_be_one_become_elements() -> None:
    document = MarkdownDocument(b"a *b* and **c** d", "a.md")
    [span] = document._spans
    out = document._rendered(span, "a <g1>b</g1><g2>c</g2> d")
    assert rendered(out) == "<p>a <em>b</em><strong>c</strong> d</p>"


ELEMENTS = {"*": "em", "_": "em", "**": "strong", "__": "strong", "***": "em strong", "~~": "s"}


def nested(random: Random, depth: int) -> list[InlinePiece]:
    """Texts and pairs of marks, with and without blanks and signs between them."""
    pieces: list[InlinePiece] = []
    for _ in range(random.randint(1, 3)):
        if depth and random.random() < 0.5:
            mark = random.choice(list(ELEMENTS))
            inside = nested(random, depth - 1)
            pieces += [InlinePiece("open", mark, mark), *inside, InlinePiece("close", mark, mark)]
        else:
            text = random.choice(["a", "b c", "x,", "d ", " e", "。f", "g。"])
            pieces.append(InlinePiece("text", text))
    return pieces


def elements_of(html: str) -> list[tuple[str, list[str]]]:
    """Each character that is not blank, with the elements around it."""
    found: list[tuple[str, list[str]]] = []
    around: list[str] = []
    for tag, character in re.findall(r"<(/?\w+)>|(\S)", html.replace("del>", "s>")):
        if character:
            found.append((character, sorted(around)))
        elif tag.startswith("/"):
            around.remove(tag[1:])
        else:
            around.append(tag)
    return found


@pytest.mark.parametrize("outer", ["", "*", "**", "_", "__", "***", "~~", "**_"])
def test_emphasis_that_touches_is_read_as_it_was_meant(outer: str) -> None:
    render = MarkdownIt("commonmark").enable("strikethrough").renderInline
    marks = re.findall(r"\*+|_+|~+", outer)
    random = Random(5)
    for _ in range(300):
        pieces = nested(random, 2)
        for index, strip in ((0, str.lstrip), (-1, str.rstrip)) if outer else ():
            pieces[index] = pieces[index]._replace(raw=strip(pieces[index].raw))
        written = outer + "".join(with_emphasis(pieces, outer, outer[::-1])) + outer[::-1]
        meant = "".join(
            f"<{'/' * (piece.kind == 'close')}{name}>" if piece.kind != "text" else name
            for piece in (
                *(InlinePiece("open", mark, mark) for mark in marks),
                *pieces,
                *(InlinePiece("close", mark, mark) for mark in reversed(marks)),
            )
            for name in (
                [piece.raw] if piece.kind == "text" else sorted(ELEMENTS[piece.raw].split())
            )
        )
        assert elements_of(render(written)) == elements_of(meant), written


def test_emphasis_of_many_words_is_that_of_one() -> None:
    """Each pair apart is decided alone, in a time that is linear in their number."""
    mark = "**"
    word = [
        InlinePiece("text", "字"),
        *(InlinePiece("open", mark, mark), InlinePiece("text", "“字”")),
        InlinePiece("close", mark, mark),
    ]
    once = with_emphasis([*word, *word], "", "")
    assert once == ["字", "<strong>", "“字”", "</strong>"] * 2
    assert with_emphasis(word * 3_000, "", "") == once * 1_500


@pytest.mark.parametrize("text", ["a", "“a”"])
def test_emphasis_of_many_words_that_touch_is_read(text: str) -> None:
    touching = [
        piece
        for _ in range(400)
        for piece in (
            InlinePiece("open", "*", "*"),
            InlinePiece("text", text),
            InlinePiece("close", "*", "*"),
        )
    ]
    html = MarkdownIt("commonmark").renderInline("".join(with_emphasis(touching, "", "")))
    assert html == f"<em>{text}</em>" * 400


def first_code(text: str) -> str:
    """A translation that begins with its code or emphasis."""
    [code] = re.findall(r"<g1>.*</g1>|<x1/>", text)
    return f"{code} {text.replace(code, 'und')}"


@pytest.mark.parametrize("source", ["see `code` here", "see *this* here", "see ~~this~~ here"])
def test_a_code_at_the_beginning_is_no_block(source: str) -> None:
    document = MarkdownDocument(source.encode(), "a.md")
    [span] = document._spans
    out = document._rendered(span, first_code(span.segment.text))
    assert "\\" not in out
    assert rendered(out).startswith(("<p><code>code</code>", "<p><em>this</em>", "<p>~~this~~"))


@pytest.mark.parametrize("start", ["- a", "+ a", "# a", "> a", "1. a", "2) a", "--- ", "==="])
def test_a_translation_that_looks_like_a_block_is_a_paragraph(start: str) -> None:
    def translate(_: str) -> str:
        return start

    out = as_text(translated("a.md", "some text", translate))
    assert rendered(out) == f"<p>{start.strip().replace('>', '&gt;')}</p>"


def test_code_behind_a_comma_that_begins_a_text() -> None:
    def translate(text: str) -> str:
        return text.replace("and", "und")

    out = as_text(translated("a.md", "`Len`, `Max`, and all", translate))
    assert out == "`Len`, `Max`, und all"


def test_code_behind_code_outside_of_the_text_has_a_blank() -> None:
    document = MarkdownDocument(b"`Len` or `Max` and `Min`", "a.md")
    [span] = document._spans
    around = document.text[: span.start], document.text[span.end :]
    assert around == ("`Len`", "`Min`")
    assert document._rendered(span, "<x1/> und ") == " `Max` und "
    assert document._rendered(span, " und <x1/>") == " und `Max` "


@pytest.mark.parametrize("end", ["  \n", "\\\n", "   \r\n"])
def test_a_break_at_an_edge_is_none(end: str) -> None:
    document = MarkdownDocument(f"- one line{end}  and more".encode(), "a.md")
    [span] = document._spans
    assert document._rendered(span, "eins<x1/>zwei") == f"eins{end}  zwei"
    for translation in ("eins zwei<x1/>", "eins zwei <x1/>", "<x1/>eins zwei"):
        assert document._rendered(span, translation) == "eins zwei"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("> [!NOTE]\n> useful {}.", ["useful {}."]),
        (">[!caution]  \r\n> take\r\n> [!TIP] {}", ["take [!TIP] {}"]),
        ("- > [!IMPORTANT]\n  >\n  > an {}\n", ["an {}"]),
        ("> [!WARNING]\n> - an {}\n", ["an {}"]),
        ("> [!note]- a *{}*\n> the text", ["a <g1>{}</g1>", "the text"]),
        ("> > [!faq|left]+\n> > {}?", ["{}?"]),
        ('> [!div class="checklist"]\n> * {}', ["{}"]),
        ("the [!INCLUDE [name](a.md)] {}", ["the <x1/> {}"]),
        ("[!code-cs[Main](a.cs#L1)]\n\n{}", ["{}"]),
        ("see [!note](u) {}", ["see <g1>!note</g1> {}"]),
    ],
)
def test_alerts_and_callouts_stay_ones(source: str, texts: list[str]) -> None:
    """Their first line was escaped and joined with the text: they became ordinary quotes."""
    source = source.format("Word")
    assert pairs_of(source) == [text.format("Word") for text in texts]
    out = as_text(translated("a.md", source, lambda text: text.replace("Word", "Wort")))
    joined = source.replace("take\r\n> [!TIP]", "take \\[!TIP\\]")
    assert out == joined.replace("Word", "Wort")


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("## a word {#install}", ["a word"]),
        ("# a word{#install .big} #", ["a word"]),
        ("## a word ## {: #install }", ["a word"]),
        ("a word {#a-b key='v w'}\n===", ["a word"]),
        ("# a word {-}", ["a word"]),
        ("# a word { - } #", ["a word"]),
        ("## [a word]{#install}", ["a word"]),
        ("see [a word](u){target=_blank} now", ["see <g1>a word</g1> now"]),
        ("see [a word][r]{: .x}{:.y} now\n\n[r]: u", ["see <g1>a word</g1> now"]),
        ("see [a word]{.x} now", ["see <g1>a word</g1> now"]),
        ("a word ![a](u.png){ width=50% } now", ["a word <x1/> now"]),
        ("a word `<b>`{=html} now", ["a word <x1/> now"]),
        ("see **a word**{.red} and *more*{a=1}.", ["see <g1>a word</g1> and <g2>more</g2>."]),
        ("see ***a** word*{.red} now", ["see <g1><g2>a</g2> word</g1> now"]),
        ("a word.\n{: .note}", ["a word."]),
        ("> {: .note}\n> a word\n> {#a .b}\n", ["a word"]),
        ("- {:.x} a word\n{: .y}", ["a word"]),
        ("$$x$$ {#eq-x}\n\n: a word {#tbl-x}", ["a word"]),
        ("| a {: .x} | `b`{.y} word |\n|-|-|\n{: .z}\n", ["a", " word"]),
    ],
)
def test_attributes_are_no_words(source: str, texts: list[str]) -> None:
    """Anchors and classes were translated, escaped, or joined with the text before."""
    assert pairs_of(source) == texts
    out = as_text(translated("a.md", source, lambda text: text.replace("word", "_word")))
    assert out == source.replace("word", "\\_word")


@pytest.mark.parametrize(
    "text",
    [
        *("copy {name} to {0}", "a {count, plural, one {file} other {files}}", "copy to {:s}"),
        *("{:d} files", "the {.note} and {#note} here", "a ${key=value}", "the {#if x}{/if}"),
        *("a word{key=value}", "{{.Title}} of {{ name }}", "{# a comment #} here", "{...all} b"),
    ],
)
def test_other_braces_are_words(text: str) -> None:
    assert pairs_of(f"{text}\n") == [text]


def test_attributes_stay_behind_their_emphasis() -> None:
    document = MarkdownDocument(b"see _a word_{.x} now", "a.md")
    [span] = document._spans
    assert document._rendered(span, "x打开<g1>文件</g1>菜单") == "x打开*文件*{.x}菜单"
    assert document._rendered(span, "<g1>文件</g1> x") == "_文件_{.x} x"


@pytest.mark.parametrize(
    ("source", "texts", "num_labels"),
    [
        ("see [[a word]] and [[c_word#h]].", ["see <x1/> and <x2/>."], 0),
        ("see [[a/b.md|a word]] now", ["see <x1/> now"], 1),
        ("![[a word.png]]\n\n![[a word.png|300]] now", [" now"], 1),
        ("see [[1]](u) and [[a word]][r]\n\n[r]: u", ["see <g1>[1]</g1> and <g2>[a word]</g2>"], 0),
    ],
)
def test_links_of_wikis_are_kept(source: str, texts: list[str], num_labels: int) -> None:
    """Their brackets were escaped, and the names of pages translated."""
    document = MarkdownDocument(source.encode(), "a.md")
    assert [segment.text for segment in document.segments] == texts
    assert document.skipped.get("labels of links between pages of a wiki", 0) == num_labels
    out = as_text(translated("a.md", source, lambda text: text.replace("see", "_see")))
    assert rendered(out) == rendered(source).replace("see", "_see")


@pytest.mark.parametrize("line", ["[TOC]", "[[_TOC_]]", "[[toc]]", "(the-place)="])
def test_places_and_tables_of_contents_are_kept(line: str) -> None:
    """They were text, whose brackets were escaped; links to the place no longer led to it."""
    source = f"{line}\n# the word\n\nthe word\n{line}\n"
    assert pairs_of(source) == ["the word"] * 2
    assert as_text(translated("a.md", source, str.upper)) == source.replace("the word", "THE WORD")


@pytest.mark.parametrize("cell", ["the word", "`a` the word", "**the word**", "the word {.x}"])
def test_bars_in_a_cell_are_escaped(cell: str) -> None:
    """They made a further cell if the cell began with a code or was emphasized."""
    source = f"| {cell} | b |\n|-|-|\n"
    out = as_text(translated("a.md", source, lambda text: text.replace("word", "a|b")))
    assert out == source.replace("word", r"a\|b")


@pytest.mark.parametrize(
    "source",
    [
        "!!! note\n\n    {}\n\n    - {}\n    - {}\n\n{}",
        '??? tip "A title"\n    {}:\n    ```bash\n    the  code\n    ```\n    1. {}\n',
        '=== "a"\n\n    {}\n\n=== "b"\n\n    !!! note\n        {}\n\n        | {} |\n        |-|\n',
        "{}[^1]\n\n[^1]: {}\n\n    {}\n\n    {}\n\n{}",
        "{}\n\n:   {}\n\n    {}\n\n        the code\n",
        "- {}\n\n    !!! note\n\n        {}\n\n    {}\n",
        "!!! note\n\t{}\n\n\t{}\r\n\r\n\t\tthe code\n",
        "```\n!!! note\n\n    the code\n```\n\n    the code\n\n{}",
        "{{{{< code go >}}}}\n[the code]\n\nx\n{{{{< /code >}}}}\n{}\n\n{{{{< code >}}}}\n{}",
    ],
)
def test_indented_blocks_of_extensions_are_markdown(source: str) -> None:
    """Their lists and code became one line, or they were left out."""
    texts = [f"the word{number}" for number in range(source.count("{}"))]
    page = source.format(*texts)
    read = [re.sub(r"<x1/>|^[: ]+|:$", "", text) for text in pairs_of(page)]
    assert read == texts
    out = as_text(translated("a.md", page, lambda text: text.replace("the word", "das Wort")))
    assert out == page.replace("the word", "das Wort")


def test_indented_blocks_are_read_to_a_limit() -> None:
    heads = "".join(f"{'    ' * depth}!!! note\n" for depth in range(400))
    page = f"{heads}{'    ' * 400}the word"
    assert as_text(translated("a.md", page, str.upper)) == page.replace("the word", "THE WORD")


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('+++\ntitle = "the word"\n[params]\n+++\n\nthe word\n', ["the word"]),
        ('the word {{< ref "a_*b*.md" >}} now', ["the word <x1/> now"]),
        ('the word {{% ref "[a](b)" %}} now', ["the word <x1/> now"]),
        ('the word {{ site.data["x"] }} now', ["the word <x1/> now"]),
        ('{{< img\n  src="a_*b*.md"\n  alt="the"\n>}}\n\nthe word', ["the word"]),
        (r"the word \(x_1\) now", ["the word <x1/> now"]),
        ("\\[\n\\sum_a^b \\hat{the}\n\\]\n\nthe word", ["the word"]),
        ("the word {/* the *note* */} now", ["the word <x1/> now"]),
        ("*[HTML]: the word\n\nthe word", ["the word"]),
        ("import Tabs from '@theme/Tabs';\n\nthe word", ["the word"]),
        ("import {a, b} from 'the'\nimport 'the.css';\n\nthe word", ["the word"]),
        ("export const the = 1;\n\nexport default function App() {\n\nthe word", ["the word"]),
    ],
)
def test_templates_and_code_between_texts_are_kept(source: str, texts: list[str]) -> None:
    """Their signs were escaped, or they were translated."""
    assert pairs_of(source) == texts
    out = as_text(translated("a.md", source, lambda text: text.replace("word", "_word")))
    kept, found, text = source.rpartition("the word")
    assert out == kept + found.replace("word", "\\_word") + text


@pytest.mark.parametrize(
    "text",
    ["import the file from the menu", "export the file", "export const values", "the {{ a }}"],
)
def test_texts_like_code_are_translated(text: str) -> None:
    assert pairs_of(f"{text}\n") == [text]


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("see ![a b] and ![c][] here\n\n[a b]: u\n[c]: u", ["see <x1/> and <x2/> here"]),
        ("see [![a b]][c] here\n\n[a b]: u\n[c]: u", ["see <g1><x2/></g1> here"]),
        ("see ![none] here", ["see ![none] here"]),
        ("see [some text]\n[a b] here\n\n[a b]: u", ["see <g1>some text</g1> here"]),
        ("> see [some `x`]\r\n> [a b] here\n\n[a b]: u", ["see <g1>some <x2/></g1> here"]),
        ("see [a b] [c] here\n\n[a b]: u\n[c]: u", ["see <g1>a b</g1> <g2>c</g2> here"]),
        ("see [some text] [none] here", ["see [some text] [none] here"]),
        (r"see \[none\] and \(this\) here", ["see [none] and (this) here"]),
        (":tada: see :x-y-24:{.a} here :+1:", [" see <x1/> here "]),
        (
            "see a:b:c, 10:30:45, :: and http://a:80 here",
            ["see a:b:c, 10:30:45, :: and <x1/> here"],
        ),
    ],
)
def test_labels_of_images_and_of_texts_before_them(source: str, texts: list[str]) -> None:
    """Images became links, texts with a label on the next line were escaped, and codes of emoji
    were words."""
    assert pairs_of(source) == texts
    out = as_text(translated("a.md", source, lambda text: text.replace("see", "now see")))
    is_escaped = "none" in source
    assert ("\\[" in out) is is_escaped
    for kept in ("![", "]\n[a b]", "]\r\n> [a b]", ":x-y-24:{.a}"):
        assert (kept in out.replace("\\", "")) is (kept in source)
