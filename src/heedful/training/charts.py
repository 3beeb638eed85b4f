"""Charts over training steps, drawn by matplotlib as SVG of a page's colours.

The drawing is made in stand-in colours, each of which becomes a variable of the page's style, so
that one drawing serves light and dark. Over each step lies a strip with a tooltip of its values.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 560, 288
PLOT = (70 / WIDTH, 52 / HEIGHT, 474 / WIDTH, 222 / HEIGHT)  # left, bottom, width, height
MAX_POINTS = 240  # of one curve: more than that cannot be told apart at this width
MARKED = 40  # a curve with up to so many points shows each of them
SMALLEST = 1e-300  # below it floats lose digits, and a range its ticks
SOFT, LINE, CARD, CURVES = "#a00001", "#a00002", "#a00003", ("#a00004", "#a00005")
VARIABLES = {SOFT: "soft", LINE: "line", CARD: "card", CURVES[0]: "s0", CURVES[1]: "s1"}
NOT_FOR_A_PAGE = (
    r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>|<!--.*?-->",
    r"<defs>\s*<clipPath.*?</clipPath>\s*</defs>|<g id=\"[^\"]*\"/>",
    r"font-size: [^;]*; font-family: [^;]*;",
    r"\n *",
)


def number(value: float) -> str:
    """A number short enough for an axis: 12,000 or 0.25 or 3e-05."""
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Series:
    """One curve: (step, value) pairs in order of step. `best_step` is ringed.

    `color` is the number of its colour: one for one meaning on the whole page.
    """

    label: str
    points: list[tuple[int, float]]
    color: int = 0
    best_step: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes.

    `show` writes a value; the y axis begins `from_zero` or is logarithmic (`log`) when told so.
    """

    title: str
    series: list[Series]
    show: Callable[[float], str] = number
    log: bool = False
    from_zero: bool = False

    def drawable(self) -> "Chart":
        """Only finite values (on a log scale positive ones), and no more than can be seen."""
        smallest = SMALLEST if self.log else -math.inf
        kept = []
        for one in self.series:
            points = [(s, y) for s, y in one.points if math.isfinite(y) and y >= smallest]
            if points:
                kept.append(replace(one, points=_thinned(points)))
        return replace(self, series=kept)


def draw(chart: Chart) -> str:
    """The `<svg>` of a chart that is `drawable` and has a curve."""
    from matplotlib import style
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it tells of its cache
    own = {"svg.fonttype": "none", "svg.hashsalt": "report", "path.simplify": False}
    # After matplotlib's defaults: a user's matplotlibrc does not change a report.
    with style.context(["default", own]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its own font lacks, which the page's has
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes(PLOT)
        for one in chart.series:
            color, mark = CURVES[one.color], "o-" if len(one.points) <= MARKED else "-"
            axes.plot(*zip(*one.points, strict=True), mark, ms=5, lw=2, color=color, clip_on=False)
            for point in one.points:
                if point[0] == one.best_step:
                    axes.plot(*point, "o", ms=9, mfc=CARD, mec=color, mew=2.5, clip_on=False)
        _lay_out_axes(axes, chart)
        tips = _add_tips(axes, chart)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
    return _for_page(drawn.getvalue(), f"{chart.title} by step", tips)


def _lay_out_axes(axes: "Axes", chart: Chart) -> None:
    """Ranges and ticks: from step 0 and from a value of 0 where that costs little."""
    from matplotlib import ticker

    steps = [step for one in chart.series for step, _ in one.points]
    values = [value for one in chart.series for _, value in one.points]
    first = 0 if min(steps) < 0.5 * max(steps) else min(steps)
    axes.set_xlim(first, max(*steps, first + 1))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.set_xlabel("step", color=SOFT)
    low, high = min(values), max(values)
    axes.margins(y=0.06)
    if chart.log:
        axes.set_yscale("log")
    elif low < high and (0 <= low < 0.35 * high or chart.from_zero):
        axes.set_ylim(bottom=min(low, 0.0))
    subs = (1, 2, 5) if high < 1000 * low else (1,)
    round_numbers = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=subs) if chart.log else round_numbers)
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: chart.show(value)))
    axes.minorticks_off()
    axes.set_frame_on(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=LINE, linewidth=1, clip_on=False)
    axes.axhline(axes.get_ylim()[0], color=SOFT, linewidth=1, clip_on=False)
    axes.tick_params(length=0, pad=9, labelcolor=SOFT)


def _add_tips(axes: "Axes", chart: Chart) -> list[str]:
    """Strips "tip-0", "tip-1", ... over the steps, each as wide as its share; their texts."""
    at: dict[int, list[str]] = {}
    for one in chart.series:
        for step, value in one.points:
            best = " (best)" if step == one.best_step else ""
            at.setdefault(step, []).append(f"{one.label}: {chart.show(value)}{best}")
    steps = sorted(at)
    low, high = axes.get_xlim()
    edges = [low, *((a + b) / 2 for a, b in pairwise(steps)), high]
    for index, (left, right) in enumerate(pairwise(edges)):
        strip = axes.axvspan(left, right, facecolor=SOFT, edgecolor="none", clip_on=False, zorder=9)
        strip.set_gid(f"tip-{index}")
    return ["\n".join([f"step {step:,}", *at[step]]) for step in steps]


def _for_page(svg: str, label: str, tips: list[str]) -> str:
    """Without what a page does not need, in the page's font and colours, and with tooltips."""
    svg = svg[svg.index("<svg") :]
    for pattern in NOT_FOR_A_PAGE:
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"'
    svg = re.sub(r"<svg[^>]*>", f"<svg {box}>", svg)
    for index, tip in enumerate(tips):
        found = f'<g id="tip-{index}">'
        svg = svg.replace(found, f'<g class="tip"><title>{escape(tip)}</title>')
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MAX_POINTS` points: means of equal groups, each at its group's last step."""
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
