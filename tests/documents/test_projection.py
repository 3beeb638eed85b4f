"""Tags put into translations by alignments of words: exact places, and all tags in any case."""

import io
import os
import re
import sys
from collections.abc import Callable

import docx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend_models import model_of
from document_samples import DOCX_RUNS, HTML, MARKDOWN, SRT, TMX, XLIFF, make_docx, translated
from heedful.data.inline import TAG, InlinePiece, TaggedText, split_at_tags, tagged
from heedful.documents import Segment, read_document, translate_document
from heedful.documents.parts import Part, Placed
from heedful.documents.projection import with_tags
from heedful.documents.removed_tags import without_tags
from heedful.documents.translating import fits_model
from heedful.documents.word_links import TokenAlignment, link_words
from heedful.errors import UserError
from heedful.pipelines import Translator

CASES = int(os.environ.get("HEEDFUL_FUZZ", "60"))


def codes_of(text: str) -> TaggedText:
    """A text with tags such as `<g1>` and `<x2/>`; pairs may cross."""
    kinds = {"<g": "open", "</": "close", "<x": "alone"}
    pieces = [
        InlinePiece(kinds[part[:2]] if TAG.fullmatch(part) else "text", part, part.strip("</>"))  # type: ignore[arg-type]
        for part in split_at_tags(text)
    ]
    return TaggedText(text, {piece.raw: piece for piece in pieces if piece.kind != "text"})


def alignment_of(source: str, target: str, links: str, unit: str = r"\S+") -> TokenAlignment:
    """Tokens are words, and `0-2` links the first of the text with the third one."""
    sides = [[match.span() for match in re.finditer(unit, text)] for text in (source, target)]
    weights = np.full((len(sides[1]), len(sides[0])), 0.01)
    for link in links.split():
        own, other = map(int, link.split("-"))
        weights[other, own] += 0.5
    return TokenAlignment(*sides, weights)


def placed(text: str, target: str, links: str, unit: str = r"\S+") -> Placed:
    """The translation of a text of one sentence with tags."""
    codes = codes_of(text)
    source = without_tags(codes)
    core = source.text.strip()
    before, after = (Part(blank, blank) for blank in source.text.split(core))
    part = Part(core, target, alignment_of(core, target, links, unit))
    found = with_tags(codes, source, [before, part, after])
    assert Segment(text, 1, codes=codes).tag_problem(found.text) is None
    return found


