"""Charts over training steps: SVG by matplotlib, in the colors of an HTML page.

Matplotlib draws in placeholder colors, which are replaced by CSS variables of the page, so that
one drawing serves the light and the dark theme. An invisible strip over each step has a tooltip
with its values.
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

from heedful.extras import import_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 560, 288
PLOT = (70 / WIDTH, 52 / HEIGHT, 474 / WIDTH, 222 / HEIGHT)  # left, bottom, width, height
MAX_POINTS = 240  # of one curve; more are indistinguishable at this width
MAX_MARKERS = 40  # a curve with at most this many points has a marker at each
SMALLEST = 1e-300  # least value on a log axis; below it are subnormal floats
SOFT, LINE, CARD = "#a00001", "#a00002", "#a00003"
CURVES = tuple(f"#a0000{number}" for number in range(4, 10))
VARIABLES = {SOFT: "soft", LINE: "line", CARD: "card"} | {
    color: f"s{index}" for index, color in enumerate(CURVES)
}
NOT_FOR_A_PAGE = (
    r"<defs>\s*<style.*?</style>\s*</defs>|<metadata>.*?</metadata>|<!--.*?-->",
    r"<defs>\s*<clipPath.*?</clipPath>\s*</defs>|<g id=\"[^\"]*\"/>",
    r"font-size: [^;]*; font-family: [^;]*;",
    r"\n *",
)


def number(value: float) -> str:
    """A number as a short axis label: 12,000 or 0.25 or 3e-05."""
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        points: (step, value) in the order of steps.
        color: index into `CURVES`; it has the same meaning in all charts of a page.
        best_step: the step that is marked by a ring.
    """

    label: str
    points: list[tuple[int, float]]
    color: int = 0
    best_step: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes.

    Attributes:
        show: formats a value.
        log: the y axis is logarithmic.
        from_zero: the y axis starts at 0.
    """

    title: str
    series: list[Series]
    show: Callable[[float], str] = number
    log: bool = False
    from_zero: bool = False

    def drawable(self) -> "Chart":
        """The chart with finite values only (on a log axis positive ones), downsampled."""
        smallest = SMALLEST if self.log else -math.inf
        curves = []
        for curve in self.series:
            points = [(s, y) for s, y in curve.points if math.isfinite(y) and y >= smallest]
            if points:
                curves.append(replace(curve, points=_downsample(points)))
        return replace(self, series=curves)


def draw(chart: Chart) -> str:
    """The `<svg>` element of a chart from `drawable` that has at least one curve."""
    import_matplotlib()
    from matplotlib import style
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # no notes on its cache
    settings = {"svg.fonttype": "none", "svg.hashsalt": "report", "path.simplify": False}
    # Based on matplotlib's defaults, so that a user's matplotlibrc does not change a report.
    with style.context(["default", settings]), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # glyphs missing in matplotlib's font; the page sets another
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        figure.patch.set_visible(False)
        axes = figure.add_axes(PLOT)
        for curve in chart.series:
            color, mark = CURVES[curve.color], "o-" if len(curve.points) <= MAX_MARKERS else "-"
            x, y = zip(*curve.points, strict=True)
            axes.plot(x, y, mark, ms=5, lw=2, color=color, clip_on=False)
            for point in curve.points:
                if point[0] == curve.best_step:
                    axes.plot(*point, "o", ms=9, mfc=CARD, mec=color, mew=2.5, clip_on=False)
        _lay_out_axes(axes, chart)
        tips = _add_tips(axes, chart)
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
    return _for_page(svg.getvalue(), f"{chart.title} by step", tips)


def _lay_out_axes(axes: "Axes", chart: Chart) -> None:
    """Set ranges and ticks; axes start at 0 if the data then still fill most of the chart."""
    from matplotlib import ticker

    steps = [step for curve in chart.series for step, _ in curve.points]
    values = [value for curve in chart.series for _, value in curve.points]
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
    """Add strips with ids "tip-0", "tip-1", ... over the steps, and return their tooltips."""
    lines: dict[int, list[str]] = {}
    for curve in chart.series:
        for step, value in curve.points:
            best = " (best)" if step == curve.best_step else ""
            lines.setdefault(step, []).append(f"{curve.label}: {chart.show(value)}{best}")
    steps = sorted(lines)
    low, high = axes.get_xlim()
    edges = [low, *((a + b) / 2 for a, b in pairwise(steps)), high]
    for index, (left, right) in enumerate(pairwise(edges)):
        strip = axes.axvspan(left, right, facecolor=SOFT, edgecolor="none", clip_on=False, zorder=9)
        strip.set_gid(f"tip-{index}")
    return ["\n".join([f"step {step:,}", *lines[step]]) for step in steps]


def _for_page(svg: str, label: str, tips: list[str]) -> str:
    """The SVG for an HTML page: in its font and colors, with tooltips, without metadata."""
    svg = svg[svg.index("<svg") :]
    for pattern in NOT_FOR_A_PAGE:
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}"'
    svg = re.sub(r"<svg[^>]*>", f"<svg {box}>", svg)
    for index, tip in enumerate(tips):
        group = f'<g id="tip-{index}">'
        svg = svg.replace(group, f'<g class="tip"><title>{escape(tip)}</title>')
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def _downsample(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `MAX_POINTS` points: means over groups of equal size, at each group's last step."""
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
