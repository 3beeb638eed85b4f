"""The report: one safe page that loads nothing, shows every section, and draws what happened."""

import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful.errors import UserError
from heedful.training.charts import (
    HEIGHT,
    MAX_POINTS,
    PLOT,
    SMALLEST,
    WIDTH,
    Chart,
    Series,
    draw,
    number,
)
from heedful.training.events import Evaluated, Event, RunFinished, RunStarted, Sample, StepDone
from heedful.training.report import differences, write_report

SECTIONS = ["summary", "scores", "curves", "samples", "recipe", "facts"]
VOID = {"meta", "wbr"}
NASTY = "<script>alert('x')</script>\"&"


class Page(HTMLParser):
    """What a page is made of, checked to be well nested while it is read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # innermost tag, text
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data))

    def found(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(text for tag, text in self.texts if tag != "style")


def curves_of(page: Page) -> list[list[tuple[float, float]]]:
    """Where the points of each curve lie on the paper."""
    found = [
        str(a["d"])
        for a in page.found("path")
        if re.search(r"none; stroke: var\(--s\d", str(a.get("style")))
    ]
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) ([^\s L]+)", d)] for d in found
    ]


def a_run() -> list[Event]:
    events: list[Event] = [RunStarted({}, 2_101_248, 29_000, 1_014, "cpu", 100)]
    for step in range(10, 101, 10):
        events.append(StepDone(step, 1, 5 / step, 4 / step, 1e-5 * step, 1.0, 1e4, 500, step * 1.0))
        if step % 50 == 0:
            samples = [
                Sample("zwölf", "2024-03-12", "2024-03-21"),
                Sample("eins", "2024-01-01", "2024-01-01"),
                Sample(NASTY, NASTY, NASTY + "!"),
            ]
            scores = {"exact_match": step / 200, "bleu": step / 3}
            events.append(
                Evaluated(step, 1, step * 1.0, 3 / step, 7.25, 0.5, scores, samples, step == 50)
            )
    events.append(RunFinished(100, 100.0, "early_stopping", {"bleu": 16.7}))
    return events


def report(tmp_path: Path, events: list[Event], **given: object) -> tuple[str, Page]:
    arguments: dict[str, object] = {
        "title": f"A run {NASTY}",
        "recipe_yaml": f"model:\n  name: vaswani2017  # {NASTY}\n",
        "facts": {"command": f"heedful train {NASTY}", f"name {NASTY}": "1"},
        "final_scores": {
            "bleu": {
                "name": "BLEU",
                "score": 37.512,
                "signature": f"nrefs:1|tok:13a|{NASTY}",
                "precisions": [70.0, 40.0, 30.0, 20.0],
                "brevity_penalty": 0.987,
            },
            "exact_match": 0.5,
        },
    } | given
    out = tmp_path / "new" / "report.html"
    write_report(out, events=events, **arguments)  # type: ignore[arg-type]
    assert list(out.parent.iterdir()) == [out]
    text = out.read_text(encoding="utf-8")
    return text, Page(text)


def sections(page: Page) -> list[str | None]:
    return [a["id"] for tag, a in page.tags if tag in ("header", "section")]


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    text, page = report(tmp_path, a_run())
    assert not re.search(r"https?://|//\w|url\(|@import|@font-face|#a0000\d", text)
    names = {tag for tag, _ in page.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "a"})
    attributes = {name for _, found in page.tags for name in found}
    assert attributes.isdisjoint({"src", "href", "srcset", "data"})
    within = [str(found["xlink:href"]) for _, found in page.tags if "xlink:href" in found]
    assert all(name.startswith("#") for name in within)
    assert not any(name.startswith("on") for name in attributes)
    assert text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in text


def test_all_sections_and_main_figures_are_there(tmp_path: Path) -> None:
    _, page = report(tmp_path, a_run())
    assert sections(page) == SECTIONS
    for expected in (
        "2,101,248",
        "29,000 training and 1,014 held-out examples",
        "stopped early",
        "37.51",
        "50.00%",
        "precisions 70.0 / 40.0 / 30.0 / 20.0, brevity penalty 0.987",
        "vaswani2017",
        "heedful train",
        "after step 50: 1 of 3 equal their reference",
    ):
        assert expected in page.text, expected
    signature = page.text.replace("| ", "|")
    assert "nrefs:1|tok:13a|" in signature


def test_everything_given_is_escaped(tmp_path: Path) -> None:
    text, page = report(tmp_path, a_run())
    assert "<script" not in text
    # Title twice, recipe, a fact's name and value, the signature, the sample's three texts.
    assert page.text.count("<script>alert('x')</script>") == 9


def test_wrong_outputs_are_marked(tmp_path: Path) -> None:
    _, page = report(tmp_path, a_run())
    kinds = [a["class"] for a in page.found("article")]
    assert kinds == ["sample wrong", "sample", "sample wrong"]
    marked = [text for tag, text in page.texts if tag == "mark"]
    assert "".join(marked).endswith("!")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_a_run_that_ended_early_has_a_report_too(tmp_path: Path, count: int) -> None:
    _, page = report(tmp_path, a_run()[:count], recipe_yaml="", facts={}, final_scores={})
    assert sections(page) == SECTIONS
    assert "not finished" in page.text
    assert bool(page.found("svg")) == (count > 1)


def test_non_finite_values_are_left_out_of_the_curves(tmp_path: Path) -> None:
    bad = StepDone(110, 1, math.nan, math.nan, 1e-3, math.inf, 1e4, 1, 1.0)
    worse = Evaluated(110, 1, 1.0, math.inf, math.inf, 0.5, {"bleu": math.nan})
    _, page = report(tmp_path, [*a_run(), bad, worse])
    drawn = [number for curve in curves_of(page) for point in curve for number in point]
    assert drawn
    assert all(map(math.isfinite, drawn))
    only_bad, _ = report(tmp_path, [bad])
    assert "Learning rate" in only_bad
    assert "<b>Loss</b>" not in only_bad


def test_the_curves_are_the_events(tmp_path: Path) -> None:
    _, page = report(tmp_path, a_run())
    training, held_out = curves_of(page)[:2]
    for drawn, kind in ((training, StepDone), (held_out, Evaluated)):
        expected = [(e.step, e.loss) for e in a_run() if isinstance(e, kind)]
        assert len(drawn) == len(expected)
        # Both axes are linear: differences on paper are those of the data, by one factor.
        (x0, y0), (x1, y1) = drawn[0], drawn[-1]
        (s0, v0), (s1, v1) = expected[0], expected[-1]
        for (x, y), (step, value) in zip(drawn, expected, strict=True):
            assert (x - x0) / (x1 - x0) == pytest.approx((step - s0) / (s1 - s0), abs=2e-3)
            assert (y - y0) / (y1 - y0) == pytest.approx((value - v0) / (v1 - v0), abs=5e-3)
    titles = [text for tag, text in page.texts if tag == "title"]
    assert "step 50\ntraining: 0.1\nheld out: 0.06 (best)" in titles
    assert "step 100\nheld out: 50%" in titles


values_of_a_curve = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(values_of_a_curve, st.booleans(), st.booleans())
def test_every_point_lies_on_the_paper(values: list[float], log: bool, from_zero: bool) -> None:
    points = [(step * 7, value) for step, value in enumerate(values, start=1)]
    chart = Chart("t", [Series("s", points)], log=log, from_zero=from_zero).drawable()
    kept = [value for value in values if value >= SMALLEST or not log]
    if not kept:
        assert chart.series == []
        return
    (drawn,) = curves_of(Page(draw(chart)))
    assert len(drawn) == len(kept)
    left, bottom, width, height = PLOT
    for x, y in drawn:
        assert left * WIDTH - 0.1 <= x <= (left + width) * WIDTH + 0.1
        assert (1 - bottom - height) * HEIGHT - 0.1 <= y <= (1 - bottom) * HEIGHT + 0.1
    higher = sorted(zip(kept, drawn, strict=True))
    for (_, (_, lower_y)), (_, (_, upper_y)) in pairwise(higher):
        assert upper_y <= lower_y


def test_long_curves_are_thinned_to_means() -> None:
    values = [(step, float(step % 2)) for step in range(1, 100_001)]
    page = Page(draw(Chart("t", [Series("s", values)]).drawable()))
    (drawn,) = curves_of(page)
    assert MAX_POINTS / 2 < len(drawn) <= MAX_POINTS
    heights = [y for _, y in drawn]
    assert max(heights) - min(heights) < HEIGHT  # finite, and all near one half
    assert any("100k" in text for _, text in page.texts)


def test_numbers_by_hand() -> None:
    shown = [number(v) for v in (0, 0.5, 12.5, 1234.6, 12000, 5e-4, 1.5e-5, -3)]
    assert shown == ["0", "0.5", "12.5", "1,235", "12,000", "5e-4", "1.5e-5", "-3"]


@pytest.mark.parametrize(
    ("reference", "output", "only_reference", "only_output"),
    [
        ("a big dog", "a bad dog", "big", "bad"),
        ("2024", "2034", "2", "3"),
        ("我今天去", "我天去了", "今", "了"),
        ("", "x", "", "x"),
        ("same", "same", "", ""),
    ],
)
def test_differences_by_word_and_by_character(
    reference: str, output: str, only_reference: str, only_output: str
) -> None:
    pieces = differences(reference, output)
    assert ["".join(text for text, differs in part if differs) for part in pieces] == [
        only_reference,
        only_output,
    ]


@given(st.text("ab <&", max_size=12), st.text("ab <&", max_size=12))
def test_marking_loses_no_text(reference: str, output: str) -> None:
    for text, parts in zip((reference, output), differences(reference, output), strict=True):
        assert "".join(part for part, _ in parts) == text
        assert any(differs for _, differs in parts) <= (reference != output)


def test_an_unwritable_place_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file" / "report.html", tmp_path / "folder"):
        with pytest.raises(UserError, match="cannot write"):
            write_report(out, title="t", events=[], recipe_yaml="", facts={}, final_scores={})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
