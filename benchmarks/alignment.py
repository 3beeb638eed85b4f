"""Alignment error rate of cross-attention on 50 pairs of the dates task with known links.

The pairs are made from templates with marked fields, so that the source of each character of a
target is known. Digits of the year and of the day are sure links. Digits of the month are possible
links to each character of the month's name, or to the equal digit. Characters between fields have
no link and are not counted.

    python benchmarks/alignment.py runs/dates
"""

import re
import sys
from pathlib import Path

import heedful
from heedful.insight.alignment import Position, align, alignment_error_rate

# y: year, m: month, d: day; a field in braces is the source of that field of the target.
TEMPLATES = (
    "{d} {m} {y}",
    "{m} {d}, {y}",
    "{y}-{m}-{d}",
    "{d}. {m} {y}",
    "{d}/{m}/{y}",
)
DATES = (
    ("2007", "03", "14", "March"),
    ("1985", "12", "25", "December"),
    ("1931", "07", "19", "July"),
    ("2046", "10", "31", "October"),
    ("1968", "05", "27", "May"),
    ("2013", "09", "16", "September"),
    ("1972", "06", "30", "June"),
    ("2035", "04", "12", "April"),
    ("1949", "08", "23", "August"),
    ("1994", "01", "18", "January"),
)
Pair = tuple[str, str, frozenset[tuple[int, int]], frozenset[tuple[int, int]]]


def pairs() -> list[Pair]:
    """Source, target, sure links and possible links of each pair."""
    return [pair(template, *date) for template in TEMPLATES for date in DATES]


def pair(template: str, year: str, month: str, day: str, name: str) -> Pair:
    """One pair; numeric templates have the month's number."""
    is_numeric = "/" in template or template.startswith("{y}-")
    fields = {"y": year, "m": month if is_numeric else name, "d": day}
    source, spans = "", dict[str, range]()
    for part in re.split(r"(\{\w\})", template):
        text = fields[part[1]] if part.startswith("{") else part
        if part.startswith("{"):
            spans[part[1]] = range(len(source), len(source) + len(text))
        source += text
    starts = {"y": 0, "m": 5, "d": 8}
    sure = {(i, starts[key] + k) for key in "yd" for k, i in enumerate(spans[key])}
    of_month = {(i, starts["m"] + k) for i in spans["m"] for k in range(2)}
    if is_numeric:
        sure |= {(i, starts["m"] + k) for k, i in enumerate(spans["m"])}
    return source, f"{year}-{month}-{day}", frozenset(sure), frozenset(sure | of_month)


def error_rates(folder: Path) -> dict[str, float]:
    """The error rate for each choice of layer and of the decoder's position."""
    model = heedful.load_translator(folder)
    examples = pairs()
    sources, targets = model.pair_ids([p[0] for p in examples], [p[1] for p in examples])
    layers = len(model.net.decoder.blocks)
    choices: list[tuple[str, list[int] | None]] = [("all", None)]
    choices += [(str(layer), [layer]) for layer in range(layers)]
    rates = {}
    positions: tuple[Position, ...] = ("output", "input")
    for at in positions:
        for name, layers in choices:
            alignments = align(model, sources, targets, unit="tokens", layers=layers, at=at)
            links = [
                frozenset((s, t) for s, t in alignment.links if example[1][t] != "-")
                for alignment, example in zip(alignments, examples, strict=True)
            ]
            rates[f"{at}, layers {name}"] = alignment_error_rate(
                links, [p[2] for p in examples], [p[3] for p in examples]
            )
    return rates


if __name__ == "__main__":
    for choice, rate in error_rates(Path(sys.argv[1])).items():
        print(f"{choice:<24}{rate:.3f}")