@pytest.mark.parametrize(
    ("text", "target", "links", "expected"),
    [
        # A pair goes with its words, in another order, and around several of them.
        (
            "Click <g1>here</g1> now",
            "Jetzt hier klicken",
            "2-0 1-1 0-2",
            "Jetzt <g1>hier</g1> klicken",
        ),
        ("a <g1>b c</g1> d", "D B C A", "3-0 1-1 2-2 0-3", "D <g1>B C</g1> A"),
        ("a <g1>b</g1>", "B1 B2 A", "1-0 1-1 0-2", "<g1>B1 B2</g1> A"),
        # A word between two of them that is nobody's is inside; of two runs the heavier one counts.
        ("a <g1>b c</g1> d", "B A C D", "1-0 0-1 2-2 3-3", "<g1>B A C</g1> D"),
        ("<g1>a b</g1> c d", "A C D B1 B2", "0-0 2-1 3-2 1-3 1-4", "A C D <g1>B1 B2</g1>"),
        # Marks are inside if they are in the text, whatever the model attends to.
        ("a <g1>b</g1>, c.", "B, A C.", "0-1 1-0 2-2", "<g1>B</g1>, A C."),
        ("<g1>see b.</g1> c", "Siehe B. C", "0-0 1-1 2-2", "<g1>Siehe B.</g1> C"),
        ("a <g1>→</g1> b", "A → B", "0-0 1-1 2-2", "A <g1>→</g1> B"),
        # Pairs beside each other and in each other.
        ("<g1>a</g1> <g2>b</g2>", "B A", "1-0 0-1", "<g2>B</g2> <g1>A</g1>"),
        ("<g1>a</g1><g2>b</g2> c", "AB C", "0-0 1-1", "<g1>AB</g1><g2></g2> C"),
        ("x <g1>a <g2>b</g2></g1>", "B A X", "2-0 1-1 0-2", "<g1><g2>B</g2> A</g1> X"),
        ("x <g1><g2>a b</g2></g1>", "A B X", "1-0 2-1 0-2", "<g1><g2>A B</g2></g1> X"),
        ("x <g1><g2>a</g2> b</g1> c", "C B A X", "3-0 2-1 1-2 0-3", "C <g1>B <g2>A</g2></g1> X"),
        # A pair inside of another stays there, though its word is elsewhere.
        (
            "x y <g1>a b <g2>c</g2></g1>",
            "C X Y A B",
            "4-0 0-1 1-2 2-3 3-4",
            "C X Y <g1><g2>A</g2> B</g1>",
        ),
        # Pairs of TMX that cross may cross in the translation.
        ("<g1>a <g2>b</g1> c</g2>", "A B C", "0-0 1-1 2-2", "<g1>A <g2>B</g1> C</g2>"),
        ("<g1>a <g2>b</g1> c</g2> d", "D C B A", "3-0 2-1 1-2 0-3", "D <g2>C <g1>B</g2> A</g1>"),
        # A single tag is behind the word that is aligned with the one before it.
        ("a b<x1/> c", "B A C", "1-0 0-1 2-2", "B<x1/> A C"),
        ("a b.<x1/> c", "B. A C", "1-0 0-1 2-2", "B.<x1/> A C"),
        ("a <x1/> b", "B A", "1-0 0-1", "B A <x1/>"),
        ("a <x1/>, b", "B A", "1-0 0-1", "B A <x1/>"),
        ("a <x1/>b c", "B A C", "1-0 0-1 2-2", "B A <x1/>C"),
        ("a<x1/>b", "B A", "1-0 0-1", "B A<x1/>"),
        ("a.<x1/>b c", "A. B C", "0-0 1-1 2-2", "A.<x1/>B C"),
        ("<x1/>a b", "B A", "1-0 0-1", "<x1/>B A"),
        ("a b <x1/>", "B A", "1-0 0-1", "B A <x1/>"),
        ("a<x1/><x2/> b<x3/>", "B A", "1-0 0-1", "B A<x1/><x2/><x3/>"),
        ("<g1>a <x2/></g1> b", "B A", "1-0 0-1", "B <g1>A <x2/></g1>"),
        ("<g1>a</g1><x2/> b", "B A", "1-0 0-1", "B <g1>A</g1><x2/>"),
        ("b <g1><x2/> a</g1>", "B A", "0-0 1-1", "B <g1><x2/> A</g1>"),
        # A pair without a word is as a single tag, with what is in it.
        ("a <g1><x2/></g1> b c", "B A C", "1-0 0-1 2-2", "B A <g1><x2/></g1> C"),
        ("a<g1></g1> b c", "B A C", "1-0 0-1 2-2", "B A<g1></g1> C"),
        # Blanks inside of a pair stay there.
        ("a <g1>b </g1>c", "B A C", "1-0 0-1 2-2", "<g1>B </g1>A C"),
        ("a<g1> b</g1> c", "C B A", "2-0 1-1 0-2", "C<g1> B</g1> A"),
        ("a <g1> b </g1> c", "C B A", "2-0 1-1 0-2", "C <g1> B </g1> A"),
        # Placeholders are never cut.
        ("b <g1>%s</g1> c", "%s B C", "1-0 0-1 2-2", "<g1>%s</g1> B C"),
    ],
)
def test_tags_go_with_their_words(text: str, target: str, links: str, expected: str) -> None:
    assert placed(text, target, links).text == expected


def test_words_that_were_left_out_ask_for_a_review() -> None:
    found = placed("the <g1>very  big</g1> cat", "die Katze", "0-0 3-1")
    assert found == Placed("<g1>die</g1> Katze", ("very big",))


def test_parts_of_a_word_that_is_copied() -> None:
    """All of it was between the tags."""
    found = placed("pure H<g1>2</g1>O is", "ist H2O rein", "2-0 1-1 0-2")
    assert found == Placed("ist H<g1>2</g1>O rein")
    assert placed("H<g1>2</g1>O and H<g2>2</g2>O", "H2O und H2O", "0-0 1-1 2-2").text == (
        "H<g1>2</g1>O und H<g2>2</g2>O"
    )

    assert placed("a style<g1>1</g1> b", "B Vorlage1 A", "2-0 1-1 0-2").text == (
        "B Vorlage<g1>1</g1> A"
    )


