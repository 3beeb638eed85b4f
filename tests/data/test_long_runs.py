"""Long runs in files and outputs: the results are those of short ones."""

import random
from typing import Any

import pytest

from heedful.data.decoding import TokenTexts
from heedful.data.inline import InlinePiece
from heedful.data.po_entries import PluralRule
from heedful.data.xml_nodes import NodeReader
from heedful.documents.docx import _with_fields
from heedful.documents.word_links import link_words
from heedful.generation.speculative import PromptLookup
from heedful.generation.token_rules import BannedTexts
from heedful.tasks.text_noise import without_stops


def test_a_text_of_many_lines_is_one() -> None:
    data = b"<r><a>x\n&amp;<!-- c -->\n<b/>y\nz</a></r>"
    [(node, _)] = NodeReader("q", {"a"}).read([data])
    texts = [part if isinstance(part, str) else part.name for part in node.content]
    assert texts == ["x\n&\n", "b", "y\nz"]


@pytest.mark.parametrize("end", ["", ";", " ; "])
def test_a_plural_rule_may_have_blanks(end: str) -> None:
    rule = f"nplurals=2; plural={' ' * 300}(n{' ' * 300}!= 1){' ' * 300}{end}"
    assert PluralRule.of(rule) == PluralRule.of("nplurals=2; plural=(n != 1)")
    assert PluralRule.of(rule + "x y") is None


def field(kind: str) -> InlinePiece:
    return InlinePiece("alone", f'<w:fldChar w:fldCharType="{kind}"/>')


def test_fields_within_fields_are_one_code() -> None:
    pieces = [field("begin")] * 3_000 + [field("end")] * 3_000
    whole = InlinePiece("alone", "".join(piece.raw for piece in pieces))
    assert _with_fields(pieces, "w:") == [whole]
    begin, separate, end = map(field, ("begin", "separate", "end"))
    shown = InlinePiece("text", "1")
    opened = InlinePiece("open", begin.raw * 2 + end.raw + separate.raw, "field 0")
    closed = InlinePiece("close", end.raw, "field 0")
    assert _with_fields([begin, begin, end, separate, shown, end], "w:") == [opened, shown, closed]


def test_a_copy_is_linked_unit_by_unit() -> None:
    text = "a/b-c " * 2_000
    links = link_words(text, text.strip(), None, [1, 7])
    assert links.source == links.target
    assert [*links.linked] == [*range(len(links.source))]
    assert not any(links.sure)
    assert links.weight(range(2, 9), [1, 2, 8, 9]) == 2


@pytest.mark.parametrize("text", ["a", "a . .", "a ..\n", " a... b", "a 1.5.", "a !?… "])
def test_stops_at_the_end_are_left_out(text: str) -> None:
    import re

    match = re.search(r"\s*[.!?…。！？।؟]+\s*\Z", text)
    expected = text if match is None else text[: match.start()]
    assert without_stops(text, "b.")[0] == expected
    assert without_stops("a" + "." * 20_000 + "b", "b.")[0].endswith("b")


def test_a_lookup_that_is_used_again_is_as_a_new_one() -> None:
    rng, lookup, ids = random.Random(0), PromptLookup(), list[int]()
    for _ in range(300):
        ids = ids[: max(0, len(ids) - rng.randint(0, 3))] + rng.choices(
            range(3), k=rng.randint(0, 4)
        )
        rows: list[Any] = [one.next_log_probs(ids, 3) for one in (lookup, PromptLookup())]
        assert [row is None or row.tolist() for row in rows[:1]] == [
            row is None or row.tolist() for row in rows[1:]
        ]


def test_the_end_of_an_output_is_that_of_its_text() -> None:
    texts = TokenTexts([b"", b"a", b"b"], [b"", b" a", b"bb"])
    rng = random.Random(0)
    for _ in range(200):
        ids = rng.choices(range(-1, 4), k=rng.randint(0, 7))
        shown = [token for token in ids if token in (1, 2)]
        whole = b"".join(
            [texts.first[one] for one in shown[:1]] + [texts.later[one] for one in shown[1:]]
        )
        tail = BannedTexts(["abc"], texts)._tail(ids)
        assert (tail is None) == (not shown)
        assert tail is None or (whole.endswith(tail) and len(tail) >= min(3, len(whole)))
