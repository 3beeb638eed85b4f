"""The report: one page with all sections and charts, without external resources."""

import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context

from heedful.data.reports import Example, FilterCount, FilterReport
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
from heedful.training.report import MAX_LABELS, differences, write_report

pytestmark = pytest.mark.whole
SECTIONS = ["summary", "checks", "scores", "curves", "samples", "recipe", "facts"]
VOID = {"meta", "wbr"}
NASTY = "<script>alert('x')</script>\"&"


class Page(HTMLParser):
    """The content of a page, parsed with a check of nesting."""

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
    """The coordinates of the points of each curve."""
    actual = [
        str(a["d"])
        for a in page.found("path")
        if re.search(r"none; stroke: var\(--s\d", str(a.get("style")))
    ]
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) ([^\s L]+)", d)] for d in actual
    ]


def a_run() -> list[Event]:
    recipe = {
        "task": "translation",
        "training": {"label_smoothing": 0.1, "ema_decay": 0.99},
        "evaluation": {"decode_sentences": 200, "beam_size": 1, "final_beam_size": 5},
        "expect": [{"step": 50, "low": 1.0, "high": 2.0}],
    }
    start = RunStarted(recipe, 2_101_248, 29_000, 1_014, "cpu", 100, unigram_entropy=6.0)
    events: list[Event] = [start]
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
                Evaluated(
                    *(
                        step,
                        1,
                        step,
                        3 / step,
                        math.exp(3 / step),
                        0.5,
                        scores,
                        samples,
                        step == 50,
                    ),
                    smoothed_loss=90 / step,
                )
            )
    scored = "test text, the weights of step 50"
    events.append(RunFinished(100, 100.0, "early_stopping", {"bleu": 16.7}, {}, scored))
    return events


def report(tmp_path: Path, events: list[Event], **options: object) -> tuple[str, Page]:
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
    } | options
    out = tmp_path / "new" / "report.html"
    write_report(out, events=events, **arguments)  # type: ignore[arg-type]
    assert list(out.parent.iterdir()) == [out]
    text = out.read_text(encoding="utf-8")
    return text, Page(text)


def sections(page: Page) -> list[str | None]:
    return [a["id"] for tag, a in page.tags if tag in ("header", "section")]


def test_the_page_has_no_scripts_or_external_resources(tmp_path: Path) -> None:
    text, page = report(tmp_path, a_run())
    assert not re.search(r"https?://|//\w|url\(|@import|@font-face|#a0000\d", text)
    names = {tag for tag, _ in page.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "base", "a"})
    attributes = {name for _, actual in page.tags for name in actual}
    assert attributes.isdisjoint({"src", "href", "srcset", "data"})
    within = [str(actual["xlink:href"]) for _, actual in page.tags if "xlink:href" in actual]
    assert all(name.startswith("#") for name in within)
    assert not any(name.startswith("on") for name in attributes)
    assert text.startswith("<!DOCTYPE html>")
    assert "prefers-color-scheme: dark" in text


def test_the_report_has_all_sections_and_main_figures(tmp_path: Path) -> None:
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
        "Scored: test text, the weights of step 50, decoded with beam size 5.",
        "is another one: smoothed; held-out figures are of the moving average of the weights.",
        "Exact match and BLEU are of the first 200 held-out texts, decoded greedily.",
        "recipe.yaml has every key",
        "step 50: smoothed loss 1.800 is within 1 to 2",
        "the training loss falls: 0.400 at first, 0.040 at last",
        "the held-out loss at step 100, 0.030 nats per target, is below 6.000",
        f"heedful verify {tmp_path / 'new'}",
    ):
        assert expected in page.text, expected
    signature = page.text.replace("| ", "|")
    assert "nrefs:1|tok:13a|" in signature


def test_the_rows_that_filters_dropped_are_in_the_report(tmp_path: Path) -> None:
    example = Example("a.tsv, line 3", {"src": NASTY, "tgt": "zwei"})
    filters = FilterReport([FilterCount("min_words", "2", 1_234, 1, [example])])
    text, page = report(tmp_path, a_run(), filters=filters)
    assert "filters" in sections(page)
    assert NASTY not in text
    for part in ("min_words 2", "1,234", "0.1%", "a.tsv, line 3", "zwei", NASTY):
        assert part in page.text
    assert "filters" not in sections(report(tmp_path, a_run())[1])


def test_everything_given_is_escaped(tmp_path: Path) -> None:
    text, page = report(tmp_path, a_run())
    assert "<script" not in text
    # Title twice, recipe, a fact's name and value, the signature, the sample's three texts.
    assert page.text.count("<script>alert('x')</script>") == 9