@pytest.mark.parametrize(
    ("text", "bare", "with_words"),
    [
        ("Click <x1/> now", "Click now", "Click <x1/> now"),
        ("<g1>Click <x2/></g1>, (<x3/>)", "Click, ()", "Click <x2/>, (<x3/>)"),
        ("a <g1><x2/></g1> b", "a b", "a <x2/> b"),
        # A note, a break, and tags beside each other are no words.
        ("word<x1/> a.<x2/>B", "word a. B", "word a. B"),
        ("a <x1/><x2/> b", "a b", "a b"),
    ],
)
def test_single_tags_may_be_words(text: str, bare: str, with_words: str) -> None:
    """A model with masks copies them, and translates a text without a word for code worse."""
    codes = codes_of(text)
    assert without_tags(codes).text == bare
    assert without_tags(codes, keeps_words=True).text == with_words


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        (
            "Press <g1>Ctrl</g1>+<g2>Shift</g2>+<g3>Del</g3>",
            "Drücke Strg+Umschalt+Entf",
            "Drücke <g1>Strg</g1>+<g2>Umschalt</g2>+<g3>Entf</g3>",
        ),
        ("Press <g1>Ctrl</g1>+C", "Drücke Strg+C", "Drücke <g1>Strg</g1>+C"),
        ("the <g1>time</g1>-bound", "die zeit-gebundene", "die <g1>zeit</g1>-gebundene"),
        # In one word there are no parts.
        ("the <g1>time</g1>-bound", "das zeitgebundene", "das <g1>zeitgebundene</g1>"),
    ],
)
def test_parts_of_a_word_with_the_same_marks(text: str, target: str, expected: str) -> None:
    assert placed(text, target, "0-0 1-1").text == expected


@pytest.mark.parametrize(
    ("text", "target", "links", "expected"),
    [
        ("<g1>a:</g1> b", "A : B", "0-0 1-2", "<g1>A :</g1> B"),
        (
            "say <g1>“a!”</g1>",
            "dit «\u00a0A\u00a0!\u00a0»",
            "1-2",
            "dit <g1>«\u00a0A\u00a0!\u00a0»</g1>",
        ),
        ("<g1>a ?</g1> b", "A ? B", "0-0 2-2", "<g1>A ?</g1> B"),
        ("<g1>🚨 a</g1> b", "🚨 A B", "1-1 2-2", "<g1>🚨 A</g1> B"),
        ("<g1>a.</g1> b", "A … B", "0-0 1-2", "<g1>A</g1> … B"),
        ("<g1>a</g1>: b", "A : B", "0-0 1-2", "<g1>A</g1> : B"),
    ],
)
def test_marks_behind_a_blank(text: str, target: str, links: str, expected: str) -> None:
    assert placed(text, target, links).text == expected


@pytest.mark.parametrize(
    ("text", "target", "links", "expected"),
    [
        (", <x1/>, and <x2/> c", ",, und C", "2-2", ", <x1/>, und <x2/> C"),
        ("(<x1/>) a", "() A", "1-1", "(<x1/>) A"),
        ("(<x1/>) a", "A", "1-0", "<x1/>A"),
    ],
)
def test_single_tags_behind_marks_that_begin_a_text(
    text: str, target: str, links: str, expected: str
) -> None:
    assert placed(text, target, links).text == expected


def test_texts_without_blanks_between_words() -> None:
    """Words are the tokens of the model there."""
    unit = r"[\u4e00-\u9fff]{1,2}|\w+|[^\w\s]"
    found = placed("please open <g1>file</g1> now", "现在打开文件。", "3-0 1-1 2-2", unit)
    assert found.text == "现在打开<g1>文件</g1>。"
    found = placed("请打<g1>开文件</g1><x2/>。", "Open the file.", "1-0 2-1 3-2", r"[\w ]")
    assert found.text == "<g1>Open</g1><x2/> the file."


def test_pairs_over_several_sentences() -> None:
    codes = codes_of("a <g1>b. c d.</g1> e <g2>f</g2>")
    source = without_tags(codes)
    rows = [("a b.", "B A.", "1-0 0-1"), ("c d.", "D C.", "1-0 0-1"), ("e f", "F E", "1-0 0-1")]
    parts = [Part(old, new, alignment_of(old, new, links)) for old, new, links in rows]
    blank = Part(" ", " ")
    found = with_tags(codes, source, [parts[0], blank, parts[1], blank, parts[2]])
    assert found == Placed("<g1>B A. D C.</g1> <g2>F</g2> E")
    copied = with_tags(codes, source, [Part("a b.", "a b."), blank, parts[1], blank, parts[2]])
    assert copied.text == "a <g1>b. D C.</g1> <g2>F</g2> E"


