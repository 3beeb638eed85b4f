"""Translations keep the pieces of their sources, whatever the search returns."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.fidelity.accelerators import accelerator_of, with_accelerator
from heedful.fidelity.keeping import translate_kept
from heedful.fidelity.masking import CHARACTERS
from heedful.fidelity.pieces import counts


class Scripted:
    """A model that returns given hypotheses of one source; {0} is its first mask."""

    def __init__(self, first: str, others: Sequence[str] = (), required: str = "") -> None:
        self.first, self.others, self.required = first, list(others), required
        self.calls: list[dict[str, Any]] = []

    def generate(self, texts: str | list[str], **options: Any) -> Any:
        self.calls.append(options)
        source = texts if isinstance(texts, str) else texts[0]
        masks = [character for character in source if character in CHARACTERS]
        if "require" in options:
            return self.required.format(*masks)
        if "num_return" in options:
            return [other.format(*masks) for other in self.others]
        return [self.first.format(*masks)]


@pytest.mark.parametrize(
    ("model", "text", "found", "num_calls"),
    [
        (Scripted("{0} ist {1}"), "%s ist 5", "first", 1),
        (Scripted("{0} ist", ["{0}", "{1} ist {0}"]), "5 ist %s", "other", 2),
        (Scripted("x", ["y"], "{0}: {1}"), "%s: 5", "required", 3),
        (Scripted("a b", ["c"], "d"), "%s a b 5", "placed", 3),
        (Scripted("{0} {0} {1} a", ["c"], "d"), "%s 5 a", "placed", 3),
    ],
)
def test_a_missing_piece_is_searched_for_and_then_placed(
    model: Scripted, text: str, found: str, num_calls: int
) -> None:
    [kept] = translate_kept(model, ["%s is 5"])
    assert (kept.text, kept.found, len(model.calls)) == (text, found, num_calls)
    assert counts(kept.text) == counts("%s is 5")
    assert bool(kept.reasons) == (found == "placed")


MASKS = [*CHARACTERS[:3], CHARACTERS[32], CHARACTERS[40], CHARACTERS[64], CHARACTERS[70]]


@given(st.lists(st.sampled_from(["a", "b", "c,", *MASKS]), max_size=12).map(" ".join))
def test_whatever_a_search_returns_the_pieces_are_those_of_the_source(output: str) -> None:
    source = "1,5 of 2 <b>files</b> in %s"
    [kept] = translate_kept(Scripted(output, [output], output), [source])
    assert counts(kept.text) == counts(source)
    assert bool(kept.reasons) == (kept.found == "placed")


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("~File", "Datei", "~Datei"),
        ("_File", "_Datei", "_Datei"),
        ("&Open file", "Datei öffnen", "Datei &öffnen"),
        ("Save ~As", "~Speichern ~unter", "~Speichern unter"),
        ("Pass~word", "Kennwort", "Kenn~wort"),
        ("File", "Datei", "Datei"),
        ("A & B", "A & B", "A & B"),
        ("stat_type", "stat_typ", "stat_typ"),
        ("~File", "12", "12"),
    ],
)
def test_one_accelerator_stays_one(source: str, target: str, expected: str) -> None:
    if source == "Pass~word":
        assert accelerator_of(with_accelerator(source, target)) == "~"
    elif source.startswith("&Open"):
        assert with_accelerator(source, target).count("&") == 1
    else:
        assert with_accelerator(source, target) == expected
