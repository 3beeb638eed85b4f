"""Line charts over training steps as inline SVG, drawn here so that a report needs no script.

Colours come from the page's style through classes (`s0`, `s1`, ...). Hovering over a step shows
its points and, as a native tooltip, their values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 560, 288
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 14, 52
MAX_POINTS = 240  # of one curve: more than that cannot be told apart at this width
SMALLEST = 1e-300  # below it floats lose digits, and a range its ticks
MARKED = 40  # a curve with up to so many points shows each of them


def number(value: float) -> str:
    """A number short enough for an axis: 12,000 or 0.25 or 3e-05."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    if size < 0.001:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if size < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Series:
    """One curve: (step, value) pairs in order of step. `best_step` is ringed.

    `color` is the number of the class that colours it: one for one meaning on the whole page.
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


def line_chart(chart: Chart) -> str:
    """The chart as a `<figure>`: title and legend, then the SVG. Empty when no value is finite."""
    series = [_thinned(_finite(one, positive=chart.log)) for one in chart.series]
    series = [one for one in series if one.points]
    if not series:
        return ""
    frame = _Frame.around(series, log=chart.log, from_zero=chart.from_zero)
    body = [
        *_grid(frame, chart.show),
        *(_curve(one, frame) for one in series),
        *_hover_points(series, frame, chart.show),
    ]
    legend = "".join(f'<span class="key s{one.color}">{escape(one.label)}</span>' for one in series)
    scale = ' <span class="scale">log scale</span>' if chart.log else ""
    title = escape(chart.title)
    return (
        f'<figure class="chart"><figcaption><b>{title}</b>{scale}'
        f'<span class="legend">{legend}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title} by step">'
        f"{''.join(body)}</svg></figure>"
    )


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) within low to high, about `count`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within low to high; powers alone when these are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if len(exponents) <= 4 else (1.0,)
    ticks = [factor * 10.0**exponent for exponent in exponents for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


@dataclass(frozen=True)
class _Frame:
    """The plotted ranges, and how they lie on the drawing."""

    steps: tuple[float, float]
    values: tuple[float, float]
    log: bool

    @classmethod
    def around(cls, series: list[Series], *, log: bool, from_zero: bool) -> "_Frame":
        steps = [step for one in series for step, _ in one.points]
        values = [value for one in series for _, value in one.points]
        last = max(steps)
        # A run is drawn from its start, unless what is known lies far from it (a cut log).
        first = 0 if min(steps) < 0.5 * last else min(steps)
        return cls((first, max(last, first + 1)), _range(values, log, from_zero), log)

    def x(self, step: float) -> float:
        low, high = self.steps
        return round(LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        low, high = self.values
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)


def _range(values: list[float], log: bool, from_zero: bool) -> tuple[float, float]:
    """The values with a margin; from zero where that costs little, and never past it."""
    low, high = min(values), max(values)
    if log:
        return (low / 1.15, high * 1.15)
    if from_zero:
        low = min(low, 0.0)
    if high - low <= max(1e-9 * abs(high), SMALLEST):  # as good as one value
        margin = 0.1 * abs(low) if abs(low) > SMALLEST else 1.0
        return (low - margin, high + margin)
    margin = 0.06 * (high - low)
    bottom = 0.0 if 0 <= low < 0.35 * high else low - margin
    return (bottom, high + margin)


def _grid(frame: _Frame, show: Callable[[float], str]) -> list[str]:
    ticks = log_ticks(*frame.values) if frame.log else []
    if len(ticks) < 2:
        ticks = linear_ticks(*frame.values)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
        parts.append(f'<text class="ty" x="{LEFT - 8}" y="{y}">{escape(show(tick))}</text>')
    for tick in linear_ticks(*frame.steps):
        if tick == int(tick):
            x, label = frame.x(tick), _step_label(tick, frame.steps[1])
            parts.append(f'<path class="tick" d="M{x} {bottom}v5"/>')
            parts.append(f'<text class="tx" x="{x}" y="{bottom + 9}">{label}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    parts.append(f'<text class="tx name" x="{(LEFT + right) / 2:g}" y="{bottom + 31}">step</text>')
    return parts


def _curve(series: Series, frame: _Frame) -> str:
    points = " ".join(f"{frame.x(step):g},{frame.y(value):g}" for step, value in series.points)
    return f'<polyline class="s{series.color}" points="{points}"/>'


def _hover_points(series: list[Series], frame: _Frame, show: Callable[[float], str]) -> list[str]:
    """For each step a strip as wide as its share of the axis, with the points and their tooltip."""
    columns: dict[int, list[tuple[Series, float]]] = {}
    for one in series:
        for step, value in one.points:
            columns.setdefault(step, []).append((one, value))
    steps = sorted(columns)
    edges = [float(LEFT)]
    edges += [(frame.x(a) + frame.x(b)) / 2 for a, b in pairwise(steps)]
    edges.append(float(WIDTH - RIGHT))
    parts = []
    for step, (left, right) in zip(steps, pairwise(edges), strict=True):
        lines, circles = [f"step {step:,}"], ""
        for one, value in columns[step]:
            best = step == one.best_step
            lines.append(f"{one.label}: {show(value)}{' (best)' if best else ''}")
            shown = " on" if len(one.points) <= MARKED else ""
            ring = " best" if best else ""
            centre = f'cx="{frame.x(step):g}" cy="{frame.y(value):g}"'
            circles += (
                f'<circle class="s{one.color}{shown}{ring}" {centre} r="{5 if best else 3}"/>'
            )
        strip = (
            f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        )
        title = escape("\n".join(lines))
        parts.append(f'<g class="p"><rect {strip}/>{circles}<title>{title}</title></g>')
    return parts


def _finite(series: Series, *, positive: bool) -> Series:
    points = [
        (step, value)
        for step, value in series.points
        if math.isfinite(value) and (value >= SMALLEST or not positive)
    ]
    return replace(series, points=points)


def _thinned(series: Series) -> Series:
    """At most `MAX_POINTS` points: means of equal groups, each at its group's last step."""
    count = len(series.points)
    if count <= MAX_POINTS:
        return series
    size = math.ceil(count / MAX_POINTS)
    groups = [series.points[start : start + size] for start in range(0, count, size)]
    means = [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
    return replace(series, points=means)


def _step_label(step: float, largest: float) -> str:
    """A step on an axis up to `largest`: 800, 12k, 1.5M, in the same unit all along."""
    if largest >= 1_000_000:
        return f"{step / 1_000_000:g}M"
    return f"{step / 1000:g}k" if largest >= 10_000 else f"{step:,.0f}"