@pytest.mark.parametrize(
    ("text", "target", "problem"),
    [
        ("<g1>a</g1> <x2/>", "<g1>A</g1> <x2/> <x2/>", "<x2/> is there twice"),
        ("<g1>a</g1> <x2/>", "<g1>A", "</g1>, <x2/> missing"),
        ("<g1>a</g1> b", "A</g1> <g1>B", "</g1> is before its <g1>"),
        ("<g1>a <g2>b</g2></g1>", "<g1>A <g2>B</g1></g2>", "</g1> crosses another"),
        ("<g1>a <g2>b</g1> c</g2>", "<g2>A <g1>B</g2> C</g1>", None),
    ],
)
def test_tags_that_cannot_be_written_are_named(text: str, target: str, problem: str | None) -> None:
    assert Segment(text, 1, codes=codes_of(text)).tag_problem(target) == problem


WORDS = ["the", "cat", "sat", "x,", "(a)", "%s", '"q"', "好的", "。", "a.", "1,000", "H2O", " "]


@st.composite
def pieces(draw: st.DrawFn) -> list[InlinePiece]:
    """Pieces of a text, whose pairs may cross."""
    found: list[InlinePiece] = []
    opened: list[str] = []
    for number in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(["text", "text", "open", "close", "alone"]))
        if kind == "text":
            found.append(
                InlinePiece("text", draw(st.sampled_from(WORDS)) + draw(st.sampled_from("  ")))
            )
        elif kind == "close" and opened:
            pair = opened.pop(draw(st.integers(0, len(opened) - 1)))
            found.append(InlinePiece("close", "</b>", pair))
        elif kind == "open":
            opened.append(str(number))
            found.append(InlinePiece("open", "<b>", opened[-1]))
        else:
            found.append(InlinePiece("alone", "<br/>"))
    return found


@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(pieces(), st.lists(st.sampled_from(WORDS), max_size=6), st.integers(0, 2**32 - 1))
def test_any_alignment_has_all_tags_and_the_same_text(
    content: list[InlinePiece], words: list[str], seed: int
) -> None:
    codes = tagged(content)
    source = without_tags(codes)
    target = " ".join(words).strip()
    own, other = ([(place, place + 1) for place in range(len(t))] for t in (source.text, target))
    weights = np.random.default_rng(seed).random((len(other), len(own)))
    for alignment in (TokenAlignment(own, other, weights), None):
        found = with_tags(codes, source, [Part(source.text, target, alignment)])
        assert Segment(codes.text, 1, codes=codes).tag_problem(found.text) is None
        assert TAG.sub("", found.text).replace(" ", "") == target.replace(" ", "")
    assert with_tags(codes, source, [Part(source.text, source.text)]).text == codes.text


@pytest.fixture(scope="module")
def model() -> Translator:
    return model_of("vaswani2017")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.html", HTML.encode()),
        ("a.md", MARKDOWN.encode()),
        ("a.xlf", XLIFF.encode()),
        ("a.tmx", TMX.encode()),
        ("a.srt", SRT.encode()),
        ("a.docx", make_docx(DOCX_RUNS)),
    ],
)
def test_a_text_with_tags_is_translated_as_one_without(
    model: Translator, name: str, data: bytes
) -> None:
    """Its tags were pieces of the text that the model read."""
    document = read_document(data, name, ("en", "de"))
    options = {"beam_size": 1, "max_new_tokens": 6}
    translate_document(model, document, by_sentence=False, **options)
    tagged_segments = [own for own in document.segments if own.codes and own.codes.codes]
    assert tagged_segments
    for segment in tagged_segments:
        assert segment.codes is not None
        assert segment.result is not None
        assert segment.tag_problem(segment.result.text) is None
        text = without_tags(segment.codes).text.strip()
        if not fits_model(model)(text):
            continue
        [best] = model.translate([text], **options)
        bare = TAG.sub("", segment.result.text)
        assert re.sub(r"\s+", "", bare) == re.sub(r"\s+", "", best)
    written = document.to_bytes()
    if name == "a.docx":
        assert any(run.bold for run in docx.Document(io.BytesIO(written)).paragraphs[0].runs)