def test_wrong_outputs_are_marked(tmp_path: Path) -> None:
    _, page = report(tmp_path, a_run())
    kinds = [a["class"] for a in page.found("article")]
    assert kinds == ["sample wrong", "sample right", "sample wrong"]
    marked = [text for tag, text in page.texts if tag == "mark"]
    assert "".join(marked).endswith("!")


def test_no_step_has_two_losses(tmp_path: Path) -> None:
    """The smoothed loss of step 50 is 1.8, of step 100 0.9; both are compared with bands alone."""
    _, page = report(tmp_path, a_run())
    tiles = {name: text for name, text, _ in tiles_of(page)}
    assert tiles["loss"] == "0.060"
    assert tiles["perplexity"] == "1.062"
    assert "1.8" not in page.text.replace("step 50: smoothed loss 1.800 is within 1 to 2", "")
    cells = [text for tag, text in page.texts if tag == "td"]
    assert {"0.0600", "0.0300"} <= set(cells)
    assert "0.9000" not in cells


def tiles_of(page: Page) -> list[tuple[str, str, str]]:
    """Name, value and note of each tile."""
    actual = [text for tag, text in page.texts if tag in ("b", "span", "small")]
    starts = [i for i, (tag, _) in enumerate(page.texts) if tag == "small"]
    return [tuple(text for _, text in page.texts[i - 2 : i + 1]) for i in starts if actual]  # type: ignore[misc]


def test_samples_without_a_reference_are_not_marked(tmp_path: Path) -> None:
    start = RunStarted({"task": "language_modeling"}, 1, 1, 1, "cpu", 1, unit="tokens")
    samples = [Sample("Tick", "", "-tock"), Sample("", "", NASTY)]
    event = Evaluated(1, 1, 1.0, 1.0, math.e, 0.5, {}, samples, True)
    text, page = report(tmp_path, [start, event])
    assert [a["class"] for a in page.found("article")] == ["sample", "sample"]
    section = text[text.index('id="samples"') : text.index('id="recipe"')]
    assert not re.search("differs|reference|<mark|wrong", section)
    assert "1 training and 1 held-out tokens" in page.text


def test_classification_displays_no_perplexity(tmp_path: Path) -> None:
    samples = [Sample("a text", "no", "yes")]
    scores = {"accuracy": 0.625, "macro_f1": 0.6}
    events: list[Event] = [
        RunStarted({"task": "classification"}, 1, 8, 8, "cpu", 10),
        Evaluated(10, 1, 1.0, 1.0, math.exp(0.9), 0.625, scores, samples, True),
    ]
    tables = {"labels": ("no", "yes"), "confusion": [[1234, 1], [2, 4]], "final_scores": scores}
    text, page = report(tmp_path, events, **tables)
    assert not re.search("perplexity|token accuracy", page.text, re.IGNORECASE)
    assert [t for tag, t in page.texts if tag == "dt"][1:] == ["label", "prediction"]
    cell_texts = [t for tag, t in page.texts if tag == "td"]
    assert (
        cell_texts.index("1,234")
        < cell_texts.index("1")
        < cell_texts.index("2")
        < cell_texts.index("4")
    )
    heads = [t for tag, t in page.texts if tag == "th"]
    assert heads.count("no") == 3
    assert "label / prediction" in heads
    cells = text[text.index('id="labels"') : text.index('id="curves"')]
    for share in (1234 / 1236, 1234 / 1235, 4 / 5, 4 / 6):  # precision and recall of both
        assert f"{share:.2%}" in cells
    assert "#a0000" not in text


@pytest.mark.parametrize("count", [1, 2, 12, 30])
def test_confusion_matrices_of_any_size_fit_the_page(tmp_path: Path, count: int) -> None:
    labels = [f"label-{NASTY} {number}" for number in range(count)]
    table = np.arange(count * count).reshape(count, count)
    text, page = report(tmp_path, a_run(), labels=labels, confusion=table.tolist())
    assert "<script" not in text
    is_shown = count <= MAX_LABELS  # larger ones have only a table of labels
    assert sum("matrix" in str(a["class"]) for a in page.found("figure")) == is_shown
    assert page.text.count(f"label-{NASTY} {count - 1}") == (3 if is_shown else 1)
    shares = [a for a in page.found("td") if "--share" in str(a.get("style"))]
    assert len(shares) == is_shown * count**2


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
    numbers = [number for curve in curves_of(page) for point in curve for number in point]
    assert numbers
    assert all(map(math.isfinite, numbers))
    only_bad, _ = report(tmp_path, [bad])
    assert "Learning rate" in only_bad
    assert "<b>Loss</b>" not in only_bad


