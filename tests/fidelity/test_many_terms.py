"""Many terms, marks and pieces in one text: the results are those of a search one by one."""

import random

from heedful.fidelity import with_accelerator
from heedful.fidelity.masking import Keep
from heedful.fidelity.pieces import find_pieces
from heedful.fidelity.terms import Found, Glossary, term_of

WORDS = ["a", "A", "b", "1", "<b>", "-", "ß", "SS", "%s"]


def found_one_by_one(glossary: Glossary, text: str) -> list[Found]:
    """Each term alone, of which the longest one that begins first counts."""
    found, end = list[Found](), 0
    ones = [Glossary([term]).find(text) for term in glossary.terms]
    for one in sorted((f for own in ones for f in own), key=lambda f: (f.start, -f.end)):
        if one.start >= end:
            found.append(one)
            end = one.end
    return found


def test_terms_are_found_as_one_by_one() -> None:
    rng = random.Random(0)
    for _ in range(200):
        forms = {" ".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(4)}
        # Of one term alone an earlier place of itself may hide a later one.
        forms = {form for form in forms if len({*form.split()}) == len(form.split())}
        terms = [term_of(form, form, line, "g") for line, form in enumerate(sorted(forms), 1)]
        glossary = Glossary(terms)
        text = " ".join(rng.choices("abcd", k=12))
        assert glossary.find(text) == found_one_by_one(glossary, text), (forms, text)


def test_no_term_is_longer_than_the_rest_of_a_text() -> None:
    glossary = Glossary([term_of("a", "x", 1, "g"), term_of("a b c", "y", 2, "g")])
    assert [(f.start, f.end) for f in glossary.find("a b c a")] == [(0, 5), (6, 7)]


def test_a_term_is_found_where_each_piece_is_inside_or_outside_of_it() -> None:
    rng, glossary = (
        random.Random(0),
        Glossary([term_of("a", "x", 1, "g"), term_of("b 1", "y", 2, "g")]),
    )
    for _ in range(300):
        text = "".join(rng.choices([*WORDS, " ", " ", "a.txt ", "b 1"], k=10))
        pieces = [(piece.start, piece.end) for piece in find_pieces(text)]
        for one in glossary.find(text):
            assert all(
                end <= one.start or one.end <= start or one.start <= start < end <= one.end
                for start, end in pieces
            )


def test_many_terms_that_begin_equally() -> None:
    terms = [term_of(f"the w{n}", f"das v{n}", n, "g") for n in range(2_000)]
    glossary, numbers = Glossary(terms), range(0, 2_000, 7)
    found = glossary.find(" ".join(f"the w{n}" for n in numbers))
    assert [one.term.line for one in found] == [*numbers]
    lacking = glossary.missing(found, " ".join(f"das v{n}" for n in numbers if n != 14))
    assert [term.line for term in lacking] == [14]


def test_further_accelerators_are_removed() -> None:
    target = "~a b~" + " ~b" * 500
    assert with_accelerator("~a", target) == ("~a b~" + " b" * 500, [])


def test_sentences_in_capitals_begin_with_one_each() -> None:
    text = "AAAAAA BBB CCC. DDD" + " ." * 2_000
    assert Keep().mask(text).text == "Aaaaaa bbb ccc. Ddd" + " ." * 2_000