@pytest.mark.parametrize("written", ["<g1>", "</g1> <x2/>", "<<g1>g1>"])
def test_a_tag_that_the_model_writes_itself_is_removed(written: str) -> None:
    """It was in the file's translation twice: writing the file failed."""
    unit = (
        '<trans-unit id="1"><source>Hi <g id="1">you</g> and <x id="2"/> me</source></trans-unit>'
    )
    file = f'<xliff><file source-language="en"><body>{unit}</body></file></xliff>'
    content, _, document = translated("a.xlf", file, lambda text: f"{text.upper()} {written}")
    assert b'HI <g id="1">YOU</g> AND <x id="2"/> ME</target>' in content
    assert "an unknown piece was removed" in document.segments[0].reasons
    _, counts, _ = translated("a.xlf", file, lambda text: written)
    assert counts.blank == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "foo,  <g1>you12<g2><x3/>Hi </g2>H2OHi</g1>A ",
            [("foo,  you12 Hi H2OHiA", "foo, you12 Hi"), (" ", " ")],
        ),
        ("a <g1>b </g1>x<g2> c</g2>", [("a b x c", "a b c")]),
    ],
)
def test_a_blank_is_in_one_of_two_pairs(text: str, parts: list[tuple[str, str]]) -> None:
    """A pair with the blank behind it ended behind the pair around it."""
    codes = codes_of(text)
    placed = with_tags(codes, without_tags(codes), [Part(*part) for part in parts])
    codes.restored(placed.text)


@pytest.mark.parametrize(
    ("text", "parts", "expected"),
    [
        (". <x1/>a b", [(". ", ". "), ("a b", "A B")], ". <x1/>A B"),
        ("a  <x1/>b", [("a  b", "A  B")], "A  <x1/>B"),
        ("a  <x1/>b", [("a  b", "A B")], "A <x1/>B"),
    ],
)
def test_blanks_before_a_tag_stay_there(
    text: str, parts: list[tuple[str, str]], expected: str
) -> None:
    codes = codes_of(text)
    aligned = [
        Part(old, new, None if old == new else alignment_of(old, new, "0-0 1-1"))
        for old, new in parts
    ]
    assert with_tags(codes, without_tags(codes), aligned).text == expected


def test_the_mark_of_a_menu_is_put_into_no_tag() -> None:
    """It was put before the first letter, that of the tag: writing the file failed."""
    unit = '<trans-unit id="1"><source>Do <g id="1">&amp;Open</g> it</source></trans-unit>'
    file = f'<xliff><file source-language="en"><body>{unit}</body></file></xliff>'
    content, _, _ = translated("a.xlf", file, lambda text: "Laden")
    assert b'<g id="1">&amp;Laden</g></target>' in content


def _size_of_work(function: Callable[[], object]) -> int:
    """The number of calls, of built-in functions too."""
    count = 0

    def add(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(add)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("part", ["<g>a</g> b ", "a <g>b <h>c</h></g> d ", "<x>", "<g></g>"])
def test_the_work_grows_as_the_number_of_tags(part: str) -> None:
    """Of thousands of tags in a paragraph each was compared with all others."""

    def work(count: int) -> int:
        names = {"<g>": "<g{0}>", "</g>": "</g{0}>", "<h>": "<g{1}>", "</h>": "</g{1}>"}
        text = "".join(
            re.sub(
                "</?[gh]>|<x>", lambda m, n=n: names.get(m[0], "<x{0}/>").format(n, n + count), part
            )
            for n in range(1, count + 1)
        )
        codes = codes_of(f"a {text} z")

        def place() -> None:
            source = without_tags(codes)
            words = re.findall(r"\S+ ?", source.text)
            placed = with_tags(codes, source, [Part(word, word.upper()) for word in words])
            codes.restored(placed.text)

        return _size_of_work(place)

    work(1)
    assert work(200) < 2.5 * work(100)


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ("<p>a " + "<b>word " * 201 + "</b>" * 201 + "</p>", "line 1: a text has tags that are"),
        ("<p>" + "<b>a <i>b </b>c </i>" * 51 + "</p>", ""),
    ],
)
def test_hostile_tags_are_refused_or_stay_as_they_are(html: str, problem: str) -> None:
    """They took minutes."""
    if problem:
        with pytest.raises(UserError, match=problem):
            translated("a.html", html, str.upper)
        return
    content, counts, document = translated("a.html", html, str.upper)
    assert content == html.encode()
    assert counts.to_review == 1
    assert "place of tags is uncertain: a" in document.segments[0].reasons[0]


def test_pairs_that_cannot_be_placed_stay_as_they_are() -> None:
    """Their text could not be written: a traceback."""
    html = "<p>b <b><i><i>c. <i></i></b></i>c. </i></p>"
    content, _, document = translated(
        "a.html", html, lambda text: " ".join(text.upper().split()[::-1])
    )
    assert content == html.encode()
    assert "the place of tags is uncertain: b c. c." in document.segments[0].reasons


def test_many_equal_words_without_an_alignment() -> None:
    """The time to compare them grows by more than their square."""
    source = "a, b " * 200
    links = link_words(source, source.upper(), None)
    assert links.linked[:3] == [0, 1, 2]
    assert not any(links.sure)