def test_the_curves_are_the_events(tmp_path: Path) -> None:
    _, page = report(tmp_path, a_run())
    training, held_out = curves_of(page)[:2]
    for points, kind in ((training, StepDone), (held_out, Evaluated)):
        # Neither has label smoothing, so that they can be compared.
        expected = [
            (e.step, e.nll if isinstance(e, StepDone) else e.loss)
            for e in a_run()
            if isinstance(e, StepDone | Evaluated) and isinstance(e, kind)
        ]
        assert len(points) == len(expected)
        # Both axes are linear: differences on paper are those of the data, by one factor.
        (x0, y0), (x1, y1) = points[0], points[-1]
        (s0, v0), (s1, v1) = expected[0], expected[-1]
        for (x, y), (step, value) in zip(points, expected, strict=True):
            assert (x - x0) / (x1 - x0) == pytest.approx((step - s0) / (s1 - s0), abs=2e-3)
            assert (y - y0) / (y1 - y0) == pytest.approx((value - v0) / (v1 - v0), abs=5e-3)
    titles = [text for tag, text in page.texts if tag == "title"]
    assert "step 50\ntraining: 0.08\nheld out: 0.06 (best)" in titles
    assert "step 100\nheld out: 50%" in titles


values_of_a_curve = st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=40)


@settings(max_examples=25, deadline=None)
@given(values_of_a_curve, st.booleans(), st.booleans())
def test_every_point_is_inside_the_chart(values: list[float], log: bool, from_zero: bool) -> None:
    points = [(step * 7, value) for step, value in enumerate(values, start=1)]
    chart = Chart("t", [Series("s", points)], log=log, from_zero=from_zero).drawable()
    drawn_values = [value for value in values if value >= SMALLEST or not log]
    if not drawn_values:
        assert chart.series == []
        return
    (samples,) = curves_of(Page(draw(chart)))
    assert len(samples) == len(drawn_values)
    left, bottom, width, height = PLOT
    for x, y in samples:
        assert left * WIDTH - 0.1 <= x <= (left + width) * WIDTH + 0.1
        assert (1 - bottom - height) * HEIGHT - 0.1 <= y <= (1 - bottom) * HEIGHT + 0.1
    higher = sorted(zip(drawn_values, samples, strict=True))
    for (_, (_, lower_y)), (_, (_, upper_y)) in pairwise(higher):
        assert upper_y <= lower_y


def test_long_curves_are_downsampled_to_means() -> None:
    values = [(step, float(step % 2)) for step in range(1, 100_001)]
    page = Page(draw(Chart("t", [Series("s", values)]).drawable()))
    (samples,) = curves_of(page)
    assert MAX_POINTS / 2 < len(samples) <= MAX_POINTS
    heights = [y for _, y in samples]
    assert max(heights) - min(heights) < HEIGHT  # finite, and all near one half
    assert any("100k" in text for _, text in page.texts)


def test_numbers_by_hand() -> None:
    labels = [number(v) for v in (0, 0.5, 12.5, 1234.6, 12000, 5e-4, 1.5e-5, -3)]
    assert labels == ["0", "0.5", "12.5", "1,235", "12,000", "5e-4", "1.5e-5", "-3"]


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


def test_a_chart_does_not_depend_on_the_users_settings_of_matplotlib() -> None:
    chart = Chart("t", [Series("s", [(1, 2.0), (2, 1.0)])]).drawable()
    svg = draw(chart)
    with rc_context({"axes.facecolor": "red", "patch.force_edgecolor": True, "lines.marker": "x"}):
        assert draw(chart) == svg


def test_a_chart_does_not_depend_on_the_backend_of_the_environment() -> None:
    """Jupyter sets MPLBACKEND for its children, whose environment may lack that package."""
    backend = "module://no_such_package.backend"
    code = (
        "import os\n"
        "from heedful.insight.plots import new_figure\n"
        "from heedful.training.charts import Chart, Series, draw\n"
        "draw(Chart('t', [Series('s', [(1, 2.0), (2, 1.0)])]).drawable())\n"
        "new_figure(2, 2)[0].savefig(os.devnull, format='png')\n"
        "assert os.environ['MPLBACKEND'] == " + repr(backend)
    )
    environment = os.environ | {"MPLBACKEND": backend}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
